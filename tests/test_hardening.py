"""What attackers and bad luck try beside what the rooms' own tests show: sizes, depths, crowds that leave, faults."""
import base64
import contextlib
import inspect
import json
import logging
import os
import pickle
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import psutil
import pytest
import tiny
import torch
from conftest import (
    SCRIPTED_SERVER,
    ScriptedModel,
    TestClient,
    chat,
    held,
    main,
    parse_sse,
    running_app,
    text_of,
    wait_until,
    wait_until_no_more,
)

CHAT, RESPONSES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"
PLAIN = {CHAT: chat(), RESPONSES: {"input": "hi"}, COUNT: {"input": "hi"}}
MIB = 2**20
every_path = pytest.mark.parametrize("path", PLAIN)


def refused(answer, *statuses):
    """The code of a refusal that is OpenAI's error object, in a short sentence."""
    error = answer.json()["error"]
    assert answer.status_code in (statuses or (400,)), answer.text
    assert set(error) == {"message", "type", "param", "code"} and error["message"].endswith(".")
    assert len(answer.text) < 2000
    return error["code"]


def post(http, path, body, **fields):
    content = body if isinstance(body, bytes) else json.dumps(body | fields).encode()
    return http.post(path, content=content, headers={"content-type": "application/json"})


def with_raw(path, name, value):
    """A body with one more field whose value is written as it stands."""
    return json.dumps(PLAIN[path]).encode()[:-1] + f', "{name}": {value}}}'.encode()


@pytest.fixture
def online(live):
    """`online(model, **settings)` is a client over real sockets."""
    with contextlib.ExitStack() as stack:
        yield lambda model, **values: stack.enter_context(httpx2.Client(base_url=live(model, **values), timeout=60))


@pytest.fixture(scope="module")
def real(tmp_path_factory, one_thread):
    """A server of a tiny real model, and the model."""
    model = tiny.model("llama")
    database = tmp_path_factory.mktemp("real") / "sessions.db"
    chosen = main.Settings(sessions_db_path=database, max_tokens=4, max_body_mib=32)
    with TestClient(main.create_app(chosen, load=lambda *_: model), raise_server_exceptions=False) as http:
        assert http.post(CHAT, json=chat()).status_code == 200
        yield http, model


# -- prompts, sampling, forms ----------------------------------------------------------------------------------
SIZES = {
    "n": [10**9, 2**63], "best_of": [10**9], "max_tokens": [2**63, 10**30], "max_output_tokens": [2**63],
    "top_logprobs": [10**6], "stop": [["x"] * 10_000, "x" * 10**6], "seed": [2**70, -1], "frequency_penalty": [1e308],
    "presence_penalty": [-1e308], "logit_bias": [{str(n): 1 for n in range(10**5)}, {"a": 1}, {"-1": 1}],
    "stop_token_ids": [[1] * 10**5], "min_tokens": [2**63], "metadata": [{str(n): "x" for n in range(10**5)}]}


@every_path
def test_s16_a_hostile_size_is_refused_and_no_answer_under_way_is_disturbed(online, path):
    model = ScriptedModel("one", " two", gated=True)
    http = online(model)
    with http.stream("POST", CHAT, json=chat(stream=True)) as answer:
        for name, values in SIZES.items():
            for value in values:
                code = refused(post(http, path, PLAIN[path], **{name: value}))
                assert code in ("invalid_value", "unsupported_parameter")
        model.gate.release(9)
        assert text_of(parse_sse(answer.read().decode())) == "one two"


def test_s16_an_id_beyond_the_vocabulary_is_refused(real):
    for path in (CHAT, RESPONSES):
        for fields in ({"logit_bias": {"999999999": 1}}, {"stop_token_ids": [tiny.VOCABULARY]}):
            assert refused(post(real[0], path, PLAIN[path], **fields)) == "invalid_value"


NUMBERS = {"float": ["NaN", "Infinity", "-Infinity", "1e999", "true", '"0.5"'],
           "int": ["true", '"16"', "1.5", "1e999", "NaN"]}
