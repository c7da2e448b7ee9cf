"""Tools, thoughts and stored answers over HTTP, as the official SDK, LangChain and pydantic-ai use them."""
import asyncio
import json
import re
import sys

import httpx2
import pytest
from conftest import ROOT, Process, ScriptedModel, chat, main, parse_sse, sdk
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError, NotFoundError, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

CHAT = "/v1/chat/completions"
THOUGHT = [main.ReasoningDelta("Let me"), main.ReasoningDelta(" see.")]
CALL = [main.ToolCallDelta("get_weather"), main.ToolCallDelta(None, '{"city": '), main.ToolCallDelta(None, '"Paris"}')]
SECOND_CALL = [main.ToolCallDelta("get_time", "{}")]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}


def function(name="get_weather", parameters=CITY, **fields):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [function(), function("get_time", {"type": "object", "properties": {}})]


class Loop(ScriptedModel):
    """Calls a tool, and answers when it has the tool's answer."""

    def prepare(self, chat):
        answered = [m.content for m in chat.messages if m.role == "tool"]
        self.words = ("It has ", answered[-1], ".") if answered else CALL
        return super().prepare(chat)


def chunks_of(response):
    return [json.loads(block["data"]) for block in parse_sse(response.text)[:-1]]


def deltas_of(response):
    return [chunk["choices"][0]["delta"] for chunk in chunks_of(response) if chunk["choices"]]


# -- the shape on the wire -------------------------------------------------------------------------------------
def test_a_call_comes_as_its_id_and_name_once_and_then_its_arguments_as_they_are_written(client):
    http = client(ScriptedModel(*CALL))

    response = http.post(CHAT, json=chat(tools=TOOLS, stream=True))

    calls = [delta["tool_calls"] for delta in deltas_of(response) if "tool_calls" in delta]
    assert [len(call) for call in calls] == [1, 1, 1]
    first = calls[0][0]
    assert first == {"index": 0, "id": first["id"], "type": "function",
                     "function": {"name": "get_weather", "arguments": ""}}
    assert first["id"].startswith("call_")
    assert [call[0] for call in calls[1:]] == [{"index": 0, "function": {"arguments": '{"city": '}},
                                               {"index": 0, "function": {"arguments": '"Paris"}'}}]
    assert chunks_of(response)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_two_calls_have_indexes_and_ids_of_their_own(client):
    response = client(ScriptedModel(*CALL, *SECOND_CALL)).post(CHAT, json=chat(tools=TOOLS, stream=True))

    begun = [call for delta in deltas_of(response) for call in delta.get("tool_calls", []) if "id" in call]
    assert [(call["index"], call["function"]["name"]) for call in begun] == [(0, "get_weather"), (1, "get_time")]
    assert len({call["id"] for call in begun}) == 2


def test_json_holds_what_the_stream_told(client):
    http = client(ScriptedModel(*THOUGHT, "Sure.", *CALL, *SECOND_CALL))

    answer = http.post(CHAT, json=chat(tools=TOOLS)).json()

    message = answer["choices"][0]["message"]
    assert message["content"] == "Sure."
    assert message["reasoning_content"] == message["reasoning"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'}, {"name": "get_time", "arguments": "{}"}]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_content_is_null_in_an_answer_that_is_calls_alone(client):
    answer = client(ScriptedModel(*CALL)).post(CHAT, json=chat(tools=TOOLS)).json()

    assert answer["choices"][0]["message"]["content"] is None


def test_an_answer_without_thought_or_calls_has_neither_field(client):
    answer = client(ScriptedModel("Hi")).post(CHAT, json=chat(tools=TOOLS)).json()

    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_call_that_the_budget_cuts_is_length_with_what_there_is(client):
    answer = client(ScriptedModel(*CALL)).post(CHAT, json=chat(tools=TOOLS, max_tokens=2)).json()

    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": '}


def test_thoughts_are_told_under_both_names_and_counted_apart(client):
    http = client(ScriptedModel(*THOUGHT, "Hi", "!"))

    response = http.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True}))

    told = [delta for delta in deltas_of(response) if "reasoning" in delta]
    assert told == [{"reasoning_content": text, "reasoning": text} for text in ("Let me", " see.")]
    usage = chunks_of(response)[-1]["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2


def test_logprobs_are_those_of_the_content_alone(client):
    http = client(ScriptedModel(*THOUGHT, "Hi", "!", *CALL))

    answer = http.post(CHAT, json=chat(tools=TOOLS, logprobs=True)).json()

    assert len(answer["choices"][0]["logprobs"]["content"]) == 2


def test_every_choice_of_n_makes_calls_of_its_own(client):
    answer = client(ScriptedModel(*CALL)).post(CHAT, json=chat(tools=TOOLS, n=3)).json()

    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 3


def test_a_resumed_stream_tells_the_same_calls_under_the_same_ids(client):
    http = client(ScriptedModel(*CALL))
    whole = parse_sse(http.post(CHAT, json=chat(tools=TOOLS, stream=True, session_id="s")).text)

    rest = parse_sse(http.get("/v1/sessions/s/events", headers={"last-event-id": "s:1"}).text)

    assert rest == whole[2:] and len(whole) == 6


def test_chunks_and_objects_are_what_the_sdk_means_by_them(client):
    http = client(ScriptedModel(*THOUGHT, "Hi", *CALL))

    for chunk in chunks_of(http.post(CHAT, json=chat(tools=TOOLS, stream=True))):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    ChatCompletion.model_validate(http.post(CHAT, json=chat(tools=TOOLS)).json(), strict=True)


# -- what the model is asked -----------------------------------------------------------------------------------
class Asked(ScriptedModel):
    def prepare(self, chat):
        self.chat = chat
        return super().prepare(chat)


def asked(client, **fields):
    """The chat that the model gets."""
    model = Asked("Hi")
    answer = client(model).post(CHAT, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    return model.chat


@pytest.mark.parametrize("choice,names,must,most", [
    (None, ["get_weather", "get_time"], False, None), ("auto", ["get_weather", "get_time"], False, None),
    ("none", [], False, None), ("required", ["get_weather", "get_time"], True, None),
    ({"type": "function", "function": {"name": "get_time"}}, ["get_time"], True, 1),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "get_time"}}]}}, ["get_time"], True, None),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "get_weather"}}]}}, ["get_weather"], False, None)])
