"""Plain encoders, without a language model: CLIP, SigLIP, DINOv2 and Whisper. Rows are the last hidden state.

`output: pooled` gives one row an item: what the tower itself makes of its rows, before any projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tectum.models.audio import AudioWindowAdapter
from tectum.models.features import Count, FeaturesAdapter, cat, flat
from tectum.models.llava import fixed_size
from tectum.models.options import OUTPUT
from tectum.types import Modality

if TYPE_CHECKING:
    from PIL.Image import Image


#: whether an item's rows are pooled, as one more input of it
POOLED = {pooled: torch.tensor([pooled]) for pooled in (False, True)}


class PictureEncoder(FeaturesAdapter):
    """A vision transformer over a picture of fixed size."""

    options: ClassVar = {Modality.IMAGE: (OUTPUT,)}
    batch_bound: ClassVar = {Modality.IMAGE: 0.0}
    read_on_host = frozenset({"pooled"})
    #: rows before those of the patches
    extra_rows: ClassVar[int] = 1

    @classmethod
    def row_width(cls, config: Any) -> int:
        return int(getattr(config, "vision_config", config).hidden_size)

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        return self._pooled_count if options.get("output") == "pooled" else self._count_of_all

    @cached_property
    def _count_of_all(self) -> Count:
        """What every picture comes to, since all are made one size."""
        high, wide = fixed_size(self.processors.image)
        patch = getattr(self.config, "vision_config", self.config).patch_size
        patches = (high // patch) * (wide // patch)
        return Count(patches + self.extra_rows, patches, 3 * high * wide)

    @cached_property
    def _pooled_count(self) -> Count:
        return replace(self._count_of_all, rows=1)

    def picture_inputs(self, picture: Image, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {**super().picture_inputs(picture, options), "pooled": POOLED[options.get("output") == "pooled"]}

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        tower = getattr(self.model, "vision_model", self.model)
        output = tower(pixel_values=inputs["pixel_values"])
        if not inputs["pooled"].any():
            return [flat(output.last_hidden_state)]
        return [
            cat(
                [
                    output.pooler_output[index][None] if pooled else output.last_hidden_state[index]
                    for index, pooled in enumerate(inputs["pooled"].tolist())
                ]
            )
        ]


class CLIPAdapter(PictureEncoder):
    family = "clip"
    architectures = ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection")
    left_out = ("text_model", "text_projection", "visual_projection", "logit_scale")
    row_rule: ClassVar = {Modality.IMAGE: "patches + 1 (class token first); pooled: 1"}


class SiglipAdapter(PictureEncoder):
    family = "siglip"
    architectures = ("SiglipModel", "SiglipVisionModel")
    left_out = ("text_model", "logit_scale", "logit_bias")
    row_rule: ClassVar = {Modality.IMAGE: "patches; pooled: 1"}
    extra_rows = 0


class Dinov2Adapter(PictureEncoder):
    family = "dinov2"
    architectures = ("Dinov2Model",)
    left_out = ()
    row_rule: ClassVar = {Modality.IMAGE: "patches + 1 (class token first); pooled: 1"}


class WhisperAdapter(AudioWindowAdapter):
    """The encoder's last hidden state over a window of 30 seconds, padding included, as its decoder attends to it."""

    family = "whisper"
    architectures = ("WhisperForConditionalGeneration", "WhisperModel")
    left_out = ("model.decoder", "decoder", "proj_out")
    row_rule: ClassVar = {Modality.AUDIO: "1500 (`max_source_positions`), whatever the recording's length"}
    batch_bound: ClassVar = {Modality.AUDIO: 1e-5}

    @classmethod
    def row_width(cls, config: Any) -> int:
        return int(config.d_model)

    def count_recording(self, samples: int, longest: int) -> Count:
        extractor, positions = self.processors.audio, self.config.max_source_positions
        return Count(positions, positions, extractor.nb_max_frames * extractor.feature_size)

    def recording_inputs(self, recordings: Sequence[Any], longest: int) -> dict[str, torch.Tensor]:
        extractor = self.processors.audio
        found = extractor(list(recordings), sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return {"input_features": found["input_features"]}

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        hidden = self.model.get_encoder()(inputs["input_features"]).last_hidden_state
        return [hidden.reshape(-1, hidden.shape[-1])]
