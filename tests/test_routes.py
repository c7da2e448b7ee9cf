"""Routes: health, readiness and loading, models, room for requests, and what holds for every answer."""
import contextlib
import gc
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from conftest import ScriptedModel, TestClient, chat, main, parse_sse, running_app, wait_until
from prometheus_client.parser import text_string_to_metric_families

URL = "/v1/chat/completions"
GENERATED_ID = r"[0-9a-f]{32}"


class Loading:
    """A load that says how far it is and waits for the test: each `finish(outcome)` ends one."""

    def __init__(self, *outcomes):
        self.outcomes, self.gate, self.begun = list(outcomes), threading.Semaphore(0), 0

    def __call__(self, settings, report):
        self.begun += 1
        report(main.Progress("weights", 3, 7, "tensors"))
        self.gate.acquire()
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def finish(self):
        self.gate.release()


class Server(httpx2.Client):
    """A server on a real socket whose model is loaded by `load`."""

    def ready(self):
        answer = self.get("/ready")
        return answer.status_code, answer.json()

    def chat(self, **fields):
        return self.post(URL, json=chat(**fields))

    def is_waited_for_by(self, number):
        wait_until(lambda: self.ready()[1]["queued"] == number and self.ready()[1]["status"] != "not_loaded")
        self.get("/v1/sessions")  # answered when every session that has begun is on disk, so when all wait
        self.get("/health")

    def is_ready(self):
        return wait_until(lambda: self.ready()[1]["status"] == "ready")


@pytest.fixture
def serve(settings):
    """`serve(load, **settings)` is a Server; whatever still loads at the end may go on."""
    with contextlib.ExitStack() as stack:

        def make(load, **values):
            base = stack.enter_context(running_app(main.create_app(settings(**values), load=load)))
            if isinstance(load, Loading):
                stack.callback(load.gate.release, 100)
            return stack.enter_context(Server(base_url=base, timeout=60))

        yield make


@pytest.fixture
def crowd():
    """A pool for requests that wait."""
    with ThreadPoolExecutor(12) as pool:
        yield pool