def test_a_tool_choice_decides_what_may_and_what_must_be_called(client, choice, names, must, most):
    got = asked(client, tools=TOOLS, **({"tool_choice": choice} if choice else {}))

    assert [tool.name for tool in got.tools] == names
    assert (got.must_call, got.max_calls) == (must, most)


def test_parallel_calls_can_be_refused(client):
    assert asked(client, tools=TOOLS, parallel_tool_calls=False).max_calls == 1


@pytest.mark.parametrize("effort,thinks", [("none", False), ("minimal", True), ("low", True), ("max", True)])
def test_a_reasoning_effort_reaches_the_template_in_every_spelling(client, effort, thinks):
    options = asked(client, reasoning_effort=effort).options

    assert options == {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def test_what_the_client_tells_the_template_wins_over_the_effort(client):
    options = asked(client, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}).options

    assert options["enable_thinking"] is False and options["thinking"] is True


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "documents"])
def test_what_a_template_is_told_is_an_allowlist(client, name):
    answer = client(ScriptedModel("Hi")).post(CHAT, json=chat(chat_template_kwargs={name: True}))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_replayed_reasoning_reaches_the_model(client, field):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: "thought"},
                {"role": "user", "content": "c"}]

    assert asked(client, messages=messages).messages[1].reasoning == "thought"


def test_an_assistant_turn_may_be_a_thought_alone(client):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "reasoning": "cut off"},
                {"role": "user", "content": "c"}]

    assert asked(client, messages=messages).messages[1].content == ""


# -- the official SDK ------------------------------------------------------------------------------------------
def test_the_sdk_streams_a_call_to_its_end(live):
    base = live(ScriptedModel(*THOUGHT, *CALL))
    tools = [function(strict=True)]

    with sdk(base) as openai, openai.chat.completions.stream(
            model="scripted", messages=[{"role": "user", "content": "?"}], tools=tools) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message

    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.parsed_arguments) for event in done] == [("get_weather", {"city": "Paris"})]
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}


def test_a_loop_of_the_sdk_gets_its_answer_after_the_tools(live):
    messages = [{"role": "user", "content": "Weather in Paris?"}]
    with sdk(live(Loop())) as openai:
        call = openai.chat.completions.create(model="scripted", messages=messages, tools=TOOLS).choices[0].message
        messages += [call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "20 degrees"}]
        last = openai.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)

    assert last.choices[0].message.content == "It has 20 degrees."


# -- other clients ---------------------------------------------------------------------------------------------
def langchain(base, model="scripted"):
    return ChatOpenAI(model=model, base_url=f"{base}/v1", api_key="none", max_retries=0, temperature=0)


def pydantic_ai(base, model="scripted", **options):
    return Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="none")),
                 model_settings={"temperature": 0}, **options)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"20 degrees in {city}"


