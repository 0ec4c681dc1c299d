"""Qwen3-VL: as Qwen2.5-VL, plus deepstack: further `[tokens, width]` arrays for the first layers of the language model."""

from __future__ import annotations

from typing import Any

import torch

from tectum.models.qwen2_vl import QwenVLAdapter


class Qwen3VLAdapter(QwenVLAdapter):
    family = "qwen3_vl"
    architectures = ("Qwen3VLForConditionalGeneration",)

    @classmethod
    def build_tower(cls, config: Any, dtype: torch.dtype) -> torch.nn.Module:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel as Tower

        return Tower._from_config(config.vision_config, dtype=dtype)

    @classmethod
    def row_width(cls, config: Any) -> int:
        return int(config.vision_config.out_hidden_size)
