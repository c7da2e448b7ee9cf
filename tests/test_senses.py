"""Eyes and ears: tiny models of real families, built here, against transformers' own processor and `generate`."""
from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import io
import json
import os
import queue
import secrets
import socket
import subprocess
import wave
from concurrent.futures import ThreadPoolExecutor

import av
import httpx2
import numpy
import pytest
import tiny
import torch
from conftest import main, parse_sse, text_of, tokens_of, wait_until
from PIL import Image
from test_media import slow_pdf
from transformers import AutoModelForMultimodalLM, AutoProcessor

TEXT = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "bos_token_id": 1, "eos_token_id": tiny.END, "pad_token_id": 0, "tie_word_embeddings": False,
        "initializer_range": 0.2}  # at a smaller scale answers repeat themselves
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14,
        "initializer_range": 0.1}


def template(**written):
    """ChatML that writes parts; like many such templates, it takes no plain strings."""
    parts = "".join(f"{{% elif c.type == '{kind}' %}}{text}" for kind, text in written.items())
    return ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}"
            "{{ c.text }}" + parts + "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def reader(chat_template, *tokens, **named):
    """The tiny tokenizer with further control tokens; some have a name that processors ask for."""
    made = tiny.tokenizer(chat_template)
    made.add_special_tokens({"additional_special_tokens": [*tokens, *named.values()]})
    made._set_model_specific_special_tokens(named)
    made.model_max_length = 2048
    return made, made.convert_tokens_to_ids


def qwen(family):
    import transformers as t

    tokenizer, token = reader(
        template(**{kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}),
        "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokens = {"image_token_id": token("<|image_pad|>"), "video_token_id": token("<|video_pad|>"),
              "vision_start_token_id": token("<|vision_start|>"), "vision_end_token_id": token("<|vision_end|>")}
    size = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 36}
    if family == "qwen2_5_vl":
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64,
                  "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.1}
        config = t.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": MROPE}, vision_config=vision, **tokens)
        films, kind = t.Qwen2VLVideoProcessor(**size), t.Qwen2_5_VLProcessor
    else:
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64,
                  "patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
                  "initializer_range": 0.1}
        config = t.Qwen3VLConfig(text_config=TEXT | {"rope_parameters": MROPE}, vision_config=vision, **tokens)
        if family == "qwen3_5":
            running = {f"linear_{name}": size for name, size in {
                "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}.items()}
            rope = MROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
            del vision["deepstack_visual_indexes"]
            config = t.Qwen3_5Config(text_config=TEXT | running | {
                "layer_types": ["linear_attention", "full_attention"] * 2, "rope_parameters": rope},
                vision_config=vision, **tokens)
        films = t.Qwen3VLVideoProcessor(patch_size=14, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64})
        kind = t.Qwen3VLProcessor
    pictures = t.Qwen2VLImageProcessor(patch_size=14, **size)
    return config, kind(image_processor=pictures, tokenizer=tokenizer, video_processor=films,
                        chat_template=tokenizer.chat_template)


def internvl():
    import transformers as t

    tokenizer, token = reader(template(image="<IMG_CONTEXT>\n", video="<video>\n"), "<video>", "</img>",
                              start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
                              video_token="<video>")
    config = t.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        image_token_id=token("<IMG_CONTEXT>"), image_seq_length=4,
        vision_config=CLIP | {"image_size": [56, 56], "patch_size": [14, 14]})
    size = {"size": {"height": 56, "width": 56}}
    processor = t.InternVLProcessor(
        t.GotOcr2ImageProcessor(**size, crop_to_patches=True, min_patches=1, max_patches=4), tokenizer,
        t.InternVLVideoProcessor(**size), image_seq_length=4, chat_template=tokenizer.chat_template)
    return config, processor


def gemma3():
    import transformers as t

    tokenizer, token = reader(template(image="<start_of_image>"), boi_token="<start_of_image>",
                              eoi_token="<end_of_image>", image_token="<image_soft_token>")
    config = t.Gemma3Config(
        text_config=TEXT | {"sliding_window": 16, "initializer_range": 0.02,
                            "layer_types": ["sliding_attention", "full_attention"] * 2},
        vision_config=CLIP | {"image_size": 56}, mm_tokens_per_image=4, image_token_index=token("<image_soft_token>"),
        boi_token_index=token("<start_of_image>"), eoi_token_index=token("<end_of_image>"))
    pictures = t.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    return config, t.Gemma3Processor(pictures, tokenizer, tokenizer.chat_template, image_seq_length=4)


def gemma4():
    import transformers as t

    tokenizer, token = reader(
        template(image="<|image|>", video="<|video|>", audio="<|audio|>"), boi_token="<|image>", eoi_token="<image|>",
        image_token="<|image|>", boa_token="<|audio>", eoa_token="<audio|>", audio_token="<|audio|>")
    pictures = {"patch_size": 14, "max_soft_tokens": 70}
    processor = t.Gemma4Processor(
        t.Gemma4AudioFeatureExtractor(feature_size=16), t.Gemma4ImageProcessor(**pictures), tokenizer,
        t.Gemma4VideoProcessor(**pictures), tokenizer.chat_template)
    tokens = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>", "boi": "<|image>", "eoi": "<image|>",
              "boa": "<|audio>", "eoa": "<audio|>"}
    config = t.Gemma4Config(
        text_config=TEXT | {"initializer_range": 0.02, "sliding_window": 16, "hidden_size_per_layer_input": 16,
                            "vocab_size_per_layer_input": 400, "global_head_dim": 16,
                            "layer_types": ["sliding_attention", "full_attention"] * 2},
        vision_config=CLIP | {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 14,
                              "position_embedding_size": 100},
        audio_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 32,
                      "subsampling_conv_channels": (16, 4)},
        **{f"{name}_token_id": token(text) for name, text in tokens.items()})
    return config, processor


