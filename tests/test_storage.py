"""The file of the sessions under bad luck: locked, full, gone, damaged, read-only, of an older make, under a clock that
is set back. Real SQLite files, and where streams are promised something, real servers."""
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import psutil
import pytest
from conftest import SCRIPTED_SERVER, ScriptedModel, TestClient, chat, main, parse_sse, text_of, wait_until
from test_sessions import CHAT, COUNT, WORDS, begin, events, finish, indices, locked, parsed, refused_start, rows, view

RESPONSES = "/v1/responses"
FAILS, WORKS = "session storage fails", "session storage works again"
YEARS = 10 * 365 * 86400


@pytest.fixture
def database(tmp_path):
    return tmp_path / "sessions.db"


@pytest.fixture
def online(start):
    """`online(**environment)` is a client of a real server over a scripted model, and that server."""
    with contextlib.ExitStack() as stack:

        def make(**env):
            server = start(SCRIPTED_SERVER, **{"WORDS": 600, "MAX_TOKENS": 2000, **env})
            return stack.enter_context(httpx2.Client(base_url=server.base, timeout=60)), server

        yield make


@pytest.fixture
def served(settings):
    """`served(path)` is a client of a server over the file there, in process."""
    with contextlib.ExitStack() as stack:

        def make(path, model=None, **values):
            model = model or ScriptedModel(*WORDS)
            app = main.create_app(settings(sessions_db_path=path, **values), load=lambda *_: model)
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield make


def faults(path):
    with closing(sqlite3.connect(path)) as db:
        return [row for row in db.execute("PRAGMA integrity_check").fetchall() if row != ("ok",)]


def storage(http):
    return http.get("/ready").json()["storage"]


def kept(database, label):
    """The frames of a session as they are on disk."""
    query = "SELECT idx, data FROM frames WHERE session = (SELECT id FROM sessions WHERE label = ?) ORDER BY idx"
    return rows(database, query, label)


def numbered(frames):
    return [(n, frame["data"]) for n, frame in enumerate(parsed(frames))]


# -- what befalls it while streams run -------------------------------------------------------------------------------
@contextlib.contextmanager
def held_by_another(database, server):
    with locked(database):
        yield


