"""The OpenAI Agents SDK over the Responses API, on a model that calls two tools one after the other."""
import asyncio
import json

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as without_tracing
from agents.exceptions import AgentsException
from conftest import ScriptedModel, main
from openai import AsyncOpenAI
from pydantic import BaseModel

without_tracing(True)


class TwoTools(ScriptedModel):
    """Thinks and asks for the weather, asks for the time, and answers with both."""

    def prepare(self, chat):
        last = max(n for n, message in enumerate(chat.messages) if message.role == "user")
        outputs = [message.content for message in chat.messages[last:] if message.role == "tool"]
        self.words = (
            (main.ReasoningDelta("Hm."), main.ToolCallDelta("get_weather"), main.ToolCallDelta(None, '{"city": "X"}')),
            ("Now", " the time.", main.ToolCallDelta("get_time", "{}")), (" and ".join(outputs), "."))[len(outputs)]
        self.chat = chat
        return super().prepare(chat)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@function_tool
def get_time() -> str:
    """The time."""
    return "noon"


def agent(base, api=OpenAIResponsesModel, tools=(get_weather, get_time), **options):
    client = AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    return Agent(name="a", instructions="Be brief.", model=api("scripted", client), tools=list(tools), **options)


async def whole(agent, input, **options):
    return await Runner.run(agent, input, **options)


async def streamed(agent, input, **options):
    result = Runner.run_streamed(agent, input, **options)
    deltas = [event.data.delta async for event in result.stream_events() if event.type == "raw_response_event"
              and event.data.type == "response.output_text.delta"]
    assert "".join(deltas).endswith(result.final_output)
    return result


def said(model):
    """What the model was told last, without what is the system's."""
    return [(m.role, m.content, m.reasoning, len(m.tool_calls)) for m in model.chat.messages if m.role != "system"]


LOOP = [("user", "Weather and time?", None, 0), ("assistant", "", "Hm.", 1), ("tool", "rain in X", None, 0),
        ("assistant", "Now the time.", None, 1), ("tool", "noon", None, 0)]


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize("options", [{}, {"auto_previous_response_id": True}], ids=["items", "previous_response_id"])
def test_a_loop_over_two_tools_comes_to_its_end(live, run, options):
    model = TwoTools()
    result = asyncio.run(run(agent(live(model)), "Weather and time?", **options))

    assert result.final_output == "rain in X and noon."
    assert said(model) == LOOP and model.chat.messages[0] == main.Message("system", "Be brief.")
    assert [type(item).__name__ for item in result.new_items] == [
        "ReasoningItem", "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem", "ToolCallItem",
        "ToolCallOutputItem", "MessageOutputItem"]
    usage = result.context_wrapper.usage
    assert usage.requests == 3 and usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize("by_id", [True, False])
def test_a_second_question_goes_on_where_the_first_answer_ended(live, run, by_id):
    model = TwoTools()
    asking = agent(live(model))

    async def twice():
        first = await run(asking, "Weather and time?")
        if by_id:
            return await run(asking, "Again?", previous_response_id=first.last_response_id)
        return await run(asking, [*first.to_input_list(), {"role": "user", "content": "Again?"}])

    assert asyncio.run(twice()).final_output == "rain in X and noon."
    again = [("user", "Again?", None, 0), *LOOP[1:]]
    assert said(model) == [*LOOP, ("assistant", "rain in X and noon.", None, 0), *again]


def test_calls_of_one_answer_are_made_together(live):
    class Both(ScriptedModel):
        def prepare(self, chat):
            outputs = [message.content for message in chat.messages if message.role == "tool"]
            self.words = (main.ToolCallDelta("get_time", "{}"), main.ToolCallDelta("get_weather", '{"city": "X"}'))
            self.words = tuple(outputs) or self.words
            return super().prepare(chat)

    result = asyncio.run(whole(agent(live(Both())), "Weather and time?"))
    assert result.final_output == "noonrain in X" and result.context_wrapper.usage.requests == 2


def test_an_output_type_is_asked_for_as_a_schema_and_parsed(live):
    class City(BaseModel):
        city: str

    class Formed(ScriptedModel):
        def prepare(self, chat):
            self.schema = json.loads(chat.grammar.source)
            return super().prepare(chat)

    model = Formed('{"city": ', '"X"}')
    result = asyncio.run(whole(agent(live(model), tools=(), output_type=City), "Which city?"))
    assert result.final_output == City(city="X") and model.schema["required"] == ["city"]


@pytest.mark.parametrize("choice,names,must", [
    ("required", ["get_weather", "get_time"], True), ("get_time", ["get_time"], True), ("none", [], False)])
def test_model_settings_reach_the_model(live, choice, names, must):
    model = TwoTools()
    settings = ModelSettings(tool_choice=choice, parallel_tool_calls=False, temperature=0.1, max_tokens=50,
                             truncation="auto", metadata={"a": "b"}, store=True, include_usage=True)
    asyncio.run(whole(agent(live(model), model_settings=settings, tool_use_behavior="stop_on_first_tool"), "x"))

    assert [tool.name for tool in model.chat.tools] == names
    assert (model.chat.must_call, model.chat.max_calls) == (must, 1)


def test_an_answer_that_is_cut_is_an_error_of_the_sdks_in_a_stream(live):
    cut = agent(live(ScriptedModel(*"abcd")), tools=(), model_settings=ModelSettings(max_tokens=2))
    with pytest.raises(AgentsException):
        asyncio.run(streamed(cut, "x"))


def test_the_same_loop_over_chat_says_the_same(live):
    model = TwoTools()
    result = asyncio.run(whole(agent(live(model), OpenAIChatCompletionsModel), "Weather and time?"))
    assert result.final_output == "rain in X and noon." and [turn[0] for turn in said(model)] == [
        turn[0] for turn in LOOP]