def error_of(answer):
    """Status and code of a refusal that is the whole OpenAI error object."""
    error = answer.json()["error"]
    assert (set(answer.json()), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    assert error["type"] == ("rate_limit_error" if answer.status_code == 429 else
                             "server_error" if answer.status_code >= 500 else "invalid_request_error")
    return answer.status_code, error["code"]


def frames_of(answer):
    return [frame["data"] for frame in parse_sse(answer.text)]


def loaded_failure():
    return main.ApiError(503, "The model could not be loaded: no such model.", "model_load_failed")


# -- health, readiness, loading --------------------------------------------------------------------------------
def test_a_lazy_server_is_ready_to_be_asked_and_loads_nothing_by_itself(serve):
    load = Loading()
    server = serve(load)
    status, said = server.ready()
    assert (status, said["status"], said["progress"], said["error"]) == (200, "not_loaded", None, None)
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/v1/models").status_code == 200 and load.begun == 0


def test_readiness_tells_how_far_the_load_is_and_then_that_it_is_done(serve, crowd):
    load = Loading(ScriptedModel("a", context=4096))
    server = serve(load, model_repo_id="org/name")
    asked = crowd.submit(server.chat)
    server.is_waited_for_by(1)
    wait_until(lambda: server.ready()[1]["progress"]["stage"] == "weights")
    status, said = server.ready()
    assert (status, said["status"], said["model"], said["context_length"]) == (503, "loading", "org/name", None)
    assert said["progress"] == {"stage": "weights", "done": 3, "total": 7, "unit": "tensors"}
    load.finish()
    assert asked.result().status_code == 200
    status, said = server.ready()
    assert (status, said["status"], said["progress"], said["context_length"]) == (200, "ready", None, 4096)


def test_a_step_that_takes_too_long_turns_readiness_off_until_it_ends(serve, crowd):
    model = ScriptedModel("a", "b", gated=True)
    server = serve(lambda *_: model, step_timeout_seconds=0.05)
    asked = crowd.submit(server.chat)
    wait_until(lambda: server.ready()[0] == 503 and server.ready()[1]["status"] == "stuck")
    for _ in range(3):
        model.gate.release()
    assert asked.result().status_code == 200
    wait_until(lambda: server.ready()[1]["status"] == "ready")


def test_health_answers_and_requests_are_checked_while_a_load_blocks_its_thread(serve, crowd):
    load = Loading(ScriptedModel("a"))
    server = serve(load)
    asked = crowd.submit(server.chat)
    server.is_waited_for_by(1)
    assert server.get("/health").status_code == 200
    assert error_of(server.chat(functions=[1])) == (400, "unsupported_parameter")
    assert not asked.done()
    load.finish()
    assert asked.result().status_code == 200


def test_collections_of_garbage_pause_for_the_load_and_go_on_after_it(serve, crowd):
    load = Loading(loaded_failure(), ScriptedModel("a"))
    server = serve(load)
    for expected in (503, 200):
        asked = crowd.submit(server.chat)
        server.is_waited_for_by(1)
        assert not gc.isenabled()
        load.finish()
        assert asked.result().status_code == expected and gc.isenabled()


def test_ten_first_requests_load_once(serve, crowd):
    load = Loading(ScriptedModel("a"))
    server = serve(load)
    asked = [crowd.submit(server.chat, stream=n % 2 == 0) for n in range(10)]
    server.is_waited_for_by(10)
    load.finish()
    assert [a.result().status_code for a in asked] == [200] * 10
    assert load.begun == 1
    assert all(frames_of(a.result())[-1] == "[DONE]" for a in asked[::2])


def test_an_eager_server_loads_before_anybody_asks_and_serves_meanwhile(serve):
    load = Loading(ScriptedModel("a"))
    server = serve(load, eager_load_model=True)
    wait_until(lambda: load.begun == 1)
    assert server.ready()[1]["status"] == "loading" and server.get("/health").status_code == 200
    load.finish()
    server.is_ready()
    assert server.chat().status_code == 200 and load.begun == 1


def test_a_request_that_waits_too_long_for_the_load_is_told_to_come_back(serve):
    load = Loading(ScriptedModel("a"))
    server = serve(load, model_load_wait_seconds=0.05)
    answer = server.chat()
    assert error_of(answer) == (503, "model_not_ready") and int(answer.headers["retry-after"]) > 0
    load.finish()
    server.is_ready()
    assert server.chat().status_code == 200 and load.begun == 1


def test_a_stream_that_waits_too_long_for_the_load_ends_with_an_error_frame(serve):
    answer = serve(Loading(ScriptedModel("a")), model_load_wait_seconds=0.05).chat(stream=True)
    error, done = frames_of(answer)
    assert answer.status_code == 200 and done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "model_not_ready"


def test_a_stream_that_began_during_the_load_gets_keep_alives_meanwhile(serve):
    load = Loading(ScriptedModel("a"))
    server = serve(load, keepalive_seconds=0.02)
    with server.stream("POST", URL, json=chat(stream=True)) as answer:
        assert answer.status_code == 200 and answer.headers["x-session-id"]
        parts = answer.iter_raw()
        assert next(parts).startswith(b": ping\n")
        load.finish()
        assert b"".join(parts).endswith(b"[DONE]\nid: " + answer.headers["x-session-id"].encode() + b":3\n\n")


@pytest.mark.parametrize("failure", [loaded_failure(), RuntimeError("secret/path"), MemoryError()], ids=repr)
def test_a_failed_load_is_told_with_its_cause_and_the_next_request_tries_again(serve, crowd, failure):
    load = Loading(failure, ScriptedModel("a"))
    server = serve(load)
    asked = crowd.submit(server.chat)
    load.finish()
    assert error_of(asked.result()) == (503, "model_load_failed")
    assert "secret" not in asked.result().text
    status, said = server.ready()
    assert (status, said["status"]) == (503, "failed") and said["error"] == asked.result().json()["error"]
    load.finish()
    assert server.chat().status_code == 200
    assert server.ready()[1]["status"] == "ready" and load.begun == 2


def test_a_failed_load_is_an_error_frame_to_a_stream_that_had_begun(serve):
    load = Loading(loaded_failure())
    load.finish()
    error, done = frames_of(serve(load).chat(stream=True))
    assert json.loads(error) == loaded_failure().body and done == "[DONE]"


def test_everybody_who_waited_for_a_failed_load_is_told(serve, crowd):
    load = Loading(loaded_failure())
    server = serve(load)
    asked = [crowd.submit(server.chat) for _ in range(5)]
    server.is_waited_for_by(5)
    load.finish()
    assert {error_of(a.result()) for a in asked} == {(503, "model_load_failed")} and load.begun == 1


def test_a_request_during_the_load_that_does_not_fit_is_refused_when_the_model_is_there(serve, crowd):
    load = Loading(ScriptedModel("a", context=4))
    server = serve(load)
    whole, stream = crowd.submit(server.chat, max_tokens=9), crowd.submit(server.chat, max_tokens=9, stream=True)
    server.is_waited_for_by(2)
    load.finish()
    assert error_of(whole.result()) == (400, "context_length_exceeded")
    error, done = frames_of(stream.result())
    assert json.loads(error)["error"]["code"] == "context_length_exceeded" and done == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields,code", [
    ({"max_tokens": 9}, "context_length_exceeded"), ({"functions": [1]}, "unsupported_parameter")])
