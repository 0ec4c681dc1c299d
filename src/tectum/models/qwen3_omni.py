"""Qwen3-Omni's thinker: pictures and videos with deepstack, audio of any length in chunks of 100 frames.

Its extractor pads the recordings of a prompt to the longest, and the spectrogram of the last frames depends on that: a
prompt whose recordings are spread over several encoders says how long the longest is, with `padded_samples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from tectum.models.features import Count
from tectum.models.grids import interpolation
from tectum.models.options import Option
from tectum.models.qwen2_5_omni import OmniAdapter
from tectum.types import Modality

_PADDED = Option(
    "padded_samples",
    int,
    "samples (at the model's rate) of the longest recording in the prompt (default: in this request)",
    most=1 << 30,
    unit="number of samples",
)


class Qwen3OmniAdapter(OmniAdapter):
    family = "qwen3_omni"
    architectures = ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")
    processor_class = "Qwen3OmniMoeProcessor"
    grid_rules: ClassVar = (*OmniAdapter.grid_rules, interpolation)
    options: ClassVar = {**OmniAdapter.options, Modality.AUDIO: (_PADDED,)}
    depends_on_prompt = "recordings are padded to the longest in the prompt: option `padded_samples`"
    row_rule: ClassVar = {
        **OmniAdapter.row_rule,
        Modality.AUDIO: "13 for each 100 frames of 10 ms, and an eighth of the rest",
    }

    def longest_recording(self) -> float:
        return float("inf")

    def count_recording(self, samples: int, longest: int) -> Count:
        extractor = self.processors.audio
        padded = longest // extractor.hop_length
        whole, rest = divmod(self._frames(samples, longest), 100)
        rows = whole * 13 + (((rest + 1) // 2 + 1) // 2 + 1) // 2
        return Count(rows, rows, padded * extractor.feature_size)

    def _frames(self, samples: int, longest: int) -> int:
        hop = self.processors.audio.hop_length
        return int(min(-(-samples // hop), longest // hop))

    def recording_facts(self, samples: int, longest: int) -> dict[str, Any]:
        return {"mel_frames": self._frames(samples, longest)}

    def recording_inputs(self, recordings: Sequence[Any], longest: int) -> dict[str, torch.Tensor]:
        extractor = self.processors.audio
        found = extractor(
            list(recordings),
            sampling_rate=extractor.sampling_rate,
            padding="max_length",
            max_length=longest,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}
