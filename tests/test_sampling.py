"""Penalties, bias, bounds of an answer, choices and logprobs: transformers is the oracle on tiny models, the official
SDK on the wire."""
from __future__ import annotations

import functools
import queue
from collections import Counter

import httpx2
import openai
import pytest
import tiny
import torch
from conftest import END, ScriptedModel, chat, main, parse_sse, sdk, tokens_of

FAMILIES = ("llama", "mistral", "falcon_h1")
PROMPT = (17, 40, 99, 250, 31, 17, 77, 8, 120, 55, 40, 201)


@pytest.fixture(scope="module")
def model():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield functools.cache(tiny.model)
    torch.set_num_threads(before)


def answer(model, *companions, budget=24, prompt=PROMPT, **sampling):
    """The events of one job, run beside jobs with the `companions`' sampling."""
    engine, done, said = main.Engine(model, places=64, batch=8), queue.SimpleQueue(), []
    jobs = [(sampling, said), *((other, []) for other in companions)]
    for options, events in jobs:
        left = [options.get("choices", 1)]

        def emit(event, events=events, left=left):
            events.append(event)
            if isinstance(event, main.Finished | main.Failed):
                left[0] -= 1
                if not left[0] or isinstance(event, main.Failed):
                    done.put(event)

        engine.submit(main.Job(main.Prompt(list(prompt)), main.Sampling(
            **{"temperature": 0.0, "max_new_tokens": budget, **options}), emit))
    engine.start()
    for _ in jobs:
        done.get(timeout=60)
    engine.stop()
    return said


def generate(model, prompt=PROMPT, new=24, **options):
    ids = torch.tensor([prompt])
    out = model._network.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                  max_new_tokens=new, **options)
    return out[0, len(prompt):].tolist()


def logits_of(model, prompt):
    with torch.no_grad():
        return model._network(input_ids=torch.tensor([prompt])).logits[0].float()


# -- penalties and bias ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_a_repetition_penalty_is_the_one_of_transformers(model, family):
    got = tokens_of(answer(model(family), repetition_penalty=1.6))
    assert got == generate(model(family), repetition_penalty=1.6)
    assert got != generate(model(family))


@pytest.mark.parametrize("frequency,presence", [(1.5, 0.0), (0.0, 1.5), (0.7, -1.2)])
def test_frequency_and_presence_penalties_are_openais_formulas(model, frequency, presence):
    expected = []
    for _ in range(24):
        row = logits_of(model("llama"), (*PROMPT, *expected))[-1]
        for token, count in Counter(expected).items():
            row[token] -= count * frequency + presence
        expected.append(int(row.argmax()))
    assert tokens_of(answer(model("llama"), frequency_penalty=frequency, presence_penalty=presence)) == expected


def test_a_bias_makes_a_token_certain_or_impossible(model):
    plain = tokens_of(answer(model("llama")))
    assert plain[0] not in tokens_of(answer(model("llama"), logit_bias=((plain[0], -100.0),)))
    assert tokens_of(answer(model("llama"), budget=5, logit_bias=((123, 100.0),))) == [123] * 5


def test_a_row_with_penalties_leaves_its_company_as_it_is(model):
    plain = tokens_of(answer(model("llama")))
    harsh = {"repetition_penalty": 3.0, "logit_bias": ((plain[0], -100.0),), "frequency_penalty": 2.0}
    assert tokens_of(answer(model("llama"), harsh, harsh)) == plain


# -- where an answer ends --------------------------------------------------------------------------------------
def test_a_stop_token_of_the_request_ends_the_answer(model):
    plain = tokens_of(answer(model("llama")))
    events = answer(model("llama"), stop_ids=frozenset({plain[6]}))
    at = plain.index(plain[6])
    assert (tokens_of(events), events[-1]) == (plain[: at + 1], main.Finished("stop"))


def test_no_token_ends_an_answer_before_its_least_length(model):
    plain = tokens_of(answer(model("llama")))
    stop = frozenset({plain[0]})
    events = answer(model("llama"), stop_ids=stop, min_tokens=7)
    got = tokens_of(events)
    assert not stop & {*got[:7]} and len(got) >= 7
    assert tokens_of(answer(model("llama"), stop_ids=stop)) == [plain[0]]