def qwen2_5_omni():
    import transformers as t

    named = {"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
             "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
             "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    tokenizer, token = reader(template(
        image="<|vision_bos|><|IMAGE|><|vision_eos|>", video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>"), **named)
    size = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 36}}
    processor = t.Qwen2_5OmniProcessor(
        t.Qwen2VLImageProcessor(**size), t.Qwen2VLVideoProcessor(**size), t.WhisperFeatureExtractor(
            feature_size=16, chunk_length=2, sampling_rate=16_000), tokenizer, tokenizer.chat_template)
    thinker = {
        "text_config": TEXT | {"rope_parameters": MROPE}, "image_token_id": token("<|IMAGE|>"),
        "video_token_id": token("<|VIDEO|>"), "audio_token_id": token("<|AUDIO|>"),
        "vision_start_token_id": token("<|vision_bos|>"), "vision_end_token_id": token("<|vision_eos|>"),
        "audio_start_token_id": token("<|audio_bos|>"), "audio_end_token_id": token("<|audio_eos|>"),
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 14,
                          "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]},
        "audio_config": {"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
                         "d_model": 32, "max_source_positions": 100, "output_dim": 64, "n_window": 10}}
    return t.Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False), processor


def mistral3():
    import transformers as t

    tokenizer, token = reader(template(image="[IMG]"), "[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = t.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"}, image_token_index=token("[IMG]"), spatial_merge_size=2,
        vision_config=CLIP | {"model_type": "pixtral", "image_size": 112, "head_dim": 8})
    pictures = t.PixtralImageProcessor(patch_size=14, size={"longest_edge": 112})
    return config, t.PixtralProcessor(pictures, tokenizer, 14, 2, tokenizer.chat_template)


def idefics3(family="idefics3"):
    import transformers as t

    grid = [f"<row_{row + 1}_col_{column + 1}>" for row in range(4) for column in range(4)]
    tokenizer, token = reader(template(image="<image>"), "<fake_token_around_image>", "<image>", "<global-img>",
                              "<end_of_utterance>", *grid)
    size = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    options = {"text_config": TEXT | {"model_type": "llama"}, "vision_config": CLIP | {"image_size": 56},
               "scale_factor": 2, "image_token_id": token("<image>"), "pad_token_id": 0}
    if family == "smolvlm":
        films = t.SmolVLMVideoProcessor(**size, num_frames=8, fps=1, video_sampling={
            "max_frames": 8, "fps": 1, "video_size": {"longest_edge": 56}})
        processor = t.SmolVLMProcessor(t.SmolVLMImageProcessor(**size), tokenizer, films, 4, tokenizer.chat_template)
        return t.SmolVLMConfig(**options), processor
    processor = t.Idefics3Processor(t.Idefics3ImageProcessor(**size), tokenizer, 4, tokenizer.chat_template)
    return t.Idefics3Config(**options), processor


def llava_onevision():
    import transformers as t

    tokenizer, token = reader(template(image="<image>\n", video="<video>\n"), "<image>", "<video>")
    size, grid = {"height": 56, "width": 56}, [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = t.LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=CLIP | {"image_size": 56, "model_type":
                                                                         "siglip_vision_model"},
        image_token_index=token("<image>"), video_token_index=token("<video>"), image_grid_pinpoints=grid)
    processor = t.LlavaOnevisionProcessor(
        t.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid), tokenizer,
        t.LlavaOnevisionVideoProcessor(size=size), num_image_tokens=16, vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template)
    return config, processor


def qwen2_audio():
    import transformers as t

    tokenizer, token = reader(template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>\n"), "<|audio_bos|>", "<|AUDIO|>",
                              "<|audio_eos|>")
    config = t.Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2"}, audio_token_index=token("<|AUDIO|>"),
        audio_config={"num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
                      "d_model": 32, "max_source_positions": 100, "init_std": 0.1})
    ears = t.WhisperFeatureExtractor(feature_size=16, chunk_length=2, sampling_rate=16_000)
    return config, t.Qwen2AudioProcessor(ears, tokenizer, tokenizer.chat_template)


FAMILIES = {
    "qwen2_5_vl": functools.partial(qwen, "qwen2_5_vl"), "qwen3_vl": functools.partial(qwen, "qwen3_vl"),
    "qwen3_5": functools.partial(qwen, "qwen3_5"), "mistral3": mistral3,
    "gemma3": gemma3, "gemma4": gemma4, "qwen2_5_omni": qwen2_5_omni, "internvl": internvl, "idefics3": idefics3,
    "smolvlm": functools.partial(idefics3, "smolvlm"), "llava_onevision": llava_onevision, "qwen2_audio": qwen2_audio}
SEEING = [family for family in FAMILIES if family != "qwen2_audio"]
HEARING = ["qwen2_audio", "gemma4", "qwen2_5_omni"]
FILMS = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4", "qwen2_5_omni", "internvl", "llava_onevision", "smolvlm"]
SEEDS = {"gemma3": 13}  # whose answers keep changing


