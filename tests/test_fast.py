"""Weights of fewer bits: how close they come, what cannot be had. Steps compiled or captured: no answer changes."""
from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiny
import torch
from conftest import chat, main, tokens_of
from test_batch import text
from test_model import run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.usefixtures("one_thread")


def packed(family, to_int8=True):
    network = tiny.network(family)
    main.pack_linears(network, to_int8)
    return network


def logits(network, tokens):
    with torch.inference_mode():
        return network(input_ids=torch.tensor([tokens])).logits


def apart(network, other, tokens):
    return main._apart(logits(network, tokens), logits(other, tokens))


# -- int8 on a processor -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss", "gpt2"])
def test_int8_logits_are_close_to_those_of_the_weights_they_are_made_from(family):
    assert 0 < apart(tiny.network(family), packed(family), text(40)) <= 0.05


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_network_runs_with_int8_weights_in_the_runner_that_it_had(family):
    assert main.Model(family, tiny.tokenizer(), packed(family)).runner == tiny.model(family).runner


@pytest.mark.parametrize("memory", [0, 2**60])
def test_int8_answers_are_the_same_alone_and_in_company_with_and_without_room_for_blocks(memory, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
    network = packed("llama")
    assert (network.lm_head.blocks is None) is (memory == 0)
    monkeypatch.undo()
    asked = [text(n, seed=n) for n in (5, 33, 17, 60, 2, 40, 9, 21)]
    made = main.Model("llama", tiny.tokenizer(), network)
    alone = [tokens_of(run(made, [prompt], [24])[0]) for prompt in asked]
    together = [tokens_of(events) for events in run(made, asked, [24] * len(asked))]
    assert together == alone and len({*alone[0]}) > 8


@pytest.mark.parametrize("to_int8", [True, False])
def test_packed_weights_are_read_back_as_they_are_computed_with(to_int8):
    weight = tiny.network("llama").lm_head.weight
    read = packed("llama", to_int8).lm_head.weight
    assert (read - weight).abs().max() <= (weight.abs().amax() / 254 if to_int8 else 0)


def test_the_embedding_that_a_head_is_tied_to_stays_as_it_is():
    network = tiny.network("llama")
    network.lm_head.weight = network.model.embed_tokens.weight
    before = network.model.embed_tokens.weight.clone()
    main.pack_linears(network, to_int8=True)
    assert torch.equal(network.model.embed_tokens.weight, before)
    assert type(network.lm_head).__name__ == "Packed"


@pytest.mark.parametrize(("options", "int8", "blocks"), [
    ({"quantization": "int8"}, torch.int8, torch.float32), ({}, None, None),
    ({"quantization": "int8", "torch_dtype": "bfloat16"}, torch.int8, torch.bfloat16),
    ({"torch_dtype": "bfloat16"}, None, torch.bfloat16)])
def test_weights_are_loaded_as_int8_where_the_operator_asks_for_it_and_bf16_in_blocks(tmp_path, options, int8, blocks):
    tiny.network("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    chosen = main.Settings(model_repo_id=str(tmp_path), device_map="cpu", **options)
    loaded = main.load_model(chosen, lambda _: None)
    head = loaded._network.lm_head
    found = [getattr(getattr(head, name, None), "dtype", None) for name in ("int8", "blocks")]
    assert loaded.runner == "flat batch" and found == [int8, blocks]


@pytest.mark.parametrize("to_int8", [None, False, True])
def test_other_weights_are_another_model_however_they_are_kept(to_int8):
    def fingerprint(change=0.0):
        network = tiny.network("llama")
        with torch.no_grad():
            network.model.layers[1].self_attn.k_proj.weight += change
        if to_int8 is not None:
            main.pack_linears(network, to_int8)
        return main.Model("llama", tiny.tokenizer(), network).fingerprint

    assert fingerprint() == fingerprint() != fingerprint(0.01)


def in_huge_pages():
    told = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(told[1]) * 1024


def test_what_is_read_most_lies_in_huge_pages_where_the_system_can():
    held = torch.ones(2**24)
    first = -(-held.data_ptr() // main.HUGE_PAGE) * main.HUGE_PAGE
    if sys.platform != "linux" or ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(main.HUGE_PAGE), main.MADV_COLLAPSE):
        pytest.skip("the system has no such pages")
    before = in_huge_pages()
    main.use_huge_pages()
    assert in_huge_pages() > before + held.nbytes // 2 and bool((held == 1).all())


def test_only_the_engines_thread_shares_its_work_out_to_several_cores(client):
    chosen, counts = tiny.model("llama"), {}

    def note(name, call):
        setattr(chosen, name, lambda *given: (counts.update({name: torch.get_num_threads()}), call(*given))[1])

    note("prepare", chosen.prepare)
    note("forward", chosen.forward)
    torch.set_num_threads(3)  # of every thread that has not computed yet
    assert client(chosen).post("/v1/chat/completions", json=chat("hi", max_tokens=2)).status_code == 200
    assert counts == {"prepare": 1, "forward": 3}


# -- what others quantise ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("chosen", "gguf", "words"), [
    ("int4", None, "needs a GPU: choose `int8`"), ("bnb-4bit", None, "pip install bitsandbytes"),
    ("bnb-8bit", None, "pip install bitsandbytes"), ("bnb-4bit", "a.gguf", "GGUF")])