def test_once_the_model_is_there_every_refusal_precedes_the_status_line(client, stream, fields, code):
    served = client(ScriptedModel("a", context=4))
    assert served.post(URL, json=chat()).status_code == 200
    answer = served.post(URL, json=chat(stream=stream, **fields))
    assert error_of(answer) == (400, code) and "x-session-id" not in answer.headers


def test_a_refused_request_leaves_no_session_and_its_name_is_free(client):
    served = client(ScriptedModel("a", context=4))
    served.post(URL, json=chat())
    before = served.get("/v1/sessions").json()["data"]
    assert error_of(served.post(URL, json=chat(max_tokens=9, stream=True, session_id="mine")))[0] == 400
    assert served.get("/v1/sessions").json()["data"] == before
    assert served.post(URL, json=chat(session_id="mine")).status_code == 200


# -- models ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("written,served_id", [("org/name", "org/name"), ("demo", "demo"), ("a/b@rev", "a/b@rev")])
def test_the_one_model_is_listed_and_found_by_its_id_slashes_and_all(client, written, served_id):
    served = client(ScriptedModel("a"), model_repo_id=written)
    listed = served.get("/v1/models").json()
    assert listed["object"] == "list" and len(listed["data"]) == 1
    model = served.get(f"/v1/models/{served_id}").json()
    assert model == listed["data"][0]
    assert (model["id"], model["object"]) == (served_id, "model")
    assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)


def test_an_id_whose_slash_is_escaped_is_found_too(client):
    served = client(ScriptedModel("a"), model_repo_id="org/name")
    assert served.get("/v1/models/org%2Fname").json()["id"] == "org/name"


@pytest.mark.parametrize("name", ["gpt-5", "org", "org/name/", "org/other", "name"])
def test_a_model_that_is_not_here_is_not_found(client, name):
    answer = client(ScriptedModel("a"), model_repo_id="org/name").get(f"/v1/models/{name}")
    assert error_of(answer) == (404, "model_not_found") and answer.json()["error"]["param"] == "model"


def test_a_model_says_how_long_its_context_is_once_it_is_there(client):
    served = client(ScriptedModel("a", context=99))
    assert served.get("/v1/models").json()["data"][0]["max_model_len"] is None
    served.post(URL, json=chat())
    assert served.get("/v1/models").json()["data"][0]["max_model_len"] == 99


# -- what holds for every answer -------------------------------------------------------------------------------
class Broken(ScriptedModel):
    """Once `broken`, it raises where the server does not expect it."""

    broken = False

    def __init__(self, *words):
        super().__init__(*words)

    @property
    def context(self):
        if self.broken:
            raise RuntimeError("secret/path")
        return 4096

    @context.setter
    def context(self, _):
        pass

    def prepare(self, chat):
        if chat.messages[-1].content == "crash":
            raise RuntimeError("secret/path")
        return super().prepare(chat)


BIG = b" " * 2**20
ANSWERS = {
    200: ("GET", "/health", {}), 404: ("GET", "/nowhere", {}), 405: ("DELETE", URL, {}),
    400: ("POST", URL, {"json": {}}), 413: ("POST", URL, {"content": BIG}), 415: ("POST", URL, {"content": b"x"}),
    500: ("POST", URL, {"json": chat("crash")}), 501: ("GET", "/v1/models", {}),
}


