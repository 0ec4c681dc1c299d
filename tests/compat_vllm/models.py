"""Tiny checkpoints that vLLM's CPU backend takes (attention heads of 32), each in two forms: whole, and with its vision
weights replaced by noise. vLLM gets the second: tokens can only be right when the rows came from elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tectum.models.tiny import TEXT, VISION_TOKENS, byte_tokenizer, save_random, vision_token_ids
from tectum.models.torchvision_compat import ensure_torchvision

ensure_torchvision()
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WIDTH = 128
#: pictures and clips of a message become the family's placeholders, in the order of the content
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<assistant>"
)
_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
_TEXT = {**TEXT, "hidden_size": WIDTH, "intermediate_size": 256, "rope_parameters": _ROPE}
_HALF = [0.5, 0.5, 0.5]


def build(family: str, folder: Path, *, seed: int = 0) -> Path:
    """A whole checkpoint of about a million parameters, in float32."""
    tokenizer = byte_tokenizer(VISION_TOKENS)
    tokenizer.chat_template = TEMPLATE
    ids = vision_token_ids(tokenizer)
    if family == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 64, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(text_config=_TEXT, vision_config=vision, **ids)
        model, kind = transformers.Qwen2VLForConditionalGeneration, transformers.Qwen2VLProcessor
    elif family == "qwen2_5_vl":
        vision = {"depth": 4, "hidden_size": 64, "out_hidden_size": WIDTH, "num_heads": 2, "intermediate_size": 96}
        vision.update(fullatt_block_indexes=[1, 3], window_size=112)
        config = transformers.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision, **ids)
        model, kind = transformers.Qwen2_5_VLForConditionalGeneration, transformers.Qwen2_5_VLProcessor
    else:
        text = {
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "rope_parameters": {**_ROPE, "mrope_interleaved": True},
        }
        vision = {"depth": 4, "hidden_size": 64, "out_hidden_size": WIDTH, "num_heads": 2, "intermediate_size": 96}
        vision.update(num_position_embeddings=64, deepstack_visual_indexes=[0, 1, 2])
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        model, kind = transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLProcessor
    return save_random(model, config, _processor(family, kind, tokenizer), folder, seed)


def _processor(family: str, kind: type, tokenizer: object) -> object:
    if family != "qwen3_vl":
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
        pictures, clips = transformers.Qwen2VLImageProcessor(size=size), transformers.Qwen2VLVideoProcessor(size=size)
        return kind(pictures, tokenizer, clips, chat_template=TEMPLATE)
    pictures = transformers.Qwen2VLImageProcessor(
        size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}, patch_size=16, image_mean=_HALF, image_std=_HALF
    )
    clips = transformers.Qwen3VLVideoProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 256})
    return kind(pictures, tokenizer, clips, chat_template=TEMPLATE)


def blinded(folder: Path, into: Path) -> Path:
    """The same checkpoint with noise for its vision weights."""
    shutil.copytree(folder, into)
    generator = torch.Generator().manual_seed(99)
    for path in into.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "visual" in name:
                tensors[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.2
        save_file(tensors, path, {"format": "pt"})
    return into
