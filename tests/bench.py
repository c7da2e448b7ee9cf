"""The benchmark: this server beside its peers, on the same weights and dtype, over HTTP, all in one run.

    python tests/bench.py                    # beside `transformers serve`, without and with --continuous-batching
    python tests/bench.py --llama            # and llama.cpp: pip install "llama-cpp-python[server]"
    python tests/bench.py --peer "vllm=vllm serve {model} --port {port} --dtype bfloat16"
    python tests/bench.py --quick --peers    # only whether it works, in a minute

It wants requirements.txt, tests/requirements.txt (`transformers serve` needs no more) and the demo model, and for the
plot matplotlib. Every server is a process on a port. All live through the run, but only the one that is measured may
run: the others are suspended. Each round puts each load to each server in turn; tables show medians over the rounds.
All get the same prompts, and none twice, so that only what a load means to be reused is. What a server lacks, or fails
at, is a dash and a sentence. Tables (Markdown), figures (JSON) and plot (PNG) go to `--out`.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx2
import loads
import psutil
from conftest import ROOT, SCRIPTED_SERVER, free_port, main

OURS, SERVE, LLAMA = "this server", "transformers serve", "llama.cpp"
COMPILED, PACKED = f"{OURS}, COMPILE=1", f"{OURS}, QUANTIZATION=int8 COMPILE=1"
BATCHING = f"{SERVE} --continuous-batching"
PATH, KEPT = "own path, PERSIST_SESSIONS=0", "own path, PERSIST_SESSIONS=1"
PACED = "the same, with a step every 4 ms"  # without any pause a model in Python keeps Python's lock for itself
AT = ["--host", "127.0.0.1", "--port", "{port}"]
SERVING = [sys.executable, "-m", "transformers.cli.transformers", "serve", "{model}", *AT, "--dtype", "bfloat16"]
PEERS = {"serve": (SERVE, SERVING), "serve-cb": (BATCHING, [*SERVING, "--continuous-batching"])}
LLAMA_SERVING = [sys.executable, "-m", "llama_cpp.server", "--model", "{model}", *AT, "--n_ctx", "8192",
                 "--interrupt_requests", "false", "--n_threads", "{threads}", "--n_threads_batch", "{threads}"]
START_SECONDS, CALM_SECONDS = 300, 600


@dataclass(frozen=True)
class Sizes:
    """How much is asked for."""

    rounds: int = 3
    clients: tuple[int, ...] = (1, 4, 8, 16)
    tokens: int = 128  # of an answer
    history: int = 1500  # tokens of the conversation whose second turn is timed
    long: int = 4000  # tokens of the prompt beside which a short one is timed
    company: int = 8  # streams that have as many others beside them
    streams: int = 64  # of the scripted model
    words: int = 2000  # in each of these
    pictures: bool = True
    calm: int = 8  # seconds that a server must be idle for before it is measured: a compiler's processes come and go


QUICK = Sizes(1, (1, 2), 8, 100, 200, 1, 8, 50, pictures=False, calm=1)


class Server:
    """A server in a process of its own, suspended except inside `with server.awake():`."""

    def __init__(self, name: str, command: list[str], model: str, folder: Path, **env: str):
        self.name, self.model, self.folder, self.env = name, model, folder, env
        self.port, self.process = free_port(), None
        threads = os.environ.get("OMP_NUM_THREADS") or cores()
        self.command = [part.format(model=model, port=self.port, threads=threads) for part in command]
        self.base = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it lists its models; then suspend it."""
        log = self.folder / f"{self.port}.log"
        with open(log, "wb") as output:
            self.process = psutil.Popen(self.command, cwd=self.folder, stdout=output, stderr=output,
                                        env={**os.environ, **self.env, "PORT": str(self.port)})
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").split("\n")
                last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
                raise loads.Lacking(f"did not start: {last}")
            time.sleep(0.2)
        self._each("suspend")

    def _answers(self) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"{self.base}/v1/models", timeout=10).status_code == 200
        return False

    @contextlib.contextmanager
    def awake(self):
        self._each("resume")
        try:
            yield
        finally:
            self._each("suspend")

    def calm(self, seconds: int) -> None:
        """Wait until it has been idle for so long: some compile behind their own back."""
        deadline, before, calm = time.monotonic() + CALM_SECONDS, 0.0, 0
        while calm < seconds and time.monotonic() < deadline:
            time.sleep(1)
            now = sum(times.user + times.system for times in self._each("cpu_times"))
            before, calm = now, calm + 1 if now - before < 0.1 else 0

    def memory(self) -> float:
        """Resident MiB."""
        return sum(memory.rss for memory in self._each("memory_info")) / 2**20

    def stop(self) -> None:
        if self.process:
            self._each("kill")
            self.process.wait()

    def _each(self, method: str) -> list:
        """What that method of the process and of its children gives."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.process, *self.process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(getattr(process, method)())
        return found


def ours(name: str, model: str, folder: Path, **env: str) -> Server:
    if unknown := [key for key in env if key.lower() not in main.Settings.model_fields]:
        raise loads.Lacking(f"this version has no setting {' and '.join(unknown)}")
    return Server(name, [sys.executable, str(ROOT / "main.py")], model, folder, **{
        "MODEL_REPO_ID": model, "TORCH_DTYPE": "bfloat16", "EAGER_LOAD_MODEL": "1",
        "SESSIONS_DB_PATH": str(folder / f"{name}.db"), **env})


def scripted(name: str, folder: Path, sizes: Sizes, persist: str, seconds: str = "0") -> Server:
    return Server(name, list(SCRIPTED_SERVER), "scripted", folder, **{
        "WORDS": str(sizes.words), "SECONDS": seconds, "MAX_CONCURRENT_REQUESTS": str(sizes.streams),
        "PERSIST_SESSIONS": persist, "SESSIONS_DB_PATH": str(folder / f"{name}.db")})


def llama(folder: Path) -> Server:
    if not importlib.util.find_spec("llama_cpp"):
        raise loads.Lacking('pip install "llama-cpp-python[server]" first (it compiles for ten minutes)')
    import tiny
    return Server(LLAMA, LLAMA_SERVING, tiny.demo_as_gguf(folder / "demo-bf16.gguf"), folder)


# ---- The run


class Run:
    """Everything that was measured, and why the rest was not."""

    def __init__(self, sizes: Sizes):
        self.sizes, self.names, self.notes = sizes, [], []
        self.values = defaultdict(lambda: defaultdict(list))  # server, figure: one value a round

    def measure(self, makers: dict, put: list, warm=()) -> None:
        """Start these servers, put these loads to them in turn, round after round, and stop them."""
        with contextlib.ExitStack() as stack:
            servers = [server for name, make in makers.items() if (server := self._started(name, make, stack, warm))]
            left = {(server.name, load) for server in servers for load in put}
            for n in range(self.sizes.rounds):
                for number, load in enumerate(put):
                    for server in servers[n % len(servers):] + servers[:n % len(servers)] if servers else ():
                        random.seed(f"round {n}, load {number}")
                        if (server.name, load) in left and not self._put(load, server):
                            left.remove((server.name, load))

    def _started(self, name: str, make, stack, warm) -> Server | None:
        print(f"starting {name}", file=sys.stderr, flush=True)
        try:
            server = make()
            stack.callback(server.stop)
            server.start()
            with server.awake():
                for load in warm:
                    asyncio.run(asyncio.wait_for(load(server), loads.LOAD_SECONDS))
                    server.calm(self.sizes.calm)
            return server
        except Exception as fault:  # here and below: whatever happens to a server becomes a sentence
            self.notes.append(f"{name}: {str(fault) or type(fault).__name__}.")

    def _put(self, load, server: Server) -> bool:
        """Whether that could be measured."""
        try:
            with server.awake():
                figures = asyncio.run(asyncio.wait_for(load(server), loads.LOAD_SECONDS))
        except Exception as fault:
            self.notes.append(f"{server.name}, {load.func.__name__}: {str(fault) or type(fault).__name__}.")
            return False
        print(server.name, {k: v and round(v, 1) for k, v in figures.items()}, file=sys.stderr, flush=True)
        for key, value in figures.items():
            self.values[server.name][key] += [] if value is None else [value]
        return True


def measure_all(run: Run, chosen: argparse.Namespace, folder: Path) -> None:
    """Three times servers and loads: words, pictures, and the server's own path."""
    models_dir = Path(os.environ.get("MODELS_DIR", ROOT / "models")).absolute()
    model = main.find_source(main.Settings(model_repo_id="demo", models_dir=models_dir), lambda _: None)[0]
    sizes, partial, makers = run.sizes, functools.partial, {OURS: lambda: ours(OURS, model, folder)}
    for variant in chosen.variants:
        name, env = f"{OURS}, {variant}", dict(setting.split("=", 1) for setting in variant.split())
        makers[name] = partial(ours, name, model, folder, **env)
    others = [(name, shlex.split(command)) for name, command in (peer.split("=", 1) for peer in chosen.peer)]
    for name, command in [*(PEERS[peer] for peer in chosen.peers), *others]:
        makers[name] = partial(Server, name, command, model, folder)
    makers |= {LLAMA: lambda: llama(folder)} if chosen.llama else {}
    run.names = list(makers)
    run.measure(makers, [
        *(partial(loads.many, count=count, tokens=sizes.tokens) for count in sizes.clients),
        partial(loads.turns, tokens=sizes.history), partial(loads.turns_by_id, tokens=sizes.history),
        partial(loads.beside_a_long_prompt, tokens=sizes.long),
        partial(loads.beside_forms, count=sizes.company, tokens=sizes.tokens),
    ], warm=[partial(loads.many, count=count, tokens=8) for count in sizes.clients])
    if sizes.pictures:
        import tiny
        seeing = tiny.seeing_model(model, folder / "seeing-model")
        makers = {OURS: lambda: ours(OURS, seeing, folder)}
        makers |= {SERVE: lambda: Server(SERVE, SERVING, seeing, folder)} if "serve" in chosen.peers else {}
        run.measure(makers, [partial(loads.pictures)], warm=[loads.pictures])
    run.measure({PATH: lambda: scripted(PATH, folder, sizes, "0"), KEPT: lambda: scripted(KEPT, folder, sizes, "1"),
                 PACED: lambda: scripted(PACED, folder, sizes, "1", "0.004")},
                [partial(loads.own_path, streams=sizes.streams, words=sizes.words)],
                warm=[partial(loads.own_path, streams=1, words=sizes.words)])