FIELDS = {"float": ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"],
          "int": ["max_output_tokens", "max_tool_calls", "top_k", "seed", "top_logprobs", "min_tokens"]}


@pytest.mark.parametrize("kind,name", [(kind, name) for kind, names in FIELDS.items() for name in names])
def test_s17_what_is_nearly_a_number_is_none_on_responses_either(client, kind, name):
    http = client(ScriptedModel("a"))
    for value in NUMBERS[kind]:
        for path in (RESPONSES, COUNT):
            answer = post(http, path, with_raw(path, name, value))
            assert refused(answer) == "invalid_value" and answer.json()["error"]["param"] == name


@every_path
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 10])
def test_s18_a_text_of_megabytes_is_refused_untokenised_and_before_the_status_line(
        real, path, stream, size, monkeypatch):
    http, model = real
    monkeypatch.setattr(model, "_render", lambda *_: pytest.fail("it is being tokenised"))
    text = "word " * (size * MIB // 5)
    body = chat(text) if path == CHAT else {"input": text}
    assert refused(post(http, path, body, stream=stream)) == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_s18_what_is_too_long_only_in_its_template_is_refused_before_the_status_line(real, stream):
    http, model = real
    many = [{"role": "user", "content": "a"}] * (model.context // 4)
    assert refused(http.post(CHAT, json={"messages": many, "stream": stream})) == "context_length_exceeded"


def deep(depth, opens, closes):
    return opens * depth + "1" + closes * depth


DEEP = [deep(100_000, "[", "]"), deep(100_000, '{"a":', "}"), deep(500, '{"a":', "}"), deep(150, '[{"a":', "}]")]


@every_path
def test_s19_depth_is_refused_wherever_it_stands(client, path):
    http = client(ScriptedModel("a"))
    for value in DEEP:
        function = f'"name": "f", "parameters": {value}'
        spots = {"tools": f'[{{"type": "function", {function}, "function": {{{function}}}}}]',
                 "metadata": f'{{"a": {value}}}',
                 "structured_outputs": f'{{"json": {value}}}', "messages" if path == CHAT else "input": f"[{value}]"}
        for name, spot in spots.items():
            content = json.dumps({**PLAIN[path], name: 0}).replace(f'"{name}": 0', f'"{name}": {spot}').encode()
            assert refused(post(http, path, content)) in ("invalid_value", "invalid_json", "body_too_complex")


@every_path
def test_s19_keys_by_the_hundred_thousand_and_numbers_of_thousands_of_digits_are_refused(client, path):
    http = client(ScriptedModel("a"))
    keys = "{" + ",".join(f'"{n}": "x"' for n in range(400_000)) + "}"
    digits = "9" * 5000
    for name, value in (("metadata", keys), ("seed", digits), ("temperature", digits), ("metadata", f"[{digits}]")):
        code = refused(post(http, path, with_raw(path, name, value)), 400, 413)
        assert code in ("invalid_value", "invalid_json", "body_too_large")


def test_s19_of_a_name_that_stands_twice_the_last_counts_and_only_that(client):
    http = client(model := ScriptedModel("a", "b"))
    assert refused(post(http, CHAT, with_raw(CHAT, "stream", "false, \"stream\": 7"))) == "invalid_value"
    answer = post(http, CHAT, with_raw(CHAT, "messages", '[{"role": "user", "content": "second"}]'))
    assert answer.status_code == 200 and model.asked == ["second"]


FORMS = [{"regex": "((a+)+)+$"}, {"regex": "(x{1,9999}){9999}"}, {"json": {"type": "string", "pattern": "((a+)+)+$"}},
         {"json": {"type": "string", "minLength": 10**9}}, {"json": {"enum": [str(n) for n in range(100_000)]}},
         {"choice": [str(n) for n in range(1000)]}, {"json": {"$ref": "#"}}, {"json": {"$ref": "file:///etc/passwd"}},
         {"json": {"$ref": "http://127.0.0.1:{port}/x"}}, {"grammar": "start: start start"},
         {"json": {"$schema": "http://127.0.0.1:{port}/x", "type": "string"}}, {"grammar": "%import x.x\nstart: x"}]


@pytest.mark.parametrize("wanted", FORMS, ids=lambda form: str(form)[:40])
def test_s20_a_hostile_form_is_refused_or_followed_and_nothing_is_fetched_or_opened_for_it(real, wanted, monkeypatch):
    http, before = real[0], psutil.Process().memory_info().rss
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        wanted = json.loads(json.dumps(wanted).replace("{port}", str(listener.getsockname()[1])))
        monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("a file is opened"))
        answer = http.post(CHAT, json=chat(structured_outputs=wanted))
        monkeypatch.undo()
        assert answer.status_code in (200, 400) and "root:" not in answer.text, answer.text
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert psutil.Process().memory_info().rss - before < 500 * MIB
    assert http.post(CHAT, json=chat()).status_code == 200


class Marker:
    """Leaves a mark where it is unpickled."""

    left: list[str] = []

    def __reduce__(self):
        return self.left.append, ("read",)


@every_path
@pytest.mark.parametrize("name", ["prompt_embeds", "input_embeds", "image_embeds"])
def test_s22_tensors_of_a_client_are_refused_by_name_and_never_read(client, path, name):
    blob = base64.b64encode(pickle.dumps(Marker())).decode()
    http = client(ScriptedModel("a"))
    for value in (blob, [blob], {"data": blob}):
        assert refused(post(http, path, PLAIN[path], **{name: value})) == "unsupported_parameter"
    assert not Marker.left


def test_s24_how_a_prompt_was_computed_for_one_key_is_no_help_to_another(one_thread, settings):
    app = main.create_app(settings(api_key="one,two", max_tokens=2), load=lambda *_: tiny.model("llama"))
    with TestClient(app) as http:
        cached = [http.post(CHAT, json=chat("the cat and the dog " * 5), headers={"x-api-key": key}).json()["usage"][
            "prompt_tokens_details"]["cached_tokens"] for key in ("one", "one", "two", "two")]
    assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0


# -- models ----------------------------------------------------------------------------------------------------
OTHERS = ["../../etc", "/etc/passwd", "evil/repo", "evil/repo@main", "", "x" * 10_000, "demo", "x:y.gguf", "file:///x"]


@pytest.mark.parametrize("strict", [False, True])
def test_s28_no_request_makes_the_server_load_another_model(settings, strict):
    loads = []

    def load(chosen, report):
        loads.append(chosen.model_repo_id)
        return ScriptedModel("a")

    with TestClient(main.create_app(settings(strict_model=strict, model_repo_id="org/name"), load=load)) as http:
        for name in OTHERS:
            for path in (CHAT, RESPONSES):
                answer = post(http, path, PLAIN[path] | {"model": name})
                if strict:
                    assert refused(answer, 404) == "model_not_found"
                else:
                    assert answer.json()["model"] == "org/name"
            if name:
                assert refused(http.get(f"/v1/models/{name}"), 404) in ("model_not_found", "unknown_route")
    assert loads == ([] if strict else ["org/name"])


# -- files -----------------------------------------------------------------------------------------------------
def test_s40_no_folder_is_served_and_ranges_mean_nothing(client):
    source = inspect.getsource(main)
    assert not [word for word in ("StaticFiles", "FileResponse", ".mount(", "Mount(") if word in source]
    ranges = {"range": "bytes=" + "0-," * 9_000}
    assert client(ScriptedModel("a")).get("/v1/models", headers=ranges).status_code == 200


# -- crowds that leave -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["at once", "in prefill", "in the middle"])
def test_r1_fifty_clients_that_leave_leave_nothing_behind(settings, running, caplog, moment, stream):
    model = ScriptedModel("one", " two", " three", gated=True)
    server, base = running(settings(cancel_after_disconnect_seconds=0.01), model)
    host, port = base.removeprefix("http://").split(":")
    words = int(moment == "in the middle")
    body = json.dumps(chat(stream=stream))
    request = (f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
               f"content-length: {len(body)}\r\n\r\n{body}").encode()

    def come_and_go():
        done = model.drawn
        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall(request)
            if moment != "at once":
                wait_until(lambda: server.running)
            for _ in range(words):
                model.gate.release()
            wait_until(lambda: model.drawn >= done + words)
        wait_until(lambda: not server._generations)
        model.gate.release()  # the step it was in

    model.gate.release(4)
    assert httpx2.post(base + CHAT, json=chat()).status_code == 200
    come_and_go()
    before = held(server)
    for _ in range(50):
        come_and_go()
    wait_until_no_more(lambda: held(server), before)
    model.gate.release(200)  # some for steps that were under way
    assert httpx2.post(base + CHAT, json=chat()).json()["choices"][0]["message"]["content"] == "one two three"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def running():
    """`running(settings, model)` is a Server on a real socket in this process, and its address."""
    with contextlib.ExitStack() as stack:

        def make(chosen, model):
            app = main.create_app(chosen, load=lambda *_: model)
            base = stack.enter_context(running_app(app))
            return app.state.server, base

        yield make


def test_r2_twenty_streams_that_are_never_read_cost_no_one_else_anything(settings, running):
    model = ScriptedModel(*["x" * 50_000] * 60)
    server, base = running(settings(send_timeout_seconds=1, max_concurrent_requests=32, max_tokens=1000), model)
    host, port = base.removeprefix("http://").split(":")
    body = json.dumps(chat(stream=True)).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                         f"content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = httpx2.post(base + CHAT, json=chat(stream=True), timeout=60)
        assert len(text_of(parse_sse(answer.text))) == 60 * 50_000
        wait_until(lambda: not server.readers and not server._generations)  # dropped, and their answers are done
    assert httpx2.get(f"{base}/health").status_code == 200


@pytest.mark.parametrize("header", ["", "connection: close\r\n"], ids=["kept open", "to be closed"])
def test_r2_a_json_answer_that_is_never_read_does_not_keep_its_connection(settings, running, header):
    server, base = running(settings(send_timeout_seconds=0.3), ScriptedModel("x" * 30_000_000))
    host, port = base.removeprefix("http://").split(":")
    body = json.dumps(chat(session_id="s"))
    assert httpx2.post(base + CHAT, json=chat()).status_code == 200
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wait_until(lambda: held(server)[2] <= 3)
        before = held(server)
        deaf.connect((host, int(port)))
        deaf.sendall((f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{header}"
                      f"content-length: {len(body)}\r\n\r\n{body}").encode())
        wait_until(lambda: httpx2.get(f"{base}/v1/sessions/s").json().get("status") == "completed")
        wait_until_no_more(lambda: held(server), before)


def test_r5_while_texts_are_tokenised_the_server_answers_others(settings, running):
    class Slow(ScriptedModel):
        may_go = threading.Event()

        def prepare(self, chat):
            assert self.may_go.wait(60)
            return super().prepare(chat)

    server, base = running(settings(), model := Slow("fine"))
    with httpx2.Client(base_url=base, timeout=60) as http, ThreadPoolExecutor(4) as crowd:
        asked = [crowd.submit(http.post, path, json=PLAIN[path] | {"session_id": f"s{n}"}) for n, path in enumerate(
            (CHAT, CHAT, RESPONSES, COUNT))]
        wait_until(lambda: len(server._generations) == 3)
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/sessions/s0"):
            assert http.get(path).status_code == 200
        assert refused(http.post(CHAT, json={"messages": []})) == "invalid_value"
        assert http.post("/v1/cancel/s0").json()["status"] == "cancelled"
        model.may_go.set()
        assert [a.result().status_code for a in asked] == [200] * 4


def test_r6_thirty_two_threads_tokenise_and_decode_at_once(real):
    def ask(n):
        answer = real[0].post(CHAT, json=chat(f"the cat {n % 4}", temperature=0))
        return n % 4, answer.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(32) as crowd:
        assert len(set(crowd.map(ask, range(96)))) == 4


# -- faults ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr)
def test_r7_a_request_that_memory_does_not_suffice_for_is_a_503_and_the_next_one_is_answered(real, path, fault,
                                                                                             monkeypatch):
    http, model = real
    forward, faults = model.forward, [fault]

    def fails_once(work):
        if faults:
            raise faults.pop()
        return forward(work)

    monkeypatch.setattr(model, "forward", fails_once)
    answer = post(http, path, PLAIN[path])
    assert refused(answer, 503) == "server_overloaded" and answer.headers["retry-after"]
    assert post(http, path, PLAIN[path]).status_code == 200


@pytest.mark.parametrize("fault,code", [
    (RuntimeError("CUDA error: device-side assert triggered"), "device_lost"),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "generation_failed")], ids=repr)
