"""Qwen2.5-Omni's thinker: pictures and videos as Qwen2.5-VL, audio through windows of its own Whisper-like tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from tectum.models.audio import AudioWindowAdapter, halved_twice
from tectum.models.features import Count
from tectum.models.grids import windows
from tectum.models.options import AUDIO_TRACK
from tectum.models.qwen2_vl import QwenVLAdapter
from tectum.types import Modality


class OmniAdapter(QwenVLAdapter, AudioWindowAdapter):
    """What the two Omni families share. Of the full model only the thinker is looked at."""

    modalities = frozenset({Modality.IMAGE, Modality.VIDEO, Modality.AUDIO})
    options: ClassVar = {**QwenVLAdapter.options, Modality.VIDEO: (*QwenVLAdapter.options[Modality.VIDEO], AUDIO_TRACK)}
    batch_bound: ClassVar = {**QwenVLAdapter.batch_bound, Modality.AUDIO: 2e-5}
    #: the family's processor, whose default bounds on videos hold over those of the checkpoint
    processor_class: ClassVar[str]

    def _size(self, processor: Any, options: Mapping[str, Any]) -> dict[str, int]:
        if processor is not self.processors.video:
            return super()._size(processor, options)
        import transformers

        own = getattr(transformers, self.processor_class).videos_kwargs["size"]
        return self._bounds(own, options)

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        arrays = super().features(modality, inputs)
        return arrays[:1] if modality is Modality.AUDIO else arrays


class Qwen25OmniAdapter(OmniAdapter):
    family = "qwen2_5_omni"
    architectures = (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniModel",
    )
    processor_class = "Qwen2_5OmniProcessor"
    grid_rules: ClassVar = (*OmniAdapter.grid_rules, windows)
    row_rule: ClassVar = {
        **OmniAdapter.row_rule,
        Modality.AUDIO: "`((n - 1) // 2 - 1) // 2 + 1` of n frames of 10 ms, of at most the extractor's window",
    }

    def count_recording(self, samples: int, longest: int) -> Count:
        extractor, frames = self.processors.audio, self.mel_frames(samples)
        return Count(halved_twice(frames), (frames + 1) // 2, extractor.nb_max_frames * extractor.feature_size)

    def recording_inputs(self, recordings: Sequence[Any], longest: int) -> dict[str, torch.Tensor]:
        found = self.window(recordings)
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
