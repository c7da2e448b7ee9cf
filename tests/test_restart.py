"""What a server's death costs: nothing that a client holds, and the next one goes on. Real processes, a real database
file, real signals. `KILLS=30` kills more often, `KILLS_MODEL=<folder>` kills servers of that model."""
import contextlib
import functools
import json
import math
import os
import random
import signal
import socket
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from conftest import ROOT, SCRIPTED_SERVER, ScriptedModel, TestClient, chat, main, parse_sse, text_of, wait_until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TINY_SERVER = (sys.executable, str(ROOT / "tests" / "tiny_server.py"))
UVICORN = (sys.executable, "-m", "uvicorn", "main:app", "--port", "{port}")
KILLS = int(os.environ.get("KILLS", "5"))
KILLS_MODEL = {"MODEL_REPO_ID": os.path.abspath(os.environ["KILLS_MODEL"]),
               "TORCH_DTYPE": "float32", "REAL": 1} if "KILLS_MODEL" in os.environ else {}
GUARD_SECONDS = 60  # for what takes a second or two; far below every grace that would be waited out


@pytest.fixture
def scripted(start):
    """`scripted(WORDS=..., SECONDS=...)` is a real server over a scripted model; it ends what another one began."""
    return lambda **env: start(SCRIPTED_SERVER, **{"RESUME_AFTER_RESTART_SECONDS": 0, **env})


@pytest.fixture
def intact(tmp_path):
    """Asserts that SQLite finds no fault in the database."""

    def check():
        with closing(sqlite3.connect(tmp_path / "sessions.db")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]

    return check


def read_until_cut(server, label, frames, then=lambda: None):
    """The bytes of a new streamed answer up to where the server's death cut them, and the session's id if that came;
    `then` is called once there are so many frames."""
    raw, session = b"", None
    with contextlib.suppress(httpx2.TransportError), httpx2.stream(
            "POST", server.base + CHAT, json=chat(stream=True, session_id=label), timeout=GUARD_SECONDS) as response:
        session, body = response.headers["x-session-id"], response.iter_raw()
        while raw.count(b"\n\n") < frames:
            raw += next(body)
        then()
        for chunk in body:
            raw += chunk
    return raw, session


def whole(raw):
    """What a client has of `raw`: the frames whose blank line has come."""
    return raw[:raw.rfind(b"\n\n") + 2] if b"\n\n" in raw else b""


def events(server, ref, **request):
    return httpx2.get(f"{server.base}/v1/sessions/{ref}/events", timeout=GUARD_SECONDS, **request)


def frames_of(raw):
    return parse_sse(whole(raw).decode())


def code_of(frame):
    return json.loads(frame["data"])["error"]["code"]


def test_after_a_kill_the_stored_frames_replay_and_one_error_ends_them(scripted, intact):
    server = scripted(WORDS=5000)
    raw, session = read_until_cut(server, "s1", 20, server.kill)
    intact()

    server = scripted()
    replay = events(server, "s1").content

    held, frames = frames_of(raw), frames_of(replay)
    assert len(held) >= 20 and frames[:len(held)] == held
    assert replay.startswith(whole(raw))
    assert [f["id"] for f in frames] == [f"s1:{n}" for n in range(len(frames))]
    assert code_of(frames[-2]) == "server_restarted" and frames[-1]["data"] == "[DONE]"
    assert not any('"error"' in f["data"] for f in frames[:-2])
    view = httpx2.get(f"{server.base}/v1/sessions/{session}").json()
    assert (view["status"], view["frames"], view["session_id"]) == ("failed", len(frames), "s1")


def test_a_client_that_comes_back_after_a_kill_misses_and_repeats_nothing(scripted):
    server = scripted(WORDS=5000)
    raw, _ = read_until_cut(server, "s1", 20, server.kill)
    held = frames_of(raw)

    server = scripted()
    rest = httpx2.post(server.base + CHAT, json=chat(stream=True, session_id="s1"),
                       headers={"last-event-id": held[-1]["id"]})

    frames = held + frames_of(rest.content)
    assert [f["id"] for f in frames] == [f"s1:{n}" for n in range(len(frames))]
    assert text_of(frames[:-2]) == "".join(f"w{n} " for n in range(len(frames) - 3))


