"""Whatever is sent, the server answers in OpenAI's words, never with a crash, and keeps nothing of it. What is sent is
drawn: the same every time, about a minute of it; `FUZZ=20` draws twenty times as much, and never the same."""
import base64
import contextlib
import io
import json
import os
import re
import socket
import string
from copy import deepcopy
from urllib.parse import quote

import psutil
import pytest
import schemathesis
import tiny
from conftest import SCRIPTED_SERVER, ScriptedModel, TestClient, chat, held, main, parse_sse, wait_until_no_more
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import GenerationMode

CHAT, RESPONSES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"
FUZZ = int(os.environ.get("FUZZ", "1"))
pytestmark = pytest.mark.timeout(300 * FUZZ)


def draws(count):
    return settings(max_examples=count * FUZZ, derandomize=FUZZ == 1, deadline=None, database=None, print_blob=False,
                    suppress_health_check=list(HealthCheck))


# -- servers, and what they keep -------------------------------------------------------------------------------
class SensingModel(ScriptedModel):
    """Looks at and hears everything, and says three words of it."""

    senses, audio_rate = frozenset({"image", "video", "audio"}), 16_000


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    with contextlib.ExitStack() as stack:

        def make(load, **values):
            chosen = main.Settings(sessions_db_path=tmp_path_factory.mktemp("fuzz") / "sessions.db", **values)
            app = main.create_app(chosen, load=load)
            http = stack.enter_context(TestClient(app, raise_server_exceptions=False))
            for path, body in BODIES.items():
                answer = send(http, "POST", path, json.dumps(body).encode())
                assert answer.status_code == 200, answer.text
            return http

        yield make


@pytest.fixture(scope="module")
def scripted(serve):
    return serve(lambda *_: SensingModel("one", " two", " three"), max_image_mib=1)


@pytest.fixture(scope="module")
def real(serve, one_thread):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "CONTEXT", 4096)
        model = tiny.model("llama")
    return serve(lambda *_: model, max_tokens=4, max_output_tokens=4)


@pytest.fixture
def http(scripted):
    """A server that afterwards holds no more than before."""
    before = held(scripted.app.state.server)
    yield scripted
    wait_until_no_more(lambda: held(scripted.app.state.server), before)


# -- what an answer must be ------------------------------------------------------------------------------------
LEAK = re.compile(r"0x[0-9a-f]{6,}|object at|Traceback|File \"|\.py\b|/(tmp|usr|home|root|proc|var)\b|<class|pydantic"
                  r"|starlette|sqlite|torch|[a-z]Error\b|Exception\b|NoneType")


def check(answer):
    """That it is no crash, and if it is a refusal, one in OpenAI's words: a sentence that gives nothing away."""
    assert answer.status_code < 500 and answer.headers["x-request-id"], answer.text
    kind = answer.headers.get("content-type", "")
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] and error["code"], error
        assert re.fullmatch(r"\S.*[.!?]", error["message"], re.DOTALL) and len(error["message"]) < 1000, error
        assert not LEAK.search(error["message"]), error
    elif "event-stream" in kind:
        frames = parse_sse(answer.text)
        first = int(frames[0]["id"].rpartition(":")[2]) if frames else 0
        assert not frames or frames[-1]["data"] == "[DONE]"
        assert [int(f["id"].rpartition(":")[2]) for f in frames] == [*range(first, first + len(frames))]
        assert all(f["data"] == "[DONE]" or json.loads(f["data"]) for f in frames)
    elif "json" in kind:
        answer.json()
    return answer


def send(http, method, path, body=None, headers=()):
    kind = {} if body is None else {"content-type": "application/json"}
    return http.request(method, path, content=body, headers=[*kind.items(), *headers])


# -- bodies ----------------------------------------------------------------------------------------------------
def picture():
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


SEEN, TEXT_FILE = picture(), "data:text/plain;base64,aGVsbG8="
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["b"]}}, "required": ["a"],
          "additionalProperties": False}