# ---- What is written

STREAMS = {"total": ("total tokens/s", 1), "each": ("tokens/s a stream", 1), "first": ("first token, ms", 0),
           "worst": ("the last one's, ms", 0), "gap": ("between tokens, ms", 1), "gap p99": ("99th percentile, ms", 0),
           "memory": ("peak MiB", 0)}
TABLES = {
    "Conversations, milliseconds to the first token": {
        "turn 1": ("first turn", 0), "turn 2": ("second turn", 0), "turn 2 by id": ("by previous_response_id", 0),
        "reused": ("tokens reused, as it says", 0)},
    "In company": {
        "short alone": ("short request alone, first token, ms", 0), "short beside": ("beside a long prompt, ms", 0),
        "beside plain": ("plain streams beside plain ones, tokens/s each", 1),
        "beside forms": ("beside ones with schema and penalties", 1)},
    "A picture of a megapixel, milliseconds to a one-token answer": {
        "picture": ("first question", 0), "picture again": ("second question", 0)},
    "The server's own path, with a scripted model": {"path": ("tokens/s", 0), "health": ("/health p99, ms", 1)},
}
GOALS = [  # work; what is divided by what; at least this or, below 0, at most
    ("1 client, tokens/s", (OURS, "1 total"), (SERVE, "1 total"), 1.0),
    ("1 client, tokens/s", (COMPILED, "1 total"), (SERVE, "1 total"), 1.2),
    ("1 client, tokens/s", (PACKED, "1 total"), (SERVE, "1 total"), 2.0),
    ("8 clients, tokens/s", (OURS, "8 total"), (SERVE, "8 total"), 5.0),
    ("8 clients, tokens/s", (OURS, "8 total"), (BATCHING, "8 total"), 1.4),
    ("8 clients, tokens/s", (COMPILED, "8 total"), (BATCHING, "8 total"), 1.9),
    ("16 clients, tokens/s", (OURS, "16 total"), (BATCHING, "16 total"), 1.3),
    ("16 clients, tokens/s", (COMPILED, "16 total"), (BATCHING, "16 total"), 1.7),
    ("second turn, sooner than the other's", (SERVE, "turn 2"), (OURS, "turn 2"), 8.0),
    ("the same by previous_response_id", (SERVE, "turn 2"), (OURS, "turn 2 by id"), 8.0),
    ("picture, sooner than the other's", (SERVE, "picture"), (OURS, "picture"), 1.0),
    ("second question about it", (SERVE, "picture again"), (OURS, "picture again"), 3.0),
    ("beside schema and penalties, beside plain", (OURS, "beside forms"), (OURS, "beside plain"), 0.9),
    ("short request beside a long prompt, alone", (OURS, "short beside"), (OURS, "short alone"), -3.0),
    ("peak memory, 16 clients", (OURS, "16 memory"), (BATCHING, "16 memory"), -1.1),
    ("own path, tokens/s", (PATH, "path"), None, 10_000),
    ("own path with persistence, tokens/s", (KEPT, "path"), None, 5_000),
    ("tokens/s then", (PACED, "path"), None, 10_000),
    ("/health p99 meanwhile, ms", (PACED, "health"), None, -50),
]