def test_an_interruption_is_told_once_however_often_the_server_starts(scripted):
    server = scripted(WORDS=5000)
    read_until_cut(server, "s1", 3, server.kill)

    replays = []
    for _ in range(2):
        server = scripted()
        replays.append(events(server, "s1").content)
        server.kill()

    assert replays[0] == replays[1] and replays[0].count(b"server_restarted") == 1


def test_a_finished_session_replays_to_its_end_after_a_kill(scripted, intact):
    server = scripted(WORDS=20)
    raw, _ = read_until_cut(server, "s1", 0)
    server.kill()
    intact()

    server = scripted()

    assert frames_of(raw)[-1]["data"] == "[DONE]"
    assert events(server, "s1").content == raw
    assert events(server, "s1", headers={"last-event-id": frames_of(raw)[-1]["id"]}).status_code == 204


def test_a_label_stays_taken_across_a_kill(scripted):
    server = scripted(WORDS=5000)
    read_until_cut(server, "s1", 3, server.kill)

    again = httpx2.post(scripted().base + CHAT, json=chat(session_id="s1"))

    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")


def test_no_client_ever_holds_an_id_that_the_restarted_server_does_not_know(scripted, intact):
    held = []
    for at, frames in enumerate((0, 1, 2, 7, 40, 90)):  # when the kill comes; 0 is before the first frame
        server = scripted(WORDS=5000, SECONDS=0.002)
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(read_until_cut, server, f"{at}-{n}", 0) for n in range(3)]
            held.append(read_until_cut(server, f"{at}-killer", frames, server.kill))
            held += [other.result() for other in others]
        intact()

    server = scripted()
    known = [(raw, session) for raw, session in held if session]
    assert len(known) >= 6 and any(raw for raw, _ in known)
    for raw, session in known:
        replay = events(server, session)
        assert replay.status_code == 200 and replay.content.startswith(whole(raw))


def streaming_and_waiting(server, pool):
    """A stream that has begun and a JSON request that runs, each the future of its response."""
    asked = chat("Count from one to ten thousand.", max_tokens=4000, temperature=2, seed=1)
    stream, plain = (
        pool.submit(httpx2.post, server.base + CHAT, json={**asked, "stream": label == "stream", "session_id": label},
                    timeout=250) for label in ("stream", "json"))

    def under_way():
        views = http.get("/v1/sessions").json()["data"]
        return sum(view["status"] == "in_progress" and view["frames"] >= 2 for view in views) == 2

    with httpx2.Client(base_url=server.base, timeout=GUARD_SECONDS) as http:
        wait_until(under_way, 200)
    return stream, plain


@pytest.mark.parametrize("command, env", [
    (SCRIPTED_SERVER, {"WORDS": 5000, "RESUME_AFTER_RESTART_SECONDS": 0}),
    (SCRIPTED_SERVER, {"WORDS": 5000, "PERSIST_SESSIONS": 0}),
    (UVICORN, {"TORCH_DTYPE": "float32", "RESUME_AFTER_RESTART_SECONDS": 0})],
    ids=["python", "in memory only", "uvicorn main:app"])
def test_sigterm_ends_a_stream_and_a_json_request_honestly(start, command, env):
    server = start(command, SHUTDOWN_GRACE_SECONDS=0.2, **env)
    with ThreadPoolExecutor(2) as pool:
        stream, plain = streaming_and_waiting(server, pool)

        server.signal(signal.SIGTERM)
        server.process.wait(timeout=GUARD_SECONDS)

        frames = frames_of(stream.result().content)
    assert code_of(frames[-2]) == "server_stopped" and frames[-1]["data"] == "[DONE]"
    assert [f["id"] for f in frames] == [f"stream:{n}" for n in range(len(frames))]
    assert plain.result().status_code == 503
    assert plain.result().json()["error"]["code"] == "server_stopped"


def test_a_lost_device_ends_answers_honestly_and_the_process_with_a_code(scripted):
    server = scripted(LOSE_AT=5)
    with httpx2.Client(base_url=server.base, timeout=GUARD_SECONDS) as http:
        frames = parse_sse(http.post(CHAT, json=chat(stream=True)).text)
        assert http.get("/ready").status_code == 503
        assert http.post(CHAT, json=chat()).status_code == 503
    assert code_of(frames[-2]) == "device_lost" and len(text_of(frames[:-2]).split()) == 5
    assert server.process.wait(timeout=GUARD_SECONDS) == 75


