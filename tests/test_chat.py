"""Chat Completions: what a client sees, mostly through the official SDK, in process and over real sockets."""
import dataclasses
import json
import logging

import httpx2
import openai
import pytest
from conftest import ScriptedModel, chat, main, parse_sse, sdk, text_of
from openai.types.chat import ChatCompletion, ChatCompletionChunk

URL = "/v1/chat/completions"
ASK = [{"role": "user", "content": "one two three"}]  # three tokens of prompt
HARD = ["\n\ndata: [DONE]\n\n", "\u2028\u2029\x85", "\r\n", "id: 9:9\n", "😀", "👩\u200d👧", "é", "\x00", '"}', " ",
        "\\n"]


class Listener(ScriptedModel):
    """Keeps the chat and the draws that reach the model."""

    def prepare(self, chat):
        self.chat, self.messages = chat, list(chat.messages)
        return super().prepare(chat)

    def sample(self, logits, draws):
        self.sampling = draws[0].sampling
        return super().sample(logits, draws)


@pytest.fixture(params=["in process", "over a socket"])
def ai(request, client, live):
    """`ai(model, **settings)` is the official client before that model."""

    def make(model, **settings):
        if request.param == "over a socket":
            return sdk(live(model, **settings))
        return sdk("http://localhost", http_client=client(model, **settings))

    return make


def ask(ai, messages=None, **fields):
    return ai.chat.completions.create(model="scripted", messages=messages or ASK, **fields)


def frames_of(client, **fields):
    """The frames of a stream, whose text is kept from any line-splitting cleverness of a client."""
    answer = client.post(URL, json={"messages": ASK, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    return parse_sse(answer.content.decode("ascii"))


def chunks_of(frames):
    return [json.loads(frame["data"]) for frame in frames if frame["data"] != "[DONE]"]


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def said_to(model, client, *messages):
    """What of `messages` reached the model."""
    answer = client.post(URL, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return model.messages


# -- the answer ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fields,text,finish,drawn", [
    ({}, "Hello there!", "stop", 4), ({"max_tokens": 2}, "Hello there", "length", 2),
    ({"max_completion_tokens": 3}, "Hello there!", "length", 3), ({"max_tokens": 4}, "Hello there!", "stop", 4),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "Hello there", "length", 2)], ids=str)
def test_json_and_stream_agree_in_text_usage_and_finish(ai, fields, text, finish, drawn):
    client = ai(ScriptedModel("Hello", " there", "!"))
    whole = ask(client, **fields)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **fields))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content == streamed == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == finish
    assert chunks[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, drawn, 3 + drawn)


def test_usage_says_how_much_of_the_prompt_had_been_computed_before(ai):
    model = ScriptedModel("a")
    client, model.reused = ai(model), 2
    assert ask(client).usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_is_role_then_deltas_then_finish_then_usage_if_asked_then_done(client, usage):
    frames = frames_of(client(ScriptedModel("a", "b")), stream_options={"include_usage": usage})
    assert frames[-1]["data"] == "[DONE]" and [f["data"] for f in frames].count("[DONE]") == 1
    chunks = chunks_of(frames)
    seen = [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks if c["choices"]]
    role, *deltas, finish = seen
    assert role[0]["role"] == "assistant" and role[0]["content"] == "" and role[1] is None
    assert deltas == [({"content": "a"}, None), ({"content": "b"}, None)]
    assert finish == ({}, "stop")
    if usage:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 6
        assert len(chunks) == len(seen) + 1 and all(c["usage"] is None for c in chunks[:-1])
    else:
        assert len(chunks) == len(seen) and not any("usage" in c for c in chunks)


def test_every_chunk_and_every_answer_is_what_openais_types_say(client):
    served = client(ScriptedModel(*HARD))
    for chunk in chunks_of(frames_of(served, stream_options={"include_usage": True})):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    ChatCompletion.model_validate(served.post(URL, json=chat()).json(), strict=True)


def test_all_chunks_of_a_stream_share_one_id_time_and_model(client):
    served = client(ScriptedModel("a", "b"), model_repo_id="org/name")
    answer = served.post(URL, json=chat(stream=True))
    chunks = chunks_of(parse_sse(answer.text))
    assert {(c["id"], c["model"], c["object"]) for c in chunks} == {
        (answer.headers["x-session-id"], "org/name", "chat.completion.chunk")}
    assert len({c["created"] for c in chunks}) == 1


