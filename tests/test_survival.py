"""What a killed server has begun it finishes: real processes over a tiny model, killed with -9, against one that nobody
disturbs. `KILLS=30` kills it more often."""
import contextlib
import json
import os
import random
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
from conftest import ROOT, SCRIPTED_SERVER, Process, chat, parse_sse, text_of, wait_until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TINY_SERVER = (sys.executable, str(ROOT / "tests" / "tiny_server.py"))
KILLS, SECONDS = int(os.environ.get("KILLS", "5")), 120
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
        with contextlib.suppress(httpx2.TransportError), httpx2.Client(base_url=server.base, timeout=SECONDS) as http:
            if not self.raw:
                with http.stream("POST", self.path, json=self.body) as response:
                    assert response.status_code in (200, 409), response.read()
                    if response.status_code == 200 and self.body["stream"]:
                        return self._take(response)
                    response.read()
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
    with httpx2.Client(base_url=server.base, timeout=SECONDS) as http:
        for stream in streams:
            if stream.path == RESPONSES or stream.body.get("store"):
                found = http.get(f"{stream.path}/{http.get(f'/v1/sessions/{stream.label}').json()['id']}")
                assert found.status_code == 200
                yield stream.label, plain(found.json())


def followed(server, streams, pool, then=lambda: None):
    reading = [pool.submit(stream.follow, server) for stream in streams if not stream.is_done]
    then()
    for reader in reading:
        reader.result()


def test_streams_that_the_server_was_killed_in_again_and_again_are_those_of_an_undisturbed_one(
        tiny_server, tmp_path, start):
    whole, cut = [Stream(label) for label in ASKED], [Stream(label) for label in ASKED]
    draw, killed_in = random.Random(KILLS), 0
    with ThreadPoolExecutor(len(ASKED)) as pool:
        server = tiny_server(SESSIONS_DB_PATH=tmp_path / "undisturbed.db")
        followed(server, whole, pool)
        expected = dict(objects(server, whole))
        server.kill()
        for _ in range(KILLS):
            server = tiny_server(SECONDS=0.012 * KILLS)
            killer = threading.Timer(draw.uniform(0.05, 1.5), server.kill)
            followed(server, cut, pool, killer.start)
            killer.join()
            killed_in += sum(not stream.is_done for stream in cut)
            with closing(sqlite3.connect(tmp_path / "sessions.db")) as db:
                assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        server = tiny_server()
        followed(server, cut, pool)

    assert killed_in > KILLS
    for undisturbed, stream in zip(whole, cut, strict=True):
        assert told(stream) == told(undisturbed), stream.label
    assert dict(objects(server, cut)) == expected
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as db:
        assert db.execute("SELECT COUNT(*) FROM requests").fetchone() == (0,)