class Pair:
    """A checkpoint as this server loads it, and as transformers does."""

    def __init__(self, folder):
        chosen = main.Settings(model_repo_id=str(folder), device_map="cpu", torch_dtype="float32")
        self.folder = folder
        self.model = main.load_model(chosen, lambda _: None)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.template, self.known = self.processor.chat_template, {}
        if folder.name == "smolvlm":  # the template knows no films, and is told of them by the placeholder alone
            self.template = template(image="<image>", video="<video>")
        network = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.network = getattr(network, "thinker", network)

    def expected(self, turns):
        """The prompt, the greedy answer and the first logits that transformers gives."""
        asked = tuple(part if isinstance(part, str) else part.key for turn in turns for part in turn)
        if asked not in self.known:
            self.known[asked] = self.generate(turns)
        return self.known[asked]

    def generate(self, turns):
        chat, films = [], []
        for role, *parts in turns:
            chat.append({"role": role, "content": [self.part(part, films) for part in parts]})
        options = {"do_sample_frames": False, "video_metadata": films} if films else {}
        inputs = self.processor.apply_chat_template(
            chat, chat_template=self.template, add_generation_prompt=True, tokenize=True,
            return_dict=True, return_tensors="pt", processor_kwargs=options)
        made = self.network.generate(**inputs, max_new_tokens=16, do_sample=False, output_logits=True,
                                     return_dict_in_generate=True)
        ids = inputs["input_ids"][0].tolist()
        return ids, made.sequences[0, len(ids):].tolist(), made.logits[0][0]

    def part(self, part, films):
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if part.kind == "video":
            film = part.data
            films.append({"fps": 1000, "duration": film.duration, "total_num_frames": film.duration * 1000,
                          "frames_indices": [time * 1000 for time in film.times]})
            return {"type": "video", "video": film.frames}
        return {"type": part.kind, part.kind: part.data}


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """`pair(family)`, built once."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp("senses") / family
        config, processor = FAMILIES[family]()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEEDS.get(family, 3))
            network = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
            for weight in network.parameters():
                if weight.ndim > 1 and not weight.any():  # Gemma's projector: it would see nothing
                    torch.nn.init.normal_(weight, std=0.1)
            network.save_pretrained(folder)
            torch.save({}, folder / "spk_dict.pt")  # voices, without which Omni's are not loaded
        processor.save_pretrained(folder)
        return Pair(folder)

    yield make
    torch.set_num_threads(before)


def media(kind, data, shown, **options):
    return main.Media(kind, f"[{secrets.token_hex(8)}]", data, hashlib.sha256(repr((shown, options)).encode()).digest(),
                      options)


def picture(seed, width=100, height=80, **options):
    pixels = numpy.random.default_rng(seed).integers(0, 255, (height // 10, width // 10, 3), dtype=numpy.uint8)
    return media("image", Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST),
                 ("picture", seed, width, height), **options)


def film(seed, frames=4):
    pixels = numpy.random.default_rng(seed).integers(0, 255, (frames, 60, 90, 3), dtype=numpy.uint8)
    shown = main.Film(pixels, tuple(float(n) for n in range(frames)), float(frames))
    return media("video", shown, ("film", seed, frames))


def sound(seed, seconds=1.0):
    samples = numpy.random.default_rng(seed).standard_normal(int(16_000 * seconds)).astype(numpy.float32)
    return media("audio", samples * 0.1, ("sound", seed, seconds))


def chat(turns):
    said = []
    for role, *parts in turns:
        found = tuple(part for part in parts if not isinstance(part, str))
        content = "".join(part if isinstance(part, str) else part.mark for part in parts)
        said.append(main.Message(role, content, media=found))
    return main.Chat(tuple(said))


def ask(model, *chats, count=16, places=8, past=(), owner="", **sampling):
    """The events of these chats' jobs, all at once in one engine."""
    engine, ends, said = main.Engine(model, places=places, batch=16), queue.SimpleQueue(), [[] for _ in chats]

    def emit(n, event):
        said[n].append(event)
        if isinstance(event, main.Finished | main.Failed):
            ends.put(n)

    options = main.Sampling(**{"temperature": 0.0, **sampling}, max_new_tokens=count)
    for n, turns in enumerate(chats):
        engine.submit(main.Job(model.prepare(chat(turns)), options, functools.partial(emit, n), owner, past))
    engine.start()
    for _ in range(len(chats) * options.choices):
        ends.get(timeout=60)
    engine.stop()
    return said


def first_logits(model, turns):
    prompt = model.prepare(chat(turns))
    state, _ = model.open(prompt.tokens, 1, prompt, "")
    logits = model.forward([main.Work(state, prompt.tokens, 1, prompt.media)])[0]
    model.close(state, keep=False)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_about_media_goes_on_from_what_it_had_said(pair, family):
    model, turns = pair(family).model, question(sound(1) if family == "qwen2_audio" else picture(1))
    told = ask(model, turns)[0]
    past = [event for event in told if isinstance(event, main.Produced)][:7]

    went_on = ask(model, turns, past=past, owner="of a cache without it")[0]

    assert len(tokens_of(told)) > len(past) and tokens_of(went_on) == tokens_of(told)


def question(*parts):
    return [("user", *parts, "the cat and the dog are in?")]


