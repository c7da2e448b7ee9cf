"""A storm: clients ask, are cut, come back, cancel, read nothing and send rubbish, while the server under them is
stopped and killed and starts again on the same database. In the end every answer is whole and nothing is left behind.

    python tests/chaos.py --lives 60 --seed 7 --crowd 120

Draws come from a seed, their order in time from the machine.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
from conftest import ROOT, Process, chat, parse_sse

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TINY_SERVER = [sys.executable, str(ROOT / "tests" / "tiny_server.py")]
GUARD_SECONDS = 90  # for what takes seconds
SLACK = {"MiB": 0, "threads": 1, "files": 2}  # beside 5 %: what a library begins late
ENDS = ("kill", "term", "kill", "twice")  # of the servers' lives, in turns
OBJECT = {"type": "object", "additionalProperties": False, "required": ["n"], "properties": {
    "n": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 20, "maxItems": 30}}}
CALL = {"name": "note", "description": "Notes", "parameters": OBJECT, "strict": True}
LONG = {"max_tokens": 100, "ignore_eos": True}
QUESTIONS = {  # few, and asked again and again: what an undisturbed server says to them is known
    "greedy": (CHAT, chat("the cat", temperature=0, stream_options={"include_usage": True}, **LONG)),
    "seeded": (CHAT, chat("a dog", temperature=1.2, top_p=0.9, seed=7, frequency_penalty=0.5, **LONG)),
    "two": (CHAT, chat("in the house", temperature=1, seed=3, n=2, **LONG)),
    "wide": (CHAT, chat("user", temperature=1, seed=11, stop=["zzz", "the a"], logprobs=True, top_logprobs=20, **LONG)),
    "tools": (CHAT, chat("they", temperature=0.8, seed=5, max_tokens=200, tool_choice="required",
                         tools=[{"type": "function", "function": CALL}])),
    "schema": (CHAT, chat("not", temperature=0.8, seed=6, max_tokens=200, response_format={
        "type": "json_schema", "json_schema": {"name": "numbers", "schema": OBJECT, "strict": True}})),
    "json": (CHAT, chat("assistant", temperature=0.5, seed=1, stream=False, store=True, **LONG)),
    "fleeting": (CHAT, chat("the house", temperature=0, store=False, max_tokens=25, ignore_eos=True)),
    "response": (RESPONSES, {"input": "there are", "temperature": 0, "max_output_tokens": 100, "ignore_eos": True}),
    "background": (RESPONSES, {"input": "and then", "temperature": 0.9, "seed": 4, "max_output_tokens": 100,
                               "ignore_eos": True, "background": True}),
}
NOBODY = "/v1/sessions/nobody/events"
RUBBISH = [  # method, path, what goes with it, the status it gets
    ("POST", CHAT, {"content": b'{"messages": [', "headers": {"content-type": "application/json"}}, 400),
    ("POST", CHAT, {"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400),
    ("POST", CHAT, {"content": b"a=b"}, 415), ("POST", CHAT, {"json": {"messages": "hi"}}, 400),
    ("POST", CHAT, {"json": chat(max_tokens=10**6)}, 400), ("POST", RESPONSES, {"json": {"input": 7}}, 400),
    ("POST", RESPONSES, {"json": {"input": "hi", "previous_response_id": "resp_0"}}, 404),
    ("POST", CHAT, {"json": chat(stream=True), "headers": {"last-event-id": "nobody:3"}}, 404),
    ("POST", CHAT, {"json": chat(stream=True), "headers": {"last-event-id": "rubbish"}}, 400),
    ("GET", NOBODY, {}, 404), ("GET", NOBODY, {"headers": {"last-event-id": "other:1"}}, 404),
    ("POST", "/v1/cancel/nobody", {}, 404), ("POST", f"{RESPONSES}/resp_0/cancel", {}, 404),
    ("GET", f"{RESPONSES}/resp_0?stream=true&starting_after=3", {}, 404), ("GET", "/v1/nothing", {}, 404),
    ("DELETE", CHAT, {}, 405), ("DELETE", f"{RESPONSES}/resp_0", {}, 404)]
BYTES = [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50,
         b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\n",
         b"POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
         b"content-length: 900\r\n\r\n{\"messages\": "]


def whole(raw):
    """The frames of `raw` whose blank line has come, without keep-alives."""
    return raw[:raw.rfind(b"\n\n") + 2].replace(b": ping\n", b"") if b"\n\n" in raw else b""


def told(frames):
    """What an answer says, by choice or item, and how it ends, likewise."""
    texts, ends, usage = defaultdict(str), {}, None
    for data in (json.loads(frame["data"]) for frame in frames if frame["data"] != "[DONE]"):
        for choice in data.get("choices", ()):
            delta, n = choice["delta"], choice["index"]
            calls = delta.get("tool_calls") or ()
            texts[n] += (delta.get("content") or "") + "".join(call["function"]["arguments"] for call in calls)
            ends |= {n: choice["finish_reason"]} if choice["finish_reason"] else {}
        if data.get("type", "").endswith(".delta"):
            texts[data["output_index"]] += data["delta"]
        if data.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            ends[0] = data["response"]["status"]
        if "error" in data:
            ends[0] = data["error"]["code"]
        usage = data.get("usage") or data.get("response", {}).get("usage") or usage
    return dict(texts), ends, usage and {name: count for name, count in usage.items() if name.endswith("tokens")}


@dataclass(eq=False)
class Answer:
    """One session, as those who ask for it know it."""

    question: str
    label: str | None
    id: str | None = None
    may_end: bool = False  # somebody asked to cancel it, or its last reader has left
    is_cancelled: bool = False  # the server has said so
    may_go: bool = False  # somebody asked to delete it
    died_with: int | None = None  # the life that it began in, if it is in memory only

    @property
    def ref(self):
        return self.label or self.id


@dataclass(eq=False)
class Client:
    """Asks once, or follows what another one asks; is cut, comes back, and cancels, as the draw has it."""

    storm: Storm
    answer: Answer
    draw: random.Random
    knows: bool = False  # the session is there
    raw: bytes = b""
    is_done: bool = False
    is_patient: bool = False  # it waits for the end
    cuts: int = 0  # yet to come, before it reads on to the end
    leaves: bool = False  # its plain JSON request, once
    cancels_after: float = math.inf  # so many frames

    def __post_init__(self):
        self.path, body = QUESTIONS[self.answer.question]
        self.body = {"stream": True, **body} | ({"session_id": self.answer.label} if self.answer.label else {})
        if not self.is_patient:
            self.cuts = self.draw.choice((0, 1, 2, 4))
            self.leaves = not self.body["stream"] and self.draw.random() < 0.3
            self.cancels_after = self.draw.randint(0, 60) if self.draw.random() < 0.15 else math.inf

    @property
    def frames(self):
        return parse_sse(whole(self.raw).decode())

    @property
    def has_all(self):
        return self.frames[-1:] != [] and self.frames[-1]["data"] == "[DONE]"

    async def live(self):
        while not self.is_done:
            life = await self.storm.alive()
            try:
                await self.visit(life)
            except httpx2.TransportError as error:
                self.storm.check(self.storm.is_ending(life), f"{self.answer} lost a living server: {error!r}")
                self.storm.seen["connections lost to a server's end"] += 1
                await asyncio.sleep(0.02)

    def request(self):
        """To ask, or to go on after the last frame that came whole, in one of the ways there are."""
        answer, held = self.answer, self.frames
        if not self.knows:
            return "POST", self.path, {"json": self.body}
        at = held[-1]["id"] if held else None
        ways = [("GET", f"/v1/sessions/{ref}/events", {"headers": {"last-event-id": at} if at else {}})
                for ref in (answer.label, answer.id) if ref]
        if at:
            ways.append(("GET", f"/v1/sessions/{answer.ref}/events?last_event_id={at}", {}))
            if self.body["stream"]:
                ways.append(("POST", self.path, {"json": self.body, "headers": {"last-event-id": at}}))
        if answer.id and self.path == RESPONSES:
            after = f"&starting_after={at.split(':')[1]}" if at else ""
            ways.append(("GET", f"{RESPONSES}/{answer.id}?stream=true{after}", {}))
        return self.draw.choice(ways)

    async def visit(self, life):
        method, path, given = self.request()
        self.raw, asks = self.raw[:self.raw.rfind(b"\n\n") + 2] if b"\n\n" in self.raw else b"", not self.knows
        leaves, self.leaves = self.leaves, False
        with contextlib.suppress(TimeoutError):
            async with (asyncio.timeout(self.draw.uniform(0.1, 1) if leaves else None),
                        self.storm.http.stream(method, self.storm.base + path, **given) as response):
                return await self.take(response, asks, life)
        self.answer.may_end = True  # a plain JSON answer whose only reader leaves is cancelled

    async def take(self, response, asks, life):
        answer, storm, status = self.answer, self.storm, response.status_code
        said = "" if status == 200 else (await response.aread()).decode()
        if status in (429, 503):
            storm.seen[f"refused with {status}"] += 1
            return await asyncio.sleep(self.draw.uniform(0.05, 0.4))
        if asks and status == 409:
            self.knows = True
            return
        if status == 204:
            self.is_done = storm.check(self.has_all, f"{answer} has nothing after frame {len(self.frames) - 1}")
            return
        died = answer.died_with not in (None, storm.life)
        if status == 404 and (died or answer.may_go):
            storm.seen["answers that went with their server" if died else "answers that were deleted"] += 1
            self.is_done = True
            return
        if not storm.check(status == 200, f"{answer}: {response.request.url} got {status} {said[:200]}"):
            self.is_done = True
            return
        storm.seen["resumed" if not asks else "begun"] += 1
        answer.id = response.headers.get("x-session-id", answer.id)
        answer.died_with = answer.died_with or (life if answer.question == "fleeting" else None)
        self.knows = True
        if response.headers["content-type"].startswith("text/event-stream"):
            await self.read(response)
        else:
            await response.aread()  # the frames follow

    async def read(self, response):
        before, cut_after = len(self.frames), self.draw.randint(0, 60) if self.cuts > 0 else math.inf
        self.cuts -= 1
        async for piece in response.aiter_raw():
            self.raw += piece
            came = self.raw.count(b"\n\n")
            if came >= self.cancels_after:
                self.cancels_after = math.inf
                await self.cancel()
            if came - before > cut_after:
                self.storm.seen["cut"] += 1
                self.answer.may_end = self.storm.is_crowded or self.answer.may_end
                return
        self.is_done = self.has_all
        self.storm.check(self.is_done, f"{self.answer} ended in peace after {len(self.frames)} frames, not at its end")

    async def cancel(self):
        answer = self.answer
        answer.may_end = True
        ways = [("POST", f"/v1/cancel/{ref}") for ref in (answer.label, answer.id) if ref]
        if answer.id and self.path == RESPONSES:
            ways = [("POST", f"{RESPONSES}/{answer.id}/cancel"), ("DELETE", f"{RESPONSES}/{answer.id}"), *ways]
        method, path = self.draw.choice(ways)
        answer.may_go = answer.may_go or method == "DELETE"
        response = await self.storm.http.request(method, self.storm.base + path)
        if response.status_code == 200:
            status = response.json().get("status", "deleted")
            answer.is_cancelled = answer.is_cancelled or status == "cancelled"
            self.storm.seen[f"asked to cancel: {status}"] += 1
        self.storm.check(response.status_code in (200, 503), f"{answer}: {method} {path} got {response.status_code}")


class Stuck(Exception):
    """Something that must come did not."""


@dataclass(eq=False)
class Storm:
    folder: Path
    seed: int
    lives: int  # that end in the storm
    crowd: int  # clients at once
    faults: list[str] = field(default_factory=list)
    seen: Counter = field(default_factory=Counter)
    life: int = 0
    ending: int = 0  # lives that have been told to end
    is_crowded: bool = False  # some life had fewer places than clients

    def __post_init__(self):
        self.draw, self.up, self.clients = random.Random(self.seed), asyncio.Event(), []
        self.tasks, self.server, self.may_begin = set(), None, False
        self.http = httpx2.AsyncClient(timeout=GUARD_SECONDS, limits=httpx2.Limits(max_keepalive_connections=0))

    def check(self, holds, fault):
        if not holds:
            self.faults.append(f"life {self.life}: {fault}")
        return holds

    @property
    def base(self):
        return self.server.base

    async def alive(self):
        await self.up.wait()
        return self.life

    def is_ending(self, life):
        return self.ending >= life

    # -- lives -------------------------------------------------------------------------------------------------
    async def start(self, database="sessions.db", **env):
        env = {"OMP_NUM_THREADS": 1, "SESSIONS_DB_PATH": self.folder / database, "MODEL_REPO_ID": "tiny",
               "EAGER_LOAD_MODEL": 1, "ROOM": 64 * 256, "SECONDS": 0.01, "KEEPALIVE_SECONDS": 0.5,
               "SEND_TIMEOUT_SECONDS": 2, "SESSION_BUFFER_FRAMES": 32, "SESSIONS_BUFFER_MIB": 1,
               "SHUTDOWN_GRACE_SECONDS": 0.5, "MAX_QUEUED_REQUESTS": 4 * self.crowd,
               "MAX_CONCURRENT_REQUESTS": 2 * self.crowd, **env}
        self.server = await asyncio.to_thread(Process, TINY_SERVER, env, self.folder / f"{database}.log")
        self.life += 1
        self.up.set()

    async def end(self, how):
        """End the server, let what connects know it, and see that its database is sound."""
        process, self.ending = self.server.process, self.life
        self.seen[f"ended: {how}"] += 1
        if how == "kill":
            process.kill()
        else:
            process.send_signal(signal.SIGTERM)
        if how == "twice":
            await asyncio.sleep(self.draw.uniform(0, 0.3))
            process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait, GUARD_SECONDS)
        self.up.clear()
        with closing(sqlite3.connect(self.folder / "sessions.db")) as db:
            found = db.execute("PRAGMA integrity_check").fetchall()
            self.check(found == [("ok",)], f"the database is broken: {found}")

    def rows(self, query):
        with closing(sqlite3.connect(f"file:{self.folder}/sessions.db?mode=ro", uri=True, timeout=10)) as db:
            return db.execute(query).fetchall()

    async def until(self, condition, words):
        """Wait for what must come. Where it does not, the storm is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GUARD_SECONDS):
                while not await condition():
                    await asyncio.sleep(0.1)
                return
        raise Stuck(words)

    async def all_went_on(self):
        return not self.rows("SELECT 1 FROM requests WHERE tries > 0 LIMIT 1")

    # -- weather -----------------------------------------------------------------------------------------------
    def begin(self, coroutine):
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.check(False, "".join(traceback.format_exception(error)[-3:]))

    async def blow(self):
        """Keep a crowd of clients about."""
        count = 0
        while True:
            while self.may_begin and len(self.tasks) < self.crowd:
                count, draw = count + 1, random.Random(self.draw.random())
                kind = draw.choices(("client", "twin", "deaf", "rubbish", "bytes"), (60, 10, 8, 12, 10))[0]
                if kind in ("rubbish", "bytes"):
                    self.begin(getattr(self, kind)(draw))
                    continue
                question = {"deaf": "wide", "twin": "seeded"}.get(kind) or draw.choice(list(QUESTIONS))
                labelled = kind in ("deaf", "twin") or question == "json" or draw.random() < 0.8
                answer = Answer(question, f"s{count}" if labelled else None)
                for _ in range(2 if kind == "twin" else 1):
                    client = Client(self, answer, random.Random(draw.random()))
                    self.clients.append(client)
                    self.begin(self.deaf(client) if kind == "deaf" else client.live())
                self.seen[f"clients: {kind}"] += 1
            self.seen["most clients at once"] = max(self.seen["most clients at once"], len(self.tasks))
            await asyncio.sleep(0.02)

    async def rubbish(self, draw):
        await self.alive()
        life, (method, path, given, status) = self.life, draw.choice(RUBBISH)
        try:
            got = (await self.http.request(method, self.base + path, **given)).status_code
        except httpx2.TransportError as error:
            self.check(self.is_ending(life), f"{method} {path} lost a living server: {error!r}")
        else:
            self.check(got in (status, 503), f"{method} {path} {given}: {got} instead of {status}")
            self.seen["rubbish"] += 1

    async def bytes(self, draw):
        """Half a request, or none, and then nothing for a while; not all of them say goodbye."""
        await self.alive()
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            writer.write(draw.choice(BYTES))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.uniform(0, 4)):
                    while await reader.read(65536):
                        pass
            if draw.random() < 0.5:
                writer.transport.abort()
            writer.close()
            self.seen["half requests"] += 1

    async def deaf(self, client):
        """A client that asks and reads nothing for a while, and then does as others do."""
        await self.alive()
        body = json.dumps(client.body).encode()
        with contextlib.suppress(OSError), socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(("127.0.0.1", self.server.port))
            deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                         b"content-length: %d\r\n\r\n%s" % (len(body), body))
            await asyncio.sleep(client.draw.uniform(0, 5))
        client.answer.may_end = self.is_crowded
        await client.live()

    # -- the whole of it ---------------------------------------------------------------------------------------
    async def undisturbed(self):
        """What a server says that is left in peace."""
        await self.start("undisturbed.db")
        clients = [Client(self, Answer(question, question), self.draw, is_patient=True) for question in QUESTIONS]
        await asyncio.gather(*(client.live() for client in clients))
        self.expected = {client.answer.question: told(client.frames) for client in clients}
        self.ending = self.life
        self.server.kill()
        self.up.clear()

    async def run(self):
        early, blowing = False, asyncio.create_task(self.blow())
        try:
            await self.undisturbed()
            for how in (ENDS * self.lives)[:self.lives]:
                places = self.draw.choice((8, 2 * self.crowd, 2 * self.crowd))
                self.is_crowded = self.is_crowded or places < self.crowd
                await self.start(MAX_CONCURRENT_REQUESTS=places)
                self.may_begin = True
                early = not early and self.draw.random() < 0.4
                if not early:  # an answer that servers die of, twice before it goes on, is given up
                    await self.until(self.all_went_on, "all that was left goes on")
                await asyncio.sleep(self.draw.uniform(0, 1 if early else 4))
                await self.end(how)
            await self.last_life()
        except Stuck as error:
            self.check(False, f"never: {error}")
        finally:
            for task in (blowing, *self.tasks):
                task.cancel()
            if self.server:
                self.server.kill()
            await self.http.aclose()

    async def last_life(self):
        """A server that is left to finish; what it takes after a storm is what it took before, once it was warm."""
        await self.start()
        await self.calm()
        await self.blow_for(3)
        before = await self.footprint()
        await self.blow_for(min(60, 5 + self.lives))
        after = await self.footprint()
        for name, slack in SLACK.items():
            self.seen[f"{name} after warm-up and after the storm"] = was, now = before[name], after[name]
            self.check(now <= was * 1.05 + slack, f"{name}: {was} before, {now} after")
        await self.verify()
        await self.end("term")
        for log in self.folder.glob("*.log"):
            said = log.read_text(errors="replace")
            self.check("Traceback" not in said and "never retrieved" not in said, f"{log.name}: {said[-3000:]}")

    async def blow_for(self, seconds):
        self.may_begin = True
        await asyncio.sleep(seconds)
        await self.calm()

    async def calm(self):
        """Let all that have begun come to their ends, and nobody new begin."""
        self.may_begin = False

        async def is_calm():
            at = (await self.http.get(f"{self.base}/ready")).json()
            return not self.tasks and not at["running"] and not at["queued"]

        await self.until(is_calm, f"calm; {len(self.tasks)} clients are about, {self.seen}")

    async def footprint(self):
        """What the server takes. Nothing may run, wait, be read or lie in its cache for an answer."""
        async def is_clean():
            lines = (await self.http.get(f"{self.base}/metrics")).text
            names = "running", "queued", "continuing", "readers", "cache_tokens"
            return all(f"\ninference_{name} 0.0\n" in lines for name in names)

        await self.until(is_clean, "nothing runs, waits, is read or lies in the cache")
        of = psutil.Process(self.server.process.pid)
        await self.until(lambda: asyncio.to_thread(lambda: len(of.net_connections()) < 2), "no connection is left")
        return {"MiB": of.memory_info().rss >> 20, "threads": of.num_threads(), "files": of.num_fds()}

    async def verify(self):
        """Every answer is whole, on disk and in the hands of its clients."""
        for client in self.clients:
            answer = client.answer
            found = await self.http.get(f"{self.base}/v1/sessions/{answer.ref}/events")
            replay = client.raw if answer.question == "fleeting" else found.content
            if answer.may_go and found.status_code == 404:
                places = "frames WHERE session", "requests WHERE session", "objects WHERE id", "sessions WHERE id"
                left = [place for place in places if self.rows(f"SELECT 1 FROM {place} = '{answer.id}'")]
                self.check(not left, f"{answer} was deleted, and is still on disk: {left}")
                continue
            self.check(whole(replay) == whole(client.raw), f"{answer}: its client holds other bytes than are replayed")
            self.judge(client, parse_sse(whole(replay).decode()))
        gone = self.rows("SELECT id FROM sessions WHERE ended IS NULL UNION SELECT session FROM requests")
        self.check(not gone, f"without an end: {gone}")
        query = """SELECT id, status FROM sessions LEFT JOIN frames ON session = id GROUP BY id
                   HAVING COUNT(idx) = 0 OR MIN(idx) OR COUNT(idx) <> MAX(idx) + 1 OR SUM(data = '[DONE]') <> 1"""
        self.check(not (broken := self.rows(query)), f"with gaps or without an end: {broken}")
        self.seen["sessions"] = self.rows("SELECT COUNT(*) FROM sessions")[0][0]

    def judge(self, client, frames):
        answer, (texts, ends, usage) = client.answer, told(frames)
        name = answer.ref
        if answer.question == "fleeting" and (not frames or frames[-1]["data"] != "[DONE]"):
            return  # it died with its server, which was checked when it was asked for
        self.check([frame["id"] for frame in frames] == [f"{name}:{n}" for n in range(len(frames))],
                   f"{answer}: its ids have gaps or repeat")
        expected, how, used = self.expected[answer.question]
        cut_short = answer.question == "fleeting" and ends == {0: "server_stopped"}
        if answer.is_cancelled or cut_short or (answer.may_end and "cancelled" in ends.values()):
            begun = all(expected[n].startswith(text) for n, text in texts.items())
            honest = cut_short or all(end in (how[n], "cancelled") for n, end in ends.items())
            self.check(begun and honest and (cut_short or "cancelled" in ends.values()), f"{answer}: {ends}, {texts}")
            self.seen["answers that were ended"] += 1
        else:
            self.check((texts, ends, usage) == (expected, how, used),
                       f"{answer}: {ends}, {usage} instead of {how}, {used}\n  {texts}\n  {expected}")
            self.seen["answers that are whole"] += 1


def storm(folder, seed, lives, crowd=48):
    """Raise a storm; what was seen, and what does not hold."""

    async def run():
        await (raised := Storm(Path(folder), seed, lives, crowd)).run()
        return raised.seen, raised.faults

    return asyncio.run(run())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lives", type=int, default=8, help="of the server, that end in the storm")
    parser.add_argument("--crowd", type=int, default=48, help="clients at once")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        seen, faults = storm(folder, asked.seed, asked.lives, asked.crowd)
    print(*(f"{name}: {count}" for name, count in sorted(seen.items())), *faults, sep="\n")
    return min(1, len(faults))


if __name__ == "__main__":
    sys.exit(main())