SHARED = {
    "model": "scripted", "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "user": "u",
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"1": -1},
    "min_tokens": 0, "stop_token_ids": [9], "stop": ["x"], "parallel_tool_calls": True, "ignore_eos": False,
    "chat_template_kwargs": {"enable_thinking": False}, "metadata": {"k": "v"}, "store": True, "stream": True,
    "stream_options": {"include_usage": True}, "service_tier": "auto", "add_generation_prompt": True}
BODIES = {
    CHAT: SHARED | {
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "o"}, {"role": "user", "content": "q", "name": "n"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 9, "n": 1, "logprobs": True,
        "top_logprobs": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "reasoning_effort": "low"},
    RESPONSES: SHARED | {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "a", "annotations": []}]},
            {"type": "web_search_call", "id": "ws", "status": "completed"}, {"role": "user", "content": "q"}],
        "instructions": "i", "max_output_tokens": 9, "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto",
        "include": ["message.output_text.logprobs"], "background": False}}
BODIES[COUNT] = BODIES[RESPONSES]
MEDIA = [
    {"type": "image_url", "image_url": {"url": SEEN, "detail": "low"}}, {"type": "input_image", "image_url": SEEN},
    {"type": "file", "file": {"file_data": TEXT_FILE, "filename": "f"}}, {"type": "input_file", "file_data": TEXT_FILE},
    {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}},
    {"type": "video", "video": TEXT_FILE}]
SEEING = {
    CHAT: {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}, *MEDIA[:3]]}], "stream": True},
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "t"}, MEDIA[1]]}, MEDIA[3],
                          {"type": "function_call_output", "call_id": "c", "output": [MEDIA[1]]}]}}
TOGETHER = [{"tools", "tool_choice"}, {"stream", "stream_options"}, {"logprobs", "top_logprobs"}]  # stand or fall so
NAMES = sorted({*main.NOT_BUILT, *main.ChatRequest.model_fields, *main.ResponsesRequest.model_fields, "x", "", "é\r\n",
                "schema", "function", *main.ContentPart.model_fields, *main.InputItem.model_fields})
RAW = {  # what Python's encoder does not write
    '"<deep>"': "[" * 3000 + "]" * 3000, '"<deeper>"': '{"a":' * 90_000 + "1" + "}" * 90_000, '"<half>"': "[1,",
    '"<digits>"': "9" * 5000, '"<twice>"': '{"type": "text", "text": "a", "text": 7}'}


def nested(depth):
    value = None
    for n in range(depth):
        value = [value] if n % 2 else {"a": value}
    return value


ODD = [
    None, True, False, 0, -1, 1, 2, 16, 2**31, 2**63, 2**64, -2**63, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308,
    float("nan"), float("inf"), -float("inf"), "", " ", "x", "0", "1", "true", "none", "auto", "\x00", "\ud800",
    "\udfff\ud800", "\U0010ffff", "a\r\nid: x\r\ndata: y\r\n\r\n", "\u2028\u2029\x85", "\x1b[31m", "{}", "[",
    '{"a":', "NaN", "1e999", "[" * 3000, "x" * 600, "é" * 3000, "..", "../../x", "%2e%2e%2f", "a:b", "$ref",
    "<|im_end|>", "<tool_call>{", "data:,x", "data:;base64,=", SEEN, TEXT_FILE, "http://127.0.0.1:1/x", "http://[::1", "file:///x",
    "C:\\x", "{{ 7*7 }}", "{% for x in y %}", "(a+)+$", "(", "start: /a/", "resp_" + "0" * 32, [], {}, [[]], [None],
    [{}], {"": ""}, {"a": None}, {"type": "text"}, {"type": "text", "text": "t"}, *MEDIA, {"type": 7},
    {"type": "input_image", "image_url": "x"}, {"type": "image_url", "image_url": {"url": SEEN, "data": SEEN}},
    {"type": "function"}, {"type": "item_reference", "id": "msg_" + "0" * 32 + "_0"}, {"role": "user", "content": "x"},
    {"role": "tool", "content": "x"}, {"role": "assistant", "content": "x"}, {"$ref": "#"}, {"anyOf": []}, {"enum": []},
    {"$ref": "http://127.0.0.1:1/s"}, {"type": "string", "pattern": "("}, {"const": "\ud800"}, {"type": "nothing"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, {"type": "string", "minLength": 10**9}, ["x"] * 20,
    {"type": "json_object"}, {"regex": "("}, {"regex": "((a+)+)+$"}, {"choice": ["a", ""]}, {"grammar": "start: start"},
    {"json": "{"}, nested(90), nested(150), *map(json.loads, RAW), [0] * 5000, {str(n): n for n in range(2000)}]
VALUES = st.sampled_from(ODD) | st.text(max_size=20) | st.integers() | st.floats() | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5)