def questions(family):
    """Chats with media that this family takes, each of another shape."""
    asked = []
    if family in SEEING:
        asked += [question(picture(1)), question(picture(2, 60, 140), "and", picture(3)),
                  [("system", "user"), ("user", "are", picture(1)), ("assistant", "yes"), ("user", picture(4), "then")]]
    if family in HEARING:
        asked += [question(sound(1)), question(sound(2, 0.4), "and", sound(3, 1.7)),
                  [("user", sound(1), "are"), ("assistant", "they are"), ("user", "then?", sound(4))]]
    if family in FILMS:
        asked += [question(film(1)), question("user", film(2), film(3))]
        asked += [question(picture(2), film(2, 6))] if family != "smolvlm" else []
    if family in SEEING and family in HEARING:
        asked += [question(sound(5), picture(1), "and", film(4))]
    return asked


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_which_senses_it_has(pair, family):
    model = pair(family).model
    having = {"image": SEEING, "video": FILMS, "audio": HEARING}
    assert model.senses == {sense for sense, families in having.items() if family in families}
    assert model.audio_rate == (16_000 if family in HEARING else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_media_is_the_one_that_the_processor_makes(pair, family):
    for turns in questions(family):
        ids, _, logits = pair(family).expected(turns)
        assert pair(family).model.prepare(chat(turns)).tokens == ids
        assert float((first_logits(pair(family).model, turns) - logits).abs().max()) <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_about_media_is_the_one_that_generate_gives(pair, family):
    for turns in questions(family):
        _, answer, _ = pair(family).expected(turns)
        assert tokens_of(ask(pair(family).model, turns)[0]) == answer
        assert len(set(answer)) >= 4, "an answer that repeats itself would hide most faults"


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_about_media_in_company_are_the_ones_that_generate_gives(pair, family):
    words = [[("user", "the cat and the dog are in the house " * n)] for n in (1, 9)]
    chats = [words[0], *questions(family), words[1], *questions(family)]
    said = ask(pair(family).model, *chats, places=5)
    for turns, events in zip(chats, said, strict=True):
        assert tokens_of(events) == pair(family).expected(turns)[1]


def cached(events):
    return next(event.cached_tokens for event in events if isinstance(event, main.Started))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_question_about_the_same_media_does_not_look_again(pair, family):
    model = pair(family).model
    shown = [(picture, n) for n in (50, 51) if family in SEEING] + [(sound, 52)] * (family in HEARING)
    for show, seed in shown:
        first = question(show(seed))
        second = [*question(show(seed)), ("assistant", "they are in the house"), ("user", "are you there?")]
        ask(model, first)
        events, = ask(model, second)
        other, = ask(model, question(show(seed + 10)))
        assert tokens_of(events) == pair(family).expected(second)[1]
        looked_at = len(model.prepare(chat(first)).tokens)  # which ends with what opens an answer
        assert cached(events) >= looked_at - 4 if model.runner == "flat batch" else cached(events) == 0
        assert cached(other) == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen2_audio"])
def test_media_that_cannot_be_moved_into_the_batch_are_answered_beside_it(pair, family):
    model, words = pair(family).model, [("user", "the cat and the dog are in the house")]
    model._runner._moves_media, shown = False, {"qwen2_audio": sound}.get(family, picture)
    chats = [question(shown(70)), words, question(shown(71), "and", shown(72))]
    try:
        said = ask(model, *chats)
    finally:
        model._runner._moves_media = None
    for turns, events in zip(chats, said, strict=True):
        assert tokens_of(events) == pair(family).expected(turns)[1]
    assert model.runner == "flat batch" and model.room[0] == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_an_answer_about_media_goes_on_from_its_beginning(pair, family):
    asked = chat([*question(picture(1)), ("assistant", "they are in")])
    prompt = pair(family).model.prepare(dataclasses.replace(asked, continues=True))
    ids, _, _ = pair(family).expected(question(picture(1)))
    begun = pair(family).model._decoder.encode("they are in", add_special_tokens=False).ids
    assert prompt.tokens == ids + begun


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava_onevision"])
def test_a_picture_in_a_tools_answer_is_seen(pair, family):
    """Their templates know no calls, so both are told as text."""
    call, shown = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}, picture(1)
    asked = main.Chat((main.Message("user", "u"), main.Message("assistant", "", tool_calls=(call,)),
                       main.Message("tool", f"here: {shown.mark}", tool_call_id="c", name="f", media=(shown,))))
    prompt = pair(family).model.prepare(asked)
    ids, _, _ = pair(family).expected([
        ("user", "u"), ("assistant", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("user", "<tool_response>\nhere: ", shown, "\n</tool_response>")])
    assert prompt.tokens == ids


@pytest.mark.parametrize("family", SEEING)
def test_another_picture_changes_the_logits(pair, family):
    model = pair(family).model
    one, other, again = (first_logits(model, question(picture(seed))) for seed in (1, 2, 1))
    assert float((one - other).abs().max()) > 1e-3
    assert torch.equal(one, again)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_choices_see_the_same(pair, family):
    turns = questions(family)[0]
    together = ask(pair(family).model, turns, question(), choices=3)[0]
    assert {tuple(tokens_of(together, n)) for n in range(3)} == {tuple(pair(family).expected(turns)[1])}


PLACEHOLDERS = ["<|image_pad|>", "<image>", "<start_of_image>", "<image_soft_token>", "<video>", "<|video_pad|>",
                "<|AUDIO|>", "<|vision_start|>", "<|im_end|>", "<fake_token_around_image>"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_media", [False, True])
def test_placeholders_that_are_typed_stay_text(pair, family, with_media):
    model, text = pair(family).model, " ".join(PLACEHOLDERS) * 3
    shown = questions(family)[0][0][1:-1] if with_media else ()
    typed, plain = (model.prepare(chat([("user", said, *shown, said)])) for said in (text, "x"))

    def controls(prompt):
        return [token for token in prompt.tokens if token in model._added]

    assert controls(typed) == controls(plain)
    if not with_media:
        assert text in model._tokenizer.decode(typed.tokens)
    assert tokens_of(ask(model, [("user", text, *shown, text)], count=2)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_media_without_the_sense_for_it_are_refused(pair, family):
    model = pair(family).model
    for item in (picture(1), film(1), sound(1)):
        if item.kind not in model.senses:
            with pytest.raises(main.ApiError) as refusal:
                model.prepare(chat(question(item)))
            assert (refusal.value.status_code, refusal.value.code) == (400, "unsupported_content")
            assert item.kind in refusal.value.detail and refusal.value.param == "messages"


def test_media_that_the_processor_cannot_take_together_are_refused(pair):
    with pytest.raises(main.ApiError) as refusal:
        pair("smolvlm").model.prepare(chat(question(picture(1), film(1))))
    assert (refusal.value.status_code, refusal.value.code) == (400, "unsupported_content")


def test_media_that_the_network_fails_on_fail_alone(pair):
    model, words = pair("qwen2_5_vl").model, [("user", "the cat and the dog")]
    prompt = model.prepare(chat(question(picture(99))))
    prompt.media["pixel_values"] = prompt.media["pixel_values"][:-4]
    expected = tokens_of(ask(model, words)[0])
    engine, ends, said = main.Engine(model, places=8, batch=16), queue.SimpleQueue(), [[], [], []]
    for n, asked in enumerate((model.prepare(chat(words)), prompt, model.prepare(chat(words)))):
        engine.submit(main.Job(asked, main.Sampling(temperature=0.0, max_new_tokens=16), lambda event, n=n: (
            said[n].append(event), isinstance(event, main.Finished | main.Failed) and ends.put(n))))
    engine.start()
    for _ in said:
        ends.get(timeout=60)
    engine.stop()
    assert isinstance(said[1][-1], main.Failed)
    assert tokens_of(said[0]) == tokens_of(said[2]) == expected


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni", "qwen2_5_vl"])
def test_a_prompt_with_media_makes_the_logits_of_its_last_token_only(pair, family):
    model, made = pair(family).model, []
    head = model._network.get_output_embeddings()
    turns = questions(family)[0]
    with head.register_forward_hook(lambda *call: made.append(call[2].shape[1])):
        first_logits(model, turns)
    assert made == [1]


def test_a_model_of_words_has_no_senses():
    model = tiny.model()
    assert (model.senses, model.audio_rate) == (frozenset(), None)
    with pytest.raises(main.ApiError, match="image"):
        model.prepare(chat(question(picture(1))))


def test_the_same_media_are_processed_once(pair):
    model = pair("qwen2_5_vl").model
    one, same, other = (model.prepare(chat(question(picture(seed)))).media["pixel_values"] for seed in (71, 71, 72))
    assert one.data_ptr() == same.data_ptr() != other.data_ptr()


def test_prompts_may_be_prepared_by_several_threads(pair):
    model, asked = pair("qwen2_5_vl").model, [question(picture(n % 3), "and", picture(n % 5)) for n in range(12)]
    alone = [model.prepare(chat(turns)) for turns in asked]
    model._kept_media = main.Shelf(4, 10**6)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda turns: model.prepare(chat(turns)), asked))
    assert together == alone
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.media["pixel_values"], other.media["pixel_values"])