class City(BaseModel):
    city: str
    population: int


def test_langchain_calls_a_tool_and_reads_the_answer(live):
    model = langchain(live(Loop())).bind_tools([get_weather])

    call = model.invoke("Weather in Paris?")
    result = get_weather.invoke(call.tool_calls[0])
    last = model.invoke([("user", "?"), call, ToolMessage(result.content, tool_call_id=result.tool_call_id)])

    assert last.content == "It has 20 degrees in Paris."


def test_langchain_joins_a_streamed_call(live):
    parts = list(langchain(live(ScriptedModel(*CALL))).bind_tools([get_weather]).stream("Weather in Paris?"))

    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]


def test_pydantic_ai_runs_a_tool_and_reads_the_answer(live):
    agent, cities = pydantic_ai(live(Loop())), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        cities.append(city)
        return "20 degrees"

    assert asyncio.run(agent.run("Weather in Paris?")).output == "It has 20 degrees."
    assert cities == ["Paris"]


# -- the demo model, which calls well because it must ----------------------------------------------------------
@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    env = {"MODEL_REPO_ID": "demo", "MODELS_DIR": ROOT / "models", "TORCH_DTYPE": "float32",
           "SESSIONS_DB_PATH": folder / "sessions.db"}
    process = Process([sys.executable, "main.py"], env, folder / "log")
    yield process.base
    process.kill()


@pytest.fixture(scope="module")
def openai_client(demo):
    with sdk(demo, timeout=200) as openai:
        yield openai


def ask(openai, text="What is the weather in Paris?", **fields):
    return openai.chat.completions.create(**{"model": "demo", "temperature": 0, "max_tokens": 60,
                                             "messages": [{"role": "user", "content": text}], **fields})


def test_the_demo_model_says_that_its_tools_are_generic(openai_client, demo):
    ask(openai_client, max_tokens=1)

    assert openai_client.models.retrieve("demo").tools == "generic"
    assert httpx2.get(f"{demo}/ready").json()["tools"] == "generic"


@pytest.mark.parametrize("text", ["What is the weather in Paris?", "Write a poem about the sea.", "<tool_call>", "No."])
def test_a_required_call_is_made_whatever_is_asked(openai_client, text):
    choice = ask(openai_client, text, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False).choices[0]

    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")


def test_several_required_calls_keep_to_their_schemas_each(openai_client):
    calls = ask(openai_client, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls

    whole = calls if len(calls) == 1 else calls[:-1]  # the budget may cut the last
    assert all(set(json.loads(call.function.arguments)) <= {"city"} for call in whole)


def test_a_named_function_is_called_once_and_no_other(openai_client):
    named = {"type": "function", "function": {"name": "get_time"}}
    choice = ask(openai_client, tools=TOOLS, tool_choice=named).choices[0]

    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [("get_time", "{}")]


def test_one_call_is_made_where_parallel_ones_are_refused(openai_client):
    choice = ask(openai_client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]

    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"


def test_a_required_call_keeps_to_its_schema_at_any_temperature(openai_client):
    tools = [function("plan", {"type": "object", "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9}, "mood": {"enum": ["calm", "wild"]},
        "stops": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2}},
        "required": ["days", "mood", "stops"]})]

    choices = ask(openai_client, tools=tools, tool_choice="required", temperature=1.5, seed=4, n=4,
                  parallel_tool_calls=False).choices

    for choice in choices:
        arguments = json.loads(choice.message.tool_calls[0].function.arguments)
        assert set(arguments) == {"days", "mood", "stops"}
        assert 1 <= arguments["days"] <= 9 and arguments["mood"] in ("calm", "wild")
        assert len(arguments["stops"]) <= 2 and all(len(stop) <= 8 for stop in arguments["stops"])


def test_a_schema_that_is_not_strict_may_ask_for_what_cannot_be_enforced(openai_client):
    schema = {**CITY, "properties": {"city": {"type": "string", "not": {"const": "Rome"}}}}

    choice = ask(openai_client, tools=[function(parameters=schema)], tool_choice="required",
                 parallel_tool_calls=False).choices[0]
    assert "city" in json.loads(choice.message.tool_calls[0].function.arguments)
    with pytest.raises(BadRequestError, match=r"tools\[0\]\.function\.parameters.*not"):
        ask(openai_client, tools=[function(parameters=schema, strict=True)])