def test_an_answer_that_ends_within_the_grace_is_not_cut_by_sigterm(scripted):
    server = scripted(WORDS=50, SHUTDOWN_GRACE_SECONDS=300)
    with ThreadPoolExecutor(2) as pool:
        stream, plain = streaming_and_waiting(server, pool)

        server.signal(signal.SIGTERM)
        server.process.wait(timeout=GUARD_SECONDS)

        text = "".join(f"w{n} " for n in range(50))
        assert text_of(frames_of(stream.result().content)) == text
        assert plain.result().json()["choices"][0]["message"]["content"] == text


def test_while_it_stops_the_server_takes_nothing_new(scripted):
    server = scripted(WORDS=5000, SHUTDOWN_GRACE_SECONDS=300)
    with ThreadPoolExecutor(2) as pool, httpx2.Client(base_url=server.base) as http:
        streaming_and_waiting(server, pool)
        http.get("/health")  # an open connection, used just now: new ones are no longer accepted, and idle ones closed
        server.signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in Path(server.log).read_text())

        refused = http.post(CHAT, json=chat())

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        server.kill()


def test_a_stopped_server_leaves_a_database_that_needs_no_repair(scripted, tmp_path, intact):
    server = scripted(WORDS=5000, SHUTDOWN_GRACE_SECONDS=0)
    raw, _ = read_until_cut(server, "s1", 10, lambda: server.signal(signal.SIGTERM))
    server.process.wait(timeout=GUARD_SECONDS)
    intact()

    assert code_of(frames_of(raw)[-2]) == "server_stopped"
    assert not (tmp_path / "sessions.db-wal").exists()
    assert events(scripted(), "s1").content == raw


def test_a_second_interrupt_exits_at_once(scripted):
    server = scripted(WORDS=100_000, SHUTDOWN_GRACE_SECONDS=300)
    with ThreadPoolExecutor(2) as pool:
        reader = pool.submit(read_until_cut, server, "s1", 5)
        wait_until(lambda: httpx2.get(f"{server.base}/v1/sessions/s1").json().get("frames", 0) > 5)
        server.signal(signal.SIGINT)
        wait_until(lambda: "stopping" in Path(server.log).read_text())

        server.signal(signal.SIGINT)

        server.process.wait(timeout=GUARD_SECONDS)
        reader.result()


