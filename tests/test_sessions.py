"""Sessions and their doors: sessions keep frames, readers come and go, cancelling, bounds, storage."""
import asyncio
import contextlib
import json
import os
import re
import socket
import sqlite3
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import quote

import httpx2
import openai
import pytest
from conftest import SCRIPTED_SERVER, ScriptedModel, TestClient, chat, main, parse_sse, running_app, text_of, wait_until
from openai import OpenAI

CHAT = "/v1/chat/completions"
WORDS = tuple(f"w{n} " for n in range(6))
COUNT = len(WORDS) + 3  # frames of an answer: role, words, finish, [DONE]
SOON_CANCELLED = {"cancel_after_disconnect_seconds": 1}


class SteppedModel(ScriptedModel):
    """Every step waits for the gate, those of a prompt too."""

    def forward(self, work):
        self.gate.acquire()
        super().forward(work)


class HeldLog:
    """A session log whose commits happen when the test says so."""

    degraded = False

    def __init__(self):
        self.held = []

    def write(self, session, statements, then=None):
        self.held.append(then)


class Reading:
    """An open stream, taken frame by frame; keep-alives are left out."""

    def __init__(self, response):
        self.response, self._chunks, self._held = response, response.iter_bytes(), b""

    def frame(self):
        while b"\n\n" not in self._held:
            self._held += next(self._chunks)
        frame, _, self._held = self._held.partition(b"\n\n")
        return frame.replace(b": ping\n", b"") + b"\n\n"

    def frames(self, count):
        return [self.frame() for _ in range(count)]

    def rest(self):
        return wires(self._held + b"".join(self._chunks))


@contextlib.contextmanager
def reading(client, method, url, **request):
    with client.stream(method, url, **request) as response:
        assert response.status_code == 200, response.read()
        yield Reading(response)


def begin(client, label="s1", **fields):
    """An open reader of a new streamed answer."""
    return reading(client, "POST", CHAT, json=chat(stream=True, session_id=label, **fields))


def finish(client, label="s1", **fields):
    """All frames of a new streamed answer."""
    with begin(client, label, **fields) as stream:
        return stream.rest()


def wires(raw):
    """The frames in `raw`, each as it stood on the wire."""
    return re.findall(rb"(?:[^\n]+\n)+\n", raw.replace(b": ping\n", b""))


def parsed(frames):
    return parse_sse(b"".join(frames).decode())


def chunks(frames):
    return [json.loads(f["data"]) for f in parsed(frames) if f["data"] != "[DONE]"]


def indices(frames):
    return [int(f["id"].rpartition(":")[2]) for f in parsed(frames)]


def view(client, ref="s1"):
    return client.get(f"/v1/sessions/{ref}").json()


def events(client, ref="s1", **request):
    return client.get(f"/v1/sessions/{ref}/events", **request)


def error_of(response):
    return response.status_code, response.json()["error"]["code"]


def loaded(client):
    """Load the model, so that what follows is refused before its first byte."""
    client.post(CHAT, json=chat(max_tokens=1))
    return client


def rows(path, sql, *values):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql, values).fetchall()


@contextlib.contextmanager
def locked(path):
    """Another program holds the database for itself."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        yield
        db.execute("ROLLBACK")


def say(model, steps=100):
    """Open the model's gate so many times."""
    for _ in range(steps):
        model.gate.release()


@pytest.fixture
def online(live):
    """`online(model, **settings)` is a client over real sockets."""
    with contextlib.ExitStack() as stack:
        yield lambda model, **values: stack.enter_context(httpx2.Client(base_url=live(model, **values), timeout=30))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture
def database(tmp_path):
    return tmp_path / "sessions.db"


# -- the ways back: each makes (method, url, request) for a Last-Event-ID and the reference it was made with ---------
def post_again(event_id, ref):
    return "POST", CHAT, {"json": chat(stream=True, session_id="s1"), "headers": {"last-event-id": event_id.encode()}}


def post_with_query(event_id, ref):
    return "POST", f"{CHAT}?last_event_id={quote(event_id)}", {"json": chat(stream=True, session_id="s1")}


def post_event_id_alone(event_id, ref):
    return "POST", CHAT, {"json": chat(stream=True), "headers": {"last-event-id": event_id.encode()}}


def get_events(event_id, ref):
    return "GET", f"/v1/sessions/{quote(ref)}/events", {"headers": {"last-event-id": event_id.encode()}}


def get_events_with_query(event_id, ref):
    return "GET", f"/v1/sessions/{quote(ref)}/events?last_event_id={quote(event_id)}", {}


WAYS = [post_again, post_with_query, post_event_id_alone, get_events, get_events_with_query]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
either_name = pytest.mark.parametrize("named_by", ["session_id", "id"], ids=["label", "completion_id"])


def come_back(client, way, after, named_by="session_id"):
    ref = view(client)[named_by]
    method, url, request = way(f"{ref}:{after}", ref)
    return client.request(method, url, **request)


