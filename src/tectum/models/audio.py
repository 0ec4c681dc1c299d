"""What the audio families share: a Whisper feature extractor, and the count of rows from a recording's length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tectum.models.features import FeaturesAdapter
from tectum.types import Modality


class AudioWindowAdapter(FeaturesAdapter):
    """Families whose extractor makes one window of fixed length of each recording: shorter is padded, longer is cut."""

    modalities = frozenset({Modality.AUDIO})

    def longest_recording(self) -> float:
        return float(self.processors.audio.chunk_length)

    def mel_frames(self, samples: int) -> int:
        """Frames of the spectrogram that hold sound: one for every hop begun, at most a window's."""
        extractor = self.processors.audio
        return min(-(-samples // extractor.hop_length), int(extractor.nb_max_frames))

    def recording_facts(self, samples: int, longest: int) -> dict[str, Any]:
        return {"mel_frames": self.mel_frames(samples)}

    def window(self, recordings: Sequence[Any]) -> dict[str, torch.Tensor]:
        """`input_features` `[n, mel bins, frames]` and `attention_mask` `[n, frames]` of the recordings."""
        extractor = self.processors.audio
        rate = extractor.sampling_rate
        found = extractor(
            list(recordings), sampling_rate=rate, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": found["input_features"], "attention_mask": found["attention_mask"]}


def halved_twice(frames: int) -> int:
    """Rows of `frames` frames after a convolution of stride 2 and a pooling by 2."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1