@pytest.fixture
def broken(client):
    """A client of a server that answers everything there is."""
    model = Broken("a")
    served = client(model, max_body_mib=0.5)
    assert served.post(URL, json=chat()).status_code == 200
    model.broken = True
    return served


@pytest.mark.parametrize("status", ANSWERS)
@pytest.mark.parametrize("given,expected", [
    ("my-id:1.a_B", "my-id:1.a_B"), ("x" * 128, "x" * 128), (None, GENERATED_ID), ("", GENERATED_ID),
    ("x" * 129, GENERATED_ID), ("a b", GENERATED_ID), ("a/b", GENERATED_ID), ("é".encode(), GENERATED_ID)],
    ids=["fine", "longest", "none", "empty", "too long", "blank", "slash", "letters"])
def test_every_answer_carries_the_clients_request_id_or_a_new_one(broken, status, given, expected):
    method, path, fields = ANSWERS[status]
    headers = {} if given is None else {"x-request-id": given}
    answer = broken.request(method, path, headers=headers, **fields)
    assert answer.status_code == min(status, 500)
    assert re.fullmatch(expected, answer.headers["x-request-id"])


def test_a_stream_carries_the_request_id_too(client):
    answer = client(ScriptedModel("a")).post(URL, json=chat(stream=True), headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("method,path", [
    ("GET", "/"), ("GET", "/docs"), ("POST", "/v1/completions"), ("GET", "/v1/models/"), ("POST", f"{URL}/"),
    ("GET", "/v1/sessions/x/y"), ("GET", "//health"), ("GET", "/health/"), ("GET", "/%00"), ("GET", "/%ff%0d%0aa")])
def test_an_unknown_route_is_not_found_in_openais_words(client, method, path):
    answer = client(ScriptedModel("a")).request(method, path)
    assert error_of(answer) in [(404, "unknown_route"), (404, "model_not_found")]


@pytest.mark.parametrize("method,path", [
    ("GET", URL), ("PUT", URL), ("DELETE", URL), ("OPTIONS", URL), ("POST", "/health"), ("POST", "/v1/models"),
    ("GET", "/v1/cancel/x"), ("DELETE", "/v1/sessions/x"), ("BREW", "/ready")])
def test_a_method_that_a_route_does_not_take_is_refused_in_openais_words(client, method, path):
    answer = client(ScriptedModel("a")).request(method, path)
    assert error_of(answer) == (405, "method_not_allowed") and answer.headers["allow"]


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["json", "stream"])
def test_a_crash_on_the_way_to_the_model_is_a_500_without_its_words(client, fields, caplog):
    served = client(Broken("a"))
    served.post(URL, json=chat())
    answer = served.post(URL, json=chat("crash", **fields))
    assert error_of(answer) == (500, "internal_error")
    assert not any(word in answer.text for word in ("secret", "Traceback", "RuntimeError", ".py"))
    assert "secret/path" in caplog.text
    assert served.post(URL, json=chat()).status_code == 200


def test_a_crash_before_the_model_was_there_is_an_error_frame_to_a_stream(client):
    error, done = frames_of(client(Broken("a")).post(URL, json=chat("crash", stream=True)))
    assert json.loads(error)["error"]["code"] == "internal_error" and done == "[DONE]"


def test_a_crash_in_a_route_is_a_500_without_its_words_and_the_server_goes_on(broken, caplog):
    answer = broken.get("/v1/models")
    assert error_of(answer) == (500, "internal_error")
    assert not any(word in answer.text for word in ("secret", "Traceback", "RuntimeError", ".py"))
    assert "secret/path" in caplog.text and answer.headers["x-request-id"] in caplog.text
    assert broken.get("/health").status_code == 200


# -- room ------------------------------------------------------------------------------------------------------
def test_beyond_the_places_and_the_queue_a_request_is_told_to_come_back(serve):
    model = ScriptedModel("a", gated=True)
    server = serve(lambda *_: model, max_concurrent_requests=1, max_queued_requests=1)
    with (server.stream("POST", URL, json=chat(stream=True)) as first,
          server.stream("POST", URL, json=chat(stream=True)) as second):
        wait_until(lambda: (server.ready()[1]["running"], server.ready()[1]["queued"]) == (1, 1))
        for stream in (True, False):
            answer = server.chat(stream=stream)
            assert error_of(answer) == (429, "queue_full") and int(answer.headers["retry-after"]) > 0
        model.gate.release(100)
        assert all("[DONE]" in answer.read().decode() for answer in (first, second))
    assert server.chat().status_code == 200


