"""Qwen3-VL: as Qwen2.5-VL, plus deepstack: further `[tokens, width]` arrays for the first layers of the language model.

Its video processor bounds the pixels of the whole clip, not of one frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tectum.models.grids import interpolation
from tectum.models.qwen2_vl import QwenVLAdapter


class Qwen3VLAdapter(QwenVLAdapter):
    family = "qwen3_vl"
    architectures = ("Qwen3VLForConditionalGeneration",)
    grid_rules: ClassVar = (*QwenVLAdapter.grid_rules, interpolation)
    clip_facts: ClassVar = {"timestamps_in_prompt": True}

    def _clip_sides(self, frames: int, height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
        processor = self.processors.video
        patches = processor.get_num_of_video_patches(frames, height, width, {"size": size})
        steps = -(-frames // processor.temporal_patch_size)
        return self._split(frames, height, width, size, patches // steps)

    def _split(self, frames: int, height: int, width: int, size: Mapping[str, int], patches: int) -> tuple[int, int]:
        """The sides of one step's grid; their product is what the processor counts."""
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        processor = self.processors.video
        most = size["longest_edge"]
        factor = processor.patch_size * processor.merge_size
        if processor.cap_pixels_per_frame:
            cap = processor.max_video_tokens * factor * factor
            most = max(min(cap, most // frames), int(size["shortest_edge"] * 1.05)) * frames
        sides = smart_resize(frames, height, width, processor.temporal_patch_size, factor, size["shortest_edge"], most)
        grid = sides[0] // processor.patch_size, sides[1] // processor.patch_size
        assert grid[0] * grid[1] == patches, "the grid is the processor's own"
        return grid