def test_the_answer_names_the_model_that_spoke_and_its_session(client):
    answer = client(ScriptedModel("a"), model_repo_id="org/name").post(URL, json=chat(model="gpt-5"))
    assert answer.json()["model"] == "org/name"
    assert answer.headers["x-session-id"] == answer.json()["id"]


def test_two_answers_have_ids_of_their_own_that_nobody_can_guess(client):
    served = client(ScriptedModel("a"))
    first, second = (served.post(URL, json=chat()).json()["id"] for _ in range(2))
    assert first != second and len(first.removeprefix("chatcmpl-")) >= 32


def test_a_token_that_shows_nothing_counts_and_makes_no_frame(client):
    frames = frames_of(client(ScriptedModel("", "a", "", "b")), stream_options={"include_usage": True})
    assert [c["choices"][0]["delta"].get("content") for c in chunks_of(frames)[1:-2]] == ["a", "b"]
    assert chunks_of(frames)[-1]["usage"]["completion_tokens"] == 5


def test_an_answer_without_a_word_is_an_empty_text(ai):
    client = ai(ScriptedModel())
    assert ask(client).choices[0].message.content == ""
    chunks = list(ask(client, stream=True))
    assert [c.choices[0].finish_reason for c in chunks] == [None, "stop"]


def test_a_token_is_sent_before_the_next_one_is_made(live):
    model = ScriptedModel("a", "b", "c", gated=True)
    chunks = iter(ask(sdk(live(model)), stream=True))
    assert next(chunks).choices[0].delta.role == "assistant" and model.drawn == 0
    for made, word in enumerate(model.words, 1):
        model.gate.release()
        assert (next(chunks).choices[0].delta.content, model.drawn) == (word, made)
    model.gate.release()
    assert next(chunks).choices[0].finish_reason == "stop"


def test_text_that_looks_like_the_protocol_is_one_frame_a_token_and_comes_back_the_same(ai):
    client = ai(ScriptedModel(*HARD))
    assert [c.choices[0].delta.content for c in ask(client, stream=True)][1:-1] == HARD
    assert ask(client).choices[0].message.content == "".join(HARD)


def test_a_frame_is_one_line_of_data_and_then_its_id(client):
    answer = client(ScriptedModel(*HARD)).post(URL, json=chat(stream=True, session_id="mine"))
    blocks = answer.content.decode("ascii").split("\n\n")
    assert blocks.pop() == ""
    for n, block in enumerate(blocks):
        data, identity = block.split("\n")
        assert data.startswith("data: ") and identity == f"id: mine:{n}"
    assert text_of(parse_sse(answer.text)) == "".join(HARD)


def test_a_stream_says_that_it_is_one_and_is_stored_by_nobody_on_the_way(client):
    answer = client(ScriptedModel("a")).post(URL, json=chat(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "no-store" in answer.headers["cache-control"] and answer.headers["x-accel-buffering"] == "no"


# -- what reaches the model ------------------------------------------------------------------------------------
@pytest.mark.parametrize("role,heard", [("system", "system"), ("developer", "system"), ("user", "user")])
def test_a_developer_is_heard_as_the_system(client, role, heard):
    model = Listener("a")
    assert said_to(model, client(model), {"role": role, "content": "x"}) == [main.Message(heard, "x")]


@pytest.mark.parametrize("content,text", [
    ("plain", "plain"), ("", ""), ([], ""), ([{"type": "text", "text": "one"}], "one"),
    ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo")], ids=str)
def test_text_parts_are_joined_to_one_text(client, content, text):
    model = Listener("a")
    heard = said_to(model, client(model), {"role": "system", "content": content}, {"role": "user", "content": "x"})
    assert heard == [main.Message("system", text), main.Message("user", "x")]


def test_a_refusal_part_of_an_earlier_answer_is_text(client):
    model = Listener("a")
    part = {"type": "refusal", "refusal": "No."}
    heard = said_to(model, client(model), {"role": "assistant", "content": [part]}, {"role": "user", "content": "x"})
    assert heard[0] == main.Message("assistant", "No.")


def test_tool_turns_reach_the_model_as_values(client):
    model = Listener("a")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}}
    heard = said_to(model, client(model), {"role": "user", "content": "?", "name": "ann"},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]})
    meant = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
    assert heard == [main.Message("user", "?", name="ann"), main.Message("assistant", "", tool_calls=(meant,)),
                     main.Message("tool", "rain", name="weather", tool_call_id="c1")]


