"""Tiny random checkpoints of every family that is served: real architectures, language model included, built offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import transformers
from PIL import Image

from tectum.models.tiny import (
    MROPE,
    TEXT,
    VISION_TOKENS,
    build_tiny_qwen2_5_vl,
    byte_tokenizer,
    save_random,
    vision_token_ids,
)
from tectum.models.torchvision_compat import ensure_torchvision

ensure_torchvision()
PROMPT = "a<|vision_start|><|image_pad|><|vision_end|>b"


def build(family: str, folder: Path, *, seed: int = 0) -> Path:
    return {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}[family](folder, seed)


def _qwen2_5_vl(folder: Path, seed: int) -> Path:
    return build_tiny_qwen2_5_vl(folder, seed=seed)


def _qwen2_vl(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer(VISION_TOKENS)
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, vision_config=vision, **vision_token_ids(tokenizer)
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(size=size), tokenizer, transformers.Qwen2VLVideoProcessor(size=size)
    )
    return save_random(transformers.Qwen2VLForConditionalGeneration, config, processor, folder, seed)


def _qwen3_vl(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer(VISION_TOKENS)
    text = {**TEXT, "num_hidden_layers": 4, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **vision_token_ids(tokenizer))
    half = [0.5, 0.5, 0.5]
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64},
            patch_size=16,
            image_mean=half,
            image_std=half,
        ),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 256}),
    )
    return save_random(transformers.Qwen3VLForConditionalGeneration, config, processor, folder, seed)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth random picture: not noise, so that resizing behaves as it does on photographs."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
