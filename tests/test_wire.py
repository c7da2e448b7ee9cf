"""The wire: what is let in, and how everything else is refused."""
import json
import re
import socket
import threading
from typing import get_type_hints

import httpx2
import pytest
from conftest import ScriptedModel, TestClient, chat, main, running_app, wait_until
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params
from openai.types.responses.input_token_count_params import InputTokenCountParams

URL = "/v1/chat/completions"
KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 413: "invalid_request_error",
         415: "invalid_request_error"}
MIB = 2**20


@pytest.fixture(scope="module")
def served():
    settings = main.Settings(persist_sessions=False, max_body_mib=1)
    app = main.create_app(settings, load=lambda *_: ScriptedModel("fine"))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def refused(answer, status=400, code="invalid_value", param=None):
    """The OpenAI error object, whole and with what it should say; its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (set(answer.json()), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    assert (error["type"], error["code"], error["param"]) == (KINDS[status], code, param)
    assert isinstance(error["message"], str) and error["message"]
    return error["message"]


def accepted(answer):
    assert answer.status_code == 200, answer.text
    said = answer.json()
    is_response = said["object"] == "response"
    assert (said["output"][0] if is_response else said["choices"][0]["message"])["content"] == (
        [main.shown_part("output_text", "fine")] if is_response else "fine")
    return answer.headers.get("x-ignored-fields")


def post(client, body):
    """`body` as JSON that may hold what a strict writer would not write: NaN, lone surrogates, huge numbers."""
    raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return client.post(URL, content=raw, headers={"content-type": "application/json"})


def raw(name, value):
    """A chat request whose field `name` is spelled `value`."""
    return json.dumps(chat())[:-1] + f', "{name}": {value}}}'


def user(**fields):
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


# -- bodies that are no request --------------------------------------------------------------------------------
@pytest.mark.parametrize("body", [
    b"{", b"{'a': 1}", b'{"messages": [}', b'{"messages": []', b"not json", b"\xff\xfe\xfa", b'{"a": "\xff"}', b"{}{}",
    b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000, raw("max_tokens", "9" * 5000).encode(),
    raw("unheard_of", "1" * 5000).encode()], ids=lambda body: repr(body[:20]))
def test_a_body_that_is_no_json_is_refused_as_such(served, body):
    refused(post(served, body), code="invalid_json")


def test_an_empty_body_is_refused_as_no_json(served):
    assert "empty" in refused(post(served, b""), code="invalid_json")


@pytest.mark.parametrize("body", [b"null", b"[]", b"1", b'"text"', b"true", b"NaN"])
def test_a_body_that_is_no_object_is_refused(served, body):
    refused(post(served, body))


def test_messages_that_are_missing_are_named(served):
    refused(post(served, {}), param="messages")


# -- fields ----------------------------------------------------------------------------------------------------
def function(**fields):
    """The definition of a tool."""
    return {"type": "function", "function": {"name": "f", **fields}}


FUNCTION = function()
WRONG = [
    ("messages", "[]", "messages"), ("messages", "null", "messages"), ("messages", '"hi"', "messages"),
    ("messages", "{}", "messages"), ("messages", '["hi"]', "messages[0]"), ("messages", "[null]", "messages[0]"),
    ("model", "1", "model"), ("stream", "1", "stream"), ("stream", '"true"', "stream"), ("user", "7", "user"),
    ("stream_options", "true", "stream_options"),
    ("stream_options", '{"include_usage": 1}', "stream_options.include_usage"),
    ("metadata", "[]", "metadata"), ("metadata", '{"a": 1}', "metadata.a"), ("metadata", '{"A": 1}', "metadata"),
    ("store", '"false"', "store"), ("parallel_tool_calls", '"yes"', "parallel_tool_calls"),
    *((name, value, name) for name in ("continue_final_message", "add_generation_prompt") for value in ("1", '"true"')),
    *(("tools", value, "tools") for value in ("{}", '"f"', "true")), ("tools", "[1]", "tools[0]"),
    ("tools", '[{"type": "function"}]', "tools[0].function"),
    *(("tools", json.dumps([{**FUNCTION, "type": kind}]), "tools[0].type") for kind in ("custom", "", None)),
    *(("tools", json.dumps([function(name=name)]), "tools[0].function.name")
      for name in ("", "a b", "é", 1, None, "x" * 129)),
    *(("tools", json.dumps([function(**{name: value})]), f"tools[0].function.{name}")
      for name, value in (("parameters", []), ("description", 1), ("strict", "yes"))),
    ("tools", json.dumps([FUNCTION, FUNCTION]), "tools[1].function.name"),
    *(("tool_choice", json.dumps(value), "tool_choice") for value in ("sometimes", 1, [], "required", FUNCTION)),
    ("tool_choice", '{"type": "function"}', "tool_choice.function"),
    ("tool_choice", '{"type": "allowed_tools"}', "tool_choice.allowed_tools"),
    *(("reasoning_effort", value, "reasoning_effort") for value in ('"huge"', "1", "{}", "true")),
    ("chat_template_kwargs", "[]", "chat_template_kwargs"),
    ("chat_template_kwargs", '{"colour": 1}', "chat_template_kwargs.colour"),
    ("chat_template_kwargs", '{"enable_thinking": 1}', "chat_template_kwargs.enable_thinking"),
    *((name, value, name) for name in ("max_tokens", "max_completion_tokens")
      for value in ("0", "-1", "true", '"16"', "16.5", "[]", "NaN", "Infinity", "1e999")),
    *((name, value, name) for name, high in (("temperature", "2.01"), ("top_p", "1.01"), ("min_p", "1.01"))
      for value in ("-0.01", high, "true", '"1"', "NaN", "Infinity", "-Infinity", "1e999", "1" * 400)),
    *(("top_k", value, "top_k") for value in ("-2", "1000001", "true", '"5"', "2.5", "NaN")),
    *(("seed", value, "seed") for value in ("-1", str(2**63), "true", '"5"', "0.5", "NaN")),
    *(("n", value, "n") for value in ("0", "17", "-1", "true", '"2"', "1.5", "1000000000")),
    *((name, value, name) for name in ("frequency_penalty", "presence_penalty")
      for value in ("-2.01", "2.01", "1e308", "true", '"1"', "NaN", "Infinity")),
    *(("repetition_penalty", value, "repetition_penalty") for value in ("0", "-1", "10.1", "1e308", "true", "NaN")),
    *(("top_logprobs", value, "top_logprobs") for value in ("-1", "21", "1000000", "true", '"5"')),
    *(("min_tokens", value, "min_tokens") for value in ("-1", "true", '"1"', str(2**31))),
    ("logprobs", "1", "logprobs"), ("ignore_eos", "1", "ignore_eos"), ("logit_bias", "[]", "logit_bias"),
    ("logit_bias", json.dumps({str(n): 1 for n in range(1025)}), "logit_bias"),
    *(("logit_bias", f'{{"{key}": 1}}', "logit_bias") for key in ("a", "-1", "1.5", "", "٣")),
    *(("logit_bias", f'{{"5": {value}}}', "logit_bias") for value in ("101", "-100.5", "NaN", "true", '"1"')),
    ("stop_token_ids", "5", "stop_token_ids"), ("stop_token_ids", json.dumps([1] * 65), "stop_token_ids"),
    *(("stop_token_ids", f"[{value}]", "stop_token_ids[0]") for value in ("-1", "true", '"1"', str(2**31))),
    *(("stop", value, "stop") for value in ("1", "true", "{}", '""', json.dumps("x" * 1025), json.dumps(["x"] * 17))),
    *(("stop", value, "stop[0]") for value in ("[1]", '[""]', "[null]", '[["x"]]', json.dumps(["x" * 1025]))),
]


@pytest.mark.parametrize("name,value,param", WRONG, ids=lambda v: v[:16])
def test_a_field_of_the_wrong_type_or_beyond_its_bounds_is_refused_by_name(served, name, value, param):
    body = f'{{"messages": {value}}}' if name == "messages" else raw(name, value)
    message = refused(post(served, body), param=param)
    assert len(message) < 1000


@pytest.mark.parametrize("name,value", [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in ("0", "1", "0.5", "1e-300", "-0.0")),
    ("n", "1"), ("n", "16"), ("frequency_penalty", "-2"), ("presence_penalty", "2"), ("repetition_penalty", "0.01"),
    ("logit_bias", '{"5": -100}'), ("logit_bias", "{}"), ("logprobs", "true"), ("top_logprobs", "0"),
    ("min_tokens", "0"), ("ignore_eos", "false"), ("stop_token_ids", "[5]"),
    ("temperature", "2"), *(("top_k", value) for value in ("-1", "0", "1000000")), ("seed", "0"),
    ("seed", str(2**63 - 1)), ("max_tokens", "1"), ("max_completion_tokens", "1"), ("stop", "[]"), ("stop", '"x"'),
    ("stop", json.dumps(["x"] * 16)), ("stop", json.dumps("x" * 1024)), ("metadata", '{"a": "b"}'), ("metadata", "{}"),
    ("user", '"me"'), ("store", "false"), ("store", "true"), ("tools", "[]"), ("tools", json.dumps([FUNCTION])),
    ("tool_choice", '"none"'), ("tool_choice", '"auto"'), ("parallel_tool_calls", "false"),
    *(("reasoning_effort", f'"{value}"') for value in ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    ("chat_template_kwargs", "{}"), ("chat_template_kwargs", '{"enable_thinking": false}'),
    ("continue_final_message", "false"), ("add_generation_prompt", "true"),
    ("service_tier", '"auto"'), ("model", '"any"'), ("stream", "false")])
def test_a_value_at_the_edge_of_what_is_allowed_is_taken(served, name, value):
    assert accepted(post(served, raw(name, value))) is None


@pytest.mark.parametrize("digits", [10, 20, 1000, 4300])
def test_a_budget_beyond_any_context_is_refused_in_a_few_words(served, digits):
    answer = post(served, raw("max_tokens", "9" * digits))
    assert answer.status_code == 400 and len(answer.json()["error"]["message"]) < 1000


@pytest.mark.parametrize("message,param", [
    ({"role": "robot"}, "role"), ({"role": "function"}, "role"), ({"role": None}, "role"), ({"role": "User"}, "role"),
    ({"content": 5}, "content"), ({"content": {}}, "content"), ({"content": None}, "content"), ({"name": 1}, "name"),
    ({"content": ["hi"]}, "content[0]"), ({"content": [{}]}, "content[0].type"),
    ({"content": [{"type": "text"}]}, "content[0].text"),
    ({"content": [{"type": "text", "text": 1}]}, "content[0].text"),
    ({"content": [{"type": "poem", "text": "x"}]}, "content[0]"), ({"tool_calls": {}}, "tool_calls"),
    ({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}, "tool_calls"),
    ({"role": "tool"}, "tool_call_id"), ({"role": "assistant", "content": None}, "content"),
    ({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}, "tool_calls[0].function.arguments"),
    ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "function": {"name": "f", "arguments": ""}}]},
     "tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]},
     "tool_calls[0].function.arguments")], ids=str)
def test_a_faulty_message_is_refused_with_the_place_of_the_fault(served, message, param):
    said = {"role": "user", "content": "hi"}
    refused(post(served, {"messages": [said, {**said, **message}]}), param=f"messages[1].{param}")


def test_a_message_without_a_role_is_refused(served):
    refused(post(served, {"messages": [{"content": "hi"}]}), param="messages[0].role")


HALF = "\ud800"


@pytest.mark.parametrize("body,param", [
    (user(content=HALF), "messages[0].content"), (user(content=f"a{HALF}b"), "messages[0].content"),
    (user(content=[{"type": "text", "text": HALF}]), "messages[0].content[0].text"),
    (user(name=HALF), "messages[0].name"),
    ({**chat(), "stop": HALF}, "stop"), ({**chat(), "stop": [HALF]}, "stop[0]"), ({**chat(), "user": HALF}, "user"),
    ({**chat(), "model": HALF}, "model"), ({**chat(), "session_id": HALF}, "session_id"),
    ({**chat(), "metadata": {"a": HALF}}, "metadata.a"), ({**chat(), "metadata": {HALF: "a"}}, "metadata"),
    ({**chat(), "tools": [function(description=HALF)]}, "tools[0].function.description"),
    *(({**chat(), "tools": [function(parameters=value)]}, "tools[0].function.parameters")
      for value in ({"a": [HALF]}, {HALF: 1})),
    ({**chat(), "chat_template_kwargs": {"reasoning_effort": HALF}}, "chat_template_kwargs.reasoning_effort")],
    ids=lambda v: v if isinstance(v, str) else "")
def test_half_a_character_is_refused_where_it_stands(served, body, param):
    refused(post(served, body), param=param)


@pytest.mark.parametrize("fields", [{HALF: 1}, {"unheard_of": HALF}, {"unheard_of": {HALF: [HALF]}}], ids=ascii)
def test_half_a_character_in_a_field_nobody_knows_breaks_nothing(served, fields):
    assert post(served, {**chat(), **fields}).status_code in (200, 400)


def test_a_pair_of_surrogates_is_a_character(served):
    assert accepted(post(served, '{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}')) is None


@pytest.mark.parametrize("label", [
    "a\r\nb", "a\n", "\ra", "a b", "a/b", "a:1", "é", "٣", "a\x00", "x" * 129, "chatcmpl-1", "resp_1", 5, True, ["a"]],
    ids=ascii)
def test_a_session_id_that_could_not_stand_in_a_frame_id_is_refused(served, label):
    refused(post(served, {**chat(), "session_id": label}), param="session_id")


@pytest.mark.parametrize("label", ["x" * 128, "a.b_c-D", "0", "", "chatcmpl", "..."])
def test_a_session_id_of_letters_digits_and_marks_is_taken(served, label):
    assert accepted(post(served, {**chat(), "session_id": label})) is None


# -- what is not built, and what nobody knows ------------------------------------------------------------------
REAL_VALUES = {
    "best_of": 3, "functions": [{"name": "f"}], "modalities": ["text", "audio"], "prediction": {"type": "content"},
    "prompt_embeds": "AA==", "echo": True,
}


def refused_by(model):
    """The names that are refused where requests are of that model."""
    return [name for name in main.NOT_BUILT if "." not in name and name not in model.model_fields]


@pytest.mark.parametrize("name,value", [
    *((name, {"some": "value"}) for name in refused_by(main.ChatRequest)), *REAL_VALUES.items(),
    ("best_of", True), ("echo", 0), ("prompt_logprobs", False), ("functions", {}),
    ("modalities", ["text", "text"])], ids=lambda v: json.dumps(v)[:24])
def test_what_is_not_built_is_refused_by_name(served, name, value):
    message = refused(post(served, {**chat(), name: value}), code="unsupported_parameter", param=name)
    assert f"`{name}`" in message


@pytest.mark.parametrize("name", refused_by(main.ResponsesRequest))
def test_what_is_not_built_is_refused_by_name_on_responses_too(served, name):
    answer = served.post("/v1/responses", json={"input": "hi", name: {"some": "value"}})
    refused(answer, code="unsupported_parameter", param=name)


@pytest.mark.parametrize("path,body", [
    *(("chat/completions", chat() | {n: v}) for n in refused_by(main.ChatRequest) for v in main.NOT_BUILT[n]),
    *(("responses", {"input": "hi", n: v}) for n in refused_by(main.ResponsesRequest) for v in main.NOT_BUILT[n]),
    *(("responses", {"input": "hi", "reasoning": {n: v}}) for n, v in (("context", "auto"), ("mode", "standard")))],
                         ids=lambda v: json.dumps(v)[-60:])
def test_a_value_that_says_off_passes_and_is_no_ignored_field(served, path, body):
    assert accepted(served.post(f"/v1/{path}", json=body)) is None


@pytest.mark.parametrize("model,params", [
    (main.ChatRequest, completion_create_params.CompletionCreateParamsStreaming),
    (main.ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    (main.ResponsesRequest, InputTokenCountParams)], ids=["chat", "responses", "input_tokens"])
def test_every_parameter_of_the_official_sdk_is_known(model, params):
    known = {*model.model_fields, *main.NOT_BUILT, *main.HARMLESS}
    assert set(get_type_hints(params)) <= known


def test_null_means_not_given_for_every_field(served):
    nothing = dict.fromkeys([*main.ChatRequest.model_fields, *main.NOT_BUILT, *main.HARMLESS, "unheard_of"])
    everything = dict.fromkeys([*main.ResponsesRequest.model_fields, *nothing]) | {"input": "hi"}
    assert accepted(served.post("/v1/responses", json=everything)) is None
    nulls = dict.fromkeys(["name", "tool_calls", "tool_call_id", "refusal", "audio", "function_call", "unheard_of"])
    assert accepted(post(served, {**nothing, **user(**nulls)})) is None


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_what_openai_has_in_a_message_and_would_change_the_prompt_is_not_ignored(served, field):
    message = {"role": "assistant", "content": "x", field: {"id": "a", "name": "f", "arguments": "{}"}}
    refused(post(served, {"messages": [message]}), code="unsupported_parameter", param=f"messages[0].{field}")


@pytest.mark.parametrize("body,listed", [
    ({**chat(), "colour": 1}, "colour"), ({**chat(), "b": [], "a": False}, "b, a"),
    (user(mood="fine"), "messages[0].mood"),
    (user(content=[{"type": "text", "text": "hi", "mood": 1}]), "messages[0].content[0].mood"),
    ({**chat(), "stream_options": {"mood": 1}, "stream": True}, "stream_options.mood")], ids=lambda v: str(v)[:40])
def test_names_that_nobody_knows_pass_and_are_listed(served, body, listed):
    answer = post(served, body)
    assert answer.status_code == 200 and answer.headers.get("x-ignored-fields") == listed


@pytest.mark.parametrize("name", [
    "a\r\nset-cookie: x=1", "a\nb", "\x00", "a, b", "é", "名前", "😀", "", " ", "\u2028", "x" * 100_000, "a%0d%0ab"],
    ids=lambda name: ascii(name[:20]))
def test_a_hostile_name_reaches_the_header_as_one_harmless_word(served, name):
    answer = post(served, {**chat(), name: 1})
    assert re.fullmatch(r'[A-Za-z0-9_.~%\[\]-]{1,999}|""', accepted(answer))
    assert "set-cookie" not in answer.headers


def test_an_empty_name_among_others_makes_a_header_that_can_be_sent(live):
    answer = httpx2.post(f"{live(ScriptedModel('a'))}{URL}", json={**chat(), "zz": 1, "": 2})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, 'zz, ""')


MANY = 110_000


@pytest.mark.parametrize("field,items", [
    ("messages", "1"), ("messages", "{}"), ("messages", '{"role":"user","content":""}'), ("stop", "1"), ("tools", "1"),
    ("stop_token_ids", "-1"), ("metadata", None), ("logit_bias", None)])
def test_a_hundred_thousand_bad_items_are_one_fault(client, field, items):
    served = client(ScriptedModel("a"), max_body_mib=8)
    value = "[" + ",".join([items] * MANY) + "]" if items else json.dumps(dict.fromkeys(map(str, range(MANY)), "x"))
    body = f'{{"messages": {value}}}' if field == "messages" else raw(field, value)
    assert "at most" in refused(post(served, body), param=field)


@pytest.mark.parametrize("field", ["content", "tool_calls"])
def test_a_hundred_thousand_bad_items_in_a_message_are_one_fault(served, field):
    value = "[" + ",".join(["1"] * MANY) + "]"
    message = f'{{"role": "assistant", "content": "a", "{field}": {value}}}'
    assert "at most" in refused(post(served, f'{{"messages": [{message}]}}'), param=f"messages[0].{field}")


@pytest.mark.parametrize("letter", ["x", "é", "😀"], ids=ascii)
def test_ten_thousand_names_make_a_header_that_every_client_can_read(served, letter):
    listed = accepted(post(served, {**chat(), **{letter * 64 + str(n): 1 for n in range(1000)},
                                    **{f"{n}": 1 for n in range(9000)}}))
    assert listed.endswith(", ...") and len(listed) < 8192  # Node reads 16 KiB of headers in all, nginx 8


def test_the_list_of_ignored_fields_comes_with_a_stream_too(served):
    assert post(served, {**chat(), "colour": 1, "stream": True}).headers["x-ignored-fields"] == "colour"


# -- the body's size and kind ----------------------------------------------------------------------------------
def pieces(size):
    for _ in range(size // 2**16):
        yield b" " * 2**16


@pytest.mark.parametrize("content", [b" " * (MIB + 1), pieces(2 * MIB)], ids=["length", "pieces"])
def test_a_body_beyond_the_cap_is_refused(served, content):
    answer = served.post(URL, content=content, headers={"content-type": "application/json"})
    refused(answer, 413, "body_too_large")


def test_a_body_of_exactly_the_cap_is_read(served):
    body = json.dumps(chat()).encode()
    accepted(post(served, body + b" " * (MIB - len(body))))


def film(size):
    """A request with a film of so many bytes, as far as a parser can tell."""
    body = chat(media := "data:video/mp4;base64,")
    body["messages"][0]["content"] = [{"type": "video_url", "video_url": {"url": media + "QUJD" * (size // 3)}}]
    return json.dumps(body).encode()


class Seeing(ScriptedModel):
    senses = frozenset({"image", "video"})


def test_a_body_may_be_as_large_as_its_media(client, caplog):
    served = client(Seeing("a"), max_body_mib=1, max_media_mib=4)
    for content in (film(3 * MIB), (piece for piece in [film(3 * MIB)])):
        answer = served.post(URL, content=content, headers={"content-type": "application/json"})
        assert refused(answer, code="invalid_media", param="messages[0].content[0]").endswith("could not be decoded.")
    refused(post(served, film(6 * MIB)), 413, "body_too_large")
    assert served.app.state.server.held_bytes == 0


def test_a_body_that_stands_still_is_left(live):
    host, port = live(ScriptedModel("a"), send_timeout_seconds=0.2).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        head = f"POST {URL} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{{"
        slow.sendall(head.encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_what_an_answer_waits_with_is_counted_until_it_is_read(monkeypatch):
    monkeypatch.setattr(main, "MAX_HELD_BYTES", 5 * MIB)
    gate, settings = threading.Event(), main.Settings(persist_sessions=False, max_body_mib=1)
    with running_app(main.create_app(settings, load=lambda *_: gate.wait(30) and Seeing("a"))) as base:
        body = film(4 * MIB)[:-1] + b', "stream": true}'
        with httpx2.Client(base_url=base, timeout=30, headers={"content-type": "application/json"}) as http:
            with http.stream("POST", URL, content=body) as first:  # which has begun, and waits for the model
                assert (first.status_code, http.post(URL, content=body).status_code) == (200, 429)
                gate.set()
                first.read()
            assert http.post(URL, content=body).status_code == 400  # what it holds is no film


@pytest.mark.parametrize("content", [b"[[]," * (2 * MIB // 4), b"x " * (2 * MIB)], ids=["lists", "words"])
def test_what_is_no_media_is_bounded_as_ever(client, content):
    served = client(Seeing("a"), max_body_mib=1, max_media_mib=64)
    answer = served.post(URL, content=content, headers={"content-type": "application/json"})
    assert "without its media" in refused(answer, 413, "body_too_large")


def test_a_model_that_takes_no_media_takes_no_body_of_their_size(client):
    served = client(ScriptedModel("fine"), max_body_mib=1)
    accepted(post(served, chat()))
    refused(post(served, film(2 * MIB)), 413, "body_too_large")


def test_large_bodies_are_bounded_together(live, monkeypatch):
    monkeypatch.setattr(main, "MAX_HELD_BYTES", 5 * MIB)
    base = live(Seeing("a"), max_body_mib=1)
    host, port = base.removeprefix("http://").split(":")
    body = film(4 * MIB)
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        head = f"POST {URL} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        slow.sendall(head.encode() + b"\r\n\r\n" + body[:-1])
        wait_until(lambda: httpx2.post(f"{base}{URL}", content=body, timeout=30, headers={
            "content-type": "application/json"}).status_code == 429)
        slow.sendall(body[-1:])
        assert slow.recv(4096).startswith(b"HTTP/1.1 400 ")  # what it holds is no film
    assert httpx2.post(f"{base}{URL}", content=body, timeout=30, headers={
        "content-type": "application/json"}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/cancel/x", "/nowhere", "/health"])
def test_the_cap_holds_on_every_route(served, path):
    answer = served.request("POST", path, content=b" " * (MIB + 1), headers={"content-type": "application/json"})
    refused(answer, 413, "body_too_large")


@pytest.mark.parametrize("start", [
    b"content-length: 99999999\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n200001\r\n" + b" " * 0x200001 + b"\r\n"],
    ids=["length", "chunked"])
def test_a_body_beyond_the_cap_is_refused_before_it_has_come(live, start):
    base = live(ScriptedModel("a"), max_body_mib=1)
    assert httpx2.post(f"{base}{URL}", json=chat(), timeout=30).status_code == 200  # it is known to take no media
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"POST {URL} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n".encode() + start)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


JSON_BODY = json.dumps(chat()).encode()


@pytest.mark.parametrize("kind", [
    "text/plain", "text/plain; charset=utf-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "", "application/jsonp", "application/json-seq", "application/javascript", "text/json"])
def test_a_body_of_another_kind_is_refused(served, kind):
    refused(served.post(URL, content=JSON_BODY, headers={"content-type": kind}), 415, "not_json")


def test_a_body_without_a_kind_is_refused(served):
    request = served.build_request("POST", URL, content=JSON_BODY)
    request.headers.pop("content-type", None)
    refused(served.send(request), 415, "not_json")


def test_a_body_that_a_web_page_can_send_without_asking_is_refused_on_every_route(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = served.post("/v1/cancel/some", content=b"x=1", headers={"content-type": kind})
        refused(answer, 415, "not_json")


@pytest.mark.parametrize("kind", [
    "application/json", "application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8",
    "application/vnd.api+json"])
def test_json_is_taken_however_it_is_spelled(served, kind):
    accepted(served.post(URL, content=JSON_BODY, headers={"content-type": kind}))


# -- event ids -------------------------------------------------------------------------------------------------
BAD_IDS = ["a", ":", "a:", ":1", "a:-1", "a:+1", "a: 1", "a:1 ", "a:1\n", "a:1:2", "a b:1", "a:1.0", "a:0x1", "a:1_0",
           "a:٣", "a:१", "a:\uff11", "a:²", "é:1", "a:1234567890", "x" * 129 + ":1", "a\n:1"]


@pytest.mark.parametrize("text", BAD_IDS, ids=ascii)
def test_an_event_id_that_is_no_name_and_index_is_refused(text):
    with pytest.raises(main.ApiError) as refusal:
        main.parse_event_id(text)
    error = refusal.value
    assert (error.status_code, error.code, error.param) == (400, "invalid_last_event_id", "Last-Event-ID")


@pytest.mark.parametrize("text,parts", [("a:0", ("a", 0)), ("chatcmpl-1f:12", ("chatcmpl-1f", 12)), ("a:007", ("a", 7)),
                                        ("x" * 128 + ":999999999", ("x" * 128, 999_999_999))], ids=str)
def test_an_event_id_is_split_into_name_and_index(text, parts):
    assert main.parse_event_id(text) == parts


@pytest.mark.parametrize("text", BAD_IDS, ids=ascii)
def test_a_bad_event_id_is_refused_in_the_query(served, text):
    answer = served.post(URL, params={"last_event_id": text}, json=chat(stream=True))
    refused(answer, code="invalid_last_event_id", param="Last-Event-ID")


@pytest.mark.parametrize("text", [b"a", b"a:-1", b"a:\xb2", "a:٣".encode(), b"a:1:2", b"\xff"])
def test_a_bad_event_id_is_refused_in_the_header(served, text):
    answer = served.post(URL, headers={"last-event-id": text}, json=chat(stream=True))
    refused(answer, code="invalid_last_event_id", param="Last-Event-ID")


def test_an_empty_event_id_is_none(served):
    accepted(served.post(URL, params={"last_event_id": ""}, headers={"last-event-id": ""}, json=chat()))


def test_an_event_id_without_a_stream_is_refused(served):
    refused(served.post(URL, headers={"last-event-id": "a:1"}, json=chat()), param="stream")
