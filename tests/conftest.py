"""What the tests share: a model that says what it is told, clients in process and over real sockets, real servers."""
from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import psutil
import pytest
import uvicorn
from fastapi import testclient
from openai import OpenAI

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import main  # noqa: E402

END = 0  # the scripted model's end-of-sequence token


class TestClient(testclient.TestClient):
    """A client of an app in process, who calls it by a name that it goes by, from its own machine."""

    def __init__(self, app, client=("127.0.0.1", 50_000), **options):
        super().__init__(app, base_url="http://localhost", client=client, **options)


class ScriptedModel:
    """Says its words one by one, to everybody alike; if gated, each word when the test lets it (`gate.release()`).

    Token n + 1 is the n-th word. A prompt has one token per space-separated word. No torch is imported.
    """

    name, prefills_in_pieces, runs_alone, stop_ids = "scripted", True, False, frozenset({END})
    runner, room, batch_tokens, lone_batch_tokens, fingerprint = "scripted", None, 512, 512, b"scripted"
    tools, senses, audio_rate = "native", frozenset(), None
    defaults = main.Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

    def __init__(self, *words: str, gated: bool = False, context: int = 4096, seconds: float = 0.0,
                 fail_at: int | None = None, fault: tuple[int, str] = (500, "generation_failed")):
        self.words, self.gated, self.context, self.seconds, self.fail_at = words, gated, context, seconds, fail_at
        self.fault, self.reused = fault, 0
        self.gate = threading.Semaphore(0)
        self.asked: list[str] = []  # the last message of every chat
        self.opened = self.forwards = self.prompt_tokens = self.drawn = 0

    def prepare(self, chat):
        self.asked.append(chat.messages[-1].content)
        return main.Prompt([1] * sum(len(m.content.split()) for m in chat.messages), "", chat.grammar, chat.tools,
                           chat.must_call, chat.max_calls)

    def open(self, tokens, budget, prompt, owner):
        self.opened += 1
        return self.opened - 1, self.reused

    def fork(self, state):
        return state

    def reserve(self, state, length):
        return True

    def close(self, state, keep=True):
        pass

    def free_memory(self):
        pass

    def check(self, sampling):
        pass

    def follow(self, prompt):
        return None

    def logprobs(self, logits, draws, tokens):
        said = (str((*self.words, "")[draw.n]) for draw in draws)
        return [main.TokenLogprob(word, word.encode(), -1.0) for word in said]

    def forward(self, work):
        self.forwards += 1
        for item in work:
            if len(item.tokens) > 1 or not item.wants:
                self.prompt_tokens += len(item.tokens)
            if item.wants and self.gated:
                self.gate.acquire()
        time.sleep(self.seconds)

    def sample(self, logits, draws):
        self.drawn += len(draws)
        if any(draw.n == self.fail_at for draw in draws):
            raise RuntimeError("scripted failure")
        return [draw.n + 1 if draw.n < len(self.words) else END for draw in draws]

    def reader(self, prompt, stop):
        return ScriptedReader(self.words)

    def failure(self, error):
        status, code = self.fault
        return main.ApiError(status, "The model failed while generating.", code)


class ScriptedReader:
    """Its words are deltas already, or text."""

    part = main.TextDelta

    def __init__(self, words):
        self.words = words

    def feed(self, token):
        word = self.words[token - 1]
        word = main.TextDelta(word) if isinstance(word, str) else word
        self.part = type(word)
        return (word,) if word != main.TextDelta("") else (), False

    def flush(self):
        return ()


def chat(text="hi", **fields):
    """A chat request's body."""
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}


def parse_sse(text):
    """The blocks of an SSE text as dicts of their fields; comments are left out."""
    blocks = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            blocks.append(fields)
    return blocks


def text_of(frames):
    """The joined content of chat frames (dicts as `parse_sse` gives them)."""
    chunks = [json.loads(f["data"]) for f in frames if f["data"] != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


def tokens_of(events, choice=0):
    """The tokens that a job's events tell of, shown or not."""
    return [e.token for e in events if isinstance(e, main.Produced) and e.choice == choice]


def content_of(deltas):
    """The joined content among deltas."""
    return "".join(delta.text for delta in deltas if isinstance(delta, main.TextDelta))


def wait_until(condition, seconds=20.0):
    """Wait for something another thread or process does; fail loudly if it never does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {condition}")


POOLS = ("tokenize", "media", "AnyIO worker")  # of threads, bounded, that stay


def held(server):
    """What a server in this process holds on to: threads, open files, tasks, generations, readers, bodies' bytes."""
    async def tasks():
        return len(asyncio.all_tasks())

    gc.collect()
    process, own = psutil.Process(), [t for t in threading.enumerate() if not t.name.startswith(POOLS)]
    return (len(own), process.num_handles() if os.name == "nt" else process.num_fds(),
            asyncio.run_coroutine_threadsafe(tasks(), server._loop).result(20), len(server._generations),
            server.readers, server.held_bytes)


def wait_until_no_more(look, before):
    """Wait until what `look` counts is no more than it was before."""
    wait_until(lambda: all(now <= then for now, then in zip(look(), before, strict=True)))


@pytest.fixture
def settings(tmp_path):
    """Settings for one test: its own database, nothing from the environment."""

    def make(**values):
        return main.Settings(**{"sessions_db_path": tmp_path / "sessions.db", "models_dir": ROOT / "models", **values})

    return make


@pytest.fixture
def client(settings):
    """`client(model, **settings)` is a FastAPI TestClient over that model, in process; streams are streamed."""
    with contextlib.ExitStack() as stack:

        def make(model, **values):
            app = main.create_app(settings(**values), load=lambda *_: model)
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield make


@pytest.fixture
def live(settings):
    """`live(model, **settings)` is the base URL of a server over that model on a real socket, in a thread."""
    with contextlib.ExitStack() as stack:

        def make(model, **values):
            return stack.enter_context(running_app(main.create_app(settings(**values), load=lambda *_: model)))

        yield make


@contextlib.contextmanager
def running_app(app):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def sdk(base, **options):
    """The official client, pointed at a server, without retries of its own."""
    return OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, **options)


class Process:
    """A real server in a process of its own: `python main.py`, `uvicorn main:app`, or a scripted model's."""

    def __init__(self, command, env, log):
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [part.replace("{port}", str(self.port)) for part in command]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "PORT": str(self.port), **{k: str(v) for k, v in env.items()}})
        wait_until(self.answers, 60)

    def answers(self):
        assert self.process.poll() is None, Path(self.log).read_text()
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{self.base}/health", timeout=5).status_code == 200

    def kill(self):
        self.process.kill()
        self.process.wait()

    def signal(self, number):
        self.process.send_signal(number)

    def terminate(self):
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=100)


@pytest.fixture(scope="module")
def one_thread():
    """Torch with one thread: tiny models are no faster with more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """`start(**environment)` runs `python main.py`; `command=[...]` another server. All share the test's database."""
    started = []

    def make(command=(sys.executable, "main.py"), **env):
        base = {"SESSIONS_DB_PATH": tmp_path / "sessions.db", "MODELS_DIR": ROOT / "models", "MODEL_REPO_ID": "demo"}
        started.append(Process(list(command), {**base, **env}, tmp_path / "server.log"))
        return started[-1]

    yield make
    for server in started:
        server.kill()


SCRIPTED_SERVER = (sys.executable, str(ROOT / "tests" / "scripted_server.py"))