@contextlib.contextmanager
def no_room(database, server):
    """The system lets the server's files grow no further."""
    process, size = psutil.Process(server.process.pid), Path(f"{database}-wal").stat().st_size
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (size, before[1]))
    yield
    process.rlimit(psutil.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def gone(database, server):
    database.rename(database.with_suffix(".away"))
    yield
    database.with_suffix(".away").rename(database)


@contextlib.contextmanager
def replaced(database, server):
    with gone(database, server):
        database.write_bytes(b"This is another file.")
        yield
        database.unlink()


BAD_LUCK = [held_by_another, gone, replaced]
BAD_LUCK += [no_room] if psutil.LINUX else []


@pytest.mark.parametrize("fault", BAD_LUCK, ids=lambda fault: fault.__name__)
def test_streams_go_on_over_a_fault_of_storage_and_all_is_written_when_it_ends(online, database, fault):
    http, server = online()
    with begin(http) as stream:
        frames = stream.frames(20)
        with fault(database, server):
            frames += stream.frames(250)  # longer than several tries to write take
            assert storage(http) == "degraded"
            assert len(finish(http, "meanwhile", max_tokens=3)) == 6
            assert fault in (gone, replaced) or len(kept(database, "s1")) < 270
        frames += stream.rest()
    wait_until(lambda: storage(http) == "ok")

    assert text_of(parsed(frames)) == "".join(f"w{n} " for n in range(600))
    assert kept(database, "s1") == numbered(frames) and len(kept(database, "meanwhile")) == 6
    said = Path(server.log).read_text()
    assert (said.count(FAILS), said.count(WORKS)) == (1, 1)
    server.kill()
    assert not faults(database)
    http, _ = online()
    assert parse_sse(events(http).text) == parsed(frames)


def test_streams_go_on_in_a_file_that_may_grow_no_further(client, database):
    model = ScriptedModel(*(f"{n:0500}" for n in range(100)), gated=True)
    http = client(model, session_buffer_frames=2)
    db = http.app.state.server.log._db
    with begin(http) as stream:
        model.gate.release(20)
        frames = stream.frames(20)
        db.execute("PRAGMA max_page_count = 1")  # the pages that there are
        model.gate.release(200)
        frames += stream.rest()

        assert storage(http) == "degraded" and len(kept(database, "s1")) < 103
        assert events(http).content == b"".join(frames)  # memory lets nothing go that is not on disk
    db.execute("PRAGMA max_page_count = 1000000")
    wait_until(lambda: storage(http) == "ok")
    assert kept(database, "s1") == numbered(frames)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_server_that_is_killed_over_a_fault_is_continued_from_what_is_on_disk(online, database, goes_on):
    http, server = online()
    with begin(http) as stream:
        held = stream.frames(20)
        with locked(database):
            held += stream.frames(150)
            assert storage(http) == "degraded"
            server.kill()
    assert not faults(database)
    written = kept(database, "s1")
    assert 20 <= len(written) < len(held)

    http, _ = online(**{} if goes_on else {"RESUME_AFTER_RESTART_SECONDS": 0})

    if goes_on:
        frames = parse_sse(events(http).text)
        assert frames[:len(held)] == parsed(held) and text_of(frames) == "".join(f"w{n} " for n in range(600))
    else:
        ahead = events(http, headers={"last-event-id": f"s1:{len(held) - 1}"})
        assert (ahead.status_code, ahead.json()["error"]["code"]) == (400, "invalid_last_event_id")
        frames = parse_sse(events(http).text)
        assert frames[:len(written)] == parsed(held)[:len(written)] and len(frames) == len(written) + 2


def test_what_no_file_would_take_costs_one_session_its_place_on_disk_and_no_other(client, database, caplog):
    model = ScriptedModel(*WORDS, gated=True)
    http = client(model)
    with begin(http, "bad") as bad, begin(http, "good") as good:
        wait_until(lambda: view(http, "bad")["frames"] == view(http, "good")["frames"] == 1)
        id = view(http, "bad")["id"]
        with closing(sqlite3.connect(database)) as db, db:  # where the next frame would go
            db.execute("INSERT INTO frames VALUES (?, 1, NULL, 'another', '')", (id,))
        model.gate.release(100)

        assert indices(bad.rest()) == indices(good.rest()) == list(range(COUNT))
    assert storage(http) == "ok" and len(kept(database, "good")) == COUNT
    assert rows(database, "SELECT 1 FROM frames WHERE session = ?", id) == []
    assert [record.message for record in caplog.records if "is not stored" in record.message] == [
        f"session {id} is not stored: UNIQUE constraint failed: frames.session, frames.idx"]


@pytest.mark.parametrize("kind", [main.TextDelta, main.ReasoningDelta, main.ToolCallDelta])
def test_what_cannot_be_told_of_ends_its_stream_with_an_error_and_harms_no_other(client, kind):
    model = ScriptedModel("a", kind("\ud800"), "b")
    http = client(model)

    frames = parsed(finish(http))

    assert json.loads(frames[-2]["data"])["error"]["code"] == "internal_error" and frames[-1]["data"] == "[DONE]"
    model.words = WORDS
    assert len(finish(http, "next")) == COUNT and storage(http) == "ok"


# -- what it finds at the start --------------------------------------------------------------------------------------
def as_anybody(*command):
    """For root, too, modes hold."""
    return (*(["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []), *command)


def read_only_file(database):
    database.touch(mode=0o400)


def read_only_folder(database):
    database.parent.chmod(0o500)


def read_only_folder_of_a_file(database):
    for path in (database, Path(f"{database}.lock")):
        path.touch(mode=0o600)
    database.parent.chmod(0o500)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
@pytest.mark.parametrize("make", [read_only_file, read_only_folder, read_only_folder_of_a_file],
                         ids=lambda make: make.__name__)
def test_where_nothing_can_be_written_the_start_is_refused(tmp_path, make):
    database = tmp_path / "kept" / "sessions.db"
    database.parent.mkdir()
    make(database)
    done = subprocess.run(as_anybody(*SCRIPTED_SERVER), capture_output=True, text=True, timeout=100, env={
        **os.environ, "SESSIONS_DB_PATH": str(database), "PORT": "0", "PYTHONDONTWRITEBYTECODE": "1"})
    database.parent.chmod(0o700)

    assert done.returncode != 0
    assert f"SESSIONS_DB_PATH {database} cannot be used" in done.stderr and "PERSIST_SESSIONS=0" in done.stderr


def test_a_second_server_is_refused_under_whichever_name_it_has_the_file(online, database, tmp_path):
    http, _ = online()
    link = tmp_path / "another.db"
    link.symlink_to(database)

    assert "another server has it open" in refused_start(link)
    assert finish(http, max_tokens=2)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_nobody_else_may_read_what_is_stored(online, tmp_path):
    before = os.umask(0)
    try:
        http, _ = online()
    finally:
        os.umask(before)
    finish(http, max_tokens=2)

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("sessions.db*")}
    assert {"sessions.db", "sessions.db-wal", "sessions.db-shm", "sessions.db.lock"} <= modes.keys()
    assert set(modes.values()) == {0o600}


@pytest.fixture
def lived(served, tmp_path):
    """A file with finished, stored and unfinished answers, as a killed server leaves it, and their ids."""
    model = ScriptedModel(*WORDS, gated=True)
    http = served(tmp_path / "lived.db", model)
    model.gate.release(1000)
    ids = [http.post(CHAT, json=chat(stream=True, store=True, session_id=f"s{n}")).headers["x-session-id"]
           for n in range(5)]
    ids += [http.post(RESPONSES, json={"input": "hi"}).json()["id"] for _ in range(2)]
    while model.gate.acquire(blocking=False):
        pass
    ids.append(http.post(RESPONSES, json={"input": "hi", "background": True}).json()["id"])
    model.gate.release(2)
    wait_until(lambda: view(http, ids[-1])["frames"] == 7)
    with closing(sqlite3.connect(tmp_path / "lived.db")) as db, closing(sqlite3.connect(tmp_path / "left.db")) as copy:
        db.backup(copy)
    model.gate.release(1000)
    return tmp_path / "left.db", ids


GARBAGE = ["CAST(x'ff80' AS TEXT)", "x'ff00'", "'x'", "-9e999", "9223372036854775807", "NULL", "'[1]'"]
COLUMNS = {"sessions": ("label", "owner", "kind", "created", "ended", "status"),
           "frames": ("idx", "event", "data", "events"), "requests": ("session", "request", "tries"),
           "objects": ("owner", "created", "asked", "result", "size")}


@pytest.mark.parametrize(("table", "column"), [(t, c) for t, columns in COLUMNS.items() for c in columns], ids=str)
def test_a_damaged_row_harms_no_other(served, lived, table, column):
    path, ids = lived
    key = "id" if table in ("sessions", "objects") else "session"
    with closing(sqlite3.connect(path)) as db:
        for id, garbage in zip(ids[1:], GARBAGE, strict=True):
            with contextlib.suppress(sqlite3.IntegrityError):  # NULL, where there can be none
                db.execute(f"UPDATE OR IGNORE {table} SET {column} = {garbage} WHERE {key} = ?", (id,))
        db.commit()

    http = served(path)

    assert indices(finish(http, "new")) == list(range(COUNT))
    assert indices(finish(http, "next", store=True)) == list(range(COUNT))
    assert view(http, "s0")["status"] == "completed" and len(parse_sse(events(http, "s0").text)) == COUNT
    assert {"s0", "new", "next"} <= {s["session_id"] for s in http.get("/v1/sessions").json()["data"]}
    for id in ids:
        for url in (f"/v1/sessions/{id}", f"{CHAT}/{id}", f"{CHAT}/{id}/messages", f"{RESPONSES}/{id}"):
            assert http.get(url).status_code in (200, 404)
        assert http.get(f"/v1/sessions/{id}/events").status_code in (200, 404)
    assert storage(http) == "ok"
    assert not faults(path)


def test_of_a_damaged_row_is_told_once(served, lived, caplog):
    path, ids = lived
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE sessions SET created = 'x' WHERE id = ?", (ids[1],))
        db.execute("UPDATE objects SET asked = '{' WHERE id = ?", (ids[5],))
    http = served(path)
    for _ in range(3):
        http.get("/v1/sessions")
        assert http.get(f"/v1/sessions/{ids[1]}").status_code == http.get(f"{RESPONSES}/{ids[5]}").status_code == 404

    assert sorted(r.message for r in caplog.records if r.message.endswith("is damaged")) == sorted(
        f"what is stored of '{id}' is damaged" for id in (ids[1], ids[5]))


def refusal(settings):
    """Why a server does not start with these settings, in process."""
    async def start_and_stop():
        server = main.Server(settings, lambda *_: ScriptedModel(*WORDS))
        await server.start()
        await server.stop()

    try:
        asyncio.run(start_and_stop())
    except SystemExit as refused:
        return str(refused)


def test_a_damaged_file_is_refused_at_the_start_or_harms_no_new_stream(served, settings, lived, tmp_path):
    path, _ = lived
    whole, outcomes = path.read_bytes(), set()
    for seed in range(40):
        damaged, draw = bytearray(whole), random.Random(seed)
        for _ in range(draw.choice((1, 4, 40))):
            at, size = draw.randrange(0, len(whole), 4096), draw.choice((8, 100, 4096))
            damaged[at: at + size] = draw.randbytes(size)
        file = tmp_path / f"damaged{seed}.db"
        file.write_bytes(damaged)
        if why := refusal(settings(sessions_db_path=shutil.copy(file, f"{file}.copy"))):
            assert re.fullmatch(r"SESSIONS_DB_PATH .*damaged.* cannot be used: .*", why)
            outcomes.add("refused")
            continue
        http = served(file)
        assert indices(finish(http, None)) == list(range(COUNT))  # whether a name is taken is not known everywhere
        outcomes.add(storage(http))

    assert {"refused", "ok"} <= outcomes <= {"refused", "ok", "degraded"}


def schema(path):
    return rows(path, "SELECT type, name, sql FROM sqlite_schema ORDER BY name"), rows(path, "PRAGMA user_version")


@pytest.mark.parametrize("version", range(len(main.SCHEMA)))
def test_a_file_of_any_age_is_brought_up_to_date_with_all_that_is_in_it(served, tmp_path, version):
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    with closing(sqlite3.connect(old)) as db:
        for step in main.SCHEMA[:version]:
            db.executescript(step)
        db.execute(f"PRAGMA user_version = {version}")
        if version:
            db.execute("INSERT INTO sessions VALUES ('chatcmpl-1', 'old', '', 'chat', 1e10, 1e10, 'completed')")
            db.execute("INSERT INTO sessions VALUES ('chatcmpl-2', 'cut', '', 'chat', 1e10, NULL, 'queued')")
            db.executemany("INSERT INTO frames VALUES (?, 0, NULL, ?, ?)", [
                ("chatcmpl-1", "[DONE]", b"\1\0\0\0"), ("chatcmpl-2", "{}", b"\1\0\0\0")])
        if version > 1:
            size = ", 9" if version > 2 else ""
            db.execute(f"INSERT INTO objects VALUES ('chatcmpl-1', '', 1e10, '{{\"messages\": []}}',"
                       f" '{{\"object\": \"chat.completion\"}}'{size})")
        db.commit()

    http = served(old)
    finish(served(new), "s1")

    assert indices(finish(http, "s1")) == list(range(COUNT))
    if version:
        assert parse_sse(events(http, "old").text) == [{"data": "[DONE]", "id": "old:0"}]
        assert json.loads(parse_sse(events(http, "cut").text)[1]["data"])["error"]["code"] == "server_restarted"
    if version > 1:
        assert http.get(f"{CHAT}/chatcmpl-1").json()["object"] == "chat.completion"
    assert schema(old) == schema(new) and not faults(old)


# -- the clock -------------------------------------------------------------------------------------------------------
@pytest.fixture
def clock(tmp_path):
    """`clock(seconds)` sets the servers' system clock wrong by so much; its file."""
    file = tmp_path / "clock"

    def set_to(seconds):
        whole = file.with_suffix(".new")
        whole.write_text(str(seconds))
        whole.replace(file)  # at no moment is it empty
        return file

    set_to(0)
    return set_to


def test_what_a_clock_that_was_ahead_left_behind_expires_as_ever(online, clock, database):
    http, _ = online(CLOCK=clock(YEARS), SESSIONS_TTL_SECONDS=2, RESPONSES_MAX_COUNT=2)
    finish(http, "ahead", max_tokens=2)
    old = [http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2}).json()["id"] for _ in range(3)]

    clock(0)

    new = http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2}).json()["id"]
    wait_until(lambda: http.get("/v1/sessions/ahead").status_code == 404)
    wait_until(lambda: rows(database, "SELECT COUNT(*) FROM sessions") == [(0,)])
    wait_until(lambda: rows(database, "SELECT COUNT(*) FROM objects") == [(2,)])
    assert http.get(f"{RESPONSES}/{new}").status_code == 200
    assert sorted(http.get(f"{RESPONSES}/{id}").status_code for id in old) == [200, 404, 404]