def test_r8_a_dead_device_is_told_from_a_step_that_failed(real, fault, code):
    told = real[1].failure(fault)
    assert told.code == code and str(fault) not in told.detail


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGTERM")
def test_r10_sigterm_ends_five_streams_and_a_response_in_the_background_and_then_the_process(start):
    server = start(SCRIPTED_SERVER, WORDS=5000, SECONDS=0.02, SHUTDOWN_GRACE_SECONDS=0.2, MAX_TOKENS=6000,
                   RESUME_AFTER_RESTART_SECONDS=0)
    with httpx2.Client(base_url=server.base, timeout=60) as http, ThreadPoolExecutor(5) as crowd:
        made = http.post(RESPONSES, json={"input": "hi", "background": True}).json()["id"]
        streams = [crowd.submit(http.post, CHAT, json=chat(stream=True)) for _ in range(5)]
        wait_until(lambda: http.get("/ready").json()["running"] == 6)
        server.signal(signal.SIGTERM)
        ends = [parse_sse(stream.result().text)[-2:] for stream in streams]
        code = server.process.wait(60)
    assert [(json.loads(error["data"])["error"]["code"], done["data"]) for error, done in ends] == [
        ("server_stopped", "[DONE]")] * 5
    assert code in (0, -signal.SIGTERM)  # as uvicorn ends
    again = start(SCRIPTED_SERVER)
    assert httpx2.get(f"{again.base}{RESPONSES}/{made}").json()["status"] == "failed"