def test_a_call_without_arguments_has_none(client):
    model = Listener("a")
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}
    heard = said_to(model, client(model), {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "content": "noon"})
    assert heard[0].tool_calls[0]["function"]["arguments"] == {}


@pytest.mark.parametrize("arguments", ["{", "city=Köln", "{'a': 1}", "[" * 100_000, "1" * 5000], ids=lambda a: a[:9])
def test_arguments_that_are_no_json_are_refused(client, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = client(ScriptedModel("a")).post(URL, json={"messages": [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert error_of(answer) == (400, "invalid_value", "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize("fields,continues", [
    ({}, True), ({"continue_final_message": True}, True), ({"continue_final_message": False}, False),
    ({"add_generation_prompt": True}, False), ({"add_generation_prompt": False}, True)], ids=str)
def test_the_assistants_last_message_is_the_beginning_of_its_answer_unless_the_request_says_otherwise(
        client, fields, continues):
    model = Listener("a")
    answer = client(model).post(URL, json={
        "messages": [*ASK, {"role": "assistant", "content": "Once upon"}], **fields})
    assert answer.json()["choices"][0]["message"]["content"] == "a"
    assert model.messages[-1] == main.Message("assistant", "Once upon") and model.chat.continues is continues


@pytest.mark.parametrize("last", [
    {"role": "user", "content": "x"}, {"role": "assistant", "content": ""}, {"role": "assistant", "content": "x",
     "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}], ids=str)
def test_what_is_no_beginning_of_an_answer_is_not_continued(client, last):
    model = Listener("a")
    served = client(model)
    said_to(model, served, *ASK, last)
    assert not model.chat.continues
    answer = served.post(URL, json={"messages": [*ASK, last], "continue_final_message": True})
    assert error_of(answer) == (400, "invalid_value", "continue_final_message")


def test_an_answer_cannot_both_be_continued_and_begun_anew(client):
    answer = client(ScriptedModel("a")).post(URL, json={
        "messages": [*ASK, {"role": "assistant", "content": "x"}], "continue_final_message": True,
        "add_generation_prompt": True})
    assert error_of(answer) == (400, "invalid_value", "add_generation_prompt")


def test_an_answer_of_ours_can_be_sent_back_as_it_is(ai):
    model = Listener("hello")
    client = ai(model)
    message = ask(client).choices[0].message
    ask(client, [*ASK, message, {"role": "user", "content": "more"}])
    assert model.messages[1] == main.Message("assistant", "hello")


@pytest.mark.parametrize("kind", main.MEDIA_PARTS)
def test_a_part_that_the_model_has_no_sense_for_is_refused_by_name(client, kind):
    picture = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="
    content = [{"type": "text", "text": "look"}, {"type": kind, "data": picture}]
    answer = client(ScriptedModel("a")).post(URL, json={"messages": [{"role": "user", "content": content}]})
    assert error_of(answer) == (400, "unsupported_content", "messages[0].content[1]")
    told = "image" if main.MEDIA_PARTS[kind] == "file" else main.MEDIA_PARTS[kind]
    assert f"takes no {told}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_users_and_tools_show_something(client, role):
    content = [{"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlhAQABAAAAACw="}}]
    answer = client(ScriptedModel("a")).post(URL, json={"messages": [{"role": role, "content": content}, *ASK]})
    assert error_of(answer) == (400, "unsupported_content", "messages[0].content[0]")


@pytest.mark.parametrize("part", [
    {"type": "image_url"}, {"type": "image_url", "image_url": {}},
    {"type": "image_url", "image_url": {"detail": "low"}}, {"type": "file", "file": {"filename": "x"}},
    {"type": "image_url", "image_url": {"url": "data:,x"}, "image": "data:,y"},
    {"type": "image_url", "image_url": {"url": "data:,x", "data": "y"}}])
def test_a_part_has_one_source(client, part):
    answer = client(ScriptedModel("a")).post(URL, json={"messages": [{"role": "user", "content": [part]}]})
    assert error_of(answer) == (400, "invalid_media", "messages[0].content[0]")


def test_a_file_that_is_text_is_read_to_the_model(client):
    model = Listener("a")
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,aGVsbG8="}}
    content = [{"type": "text", "text": "Read:"}, file, {"type": "text", "text": "What?"}]
    assert client(model).post(URL, json={"messages": [{"role": "user", "content": content}]}).status_code == 200
    assert model.messages[0].content.split() == ["Read:", "hello", "What?"] and not model.messages[0].media


def test_how_to_sample_reaches_the_model(client):
    model = Listener("a")
    fields = {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 2**63 - 1, "stop": "END"}
    assert client(model).post(URL, json=chat(max_tokens=9, **fields)).status_code == 200
    assert model.sampling == main.Sampling(9, 0.3, 0.9, 40, 0.1, 2**63 - 1, ("END",))


@pytest.mark.parametrize("own,temperature", [(1.5, 1.5), (None, 0.2)])
def test_what_a_request_leaves_open_is_the_operators_and_then_the_models(client, own, temperature):
    model = Listener("a")
    model.defaults = main.Sampling(temperature=0.2, top_p=0.8, top_k=20, min_p=0.05)
    assert client(model, temperature=own, max_tokens=7).post(URL, json=chat()).status_code == 200
    expected = main.Sampling(7, temperature, 0.8, 20, 0.05)
    assert dataclasses.replace(model.sampling, seed=0) == expected


def test_a_zero_is_a_value_and_no_gap(client):
    model = Listener("a")
    model.defaults = main.Sampling(temperature=0.2, top_p=0.8, top_k=20, min_p=0.05)
    zeros = dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "seed"], 0)
    assert client(model).post(URL, json=chat(**zeros)).status_code == 200
    assert model.sampling == main.Sampling(256, 0, 0, 0, 0, 0)


def test_a_request_without_a_seed_gets_one_of_its_own(client):
    model, seeds = Listener("a"), set()
    served = client(model)
    for _ in range(3):
        served.post(URL, json=chat())
        seeds.add(model.sampling.seed)
    assert len(seeds) == 3


def test_the_default_budget_is_lowered_to_fit_and_one_that_was_asked_for_is_not(client):
    served = client(ScriptedModel(*"abcdefgh", context=8), max_tokens=100)
    lowered = served.post(URL, json={"messages": ASK}).json()
    assert (lowered["choices"][0]["finish_reason"], lowered["usage"]["total_tokens"]) == ("length", 8)
    answer = served.post(URL, json={"messages": ASK, "max_tokens": 6})
    assert error_of(answer) == (400, "context_length_exceeded", "messages")
    assert "8 tokens" in answer.json()["error"]["message"] and "9 tokens" in answer.json()["error"]["message"]


def test_messages_that_make_no_token_are_refused_and_harm_nobody(live):
    model = ScriptedModel("a", "b", gated=True)
    client = sdk(live(model))
    other = iter(ask(client, stream=True))
    next(other)
    with pytest.raises(openai.BadRequestError):
        ask(client, [{"role": "user", "content": ""}], timeout=10)
    model.gate.release(3)
    assert [c.choices[0].delta.content for c in other] == ["a", "b", None]


# -- refusals --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fields,code,param", [
    ({"verbosity": "low"}, "unsupported_parameter", "verbosity"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"modalities": ["audio"]}, "unsupported_parameter", "modalities")], ids=str)