def test_what_cannot_be_had_is_refused_in_one_sentence_that_says_what_to_do(chosen, gguf, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = main.Settings(device_map="cpu", quantization=chosen)
    with pytest.raises(main.ApiError, match=words) as refusal:
        main._quantization(settings, gguf is not None, torch.bfloat16)
    assert (refusal.value.status_code, refusal.value.code) == (503, "model_load_failed")


# -- compiled steps ------------------------------------------------------------------------------------------------
ASKED = [text(n, seed=n) for n in (5, 33, 17, 60, 2)]


def as_it_is(graph, inputs):
    """In place of the compiler: the traced graph, run node by node."""
    return lambda *given: graph(*given)


def compiled(family, by=as_it_is, sizes=(1, 4)):
    chosen = tiny.model(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "COMPILED_SIZES", sizes)
        chosen.compile(by).join()
    return chosen


def served(chosen):
    """What it answers, and the sizes of the compiled steps that it takes for that; those that are tried bring codes."""
    steps, seen = chosen._runner.compiled, []
    run_step = steps.run
    steps.run = lambda size, *args, **options: (
        seen.append(size if "codes" not in options else None), run_step(size, *args, **options))[1]
    return answers(chosen), {*seen} - {None}


def answers(chosen):
    return [tokens_of(events) for events in run(chosen, ASKED, [24, 20, 16, 12, 8], ignore_eos=True)]


HALF_ONLY = {"gpt_oss", "qwen3_moe", "qwen2_moe"}  # the product of their experts is traced in half precision only


@pytest.mark.parametrize("family", [family for family in tiny.FLAT if family not in HALF_ONLY])
def test_compiled_steps_give_the_same_answers_however_many_run(family):
    said, sizes = served(compiled(family))
    assert said == answers(tiny.model(family))
    assert sizes == {1, 4}


def test_the_compilers_own_code_gives_the_same_answers():
    said, sizes = served(compiled("llama", main.inductor, (4,)))
    assert said == answers(tiny.model("llama"))
    assert sizes == {4}


def test_a_few_tokens_of_a_prompt_are_a_compiled_step_too():
    chosen, plain, found = compiled("mistral", sizes=(32,)), tiny.model("mistral"), []
    steps, run_step = chosen._runner.compiled, chosen._runner.compiled.run
    steps.run = lambda size, *args, **options: found.append(size) or run_step(size, *args, **options)
    logits = []
    for one in (chosen, plain):
        rows = [one.open(tokens, 8, main.Prompt(tokens), "")[0] for tokens in ASKED[:2]]
        one.forward([main.Work(row, tokens, 1) for row, tokens in zip(rows, ASKED, strict=False)])
        logits.append(one.forward([main.Work(rows[0], [5], 1), main.Work(rows[1], [*range(7, 29)], 1)]))
    assert found[-1] == 32
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-4


def test_layers_that_are_alike_share_their_code():
    assert len(compiled("mistral", sizes=(4,))._runner.compiled._codes) == 1
    assert len(compiled("gemma3_text", sizes=(4,))._runner.compiled._codes) == 2


def test_answers_go_on_while_steps_are_being_compiled():
    chosen, gate = tiny.model("llama"), threading.Event()

    def slow(graph, inputs):
        assert gate.wait(60)
        return as_it_is(graph, inputs)

    thread = chosen.compile(slow)
    said, sizes = served(chosen)
    assert said == answers(tiny.model("llama")) and not sizes
    gate.set()
    thread.join()
    assert served(chosen)[1]


def refused(graph, inputs):
    raise RuntimeError("cannot be compiled")


@pytest.mark.parametrize("by", [refused, lambda graph, inputs: lambda *given: graph(*given) + 1])
def test_steps_that_cannot_be_compiled_or_come_out_wrong_run_as_they_are(by):
    said, sizes = served(compiled("llama", by))
    assert said == answers(tiny.model("llama")) and not sizes


def test_compiled_code_that_fails_later_on_costs_no_answer():
    left = iter(range(20))
    chosen = compiled("llama", lambda graph, inputs: lambda *given: (next(left), graph(*given))[1])
    assert chosen._runner.compiled._sizes
    assert answers(chosen) == answers(tiny.model("llama")) and chosen._runner.compiled is None


@pytest.mark.parametrize("family", sorted(HALF_ONLY))
def test_experts_are_compiled_in_half_precision(family):
    chosen = main.Model(family, tiny.tokenizer(), tiny.network(family).to(torch.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "COMPILED_SIZES", (4,))
        chosen.compile(as_it_is).join()
    assert {*chosen._runner.compiled._sizes} == {4}


@pytest.mark.parametrize("to_int8", [True, False])
def test_packed_weights_are_compiled_too(to_int8):
    chosen = main.Model("llama", tiny.tokenizer(), packed("llama", to_int8))
    chosen.compile(as_it_is).join()
    assert {8, 1} <= {*chosen._runner.compiled._sizes}
    assert answers(chosen) == answers(main.Model("llama", tiny.tokenizer(), packed("llama", to_int8)))


def test_compiled_code_calls_the_product_of_packed_weights_itself():
    chosen = main.Model("llama", tiny.tokenizer(), packed("llama", to_int8=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "COMPILED_SIZES", (1,))
        chosen.compile(main.inductor).join()
    said, sizes = served(chosen)
    assert said == answers(main.Model("llama", tiny.tokenizer(), packed("llama", to_int8=False)))
    assert sizes == {1}
    row, _ = chosen.open([5], 8, main.Prompt([5]), "")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        chosen.forward([main.Work(row, [5], 1)])
    names = {event.key.rpartition("_")[0] for event in seen.key_averages()}
    assert {"mkldnn::_linear", "server::attend"} <= names and "server::product" not in names


def test_a_layers_tensors_are_found_in_the_order_of_pytree():
    a, b, c, d, e = torch.zeros(5)
    call = ((a, None, [b]), {"z": (c, {"y": d, "x": 1}), "a": e, "plan": object()})
    want = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    assert [id(found) for found in main._tensors(call)] == [id(leaf) for leaf in want] and len(want) == 5


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_compiled_at_load_is_for_the_operator_to_say(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(main, "COMPILED_SIZES", ())
    tiny.network("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    chosen = main.Settings(model_repo_id=str(tmp_path), device_map="cpu", compile=wanted)
    assert (main.load_model(chosen, lambda _: None)._runner.compiled is not None) is wanted
    for thread in threading.enumerate():  # it has to see what is patched
        if thread.name == "compiler":
            thread.join()


def test_a_network_that_is_no_flat_batch_is_not_compiled():
    assert tiny.model("gemma2").compile(as_it_is) is None


# -- steps as graphs -----------------------------------------------------------------------------------------------
NOT_RECORDED = {"gpt2"}  # it reads a number back from the device, which no graph can


class Recorder(TorchDispatchMode):
    """Notes the tensor operations of a run, to run them again over the same memory without any of its Python."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a number is read back from the device"
        made = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, made))
        return made

    def run(self):
        now = {}
        for operation, args, kwargs, made in self.calls:
            args, kwargs = tree_map(lambda value: now.get(id(value), value), (args, kwargs))
            for old, new in zip(tree_leaves(made), tree_leaves(operation(*args, **kwargs)), strict=True):
                now[id(old)] = new
        return new


def recorded(step):
    """In place of CUDA's graphs."""
    step()
    with Recorder() as recorder:
        step()
    return recorder.run


def graphed(family, capture=recorded):
    chosen = tiny.model(family)
    chosen.graph(capture)
    return chosen


@pytest.mark.parametrize("family", [family for family in tiny.FLAT if family not in NOT_RECORDED])
def test_graphs_give_the_same_answers_however_many_run_and_move(family):
    chosen = graphed(family)
    assert answers(chosen) == answers(tiny.model(family))
    assert {rows for rows, _ in chosen._runner.graphs._graphs} >= {1, 2, 4}
    captured, replayed = {*chosen._runner.graphs._graphs}, []
    graphs = chosen._runner.graphs._graphs
    for shape, (told, graph) in graphs.items():
        graphs[shape] = told, lambda graph=graph, shape=shape: (replayed.append(shape), graph())[1]
    assert answers(chosen) == answers(tiny.model(family))  # in other rows, beside what has ended
    assert {*replayed} == captured


def test_a_graph_sees_as_much_as_the_longest_row_needs():
    asked, budgets = [text(250, seed=1), text(400, seed=2), text(9, seed=3)], [16, 20, 24]
    chosen = graphed("mistral")
    said = [tokens_of(events) for events in run(chosen, asked, budgets, chunk=600, ignore_eos=True)]
    assert said == [tokens_of(e) for e in run(tiny.model("mistral"), asked, budgets, chunk=600, ignore_eos=True)]
    assert {length for _, length in chosen._runner.graphs._graphs} == {256, 512}


def test_the_graphs_that_are_kept_are_the_last_ones_used(monkeypatch):
    monkeypatch.setattr(main, "MAX_GRAPHS", 2)
    chosen = graphed("llama")
    assert answers(chosen) == answers(tiny.model("llama"))
    assert [rows for rows, _ in chosen._runner.graphs._graphs] == [2, 1]


def test_steps_that_would_gather_too_much_run_as_they_are(monkeypatch):
    monkeypatch.setattr(main, "GRAPHED_TOKENS", 256)
    chosen = graphed("llama")
    assert answers(chosen) == answers(tiny.model("llama"))
    assert {*chosen._runner.graphs._graphs} == {(1, 256)}


@pytest.mark.parametrize("capture", [lambda step: refused(step, ()), lambda step: lambda: step() + 1])
def test_steps_that_cannot_be_captured_or_come_out_wrong_run_as_they_are(capture):
    chosen = graphed("llama", capture)
    assert answers(chosen) == answers(tiny.model("llama"))
    assert chosen._runner.graphs is None


def test_a_network_that_is_no_flat_batch_has_no_graphs():
    chosen = graphed("gemma2")
    assert isinstance(chosen._runner, main.SoloRunner) and answers(chosen) == answers(tiny.model("gemma2"))


def test_without_a_cuda_device_nothing_is_captured(tmp_path):
    tiny.network("llama").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    chosen = main.Settings(model_repo_id=str(tmp_path), device_map="cpu", cuda_graphs=True)
    assert main.load_model(chosen, lambda _: None)._runner.graphs is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_on_a_cuda_device_graphs_give_the_same_answers(family):
    def made():
        return main.Model(family, tiny.tokenizer(), tiny.network(family).to("cuda"))

    chosen = made()
    chosen.graph()
    assert answers(chosen) == answers(made())
    assert {rows for rows, _ in chosen._runner.graphs._graphs} >= {1, 2, 4}