def test_parsing_with_pydantic_gives_what_was_asked_for(openai_client):
    class GetWeather(BaseModel):
        """The weather in a city."""
        city: str

    called = openai_client.chat.completions.parse(
        model="demo", temperature=0, max_tokens=60, messages=[{"role": "user", "content": "Weather in Paris?"}],
        tools=[pydantic_function_tool(GetWeather)], tool_choice="required", parallel_tool_calls=False)
    said = openai_client.chat.completions.parse(
        model="demo", temperature=0, max_tokens=60, messages=[{"role": "user", "content": "Paris?"}],
        response_format=City)

    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather)
    assert isinstance(said.choices[0].message.parsed, City)


def test_a_response_format_beside_tools_holds_what_is_said(openai_client):
    choice = ask(openai_client, tools=[function(strict=True)], response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}).choices[0]

    said = [call.function.arguments for call in choice.message.tool_calls or []] + [choice.message.content]
    assert all(set(json.loads(text)) == {"city"} for text in said if text)
    assert any(said)


def test_langchain_gets_a_named_call_and_structured_output_from_the_demo_model(demo, openai_client):
    model = langchain(demo, "demo")

    named = model.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Paris?")
    structured = model.with_structured_output(City, method="json_schema").invoke("Paris?")

    assert [call["name"] for call in named.tool_calls] == ["get_weather"]
    assert isinstance(structured, City)


def test_pydantic_ai_gets_native_output_from_the_demo_model(demo, openai_client):
    agent = pydantic_ai(demo, "demo", output_type=NativeOutput(City))

    assert isinstance(asyncio.run(agent.run("Paris?")).output, City)


def test_the_beginning_of_an_answer_is_continued_and_not_repeated(openai_client):
    messages = [{"role": "user", "content": "What is the capital of France?"},
                {"role": "assistant", "content": "The capital of France is"}]

    answer = ask(openai_client, messages=messages, max_tokens=4)

    assert answer.choices[0].message.content.startswith(" Paris")


# -- stored answers --------------------------------------------------------------------------------------------
STORED = {"store": True, "metadata": {"topic": "weather"}, "tools": TOOLS}


def test_a_stored_answer_is_fetched_with_its_messages_and_metadata(client):
    http = client(ScriptedModel("Hi", *CALL))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    made = http.post(CHAT, json={"messages": messages, **STORED}).json()

    fetched = http.get(f"{CHAT}/{made['id']}").json()
    listed = http.get(f"{CHAT}/{made['id']}/messages").json()

    assert fetched == {**made, "metadata": {"topic": "weather"}}
    assert listed["data"] == [{"id": f"{made['id']}-{n}", **message} for n, message in enumerate(messages)]


def test_a_stored_answer_that_was_streamed_is_fetched_whole(client):
    http = client(ScriptedModel("Hel", "lo"))
    response = http.post(CHAT, json=chat(stream=True, **STORED))

    fetched = http.get(f"{CHAT}/{response.headers['x-session-id']}").json()

    assert fetched["object"] == "chat.completion"
    assert fetched["choices"][0]["message"]["content"] == "Hello"


def test_a_stored_answer_outlives_the_process(client):
    with_answer = client(ScriptedModel("Hi"))
    made = with_answer.post(CHAT, json=chat(**STORED)).json()
    with_answer.__exit__(None, None, None)

    again = client(ScriptedModel("other"))

    assert again.get(f"{CHAT}/{made['id']}").json()["choices"] == made["choices"]
    assert [m["content"] for m in again.get(f"{CHAT}/{made['id']}/messages").json()["data"]] == ["hi"]


def test_messages_come_in_pages_either_way(client):
    http = client(ScriptedModel("Hi"))
    messages = [{"role": "user", "content": str(n)} for n in range(5)]
    id = http.post(CHAT, json={"messages": messages, "store": True}).json()["id"]

    def page(**query):
        found = http.get(f"{CHAT}/{id}/messages", params=query).json()
        assert (found["first_id"], found["last_id"]) == (found["data"][0]["id"], found["data"][-1]["id"])
        return [m["content"] for m in found["data"]], found["has_more"]

    assert page(limit=2) == (["0", "1"], True)
    assert page(limit=2, after=f"{id}-1") == (["2", "3"], True)
    assert page(limit=2, after=f"{id}-3") == (["4"], False)
    assert page(order="desc", limit=2, after=f"{id}-4") == (["3", "2"], True)


@pytest.mark.parametrize("query,param", [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"),
                                         ("order=up", "order"), ("after=nobody", "after")])
def test_a_page_that_cannot_be_is_a_bad_request(client, query, param):
    http = client(ScriptedModel("Hi"))
    id = http.post(CHAT, json=chat(store=True)).json()["id"]

    answer = http.get(f"{CHAT}/{id}/messages?{query}")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("store", [None, False])