def test_an_end_token_that_is_to_be_ignored_does_not_end_the_answer(model):
    bias = ((tiny.END, 100.0),)
    assert len(tokens_of(answer(model("llama"), budget=5, logit_bias=bias))) == 1
    events = answer(model("llama"), budget=5, logit_bias=bias, ignore_eos=True)
    assert (tokens_of(events), events[-1]) == ([tiny.END] * 5, main.Finished("length"))


def test_a_token_that_the_model_does_not_have_is_refused(model):
    for sampling in (main.Sampling(logit_bias=((tiny.VOCABULARY, 1.0),)), main.Sampling(stop_ids=frozenset({10**6}))):
        with pytest.raises(main.ApiError) as refusal:
            model("llama").check(sampling)
        assert (refusal.value.status_code, refusal.value.code) == (400, "invalid_value")
    model("llama").check(main.Sampling(logit_bias=((tiny.VOCABULARY - 1, 1.0),)))


# -- choices ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_choices_share_a_prefill_and_are_all_the_answer_that_generate_gives(model, family):
    events = answer(model(family), choices=3)
    for choice in range(3):
        assert tokens_of(events, choice) == generate(model(family))


def test_the_choices_of_one_seed_differ_and_the_first_is_the_answer_alone(model):
    options = {"temperature": 2.0, "seed": 11}
    events = answer(model("llama"), choices=4, **options)
    answers = [tokens_of(events, n) for n in range(4)]
    assert len({*map(tuple, answers)}) == 4
    assert answers[0] == tokens_of(answer(model("llama"), **options))
    assert [tokens_of(answer(model("llama"), {}, choices=4, **options), n) for n in range(4)] == answers


class Counting(ScriptedModel):
    """Counts prompt tokens computed, and lets each choice end after its own number of words."""

    def sample(self, logits, draws):
        self.drawn += len(draws)
        return [draw.n + 1 if draw.n < len(self.words) - draw.choice else END for draw in draws]


def test_choices_are_prefilled_once_and_usage_counts_them_all(client):
    model = Counting("a ", "b ", "c ")
    body = client(model).post("/v1/chat/completions", json=chat("one two three", n=3)).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "a b c ", "stop"), (1, "a b ", "stop"), (2, "a ", "stop")]
    assert model.prompt_tokens == 3
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 4 + 3 + 2)