@every_way
@either_name
def test_a_reader_that_returns_gets_every_frame_it_missed_and_then_the_live_ones(client, way, named_by):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)
    say(model, 3)
    with begin(http) as stream:
        seen = stream.frames(2)
    wait_until(lambda: view(http)["frames"] == 4)

    ref = view(http)[named_by]
    method, url, request = way(f"{ref}:1", ref)
    with reading(http, method, url, **request) as stream:
        seen += stream.frames(2)
        say(model)
        seen += stream.rest()

    assert indices(seen) == list(range(COUNT))
    assert text_of(parsed(seen)) == "".join(WORDS)
    assert model.opened == 1


@every_way
@either_name
def test_after_the_last_frame_of_a_finished_session_there_is_nothing(client, way, named_by):
    http = client(ScriptedModel(*WORDS))
    finish(http)

    response = come_back(http, way, COUNT - 1, named_by)

    assert response.content == b""
    assert response.status_code == (204 if "get" in way.__name__ else 200)
    if response.status_code == 200:
        assert response.headers["content-type"].startswith("text/event-stream")


@every_way
@either_name
@pytest.mark.parametrize("fields, values", [({}, {"persist_sessions": False}), ({"store": False}, {})],
                         ids=["no storage", "store: false"])
def test_frames_that_left_memory_and_are_not_on_disk_are_gone(client, way, named_by, fields, values):
    http = client(ScriptedModel(*WORDS), session_buffer_frames=3, **values)
    finish(http, **fields)
    wait_until(lambda: view(http)["status"] == "completed")  # its own reader may have fallen behind

    gone, kept = (come_back(http, way, after, named_by) for after in (COUNT - 5, COUNT - 4))

    assert error_of(gone) == (410, "events_expired")
    assert indices(wires(kept.content)) == [COUNT - 3, COUNT - 2, COUNT - 1]


def test_reading_from_the_start_is_refused_when_the_start_is_gone(client):
    http = client(ScriptedModel(*WORDS), session_buffer_frames=3, persist_sessions=False)
    finish(http)
    wait_until(lambda: view(http)["status"] == "completed")  # its own reader may have fallen behind

    assert error_of(events(http)) == (410, "events_expired")


@every_way
@either_name
def test_frames_that_left_memory_are_read_from_disk(client, way, named_by):
    http = client(ScriptedModel(*WORDS), session_buffer_frames=2)
    frames = finish(http)

    assert wires(come_back(http, way, 0, named_by).content) == frames[1:]


BAD_INDICES = {"the next": str(COUNT), "too high": "999999999", "negative": "-1", "a word": "x", "empty": "",
               "a fraction": "1.0", "other digits": "\u0661", "spaced": " 1", "plus": "+1", "10 kB": "1" * 10_000,
               "CR LF": "1\r\nx-evil: yes", "LF": "1\n"}


@every_way
@pytest.mark.parametrize("index", BAD_INDICES.values(), ids=BAD_INDICES)
def test_an_index_that_no_frame_has_is_refused(client, way, index):
    http = client(ScriptedModel(*WORDS))
    finish(http)

    response = come_back(http, way, index)

    assert error_of(response) == (400, "invalid_last_event_id")
    assert "x-evil" not in response.headers


@every_way
@pytest.mark.parametrize("event_id", ["s1", ":1", "a b:1", "x" * 10_000, "s1:1:1", "/etc/passwd:1"])
def test_a_last_event_id_that_names_no_session_and_frame_is_refused(client, way, event_id):
    http = client(ScriptedModel(*WORDS))
    finish(http)
    method, url, request = way(event_id, "s1")

    assert error_of(http.request(method, url, **request)) == (400, "invalid_last_event_id")


