"""The engine over a scripted model: who gets what in a step, what ends a job, and what ends nothing else."""
from __future__ import annotations

import queue
import threading
from collections import Counter

import pytest
from conftest import END, ScriptedModel, content_of, main, wait_until

WORDS = [f"w{n} " for n in range(20)]


class Recorder(ScriptedModel):
    """Notes who is fed how much in each step, as (sequence, tokens); `held`, each step waits for `let_go`."""

    def __init__(self, *words, held=False, pieces=True, **options):
        super().__init__(*words, **options)
        self.prefills_in_pieces, self.held = pieces, held
        self.steps = []
        self.entered, self.let_go = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, work):
        self.steps.append([(item.state, len(item.tokens)) for item in work])
        super().forward(work)
        if self.held:
            self.entered.release()
            assert self.let_go.acquire(timeout=20)

    def inside(self):
        assert self.entered.acquire(timeout=20)

    def step(self):
        """Let the step that waits go, and wait for the next one."""
        self.let_go.release()
        self.inside()


class Hall:
    """An engine and what its jobs said, in order, as (job's name, event)."""

    def __init__(self, model, places=4, chunk=16, lone=0):
        self.engine = main.Engine(model, places, chunk, lone_batch=lone)
        self.said = []
        self.ends = queue.SimpleQueue()

    def submit(self, name, budget=3, prompt=1, on_event=None, media=None):
        def emit(event):
            self.said.append((name, event))
            if on_event:
                on_event(job, event)
            if isinstance(event, main.Finished | main.Failed):
                self.ends.put(name)

        options = main.Sampling(max_new_tokens=budget, temperature=0.0)
        job = main.Job(main.Prompt([1] * prompt, media=media), options, emit)
        self.engine.submit(job)
        return job

    def wait(self, count=1):
        return [self.ends.get(timeout=20) for _ in range(count)]

    def of(self, name):
        return [event for who, event in self.said if who == name]

    def text(self, name):
        return "".join(content_of(event.deltas) for event in self.of(name) if isinstance(event, main.Produced))

    def tellers(self):
        return [who for who, event in self.said if isinstance(event, main.Produced)]


@pytest.fixture
def hall():
    """`hall(model, places, chunk)` is a Hall whose engine is not yet started, and is stopped at the end."""
    halls = []

    def make(*args, **options):
        halls.append(Hall(*args, **options))
        return halls[-1]

    yield make
    for each in halls:
        each.engine.stop()


def started(hall):
    hall.engine.start()
    return hall


def cancel(job, _=None):
    job.cancelled = True


# -- turns ---------------------------------------------------------------------------------------------------------
def test_jobs_take_turns_token_by_token(hall):
    h = hall(ScriptedModel(*WORDS))
    for name in "abc":
        h.submit(name, budget=4)
    started(h).wait(3)
    assert h.tellers() == list("abc" * 4)


def test_a_long_prompt_is_computed_in_chunks_between_the_tokens_of_others(hall):
    model = Recorder(*WORDS)
    h = hall(model, chunk=16)
    h.submit("short", budget=8)
    h.submit("long", budget=2, prompt=60)
    started(h).wait(2)
    assert [dict(step).get(1) for step in model.steps[:6]] == [15, 15, 15, 15, 1, None]
    assert h.tellers() == ["short"] * 3 + ["short", "long"] * 2 + ["short"] * 3


def test_prompts_with_media_go_whole_and_alone_every_other_step_and_are_let_go(hall):
    model = Recorder(*WORDS)
    h = hall(model, chunk=16)
    jobs = [h.submit("words", budget=6, prompt=20), *(h.submit(n, budget=1, prompt=60, media="seen") for n in "abc")]
    started(h).wait(4)
    assert model.steps[:6] == [[(1, 60)], [(0, 16)], [(2, 60)], [(0, 4)], [(3, 60)], [(0, 1)]]
    assert [job.prompt.media for job in jobs] == [None] * 4