def medians(values: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {name: {key: statistics.median(several) for key, several in figures.items() if several}
            for name, figures in values.items()}


def goals(middle: dict[str, dict[str, float]]) -> list[list]:
    """Rows of what was to be reached, and what was."""
    rows = []
    for work, (name, key), other, goal in GOALS:
        top, below = middle.get(name, {}).get(key), middle.get(other[0], {}).get(other[1]) if other else 1
        seen = top / below if top and below else None
        reached = seen is not None and (seen >= goal if goal > 0 else seen <= -goal)
        rows.append([work, name, other[0] if other else "-", f"at {'least' if goal > 0 else 'most'} {abs(goal):,}",
                     (seen, 2 if other else 0), "-" if seen is None else "yes" if reached else "no"])
    return rows


def table(head: list[str], rows: list[list]) -> str:
    """Markdown; numbers come as (value, digits), and what is None becomes a dash."""
    def cell(value) -> str:
        if not isinstance(value, tuple):
            return str(value)
        return "-" if value[0] is None else f"{value[0]:,.{value[1]}f}"

    rule = ["---" if isinstance(value, str) else "--:" for value in rows[0]]
    lines = [head, rule, *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(run: Run, machine: str) -> str:
    """All tables, and the sentences for the dashes."""
    sizes, middle = run.sizes, medians(run.values)

    def row(name: str, columns: dict, prefix: str = "") -> list:
        return [name, *((middle.get(name, {}).get(prefix + key), digits) for key, (_, digits) in columns.items())]

    parts = ["# Benchmark", machine, f"Medians of {sizes.rounds} rounds. Answers of {sizes.tokens} tokens, greedy; "
             f"conversations of {sizes.history} tokens, a long prompt of {sizes.long}, {sizes.company} streams beside "
             f"{sizes.company}, {sizes.streams} on the own path.",
             table(["clients", "server", *(head for head, _ in STREAMS.values())], [
                 [count, *row(name, STREAMS, f"{count} ")] for count in sizes.clients for name in run.names])]
    for title, columns in TABLES.items():
        names = [name for name in (*run.names, PATH, KEPT, PACED) if columns.keys() & middle.get(name, {}).keys()]
        parts += [f"## {title}", table(["server", *(head for head, _ in columns.values())],
                                       [row(name, columns) for name in names])] if names else []
    parts += ["## To reach", table(["work", "of", "against", "goal", "seen", "reached"], goals(middle))]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in run.notes)]) + "\n"