@pytest.mark.parametrize("persist", [True, False])
def test_unknown_and_expired_sessions_have_one_and_the_same_answer(client, persist):
    http = client(ScriptedModel(*WORDS), sessions_ttl_seconds=0.2, persist_sessions=persist)
    frames = finish(http)
    completion_id = chunks(frames)[0]["id"]
    wait_until(lambda: http.get("/v1/sessions/s1").status_code == 404)

    answers = set()
    for ref in ("s1", completion_id, "never-was", "chatcmpl-0"):
        tries = [way(f"{ref}:0", ref) for way in WAYS]
        tries += [("GET", f"/v1/sessions/{ref}", {}), ("GET", f"/v1/sessions/{ref}/events", {}),
                  ("POST", f"/v1/cancel/{ref}", {})]
        for method, url, request in tries:
            response = http.request(method, url, **request)
            answers.add((response.status_code, response.text))

    assert len(answers) == 1
    status, body = answers.pop()
    assert (status, json.loads(body)["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize("way", [post_again, post_with_query, get_events, get_events_with_query])
def test_a_last_event_id_of_another_session_is_refused(client, way):
    http = client(ScriptedModel(*WORDS))
    finish(http, "s1")
    finish(http, "s2")
    method, url, request = way("s2:0", "s1")

    assert error_of(http.request(method, url, **request)) == (400, "invalid_last_event_id")


def test_an_empty_last_event_id_is_absent(client):
    http = client(ScriptedModel(*WORDS))
    method, url, request = post_again("", "s1")

    frames = wires(http.request(method, url, **request).content)

    assert indices(frames) == list(range(COUNT))
    assert wires(events(http, headers={"last-event-id": ""}).content) == frames


def test_the_header_that_a_client_keeps_current_wins_over_the_query(client):
    http = client(ScriptedModel(*WORDS))
    frames = finish(http)

    response = events(http, params={"last_event_id": "s1:0"}, headers={"last-event-id": "s1:4"})

    assert wires(response.content) == frames[5:]


# -- labels --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["in_progress", "completed"])
def test_a_label_that_is_taken_is_refused_with_its_state_and_how_to_resume(client, stream, state):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)
    with begin(http) as first:
        first.frames(1)
        wait_until(lambda: view(http)["status"] == "in_progress")
        if state == "completed":
            say(model)
            first.rest()

        response = http.post(CHAT, json=chat(session_id="s1", stream=stream))

        assert error_of(response) == (409, "session_exists")
        assert response.headers["x-should-retry"] == "false"
        message = response.json()["error"]["message"]
        assert state in message and "Last-Event-ID" in message and "/v1/sessions/s1/events" in message
        assert model.opened == 1


def test_of_many_requests_with_one_label_one_generates(client, pool):
    model = ScriptedModel(*WORDS)
    http = loaded(client(model))
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return http.post(CHAT, json=chat(session_id="s1")).status_code

    assert sorted(pool.map(ask, range(8))) == [200] + [409] * 7
    assert model.opened == 2  # one to load, one to answer


def test_a_label_is_free_again_when_its_session_has_expired(client):
    model = ScriptedModel(*WORDS)
    http = client(model, sessions_ttl_seconds=0.2)
    first = finish(http)
    wait_until(lambda: http.get("/v1/sessions/s1").status_code == 404)

    second = finish(http)

    assert chunks(second)[0]["id"] != chunks(first)[0]["id"]
    assert model.opened == 2


def test_a_refused_request_leaves_its_label_free(client):
    http = loaded(client(ScriptedModel(*WORDS)))
    refused = http.post(CHAT, json=chat(session_id="s1", max_tokens=100_000))

    assert error_of(refused) == (400, "context_length_exceeded")
    assert http.get("/v1/sessions/s1").status_code == 404
    assert http.post(CHAT, json=chat(session_id="s1")).status_code == 200


def test_the_official_sdk_tries_a_taken_label_once(client):
    http = client(ScriptedModel(*WORDS))
    finish(http)
    sent = []
    http.event_hooks = {"request": [sent.append]}
    sdk = OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=2)

    with pytest.raises(openai.ConflictError):
        sdk.chat.completions.create(**chat(), extra_body={"session_id": "s1"})

    assert len(sent) == 1


# -- the wire ------------------------------------------------------------------------------------------------------
def test_a_frame_is_its_data_then_its_id(client):
    http = client(ScriptedModel(*WORDS))

    body = http.post(CHAT, json=chat(stream=True, session_id="s1")).content

    assert re.fullmatch(rb"(data: [^\n]+\nid: s1:[0-9]+\n\n)+", body)
    assert body.endswith(b"data: [DONE]\nid: s1:%d\n\n" % (COUNT - 1))


def test_without_a_label_the_completion_id_stands_in_the_frame_ids(client):
    http = client(ScriptedModel(*WORDS))

    response = http.post(CHAT, json=chat(stream=True))

    frames = wires(response.content)
    completion_id = chunks(frames)[0]["id"]
    assert [f["id"] for f in parsed(frames)] == [f"{completion_id}:{n}" for n in range(COUNT)]
    assert response.headers["x-session-id"] == completion_id


def test_a_plain_json_answer_is_a_session_that_can_be_read(client):
    http = client(ScriptedModel(*WORDS))

    answer = http.post(CHAT, json=chat())

    assert answer.headers["x-session-id"] == answer.json()["id"]
    frames = wires(events(http, answer.json()["id"]).content)
    assert text_of(parsed(frames)) == answer.json()["choices"][0]["message"]["content"]


def test_ids_can_be_limited_to_requests_that_name_a_session(client):
    http = client(ScriptedModel(*WORDS), sse_ids="session")

    plain = http.post(CHAT, json=chat(stream=True))
    named = finish(http)
    resumed = events(http, plain.headers["x-session-id"])

    assert re.fullmatch(rb"(data: [^\n]+\n\n)+", plain.content)
    assert indices(named) == indices(wires(resumed.content)) == list(range(COUNT))


def test_while_a_stream_waits_it_carries_pings_in_the_one_safe_form(client):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model, max_concurrent_requests=1, keepalive_seconds=0.02)
    with begin(http, "running") as running:
        running.frames(1)
        wait_until(lambda: view(http, "running")["status"] == "in_progress")
        with http.stream("POST", CHAT, json=chat(stream=True, session_id="s1")) as response:
            received, waiting = b"", response.iter_bytes()
            while received.count(b": ping\n") < 3:
                received += next(waiting)

            assert view(http)["status"] == "queued"
            assert re.fullmatch(rb"data: [^\n]+\nid: s1:0\n\n(: ping\n){3}", received)