def test_a_step_computes_no_more_of_all_prompts_together_than_one_chunk(hall):
    model = Recorder(*WORDS)
    h = hall(model, chunk=16)
    for n, size in enumerate((7, 50, 16, 3)):
        h.submit(n, budget=2, prompt=size)
    started(h).wait(4)
    fed, sizes = Counter(), {0: 7, 1: 50, 2: 16, 3: 3}
    for step in model.steps:
        assert sum(size for who, size in step if fed[who] < sizes[who]) <= 16
        fed.update(dict(step))
    assert fed == Counter({who: size + 1 for who, size in sizes.items()})


def test_short_prompts_overtake_a_long_one_which_keeps_half_of_each_step(hall):
    model = Recorder(*WORDS)
    h = hall(model, chunk=16)
    for name, size in (("first", 64), ("second", 20), ("third", 10)):
        h.submit(name, budget=1, prompt=size)
    assert started(h).wait(3) == ["third", "second", "first"]
    assert [dict(step).get(0, 0) for step in model.steps] == [8, 8, 8, 10, 16, 14]


def test_a_prompt_takes_larger_steps_while_it_is_alone(hall):
    model = Recorder(*WORDS)
    h = hall(model, chunk=16, lone=40)
    h.submit("short", budget=1, prompt=24)
    h.submit("long", budget=2, prompt=120)
    started(h).wait(2)
    assert [dict(step) for step in model.steps] == [{0: 16}, {0: 8, 1: 8}, {1: 40}, {1: 40}, {1: 32}, {1: 1}]


def test_a_prompt_goes_whole_to_a_model_that_cannot_take_it_in_pieces(hall):
    model = Recorder(*WORDS, pieces=False)
    h = hall(model, chunk=16)
    h.submit("a", budget=2, prompt=60)
    h.submit("b", budget=2, prompt=20)
    started(h).wait(2)
    assert model.steps == [[(0, 60)], [(0, 1), (1, 20)], [(1, 1)]]


def test_places_are_bounded_and_given_in_the_order_of_asking(hall):
    model = Recorder(*WORDS)
    h = hall(model, places=2)
    for n in range(6):
        h.submit(n, budget=3)
    started(h).wait(6)
    assert [who for who, event in h.said if event == main.Started()] == list(range(6))
    assert max(len(step) for step in model.steps) == 2


def test_a_place_goes_to_the_next_as_soon_as_one_is_free(hall):
    model = Recorder(*WORDS)
    h = hall(model, places=2)
    for n, budget in enumerate((1, 5, 4)):
        h.submit(n, budget=budget)
    started(h).wait(3)
    assert [[who for who, _ in step] for step in model.steps] == [[0, 1], *[[1, 2]] * 4]


# -- what a job says -----------------------------------------------------------------------------------------------
def test_a_job_says_that_it_started_then_its_tokens_then_its_end(hall):
    h = hall(ScriptedModel("Hel", "lo"))
    h.submit("a", budget=9)
    started(h).wait()
    made, text = main.Produced, main.TextDelta
    assert h.of("a") == [main.Started(), made(1, (text("Hel"),)), made(2, (text("lo"),)), made(END),
                         main.Finished("stop")]


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_a_budget_is_met_exactly(hall, budget):
    model = ScriptedModel(*WORDS)
    h = hall(model)
    h.submit("a", budget=budget, prompt=40)
    started(h).wait()
    assert h.text("a") == "".join(WORDS[:budget])
    assert h.of("a")[-1] == main.Finished("length")
    assert model.drawn == budget


def test_an_answer_that_ends_with_its_budget_ended_by_itself(hall):
    h = hall(ScriptedModel("a", "b"))
    h.submit("a", budget=3)
    started(h).wait()
    assert h.of("a")[-1] == main.Finished("stop")


# -- cancelling ----------------------------------------------------------------------------------------------------
def test_a_job_cancelled_while_it_waits_is_never_begun(hall):
    model = Recorder(*WORDS, held=True)
    h = started(hall(model, places=1))
    h.submit("runs", budget=2)
    model.inside()
    waits = h.submit("waits")
    h.submit("next", budget=1)
    model.step()  # "waits" is in the queue now
    cancel(waits)
    model.step()
    model.let_go.release()
    assert h.wait(2) == ["runs", "next"]
    assert h.of("waits") == []
    assert model.opened == 2