@pytest.mark.parametrize("sent", [
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\n", b""], ids=["half a body", "half a header", "nothing"])
def test_a_client_that_never_finishes_its_request_holds_no_exit(scripted, sent):
    server = scripted(SHUTDOWN_GRACE_SECONDS=0)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(sent)
        httpx2.get(f"{server.base}/health")  # by now the server has seen the other connection
        server.terminate()


@pytest.mark.parametrize("timeout", [0.5, 600])
def test_a_client_that_never_reads_holds_no_exit(scripted, tmp_path, timeout):
    server = scripted(SHUTDOWN_GRACE_SECONDS=0, SEND_TIMEOUT_SECONDS=timeout, WORDS=3000, SECONDS=0,
                      MAX_TOKENS=4000, WORD_LENGTH=5000)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        body = json.dumps(chat(stream=True, session_id="deaf")).encode()
        deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: httpx2.get(f"{server.base}/v1/sessions/deaf").json().get("status") == "completed", 60)
        if timeout < 1:
            wait_until(lambda: "took nothing" in (tmp_path / "server.log").read_text())
            with contextlib.suppress(ConnectionResetError), deaf.makefile("rb") as late:
                assert b"[DONE]" not in late.read()  # what the server still held for it is gone with the connection
        server.terminate()


# -- what goes on ------------------------------------------------------------------------------------------------
NUMBERS = {"type": "object", "additionalProperties": False, "required": ["n"], "properties": {
    "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 40, "maxItems": 60}}}
CALL = {"name": "note", "description": "Notes", "parameters": NUMBERS, "strict": True}
LONG = {"max_tokens": 150, "ignore_eos": True}
ASKED = {  # label: path and body
    "greedy": (CHAT, chat("the cat", temperature=0, store=True, stream_options={"include_usage": True}, **LONG)),
    "seeded": (CHAT, chat("a dog", temperature=1.2, top_p=0.9, seed=7, frequency_penalty=0.5, presence_penalty=0.3,
                          repetition_penalty=1.1, **LONG)),
    "two": (CHAT, chat("in the house", temperature=1, seed=3, n=2, **LONG)),
    "stops": (CHAT, chat("user", temperature=1, seed=11, stop=["zzz", "the a"], logprobs=True, top_logprobs=2, **LONG)),
    "tools": (CHAT, chat("they", temperature=0.8, seed=5, max_tokens=300, tool_choice="required",
                         tools=[{"type": "function", "function": CALL}])),
    "schema": (CHAT, chat("not", temperature=0.8, seed=6, max_tokens=300, response_format={
        "type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS, "strict": True}})),
    "json": (CHAT, chat("assistant", temperature=0.5, seed=1, stream=False, store=True, **LONG)),
    "response": (RESPONSES, {"input": "there are", "temperature": 0, "max_output_tokens": 150, "ignore_eos": True,
                             "include": ["message.output_text.logprobs"]}),
    "background": (RESPONSES, {"input": "and then", "temperature": 0.9, "seed": 4, "max_output_tokens": 150,
                               "ignore_eos": True, "background": True, "truncation": "auto"}),
    "called": (RESPONSES, {"input": "it is", "temperature": 0.9, "seed": 8, "max_output_tokens": 300,
                           "tools": [{"type": "function", **CALL}], "tool_choice": "required"}),
}
DRAWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "cached_tokens"}  # or what a cache held


@pytest.fixture
def tiny_server(start):
    """`tiny_server(**environment)` is a real server over a tiny model in float32."""
    return lambda **env: start(TINY_SERVER, **{"OMP_NUM_THREADS": 1, **env})


class Stream:
    """A client that comes back: asks once, and then for whatever follows the last frame it has."""

    def __init__(self, label):
        self.label, self.raw = label, b""
        self.path, body = ASKED[label]
        self.body = {"stream": True, "session_id": label, **body}

    @property
    def frames(self):
        return parse_sse(self.raw[:self.raw.rfind(b"\n\n") + 2].decode() if b"\n\n" in self.raw else "")

    @property
    def is_done(self):
        return self.frames[-1:] != [] and self.frames[-1]["data"] == "[DONE]"

    def follow(self, server):
        """Read on until the stream ends or the server dies."""
        with (contextlib.suppress(httpx2.TransportError),
              httpx2.Client(base_url=server.base, timeout=GUARD_SECONDS) as http):
            if not self.raw:
                with http.stream("POST", self.path, json=self.body) as response:
                    if response.status_code == 200 and self.body["stream"]:
                        return self._take(response)
                    assert response.read() and response.status_code in (200, 409, 503), response.text
                    if response.status_code == 503:
                        return server.process.wait()  # it has been told to stop
            if not self.is_done:
                self.raw = self.raw[:self.raw.rfind(b"\n\n") + 2] if b"\n\n" in self.raw else b""
                seen = {"last-event-id": self.frames[-1]["id"]} if self.frames else {}
                with http.stream("GET", f"/v1/sessions/{self.label}/events", headers=seen) as response:
                    assert response.status_code == 200, response.read()
                    self._take(response)

    def _take(self, response):
        for piece in response.iter_raw():
            self.raw += piece


class Near(float):
    """A logprob, whose last digits depend on the company in its batch."""

    def __eq__(self, other):
        return abs(self - other) < 1e-3


def plain(value):
    """A JSON value without what is drawn anew for every answer."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return Near(value)
    return {k: plain(v) for k, v in value.items() if k not in DRAWN} if isinstance(value, dict) else value


def told(stream):
    """What a stream's frames say, each choice by itself: how those take turns is nobody's promise."""
    frames = [(f.get("event"), f["data"] if f["data"] == "[DONE]" else plain(json.loads(f["data"])))
              for f in stream.frames]
    assert [f["id"] for f in stream.frames] == [f"{stream.label}:{n}" for n in range(len(frames))]
    return sorted(frames, key=lambda f: f[1]["choices"][0]["index"] if f[1] != "[DONE]" and f[1].get("choices") else 9)


def objects(server, streams):
    """What is stored of them at the end."""
    with httpx2.Client(base_url=server.base, timeout=GUARD_SECONDS) as http:
        for stream in streams:
            if stream.path == RESPONSES or stream.body.get("store"):
                found = http.get(f"{stream.path}/{http.get(f'/v1/sessions/{stream.label}').json()['id']}")
                assert found.status_code == 200
                yield stream.label, plain(found.json())


def followed(server, streams, pool, then=lambda: None):
    """Read all of them on, each to its end or to the server's."""
    reading = [pool.submit(stream.follow, server) for stream in streams if not stream.is_done]
    then()
    for reader in reading:
        reader.result()


def requests_in(path):
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT COUNT(*) FROM requests").fetchone()[0]


def ready(server):
    wait_until(lambda: httpx2.get(f"{server.base}/ready").json()["status"] == "ready", GUARD_SECONDS)
    return server


def kill_sometime(server, streams, draw, early):
    """End the server at a random moment: soon, or when all that had not ended have gone on. Never twice in a row so
    soon: an answer that servers die of looks just like that, and is given up."""
    def counted():
        sessions = httpx2.get(f"{server.base}/v1/sessions", timeout=GUARD_SECONDS).json()["data"]
        return {s["session_id"]: math.inf if s["ended_at"] else s["frames"] for s in sessions}

    def all_went_on():
        after = counted()
        counts = ((before.get(s.label, 0), after.get(s.label, 0)) for s in streams)
        return all(now == math.inf or now > max(then, 4) for then, now in counts)

    before = counted()
    if not early:
        wait_until(all_went_on, 120)
    time.sleep(draw.uniform(0, 0.7))
    draw.choice([server.kill, server.kill, server.terminate])()


@pytest.mark.timeout(60 + 60 * KILLS)
def test_streams_that_servers_died_in_again_and_again_are_those_of_an_undisturbed_one(tiny_server, tmp_path, intact):
    whole, cut = [Stream(label) for label in ASKED], [Stream(label) for label in ASKED]
    draw, killed_in, early = random.Random(), 0, False
    server_of = functools.partial(tiny_server, EAGER_LOAD_MODEL=1, **KILLS_MODEL)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        server = ready(server_of(SESSIONS_DB_PATH=tmp_path / "undisturbed.db"))
        followed(server, whole, pool)
        expected = dict(objects(server, whole))
        server.kill()
        for _ in range(KILLS):
            server = server_of(SECONDS=0.006 * KILLS, SHUTDOWN_GRACE_SECONDS=0)
            if not all(stream.raw for stream in cut):  # else the beginning of an answer would say that it waited
                ready(server)
            early = not early and draw.random() < 0.5
            killer = threading.Thread(target=kill_sometime, args=(server, cut, draw, early))
            followed(server, cut, pool, killer.start)
            killer.join()
            killed_in += sum(not stream.is_done for stream in cut)
            intact()
        server = server_of()
        followed(server, cut, pool)

    assert killed_in > KILLS
    for undisturbed, stream in zip(whole, cut, strict=True):
        assert told(stream) == told(undisturbed), stream.label
    assert dict(objects(server, cut)) == expected
    assert requests_in(tmp_path / "sessions.db") == 0


def test_another_model_does_not_go_on_with_an_answer(tiny_server):
    stream = Stream("greedy")
    server = tiny_server(SECONDS=0.02)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.follow, server)
        wait_until(lambda: len(stream.frames) > 20)
        server.kill()
        reading.result()
    held = stream.frames

    stream.follow(tiny_server(SEED="6"))

    assert stream.frames[:len(held)] == held
    assert code_of(stream.frames[-2]) == "model_changed" and stream.is_done


def test_an_answer_that_servers_die_of_is_tried_twice_and_takes_no_other_with_it(start, tmp_path):
    env = {"WORDS": 60, "SECONDS": 0.2, "DIE_AT": 3, "MAX_TOKENS": 100}
    deadly, other = chat(stream=True, session_id="deadly", seed=13), chat(stream=True, session_id="other", seed=1)
    with ThreadPoolExecutor(2) as pool:
        server = start(SCRIPTED_SERVER, **env)
        for body in (other, deadly):
            pool.submit(httpx2.post, server.base + CHAT, json=body)
    for tries in range(3):
        server.process.wait(timeout=GUARD_SECONDS)
        with closing(sqlite3.connect(tmp_path / "sessions.db")) as db:
            found = dict(db.execute("SELECT label, tries FROM requests JOIN sessions ON session = id"))
        assert found["deadly"] == tries and found["other"] < 2
        server = start(SCRIPTED_SERVER, **env)

    frames = frames_of(events(server, "deadly").content)
    assert code_of(frames[-2]) == "server_restarted"
    assert text_of(frames_of(events(server, "other").content)) == "".join(f"w{n} " for n in range(60))


@pytest.mark.parametrize("signals", [1, 2])
def test_what_sigterm_cuts_off_goes_on_in_the_next_server(start, tmp_path, intact, signals):
    server = start(SCRIPTED_SERVER, WORDS=100, SECONDS=0.05, SHUTDOWN_GRACE_SECONDS=0 if signals == 1 else 300)

    def stop():
        server.signal(signal.SIGTERM)
        if signals == 2:
            wait_until(lambda: "stopping" in Path(server.log).read_text())
            server.signal(signal.SIGTERM)

    raw, _ = read_until_cut(server, "s1", 10, stop)
    assert server.process.wait(timeout=GUARD_SECONDS) == (-signal.SIGTERM if signals == 1 else 128 + signal.SIGTERM)
    intact()

    server = start(SCRIPTED_SERVER, WORDS=100)

    frames = frames_of(events(server, "s1").content)
    assert frames[:len(frames_of(raw))] == frames_of(raw) and len(frames) > len(frames_of(raw))
    assert text_of(frames) == "".join(f"w{n} " for n in range(100))
    assert not any("error" in frame["data"] for frame in frames)


# -- in process: the database as it was at some moment, found by another server --------------------------------------
@pytest.fixture
def second_life(settings, tmp_path):
    """`second_life(load, change, **settings)` is a client of a server that finds the database as it is now, but for a
    `change` in SQL, as if the other server had been killed."""
    with contextlib.ExitStack() as stack:

        def make(load, change="", **values):
            path = tmp_path / f"life{len(list(tmp_path.glob('life*.db')))}.db"
            with closing(sqlite3.connect(tmp_path / "sessions.db")) as db, closing(sqlite3.connect(path)) as copy:
                db.backup(copy)
                copy.executescript(change)
            load = load if callable(load) else lambda *_, model=load: model
            app = main.create_app(settings(sessions_db_path=path, **values), load=load)
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield make


WORDS = ("a ", "b ", "c ", "d ")


def begun(http, model, said=2, **fields):
    """The id of a response in the background of which so many words are on disk."""
    id = http.post(RESPONSES, json={"input": "hi", "background": True, **fields}).json()["id"]
    for _ in range(said):
        model.gate.release()
    wait_until(lambda: http.get(f"/v1/sessions/{id}").json()["frames"] == (5 + said if said else 3))
    return id


@pytest.fixture
def response(client):
    """The id of a response of four words, two of which a server has said that says no more."""
    model = ScriptedModel(*WORDS, gated=True)
    with contextlib.ExitStack() as stack:
        stack.callback(model.gate.release, 99)
        yield begun(client(model), model)


def said_by(http, id):
    """The data of a response's frames."""
    frames = parse_sse(http.get(f"/v1/sessions/{id}/events").text)
    assert frames[-1]["data"] == "[DONE]"
    data = [json.loads(frame["data"]) for frame in frames[:-1]]
    assert [event["sequence_number"] for event in data] == [*range(len(data))]
    return data


def output_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_an_answer_goes_on_after_its_last_frame(second_life, response):
    data = said_by(http := second_life(ScriptedModel(*WORDS)), response)

    assert [event["delta"] for event in data if "delta" in event] == [*WORDS]
    assert data[-1]["response"] == http.get(f"{RESPONSES}/{response}").json()
    assert output_of(data[-1]["response"]) == "".join(WORDS) and data[-1]["response"]["status"] == "completed"
    assert data[-1]["response"]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("said", [0, 1, 4])
def test_it_goes_on_from_wherever_it_was(client, second_life, said):
    model = ScriptedModel(*WORDS, gated=True)
    id = begun(client(model), model, said)

    data = said_by(second_life(ScriptedModel(*WORDS)), id)

    assert [event["delta"] for event in data if "delta" in event] == [*WORDS]
    model.gate.release(99)


def test_until_the_model_has_loaded_an_answer_that_goes_on_stands_where_it_stood(second_life, response):
    gate = threading.Event()
    http = second_life(lambda *_: gate.wait() and ScriptedModel(*WORDS))

    assert http.get("/ready").json()["status"] == "loading" and http.get("/ready").json()["continuing"] == 1
    assert "inference_continuing 1.0" in http.get("/metrics").text
    assert output_of(http.get(f"{RESPONSES}/{response}").json()) == "a b "
    assert http.get(f"/v1/sessions/{response}").json()["status"] == "in_progress"
    gate.set()
    said_by(http, response)
    assert http.get("/ready").json()["continuing"] == 0


def test_an_answer_that_would_go_on_can_be_cancelled_before_the_model_has_loaded(second_life, response):
    gate = threading.Event()
    http = second_life(lambda *_: gate.wait() and ScriptedModel(*WORDS))

    ended = http.post(f"{RESPONSES}/{response}/cancel").json()

    assert (ended["status"], output_of(ended)) == ("cancelled", "a b ")
    assert said_by(http, response)[-1]["response"] == ended
    gate.set()


def test_without_a_model_an_answer_that_would_go_on_ends_with_the_reason(second_life, response):
    def load(*_):
        raise main.load_error("There is none.")

    last = said_by(second_life(load), response)[-1]["response"]

    assert (last["status"], last["error"]["message"], output_of(last)) == ("failed", "There is none.", "a b ")


@pytest.mark.parametrize("change, values", [
    ("", {"resume_after_restart_seconds": 0}), ("", {"resume_after_restart_seconds": 1e-6}),
    ("", {"model_repo_id": "another"}), ("UPDATE requests SET tries = 2", {}), ("DELETE FROM requests", {}),
    ("UPDATE requests SET request = '{'", {}), ("UPDATE requests SET request = '{}'", {}),
    ("UPDATE frames SET events = '[[1' WHERE idx = 6", {}), ("UPDATE frames SET events = '[]' WHERE idx = 6", {}),
    ("UPDATE frames SET events = '[[\"Other\"]]' WHERE idx = 6", {}), ("DELETE FROM frames WHERE idx = 5", {}),
    ("UPDATE frames SET events = '[[\"Failed\", {}]]' WHERE idx = 6", {}),
    ("UPDATE sessions SET kind = 'other'", {})], ids=str)
def test_what_cannot_go_on_ends_honestly_and_the_server_starts(second_life, response, tmp_path, change, values):
    http = second_life(ScriptedModel(*WORDS), change, **values)

    wait_until(lambda: http.get(f"/v1/sessions/{response}").json()["status"] == "failed")
    assert requests_in(tmp_path / "life0.db") == 0


def test_whoever_does_not_come_back_after_a_restart_ends_an_answer_as_ever(second_life, response):
    model = ScriptedModel(*WORDS, gated=True)
    change = """UPDATE requests SET request = replace(request, '"background":true', '"background":false')"""
    http = second_life(model, change, cancel_after_disconnect_seconds=0.2)

    wait_until(lambda: http.get(f"/v1/sessions/{response}").json()["status"] == "cancelled")
    model.gate.release(99)


def test_new_requests_do_not_push_out_whoever_has_not_come_back_yet(second_life, response):
    model = ScriptedModel(*WORDS, gated=True)
    change = """UPDATE requests SET request = replace(request, '"background":true', '"background":false')"""
    http = second_life(model, change, max_concurrent_requests=1)
    new = http.post(RESPONSES, json={"input": "hi", "background": True}).json()["id"]

    for _ in range(99):
        model.gate.release()

    assert said_by(http, response)[-1]["response"]["status"] == "completed"
    assert said_by(http, new)[-1]["response"]["status"] == "completed"


def test_an_answer_that_waits_for_its_place_has_not_been_tried(client, second_life, tmp_path):
    model = ScriptedModel(*WORDS, gated=True)
    first = begun(http := client(model, max_concurrent_requests=1), model)
    second = http.post(RESPONSES, json={"input": "hi", "background": True}).json()["id"]
    again = ScriptedModel(*WORDS, gated=True)
    http = second_life(again, max_concurrent_requests=1)
    try:
        again.gate.release()
        wait_until(lambda: http.get(f"/v1/sessions/{first}").json()["frames"] == 8)
        with closing(sqlite3.connect(tmp_path / "life0.db")) as db:
            assert dict(db.execute("SELECT session, tries FROM requests")) == {first: 0, second: 0}
    finally:
        for gate in (again.gate, model.gate):
            gate.release(99)
    assert [event["delta"] for event in said_by(http, second) if "delta" in event] == [*WORDS]


def test_a_plain_json_request_is_kept_only_if_it_can_be_found_again(client, tmp_path):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)
    with ThreadPoolExecutor(3) as pool:
        for fields in ({}, {"session_id": "s1"}, {"session_id": "s2", "store": False}):
            pool.submit(http.post, RESPONSES, json={"input": "hi", **fields})
        try:
            wait_until(lambda: sum(http.get("/ready").json()[state] for state in ("running", "queued")) == 3)
            wait_until(lambda: requests_in(tmp_path / "sessions.db") == 1)
        finally:
            for _ in range(99):
                model.gate.release()


@pytest.mark.parametrize("fields", [{"background": True}, {"stream": True}, {}, {"store": False}], ids=str)
def test_of_a_request_nothing_is_kept_beyond_its_answer(client, tmp_path, fields):
    http = client(ScriptedModel(*WORDS))

    id = http.post(RESPONSES, json={"input": "hi", **fields}).headers["x-session-id"]
    wait_until(lambda: http.get(f"/v1/sessions/{id}").json()["status"] == "completed")

    assert requests_in(tmp_path / "sessions.db") == 0


LOGPROB = main.TokenLogprob("\ufffd", b"\xff", -1.25, (main.TokenLogprob("a", b"a", -0.1),))
SAMPLING = main.Sampling(
    5, 0.5, 0.9, 3, 0.1, 2**63 - 1, ("x", "y"), 1.1, 0.2, 0.3, ((1, 2.5),), frozenset({7}), True, 2, 3)


@pytest.mark.parametrize("event", [
    main.Queued(), main.Started(3), main.Accepted(4, SAMPLING, 1, "ab"), main.Finished("length", 2), main.Produced(9),
    main.Produced(9, (main.TextDelta("é"),), 1, LOGPROB),
    main.Produced(9, (main.ReasoningDelta("x"), main.ToolCallDelta("f"), main.ToolCallDelta(None, "{")), 0, None,
                  main.ToolCallDelta)], ids=lambda event: type(event).__name__)
def test_an_event_comes_back_from_disk_as_it_was(event):
    assert main.event_of(json.loads(main.event_row(event))) == event


def test_media_are_kept_as_they_were_fetched_within_bounds():
    film, picture = (main.MediaSource(kind, f"https://example.org/{kind}", "x") for kind in ("video", "image"))
    messages = main.Message("user", "a", media=(film,)), main.Message("user", "b", media=(picture,))
    tool = main.Tool("f", {"enum": [1, 2.5, None]}, True, {"name": "f"}, "tools[0]")
    kept = main.Kept("m", 1, {"n": 1}, main.Chat(messages, (tool,), grammar=main.Grammar("regex", "a", "x")), SAMPLING)

    back = main.KEPT.validate_json(kept.with_data([b"film", b"picture"]).packed())

    media = [source for message in back.chat.messages for source in message.media]
    assert [main._read_data_url(source, main.Settings()) for source in media] == [b"film", b"picture"]
    assert [source.mark for source in media] == [film.mark, picture.mark]
    assert main.KEPT.validate_json(kept.packed()) == kept
    assert kept.with_data([b"film", bytes(main.MAX_KEPT_BYTES)]).packed() is None
