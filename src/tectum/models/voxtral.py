"""Voxtral: the Whisper encoder over as many windows of 30 seconds as the recording needs, four positions a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from tectum.models.features import Count, FeaturesAdapter, cat
from tectum.types import Modality


class VoxtralAdapter(FeaturesAdapter):
    family = "voxtral"
    architectures = ("VoxtralForConditionalGeneration",)
    modalities = frozenset({Modality.AUDIO})
    row_rule: ClassVar = {Modality.AUDIO: "375 for each window of 30 s begun, padding included"}
    batch_bound: ClassVar = {Modality.AUDIO: 1e-5}

    def count_recording(self, samples: int, longest: int) -> Count:
        extractor, tower = self.processors.audio, self.config.audio_config
        windows = -(-samples // extractor.n_samples)
        positions = windows * extractor.nb_max_frames // 2
        rows = positions * tower.hidden_size // tower.intermediate_size
        return Count(rows, positions, windows * extractor.nb_max_frames * extractor.feature_size)

    def recording_inputs(self, recordings: Sequence[Any], longest: int) -> dict[str, torch.Tensor]:
        extractor = self.processors.audio
        windows = []
        for samples in recordings:  # each on its own, as the family does it: the loudest moment sets the floor
            mel = extractor(
                samples,
                sampling_rate=extractor.sampling_rate,
                padding=True,
                truncation=False,
                pad_to_multiple_of=extractor.n_samples,
                return_tensors="pt",
            )["input_features"]
            windows.append(mel.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1))
        return {"input_features": cat(windows)}