@pytest.mark.parametrize("steps", [(YEARS, 0), (0, YEARS)], ids=["back", "ahead"])
def test_a_clock_that_is_set_harms_no_stream_with_or_without_a_reader(online, clock, steps):
    http, server = online(CLOCK=clock(steps[0]), SECONDS=0.02, WORDS=200)
    with begin(http, "read") as stream:
        frames = stream.frames(5)
        with begin(http, "left") as left:
            left.frames(5)
        clock(steps[1])
        frames += stream.rest()

    assert indices(frames) == list(range(203))
    wait_until(lambda: view(http, "left")["status"] == "completed")
    for line in re.findall(r"after (\S+) s: \d+ tokens", Path(server.log).read_text()):
        assert 0 <= float(line) < 1000
    times = re.findall(r"^inference_(?:first_token|token)_seconds_sum (\S+)$", http.get("/metrics").text, re.M)
    assert len(times) == 2 and all(0 < float(sum) < 1000 for sum in times)


def test_an_answer_goes_on_after_a_kill_though_the_clock_was_set_back(online, clock):
    http, server = online(CLOCK=clock(YEARS), WORDS=300)
    with begin(http) as stream:
        stream.frames(5)
        server.kill()
    http, _ = online(CLOCK=clock(0), WORDS=300)

    assert text_of(parse_sse(events(http).text)) == "".join(f"w{n} " for n in range(300))


