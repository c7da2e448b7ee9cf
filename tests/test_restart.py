"""What a server's death costs: nothing that a client holds. Real processes, a real database file, real signals."""
import contextlib
import json
import signal
import socket
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from conftest import SCRIPTED_SERVER, chat, parse_sse, text_of, wait_until

CHAT = "/v1/chat/completions"
UVICORN = (sys.executable, "-m", "uvicorn", "main:app", "--port", "{port}")
GUARD_SECONDS = 60  # for what takes a second or two; far below every grace that would be waited out


@pytest.fixture
def scripted(start):
    """`scripted(WORDS=..., SECONDS=...)` is a real server over a scripted model. It goes on with nothing unless told."""
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


@pytest.mark.parametrize("command, env", [(SCRIPTED_SERVER, {"WORDS": 5000}), (UVICORN, {"TORCH_DTYPE": "float32"})],
                         ids=["python", "uvicorn main:app"])
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
        http.get("/health")  # an open connection: new ones are no longer accepted
        streaming_and_waiting(server, pool)
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
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n", b""], ids=["half a body", "half a header", "nothing"])
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
        deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b"content-length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: httpx2.get(f"{server.base}/v1/sessions/deaf").json().get("status") == "completed", 60)
        if timeout < 1:
            wait_until(lambda: "took nothing" in (tmp_path / "server.log").read_text())
            with contextlib.suppress(ConnectionResetError), deaf.makefile("rb") as late:
                assert b"[DONE]" not in late.read()  # what the server still held for it is gone with the connection
        server.terminate()