@pytest.mark.parametrize("keepalive, beginning", [(600, b""), (0.02, b": ping\n: ping\n")])
def test_the_session_is_known_while_the_model_loads(settings, keepalive, beginning):
    gate = threading.Event()
    app = main.create_app(settings(keepalive_seconds=keepalive), load=lambda *_: gate.wait() and ScriptedModel(*WORDS))
    with TestClient(app) as http, http.stream("POST", CHAT, json=chat(stream=True)) as response:
        session, received, body = response.headers["x-session-id"], b"", response.iter_bytes()
        while len(received) < len(beginning):
            received += next(body)

        assert received == beginning
        assert (view(http, session)["status"], view(http, session)["frames"]) == ("queued", 0)
        gate.set()
        assert indices(wires(received + b"".join(body))) == list(range(COUNT))


def test_a_session_shows_its_state_counts_and_times(client):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)
    before = time.time()
    with begin(http) as stream:
        stream.frames(1)
        running = wait_until(lambda: view(http)["status"] == "in_progress" and view(http))
        say(model)
        completion_id = chunks(stream.rest())[0]["id"]
    wait_until(lambda: view(http)["readers"] == 0)

    ended = view(http, completion_id)

    assert running["ended_at"] is None and running["readers"] == 1 and running["frames"] == 1
    assert before <= ended["created_at"] <= ended["ended_at"] <= time.time()
    assert ended == {**running, "status": "completed", "frames": COUNT, "readers": 0, "ended_at": ended["ended_at"]}
    assert (ended["id"], ended["session_id"], ended["object"]) == (completion_id, "s1", "session")


def test_sessions_are_listed_newest_first(client):
    http = client(ScriptedModel(*WORDS))
    for label in ("old", "middle", "new"):
        finish(http, label)
    wait_until(lambda: view(http, "new")["readers"] == 0)

    listing = http.get("/v1/sessions").json()

    assert [s["session_id"] for s in listing["data"]] == ["new", "middle", "old"]
    assert listing["data"][0] == view(http, "new")


# -- many readers --------------------------------------------------------------------------------------------------
def test_two_readers_and_a_latecomer_see_the_same_bytes(online, pool):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model)

    def read(method="GET", url="/v1/sessions/s1/events", **request):
        return http.request(method, url, **request).content

    first = pool.submit(read, "POST", CHAT, json=chat(stream=True, session_id="s1"))
    wait_until(lambda: view(http).get("frames") == 1)
    second = pool.submit(read)
    wait_until(lambda: view(http)["readers"] == 2)
    say(model, 3)
    wait_until(lambda: view(http)["frames"] == 4)
    latecomer = pool.submit(read)
    wait_until(lambda: view(http)["readers"] == 3)
    say(model)

    assert indices(wires(first.result())) == list(range(COUNT))
    assert first.result() == second.result() == latecomer.result() == read()