def places(value, path=()):
    """The path of every value within a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@st.composite
def bodies(draw, *bases):
    """A body, as bytes, in which up to three values are others, or gone, or new."""
    body = deepcopy(draw(st.sampled_from(bases)))
    for group in [*TOGETHER, *({name} for name in body if not any(name in group for group in TOGETHER))]:
        if not group & {"messages", "input"} and draw(st.booleans()):
            body = {name: value for name, value in body.items() if name not in group}
    for _ in range(draw(st.integers(1, 3))):
        if not (found := [*places(body)]):
            break
        *path, key = draw(st.sampled_from(found))
        value = body
        for step in path:
            value = value[step]
        match draw(st.sampled_from(["other", "other", "other", "gone", "new"])):
            case "other":
                value[key] = deepcopy(draw(VALUES))
            case "gone":
                del value[key]
            case _ if isinstance(value, dict):
                value[draw(st.sampled_from(NAMES) | st.text(max_size=8))] = deepcopy(draw(VALUES))
            case _:
                value.insert(draw(st.integers(0, len(value))), deepcopy(draw(VALUES)))
    content = json.dumps(body)
    for mark, raw in RAW.items():
        content = content.replace(mark, raw)
    return content.encode()


def sends(client, path, whole, count):
    """Send bodies that are drawn from a good one, and check what comes back."""
    @draws(count)
    @given(bodies(whole))
    def tried(body):
        check(send(client, "POST", path, body))

    tried()


@pytest.mark.parametrize("path", BODIES)
def test_no_value_in_a_body_makes_the_server_fail(http, path):
    sends(http, path, BODIES[path], 300)


@pytest.mark.parametrize("path", SEEING)
def test_no_media_make_the_server_fail(http, path):
    sends(http, path, SEEING[path], 200)


@pytest.mark.parametrize("path", BODIES)
def test_no_value_in_a_body_makes_a_real_model_fail(real, path):
    sends(real, path, BODIES[path], 150)


@pytest.mark.parametrize("path", BODIES)
def test_no_bytes_of_a_body_make_the_server_fail(http, path):
    whole = json.dumps(BODIES[path]).encode()
    edit = st.tuples(st.integers(0, len(whole)), st.integers(0, 9), st.binary(max_size=6))
    kinds = st.sampled_from(["application/json", "application/json; charset=utf-16", "application/x+json", "a/b", ""])

    @draws(150)
    @given(st.lists(edit, min_size=1, max_size=4), kinds)
    def tried(edits, kind):
        body = whole
        for at, gone, new in edits:
            body = body[:at] + new + body[at + gone:]
        check(http.post(path, content=body, headers={"content-type": kind}))

    tried()


# -- paths, queries and headers --------------------------------------------------------------------------------
ROUTES = sorted((method, route.path) for route in main.router.routes for method in route.methods)
WORDS = st.text(max_size=12) | st.sampled_from([
    "", ".", "..", "../x", "x/y", "-1", "0", "1", "99999999999", "1e3", "nan", "true", "asc", "desc", "x:0", "x:-1",
    "x:", ":0", "x:0:0", "x:1000000000", "x:٣", "a b", "x\r\nid: y", "\x00", "\x1b[2J", "\u2028", "é", "\U0010ffff",
    "%", "%00", "%ff", "chatcmpl-", "resp_", "resp_" + "0" * 32, "chatcmpl-" + "0" * 32, "x" * 300, "' OR 1=1 --", "?",
    "#", "{id}"])
OTHER_METHODS = ["GET", "POST", "PUT", "PATCH", "HEAD", "OPTIONS", "DELETE", "TRACE", "X"]
QUERIES = ("last_event_id", "after", "order", "limit", "stream", "starting_after", "api_key")
HEADERS = ("last-event-id", "x-request-id", "accept", "accept-encoding", "range", "if-none-match", "authorization",
           "x-api-key", "cookie", "transfer-encoding", "expect", "content-encoding", "x-method", "upgrade",
           "content-length", "host", "origin", "access-control-request-method", "x-forwarded-for", "forwarded", "x-x")


@pytest.fixture
def names(http):
    """Of sessions: a chat's and a response's id and label."""
    made = []
    for path, body, label in ((CHAT, chat(), "a-chat"), (RESPONSES, {"input": "q"}, "a-response")):
        made += [http.post(path, json=body | {"store": True, "session_id": label}).json()["id"], label]
    return made


@st.composite
def asked(draw, names):
    """A request to any route: method, path, and what stands beside them."""
    known = st.sampled_from(names)
    events = st.builds("{}:{}".format, known, st.integers(-1, 12) | WORDS)
    ids = known | known | WORDS
    method, path = draw(st.sampled_from(ROUTES))
    method = draw(st.sampled_from([method] * 8 + OTHER_METHODS))
    path = re.sub(r"\{[^}]*\}", lambda _: quote(draw(ids), safe=draw(st.sampled_from(["", string.punctuation]))), path)
    values = events | ids | st.sampled_from(["true", "5"])
    query = draw(st.lists(st.tuples(st.sampled_from(QUERIES), values), max_size=3))
    headers = draw(st.lists(st.tuples(st.sampled_from(HEADERS), events | ids), max_size=3))
    body = draw(st.none() | st.sampled_from([b"", b"{}", b"[]", b'{"input": "q", "stream": true}',
                                             b'{"messages": [{"role": "user", "content": "q"}], "stream": true}']))
    return method, path, query, body, headers


def test_no_path_query_or_header_makes_the_server_fail(http, names):
    @draws(1500)
    @given(asked(names))
    def tried(request):
        method, path, query, body, headers = request
        answer = http.request(method, f"http://localhost{path}", params=query, content=body, headers=[
            ("content-type", "application/json"), *((name, value.encode()) for name, value in headers)])
        is_preflight = method == "OPTIONS" and "vary" in answer.headers  # whose answer has no reader but the browser
        check(answer) if method != "HEAD" and not is_preflight else None

    tried()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_whatever_event_a_client_says_it_saw_last_it_gets_what_follows_or_is_told_why_not(http, path):
    """Of a stream with a label: never a hole, never a frame twice, never an answer made anew."""
    label = f"fuzzed-{path[4:8]}"
    body = {"messages": chat()["messages"]} if path == CHAT else {"input": "q"}
    body |= {"stream": True, "session_id": label}
    whole = parse_sse(http.post(path, json=body).text)
    sessions = len(http.get("/v1/sessions").json()["data"])
    events = st.builds("{}:{}".format, st.sampled_from([label, label, label.upper(), "", "x"]),
                       st.integers(-2, len(whole) + 2) | WORDS) | WORDS

    @draws(300)
    @given(events, st.booleans(), st.booleans())
    def tried(event, in_query, named):
        named = named or not event  # else it would be a new request
        where = {"params": {"last_event_id": event}} if in_query else {"headers": {"last-event-id": event.encode()}}
        answer = check(http.post(path, json=body if named else body | {"session_id": None}, **where))
        if match := re.fullmatch(f"{label}:([0-9]+)", event):
            seen = int(match[1])
            assert answer.status_code == (200 if seen < len(whole) else 400)
            assert answer.status_code == 400 or parse_sse(answer.text) == whole[seen + 1:]
        elif event or named:
            assert answer.status_code in (400, 404, 409)

    tried()
    assert len(http.get("/v1/sessions").json()["data"]) == sessions


# -- what our own description says -----------------------------------------------------------------------------
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(main.app.openapi()).get_all_operations()]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_nothing_that_our_openapi_document_allows_or_forbids_makes_the_server_fail(http, operation):
    @draws(60)
    @given(st.data())
    def tried(data):
        modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * (operation.method == "post")
        case = data.draw(operation.as_strategy(data.draw(st.sampled_from(modes))))
        sent = case.as_transport_kwargs(base_url="http://localhost")
        content = {"content": sent["data"]} if isinstance(sent.get("data"), bytes) else {
            name: sent[name] for name in ("data", "json", "files") if name in sent}
        check(http.request(sent["method"], sent["url"], params=sent["params"], headers=sent["headers"], **content))

    tried()


# -- bytes on the wire -----------------------------------------------------------------------------------------
def written(line, body=b"", **headers):
    lines = [line, *(f"{name.replace('_', '-')}: {value}" for name, value in ({"host": "localhost"} | headers).items())]
    return "\r\n".join([*lines, "connection: close", "", ""]).encode() + body


HELLO = json.dumps(chat(stream=True)).encode()
REQUESTS = [
    written("GET /v1/models HTTP/1.1"), written("GET /v1/sessions?limit=5 HTTP/1.0", last_event_id="x:1"),
    written(f"POST {CHAT} HTTP/1.1", HELLO, content_type="application/json", content_length=len(HELLO)),
    written(f"POST {CHAT} HTTP/1.1", b"%x\r\n%s\r\n0\r\n\r\n" % (len(HELLO), HELLO), content_type="application/json",
            transfer_encoding="chunked"),
    written("OPTIONS /v1/models HTTP/1.1", origin="https://x.example", access_control_request_method="POST")]
PIECES = st.binary(max_size=8) | st.sampled_from([
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\r\n\r\n", b"\r\n ", b"HTTP/9.9", b"HTTP/2.0", b"GET ", b"http://x/",
    b"//", b"*", b"\r\ncontent-length: -1", b"\r\ncontent-length: 99999999999999999999", b"\r\ncontent-length: 0",
    b"\r\ntransfer-encoding: chunked", b"\r\ntransfer-encoding: gzip, chunked", b"\r\nupgrade: h2c", b"a" * 70_000,
    b"\r\nexpect: 100-continue", b"\r\nhost: y.example", b"%00", b"%", b"\xff\xfe", b"ffffffffffffffff\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])


@st.composite
def requests(draw):
    sent = draw(st.sampled_from(REQUESTS))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(sent)))
        sent = sent[:at] + draw(PIECES) + sent[at + draw(st.integers(0, 5)):]
    return sent


def test_no_bytes_on_the_wire_make_the_server_fail(start):
    server = start(SCRIPTED_SERVER, WORDS=3, SECONDS=0, SEND_TIMEOUT_SECONDS=0.2)
    process = psutil.Process(server.process.pid)

    def kept():
        return process.num_threads(), process.num_handles() if os.name == "nt" else process.num_fds()

    def talk(sent):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as wire, \
                contextlib.suppress(ConnectionError):
            wire.sendall(sent)
            yield from iter(lambda: wire.recv(65536), b"")

    assert all(b"".join(talk(request)).startswith(b"HTTP/1.1 200 ") for request in REQUESTS[:4])
    before = kept()

    @draws(150)
    @given(requests())
    def tried(sent):
        said = b"".join(talk(sent))
        assert all(int(status) < 500 for status in re.findall(rb"^HTTP/1\.1 ([0-9]+)", said, re.MULTILINE)), said
        assert not LEAK.search(said.decode("latin-1")), said

    tried()
    assert server.answers()
    wait_until_no_more(kept, before)
    log = server.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 300:][:6000]