def test_r14_of_an_end_there_is_one_however_often_it_is_asked_for(online):
    http = online(model := ScriptedModel("one", gated=True))
    with http.stream("POST", CHAT, json=chat(stream=True, session_id="s")) as answer:
        told = [http.post("/v1/cancel/s").json() for _ in range(3)]
        model.gate.release(9)
        frames = parse_sse(answer.read().decode())
    assert told[0] == told[1] == told[2] and told[0]["status"] == "cancelled" and told[0]["ok"]
    assert [f["data"] for f in frames].count("[DONE]") == 1
    done = http.post(CHAT, json=chat(session_id="done"))
    assert http.post("/v1/cancel/done").json()["status"] == "completed" and done.status_code == 200
    assert refused(http.post("/v1/cancel/nobody"), 404) == "session_not_found"


def test_r15_no_stream_is_silent_for_as_long_as_proxies_wait(online):
    assert main.Settings().keepalive_seconds <= 15
    http = online(model := ScriptedModel("one", gated=True), keepalive_seconds=0.05, max_concurrent_requests=1)
    with http.stream("POST", CHAT, json=chat(stream=True)) as computed, \
            http.stream("POST", CHAT, json=chat(stream=True)) as queued:
        for answer in (computed, queued):
            assert answer.headers["x-accel-buffering"] == "no"
            pings = b""
            for chunk in answer.iter_raw():
                pings += chunk
                if pings.count(b": ping\n") > 3:
                    break
        model.gate.release(9)