def test_kept_media_are_bounded():
    shelf = main.Shelf(most=3, most_bytes=1000)
    for n in range(20):
        made = shelf.filled_by((n,), lambda: {"pixels": torch.zeros(100)})()
        assert made["pixels"].nbytes == 400
    assert len(shelf._kept) == 2 and shelf.nbytes == 800


@pytest.mark.parametrize("family,longest", [("qwen2_audio", 2), ("qwen2_5_omni", 2), ("gemma4", 30)])
def test_a_sound_longer_than_the_processor_keeps_is_heard_in_pieces(pair, family, longest):
    model, long = pair(family).model, sound(1, longest * 2.5)
    pieces = [media("audio", data, ("piece", n)) for n, data in enumerate(numpy.array_split(long.data, 3))]
    ids, answer, _ = pair(family).expected(question(*pieces))
    assert model.prepare(chat(question(long))).tokens == ids
    assert tokens_of(ask(model, question(long))[0]) == answer
    whole, with_rest = (model.prepare(chat(question(sound(2, seconds)))) for seconds in (longest, longest + 0.05))
    assert len(whole.tokens) == len(with_rest.tokens)  # as codecs leave it


def test_pictures_that_cannot_fit_are_refused_before_they_are_processed(pair):
    model = pair("qwen2_5_vl").model
    kept = len(model._kept_media._kept)
    for options in ({}, {"detail": "high"}, {"max_pixels": 10**9}):
        with pytest.raises(main.ApiError, match="at least 2160 tokens") as refusal:
            model.prepare(chat(question(*(picture(n, 170, 170, **options) for n in range(60)))))
        assert refusal.value.code == "context_length_exceeded" and len(model._kept_media._kept) == kept
    assert model.prepare(chat(question(*(picture(n, 170, 170, max_pixels=3136) for n in range(60)))))


