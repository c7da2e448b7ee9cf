"""Tiny real models for tests: real architectures with random float32 weights, real tokenizers, nothing downloaded."""
from __future__ import annotations

import torch
from conftest import main
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY, CONTEXT = 320, 512
END, PROMPT_LENGTHS = 2, (5, 23, 40, 90)

# Seeds, sizes and scales of the weights are such that greedy answers keep changing: at the library's own scale, most
# tiny models fall silent on one or two tokens, and every wrong answer would look right.
FAMILIES = {
    "llama": {"seed": 5},
    "qwen3": {"seed": 6, "num_hidden_layers": 4, "initializer_range": 0.02},
    "gemma3_text": {"seed": 9, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {"seed": 7, "num_hidden_layers": 4, "initializer_range": 0.02, "sliding_window": 16},
    "gpt2": {"seed": 7, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.02},
    "qwen2": {"seed": 2, "num_hidden_layers": 4, "initializer_range": 0.3},
    "phi3": {"seed": 1},
    "smollm3": {"seed": 1, "num_hidden_layers": 4, "initializer_range": 0.3, "no_rope_layers": [1, 1, 1, 0]},
    "gpt_oss": {"seed": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen3_moe": {"seed": 1, "initializer_range": 0.05, "moe_intermediate_size": 32, "num_experts": 4,
                  "num_experts_per_tok": 2},
    "gemma2": {"seed": 1, "initializer_range": 0.3, "sliding_window": 16},
    "qwen3_next": {"seed": 1, "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                   "linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32,
                   "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
    "jamba": {"seed": 1, "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 2,
              "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "falcon_h1": {"seed": 5, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                  "mamba_chunk_size": 16},
    "mamba2": {"seed": 1, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mamba": {"seed": 1},
    "recurrent_gemma": {"seed": 5, "num_hidden_layers": 3, "attention_window_size": 16},
}
WHOLE_PROMPTS_ONLY = {"mamba", "recurrent_gemma", "jamba"}
RUN_ALONE = {"recurrent_gemma"}
OF_THEIR_OWN = {"falcon_h1", "mamba2", "gemma2", "qwen3_next"} | WHOLE_PROMPTS_ONLY  # kinds of cache or attention
FLAT = [family for family in FAMILIES if family not in OF_THEIR_OWN]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def network(family):
    """A network of that family, always the same."""
    options = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT,
        "initializer_range": 0.1, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": END, **FAMILIES[family]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.pop("seed"))
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=torch.float32).eval()


def tokenizer(template=CHATML):
    """A byte-level tokenizer as GPT-2, Llama 3 and Qwen have it, with ChatML's control tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["the cat and the dog are in the house; system, user and assistant are there and then they are not."],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template,
        model_max_length=CONTEXT)


def byte_fallback_backend():
    """A tokenizer as SentencePiece models have it (Llama 2, Gemma, Mistral): blanks are `▁`, rare characters bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "▁a"]
    backend = Tokenizer(models.BPE({p: n for n, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>",
                                   byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def pieces_backend(pieces):
    """A tokenizer with these texts as its tokens, and their ids."""
    ids = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordLevel(ids, unk_token=pieces[0]))
    backend.decoder = decoders.Fuse()
    return backend, [ids[piece] for piece in pieces]


def model(family="llama", template=CHATML, max_context=None, room=None):
    """The server's own Model over a tiny network; `room` in tokens, two layers of two heads of 16 numbers each."""
    gib = room and room * 2 * 2 * 2 * 16 * 4 / 2**30
    return main.Model(family, tokenizer(template), network(family), max_context, gib)
