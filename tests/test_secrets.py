"""What people say, show and prove themselves with stands in no log and no refusal; a line of the log is one line."""
import base64
import contextlib
import json
import logging
import re
import sqlite3
from urllib.parse import quote

import httpx2
import pytest
from conftest import SCRIPTED_SERVER, ScriptedModel, TestClient, chat, main, parse_sse, wait_until

CHAT, RESPONSES, COUNT = "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"
SECRET = "S3CRET"  # a part of all that nobody else may see
SHOWN = base64.b64encode(f"{SECRET}{SECRET}{SECRET}".encode()).decode()  # the same, as media
KEY, TOKEN, INJECTED = f"sk-{SECRET}", f"hf_{SECRET}", f"{SECRET}\r\nid: x\r\ndata: evil\n\n\x1b[31m\x00\u2028\x85"
TELLTALE = re.compile(r"0x[0-9a-f]{6,}|object at|Traceback|File \"|\.py\b|/(tmp|usr|home|root|proc|var)\b|<class"
                      r"|[a-z]Error\b|pydantic|starlette|sqlite|httpx|NoneType")
HEADERS = {"authorization": f"Bearer {KEY}"}
SCHEMA = {"type": "object", "properties": {SECRET: {"type": "string", "description": SECRET}}}


class Speaking(ScriptedModel):
    """Says a secret, and calls a function with one."""

    senses, audio_rate = frozenset({"image", "video", "audio"}), 16_000

    def __init__(self, **options):
        called = main.ToolCallDelta("f", json.dumps({"a": SECRET}))
        super().__init__(SECRET, main.ReasoningDelta(SECRET), called, **options)