@pytest.mark.parametrize("family", HEARING)
def test_sounds_that_cannot_fit_are_refused_before_they_are_processed(pair, family):
    model = pair(family).model
    model.prepare(chat(question(sound(1))))
    kept = len(model._kept_media._kept)
    with pytest.raises(main.ApiError, match="at least") as refusal:
        model.prepare(chat(question(*(sound(n, 30) for n in range(4)))))
    assert refusal.value.code == "context_length_exceeded" and len(model._kept_media._kept) <= kept + 5


def test_detail_and_bounds_of_pixels_reach_the_processor(pair):
    def patches(family, **options):
        return len(pair(family).model.prepare(chat(question(picture(5, 160, 120, **options)))).tokens)

    plain = patches("qwen2_5_vl")
    assert patches("qwen2_5_vl", max_pixels=56 * 56) < plain <= patches("qwen2_5_vl", min_pixels=10**9)
    assert patches("qwen2_5_vl", max_pixels=1) < plain == patches("qwen2_5_vl", detail="low")
    assert patches("idefics3", detail="low") < patches("idefics3")
    assert patches("idefics3", detail="high") == patches("idefics3")


# -- over HTTP -------------------------------------------------------------------------------------------------
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SHOWN = {"image": SEEING, "video": FILMS, "audio": HEARING}


def png(seed=1):
    file = io.BytesIO()
    picture(seed).data.save(file, "PNG")
    return file.getvalue()


