"""The real demo model, through a real server and the official SDK; counted in process where forwards matter."""
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from conftest import ROOT, Process, TestClient, chat, main, parse_sse, sdk, text_of, wait_until

CHAT = "/v1/chat/completions"
MODEL = "demo"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"messages": [{"role": "user", "content": "Write a short story about a lighthouse."}], "max_tokens": 24}
GREEDY = {"model": MODEL, "temperature": 0}
DEMO = {"MODEL_REPO_ID": MODEL, "MODELS_DIR": ROOT / "models", "TORCH_DTYPE": "float32", "STRICT_MODEL": "1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """`python main.py` with the demo model, for all tests of this file."""
    folder = tmp_path_factory.mktemp("server")
    env = {**DEMO, "SESSIONS_DB_PATH": folder / "sessions.db"}
    process = Process([sys.executable, "main.py"], env, folder / "log")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def openai_client(server):
    with sdk(server.base, timeout=200) as client:
        yield client


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.base, timeout=200) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(http):
    """The frames of the long answer, read in one go."""
    return parse_sse(http.post(CHAT, json={**GREEDY, **LONG, "stream": True, "session_id": "undisturbed"}).text)


def answer(client, **fields):
    """The text of a plain JSON answer."""
    return client.chat.completions.create(**{**GREEDY, **fields}).choices[0].message.content


def streamed(client, **fields):
    """The text of a streamed answer, why it ended, and its usage."""
    chunks = list(client.chat.completions.create(
        **{**GREEDY, **fields}, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, chunks[-2].choices[0].finish_reason, chunks[-1].usage


def test_the_capital_of_france_is_paris_in_json_and_in_a_stream_alike(openai_client):
    whole = openai_client.chat.completions.create(**GREEDY, messages=FRANCE)
    text, reason, usage = streamed(openai_client, messages=FRANCE)

    assert "Paris" in whole.choices[0].message.content
    assert text == whole.choices[0].message.content
    assert (reason, usage.total_tokens) == (whole.choices[0].finish_reason, whole.usage.total_tokens)
    assert whole.choices[0].finish_reason == "stop"
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens


def test_a_budget_is_kept_to_the_token(openai_client):
    text, reason, usage = streamed(openai_client, **{**LONG, "max_tokens": 7})

    assert text and (reason, usage.completion_tokens) == ("length", 7)


def cut_after(http, frames, label):
    """The first frames of the long answer; then the connection is closed."""
    raw = b""
    with http.stream("POST", CHAT, json={**GREEDY, **LONG, "stream": True, "session_id": label}) as response:
        body = response.iter_raw()
        while raw.count(b"\n\n") < frames:
            raw += next(body)
    return parse_sse(raw[:raw.rfind(b"\n\n") + 2].decode())


def post_again(label, after):
    return "POST", CHAT, {"json": {**GREEDY, **LONG, "stream": True, "session_id": label},
                          "headers": {"last-event-id": after}}


def post_with_query(label, after):
    return "POST", CHAT, {"json": {**GREEDY, **LONG, "stream": True, "session_id": label},
                          "params": {"last_event_id": after}}


def post_event_id_alone(label, after):
    return "POST", CHAT, {"json": {**GREEDY, **LONG, "stream": True}, "headers": {"last-event-id": after}}


def get_events(label, after):
    return "GET", f"/v1/sessions/{label}/events", {"headers": {"last-event-id": after}}


def get_events_with_query(label, after):
    return "GET", f"/v1/sessions/{label}/events", {"params": {"last_event_id": after}}


def come_back(http, way, label, frames):
    method, url, request = way(label, frames[-1]["id"])
    return http.stream(method, url, **request)


WAYS = [post_again, post_with_query, post_event_id_alone, get_events, get_events_with_query]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_stream_that_was_cut_comes_back_as_if_it_had_not_been(http, undisturbed, way):
    label = way.__name__
    frames = cut_after(http, 5, label)

    with come_back(http, way, label, frames) as response:
        frames += parse_sse(response.read().decode())

    assert [f["id"] for f in frames] == [f"{label}:{n}" for n in range(len(undisturbed))]
    assert text_of(frames) == text_of(undisturbed)
    assert frames[-1]["data"] == "[DONE]"


class Counted:
    """A model whose forwards are counted."""

    def __init__(self, model):
        self._model, self.forwards = model, 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, work):
        self.forwards += 1
        return self._model.forward(work)


def test_a_generation_runs_once_however_often_its_reader_is_cut(settings, undisturbed):
    models = []

    def load(*arguments):
        models.append(Counted(main.load_model(*arguments)))
        return models[-1]

    app = main.create_app(settings(model_repo_id=MODEL, torch_dtype="float32"), load=load)
    with TestClient(app) as http:
        frames = cut_after(http, 5, "s1")
        for way in WAYS:
            with come_back(http, way, "s1", frames) as response:
                frames += parse_sse(next(response.iter_bytes(), b"").decode())
        with come_back(http, post_again, "s1", frames) as response:
            frames += parse_sse(response.read().decode())

    assert [f["id"] for f in frames] == [f"s1:{n}" for n in range(len(frames))]
    assert text_of(frames) == text_of(undisturbed)
    assert [m.forwards for m in models] == [LONG["max_tokens"]]  # the prompt's gives the first token


def test_a_seed_repeats_its_answer_and_another_gives_another(openai_client):
    drawn = {**LONG, "max_tokens": 16, "temperature": 1}

    first, again, other = (answer(openai_client, **drawn, seed=seed) for seed in (7, 7, 8))

    assert first == again == streamed(openai_client, **drawn, seed=7)[0]
    assert other != first


def test_an_answer_is_cut_before_its_stop_string_wherever_tokens_end(openai_client, undisturbed):
    text = text_of(undisturbed)
    for start, end in ((10, 12), (21, 29)):
        stop = text[start:end]
        before = text[:text.index(stop)]

        assert answer(openai_client, **LONG, stop=[stop, "never said"]) == before
        assert streamed(openai_client, **LONG, stop=stop)[:2] == (before, "stop")


def test_sixteen_requests_at_once_get_the_answers_that_each_gets_alone(openai_client):
    asked = [{"messages": [{"role": "user", "content": f"What is {n} plus {n}?"}], "max_tokens": 5 + n % 3}
             for n in range(16)]

    alone = [answer(openai_client, **request) for request in asked]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda request: answer(openai_client, **request), asked))

    assert together == alone
    assert len(set(alone)) > 8  # otherwise a mix-up would not show


def test_a_model_of_another_name_is_refused(http):
    refused = http.post(CHAT, json=chat())

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_health_answers_while_the_first_request_loads_the_model(start):
    server = start(**DEMO)
    with httpx2.Client(base_url=server.base, timeout=100) as http, ThreadPoolExecutor(1) as pool:
        assert http.get("/ready").json()["status"] == "not_loaded"
        first = pool.submit(http.post, CHAT, json={**GREEDY, "messages": FRANCE, "max_tokens": 4})
        wait_until(lambda: http.get("/ready").json()["status"] == "loading")
        healthy, stages = [], set()
        while (state := http.get("/ready").json())["status"] == "loading":
            healthy.append(http.get("/health").status_code)
            stages.add(state["progress"]["stage"])
            time.sleep(0.02)  # leaves the load its share of the machine

        assert set(healthy) == {200} and len(healthy) > 10
        assert {"import", "weights"} <= stages
        assert state["status"] == "ready"
        assert first.result().status_code == 200