def test_a_job_cancelled_in_prefill_gets_no_further_chunk(hall):
    model = Recorder(*WORDS, held=True)
    h = started(hall(model, chunk=16))
    job = h.submit("long", prompt=100)
    h.submit("other", budget=4)
    model.inside()
    cancel(job)
    for _ in range(3):
        model.step()
    model.let_go.release()
    h.wait()
    assert [size for step in model.steps for who, size in step if who == 0] == [15]
    assert h.of("long") == [main.Started()]


def test_a_job_cancelled_between_two_tokens_says_no_more(hall):
    model = Recorder(*WORDS)
    h = hall(model)
    second = main.Produced(2, (main.TextDelta("w1 "),))
    h.submit("a", budget=9, on_event=lambda job, event: event == second and cancel(job))
    h.submit("b", budget=9)
    started(h).wait()
    assert h.text("a") == "w0 w1 " and h.of("a")[-1] == second
    assert sum(who == 0 for step in model.steps for who, _ in step) == 2
    assert h.text("b") == "".join(WORDS[:9])


def test_a_job_cancelled_during_its_step_is_in_no_later_one(hall):
    model = Recorder(*WORDS, held=True)
    h = started(hall(model))
    job = h.submit("a", budget=9)
    model.inside()
    model.step()
    cancel(job)
    h.submit("b", budget=2)
    model.step()
    said = list(h.of("a"))
    model.step()
    model.let_go.release()
    h.wait()
    assert [[who for who, _ in step] for step in model.steps] == [[0], [0], [1], [1]]
    assert h.of("a") == said


def test_a_cancelled_job_gives_its_place_to_the_next(hall):
    h = hall(ScriptedModel(*WORDS), places=1)
    h.submit("a", budget=9, on_event=cancel)
    h.submit("b", budget=2)
    started(h).wait()
    assert h.text("b") == "w0 w1 "


# -- faults --------------------------------------------------------------------------------------------------------
def test_a_step_that_fails_ends_its_jobs_and_the_engine_goes_on(hall):
    h = hall(ScriptedModel(*WORDS, fail_at=3), places=2)
    for name, budget in (("a", 9), ("b", 9), ("c", 3)):
        h.submit(name, budget=budget)
    assert sorted(started(h).wait(3)) == ["a", "b", "c"]
    for name in "ab":
        assert h.text(name) == "w0 w1 w2 "
        assert h.of(name)[-1].error.code == "generation_failed"
    assert h.of("c")[-1] == main.Finished("length")


def test_a_step_that_fails_spares_the_job_that_it_did_not_feed(hall):
    h = hall(ScriptedModel(*WORDS, fail_at=1), places=2, chunk=16)
    h.submit("answers", budget=9)
    h.submit("prefills", budget=1, prompt=60)
    h.submit("waits", budget=1, prompt=20)
    started(h).wait(3)
    assert [type(h.of(name)[-1]) for name in ("answers", "prefills", "waits")] == [
        main.Failed, main.Failed, main.Finished]


def test_a_job_whose_memory_cannot_be_had_fails_and_the_engine_goes_on(hall):
    class Full(ScriptedModel):
        def open(self, *arguments):
            opened = super().open(*arguments)
            if self.opened == 1:
                raise MemoryError
            return opened

    h = hall(Full(*WORDS))
    h.submit("a")
    started(h).wait()
    h.submit("b")
    h.wait()
    assert [type(event) for event in h.of("a")] == [main.Failed]
    assert h.of("b")[-1] == main.Finished("length")


class Tight(ScriptedModel):
    """Has memory for so many sequences in a step."""

    def __init__(self, *words, holds=2, **options):
        super().__init__(*words, fault=(503, "server_overloaded"), **options)
        self.holds, self.freed = holds, 0

    def forward(self, work):
        if len(work) > self.holds:
            raise MemoryError
        super().forward(work)

    def free_memory(self):
        self.freed += 1


