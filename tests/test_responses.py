"""Responses: create, stream, and the life of an answer. OpenAI's own types judge every object and event, and a fold of
the events every final object."""
import asyncio
import contextlib
import copy
import json
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx2
import openai
import pytest
from conftest import ROOT, SCRIPTED_SERVER, Process, ScriptedModel, TestClient, main, parse_sse, sdk, wait_until
from openai import pydantic_function_tool
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

URL, CHAT = "/v1/responses", "/v1/chat/completions"
EVENT, OBJECT, ITEM = TypeAdapter(ResponseStreamEvent), TypeAdapter(Response), TypeAdapter(ResponseItem)
LOGPROBS = "message.output_text.logprobs"
ASK = "one two three"  # three tokens of prompt
WORDS = ("a", "b", "c", "d")
ENDED = ("completed", "incomplete", "failed", "cancelled")
THOUGHT = (main.ReasoningDelta("Let me"), main.ReasoningDelta(" see."))
CALL = (main.ToolCallDelta("get_weather"), main.ToolCallDelta(None, '{"city": '), main.ToolCallDelta(None, '"Paris"}'))
SECOND_CALL = (main.ToolCallDelta("get_time", "{}"),)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False}
TOOLS = [{"type": "function", "name": "get_weather", "description": "d", "parameters": CITY, "strict": True},
         {"type": "function", "name": "get_time"}]
HOSTED = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"},
          {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}]


class Listener(ScriptedModel):
    """Keeps the chat and the sampling that reach the model."""

    def prepare(self, chat):
        self.chat = chat
        return super().prepare(chat)

    def sample(self, logits, draws):
        self.sampling = draws[0].sampling
        return super().sample(logits, draws)


class SteppedModel(ScriptedModel):
    """Every step waits for the gate, those of a prompt too."""

    def forward(self, work):
        self.gate.acquire()
        super().forward(work)


def message(role, text, **fields):
    return {"role": role, "content": text, **fields}


def call(id, name="get_weather", arguments='{"city": "Paris"}', **fields):
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments, **fields}


def output(id, text, **fields):
    return {"type": "function_call_output", "call_id": id, "output": text, **fields}


def reasoning(summary=(), content=None, **fields):
    parts = None if content is None else [{"type": "reasoning_text", "text": text} for text in content]
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": parts, "encrypted_content": None, **fields}


def made_call(id, name="get_weather", **arguments):
    """A call as the model hears of it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def ready(client):
    """`ready(model, **settings)` is a client of a server whose model is loaded; at the end all gates are open."""
    models = []

    def make(model, **values):
        models.append(model)
        http = client(model, eager_load_model=True, **values)
        wait_until(lambda: http.get("/ready").json()["status"] == "ready")
        return http

    yield make
    for model in models:
        say(model, 10_000)


@pytest.fixture
def pool():
    """To be asked for before `ready`, so that its threads end after all gates are open."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def heard(ready):
    """`heard(input, **fields)` is the chat that reaches the model."""

    def ask(input=ASK, **fields):
        model = Listener("a")
        create(ready(model), input, **fields)
        return model.chat

    return ask


@pytest.fixture
def database(tmp_path):
    return tmp_path / "sessions.db"


def rows(path, sql, *values):
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql, values).fetchall()


def say(model, steps=1000):
    if steps:
        model.gate.release(steps)


def official(http):
    """The official client, over a client of ours."""
    return sdk("http://localhost", http_client=http)


def post(http, input=ASK, status=200, **fields):
    answer = http.post(URL, json={"model": "scripted", "input": input, **fields})
    assert answer.status_code == status, answer.text
    return answer


def create(http, input=ASK, **fields):
    return valid(post(http, input, **fields).json())


def retrieve(http, id):
    return valid(http.get(f"{URL}/{id}").json())


def finished(http, id):
    """A response, once it has ended."""
    return wait_until(lambda: (found := retrieve(http, id))["status"] in ENDED and found)


def valid(response):
    OBJECT.validate_json(json.dumps(response), strict=True)
    return response


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def events_of(answer, name=None, first=0):
    """The events of a stream, after all that holds for every stream has been checked."""
    assert answer.status_code == 200, answer.text
    *frames, done = parse_sse(answer.content.decode("ascii"))
    name = name or answer.headers["x-session-id"]
    for n, frame in enumerate(frames, first):
        EVENT.validate_json(frame["data"], strict=True)
        event = json.loads(frame["data"])
        assert (frame["event"], event["sequence_number"], frame["id"]) == (event["type"], n, f"{name}:{n}")
    assert done == {"data": "[DONE]", "id": f"{name}:{first + len(frames)}"}
    return [json.loads(frame["data"]) for frame in frames]


def stream(http, input=ASK, **fields):
    events = events_of(post(http, input, stream=True, **fields), fields.get("session_id"))
    assert folded(events) == events[-1]["response"]["output"]
    return events


def replay(http, id, **query):
    return http.get(f"{URL}/{id}", params={"stream": True, **query})


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def folded(events):
    """The output that the events tell of. Whatever ends says what has been told of it."""
    items = []
    for event in copy.deepcopy(events):
        kind, at = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert at == len(items)
            items.append(event["item"])
        elif kind == "output_item.done":
            items[at]["status"] = event["item"]["status"]
            assert items[at] == event["item"]
        elif at is not None:
            item = items[at]
            assert event["item_id"] == item["id"] and at == len(items) - 1
            if kind == "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            elif kind == "function_call_arguments.done":
                assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
            elif kind == "content_part.added":
                assert event["content_index"] == len(item["content"])
                item["content"].append(event["part"])
            elif kind == "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            else:
                part = item["content"][event["content_index"]]
                if kind.endswith(".delta"):
                    part["text"] += event["delta"]
                    part.get("logprobs", []).extend(event.get("logprobs", ()))
                else:
                    assert event["text"] == part["text"] and event.get("logprobs") == part.get("logprobs")
    return items


def texts(response, kind="message"):
    return ["".join(part["text"] for part in item["content"]) for item in response["output"] if item["type"] == kind]


# -- input -----------------------------------------------------------------------------------------------------
USER = main.Message("user", "x")
TWO_PARTS = [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]
OURS = {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}


@pytest.mark.parametrize("input,expected", [
    ("x", [USER]), (TWO_PARTS[:1], [USER]), (TWO_PARTS, [main.Message("user", "x\ny")]),
    ([*TWO_PARTS, message("user", "z")], [main.Message("user", "x\ny"), main.Message("user", "z")]),
    ([message("user", "x")], [USER]), ([message("user", "x", type="message")], [USER]),
    ([message("user", "x", type="message", id="msg_1", status="completed")], [USER]),
    ([message("user", TWO_PARTS)], [main.Message("user", "x\ny")]),
    ([message("user", [{"type": "text", "text": "x"}], id=None, status=None)], [USER]),
    ([message("user", "x"), message("assistant", "a"), message("user", "x")],
     [USER, main.Message("assistant", "a"), USER]),
    ([message("assistant", [OURS], type="message"), message("user", "x")], [main.Message("assistant", "a"), USER]),
    ([message("assistant", [{"type": "refusal", "refusal": "No."}]), message("user", "x")],
     [main.Message("assistant", "No."), USER])], ids=str)
def test_messages_reach_the_model_in_every_shape(heard, input, expected):
    assert heard(input).messages == tuple(expected)


def test_all_that_is_the_systems_stands_merged_in_front(heard):
    chat = heard([message("user", "x"), message("developer", "dev"), message("user", "x"), message("system", "sys")],
                 instructions="first")

    assert chat.messages == (main.Message("system", "first\n\ndev\n\nsys"), USER, USER)


A, B = made_call("A", city="Paris"), made_call("B", "get_time")
TURN = [message("user", "x"), call("A"), call("B", "get_time", ""), output("A", "rain"),
        output("B", [{"type": "input_text", "text": "noon"}, {"type": "input_text", "text": "sharp"}])]


def test_adjacent_calls_are_one_turn_of_the_assistant_and_outputs_name_their_function(heard):
    assert heard(TURN).messages == (
        USER, main.Message("assistant", "", tool_calls=(A, B)), main.Message("tool", "rain", "get_weather", (), "A"),
        main.Message("tool", "noon\nsharp", "get_time", (), "B"))


@pytest.mark.parametrize("items,expected", [
    ([reasoning(["thought"]), call("A")], [main.Message("assistant", "", tool_calls=(A,), reasoning="thought")]),
    ([reasoning(["short"], ["long", "er"]), message("assistant", "a"), call("A")],
     [main.Message("assistant", "a", tool_calls=(A,), reasoning="long\ner")]),
    ([reasoning(), message("assistant", "a")], [main.Message("assistant", "a")]),
    ([{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}], []),
    ([message("assistant", "a"), reasoning(["thought"]), message("assistant", "b")],
     [main.Message("assistant", "a"), main.Message("assistant", "b", reasoning="thought")]),
    ([call("A"), message("assistant", "a")],
     [main.Message("assistant", "", tool_calls=(A,)), main.Message("assistant", "a")])], ids=str)