def mkv(seed=1, frames=4, heard=None):
    """A film without loss, with a sound if one is given."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream, track = out.add_stream("ffv1", rate=1), heard and out.add_stream("pcm_s16le", rate=16_000)
        stream.width, stream.height, stream.pix_fmt = 90, 60, "bgr0"
        if heard:
            track.layout = "mono"
            samples = av.AudioFrame.from_ndarray((heard.data * 32767).astype("<i2")[None], "s16", "mono")
            samples.sample_rate = 16_000
            out.mux(track.encode(samples))
            out.mux(track.encode())
        for pixels in film(seed, frames).data.frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    return file.getvalue()


def wav(seed=1):
    samples = (sound(seed).data * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(samples.tobytes())
    return file.getvalue()


FILES = {"image": png, "video": mkv, "audio": wav}


def as_url(data, kind):
    return f"data:{kind}/x;base64,{base64.b64encode(data).decode()}"


def seen(kind, data, settings):
    """What the server is to make of a file."""
    if kind == "audio":
        return main.decode_audio(data, 16_000, "", settings)
    return (main.decode_image if kind == "image" else main.decode_video)(data, "", settings)


@pytest.fixture
def serve(pair, client):
    def make(family, **settings):
        return client(pair(family).model, **settings)

    return make


def asked(http, parts, path=CHAT, **fields):
    """The text of a greedy answer, and how many tokens the prompt had."""
    turns = [{"role": "user", "content": parts}]
    if path == RESPONSES:
        answer = http.post(path, json={"input": turns, "temperature": 0, "max_output_tokens": 8, **fields})
        assert answer.status_code == 200, answer.text
        said = [part["text"] for item in answer.json()["output"] for part in item["content"]]
        return "".join(said), answer.json()["usage"]["input_tokens"]
    answer = http.post(path, json={"messages": turns, "temperature": 0, "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        chunks = [json.loads(frame["data"]) for frame in parse_sse(answer.text)[:-1]]
        return text_of(parse_sse(answer.text)), chunks[-1]["usage"]["prompt_tokens"]
    return answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("kind,family", [(kind, family) for kind, families in SHOWN.items() for family in families])
def test_what_a_client_shows_is_answered_as_generate_answers_it(pair, serve, settings, kind, family):
    data = FILES[kind]()
    shown = media(kind, seen(kind, data, settings()), ("file", kind))
    ids, tokens, _ = pair(family).expected([("user", shown, "are the cat")])
    text = pair(family).processor.tokenizer.decode(tokens[:8], skip_special_tokens=True)
    http, url, words = serve(family), as_url(data, kind), "are the cat"
    chat_part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    flat = {"image": {"type": "input_image", "image_url": url}, "video": {"type": "input_video", "video_url": url},
            "audio": {"type": "input_audio", "input_audio": {"data": url.split(",")[1], "format": "wav"}}}[kind]

    answers = [asked(http, [chat_part, {"type": "text", "text": words}]),
               asked(http, [chat_part, {"type": "text", "text": words}], stream=True,
                     stream_options={"include_usage": True}),
               asked(http, [flat, {"type": "input_text", "text": words}], RESPONSES)]

    assert answers == [(text, len(ids))] * 3


def test_the_sound_of_a_film_is_heard_after_its_pictures_are_seen(pair, serve, settings):
    data, words = mkv(heard=sound(1)), {"type": "text", "text": "are the cat"}
    part = {"type": "video_url", "video_url": {"url": as_url(data, "video")}}
    shown = [media(kind, seen(kind, data, settings()), ("in one film", kind)) for kind in ("video", "audio")]
    for family in ("qwen2_5_omni", "gemma4"):
        ids, tokens, _ = pair(family).expected([("user", *shown, "are the cat")])
        text = pair(family).processor.tokenizer.decode(tokens[:8], skip_special_tokens=True)
        assert asked(serve(family, persist_sessions=False), [part, words]) == (text, len(ids))
    ids, _, _ = pair("qwen2_5_vl").expected([("user", shown[0], "are the cat")])
    deaf = serve("qwen2_5_vl", persist_sessions=False)
    assert asked(deaf, [part, words])[1] == len(ids)  # which sees it all the same


IMAGE_FORMS = {
    "object": lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    "string": lambda url: {"type": "image_url", "image_url": url}, "image": lambda url: {"type": "image", "image": url},
    "hf": lambda url: {"type": "image", "url": url},
    "base64": lambda url: {"type": "image", "image_base64": url.split(",")[1]},
    "b64_json": lambda url: {"type": "image", "b64_json": url.split(",")[1]},
    "file": lambda url: {"type": "file", "file": {"file_data": url, "filename": "a.png"}},
    "bare file": lambda url: {"type": "file", "file": {"file_data": url.split(",")[1]}},
    "input_image": lambda url: {"type": "input_image", "image_url": url},
    "input_file": lambda url: {"type": "input_file", "file_data": url, "filename": "a.png"}}


def test_a_picture_is_the_same_in_every_form_and_another_is_not(serve):
    http, words = serve("qwen2_5_vl"), {"type": "text", "text": "are the cat"}
    answers = {name: asked(http, [form(as_url(png(), "image")), words]) for name, form in IMAGE_FORMS.items()}
    assert len(set(answers.values())) == 1, answers
    assert asked(http, [IMAGE_FORMS["object"](as_url(png(2), "image")), words]) not in answers.values()


def test_a_picture_stays_in_a_chain_and_in_a_tools_result_and_is_counted(serve):
    http, part = serve("qwen2_5_vl"), {"type": "input_image", "image_url": as_url(png(), "image")}
    fields = {"temperature": 0, "max_output_tokens": 4}
    first = http.post(RESPONSES, json={"input": [{"role": "user", "content": [part]}], **fields}).json()
    counted = http.post(f"{RESPONSES}/input_tokens", json={"input": [{"role": "user", "content": [part]}]}).json()
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": [part]}
    then = http.post(RESPONSES, json={"input": [call, result], "previous_response_id": first["id"], **fields}).json()
    listed = http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]

    assert counted["input_tokens"] == first["usage"]["input_tokens"]
    assert then["usage"]["input_tokens"] > 2 * (first["usage"]["input_tokens"] - 12)
    assert listed[0]["content"] == [part]


def test_too_many_pictures_are_refused_before_any_is_looked_at(serve):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = serve("qwen2_5_vl", max_images=3).post(CHAT, json={"messages": [{"role": "user", "content": [part] * 4}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_media", "messages[0].content[3]")


@pytest.mark.parametrize("path,body", [
    (CHAT, lambda url: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}),
    (CHAT, lambda url: {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]}),
    (RESPONSES, lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
    (RESPONSES, lambda url: {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]})])
def test_nobody_inside_is_asked_for_media(serve, path, body):
    http = serve("qwen2_5_vl")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"):
            answer = http.post(path, json=body(f"http://{host}:{port}/x"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_media"), host
            assert str(port) not in answer.text
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_server_says_which_senses_its_model_has(serve):
    http = serve("qwen2_5_vl", eager_load_model=True)
    wait_until(lambda: http.get("/ready").json()["status"] == "ready")
    senses = ["text", "image", "video"]
    assert (http.get("/ready").json()["senses"], http.get("/v1/models").json()["data"][0]["senses"]) == (senses, senses)


def test_nobody_waits_for_the_network_of_others(pair, live):
    words = {"type": "text", "text": "are the cat"}
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent, ThreadPoolExecutor(20) as clients:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        base = live(pair("qwen2_5_vl").model, media_allow_hosts=place, media_fetch_seconds=30)
        with httpx2.Client(base_url=base, timeout=60) as http:
            stuck = {"type": "image_url", "image_url": f"http://{place}/x"}
            waiting = [clients.submit(http.post, CHAT, json={"messages": [{"role": "user", "content": [stuck]}]})
                       for _ in range(18)]
            wait_until(lambda: http.get("/ready").json()["queued"] == 18)

            answers = [asked(http, [words]), asked(http, [IMAGE_FORMS["string"](as_url(png(), "image")), words])]

            assert len(answers) == 2 and [answer.done() for answer in waiting] == [False] * 18
            for session in http.get("/v1/sessions").json()["data"]:
                http.post(f"/v1/cancel/{session['id']}")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_stream_that_waits_for_media_has_begun_for_its_client(pair, live, path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        base = live(pair("qwen2_5_vl").model, media_allow_hosts=place, media_fetch_seconds=60, keepalive_seconds=0.1)
        with httpx2.Client(base_url=base, timeout=60) as http:
            asked(http, [{"type": "text", "text": "are"}])
            turns = [{"role": "user", "content": [{"type": "image_url", "image_url": f"http://{place}/x"}]}]
            body = {"messages" if path == CHAT else "input": turns, "stream": True}
            with http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200  # while nothing is fetched
                lines = answer.iter_lines()
                assert ": ping" in lines
                silent.accept()[0].close()
                said = "\n".join(lines)
            assert "the URL could not be fetched" in said and said.count("[DONE]") == 1


@pytest.mark.parametrize("name,parts", [
    ("pictures", lambda: [{"type": "image_url", "image_url": as_url(png(n), "image")} for n in range(100)]),
    ("film", lambda: [{"type": "video_url", "video_url": as_url(mkv(frames=2000), "video")}])])
def test_the_server_answers_others_while_it_looks(pair, live, name, parts):
    base = live(pair("gemma3" if name == "pictures" else "qwen2_5_vl").model, max_video_frames=256)
    body = {"messages": [{"role": "user", "content": parts()}], "max_tokens": 2}
    with httpx2.Client(base_url=base, timeout=120) as http, ThreadPoolExecutor(1) as clients:
        asked(http, [{"type": "text", "text": "are"}])
        looking = clients.submit(http.post, CHAT, json=body)
        answered = 0
        while not looking.done():
            assert http.get("/health", timeout=20).status_code == 200
            answered += 1
        assert looking.result().status_code == 200, looking.result().text
        assert answered > 2 and looking.result().json()["usage"]["prompt_tokens"] > 400


def test_a_pdf_that_takes_long_is_ended_and_keeps_no_picture_waiting(pair, live, monkeypatch):
    monkeypatch.setattr(main, "MAX_PDF_SECONDS", 5)
    slow = {"type": "file", "file": {"file_data": base64.b64encode(slow_pdf()).decode()}}
    words = {"type": "text", "text": "are the cat"}
    base = live(pair("qwen2_5_vl").model)
    with httpx2.Client(base_url=base, timeout=60) as http, ThreadPoolExecutor(3) as clients:
        asked(http, [words])
        reading = [clients.submit(http.post, CHAT, json={"messages": [{"role": "user", "content": [slow]}]})
                   for _ in range(3)]
        wait_until(children)
        asked(http, [IMAGE_FORMS["string"](as_url(png(), "image")), words])
        assert not any(answer.done() for answer in reading)
        for session in http.get("/v1/sessions").json()["data"]:
            if session["status"] != "completed":
                http.post(f"/v1/cancel/{session['id']}")
        wait_until(lambda: not children())
        answer = http.post(CHAT, json={"messages": [{"role": "user", "content": [slow]}]})
        assert answer.status_code == 400 and not children()


def children():
    """The processes that we have begun and that have not ended."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "pypdf" in line]


