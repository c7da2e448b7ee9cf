"""What the benchmark asks of a server: each load is put to one, over HTTP, and gives its figures by name.

A server is known by its `base`, `port`, `model` and `memory()`. Prompts come from `random`, which the benchmark seeds.
"""
from __future__ import annotations

import asyncio
import base64
import functools
import http.client
import io
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11

if TYPE_CHECKING:
    from bench import Server

LOAD_SECONDS = 1800  # the longest that one may take
WORDS = ("house", "river", "stone", "light", "garden", "paper", "window", "letter", "music", "winter", "bridge")
FORM = {"frequency_penalty": 0.3, "presence_penalty": 0.3, "response_format": {"type": "json_schema", "json_schema": {
    "name": "numbers", "strict": True, "schema": {
        "type": "object", "additionalProperties": False, "required": ["numbers"], "properties": {"numbers": {
            "type": "array", "minItems": 400, "items": {"type": "integer", "minimum": 0, "maximum": 999}}}}}}}


class Lacking(Exception):
    """What a server cannot do, in a sentence."""


@dataclass
class Answer:
    """A stream as it came. It is looked into when all streams have ended: a client that parses has a share in what is
    measured, and the larger one the faster the server is."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # with two empty ones: its request and its end

    @functools.cached_property
    def events(self) -> list[tuple[float, dict]]:
        """The events of a chat's or a response's stream, and when each was whole."""
        events, text, connection = [], b"", h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method="POST", target="/", headers=[("host", "localhost")]))
        for moment, data in self.pieces[1:]:
            connection.receive_data(data)
            while isinstance(part := connection.next_event(), h11.Response | h11.Data):
                if isinstance(part, h11.Response) and part.status_code != 200:
                    words = b"".join(data for _, data in self.pieces)[-300:]
                    raise Lacking(f"it answered {part.status_code}: {words!r}")
                *lines, text = (text + (part.data if isinstance(part, h11.Data) else b"")).split(b"\n")
                said = (line[5:] for line in lines if line.startswith(b"data:") and b"[DONE]" not in line[:14])
                events += [(moment, json.loads(line)) for line in said]
        if not events:
            raise Lacking("an answer without events")
        for _, event in events:
            if event.get("error") or event.get("type") in ("error", "response.failed"):
                raise Lacking(f"an error in the stream: {json.dumps(event)[:200]}")
        return events

    @functools.cached_property
    def said(self) -> list[tuple[float, str]]:
        """The pieces of text."""
        texts = ((moment, event["delta"] if event.get("type") == "response.output_text.delta" else "".join(
            (choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ()))
            for moment, event in self.events)
        return [(moment, text) for moment, text in texts if text]

    def last(self, key: str) -> Any:
        """What the last event says that says so."""
        found = ((event.get("response") or event).get(key) for _, event in reversed(self.events))
        return next(filter(None, found), None)

    @property
    def times(self) -> list[float]:
        return [moment for moment, _ in self.said]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.said)

    @property
    def usage(self) -> dict:
        return self.last("usage") or {}

    @property
    def first(self) -> float:
        """Milliseconds to the first text."""
        if not self.times:
            raise Lacking("an answer without text")
        return 1000 * (self.times[0] - self.pieces[0][0])

    @property
    def whole(self) -> float:
        """Milliseconds to its last event."""
        return 1000 * (self.events[-1][0] - self.pieces[0][0])

    @property
    def tokens(self) -> int:
        return self.usage.get("completion_tokens") or self.usage.get("output_tokens") or len(self.times)

    @property
    def speed(self) -> float:
        """Tokens per second once it speaks."""
        return (self.tokens - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else 0.0


async def ask(server: Server, path: str = "chat/completions", **body) -> Answer:
    """One streamed, greedy answer."""
    body = {"model": server.model, "temperature": 0, "stream": True, **body}
    body |= {"stream_options": {"include_usage": True}} if "messages" in body else {}
    answer = Answer([(time.perf_counter(), b"")])
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(posted(path, body))
    data = None
    while data != b"":
        data = await reader.read(65536)
        answer.pieces.append((time.perf_counter(), data))
    writer.close()
    return answer


def posted(path: str, body: dict) -> bytes:
    """A request whose answer ends with its connection."""
    data = json.dumps(body).encode()
    return (f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def prose(tokens: int) -> str:
    """A question of about so many tokens, which nobody has asked yet."""
    return "Tell me a long story with these words: " + ", ".join(random.choices(WORDS, k=tokens // 2 - 20)) + "."


async def stories(server: Server, count: int, tokens: int, **extra) -> list[Answer]:
    """Answers to so many questions at once, none of which was asked before."""
    texts = [f"{random.getrandbits(40):x}: tell me a long story about a {random.choice(WORDS)}." for _ in range(count)]
    return await asyncio.gather(
        *(ask(server, messages=user(text), max_tokens=tokens, **extra) for text in texts))


async def many(server: Server, count: int, tokens: int) -> dict[str, float | None]:
    """So many streams at once."""
    memory = []

    async def watch() -> None:
        while True:
            memory.append(server.memory())
            await asyncio.sleep(0.2)

    watching, start = asyncio.create_task(watch()), time.perf_counter()
    answers = await stories(server, count, tokens)
    seconds = time.perf_counter() - start
    watching.cancel()
    gaps = [1000 * gap for answer in answers for gap in map(float.__sub__, answer.times[1:], answer.times)]
    first = [answer.first for answer in answers]
    figures = {"total": sum(answer.tokens for answer in answers) / seconds,
               "each": statistics.median(answer.speed for answer in answers), "memory": max(memory),
               "first": statistics.median(first), "worst": max(first),
               "gap": percentile(gaps, 0.5), "gap p99": percentile(gaps, 0.99)}
    return {f"{count} {key}": value for key, value in figures.items()}


async def turns(server: Server, tokens: int) -> dict[str, float | None]:
    """A conversation's second turn, its whole history sent again."""
    chat = user(prose(tokens))
    one = await ask(server, messages=chat, max_tokens=32)
    chat += [{"role": "assistant", "content": one.text}, *user("Tell me more of it.")]
    two = await ask(server, messages=chat, max_tokens=8)
    reused = (two.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"turn 1": one.first, "turn 2": two.first, "reused": reused}