class Collecting(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def logged():
    """Collects what is logged, by anybody; in the end no secret is in it, and no message has two lines."""
    collecting = Collecting()
    logging.getLogger().addHandler(collecting)
    yield
    logging.getLogger().removeHandler(collecting)
    messages, whole = [r.getMessage() for r in collecting.records], "".join(map(collecting.format, collecting.records))
    assert "started: model" in whole and "stopped" in whole
    assert not [secret for secret in (SECRET, SHOWN) if secret in whole]
    assert all(map(str.isprintable, messages)), messages


@pytest.fixture
def http(logged, client):
    """`http(model, **settings)` is a client with the key of a server that has secrets; its state tells none of them."""
    made = []

    def make(model, **values):
        made.append(client(model, **{"api_key": KEY, "hf_token": TOKEN, **values}))
        made[-1].headers.update(HEADERS)
        return made[-1]

    yield make
    for served in made:
        for path in ("/health", "/ready", "/metrics", "/openapi.json", "/v1/models"):
            answer = served.get(path)
            assert SECRET not in answer.text and (path == "/openapi.json" or not TELLTALE.search(answer.text)), path


def refused(answer, *statuses):
    """The code of a refusal that gives nothing away, in any of these statuses or in a frame of a stream."""
    if answer.status_code == 200:
        last = json.loads(parse_sse(answer.text)[-2]["data"])
        error = last.get("error") or last["response"]["error"]
    else:
        assert answer.status_code in statuses, answer.text
        error = answer.json()["error"]
    assert not any(secret in error["message"] + str(answer.headers) for secret in (SECRET, SHOWN)), error
    assert TELLTALE.search(error["message"]) is None, error
    return error["code"]


CALL = {"id": SECRET, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": SECRET})}}
TOOL = {"name": "f", "description": SECRET, "parameters": SCHEMA}
TEXT_FILE = f"data:text/plain;base64,{SHOWN}"
ASKED = {"user": SECRET, "metadata": {SECRET: SECRET}, "safety_identifier": SECRET, "stop": [SECRET + "x"],
         "unknown": SECRET}
TALK = ASKED | {
    "messages": [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET, "name": SECRET},
                 {"role": "assistant", "content": None, "reasoning_content": SECRET, "tool_calls": [CALL]},
                 {"role": "tool", "tool_call_id": SECRET, "content": INJECTED},
                 {"role": "user", "content": [{"type": "text", "text": SECRET},
                                              {"type": "file", "file": {"file_data": TEXT_FILE, "filename": SECRET}}]}],
    "tools": [{"type": "function", "function": TOOL}]}
ASK = ASKED | {
    "instructions": SECRET, "tools": [{"type": "function", **TOOL}],
    "input": [{"role": "user", "content": [{"type": "input_text", "text": INJECTED},
                                           {"type": "input_file", "file_data": TEXT_FILE}]},
              {"type": "function_call", "call_id": SECRET, "name": "f", "arguments": json.dumps({"a": SECRET})},
              {"type": "function_call_output", "call_id": SECRET, "output": SECRET}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path,body", [(CHAT, TALK), (RESPONSES, ASK)])
def test_what_is_asked_and_answered_is_logged_nowhere(http, path, body, stream):
    served = http(Speaking())
    answer = served.post(path, json=body | {"stream": stream, "store": True, "session_id": "mine"})
    assert answer.status_code == 200 and SECRET in answer.text
    place = f"{path}/{answer.headers['x-session-id']}"
    for method, url in (("GET", place), ("GET", f"{place}/{'messages' if path == CHAT else 'input_items'}"),
                        ("GET", "/v1/sessions/mine/events"), ("POST", "/v1/cancel/mine"), ("DELETE", place)):
        assert served.request(method, url).status_code == 200
    assert served.post(COUNT, json=ASK).status_code == 200


def spoiled(body):
    """The body with each of its values in turn, and each field it might have, as something that cannot be."""
    fields = (main.ChatRequest if "messages" in body else main.ResponsesRequest).model_fields
    for name in sorted({*fields, *main.NOT_BUILT}):
        for value in (SECRET, [SECRET], {SECRET: SECRET}, [{"type": SECRET, "content": SECRET}], {"type": SECRET}):
            yield {**body, name: value}
    for part in ({"type": "text", "text": [SECRET]}, {"type": "image_url", "image_url": SECRET},
                 {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SHOWN}"}},
                 {"type": "input_image", "image_url": f"https://{SECRET}.invalid:99/{SECRET}"},
                 {"type": "input_image", "image_url": f"file:///{SECRET}"}, {"type": "input_image", "file_id": SECRET},
                 {"type": "input_audio", "input_audio": {"data": SHOWN, "format": "wav"}},
                 {"type": "video", "video": f"data:video/mp4;base64,{SHOWN}"},
                 {"type": "file", "file": {"file_data": SHOWN + "!"}},
                 {"type": "file", "file": {"file_data": base64.b64encode(b"%PDF-1.7 " + SECRET.encode()).decode()}}):
        place = "messages" if "messages" in body else "input"
        yield {**body, place: [{"role": "user", "content": [part]}]}
    for arguments in (SECRET, "{" + SECRET, "[1e999]", json.dumps(SECRET + "\ud800")):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        yield {**body, "messages": [{"role": "assistant", "tool_calls": [call]}]} if "messages" in body else {
            **body, "input": [{"role": "user", "content": "x"}, item]}


@pytest.mark.parametrize("path,body", [(CHAT, TALK), (RESPONSES, ASK), (COUNT, ASK)])
def test_what_cannot_be_read_is_refused_without_being_repeated(http, path, body):
    served, codes = http(Speaking()), set()
    for bad in spoiled(body):
        answer = served.post(path, json=bad)
        if answer.status_code != 200:
            echo = re.search("type|role|name|function|tool_choice|model", answer.text)  # names are said, values are not
            codes.add(answer.json()["error"]["code"] if echo else refused(answer, 400))
    assert {"invalid_value", "unsupported_parameter", "invalid_media", "unsupported_content"} <= codes


@pytest.mark.parametrize("label", [INJECTED, f"{SECRET} ", f"{SECRET}\n", f"é{SECRET}", f"resp_{SECRET}", SECRET * 30])
def test_a_label_that_is_none_is_refused_in_one_line_that_does_not_repeat_it(http, label):
    served = http(Speaking())
    for path, body in ((CHAT, chat()), (RESPONSES, {"input": "x"})):
        assert refused(served.post(path, json=body | {"session_id": label}), 400) == "invalid_value"
        answer = served.post(path, json=body | {"stream": True}, headers={"last-event-id": f"{label}:0".encode()})
        assert refused(answer, 400, 404) in ("invalid_last_event_id", "session_not_found")
    for method, place in (("GET", "/v1/sessions/{}"), ("GET", "/v1/sessions/{}/events"), ("POST", "/v1/cancel/{}"),
                          ("GET", CHAT + "/{}"), ("GET", RESPONSES + "/{}"), ("POST", RESPONSES + "/{}/cancel")):
        answer = served.request(method, place.format(quote(label, safe="")))
        assert refused(answer, 404) in ("session_not_found", "not_found")
    assert served.get("/v1/sessions").json()["data"] == []


def test_whoever_is_turned_away_at_the_door_is_told_nothing_of_what_they_brought(http):
    served = http(Speaking(), max_body_mib=0.01, rate_limit_requests=2)
    wrong = {"authorization": f"Bearer {KEY}-wrong"}
    assert refused(served.get("/v1/models", headers=wrong), 401) == "invalid_api_key"
    assert refused(served.get("/v1/models", headers={"host": f"{SECRET}.example"}), 403) == "host_not_allowed"
    page = {"origin": f"https://{SECRET}.example"}
    assert refused(served.post(CHAT, json=TALK, headers=page), 403) == "origin_not_allowed"
    assert refused(served.post("/v1/cancel/x", json={"x": SECRET * 9999}), 413) == "body_too_large"
    assert refused(served.post(CHAT, content=SECRET, headers={"content-type": SECRET}), 415) == "not_json"
    assert refused(served.get("/v1/models", headers={"x-x": SECRET * 9999}), 431) == "headers_too_large"
    kind = {"content-type": "application/json"}
    assert refused(served.post(CHAT, content="{" + SECRET, headers=kind), 400) == "invalid_json"
    assert served.post(CHAT, json=TALK).status_code == 200
    assert refused(served.post(CHAT, json=TALK), 429) == "rate_limit_exceeded"


def test_what_does_not_fit_is_refused_without_being_repeated(http):
    served = http(Speaking(context=16))
    for stream in (False, True):
        long = TALK | {"messages": [{"role": "user", "content": f"{SECRET} " * 99}], "stream": stream}
        assert refused(served.post(CHAT, json=long), 400) == "context_length_exceeded"


@pytest.mark.parametrize("path,body", [(CHAT, TALK), (RESPONSES, ASK)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [(500, "generation_failed"), (503, "server_overloaded")])
def test_a_fault_of_the_engine_tells_nothing(http, path, body, stream, fault):
    served = http(Speaking(fail_at=1, fault=fault))
    answer = served.post(path, json=body | {"stream": stream})
    assert refused(answer, fault[0]) in (fault[1], "server_error")


@pytest.mark.parametrize("path,body", [(CHAT, TALK), (RESPONSES, ASK)])
def test_a_crash_tells_nothing(http, path, body):
    class Crashing(Speaking):
        def prepare(self, chat):
            return {}[chat]  # a KeyError names its key

    assert refused(http(Crashing()).post(path, json=body), 500) == "internal_error"


def test_a_fault_of_the_storage_tells_nothing(http, tmp_path):
    served = http(Speaking())
    assert served.post(CHAT, json=TALK | {"session_id": "mine", "store": True}).status_code == 200
    served.get("/v1/sessions")  # answered when all is on disk
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)) as other:
        for table in ("sessions", "frames", "objects", "requests"):
            other.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
        for path in ("/v1/sessions", f"/v1/sessions/{SECRET}", f"{CHAT}/chatcmpl-{SECRET}"):
            assert refused(served.get(path), 503) == "storage_unavailable"
        assert served.post(CHAT, json=TALK).status_code == 200
        wait_until(lambda: served.get("/ready").json()["storage"] == "degraded")
        for table in ("sessions", "frames", "objects", "requests"):
            other.execute(f"ALTER TABLE {table}_away RENAME TO {table}")


@pytest.mark.parametrize("fault", [
    OSError("no such file: /home/somebody/models/x"), RuntimeError("<Thing object at 0x7f3a5c00d1e0>\nTwo lines"),
    KeyError("/tmp/x"), MemoryError()], ids=lambda fault: type(fault).__name__)
def test_a_load_that_fails_tells_neither_paths_nor_addresses(logged, settings, fault):
    def load(*_):
        raise fault

    app = main.create_app(settings(api_key=KEY, hf_token=TOKEN), load=load)
    with TestClient(app, raise_server_exceptions=False, headers=HEADERS) as served:
        for stream in (False, True):
            answer = served.post(CHAT, json=TALK | {"stream": stream})
            assert refused(answer, 503) == "model_load_failed"
        told = served.get("/ready")
    assert told.json()["status"] == "failed" and TELLTALE.search(told.text) is None and SECRET not in told.text


def test_a_line_of_the_log_is_one_line_whatever_is_asked(start):
    server = start(SCRIPTED_SERVER, WORDS=2, SECONDS=0, API_KEY=KEY, HF_TOKEN=TOKEN, LOG_LEVEL="INFO")
    with httpx2.Client(base_url=server.base, timeout=30, headers=HEADERS) as http:
        for text in ("a\r\nb", "\x1b[31m", "\u2028\u2029\x85", "\x00"):
            spelled = quote(f"{text} evil", safe="")
            for path in (f"/v1/sessions/{spelled}", f"/{spelled}", f"/v1/models/{spelled}", f"/v1/models?x={spelled}",
                         f"/v1/sessions/x/events?last_event_id={spelled}"):
                assert http.get(path).status_code in (200, 400, 404)
            odd = text.encode() if text > "\x80" else "é".encode()  # what a header can carry
            answer = http.post(CHAT, json=chat(f"{text} evil", user=text, model=text),
                               headers={"x-request-id": odd, "user-agent": odd})
            assert answer.status_code == 200
        assert http.post(CHAT, json=TALK, headers={"authorization": "Bearer x"}).status_code == 401
    assert server.terminate() in (0, -15)
    log = server.log.read_bytes().decode()
    assert SECRET not in log and f'"POST {CHAT} HTTP/1.1" 401' in log
    assert all(line.isprintable() for line in log.split("\n"))
    assert not re.search("^ ?evil|^b evil", log, re.MULTILINE)
