"""SmolVLM: pictures as Idefics3; a frame of a video is one tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tectum.models.features import Count
from tectum.models.idefics3 import Idefics3Adapter, tiles_of
from tectum.models.options import FPS, MAX_FRAMES, NUM_FRAMES
from tectum.types import Clip, Modality


class SmolVLMAdapter(Idefics3Adapter):
    family = "smolvlm"
    architectures = ("SmolVLMForConditionalGeneration",)
    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    rate_and_number = True
    options: ClassVar = {**Idefics3Adapter.options, Modality.VIDEO: (FPS, NUM_FRAMES, MAX_FRAMES)}
    row_rule: ClassVar = {**Idefics3Adapter.row_rule, Modality.VIDEO: "a tile's rows for each frame"}
    batch_bound: ClassVar = {Modality.IMAGE: 0.0, Modality.VIDEO: 0.0}

    def count_clip(self, frames: int, width: int, height: int, options: Mapping[str, Any]) -> Count:
        return self.tiles(frames)

    def clip_inputs(self, clip: Clip, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        features = self.processors.video(
            videos=[clip.frames], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt"
        )
        return tiles_of(features)