def test_what_cannot_be_done_is_a_bad_request_to_the_sdk(ai, fields, code, param):
    with pytest.raises(openai.BadRequestError) as refusal:
        ask(ai(ScriptedModel("a")), **fields)
    assert (refusal.value.code, refusal.value.param) == (code, param)


@pytest.mark.parametrize("name", ["gpt-5", "", "ORG/NAME"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_strict_server_has_no_model_of_another_name(client, name, stream):
    served = client(ScriptedModel("a"), strict_model=True, model_repo_id="org/name")
    assert error_of(served.post(URL, json=chat(model=name, stream=stream))) == (404, "model_not_found", "model")


def test_a_strict_server_answers_to_its_own_name(client):
    served = client(ScriptedModel("a"), strict_model=True, model_repo_id="org/name")
    assert [served.post(URL, json=chat(model=name)).status_code for name in ("org/name", None)] == [200, 200]


def test_the_sdks_own_defaults_pass(ai):
    answer = ask(ai(ScriptedModel("a")), n=1, logprobs=False, frequency_penalty=0, presence_penalty=0, tools=[],
                 tool_choice="auto", response_format={"type": "text"}, store=False, metadata={"a": "b"}, user="me",
                 parallel_tool_calls=True, logit_bias={}, modalities=["text"], service_tier="auto", stop=None)
    assert answer.choices[0].message.content == "a"


def test_an_answer_that_is_to_be_stored_can_be_fetched(ai):
    client = ai(ScriptedModel("hello"))
    answer = ask(client, store=True, metadata={"a": "b"})
    fetched = client.chat.completions.retrieve(answer.id)
    assert fetched.to_dict() == {**answer.to_dict(), "metadata": {"a": "b"}}
    messages = client.chat.completions.messages.list(answer.id).data
    assert [(m.role, m.content) for m in messages] == [("user", ASK[0]["content"])]


@pytest.mark.parametrize("store", [False, None])
def test_an_answer_that_is_not_to_be_stored_cannot_be_fetched(ai, store):
    client = ai(ScriptedModel("hello"))
    answer = ask(client, store=store)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(answer.id)


# -- faults ----------------------------------------------------------------------------------------------------
def test_a_fault_after_the_first_words_makes_the_sdk_raise_and_the_next_request_works(ai):
    client = ai(ScriptedModel("a", "b", fail_at=1))
    ask(client, max_tokens=1)  # the model is there: what follows is no load's doing
    words = []
    with pytest.raises(openai.APIError, match="failed while generating") as fault:
        for chunk in ask(client, stream=True):
            words.append(chunk.choices[0].delta.content)
            assert chunk.choices[0].finish_reason is None
    assert words == ["", "a"] and fault.value.code == "generation_failed"
    assert ask(client, max_tokens=1).choices[0].message.content == "a"


def test_a_fault_in_a_json_answer_is_a_500_and_the_next_request_works(ai):
    client = ai(ScriptedModel("a", "b", fail_at=1))
    with pytest.raises(openai.InternalServerError) as fault:
        ask(client)
    assert (fault.value.status_code, fault.value.code) == (500, "generation_failed")
    assert ask(client, max_tokens=1).choices[0].message.content == "a"


def test_a_fault_ends_a_stream_with_an_error_frame_and_done_and_never_with_a_finish(client):
    frames = frames_of(client(ScriptedModel("a", "b", fail_at=1)))
    assert frames[-1]["data"] == "[DONE]"
    *chunks, error = chunks_of(frames)
    assert error == {"error": {"message": "The model failed while generating.", "type": "server_error", "param": None,
                               "code": "generation_failed"}}
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)


def test_a_fault_does_not_tell_the_client_what_happened_inside_but_the_log_does(client, caplog):
    caplog.set_level(logging.INFO)
    answer = client(ScriptedModel("a", fail_at=0)).post(URL, json=chat())
    assert "scripted failure" not in answer.text and "Traceback" not in answer.text
    assert "scripted failure" in caplog.text


# -- slow models -----------------------------------------------------------------------------------------------
class PingCounter(httpx2.HTTPTransport):
    """Lets the model say a word whenever it has seen two more keep-alives pass to the client."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.pings = gate, 0

    def handle_request(self, request):
        answer = super().handle_request(request)
        answer.stream = Counted(answer.stream, self)
        return answer


class Counted(httpx2.SyncByteStream):
    def __init__(self, stream, counter):
        self.stream, self.counter = stream, counter

    def __iter__(self):
        for part in self.stream:
            for _ in range(part.count(b": ping\n")):
                self.counter.pings += 1
                if self.counter.pings % 2 == 0:
                    self.counter.gate.release()
            yield part

    def close(self):
        self.stream.close()


@pytest.mark.parametrize("fields", [{}, {"session_id": "mine"}], ids=["server's id", "client's id"])
def test_the_sdk_reads_a_stream_with_ids_and_keep_alives_to_its_end(live, fields):
    model = ScriptedModel("a", "b", "c", gated=True)
    transport = PingCounter(model.gate)
    with httpx2.Client(transport=transport, timeout=60) as http:
        client = sdk(live(model, keepalive_seconds=0.02), http_client=http)
        chunks = list(ask(client, stream=True, extra_body=fields))
    assert [c.choices[0].delta.content for c in chunks] == ["", "a", "b", "c", None]
    assert transport.pings >= 2 * (len(model.words) + 1)  # the end is a token, too
