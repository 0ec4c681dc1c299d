"""Qwen2.5-VL: to its callers as Qwen2-VL; the tower looks through windows, which is the model's own business."""

from __future__ import annotations

from typing import ClassVar

from tectum.models.grids import windows
from tectum.models.qwen2_vl import QwenVLAdapter


class Qwen25VLAdapter(QwenVLAdapter):
    family = "qwen2_5_vl"
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    grid_rules: ClassVar = (*QwenVLAdapter.grid_rules, windows)
