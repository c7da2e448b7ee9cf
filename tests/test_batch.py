"""The flat batch and its cache: logits and answers against transformers' own, reused prefixes, and too little room."""
from __future__ import annotations

import functools
import itertools
import mmap
import queue
import random
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
import tiny
import torch
from conftest import main, tokens_of, wait_until
from test_model import run

pytestmark = pytest.mark.usefixtures("one_thread")


def text(length, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCABULARY, (length,), generator=draw).tolist()


@functools.cache
def generated(network, prompt, count):
    ids = torch.tensor([prompt])
    whole = network.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return whole[0, len(prompt):].tolist()


def opened(chosen, tokens, key=b"", owner=""):
    return chosen.open(tokens, 8, main.Prompt(tokens, media_key=key), owner)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_network_takes_the_flat_batch_where_it_fits_or_says_why_not(family):
    runner = tiny.model(family).runner
    assert runner == "flat batch" if family in tiny.FLAT else runner.startswith("one forward per sequence: ")


def given_out(held, first, end):
    """Whether each page that these tokens of a layer's keys or values lie in is memory already."""
    width, seen = held.shape[2] * held.element_size(), []
    with open("/proc/self/pagemap", "rb") as pages:
        for head in range(len(held)):
            at = held.data_ptr() + head * held.shape[1] * width
            for page in range((at + first * width) // mmap.PAGESIZE, -(-(at + end * width) // mmap.PAGESIZE)):
                pages.seek(page * 8)
                seen.append(int.from_bytes(pages.read(8), "little") >> 63 == 1)
    return seen


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists() or main._advise()(0, 0, main.MADV_POPULATE_WRITE) != 0,
                    reason="only Linux, since 5.14, gives out pages when it is asked to")
def test_a_row_has_its_memory_in_pieces_that_are_given_out_as_a_whole():
    chosen = tiny.model("llama", max_context=8192)
    pool, size = chosen._runner._pool, main.ROW_TOKENS
    row, _ = opened(chosen, text(20))
    chosen.forward([main.Work(row, text(20), 1)])
    assert all(all(given_out(held, row.start, row.start + size)) for held in itertools.chain(*pool.layers))
    assert chosen.reserve(row, 3 * size)  # where it moves or grows, nothing is known of its pages
    chosen.forward([main.Work(row, text(size), 1)])
    assert all(all(given_out(held, row.start, row.start + 2 * size)) for held in itertools.chain(*pool.layers))
    assert not all(given_out(pool.layers[-1][-1], row.start + 3 * size, row.start + 4 * size))


# -- logits --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", tiny.FLAT)
def test_logits_in_company_in_pieces_and_from_a_prefix_are_those_of_the_network_by_itself(family):
    chosen, texts = tiny.model(family), [text(n, seed=n) for n in (70, 3, 33, 90, 17, 1, 400, 80)]
    with torch.inference_mode():
        alone = [chosen._network(input_ids=torch.tensor([tokens])).logits[0, -1] for tokens in texts]
    for piece, owner in ((1000, "one"), (150, "another"), (21, "a third"), (1, "a third")):
        rows, got = [opened(chosen, tokens, owner=owner) for tokens in texts], {}
        fed = [reused for _, reused in rows]
        assert fed == [len(tokens) - 1 if piece == 1 and len(tokens) > main.BLOCK_TOKENS else 0 for tokens in texts]
        while len(got) < len(texts):
            going = [n for n in range(len(texts)) if n not in got]
            work = [main.Work(rows[n][0], texts[n][fed[n]: fed[n] + piece], 1) for n in going]
            for n, item, logits in zip(going, work, chosen.forward(work), strict=True):
                fed[n] += len(item.tokens)
                if fed[n] == len(texts[n]):
                    got[n] = logits
        for n, (state, _) in enumerate(rows):
            assert float((got[n] - alone[n]).abs().max()) <= 1e-4
            chosen.close(state)


# -- what was computed before --------------------------------------------------------------------------------------
def cached(events):
    return next(event.cached_tokens for event in events if isinstance(event, main.Started))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_a_second_turn_computes_only_what_is_new(family):
    chosen = tiny.model(family)
    first = text(70)
    said, = run(chosen, [first], [24])
    second = first + tokens_of(said) + text(9, seed=2)
    again, = run(chosen, [second], [24])
    assert cached(said) == 0
    assert cached(again) == 70 + 23
    assert tokens_of(again) == generated(chosen._network, tuple(second), 24)