@contextlib.contextmanager
def deaf_reader(http, url):
    """A reader that asks and then never reads."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((http.base_url.host, http.base_url.port))
        deaf.sendall(f"GET {url} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        yield


def big_model():
    return ScriptedModel(*["x" * 50_000] * 400, gated=True)  # 20 MB: more than sockets hold between two processes


def test_a_reader_that_never_reads_slows_nobody(online):
    model = big_model()
    http = online(model, send_timeout_seconds=600, max_tokens=1000)
    with begin(http) as stream, deaf_reader(http, "/v1/sessions/s1/events"):
        wait_until(lambda: view(http)["readers"] == 2)
        say(model, 1000)

        assert indices(stream.rest()) == list(range(len(model.words) + 3))
        wait_until(lambda: view(http)["readers"] == 1)  # the deaf one is still there


def test_a_reader_that_takes_nothing_is_dropped_after_a_while(online):
    model = big_model()
    http = online(model, send_timeout_seconds=0.5, max_tokens=1000)
    with begin(http) as stream, deaf_reader(http, "/v1/sessions/s1/events"):
        wait_until(lambda: view(http)["readers"] == 2)
        say(model, 1000)
        stream.rest()

        wait_until(lambda: view(http)["readers"] == 0)


def test_a_reader_that_falls_behind_what_is_kept_is_told_so(client):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model, persist_sessions=False, session_buffer_frames=2)
    with begin(http) as stream:
        first = stream.frame()
        say(model)
        wait_until(lambda: view(http)["status"] == "completed")

        *_, error, done = parsed([first, *stream.rest()])

    assert json.loads(error["data"])["error"]["code"] == "events_expired"
    assert (done["data"], "id" in done, "id" in error) == ("[DONE]", False, False)


# -- leaving -------------------------------------------------------------------------------------------------------
def test_a_generation_ends_some_time_after_its_last_reader_unless_one_returns(online):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model, **SOON_CANCELLED)
    with begin(http, "returned-to") as stream:
        stream.frames(1)
    wait_until(lambda: view(http, "returned-to")["readers"] == 0)
    with reading(http, "GET", "/v1/sessions/returned-to/events") as returned:
        returned.frames(1)
        with begin(http, "left") as stream:
            stream.frames(1)
        wait_until(lambda: view(http, "left")["status"] == "cancelled")  # the other's grace would be over by now

        say(model)

        assert chunks(returned.rest())[-1]["choices"][0]["finish_reason"] == "stop"
    last = chunks(wires(events(http, "left").content))[-1]
    assert last["choices"][0]["finish_reason"] == "cancelled"
    assert model.drawn < 2 * len(WORDS)


def test_a_stream_that_still_has_a_reader_outlives_the_others(online):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model, **SOON_CANCELLED)
    with begin(http) as stream:
        stream.frames(1)
        with reading(http, "GET", "/v1/sessions/s1/events") as other:
            other.frames(1)
        with begin(http, "left") as left:
            left.frames(1)
        wait_until(lambda: view(http, "left")["status"] == "cancelled")

        say(model)

        assert chunks(stream.rest())[-1]["choices"][0]["finish_reason"] == "stop"


def test_without_a_grace_nothing_is_cancelled_for_want_of_readers(online):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model, cancel_after_disconnect_seconds=0)
    with begin(http) as stream:
        stream.frames(1)
    wait_until(lambda: view(http)["readers"] == 0)

    say(model)

    wait_until(lambda: view(http)["status"] == "completed")
    assert text_of(parsed(wires(events(http).content))) == "".join(WORDS)


def test_a_plain_json_request_ends_when_its_client_leaves(online):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model)
    body = json.dumps(chat(session_id="s1"))
    with socket.create_connection((http.base_url.host, http.base_url.port)) as leaving:
        leaving.sendall((f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                         f"content-length: {len(body)}\r\n\r\n{body}").encode())
        wait_until(lambda: view(http).get("status") == "in_progress")

    wait_until(lambda: view(http)["status"] == "cancelled")
    say(model)
    assert http.post(CHAT, json=chat()).status_code == 200
    assert model.drawn < 2 * len(WORDS)


def test_for_a_new_request_the_unread_one_left_longest_ago_makes_room(online):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model, max_concurrent_requests=3)
    for label in ("returned-to", "left-first", "left-second"):
        with begin(http, label) as stream:
            stream.frames(1)
        wait_until(lambda label=label: view(http, label)["readers"] == 0)
    with reading(http, "GET", "/v1/sessions/returned-to/events") as returned:
        returned.frames(1)

        with begin(http, "new") as new:
            new.frames(1)
            wait_until(lambda: view(http, "left-first")["status"] == "cancelled")
            say(model)

            for label in ("returned-to", "left-second", "new"):
                wait_until(lambda label=label: view(http, label)["status"] == "completed")


def test_who_leaves_while_others_queue_makes_room_at_once(online):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model, max_concurrent_requests=1)
    with begin(http, "left") as left:
        left.frames(1)
        with begin(http, "queued") as queued:
            queued.frames(1)
            assert view(http, "queued")["status"] == "queued"
            left.response.close()

            wait_until(lambda: view(http, "left")["status"] == "cancelled")
            say(model)
            assert chunks(queued.rest())[-1]["choices"][0]["finish_reason"] == "stop"


# -- cancelling ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("named_by", ["session_id", "id"])
@pytest.mark.parametrize("phase", ["loading", "queued", "prefill", "decode"])
def test_every_reader_of_a_cancelled_session_gets_the_terminal_frames(settings, pool, phase, named_by):
    model, gate, prompt = SteppedModel(*WORDS), threading.Event(), "word " * 40
    app = main.create_app(settings(max_batch_tokens=16, max_concurrent_requests=1),
                          load=lambda *_: gate.wait() and model)
    with running_app(app) as base, httpx2.Client(base_url=base) as http, contextlib.ExitStack() as stack:
        if phase != "loading":
            gate.set()
        if phase == "queued":
            stack.enter_context(begin(http, "ahead")).frames(1)
        first = pool.submit(http.post, CHAT, json=chat(prompt, stream=True, session_id="s1"))
        wait_until(lambda: http.get("/v1/sessions/s1").status_code == 200)
        second = pool.submit(events, http)
        wait_until(lambda: view(http)["readers"] == 2)
        say(model, {"prefill": 2, "decode": 5}.get(phase, 0))
        frames_then = {"loading": 0, "queued": 1, "prefill": 1, "decode": 4}[phase]
        wait_until(lambda: view(http)["frames"] == frames_then and model.prompt_tokens in (0, 32, 40))

        ref = view(http)[named_by]
        cancelled = http.post(f"/v1/cancel/{ref}")

        assert cancelled.json() == {"id": view(http)["id"], "object": "session", "status": "cancelled", "ok": True}
        frames = wires(first.result().content)
        assert wires(second.result().content) == frames
        assert indices(frames) == list(range(frames_then + 2))
        assert chunks(frames)[-1]["choices"][0]["finish_reason"] == "cancelled"
        assert parsed(frames)[-1]["data"] == "[DONE]"
        assert http.post(f"/v1/cancel/{ref}").json() == cancelled.json()
        gate.set()
        say(model, 1000)


def test_a_cancelled_generation_is_computed_no_further(client, pool):
    model = SteppedModel(*WORDS)
    http = client(model, max_batch_tokens=16)
    with begin(http, messages=chat("word " * 400)["messages"]) as stream:
        stream.frames(1)
        say(model, 2)
        wait_until(lambda: model.prompt_tokens == 32)

        http.post("/v1/cancel/s1")
        say(model, 1000)
        http.post(CHAT, json=chat())

    assert model.prompt_tokens <= 32 + 16 + 1  # the step that was under way, and the other's prompt


@pytest.mark.parametrize("words_said", [0, 3])
def test_a_cancelled_plain_json_request_gets_the_partial_answer(online, pool, words_said):
    model = ScriptedModel(*WORDS, gated=True)
    http = online(model)
    answer = pool.submit(http.post, CHAT, json=chat(session_id="s1"))
    wait_until(lambda: view(http).get("status") == "in_progress")
    say(model, words_said)
    wait_until(lambda: view(http)["frames"] == 1 + words_said)

    http.post("/v1/cancel/s1")

    assert answer.result().status_code == 200
    choice = answer.result().json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("cancelled", "".join(WORDS[:words_said]))
    assert answer.result().json()["usage"]["completion_tokens"] == words_said
    say(model)


@pytest.mark.parametrize("fail_at, status", [(None, "completed"), (2, "failed")])
def test_cancelling_what_has_ended_changes_nothing(client, fail_at, status):
    http = client(ScriptedModel(*WORDS, fail_at=fail_at))
    frames = finish(http)

    answers = [http.post("/v1/cancel/s1") for _ in range(2)]

    assert [(a.status_code, a.json()["status"], a.json()["ok"]) for a in answers] == [(200, status, True)] * 2
    assert wires(events(http).content) == frames


def test_cancelling_what_nobody_knows_is_not_found(client):
    assert error_of(client(ScriptedModel()).post("/v1/cancel/s1")) == (404, "session_not_found")


# -- storage -------------------------------------------------------------------------------------------------------
def test_store_false_leaves_no_trace_on_disk(client, database):
    http = client(ScriptedModel("secret"))
    frames = finish(http, "private", store=False)
    finish(http, "public")

    assert wires(events(http, "private").content) == frames
    assert [label for (label,) in rows(database, "SELECT label FROM sessions")] == ["public"]
    assert rows(database, "SELECT DISTINCT session FROM frames") == rows(database, "SELECT id FROM sessions")
    on_disk = b"".join(path.read_bytes() for path in database.parent.glob("sessions.db*"))
    assert b"public" in on_disk and b"private" not in on_disk


def test_what_is_not_stored_can_be_read_for_a_minute(settings):
    async def scenario():
        store, session = main.SessionStore(settings(), None), main.Session("s", "chat", stored=False)
        await store.begin(session)
        store.append(session, [(None, "[DONE]")], status="completed")
        found = []
        for age in (0, 55, 65):
            session.ended = time.time() - age
            found.append(await store.find("s", main.ANYBODY) is session)
        store.sweep()
        return found, await store.list(main.ANYBODY)

    assert asyncio.run(scenario()) == ([True, True, False], [])


def test_expired_sessions_leave_the_disk(client, database):
    http = client(ScriptedModel(*WORDS), sessions_ttl_seconds=0.2)
    finish(http)

    wait_until(lambda: rows(database, "SELECT 1 FROM sessions UNION ALL SELECT 1 FROM frames") == [])

    assert http.get("/v1/sessions").json()["data"] == []


def test_a_running_session_never_expires(settings):
    async def scenario():
        store = main.SessionStore(settings(sessions_ttl_seconds=1), None)
        session = main.Session("s", "chat", created=0)
        await store.begin(session)
        store.append(session, [(None, "{}")])
        store.sweep()
        return await store.find("s", main.ANYBODY) is session

    assert asyncio.run(scenario())


@pytest.mark.parametrize("bounds", [
    {"session_buffer_frames": 3}, {"session_buffer_mib": (2000 + 3 * main.FRAME_BYTES) / 2**20}])
def test_a_session_keeps_its_newest_frames_within_its_bounds(settings, bounds):
    async def scenario():
        store, session = main.SessionStore(settings(**bounds), None), main.Session("s", "chat")
        for n in range(50):
            store.append(session, [(None, f"{n:0500}")])
        return session

    session = asyncio.run(scenario())

    assert len(session.frames) == 3 and session.count == 50  # 500 bytes each, and their ids
    assert session.frames == [main.make_frame("s", n, None, f"{n:0500}") for n in (47, 48, 49)]
    assert session.bytes == sum(len(f) + main.FRAME_BYTES for f in session.frames)


@contextlib.contextmanager
def on_disk(settings):
    """A store over a real file, and its log."""
    log = main.SessionLog(settings().sessions_db_path)
    log.start()
    try:
        yield main.SessionStore(settings(), log), log
    finally:
        log.stop()


def test_a_row_that_is_out_of_date_makes_no_session_that_never_ends(settings):
    async def scenario():
        session = main.Session("s", "chat", "label")
        with on_disk(settings) as (store, _):
            await store.begin(session)
            listed = asyncio.ensure_future(store.list(main.ANYBODY))
            sought = asyncio.ensure_future(store.find("label", main.ANYBODY))
            store._evict(session)  # while its rows are being read
            return [await listed, await sought, await store.find("s", main.ANYBODY)]

    assert asyncio.run(scenario()) == [[], None, None]


def test_a_cancel_answers_only_when_the_last_frames_are_on_disk(settings):
    async def scenario():
        server, session = main.Server(settings(persist_sessions=False), None), main.Session("s", "chat")
        session.status = "in_progress"  # its last frames are made, the commit is not
        cancelling = asyncio.ensure_future(server.cancel(session))
        for _ in range(10):
            await asyncio.sleep(0)
        early = cancelling.done()
        session.publish([], "cancelled", 1.0)
        await cancelling
        return early, session.status

    assert asyncio.run(scenario()) == (False, "cancelled")


def test_a_listing_brings_no_expired_session_back_over_the_one_that_has_its_label_now(settings):
    async def scenario():
        old, new = main.Session("old", "chat", "label"), main.Session("new", "chat", "label", stored=False)
        with on_disk(settings) as (store, log):
            await store.begin(old)
            store.append(old, [(None, "{}")], status="completed")
            await old.until()
            store._evict(old)
            log.write("old", [("UPDATE sessions SET ended = 1 WHERE id = 'old'", ())])  # long ago, and not yet swept
            await store.begin(new)
            await store.list(main.ANYBODY)
            return await store.find("label", main.ANYBODY) is new

    assert asyncio.run(scenario())


def test_a_reader_of_a_stream_that_is_refused_is_told_so(live):
    model = ScriptedModel("a", context=8)
    prepare, entered, gate = model.prepare, threading.Event(), threading.Event()

    def held(chat):
        entered.set()
        assert gate.wait(30)
        return prepare(chat)

    base = live(model)
    assert httpx2.post(f"{base}{CHAT}", json=chat()).status_code == 200  # the model is loaded
    entered.clear()
    model.prepare = held
    with ThreadPoolExecutor(1) as pool:
        body = chat("x " * 9, stream=True, session_id="s1")
        refused = pool.submit(httpx2.post, f"{base}{CHAT}", json=body, timeout=60)
        assert entered.wait(30)
        with httpx2.stream("GET", f"{base}/v1/sessions/s1/events", timeout=60) as reader:
            gate.set()
            frames = parse_sse("".join(reader.iter_text()))
    assert refused.result().status_code == 400
    assert [json.loads(frames[0]["data"])["error"]["code"], frames[1]["data"]] == ["context_length_exceeded", "[DONE]"]


def test_a_file_that_is_deleted_while_the_server_runs_is_noticed(client, database):
    http = client(ScriptedModel(*WORDS))
    finish(http)
    for path in database.parent.glob(f"{database.name}*"):
        path.unlink()
    assert http.post(CHAT, json=chat(stream=True)).text.endswith("\n\n")
    assert http.get("/ready").json()["storage"] == "degraded"


def test_above_the_bound_of_all_frames_the_oldest_finished_sessions_go_first(settings):
    async def scenario():
        store = main.SessionStore(settings(sessions_buffer_mib=0.1), None)
        sessions = [main.Session(f"s{n}", "chat") for n in range(20)]
        for session in sessions:
            await store.begin(session)
            store.append(session, [(None, "x" * 10_000)], status=None if session is sessions[0] else "completed")
        found = [await store.find(s.id, main.ANYBODY) for s in sessions]
        return sessions, found

    sessions, found = asyncio.run(scenario())

    kept = [s for s in found if s]
    assert kept[0] is sessions[0] and kept[1:] == sessions[-len(kept) + 1:]
    assert 2 < len(kept) < 20 and sum(s.bytes for s in kept) <= 0.1 * 2**20


def test_above_the_bound_those_go_first_that_disk_has_too(settings):
    async def scenario():
        store = main.SessionStore(settings(sessions_buffer_mib=0.1), None)
        sessions = [main.Session(f"s{n}", "chat", stored=n > 4) for n in range(20)]
        for session in sessions:
            await store.begin(session)
            store.append(session, [(None, "x" * 10_000)], status="completed")
        return [await store.find(s.id, main.ANYBODY) for s in sessions]

    found = asyncio.run(scenario())

    assert all(found[:5]) and found.count(None) > 10


def test_a_session_that_memory_let_go_is_found_on_disk(client):
    http = client(ScriptedModel(*WORDS), sessions_buffer_mib=0.001)
    frames = finish(http)
    wait_until(lambda: view(http)["readers"] == 0)
    finish(http, "another")

    assert wires(events(http).content) == frames
    assert view(http)["status"] == "completed"


def test_no_reader_sees_a_frame_before_it_is_committed(settings):
    async def scenario():
        log = HeldLog()
        store, session = main.SessionStore(settings(), log), main.Session("s", "chat")
        store.append(session, [(None, "one")])
        store.append(session, [(None, "[DONE]")], status="completed")
        reading = asyncio.ensure_future(anext(aiter(store.read(session))))
        seen = []
        for committed in (None, *log.held):
            if committed:
                committed()
            for _ in range(10):
                await asyncio.sleep(0)
            seen.append((reading.done(), session.count, session.ended is not None))
        return seen, await reading

    seen, batch = asyncio.run(scenario())

    assert seen == [(False, 0, False), (True, 1, False), (True, 2, True)]
    assert batch == [main.make_frame("s", 0, None, "one")]


def test_no_session_is_announced_before_it_is_committed(settings):
    async def scenario():
        log = HeldLog()
        store = main.SessionStore(settings(), log)
        beginning = asyncio.ensure_future(store.begin(main.Session("s", "chat")))
        for _ in range(10):
            await asyncio.sleep(0)
        before = beginning.done()
        log.held.pop()()
        await asyncio.wait_for(beginning, 20)
        return before

    assert asyncio.run(scenario()) is False


def test_what_a_reader_holds_is_on_disk_already(online, database):
    http = online(ScriptedModel(*WORDS))
    with begin(http) as stream:
        session = stream.response.headers["x-session-id"]
        assert rows(database, "SELECT label FROM sessions WHERE id = ?", session) == [("s1",)]
        for n in range(COUNT):
            data = parsed([stream.frame()])[0]["data"]
            assert rows(database, "SELECT data FROM frames WHERE session = ? AND idx = ?", session, n) == [(data,)]


def test_the_token_ids_behind_the_frames_are_kept_with_them(client, database):
    finish(client(ScriptedModel("a", "", "", "b")))

    behind = [json.loads(text or "[]") for (text,) in rows(database, "SELECT events FROM frames ORDER BY idx")]

    tokens = [[event[0] for event in events if isinstance(event[0], int)] for events in behind]
    assert tokens == [[], [1], [2, 3, 4], [0], []]


def test_a_finished_session_reads_the_same_in_the_next_life_of_the_server(settings):
    def life():
        return TestClient(main.create_app(settings(), load=lambda *_: ScriptedModel(*WORDS)))

    with life() as http:
        frames, before = finish(http), wait_until(lambda: view(http)["readers"] == 0 and view(http))
    with life() as http:
        assert http.get("/v1/sessions").json()["data"] == [before]
        assert wires(events(http).content) == frames
        assert error_of(http.post(CHAT, json=chat(session_id="s1"))) == (409, "session_exists")


def stored_frames(database):
    return rows(database, "SELECT idx, data FROM frames ORDER BY idx")


@contextlib.contextmanager
def answer_over_a_fault(http, model, database):
    """All frames of an answer whose storage failed after two of them, and fails still."""
    with begin(http) as stream:
        say(model, 1)
        frames = stream.frames(2)
        with locked(database):
            say(model)
            yield frames + stream.rest()


def test_a_storage_fault_never_fails_a_live_stream(client, database):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)

    with answer_over_a_fault(http, model, database) as frames:
        assert indices(frames) == list(range(COUNT))
        assert text_of(parsed(frames)) == "".join(WORDS)
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["storage"]) == (200, "degraded")
        assert len(stored_frames(database)) < COUNT


def test_a_storage_fault_keeps_nobody_from_beginning(client, database):
    http = loaded(client(ScriptedModel(*WORDS)))

    with locked(database):
        assert indices(finish(http)) == list(range(COUNT))


def test_what_could_not_be_written_is_written_when_storage_is_back(client, database):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)
    with answer_over_a_fault(http, model, database) as frames:
        assert http.get("/ready").json()["storage"] == "degraded"

    wait_until(lambda: http.get("/ready").json()["storage"] == "ok")

    assert stored_frames(database) == [(n, frame["data"]) for n, frame in enumerate(parsed(frames))]


def test_what_could_not_be_written_is_written_at_the_latest_when_the_server_stops(settings, database):
    model = ScriptedModel(*WORDS, gated=True)
    app = main.create_app(settings(), load=lambda *_: model)
    with TestClient(app) as http, answer_over_a_fault(http, model, database) as frames:
        pass

    assert stored_frames(database) == [(n, frame["data"]) for n, frame in enumerate(parsed(frames))]


def test_a_session_that_could_not_be_kept_whole_leaves_nothing_on_disk(database):
    async def scenario():
        log = main.SessionLog(database)
        log.start()

        async def write(first, last):
            written = asyncio.Event()
            for n in range(first, last):
                log.write("s", [("INSERT INTO frames (session, idx, data, events) VALUES ('s', ?, '', '')", (n,))])
            log.write("", [], written.set)
            await written.wait()

        hole = main.MAX_UNSAVED_WRITES + 1
        with locked(database):
            await write(0, hole)
            tried_again = time.monotonic() + 2 * main.RETRY_SECONDS
            while time.monotonic() < tried_again:
                await write(0, 0)
                await asyncio.sleep(0.05)
        while log.degraded:
            await write(0, 0)
        await write(hole, hole + 1)
        log.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))

    assert rows(database, "SELECT count(*) FROM frames") == [(0,)]


def refused_start(database, **env):
    """What a server says that cannot use its database."""
    done = subprocess.run(SCRIPTED_SERVER, env={**os.environ, "SESSIONS_DB_PATH": str(database), "PORT": "0", **env},
                          capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_second_server_on_the_same_file_is_refused(client, database):
    http = client(ScriptedModel(*WORDS))
    frames = finish(http)

    said = refused_start(database)

    assert f"{database} cannot be used" in said and "another server has it open" in said
    assert wires(events(http).content) == frames


def no_database(path):
    path.write_bytes(b"This is a letter, not a database. " * 100)


def newer_database(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("make", [no_database, newer_database, os.mkdir], ids=lambda make: make.__name__)
def test_a_file_that_is_no_session_file_is_refused(database, make):
    make(database)

    said = refused_start(database)

    assert f"SESSIONS_DB_PATH {database} cannot be used" in said and "PERSIST_SESSIONS=0" in said


def test_a_file_that_is_no_database_is_left_as_it_was(database):
    no_database(database)
    before = database.read_bytes()

    refused_start(database)

    assert database.read_bytes() == before