def test_reasoning_text_and_calls_of_one_answer_are_one_message(heard, items, expected):
    assert heard([message("user", "x"), *items, message("user", "x")]).messages == (USER, *expected, USER)


@pytest.mark.parametrize("typed", [{"type": "item_reference"}, {}], ids=["typed", "untyped"])
def test_a_reference_stands_for_the_item_of_that_id(ready, typed):
    model = Listener(*THOUGHT, "Sure.", *CALL)
    http = ready(model)
    first = create(http, [message("user", "x")], tools=TOOLS)
    asked = http.get(f"{URL}/{first['id']}/input_items").json()["data"]

    create(http, [*({**typed, "id": item["id"]} for item in asked + first["output"]),
                  output(first["output"][2]["call_id"], "rain")])

    made = made_call(first["output"][2]["call_id"], city="Paris")
    assert model.chat.messages[:2] == (
        USER, main.Message("assistant", "Sure.", tool_calls=(made,), reasoning="Let me see."))


@pytest.mark.parametrize("id", ["msg_1", f"msg_{'0' * 32}_0", f"msg_{'0' * 32}_in0", "", "../x"])
def test_a_reference_to_no_item_is_not_found(ready, id):
    answer = ready(ScriptedModel("a")).post(URL, json={"input": [{"type": "item_reference", "id": id}]})
    assert error_of(answer) == (404, "item_not_found", "input")


@pytest.mark.parametrize("items,code,param", [
    ([message("user", "x"), {"type": "banana"}], "invalid_value", "input[1].type"),
    ([message("user", [*TWO_PARTS, {"type": "banana"}])], "invalid_value", "input[0].content[2]"),
    ([message("user", [{"type": "input_text"}])], "invalid_value", "input[0].content[0].text"),
    ([message("tool", "x")], "invalid_value", "input[0].role"),
    ([{"role": "user"}], "invalid_value", "input[0].content"),
    ([call(None)], "invalid_value", "input[0].call_id"), ([call("A", None)], "invalid_value", "input[0].name"),
    ([call("A", arguments="{")], "invalid_value", "input[0].arguments"),
    ([output("A", None)], "invalid_value", "input[0].output"),
    ([output(None, "x")], "invalid_value", "input[0].call_id"),
    ([output("A", [{"type": "input_image"}])], "invalid_media", "input[0].output[0]"),
    ([message("system", [{"type": "input_image", "image_url": "data:"}])], "unsupported_content",
     "input[0].content[0]"),
    ([{"type": "input_text", "text": "x"}, {"type": "input_file", "file_id": "f"}], "unsupported_content", "input[1]"),
    ([reasoning(content=[None])], "invalid_value", "input[0].content[0].text"),
    ([message("user", ["x"])], "invalid_value", "input[0].content[0]"), ([], "invalid_value", "input"),
    (None, "invalid_value", "input"), ([message("system", "x")], "invalid_value", "input"),
    ([reasoning()], "invalid_value", "input"), (7, "invalid_value", "input"), (["x"], "invalid_value", "input[0]")],
    ids=str)
def test_an_input_that_cannot_be_is_a_bad_request_by_name(ready, items, code, param):
    assert error_of(post(ready(ScriptedModel("a")), items, 400)) == (400, code, param)


@pytest.mark.parametrize("kind", [kind for kind in main.MEDIA_PARTS if kind.startswith("input_")])
def test_a_part_that_the_model_has_no_sense_for_is_refused_by_name(ready, kind):
    part = {"type": kind, "data": "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="}
    answer = post(ready(ScriptedModel("a")), [message("user", [*TWO_PARTS, part])], 400)
    assert error_of(answer) == (400, "unsupported_content", "input[0].content[2]")
    told = "image" if main.MEDIA_PARTS[kind] == "file" else main.MEDIA_PARTS[kind]
    assert f"takes no {told}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", [
    "web_search_call", "local_shell_call", "local_shell_call_output", "custom_tool_call", "custom_tool_call_output",
    "tool_search_call", "tool_search_output", "image_generation_call", "compaction", "compaction_summary",
    "context_compaction", "ghost_snapshot", "mcp_list_tools", "mcp_call", "mcp_approval_request",
    "code_interpreter_call", "file_search_call", "computer_call", "computer_call_output", "apply_patch_call",
    "shell_call_output"])
def test_an_item_of_tools_that_are_not_here_is_left_aside_by_name(ready, kind):
    model = Listener("a")
    answer = post(ready(model), [{"type": kind, "id": "x", "action": {"query": "q"}}, message("user", "x")])
    assert model.chat.messages == (USER,)
    assert answer.headers["x-ignored-fields"] == f"input[0].{kind}"


# -- tools, forms and options ----------------------------------------------------------------------------------
def test_functions_reach_the_model_and_come_back_and_hosted_tools_are_left_aside_by_name(ready):
    model = Listener("a")
    answer = post(ready(model), tools=[TOOLS[0], *HOSTED, TOOLS[1]])

    assert [(tool.name, tool.strict, tool.where) for tool in model.chat.tools] == [
        ("get_weather", True, "tools[0].parameters"), ("get_time", False, "tools[4].parameters")]
    assert model.chat.tools[0].shown["function"] == {"name": "get_weather", "description": "d", "parameters": CITY}
    assert answer.headers["x-ignored-fields"] == "tools[1].web_search, tools[2].custom, tools[3].namespace"
    assert [tool["name"] for tool in valid(answer.json())["tools"]] == ["get_weather", "get_time"]