def test_the_very_same_prompt_still_computes_its_last_token():
    chosen, asked = tiny.model(), text(64)
    assert [cached(run(chosen, [asked], [9])[0]) for _ in range(3)] == [0, 63, 63]


def test_what_another_owner_or_another_picture_has_computed_is_not_found():
    chosen, asked = tiny.model(), text(64)
    run(chosen, [asked], [2], owner="one")
    assert cached(run(chosen, [asked], [2], owner="two")[0]) == 0
    assert cached(run(chosen, [asked], [2], owner="one")[0]) == 63
    assert opened(chosen, asked, b"picture", "one")[1] == 0


def test_a_prefix_is_reused_while_the_first_that_computed_it_still_runs():
    chosen = tiny.model()
    asked, ends, said = text(64), queue.SimpleQueue(), {"first": [], "second": []}
    engine = main.Engine(chosen, 4, 512)

    def submit(name, tokens):
        def emit(event):
            said[name].append(event)
            if name == "first" and len(said[name]) == 4:
                submit("second", [*asked[:50], *text(20, seed=3)])
            if isinstance(event, main.Finished):
                ends.put(name)

        engine.submit(main.Job(main.Prompt(tokens), main.Sampling(max_new_tokens=40, temperature=0.0), emit))

    submit("first", asked)
    engine.start()
    for _ in said:
        ends.get(timeout=60)
    engine.stop()
    assert cached(said["second"]) == 50
    assert tokens_of(said["first"]) == generated(chosen._network, tuple(asked), 40)
    assert tokens_of(said["second"]) == generated(chosen._network, (*asked[:50], *text(20, seed=3)), 40)


# -- room ----------------------------------------------------------------------------------------------------------
class Rows:
    """A pool and what must be in it: the number of each token, in every layer."""

    def __init__(self, units, context):
        layer = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4, 5)
        self.pool, self.texts = main.Pool([layer, layer], units * main.ROW_TOKENS, context), {}

    def open(self, tokens):
        if found := self.pool.open(tokens, 8):
            row, reused = found
            self.texts[row] = tokens[:reused]
            return row

    def feed(self, row, tokens):
        at = row.start + row.length
        for layer in itertools.chain(*self.pool.layers):
            layer[:, at: at + len(tokens)] = torch.tensor(tokens, dtype=torch.float32)[None, :, None]
        self.pool.grow(row, tokens)
        self.texts[row] = self.texts[row] + tokens

    def close(self, row, keep=True):
        del self.texts[row]
        self.pool.close(row, keep)

    def check(self):
        places = sorted((row.start, row.start + row.size) for row in self.texts)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        assert all(0 <= start < end <= self.pool.room[1] for start, end in places)
        for row, tokens in self.texts.items():
            assert row.length == len(tokens) <= row.size
            for layer in itertools.chain(*self.pool.layers):
                assert layer[0, row.start: row.start + row.length, 0].tolist() == tokens
        assert self.pool.room[0] == sum(row.size for row in self.texts)


@pytest.mark.parametrize("seed", range(6))
def test_rows_keep_what_is_theirs_however_they_come_grow_move_and_go(seed):
    rows, draw = Rows(24, 2300), random.Random(seed)
    stems = [text(900, seed=n) for n in range(4)]
    for _ in range(300):
        row = draw.choice([*rows.texts, None])
        match draw.choice(["open", "feed", "feed", "fork", "close", "drop", "tidy"]):
            case "open":
                stem = draw.choice(stems)[: draw.randrange(1, 900)]
                if row := rows.open(stem + text(draw.randrange(20), seed=draw.random().__hash__() % 1000)):
                    rows.feed(row, stem[row.length: row.length + draw.randrange(1, 900)])
            case "feed" if row:
                more = text(draw.randrange(1, 300))[: 2300 - row.length]
                if rows.pool.reserve(row, row.length + len(more)):
                    rows.feed(row, more)
            case "fork" if row and (fork := rows.pool.fork(row)):
                rows.texts[fork] = rows.texts[row]
            case "close" | "drop" as how if row:
                rows.close(row, how == "close")
            case "tidy":
                rows.pool.tidy()
        rows.check()
    for row in [*rows.texts]:
        rows.close(row)
    assert rows.pool.room == (0, 24 * main.ROW_TOKENS)


def test_room_that_nobody_uses_takes_no_memory():
    def resident():
        return psutil.Process().memory_info().rss

    layers = [(torch.zeros(1, 4, 4, 64, dtype=torch.bfloat16),) * 2] * 4
    before = resident()
    pool = main.Pool(layers, 2**18, 2**18)
    keys, _ = pool.layers[0]
    assert resident() - before < 2**27 < 2**30 < 8 * keys.nbytes
    assert (keys.dtype, keys.shape, float(keys[:, -1].abs().sum())) == (torch.bfloat16, (4, 2**18 + 1, 64), 0)