def plot(run: Run, path: Path) -> None:
    """Speed and time to the first token, over the number of clients."""
    if not importlib.util.find_spec("matplotlib"):
        return run.notes.append("No plot: pip install matplotlib.")
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4.5), layout="tight")
    for axis, key in zip(figure.subplots(1, 2), ("total", "first"), strict=True):
        for name, figures in medians(run.values).items():
            points = [(n, figures[f"{n} {key}"]) for n in run.sizes.clients if f"{n} {key}" in figures]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xlabel="clients", ylabel=STREAMS[key][0], xticks=run.sizes.clients, yscale="log")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """What it ran on, and with which versions."""
    import torch
    info = Path("/proc/cpuinfo")
    named = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    parts = [named[0].split(": ")[1] if named else platform.processor() or platform.machine(), f"{cores()} cores",
             f"{torch.get_num_threads()} torch threads", f"{psutil.virtual_memory().total / 2**30:.0f} GiB"]
    parts += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    parts += [platform.system(), f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "fastapi", "uvicorn", "sse-starlette", "llama-cpp-python", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(parts) + "."


def bench(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one tiny round, without pictures")
    parser.add_argument("--rounds", type=int, help="3 unless given")
    parser.add_argument("--clients", type=int, nargs="+", help="1 4 8 16 unless given")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="all unless given; may be empty")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="with {model} and {port}")
    parser.add_argument("--llama", action="store_true", help="llama.cpp, on the same weights as bf16 GGUF")
    parser.add_argument("--variants", nargs="*", default=["COMPILE=1", "QUANTIZATION=int8 COMPILE=1"],
                        help="settings with which this server is measured besides")
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "bench", help="folder for what is written")
    chosen = parser.parse_args(argv)
    sizes = QUICK if chosen.quick else Sizes()
    sizes = replace(sizes, rounds=chosen.rounds or sizes.rounds, clients=tuple(chosen.clients or sizes.clients))
    run, seen = Run(sizes), machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the servers would stay behind, suspended
    with tempfile.TemporaryDirectory() as folder:
        measure_all(run, chosen, Path(folder))
    chosen.out.mkdir(parents=True, exist_ok=True)
    plot(run, chosen.out / "bench.png")
    (chosen.out / "bench.md").write_text(text := report(run, seen), encoding="utf-8")
    (chosen.out / "bench.json").write_text(json.dumps({
        "machine": seen, "sizes": asdict(sizes), "medians": medians(run.values), "rounds": run.values,
        "goals": goals(medians(run.values)), "notes": run.notes}, indent=1), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    bench()