def test_what_a_chain_holds_is_counted(serve, monkeypatch):
    http = serve("qwen2_5_vl")
    part = {"type": "input_image", "image_url": as_url(png(), "image")}
    first = http.post(RESPONSES, json={"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}).json()
    monkeypatch.setattr(main, "MAX_HELD_BYTES", 50)
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        answer = http.post(path, json={"input": "more", "previous_response_id": first["id"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert http.app.state.server.held_bytes == 0


def test_a_fault_of_media_names_its_part(serve):
    bad = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    words, http = {"type": "input_text", "text": "a"}, serve("qwen2_5_vl")
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}
    for items, param in [
            ([{"role": "user", "content": [words, bad]}], "input[0].content[1]"),
            ([{"role": "user", "content": "a"}, {"type": "web_search_call"}, {"role": "user", "content": [bad]}],
             "input[2].content[0]"),
            ([call, {"type": "function_call_output", "call_id": "a", "output": [words, bad]}], "input[1].output[1]"),
            ([words, bad], "input")]:
        error = http.post(RESPONSES, json={"input": items}).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_media", param)


def test_a_url_beyond_all_measure_is_refused_before_it_is_read(serve):
    part = {"type": "image_url", "image_url": "http://example.org/" + "a" * 9000}
    answer = serve("qwen2_5_vl").post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_media", "messages[0].content[0]")


def test_a_text_that_speaks_of_pdf_is_a_text(serve):
    text = b"A PDF begins with %PDF-1.7."
    part = {"type": "file", "file": {"file_data": base64.b64encode(text).decode()}}
    assert asked(serve("qwen2_5_vl"), [part])[1] > 0


def test_a_stream_about_a_picture_and_a_film_that_a_server_died_in_is_that_of_an_undisturbed_one(pair, start, tmp_path):
    shown = tmp_path / "film.mkv"
    shown.write_bytes(mkv())
    parts = [{"type": "text", "text": "What is this? "},
             {"type": "image_url", "image_url": {"url": as_url(png(), "image")}},
             {"type": "video_url", "video_url": {"url": shown.as_uri()}}]
    body = {"messages": [{"role": "user", "content": parts}], "stream": True, "temperature": 1, "seed": 5,
            "max_tokens": 500, "ignore_eos": True}
    env = {"MODEL_REPO_ID": pair("qwen2_5_vl").folder, "DEVICE_MAP": "cpu", "TORCH_DTYPE": "float32",
           "MEDIA_ROOT": tmp_path, "OMP_NUM_THREADS": 1}

    def told(frames):
        return [json.loads(frame["data"])["choices"] for frame in frames[:-1]]

    server = start(**env)
    whole = parse_sse(httpx2.post(server.base + CHAT, json=body, timeout=300).text)
    held = b""
    with httpx2.stream("POST", server.base + CHAT, json={**body, "session_id": "cut"}, timeout=300) as stream:
        for chunk in stream.iter_raw():
            held += chunk
            if held.count(b"\n\n") > 20:
                break
        server.kill()
    shown.unlink()  # what was asked about is kept with the request
    server = start(**env)
    frames = parse_sse(httpx2.get(f"{server.base}/v1/sessions/cut/events", timeout=300).text)

    known = parse_sse(held[:held.rindex(b"\n\n") + 2].decode())
    assert len(whole) > 2 * len(known) > 40 and frames[:len(known)] == known
    assert told(frames) == told(whole)