def test_each_choice_of_a_stream_finishes_once_and_the_stream_after_the_last(live):
    base = live(Counting("a ", "b ", "c "))
    text, reasons = Counter(), {}
    for chunk in sdk(base).chat.completions.create(**chat(n=3), stream=True):
        for choice in chunk.choices:
            assert choice.index not in reasons
            text[choice.index] += len(choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert (text, reasons) == ({0: 6, 1: 4, 2: 2}, {0: "stop", 1: "stop", 2: "stop"})


def test_a_cancel_ends_the_choices_that_run_and_leaves_those_that_have_ended(live):
    model = Counting("a ", "b ", "c ", gated=True)
    base = live(model)
    with httpx2.stream("POST", f"{base}/v1/chat/completions", json=chat(n=2, stream=True, session_id="two"),
                       timeout=60) as response:
        seen = ""
        model.gate.release(5)  # the prompt, a round for two, and the round in which the second choice ends
        for line in response.iter_lines():
            seen += line + "\n"
            if '"index":1' in line and '"finish_reason":"stop"' in line:
                assert httpx2.post(f"{base}/v1/cancel/two", timeout=60).json()["status"] == "cancelled"
                model.gate.release(4)
    frames = parse_sse(seen)
    assert [f["data"] for f in frames].count("[DONE]") == 1 and frames[-1]["data"] == "[DONE]"
    assert sum('"finish_reason":"cancelled"' in f["data"] for f in frames) == 1
    assert sum('"finish_reason":"stop"' in f["data"] for f in frames) == 1


def test_a_job_of_many_choices_waits_for_its_places_and_then_runs(model):
    engine, ended = main.Engine(model("llama"), places=4, batch=8), queue.SimpleQueue()
    for choices in (3, 2, 16):
        options = main.Sampling(temperature=0.0, max_new_tokens=4, choices=choices, ignore_eos=True)
        engine.submit(main.Job(
            main.Prompt(list(PROMPT)), options, lambda e, n=choices: isinstance(e, main.Finished) and ended.put(n)))
    engine.start()
    order = [ended.get(timeout=60) for _ in range(21)]
    engine.stop()
    assert order == [3] * 3 + [2] * 2 + [16] * 16


# -- logprobs --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 1.5, "top_p": 0.3, "seed": 4, "frequency_penalty": 1.0}], ids=str)
def test_logprobs_are_those_of_a_plain_forward_whatever_the_sampling(model, sampling):
    events = answer(model("llama"), top_logprobs=5, **sampling)
    made = [e for e in events if isinstance(e, main.Produced)]
    table = torch.log_softmax(logits_of(model("llama"), (*PROMPT, *tokens_of(events))), -1)
    for n, event in enumerate(made):
        row = table[len(PROMPT) - 1 + n]
        if event.logprob is None:
            assert event.token in model("llama").stop_ids
            continue
        assert event.logprob.logprob == pytest.approx(float(row[event.token]), abs=1e-3)
        best = row.topk(5).values.tolist()
        assert [top.logprob for top in event.logprob.top] == pytest.approx(best, abs=1e-3)


def test_the_bytes_of_tokens_join_to_the_text_even_where_a_character_is_split(model):
    backend = model("llama")._decoder
    text = "naïve 🧑‍🚀 日本 the cat"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(model("llama")._token_bytes(i) for i in ids).decode() == text
    assert any(b"\xf0" in model("llama")._token_bytes(i) for i in ids)


def test_the_bytes_of_a_byte_fallback_vocabulary_are_its_bytes(model):
    fallback = tiny.byte_fallback_backend()
    shell = object.__new__(main.Model)
    shell._decoder, shell._byte_level, shell._added = fallback, False, frozenset()
    text = "the 🧑 cat"
    ids = fallback.encode(text, add_special_tokens=False).ids
    assert b"".join(shell._token_bytes(i) for i in ids).decode().strip() == text


class Knowing(ScriptedModel):
    """Gives logprobs as a model would: for those who ask, with as many alternatives as they ask for."""

    def logprobs(self, logits, draws, tokens):
        return [self.known((*self.words, "")[d.n], d.sampling.top_logprobs) for d in draws]

    @staticmethod
    def known(word, asked):
        if asked is not None:
            top = tuple(main.TokenLogprob(str(k), b"x", -1.0 - k) for k in range(asked))
            return main.TokenLogprob(word, word.encode(), -0.5, top)


def test_logprobs_come_in_openais_shape_and_the_same_in_stream_and_json(live):
    client = sdk(live(Knowing("Hel", "", "lo")))
    whole = client.chat.completions.create(**chat(), logprobs=True, top_logprobs=2).choices[0]
    assert [(t.token, t.bytes, len(t.top_logprobs)) for t in whole.logprobs.content] == [
        ("Hel", [72, 101, 108], 2), ("", [], 2), ("lo", [108, 111], 2)]
    streamed = []
    for chunk in client.chat.completions.create(**chat(), logprobs=True, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            assert bool(choice.delta.content) == bool(choice.logprobs)
            streamed += choice.logprobs.content if choice.logprobs else []
    assert streamed == whole.logprobs.content


def test_logprobs_without_alternatives_are_asked_for_by_the_flag_alone(client):
    model = Knowing("a")
    entry = client(model).post("/v1/chat/completions", json=chat(logprobs=True)).json()["choices"][0]["logprobs"]
    assert entry["content"] == [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]


def test_who_asks_for_no_logprobs_gets_none(client):
    model = Knowing("a")
    assert client(model).post("/v1/chat/completions", json=chat()).json()["choices"][0]["logprobs"] is None


def test_a_logprob_of_never_is_a_finite_number(model):
    row = torch.full((1, tiny.VOCABULARY), -torch.inf)
    row[0, 7] = 0.0
    draw = main.Draw(main.Sampling(temperature=0.0, top_logprobs=3), 0)
    found = model("llama").logprobs(row, [draw], [7])[0]
    assert found.logprob == 0.0 and [t.logprob for t in found.top[1:]] == [main.LEAST_LOGPROB] * 2


def test_alternatives_without_logprobs_are_refused(live):
    with pytest.raises(openai.BadRequestError) as refusal:
        sdk(live(ScriptedModel("a"))).chat.completions.create(**chat(), top_logprobs=2)
    assert refusal.value.param == "top_logprobs"