def test_an_answer_that_was_not_to_be_stored_cannot_be_fetched(live, store):
    with sdk(live(ScriptedModel("Hi"))) as openai:
        made = openai.chat.completions.create(model="x", messages=[{"role": "user", "content": "u"}], store=store)
        with pytest.raises(NotFoundError, match="no stored answer"):
            openai.chat.completions.retrieve(made.id)
        with pytest.raises(NotFoundError, match="no stored answer"):
            openai.chat.completions.messages.list(made.id)


def test_an_answer_that_failed_is_not_stored(client):
    http = client(ScriptedModel("a", "b", fail_at=1))
    response = http.post(CHAT, json=chat(stream=True, **STORED))

    assert http.get(f"{CHAT}/{response.headers['x-session-id']}").status_code == 404


def test_without_a_database_a_stored_answer_lives_as_long_as_its_session(client):
    http = client(ScriptedModel("Hi"), persist_sessions=False)
    made = http.post(CHAT, json=chat(**STORED)).json()

    assert http.get(f"{CHAT}/{made['id']}").json()["choices"] == made["choices"]


def test_a_service_tier_is_answered_with_the_one_there_is(client):
    http = client(ScriptedModel("Hi"))

    assert http.post(CHAT, json=chat(service_tier="flex")).json()["service_tier"] == "default"
    assert "service_tier" not in http.post(CHAT, json=chat()).json()


def test_only_what_is_known_of_a_stored_message_is_shown_and_its_id_is_ours(client):
    http = client(ScriptedModel("Hi"))
    odd = '{"role": "user", "content": "m", "id": "dup", "x": "\\ud800", "y": [[[1]]]}'
    made = http.post(CHAT, content=f'{{"store": true, "messages": [{odd}, {odd}]}}',
                     headers={"content-type": "application/json"}).json()

    listed = http.get(f"{CHAT}/{made['id']}/messages").json()["data"]

    assert listed == [{"id": f"{made['id']}-{n}", "role": "user", "content": "m"} for n in range(2)]


# -- what is hard to enforce -----------------------------------------------------------------------------------
@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": "string"}, {"type": ["object", "null"]}])
def test_a_functions_arguments_are_an_object_or_the_request_is_refused(client, parameters):
    answer = client(ScriptedModel("Hi")).post(CHAT, json=chat(tools=[function(parameters=parameters)]))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].function.parameters"


@pytest.mark.parametrize("hard", [{"pattern": "(?=a)b"}, {"$ref": "https://x.example/y"}])
def test_what_is_not_strict_and_cannot_be_enforced_is_left_to_the_model(openai_client, hard):
    schema = {"type": "object", "properties": {"a": {"type": "string", **hard}}, "required": ["a"]}
    tools = [function(parameters=schema)]

    answer = ask(openai_client, tools=tools, tool_choice="required", max_tokens=20)

    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|endoftext|>!", "<|im_start|>"])
def test_a_control_token_that_a_form_spells_is_text_in_the_answer(openai_client, text):
    chosen = ask(openai_client, extra_body={"structured_outputs": {"choice": [text]}}).choices[0]
    called = ask(openai_client, tool_choice="required", parallel_tool_calls=False, tools=[function(parameters={
        "type": "object", "properties": {"a": {"enum": [text]}}, "required": ["a"]})]).choices[0]

    assert (chosen.message.content, chosen.finish_reason) == (text, "stop")
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"a": text}


def test_patterns_that_must_all_hold_are_refused_where_they_are_too_many_to_join(openai_client):
    bomb = {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(10, 26)]}
    schema = {"type": "object", "properties": {"a": bomb}, "required": ["a"]}

    with pytest.raises(BadRequestError, match="allOf"):
        ask(openai_client, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert ask(openai_client, tools=[function(parameters=schema)], tool_choice="required", max_tokens=20).choices


def test_a_regular_expression_means_the_same_beside_tools(openai_client):
    wanted = {"structured_outputs": {"regex": "[/\\]]+\\\n"}}

    alone = ask(openai_client, extra_body=wanted, max_tokens=8)
    beside = ask(openai_client, extra_body=wanted, tools=TOOLS, parallel_tool_calls=False)  # or a call instead

    for message in (alone.choices[0].message, beside.choices[0].message):
        assert message.tool_calls or re.fullmatch(r"[/\]]+\n?", message.content)


def test_a_form_that_grows_without_end_is_the_clients_fault_and_is_named(openai_client):
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}

    with pytest.raises(BadRequestError) as refusal:
        ask(openai_client, tools=[function(parameters=endless)], tool_choice="required")
    assert refusal.value.body["param"] == "tools"
