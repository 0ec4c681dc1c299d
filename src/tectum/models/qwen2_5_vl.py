"""Qwen2.5-VL: as Qwen2-VL, with a windowed tower whose output width stands in the config on its own."""

from __future__ import annotations

from typing import Any

import torch

from tectum.models.qwen2_vl import QwenVLAdapter


class Qwen25VLAdapter(QwenVLAdapter):
    family = "qwen2_5_vl"
    architectures = ("Qwen2_5_VLForConditionalGeneration",)

    @classmethod
    def build_tower(cls, config: Any, dtype: torch.dtype) -> torch.nn.Module:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel as Tower,
        )

        return Tower._from_config(config.vision_config, dtype=dtype)

    @classmethod
    def row_width(cls, config: Any) -> int:
        return int(config.vision_config.out_hidden_size)