def test_rows_that_run_come_to_lie_side_by_side():
    rows = Rows(32, 512)
    made = [rows.open(text(20 + 300 * (n % 2), seed=n)) for n in range(20)]
    for n, row in enumerate(made):
        rows.feed(row, text(20 + 300 * (n % 2), seed=n))
    for row in made[::3]:
        rows.close(row)
    for _ in range(20):
        rows.pool.tidy()
        rows.check()
    spans = [*main.side_by_side(rows.texts)]
    assert len(spans) <= 4 < len(rows.texts)


def test_what_was_used_last_is_kept_longest():
    rows = Rows(4, 1024)
    for seed in (1, 2, 3, 4, 1, 5):
        row = rows.open(text(100, seed=seed))
        rows.feed(row, text(100, seed=seed)[row.length:])
        rows.close(row)
    assert {seed: rows.pool.open(text(100, seed=seed), 0)[1] > 0 for seed in (5, 1, 4)} == {5: True, 1: True, 4: True}


def test_a_sequence_that_failed_is_not_found_again():
    chosen, asked = tiny.model(), text(40)
    state, _ = opened(chosen, asked)
    chosen.forward([main.Work(state, asked, 1)])
    chosen.close(state, keep=False)
    assert opened(chosen, asked)[1] == 0


@pytest.mark.parametrize("gib, context", [(None, 512), (1.0, 512), (300 * 512 / 2**30, 256)])
def test_the_context_is_lowered_to_what_the_cache_holds(gib, context):
    assert main.Model("llama", tiny.tokenizer(), tiny.network("llama"), None, gib).context == context


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.95}, {"choices": 3, "temperature": 1.0},
                                     {"frequency_penalty": 0.5, "repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_answer_that_had_to_give_way_goes_on_as_if_it_had_not(family, options):
    asked, budgets = [text(n, seed=n) for n in (150, 140, 160)], [120, 130, 110]
    roomy, tight, refused = tiny.model(family), tiny.model(family, room=512), []
    reserve = tight.reserve
    tight.reserve = lambda *grown: reserve(*grown) or refused.append(grown)
    options = {"ignore_eos": True, **options}
    for before, after in zip(run(roomy, asked, budgets, **options), run(tight, asked, budgets, **options), strict=True):
        assert [tokens_of(after, n) for n in range(3)] == [tokens_of(before, n) for n in range(3)]
        assert Counter(map(type, after)) == Counter(map(type, before))
    assert refused and tight.runner == "flat batch"


def test_three_hundred_jobs_of_all_lengths_and_cancels_in_a_third_of_the_room_all_end_rightly():
    draw, threads = random.Random(1), threading.active_count()
    chosen = tiny.model(room=2048)  # 24 places, of 256 tokens at least
    sizes = [(draw.choice((5, 20, 90, 240)), draw.randrange(1, 40)) for _ in range(300)]
    asked = [text(size, seed=draw.randrange(40)) for size, _ in sizes]
    cut = {n: draw.randrange(1, 10) for n in draw.sample(range(300), 60)}
    engine, ends, said = main.Engine(chosen, 24, 64), queue.SimpleQueue(), [[] for _ in sizes]

    def emit(n, event):
        said[n].append(event)
        if len(said[n]) == cut.get(n):
            jobs[n].cancelled = True
        if isinstance(event, main.Finished | main.Failed) or len(said[n]) == cut.get(n):
            ends.put(n)

    jobs = [main.Job(main.Prompt(tokens), main.Sampling(max_new_tokens=budget, temperature=0.0, ignore_eos=True),
                     functools.partial(emit, n)) for n, (tokens, (_, budget)) in
            enumerate(zip(asked, sizes, strict=True))]
    for job in jobs:
        engine.submit(job)
    engine.start()
    ended = set()
    while len(ended) < 300:
        ended.add(ends.get(timeout=60))
    wait_until(lambda: chosen.room == (0, 2048))
    engine.stop()
    whole = run(tiny.model(), asked, [40] * 300, 64, ignore_eos=True)
    assert threading.active_count() == threads
    for n, (_, budget) in enumerate(sizes):
        tokens = tokens_of(said[n])
        assert tokens == tokens_of(whole[n])[: len(tokens)]
        assert n in cut or (len(tokens) == budget and said[n][-1] == main.Finished("length"))