@pytest.mark.parametrize("choice,names,must,most", [
    (None, ["get_weather", "get_time"], False, None), ("auto", ["get_weather", "get_time"], False, None),
    ("none", [], False, None), ("required", ["get_weather", "get_time"], True, None),
    ({"type": "function", "name": "get_time"}, ["get_time"], True, 1),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
     ["get_time"], True, None),
    ({"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "web_search"}, {"type": "function", "name": "get_weather"}]}, ["get_weather"], False, None)], ids=str)
def test_a_tool_choice_decides_what_may_and_what_must_be_called_and_is_repeated(ready, choice, names, must, most):
    model = Listener("a")
    response = create(ready(model), tools=TOOLS, tool_choice=choice)

    assert [tool.name for tool in model.chat.tools] == names
    assert (model.chat.must_call, model.chat.max_calls) == (must, most)
    assert response["tool_choice"] == (choice or "auto")


@pytest.mark.parametrize("parallel,most,heard_most", [
    (None, None, None), (True, None, None), (False, None, 1), (None, 3, 3), (False, 3, 1), (True, 1, 1)])
def test_calls_are_bounded_by_both_fields(heard, parallel, most, heard_most):
    assert heard(tools=TOOLS, parallel_tool_calls=parallel, max_tool_calls=most).max_calls == heard_most


@pytest.mark.parametrize("fields,code,param", [
    ({"tools": HOSTED[:1]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "invalid_value", "tools[0].name"),
    ({"tools": [{"type": "\ud800", "name": "f"}]}, "invalid_value", "tools[0].type"),
    ({"tools": [TOOLS[0], {"type": "\ud800", "name": "f"}]}, "invalid_value", "tools[1].type"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "invalid_value", "tools[1].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "unsupported_parameter", "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "get_time"}}, "unsupported_parameter",
     "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "invalid_value", "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "invalid_value", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "invalid_value", "tool_choice.tools"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"), ({"max_tool_calls": 0}, "invalid_value",
                                                                    "max_tool_calls"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "invalid_value", "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
    ({"text": {"verbosity": "huge"}}, "invalid_value", "text.verbosity"),
    ({"reasoning": {"effort": "huge"}}, "invalid_value", "reasoning.effort"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "invalid_value",
     "structured_outputs"),
    ({"include": ["everything"]}, "invalid_value", "include[0]"), ({"truncation": "middle"}, "invalid_value",
                                                                   "truncation"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"), ({"top_logprobs": 21}, "invalid_value",
                                                                       "top_logprobs"),
    ({"stream_options": {"include_obfuscation": False}}, "invalid_value", "stream_options"),
    ({"background": True, "store": False}, "invalid_value", "background"),
    *(({name: value}, "unsupported_parameter", name) for name, value in {
        "conversation": "conv_1", "generation_config": {}, "messages": [], "n": 2, "max_tokens": 5, "logprobs": True,
        "max_completion_tokens": 5, "response_format": {"type": "text"}, "reasoning_effort": "low",
        "prompt": {"id": "p"}, "context_management": [{"type": "compaction"}], "moderation": {}}.items()),
    ({"reasoning": {"context": "all_turns"}}, "unsupported_parameter", "reasoning.context")], ids=str)
def test_what_cannot_be_done_is_a_bad_request_by_name(ready, fields, code, param):
    answer = ready(ScriptedModel("a")).post(URL, content=json.dumps({"input": ASK, **fields}),
                                            headers={"content-type": "application/json"})
    assert error_of(answer) == (400, code, param)


@pytest.mark.parametrize("format,kind,schema", [
    ({"type": "json_object"}, "json", {"type": "object"}),
    ({"type": "json_schema", "name": "city", "schema": CITY, "strict": True}, "json", CITY)], ids=str)
def test_a_format_becomes_what_the_answer_must_look_like_and_is_repeated(ready, format, kind, schema):
    model = Listener("{}")
    response = create(ready(model), text={"format": format})

    grammar = model.chat.grammar
    assert (grammar.kind, grammar.param) == (kind, "text.format")
    assert json.loads(grammar.source) == schema | {"x-guidance": {"whitespace_flexible": False}}
    assert response["text"]["format"] | format == response["text"]["format"]


@pytest.mark.parametrize("verbosity,system", [
    ("low", "Do.\n\nAnswer briefly."), ("medium", "Do."), (None, "Do."), ("high", "Do.\n\nAnswer in detail.")])
def test_a_verbosity_is_said_to_the_model(heard, verbosity, system):
    assert heard(instructions="Do.", text={"verbosity": verbosity}).messages[0] == main.Message("system", system)


@pytest.mark.parametrize("effort,thinks", [("none", False), ("minimal", True), ("xhigh", True)])
def test_a_reasoning_effort_reaches_the_template_unless_the_client_tells_it_more(heard, effort, thinks):
    options = heard(reasoning={"effort": effort, "summary": "auto"}, chat_template_kwargs={"thinking": True}).options
    assert options == {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": True}


@pytest.mark.parametrize("given,setting,context,drawn,status", [
    (2, None, 100, 2, "incomplete"), (2, 3, 100, 2, "incomplete"), (None, 3, 100, 3, "incomplete"),
    (None, None, 100, 5, "completed"), (None, None, 6, 3, "incomplete"), (None, 90, 6, 3, "incomplete")], ids=str)
def test_an_answer_gets_what_is_asked_for_or_the_operators_budget_or_what_the_context_leaves(
        ready, given, setting, context, drawn, status):
    http = ready(ScriptedModel(*WORDS, context=context), max_output_tokens=setting)
    response = create(http, max_output_tokens=given)

    assert (response["usage"]["output_tokens"], response["status"]) == (drawn, status)
    assert response["usage"] == {
        "input_tokens": 3, "output_tokens": drawn, "total_tokens": 3 + drawn, "output_tokens_details":
        {"reasoning_tokens": 0}, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}


def test_usage_says_how_much_of_the_input_had_been_computed_before(ready):
    model = ScriptedModel(*WORDS)
    http, model.reused = ready(model), 2
    assert create(http)["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}


@pytest.mark.parametrize("fields,asked,shown", [
    ({}, None, []), ({"include": [LOGPROBS]}, 0, list("abcd")), ({"top_logprobs": 2}, 2, list("abcd")),
    ({"include": [LOGPROBS, "reasoning.encrypted_content"], "top_logprobs": 3}, 3, list("abcd"))], ids=str)
def test_logprobs_come_with_the_text_where_they_are_asked_for(ready, fields, asked, shown):
    model = Listener(*THOUGHT, *WORDS, *CALL)
    events = stream(ready(model), tools=TOOLS, **fields)

    final = events[-1]["response"]
    assert model.sampling.top_logprobs == asked and final["top_logprobs"] == (asked or 0)
    assert [entry["token"] for entry in final["output"][1]["content"][0]["logprobs"]] == shown


TALK = [message("system", "s"), message("user", "a " * 10), message("assistant", "b " * 5), message("user", "c " * 10),
        message("assistant", "d " * 5), message("user", "e " * 5)]  # 36 tokens


@pytest.mark.parametrize("context,dropped", [(100, 0), (41, 0), (40, 2), (26, 2), (25, 4), (11, 4)])
def test_truncation_drops_the_oldest_turns_and_says_how_many_messages(ready, context, dropped):
    model = Listener("w", context=context)
    response = create(ready(model), TALK, truncation="auto", max_output_tokens=5)

    assert (response["dropped_messages"], response["truncation"]) == (dropped, "auto")
    assert [m.content.strip()[0] for m in model.chat.messages] == ["s", *"abcde"[dropped:]]


@pytest.mark.parametrize("truncation,context", [(None, 40), ("disabled", 40), ("auto", 10)])
def test_what_does_not_fit_is_a_bad_request_where_nothing_may_be_dropped(ready, truncation, context):
    answer = post(ready(ScriptedModel("w", context=context)), TALK, 400, truncation=truncation, max_output_tokens=5)
    assert error_of(answer) == (400, "context_length_exceeded", "input")


def test_chats_extensions_are_taken_here_too(ready):
    model = Listener("a")
    fields = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "stop": ["END"],
              "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 1,
              "ignore_eos": True, "logit_bias": {"5": 1.0}, "stop_token_ids": [9]}
    response = post(ready(model), max_output_tokens=9, session_id="mine", **fields)

    assert model.sampling == main.Sampling(
        9, 0.3, 0.9, 40, 0.1, 7, ("END",), 1.5, 0.5, -0.5, ((5, 1.0),), frozenset({9}), True, 1)
    assert {name: response.json()[name] for name in fields.keys() & response.json().keys()} == {
        name: fields[name] for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")}


def test_an_answer_repeats_what_it_was_asked(ready):
    http = ready(ScriptedModel("a"), model_repo_id="org/name")
    before = create(http)["id"]
    asked = {
        "instructions": "Do.", "max_output_tokens": 9, "max_tool_calls": 2, "previous_response_id": before,
        "metadata": {"a": "b"}, "parallel_tool_calls": False, "prompt_cache_key": "key", "safety_identifier": "safe",
        "reasoning": {"effort": "low", "summary": "auto"}, "store": True, "background": False, "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "required", "tools": TOOLS[:1],
        "top_logprobs": 1, "top_p": 0.5, "truncation": "auto", "user": "me"}
    answer = post(http, **asked, service_tier="flex", model="gpt-5", client_metadata={"x": "y"})

    response = valid(answer.json())
    assert {name: response[name] for name in asked} == asked
    assert (response["model"], response["object"], response["service_tier"]) == ("org/name", "response", "default")
    assert answer.headers["x-session-id"] == response["id"] and response["id"].startswith("resp_")
    assert answer.headers["x-ignored-fields"] == "client_metadata"


def test_an_answer_that_was_asked_nothing_says_what_holds(ready):
    response = create(ready(ScriptedModel("a"), temperature=None))

    assert {name: response[name] for name in response.keys() - {"id", "created_at", "completed_at", "output"}} == {
        "object": "response", "status": "completed", "error": None, "incomplete_details": None, "user": None,
        "model": main.Settings().served_id, "usage": response["usage"], "instructions": None, "metadata": {},
        "max_output_tokens": None, "max_tool_calls": None, "previous_response_id": None, "prompt_cache_key": None,
        "safety_identifier": None, "temperature": 0.0, "top_p": 1.0, "background": False, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None},
        "service_tier": "default", "store": True, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled"}
    assert response["created_at"] <= response["completed_at"]


@pytest.mark.parametrize("asked", [{}, {"stream": None}, {"stream": False}], ids=str)
def test_there_is_no_stream_unless_it_is_asked_for(ready, asked):
    answer = post(ready(ScriptedModel("Hel", "lo")), **asked)
    assert answer.headers["content-type"] == "application/json" and texts(answer.json()) == ["Hello"]


def test_a_strict_server_has_no_model_of_another_name(ready):
    http = ready(ScriptedModel("a"), strict_model=True)
    assert error_of(post(http, status=404, model="gpt-5")) == (404, "model_not_found", "model")


# -- the stream ------------------------------------------------------------------------------------------------
def told(kind, deltas):
    """The events of one item."""
    if kind == "call":
        return ["output_item.added", *["function_call_arguments.delta"] * deltas, "function_call_arguments.done",
                "output_item.done"]
    name = {"message": "output_text", "thought": "reasoning_text"}[kind]
    return ["output_item.added", "content_part.added", *[f"{name}.delta"] * deltas, f"{name}.done", "content_part.done",
            "output_item.done"]


TURNS = {
    "text": (("Hel", "lo"), told("message", 2)), "nothing": ((), told("message", 0)),
    "reasoning": ((*THOUGHT, "Hi"), told("thought", 2) + told("message", 1)),
    "a thought alone": (THOUGHT, told("thought", 2) + told("message", 0)),
    "a call": (CALL, told("call", 2)), "calls": (CALL + SECOND_CALL, told("call", 2) + told("call", 1)),
    "a call without arguments": ((main.ToolCallDelta("get_time"),), told("call", 0)),
    "all": ((*THOUGHT, "Su", "re", *CALL, *SECOND_CALL), [
        *told("thought", 2), *told("message", 2), *told("call", 2), *told("call", 1)]),
    "text after a call": (("a", *CALL, "b"), told("message", 1) + told("call", 2) + told("message", 1))}
TYPES = {"message": "message", "thought": "reasoning", "call": "function_call"}


@pytest.fixture(params=TURNS.values(), ids=TURNS)
def turn(request):
    return request.param


def test_a_stream_tells_its_items_one_after_the_other(ready, turn):
    words, items = turn
    events = stream(ready(ScriptedModel(*words)), tools=TOOLS)

    assert kinds(events) == ["created", "in_progress", *items, "completed"]
    assert [events[n]["response"]["status"] for n in (0, 1, -1)] == ["in_progress", "in_progress", "completed"]
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None


def without_what_is_drawn(response):
    """A response without its ids and times."""
    text = json.dumps({**response, "created_at": 0, "completed_at": 0}).replace(response["id"].split("_")[1], "ID")
    kept = json.loads(text)
    for item in kept["output"]:
        item.pop("call_id", None)
    return kept


def test_json_and_stream_agree_and_both_can_be_retrieved(ready, turn):
    http = ready(ScriptedModel(*turn[0]))
    whole, streamed = create(http, tools=TOOLS), stream(http, tools=TOOLS)[-1]["response"]

    assert without_what_is_drawn(whole) == without_what_is_drawn(streamed)
    assert retrieve(http, whole["id"]) == whole and retrieve(http, streamed["id"]) == streamed


def test_no_two_items_share_an_id_and_no_two_calls_a_call_id(ready):
    http = ready(ScriptedModel(*TURNS["all"][0]))
    made = [item for _ in range(2) for item in create(http, tools=TOOLS)["output"]]

    assert len({item["id"] for item in made}) == len(made) == 8
    assert len({item["call_id"] for item in made if "call_id" in item}) == 4


@pytest.mark.parametrize("words,budget,items", [
    (WORDS, 2, ["message"]), (CALL, 2, ["function_call"]), (THOUGHT + WORDS, 1, ["reasoning"]),
    ((*WORDS, *CALL), 5, ["message", "function_call"])], ids=str)
def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item(ready, words, budget, items):
    http = ready(ScriptedModel(*words))
    last = stream(http, tools=TOOLS, max_output_tokens=budget)[-1]

    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["completed_at"] is None and last["response"]["error"] is None
    assert [item["type"] for item in last["response"]["output"]] == items
    assert [item["status"] for item in last["response"]["output"]] == ["completed"] * (len(items) - 1) + ["incomplete"]
    assert create(http, tools=TOOLS, max_output_tokens=budget)["status"] == "incomplete"


def test_a_token_that_shows_nothing_makes_no_event_and_counts(ready):
    events = stream(ready(ScriptedModel("", "a", "", "b")))
    assert kinds(events) == ["created", "in_progress", *told("message", 2), "completed"]
    assert events[-1]["response"]["usage"]["output_tokens"] == 5


def test_text_that_looks_like_the_protocol_comes_back_the_same(ready):
    hard = ["\n\ndata: [DONE]\n\n", "event: response.completed\n", "\u2028\x85", "\r\n", "😀", "\x00", '"}', "\\n"]
    events = stream(ready(ScriptedModel(*hard)))
    assert [e["delta"] for e in events if e["type"].endswith(".delta")] == hard


def test_a_label_stands_in_the_frame_ids_and_the_response_keeps_its_own_id(ready):
    events = stream(ready(ScriptedModel("a")), session_id="mine")
    assert events[-1]["response"]["id"].startswith("resp_")


def test_a_stream_that_waits_for_the_model_says_that_it_is_queued(settings):
    gate, model = threading.Event(), ScriptedModel("a")
    app = main.create_app(settings(), load=lambda *_: gate.wait() and model)
    with TestClient(app) as http, http.stream("POST", URL, json={"input": ASK, "stream": True}) as answer:
        id = answer.headers["x-session-id"]
        wait_until(lambda: http.get(f"/v1/sessions/{id}").json()["frames"] == 2)
        gate.set()
        answer.read()

        events = events_of(answer)
    assert kinds(events) == ["created", "queued", "in_progress", *told("message", 1), "completed"]
    assert [e["response"]["status"] for e in events[:3]] == ["queued", "queued", "in_progress"]


def test_a_stream_that_waits_for_a_place_says_that_it_is_queued(ready):
    model = ScriptedModel("a", gated=True)
    http = ready(model, max_concurrent_requests=1)
    ahead = create(http, background=True)["id"]
    wait_until(lambda: retrieve(http, ahead)["status"] == "in_progress")
    with http.stream("POST", URL, json={"input": ASK, "stream": True}) as answer:
        wait_until(lambda: http.get(f"/v1/sessions/{answer.headers['x-session-id']}").json()["frames"] == 2)
        say(model)
        answer.read()

        assert kinds(events_of(answer))[:3] == ["created", "queued", "in_progress"]


def test_a_fault_ends_a_stream_with_response_failed_and_the_next_request_works(ready, caplog):
    http = ready(ScriptedModel("a", "b", fail_at=1))
    events = events_of(post(http, stream=True))

    assert kinds(events)[-2:] == ["output_text.delta", "failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error") and texts(failed) == ["a"]
    assert "scripted failure" not in json.dumps(events)
    assert retrieve(http, failed["id"]) == failed
    assert create(http, max_output_tokens=1)["status"] == "incomplete"


def test_a_fault_in_a_json_answer_is_a_500(ready):
    answer = post(ready(ScriptedModel("a", fail_at=0)), status=500)
    assert error_of(answer) == (500, "generation_failed", None)


@pytest.mark.parametrize("fields", [{"stream": True}, {"background": True}, {}], ids=str)
def test_a_model_that_does_not_load_makes_a_response_fail(settings, fields):
    def load(*_):
        raise OSError("no file named model.safetensors")

    with TestClient(main.create_app(settings(), load=load)) as http:
        answer = http.post(URL, json={"input": ASK, **fields})
        if not fields:
            assert error_of(answer)[:2] == (503, "model_load_failed")
            return
        id = answer.headers["x-session-id"]
        failed, events = finished(http, id), events_of(replay(http, id))

    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert kinds(events) == ["created", "queued", "failed"]


# -- the official SDK ------------------------------------------------------------------------------------------
class GetWeather(BaseModel):
    """The weather in a city."""
    city: str


def test_the_sdk_streams_every_turn_to_its_final_response(ready, turn):
    ai = official(ready(ScriptedModel(*turn[0])))
    with ai.responses.stream(model="scripted", input=ASK, tools=TOOLS) as events:
        seen = [event.type for event in events]
        final = events.get_final_response()

    assert seen[0] == "response.created" and seen[-1] == "response.completed"
    assert final.output_text == "".join(w for w in turn[0] if isinstance(w, str))
    assert [(item.id, item.type) for item in final.output] == [
        (item.id, item.type) for item in ai.responses.retrieve(final.id).output]
    assert all(item.parsed_arguments == {"city": "Paris"} for item in final.output if item.type == "function_call"
               and item.name == "get_weather")


def test_the_sdk_iterates_an_incomplete_stream_and_has_no_final_response_of_it(ready):
    with official(ready(ScriptedModel(*WORDS))).responses.stream(
            model="scripted", input=ASK, max_output_tokens=2) as events:
        assert [event.type for event in events][-1] == "response.incomplete"
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            events.get_final_response()


def test_the_sdk_parses_what_was_asked_for(ready):
    ai = official(ready(ScriptedModel('{"city": ', '"Paris"}')))
    parsed = ai.responses.parse(model="scripted", input=ASK, text_format=GetWeather)
    assert parsed.output_parsed == GetWeather(city="Paris")


def test_the_sdk_parses_a_call(ready):
    ai = official(ready(ScriptedModel(main.ToolCallDelta("GetWeather", '{"city": "Rome"}'))))
    called = ai.responses.parse(model="scripted", input=ASK, tools=[pydantic_function_tool(GetWeather)])
    assert called.output[0].parsed_arguments == GetWeather(city="Rome")


def test_the_sdk_raises_what_is_refused(ready):
    ai = official(ready(ScriptedModel("a")))
    with pytest.raises(openai.BadRequestError) as refusal:
        ai.responses.create(model="scripted", input=[{"type": "banana"}])
    assert refusal.value.param == "input[0].type"


# -- life: background and readers ------------------------------------------------------------------------------
def under_way(http, model, words=0, **fields):
    """A response in the background that has said so many words, and waits."""
    id = create(http, background=True, **fields)["id"]
    say(model, words)
    wait_until(lambda: (now := retrieve(http, id))["status"] == "in_progress" and texts(now) == (
        ["".join(model.words[:words])] if words else []))
    told = 3 + bool(words) * 2 + words  # created, queued, in progress; the item and its part; the words
    wait_until(lambda: http.get(f"/v1/sessions/{id}").json()["frames"] >= told)  # the object is ahead of the disk
    return id


def test_a_response_in_the_background_answers_at_once_and_goes_on_alone(ready):
    model = ScriptedModel(*WORDS, gated=True)
    http = ready(model)
    begun = create(http, background=True)
    assert (begun["status"], begun["background"], begun["output"], begun["usage"]) == ("queued", True, [], None)

    say(model, 2)
    running = wait_until(lambda: (now := retrieve(http, begun["id"]))["output"] and texts(now) == ["ab"] and now)
    say(model)

    assert (running["status"], running["output"][0]["status"], running["usage"]) == ("in_progress", "in_progress", None)
    ended = finished(http, begun["id"])
    assert ended["status"] == "completed" and texts(ended) == ["abcd"]
    assert ended["created_at"] == begun["created_at"] and ended["usage"]["output_tokens"] == 5
    events = events_of(replay(http, begun["id"]))
    assert kinds(events) == ["created", "queued", "in_progress", *told("message", 4), "completed"]
    assert events[-1]["response"] == ended


def test_a_response_in_the_background_outlives_the_grace_after_its_last_reader(live):
    model = ScriptedModel(*WORDS, gated=True)
    with httpx2.Client(base_url=live(model, cancel_after_disconnect_seconds=0.2), timeout=60) as http:
        ids = {}
        for background in (True, False):
            with http.stream("POST", URL, json={"input": ASK, "stream": True, "background": background}) as answer:
                next(answer.iter_bytes())
            ids[background] = answer.headers["x-session-id"]
        wait_until(lambda: retrieve(http, ids[False])["status"] == "cancelled")
        say(model)

        assert texts(finished(http, ids[True])) == ["abcd"]


def test_a_response_in_the_background_is_not_what_makes_room_for_others(pool, ready):
    model = ScriptedModel(*WORDS, gated=True)
    http = ready(model, max_concurrent_requests=1)
    id = under_way(http, model, 1)
    other = pool.submit(create, http)
    wait_until(lambda: http.get("/ready").json()["queued"] == 1)
    say(model)

    assert [response["status"] for response in (finished(http, id), other.result())] == ["completed"] * 2


@pytest.mark.parametrize("loaded", [True, False])
def test_a_response_in_the_background_that_cannot_be_is_refused_or_has_failed(client, ready, loaded):
    model = ScriptedModel("a", context=4)
    http = (ready if loaded else client)(model)
    answer = http.post(URL, json={"input": "far too many words here", "background": True})
    if loaded:
        assert error_of(answer)[:2] == (400, "context_length_exceeded")
    else:
        failed = finished(http, valid(answer.json())["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
        assert kinds(events_of(replay(http, failed["id"]))) == ["created", "queued", "failed"]


def test_a_stream_can_be_taken_up_after_every_event_of_a_response_that_has_ended(ready):
    http = ready(ScriptedModel(*THOUGHT, "Hi", *CALL))
    events = stream(http, tools=TOOLS)
    id, ai = events[0]["response"]["id"], official(http)
    first = post(http, stream=True, session_id="mine")

    for k in range(len(events)):
        rest = replay(http, id, starting_after=k)
        assert events_of(rest, first=k + 1) == events[k + 1:]
        assert [e.sequence_number for e in ai.responses.retrieve(id, stream=True, starting_after=k)] == list(
            range(k + 1, len(events)))
        again = http.post(URL, json={"input": ASK, "stream": True}, headers={"last-event-id": f"{id}:{k}"})
        assert again.content == rest.content
        with ai.responses.stream(response_id=id, starting_after=k) as resumed:
            assert [e.sequence_number for e in resumed] == list(range(k + 1, len(events)))
    assert events_of(replay(http, id)) == events
    labelled = http.post(URL, json={"input": ASK, "stream": True, "session_id": "mine"},
                         headers={"last-event-id": "mine:0"})
    assert first.content.endswith(labelled.content)


@pytest.mark.parametrize("k", range(-1, 5))
def test_a_stream_that_is_taken_up_while_it_runs_goes_on_to_its_end(ready, k):
    model = ScriptedModel(*WORDS, gated=True)
    http = ready(model)
    id = under_way(http, model, 1)
    query = {"stream": True} | ({"starting_after": k} if k >= 0 else {})
    with http.stream("GET", f"{URL}/{id}", params=query) as answer:
        say(model)
        answer.read()

    assert kinds(events_of(answer, first=k + 1)) == [
        "created", "queued", "in_progress", *told("message", 4), "completed"][k + 1:]


@pytest.mark.parametrize("query,status", [
    ({"starting_after": 1000}, 400), ({"starting_after": -1}, 400), ({"starting_after": "x"}, 400),
    ({"stream": "x"}, 400), ({"stream": False, "starting_after": 1}, 400)], ids=str)
def test_an_event_that_cannot_be_is_a_bad_request(ready, query, status):
    http = ready(ScriptedModel("a"))
    assert replay(http, create(http)["id"], **query).status_code == status


def test_a_stream_of_chat_is_not_taken_up_as_one_of_responses(ready):
    http = ready(ScriptedModel("a"))
    http.post(CHAT, json={"messages": [message("user", "x")], "stream": True, "session_id": "mine"})
    answer = http.post(URL, json={"input": ASK, "stream": True}, headers={"last-event-id": "mine:0"})
    assert error_of(answer) == (400, "invalid_last_event_id", "Last-Event-ID")


def test_a_stored_response_outlives_the_process_with_its_events_and_its_chain(client):
    first = client(ScriptedModel("Hi"))
    response = create(first, [message("user", "x")])
    events = replay(first, response["id"]).content
    first.__exit__(None, None, None)

    model = Listener("more")
    again = client(model)

    assert retrieve(again, response["id"]) == response
    assert replay(again, response["id"]).content == events
    create(again, [message("user", "x")], previous_response_id=response["id"])
    assert model.chat.messages == (USER, main.Message("assistant", "Hi"), USER)


# -- life: cancelling ------------------------------------------------------------------------------------------
BEGUN = ["created", "queued"]


@pytest.mark.parametrize("ref", ["/v1/responses/{}/cancel", "/v1/cancel/{}"])
@pytest.mark.parametrize("phase,before", [
    ("loading", BEGUN), ("queued", BEGUN), ("prefill", [*BEGUN, "in_progress"]),
    ("decode", [*BEGUN, "in_progress", *told("message", 2)])])
def test_a_response_is_cancelled_in_every_phase(settings, phase, before, ref):
    model, gate = SteppedModel(*WORDS), threading.Event()
    app = main.create_app(settings(max_batch_tokens=16, max_concurrent_requests=1),
                          load=lambda *_: gate.wait() and model)
    with TestClient(app) as http, contextlib.ExitStack() as stack:
        stack.callback(say, model)
        stack.callback(gate.set)
        if phase != "loading":
            gate.set()
        if phase == "queued":
            ahead = create(http, background=True)["id"]
            wait_until(lambda: retrieve(http, ahead)["status"] == "in_progress")
        id = create(http, "word " * 40, background=True)["id"]
        say(model, {"prefill": 1, "decode": 4}.get(phase, 0))  # two pieces of the prompt; its last, two words
        frames = {"loading": 2, "queued": 2, "prefill": 3, "decode": 7}[phase]
        wait_until(lambda: http.get(f"/v1/sessions/{id}").json()["frames"] == frames
                   and model.prompt_tokens >= {"prefill": 16, "decode": 40}.get(phase, 0))

        answer = http.post(ref.format(id))

        assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
        cancelled = retrieve(http, id)
        assert texts(cancelled) == (["ab"] if phase == "decode" else [])
        assert (cancelled["status"], cancelled["incomplete_details"], cancelled["error"]) == ("cancelled", None, None)
        assert http.post(f"{URL}/{id}/cancel").json() == cancelled
        events = events_of(replay(http, id))
        assert kinds(events) == [*before, "incomplete"] and events[-1]["response"] == cancelled
        assert folded(events) == cancelled["output"]
        with official(http).responses.stream(response_id=id) as seen:
            assert [event.type for event in seen][-1] == "response.incomplete"


@pytest.mark.parametrize("words,fields,status", [
    ({"fail_at": 1}, {"background": True}, "failed"), ({}, {}, "completed"),
    ({}, {"max_output_tokens": 1}, "incomplete")], ids=str)
def test_cancelling_what_has_ended_changes_nothing(ready, words, fields, status):
    http = ready(ScriptedModel(*WORDS, **words))
    ended = finished(http, create(http, **fields)["id"])

    answers = [valid(official(http).responses.cancel(ended["id"]).to_dict(mode="json")) for _ in range(2)]

    assert answers == [ended, ended] and ended["status"] == status


def test_a_reader_of_what_is_cancelled_gets_its_end_and_a_json_request_the_partial_answer(pool, ready):
    model = ScriptedModel(*WORDS, gated=True)
    http = ready(model)
    asked = {"streamed": pool.submit(post, http, stream=True, session_id="streamed")}
    wait_until(lambda: http.get("/v1/sessions/streamed").json().get("status") == "in_progress")
    asked["whole"] = pool.submit(create, http, session_id="whole")
    wait_until(lambda: http.get("/v1/sessions/whole").status_code == 200)
    for label in asked:
        assert http.post(f"/v1/cancel/{label}").json()["status"] == "cancelled"

    assert kinds(events_of(asked["streamed"].result(), "streamed"))[-1] == "incomplete"
    assert (asked["whole"].result()["status"], asked["whole"].result()["output"]) == ("cancelled", [])


def test_every_stream_begins_with_response_created_even_if_it_was_cancelled_before_anything_was_told(settings):
    gate, model = threading.Event(), ScriptedModel("a")
    app = main.create_app(settings(), load=lambda *_: gate.wait() and model)
    with TestClient(app) as http, ThreadPoolExecutor(1) as pool:
        whole = pool.submit(create, http, session_id="whole")
        wait_until(lambda: http.get("/v1/sessions/whole").status_code == 200)
        http.post("/v1/cancel/whole")
        gate.set()

        assert whole.result()["status"] == "cancelled"
        events = events_of(replay(http, whole.result()["id"]), "whole")
    assert kinds(events) == ["created", "incomplete"]


# -- life: deleting, bounds, what is not stored ----------------------------------------------------------------
def left_on_disk(database):
    return [rows(database, f"SELECT * FROM {table}") for table in ("sessions", "frames", "objects")]


@pytest.mark.parametrize("persist", [True, False])
def test_a_response_that_is_deleted_is_gone_and_leaves_nothing(ready, database, persist):
    http = ready(ScriptedModel("a"), persist_sessions=persist)
    id = create(http)["id"]

    assert http.delete(f"{URL}/{id}").json() == {"id": id, "object": "response", "deleted": True}

    for method, path in (("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel"),
                         ("DELETE", "")):
        assert http.request(method, f"{URL}/{id}{path}").status_code == 404
    assert http.get("/v1/sessions").json()["data"] == []
    if persist:
        assert left_on_disk(database) == [[], [], []]


def test_deleting_a_running_response_cancels_it_and_ends_its_readers(pool, ready, database):
    model = ScriptedModel(*WORDS, gated=True)
    http = ready(model)
    id = under_way(http, model, 2)
    reader = pool.submit(replay, http, id)
    wait_until(lambda: http.get(f"/v1/sessions/{id}").json()["readers"] == 1)

    official(http).responses.delete(id)

    assert kinds(events_of(reader.result()))[-1] == "incomplete"
    assert http.get(f"{URL}/{id}").status_code == 404 and left_on_disk(database) == [[], [], []]
    say(model)
    create(http)
    assert model.drawn <= 3 + len(WORDS) + 1  # the step that was under way, and the other's


def test_a_chat_completion_is_no_response_and_a_response_is_no_chat_completion(ready):
    http = ready(ScriptedModel("a"))
    response = create(http)["id"]
    chat = http.post(CHAT, json={"messages": [message("user", "x")], "store": True}).json()["id"]

    for url, id in ((URL, chat), (CHAT, response)):
        assert [http.get(f"{url}/{id}").status_code, http.delete(f"{url}/{id}").status_code] == [404, 404]
    assert http.post(f"{URL}/{chat}/cancel").status_code == 404


def test_what_is_not_stored_is_no_object_and_leaves_no_trace_on_disk_but_can_be_taken_up(ready, database):
    http = ready(ScriptedModel("sec", "ret"))
    answer = post(http, stream=True, store=False)
    id, events = answer.headers["x-session-id"], events_of(answer)

    assert events[-1]["response"]["store"] is False
    for method, path in (("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("DELETE", "")):
        assert http.request(method, f"{URL}/{id}{path}").status_code == 404
    assert left_on_disk(database) == [[], [], []]
    again = http.post(URL, json={"input": ASK, "stream": True, "store": False}, headers={"last-event-id": f"{id}:1"})
    assert events_of(again, first=2) == events[2:]
    assert error_of(post(http, status=404, previous_response_id=id))[1] == "previous_response_not_found"


def test_a_stored_response_outlives_its_events(ready):
    model = Listener("Hi")
    http = ready(model, sessions_ttl_seconds=0.1)
    response = create(http, "x")
    wait_until(lambda: http.get("/v1/sessions").json()["data"] == [])

    assert retrieve(http, response["id"]) == response
    assert error_of(replay(http, response["id"]))[:2] == (404, "session_not_found")
    assert http.post(f"{URL}/{response['id']}/cancel").json() == response
    create(http, "x", previous_response_id=response["id"])
    assert model.chat.messages == (USER, main.Message("assistant", "Hi"), USER)
    assert http.delete(f"{URL}/{response['id']}").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields,status", [({"max_output_tokens": 5000}, 400), ({}, 429)], ids=["too long", "full"])
def test_a_response_that_is_refused_leaves_nothing(ready, database, stream, fields, status):
    model = ScriptedModel("a", gated=True)
    http = ready(model, max_concurrent_requests=1, max_queued_requests=0 if status == 429 else 9)
    running = under_way(http, model)

    post(http, status=status, stream=stream, **fields)

    assert [s["id"] for s in http.get("/v1/sessions").json()["data"]] == [running]
    assert rows(database, "SELECT id FROM objects") == rows(database, "SELECT id FROM sessions") == [(running,)]


@pytest.mark.parametrize("bound,kept", [
    ({"responses_max_count": 2}, 2), ({"responses_max_mib": 0.25}, 2), ({"responses_ttl_seconds": 0.01}, 0)],
    ids=str)
def test_stored_responses_keep_to_their_bounds_and_the_oldest_go_first(ready, bound, kept):
    http = ready(ScriptedModel("a"), sessions_ttl_seconds=0.2, **bound)
    ids = [create(http, "x" * 100_000)["id"] for _ in range(4)]

    wait_until(lambda: [http.get(f"{URL}/{id}").status_code for id in ids] == [404] * (4 - kept) + [200] * kept)


def test_what_is_being_made_is_within_every_bound(ready, database):
    model = ScriptedModel("a", gated=True)
    http = ready(model, sessions_ttl_seconds=0.2, responses_ttl_seconds=0.01, responses_max_count=1,
                 responses_max_mib=1 / 2**20)
    say(model, 2)
    create(http)
    being_made = {under_way(http, model), create(http, background=True)["id"]}

    wait_until(lambda: not rows(database, "SELECT 1 FROM sessions WHERE ended IS NOT NULL"))  # the sweep that counts

    assert {id for (id,) in rows(database, "SELECT id FROM objects")} == being_made
    assert {retrieve(http, id)["status"] for id in being_made} == {"in_progress", "queued"}


# -- life: input items, counts and chains ----------------------------------------------------------------------
def test_input_items_come_in_pages_either_way(ready):
    http = ready(ScriptedModel("a"))
    id = create(http, [*(message("user", str(n), id=f"msg_{n}") for n in range(5))], instructions="no item")["id"]

    def page(**query):
        found = http.get(f"{URL}/{id}/input_items", params=query).json()
        assert (found["first_id"], found["last_id"]) == (found["data"][0]["id"], found["data"][-1]["id"])
        return [item["content"][0]["text"] for item in found["data"]], found["has_more"]

    assert page(limit=2) == (["4", "3"], True) and page(order="asc", limit=2) == (["0", "1"], True)
    assert page(order="asc", limit=2, after="msg_3") == (["4"], False)
    assert page(order="desc", after="msg_2") == (["1", "0"], False)
    assert [item.id for item in official(http).responses.input_items.list(id, limit=2, order="asc")] == [
        f"msg_{n}" for n in range(5)]


def test_input_items_are_whole_and_what_openais_types_say(ready):
    http = ready(ScriptedModel("a"))
    given = ["x", TWO_PARTS, [*TURN, reasoning(["s"], ["c"]), message("assistant", "a"), message("developer", "d"),
                              {"type": "web_search_call"}, message("user", "x")]]
    items = [http.get(f"{URL}/{create(http, input)['id']}/input_items?order=asc").json()["data"] for input in given]
    every = [item for listed in items for item in listed]

    for item in every:
        ITEM.validate_json(json.dumps(item), strict=True)
    assert [item["type"] for item in items[2]] == [
        "message", "function_call", "function_call", "function_call_output", "function_call_output", "reasoning",
        "message", "message", "message"]
    assert items[0] == [{"id": items[0][0]["id"], "type": "message", "status": "completed", "role": "user",
                         "content": [{"type": "input_text", "text": "x"}]}]
    assert items[1][0]["content"] == TWO_PARTS and items[2][3]["output"] == "rain"
    assert len({item["id"] for item in every}) == 11


@pytest.mark.parametrize("query,param", [("limit=0", "limit"), ("order=up", "order"), ("after=nobody", "after")])
def test_a_page_that_cannot_be_is_a_bad_request(ready, query, param):
    http = ready(ScriptedModel("a"))
    assert error_of(http.get(f"{URL}/{create(http)['id']}/input_items?{query}"))[::2] == (400, param)


def test_input_tokens_are_those_that_the_usage_tells(ready):
    http = ready(ScriptedModel("a"))
    before = create(http)["id"]
    for fields in ({}, {"instructions": "Be brief."}, {"previous_response_id": before}, {"tools": TOOLS},
                   {"input": TURN}, {"truncation": "auto"}):
        asked = {"model": "scripted", "input": ASK, **fields}
        counted = official(http).responses.input_tokens.count(**asked)
        assert counted.to_dict() == {"object": "response.input_tokens",
                                     "input_tokens": create(http, **asked)["usage"]["input_tokens"]}
    assert len(http.get("/v1/sessions").json()["data"]) == 7  # counting begins none


@pytest.mark.parametrize("asked", [{}, {"max_output_tokens": 5}], ids=str)
def test_input_tokens_are_those_that_truncation_leaves(ready, asked):
    http, asked = ready(ScriptedModel("a", context=26)), {"input": TALK, "truncation": "auto", **asked}
    counted = http.post(f"{URL}/input_tokens", json=asked).json()
    assert counted["input_tokens"] == create(http, **asked)["usage"]["input_tokens"] < 36


def test_a_chain_holds_all_that_was_said_but_no_instructions(ready):
    model = Listener(*THOUGHT, "Sure.", *CALL)
    http = ready(model)
    first = create(http, "x", instructions="one", tools=TOOLS)
    model.words = ("It rains.",)
    second = create(http, [output(first["output"][2]["call_id"], "rain")], previous_response_id=first["id"])
    third = create(http, "x", previous_response_id=second["id"], instructions="three")

    made = made_call(first["output"][2]["call_id"], city="Paris")
    assert model.chat.messages == (
        main.Message("system", "three"), USER,
        main.Message("assistant", "Sure.", tool_calls=(made,), reasoning="Let me see."),
        main.Message("tool", "rain", "get_weather", (), made["id"]), main.Message("assistant", "It rains."), USER)
    assert third["previous_response_id"] == second["id"]
    assert len(http.get(f"{URL}/{third['id']}/input_items").json()["data"]) == 1


@pytest.mark.parametrize("budget", [1, 2])
def test_a_call_that_was_cut_was_never_made(ready, budget):
    model = Listener("a", *CALL)
    http = ready(model)
    cut = create(http, "x", tools=TOOLS, max_output_tokens=1 + budget)
    create(http, "x", previous_response_id=cut["id"])

    assert model.chat.messages == (USER, main.Message("assistant", "a"), USER)


def test_a_chain_goes_on_only_after_what_has_ended_and_is_still_there(ready):
    model = ScriptedModel(*WORDS, gated=True)
    http = ready(model)
    running = under_way(http, model)
    assert error_of(post(http, status=400, previous_response_id=running))[1:] == (
        "invalid_value", "previous_response_id")
    http.post(f"{URL}/{running}/cancel")
    say(model)
    model.fail_at = 1
    failed = finished(http, create(http, background=True)["id"])["id"]
    model.fail_at = None
    assert error_of(post(http, status=400, previous_response_id=failed))[1:] == (
        "invalid_value", "previous_response_id")
    assert create(http, previous_response_id=running)["status"] == "completed"
    deleted = create(http)["id"]
    http.delete(f"{URL}/{deleted}")
    chat = http.post(CHAT, json={"messages": [message("user", "x")], "store": True}).json()["id"]

    for id in (deleted, chat, "resp_unknown", "x"):
        assert error_of(post(http, status=404, previous_response_id=id)) == (
            404, "previous_response_not_found", "previous_response_id")


# -- a server that dies ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_of_a_server_that_dies_no_event_is_lost_and_what_it_was_making_has_failed(start, end):
    server = start(SCRIPTED_SERVER, WORDS=5000, SHUTDOWN_GRACE_SECONDS=0.1, RESUME_AFTER_RESTART_SECONDS=0)
    raw = b""
    with contextlib.suppress(httpx2.TransportError), httpx2.stream("POST", server.base + URL, timeout=60, json={
            "input": ASK, "stream": True, "background": True}) as answer:
        read = answer.headers["x-session-id"]
        for part in answer.iter_raw():
            raw += part
            if raw.count(b"\n\n") > 20 and server.process.poll() is None:
                unread = httpx2.post(server.base + URL, json={"input": ASK, "background": True}).json()["id"]
                getattr(server, end)()
    held = raw[:raw.rfind(b"\n\n") + 2]

    server = start(SCRIPTED_SERVER, RESUME_AFTER_RESTART_SECONDS=0)
    with httpx2.Client(base_url=server.base, timeout=60) as http:
        for id in (read, unread):
            failed, events = retrieve(http, id), events_of(replay(http, id))
            assert kinds(events)[0] == "created" and events[-1]["type"] == "response.failed"
            assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
            assert events[-1]["response"] == failed == http.post(f"{URL}/{id}/cancel").json()
        whole = replay(http, read).content
    assert whole.startswith(held) and held.count(b"\n\n") > 20
    assert whole == raw or end == "kill"


def test_a_stream_of_which_nothing_was_told_before_the_server_died_begins_with_response_created():
    body = main.ResponsesRequest(input="x")
    begun = main.ResponseReply("resp_1", "m", main.response_echo(body), main.Sampling()).result()

    frames, failed = main.broken_off("response", main.ApiError(503, "Died."), 0, begun)

    assert [event for event, _ in frames] == ["response.created", "response.failed", None]
    assert valid(failed)["status"] == "failed"


# -- chat and responses ----------------------------------------------------------------------------------------
def agreement(http, prompt, tools=(), **fields):
    """What chat and responses say to the same: text, thoughts, calls and usage."""
    nested = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]
    chat = http.post(CHAT, json={"messages": [message("user", prompt)], "tools": nested, **fields}).json()
    response = create(http, prompt, tools=list(tools), **{"max_output_tokens" if name == "max_tokens" else name: value
                                                         for name, value in fields.items()})
    said, usage = chat["choices"][0]["message"], response["usage"]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return [(said["content"] or "", said.get("reasoning_content", ""), [
                 (c["function"]["name"], c["function"]["arguments"]) for c in said.get("tool_calls", ())],
             chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"],
             chat["usage"]["completion_tokens_details"]["reasoning_tokens"]),
            ("".join(texts(response)), "".join(texts(response, "reasoning")),
             [(c["name"], c["arguments"]) for c in calls], usage["input_tokens"], usage["output_tokens"],
             usage["output_tokens_details"]["reasoning_tokens"])]


def test_chat_and_responses_agree(ready, turn):
    chat, response = agreement(ready(ScriptedModel(*turn[0])), ASK, TOOLS)
    assert chat == response


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    process = Process([sys.executable, "main.py"], {
        "MODEL_REPO_ID": "demo", "MODELS_DIR": ROOT / "models", "TORCH_DTYPE": "float32",
        "SESSIONS_DB_PATH": folder / "sessions.db"}, folder / "log")
    with httpx2.Client(base_url=process.base, timeout=200) as http:
        yield http
    process.kill()


@pytest.mark.parametrize("tools,fields", [
    ((), {"max_tokens": 6}), (TOOLS[:1], {"tool_choice": "required", "max_tokens": 24})],
    ids=["text", "call"])
def test_chat_and_responses_of_the_demo_model_agree_and_its_tokens_are_counted_exactly(demo, tools, fields):
    prompt = "Weather in Paris?"
    chat, response = agreement(demo, prompt, tools, temperature=0, **fields)
    counted = demo.post(f"{URL}/input_tokens", json={"input": prompt, "tools": list(tools)}).json()

    assert chat == response and (response[0] or response[2])
    assert counted["input_tokens"] == response[3]


# -- a recorded client: three turns of Codex -------------------------------------------------------------------
CODEX = {
    "model": "gpt-5-codex", "instructions": "You are Codex.", "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-key", "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"}, "tools": [
        {"type": "function", "name": "get_weather", "description": "d", "strict": False, "parameters": CITY},
        *HOSTED, {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}}]}


class Worker(Listener):
    """Thinks and calls, thinks, tells and calls, and answers."""

    def prepare(self, chat):
        turn = sum(message.role == "tool" for message in chat.messages)
        self.words = ((*THOUGHT, *CALL), (*THOUGHT, "Next.", *CALL), ("Done.",))[turn]
        return super().prepare(chat)


def sent_again(item):
    """An item of an answer as Codex sends it again: without id and status."""
    return {name: value for name, value in item.items() if name not in ("id", "status")} | (
        {"encrypted_content": None} if item["type"] == "reasoning" else {})


def test_three_turns_of_codex_get_through(ready):
    model = Worker()
    http = ready(model)
    items = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it."}]}]
    ends = []
    for turn in range(3):
        answer = http.post(URL, json={**CODEX, "input": items})
        events = events_of(answer)
        assert folded(events) == events[-1]["response"]["output"]
        assert set(answer.headers["x-ignored-fields"].split(", ")) == {
            "tools[1].web_search", "tools[2].custom", "tools[3].namespace", "tools[4].tool_search", "client_metadata"}
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        items += [sent_again(item) for item in done]
        items += [output(item["call_id"], f"result {turn}") for item in done if item["type"] == "function_call"]
        ends.append(kinds(events)[-1])

    assert ends == ["completed"] * 3
    said = [(m.role, m.content, len(m.tool_calls), m.reasoning) for m in model.chat.messages]
    assert said == [
        ("system", "You are Codex.\n\n<permissions>", 0, None), ("user", "<environment>", 0, None),
        ("user", "Do it.", 0, None), ("assistant", "", 1, "Let me see."), ("tool", "result 0", 0, None),
        ("assistant", "Next.", 1, "Let me see."), ("tool", "result 1", 0, None)]
    assert items[-1]["content"][0]["text"] == "Done."


# -- Open Responses --------------------------------------------------------------------------------------------
NONE, NUMBER = type(None), (int, float)
OPEN_RESPONSES = {  # what must be there, and of which type
    "response": {
        "id": str, "object": str, "created_at": int, "completed_at": (int, NONE), "status": str, "model": str,
        "incomplete_details": (dict, NONE), "previous_response_id": (str, NONE), "instructions": (str, NONE),
        "output": list, "error": (dict, NONE), "tools": list, "tool_choice": (str, dict), "truncation": str,
        "parallel_tool_calls": bool, "text": dict, "top_p": NUMBER, "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER, "top_logprobs": int, "temperature": NUMBER, "reasoning": (dict, NONE),
        "user": (str, NONE), "usage": (dict, NONE), "max_output_tokens": (int, NONE), "max_tool_calls": (int, NONE),
        "store": bool, "background": bool, "service_tier": str, "metadata": dict, "safety_identifier": (str, NONE),
        "prompt_cache_key": (str, NONE)},
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
    "function_call_output": {"id": str, "call_id": str, "output": (str, list), "status": str},
    "reasoning": {"id": str, "summary": list, "content": list},
    "output_text": {"text": str, "annotations": list, "logprobs": list},
    "input_text": {"text": str}, "reasoning_text": {"text": str}, "summary_text": {"text": str},
    "function": {"name": str, "description": (str, NONE), "parameters": (dict, NONE), "strict": (bool, NONE)},
    "json_schema": {"name": str, "description": (str, NONE), "schema": (dict, NONE), "strict": bool}}


def faults(value):
    """Where a value and what it holds is not what Open Responses says."""
    if isinstance(value, list):
        return [fault for item in value for fault in faults(item)]
    if not isinstance(value, dict):
        return []
    kind = value.get("object") or value.get("type")
    found = [f"{kind}.{name}: {value.get(name, 'missing')}" for name, types in OPEN_RESPONSES.get(kind, {}).items()
             if name not in value or not isinstance(value[name], types)]
    return found + [fault for name, item in value.items() if name not in ("parameters", "schema") for fault in
                    faults(item)]


SCHEMA_ASKED = {"text": {"format": {"type": "json_schema", "name": "x", "schema": CITY}}}


@pytest.mark.parametrize("load", ["loaded", "not loaded"])
@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 2}, SCHEMA_ASKED, {"background": True}], ids=str)
def test_every_object_and_event_is_what_open_responses_says(client, ready, load, fields):
    http = (ready if load == "loaded" else client)(ScriptedModel(*TURNS["all"][0]))
    events = stream(http, TURN, tools=TOOLS, **fields)

    assert faults(events) == []
    assert faults(http.get(f"{URL}/{events[0]['response']['id']}/input_items").json()) == []
    assert all(event["response"]["usage"] is None for event in events[:2])


# -- what could harm the server --------------------------------------------------------------------------------
def test_an_item_is_in_an_input_only_once_so_that_references_cannot_multiply_it(ready):
    http = ready(ScriptedModel("a"))
    first = create(http, [message("user", "x", id="mine")])
    kept = first["output"][0]["id"]

    for items in ([message("user", "x", id="same"), message("user", "y", id="same")],
                  [{"type": "item_reference", "id": kept}] * 2):
        assert error_of(post(http, items, status=400)) == (400, "invalid_value", "input")


def test_a_reference_to_an_item_that_its_response_does_not_have_is_not_found(ready):
    http = ready(ScriptedModel("a"))
    there = create(http)["output"][0]["id"]
    missing = there.rsplit("_", 1)[0] + "_99"

    for items in ([missing], [there, missing]):
        asked = [{"type": "item_reference", "id": id} for id in items]
        assert error_of(post(http, asked, status=404)) == (404, "item_not_found", "input")


def test_storage_that_cannot_be_read_is_told_as_that_and_not_as_a_missing_item(ready):
    http = ready(ScriptedModel("a"), sessions_buffer_mib=0.0001)
    kept = create(http)["output"][0]["id"]
    server = http.app.state.server

    async def fail(query, values=()):
        raise main.ApiError(503, "Session storage cannot be read just now.", "storage_unavailable")

    create(http)  # lets the first one go from memory
    server.log.rows = fail

    answer = post(http, [{"type": "item_reference", "id": kept}], status=503)
    assert error_of(answer) == (503, "storage_unavailable", None)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("path,body,param", [
    (URL, '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"minimum": %s}}]}',
     "tools[0].parameters"),
    (URL, '{"input": "x", "text": {"format": {"type": "text", "schema": {"a": [%s]}}}}', "text.format.schema"),
    (CHAT, '{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f", '
     '"parameters": {"minimum": %s}}}]}', "tools[0].function.parameters")])
def test_a_schema_holds_no_number_that_json_does_not_have(ready, path, body, param, value):
    answer = ready(ScriptedModel("a")).post(path, content=body % value, headers={"content-type": "application/json"})
    assert error_of(answer) == (400, "invalid_value", param)


def test_parts_are_bounded_in_all_too(ready):
    few = [message("user", [{"type": "input_text", "text": ""}] * 1000) for _ in range(17)]
    assert error_of(post(ready(ScriptedModel("a")), few, status=400)) == (400, "invalid_value", "input")


def test_what_comes_back_of_an_answer_and_is_not_read_costs_nothing(ready):
    part = {"type": "output_text", "text": "a", "annotations": [[1] * 100_000], "logprobs": [{"no": "matter"}]}
    answer = post(ready(ScriptedModel("a")), [message("assistant", [part]), message("user", "x")])
    assert "x-ignored-fields" not in answer.headers


def test_a_type_nested_beyond_all_measure_is_a_bad_request(ready):
    body = '{"input": [{"type": ' + "[" * 500 + "1" + "]" * 500 + "}]}"
    answer = ready(ScriptedModel("a")).post(URL, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


class PickyModel(Listener):
    """Refuses a chat in which somebody says `no`."""

    def prepare(self, chat):
        if any(m.content == "no" for m in chat.messages):
            raise main.ApiError(400, "The chat template refuses these messages.", "template_refused", chat.param)
        return super().prepare(chat)


def test_truncation_drops_nothing_for_another_reason_than_length(ready):
    http = ready(PickyModel("a"))
    answer = post(http, [message("user", "no"), message("user", "x")], status=400, truncation="auto")
    assert error_of(answer) == (400, "template_refused", "input")


def test_a_response_that_is_continued_lives_on_from_then(ready, database):
    http = ready(ScriptedModel("a"), responses_max_count=2, sessions_buffer_mib=0.001)
    first = create(http)["id"]
    second = create(http)["id"]
    third = create(http, previous_response_id=first)["id"]

    http.portal.call(http.app.state.server.store.sweep)
    http.get("/v1/sessions")  # after the sweep

    assert {id for id, in rows(database, "SELECT id FROM objects")} == {first, third}, second


def test_what_is_missing_in_a_chain_is_named_with_what_continues_it(ready):
    http = ready(ScriptedModel("a"))
    first = create(http)["id"]
    second = create(http, previous_response_id=first)["id"]
    assert http.delete(f"{URL}/{first}").status_code == 200

    answer = post(http, status=404, previous_response_id=second)

    assert error_of(answer) == (404, "previous_response_not_found", "previous_response_id")
    assert first in answer.text and second in answer.text


def test_a_deleted_session_does_not_come_back_with_rows_that_were_on_their_way(ready):
    http = ready(ScriptedModel("a"))
    server = http.app.state.server
    id = create(http, session_id="label")["id"]

    async def race():
        listing = asyncio.ensure_future(server.store.list(main.ANYBODY))
        await asyncio.sleep(0)  # it has asked for the rows
        await server.delete(id, "resp_", main.ANYBODY)
        await listing

    http.portal.call(race)

    assert http.get(f"/v1/sessions/{id}").status_code == 404
    create(http, session_id="label")


def test_what_no_file_can_take_keeps_nothing_else_off_the_disk(ready, database):
    http = ready(ScriptedModel("a"))
    server = http.app.state.server

    http.portal.call(lambda: server.log.write("huge", [(
        "INSERT INTO objects VALUES ('huge', '', 0, '', zeroblob(2000000000), 0)", ())]))
    kept = create(http)["id"]

    assert http.get("/ready").json()["storage"] == "ok"
    assert rows(database, "SELECT id FROM objects") == [(kept,)]


def test_a_response_in_the_background_has_its_grace_when_the_server_stops(start):
    server = start(SCRIPTED_SERVER, WORDS=6, SECONDS=0.2, SHUTDOWN_GRACE_SECONDS=20)
    with sdk(server.base) as ai:
        id = ai.responses.create(model="scripted", input="x", background=True).id
    server.terminate()

    with httpx2.Client(base_url=start(SCRIPTED_SERVER).base) as http:
        assert retrieve(http, id)["status"] == "completed"