def test_without_a_queue_what_finds_no_place_is_refused(serve):
    model = ScriptedModel("a", gated=True)
    server = serve(lambda *_: model, max_concurrent_requests=1, max_queued_requests=0)
    with server.stream("POST", URL, json=chat(stream=True)) as first:
        assert error_of(server.chat()) == (429, "queue_full")
        model.gate.release(100)
        first.read()
    assert server.chat().status_code == 200


def test_the_requests_of_a_load_count_against_the_queue(serve, crowd):
    load = Loading(ScriptedModel("a"))
    server = serve(load, max_concurrent_requests=1, max_queued_requests=2)
    asked = [crowd.submit(server.chat) for _ in range(3)]
    server.is_waited_for_by(3)
    assert error_of(server.chat()) == (429, "queue_full")
    load.finish()
    assert [a.result().status_code for a in asked] == [200] * 3


def test_two_apps_in_one_process_share_nothing(settings, tmp_path):
    first = main.create_app(settings(model_repo_id="one"), load=lambda *_: ScriptedModel("1"))
    second = main.create_app(settings(model_repo_id="two", persist_sessions=False), load=lambda *_: ScriptedModel("2"))
    with TestClient(first) as one, TestClient(second) as two:
        said = [c.post(URL, json=chat(session_id="same")).json() for c in (one, two)]
    assert [(s["model"], s["choices"][0]["message"]["content"]) for s in said] == [("one", "1"), ("two", "2")]


# -- metrics ---------------------------------------------------------------------------------------------------
def measured(http):
    """What `/metrics` says, by name and labels."""
    answer = http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {sample.name.removeprefix("inference_") + "".join(map(str, sample.labels.values())): sample.value
            for family in text_string_to_metric_families(answer.text) for sample in family.samples}


def test_metrics_count_what_was_asked_and_answered(client):
    http = client(ScriptedModel("a", "b", "c"))
    http.post(URL, json=chat("one two"))
    http.post(URL, json=chat("one", stream=True)).read()
    http.post(URL, json={"messages": 7})
    http.get("/v1/sessions/unknown")
    http.get("/no/such/route")
    told = measured(http)
    assert {name: told[name] for name in (
        f"requests_total{URL}200", f"requests_total{URL}400", "requests_total/v1/sessions/{ref}404",
        "requests_totalnone404", "generations_totalcompleted", "prompt_tokens_total", "generated_tokens_total",
        "first_token_seconds_count", "token_seconds_count", "model_ready", "running", "queued", "readers",
        "preemptions_total", "cached_prompt_tokens_total")} == {
        f"requests_total{URL}200": 2, f"requests_total{URL}400": 1, "requests_total/v1/sessions/{ref}404": 1,
        "requests_totalnone404": 1, "generations_totalcompleted": 2, "prompt_tokens_total": 3,
        "generated_tokens_total": 8, "first_token_seconds_count": 2, "token_seconds_count": 2, "model_ready": 1,
        "running": 0, "queued": 0, "readers": 0, "preemptions_total": 0, "cached_prompt_tokens_total": 0}
    assert told["step_seconds_count"] >= 4


def test_metrics_tell_what_goes_on(live):
    model = ScriptedModel("a", gated=True)
    with httpx2.Client(base_url=live(model), timeout=30) as http:
        before = measured(http)
        with http.stream("POST", URL, json=chat(stream=True, session_id="s")):
            wait_until(lambda: measured(http)["running"] == 1)
            told = measured(http)
            http.post("/v1/cancel/s")
            model.gate.release()
        after = wait_until(lambda: (now := measured(http))["readers"] == 0 and now)
    assert (before["sessions"], told["sessions"], told["readers"]) == (0, 1, 1)
    assert (after["running"], after["generations_totalcancelled"]) == (0, 1)


def test_two_servers_count_apart(settings):
    for _ in range(2):
        with TestClient(main.create_app(settings(), load=lambda *_: ScriptedModel("a"))) as http:
            http.post(URL, json=chat())
            assert measured(http)["generations_totalcompleted"] == 1