def test_out_of_memory_the_newest_job_fails_and_the_others_go_on_as_if_nothing_had_been(hall):
    model = Tight(*WORDS)
    h = hall(model)
    for name in "abcd":
        h.submit(name, budget=5, prompt=9)
    assert started(h).wait(4)[:2] == ["d", "c"]
    assert [h.of(name)[-1].error.code for name in "cd"] == ["server_overloaded"] * 2
    assert [h.text(name) for name in "ab"] == ["".join(WORDS[:5])] * 2
    assert model.freed == 2 and h.of("a").count(main.Started()) == 1


class Rooms(ScriptedModel):
    """Has so many tokens of room for all sequences together."""

    def __init__(self, *words, tokens, **options):
        super().__init__(*words, **options)
        self.tokens, self.held, self.most = tokens, {}, 0

    def open(self, tokens, budget, prompt, owner):
        state, _ = super().open(tokens, budget, prompt, owner)
        return (state, 0) if self.reserve(state, len(tokens)) else None

    def reserve(self, state, length):
        if sum(self.held.values()) - self.held.get(state, 0) + length > self.tokens:
            return False
        self.held[state] = length
        self.most = max(self.most, sum(self.held.values()))
        return True

    def close(self, state, keep=True):
        del self.held[state]


def test_jobs_wait_for_room_and_the_newest_gives_way_to_those_that_grow(hall):
    model = Rooms(*WORDS, tokens=50)
    h = hall(model)
    for name in "abcd":
        h.submit(name, budget=15, prompt=12)
    assert started(h).wait(4) == list("abcd")
    assert {h.text(name) for name in "abcd"} == {"".join(WORDS[:15])}
    assert all([type(event) for event in h.of(name)].count(main.Started) == 1 for name in "abcd")
    assert model.opened > 4 and model.most <= 50 and not model.held


def test_what_no_room_will_ever_do_for_is_refused(hall):
    h = hall(Rooms(*WORDS, tokens=50))
    h.submit("large", prompt=60)
    h.submit("small")
    assert started(h).wait(2) == ["large", "small"]
    assert h.of("large")[-1].error.code == "server_overloaded" and h.of("small")[-1] == main.Finished("length")


def test_without_its_device_every_job_ends_and_the_engine_says_so(hall):
    h, lost = hall(ScriptedModel(*WORDS, fail_at=2, fault=(503, "device_lost")), places=2), queue.SimpleQueue()
    h.engine = main.Engine(h.engine._model, 2, 16, lambda: lost.put([type(h.of(name)[-1]) for name in "ab"]))
    for name in "abc":
        h.submit(name, budget=9)
    assert sorted(started(h).wait(3)) == ["a", "b", "c"]
    assert main.Failed not in lost.get(timeout=20)  # before anybody else hears of it
    assert {h.of(name)[-1].error.code for name in "abc"} == {"device_lost"}


# -- the thread ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("running", [False, True])
def test_stop_ends_the_thread(hall, running):
    before = set(threading.enumerate())
    h = started(hall(ScriptedModel(*WORDS, seconds=0.01)))
    thread, = set(threading.enumerate()) - before
    if running:
        h.submit("endless", budget=10**6)
        h.engine.submit(main.Job(main.Prompt([1] * 10**6), main.Sampling(max_new_tokens=1), lambda _: None))
        wait_until(lambda: h.said)
    h.engine.stop()
    wait_until(lambda: not thread.is_alive())


def test_a_hundred_jobs_from_eight_threads_all_end_with_their_own_answer(hall):
    h = started(hall(ScriptedModel(*WORDS), places=7, chunk=16))
    budgets = {n: 1 + n % 11 for n in range(100)}

    def submit(mine):
        for n in mine:
            h.submit(n, budget=budgets[n], prompt=1 + n)

    threads = [threading.Thread(target=submit, args=(range(k, 100, 8),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(h.wait(100)) == list(range(100))
    assert {n: h.text(n) for n in budgets} == {n: "".join(WORDS[:size]) for n, size in budgets.items()}