async def turns_by_id(server: Server, tokens: int) -> dict[str, float]:
    """The same by `previous_response_id`."""
    one = await ask(server, "responses", input=prose(tokens), max_output_tokens=32)
    two = await ask(server, "responses", input="Tell me more of it.", max_output_tokens=8,
                    previous_response_id=one.last("id"))
    if two.usage.get("input_tokens", 0) < tokens / 2:
        raise Lacking("it ignores previous_response_id")
    return {"turn 2 by id": two.first}


async def beside_a_long_prompt(server: Server, tokens: int) -> dict[str, float]:
    """A short request alone, and while a long prompt is computed."""
    [alone] = await stories(server, 1, 8)
    long = asyncio.create_task(ask(server, messages=user(prose(tokens)), max_tokens=1))
    await asyncio.sleep(0.3)
    [beside] = await stories(server, 1, 8)
    await long
    return {"short alone": alone.first, "short beside": beside.first}


async def beside_forms(server: Server, count: int, tokens: int) -> dict[str, float]:
    """Plain streams beside as many plain ones, and beside as many with a schema and penalties."""
    figures = {}
    [tried] = await stories(server, 1, 8, **FORM)
    if not tried.text.lstrip().startswith("{"):
        raise Lacking("it ignores response_format")
    for key, extra in (("beside plain", {}), ("beside forms", FORM)):
        plain, _ = await asyncio.gather(stories(server, count, tokens), stories(server, count, tokens, **extra))
        figures[key] = statistics.median(answer.speed for answer in plain)
    return figures


async def pictures(server: Server) -> dict[str, float]:
    """Milliseconds to a one-token answer about a picture of a megapixel, and to a second one."""
    from PIL import Image
    file, colours = io.BytesIO(), Image.frombytes("RGB", (8, 8), random.randbytes(192))
    colours.resize((1024, 1024), Image.Resampling.BICUBIC).save(file, "JPEG")
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    chat, times = user([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]), []
    for _ in range(2):
        answer = await ask(server, messages=chat, max_tokens=1)
        times.append(answer.whole)
        chat += [{"role": "assistant", "content": "A picture."}, *user([{"type": "text", "text": "Of what?"}])]
    return {"picture": times[0], "picture again": times[1]}


async def own_path(server: Server, streams: int, words: int) -> dict[str, float | None]:
    """Tokens per second that cost no model, a frame each, and how long /health takes meanwhile."""
    request = posted("chat/completions", {"messages": user("hi"), "stream": True, "max_tokens": words + 1})
    done, waits = threading.Event(), []

    async def read() -> None:  # bytes alone: a client that parses would be what is measured
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        frames, tail = 0, b""
        while b"[DONE]" not in tail:
            if not (data := await reader.read(65536)):
                raise Lacking("a stream broke off")
            frames += (tail[-1:] + data).count(b"\n\n")
            tail = tail[-8:] + data
        writer.close()
        if frames < words:
            raise Lacking(f"{frames} frames for {words} tokens")

    def watch() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        while not done.wait(0.01):
            start = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits.append(1000 * (time.perf_counter() - start))

    thread, start = threading.Thread(target=watch, daemon=True), time.perf_counter()
    thread.start()
    try:
        await asyncio.gather(*(read() for _ in range(streams)))
    finally:
        seconds = time.perf_counter() - start
        done.set()
        thread.join()
    return {"path": streams * words / seconds, "health": percentile(waits, 0.99)}


def percentile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None
