"""Tiny real models for tests: real architectures with random float32 weights, real tokenizers, nothing downloaded."""
from __future__ import annotations

import importlib.util
from pathlib import Path

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
    "qwen2_moe": {"seed": 1, "initializer_range": 0.3, "moe_intermediate_size": 32, "num_experts": 4,
                  "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
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

SEEING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
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


def seeing_model(tokenizer_folder, folder):
    """A checkpoint of 100 M random weights that sees, for timing alone; a picture of a megapixel is 1,300 tokens."""
    import transformers as t

    tokenizer = t.AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]})
    token = tokenizer.convert_tokens_to_ids
    text = {"vocab_size": len(tokenizer), "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 16,
            "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}}
    vision = {"depth": 12, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 576,
              "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [5, 11]}
    config = t.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"), vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        t.Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    t.Qwen2_5_VLProcessor(
        image_processor=t.Qwen2VLImageProcessor(max_pixels=2**20), video_processor=t.Qwen2VLVideoProcessor(),
        tokenizer=tokenizer, chat_template=SEEING).save_pretrained(folder)
    return str(folder)


def demo_as_gguf(file):
    """The demo model as bf16 GGUF: every matrix of the package's file dequantised, all else as it is."""
    import gguf

    package = Path(importlib.util.find_spec(main.DEMO_PACKAGE).origin).parent
    reader, bf16 = gguf.GGUFReader(package / main.DEMO_FILE), gguf.GGMLQuantizationType.BF16
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, *inner = value.types
            writer.add_key_value(name, value.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = bf16 if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)