# -- bounds ----------------------------------------------------------------------------------------------------------
def pages(database):
    return rows(database, "PRAGMA page_count")[0][0] - rows(database, "PRAGMA freelist_count")[0][0]


def test_thousands_of_stored_answers_take_no_more_room_than_the_bounds_give(online, database):
    http, server = online(SECONDS=0, WORDS=3, SESSIONS_TTL_SECONDS=2, RESPONSES_MAX_COUNT=100, SESSIONS_BUFFER_MIB=1)
    process, taken = psutil.Process(server.process.pid), []

    def ask(_):
        assert http.post(RESPONSES, json={"input": "x" * 500}).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            list(pool.map(ask, range(600)))
            taken.append((process.memory_info().rss / 2**20, database.stat().st_size / 2**20))

    (_, _), (memory, disk), *_, (memory_then, disk_then) = taken
    assert memory_then < memory + 10 and disk_then < 2 * disk, taken
    wait_until(lambda: rows(database, "SELECT COUNT(*) FROM objects") == [(100,)])
    wait_until(lambda: rows(database, "SELECT COUNT(*) FROM frames") == [(0,)])


def test_what_is_deleted_gives_its_room_to_what_comes(client, database):
    http = client(ScriptedModel("x" * 200_000))

    def ask():
        return [http.post(RESPONSES, json={"input": "y" * 200_000}).json()["id"] for _ in range(5)]

    http.get("/v1/sessions")
    empty, ids = pages(database), ask()
    full = pages(database)
    for id in ids:
        assert http.delete(f"{RESPONSES}/{id}").status_code == 200
    http.get("/v1/sessions")  # by now all is written
    assert full > empty + 400 and pages(database) < empty + 20
    assert len(http.app.state.server.store) == 0
    ((size,),) = rows(database, "PRAGMA page_count")
    ask()
    assert rows(database, "PRAGMA page_count")[0][0] < size + 20
