"""Qwen2-Audio: the Whisper encoder over a window of 30 seconds, pooled by 2 and projected; rows of the padding are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from tectum.models.audio import AudioWindowAdapter, halved_twice
from tectum.models.features import Count, cat
from tectum.types import Modality


class Qwen2AudioAdapter(AudioWindowAdapter):
    family = "qwen2_audio"
    architectures = ("Qwen2AudioForConditionalGeneration",)
    row_rule: ClassVar = {
        Modality.AUDIO: "`((n - 1) // 2 - 1) // 2 + 1` of n frames of 10 ms, of at most 30 s: one for 40 ms"
    }
    batch_bound: ClassVar = {Modality.AUDIO: 1e-5}
    read_on_host = frozenset({"lengths"})

    def count_recording(self, samples: int, longest: int) -> Count:
        extractor = self.processors.audio
        window = int(extractor.nb_max_frames)
        return Count(halved_twice(self.mel_frames(samples)), window // 2, window * extractor.feature_size)

    def recording_inputs(self, recordings: Sequence[Any], longest: int) -> dict[str, torch.Tensor]:
        found = self.window(recordings)
        return {"input_features": found["input_features"], "lengths": found["attention_mask"].sum(-1)}

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the model's forward does with its recordings: transformers 5.24 has no `get_audio_features` for it."""
        from transformers.masking_utils import create_bidirectional_mask

        base, mel = self.model.model, inputs["input_features"]
        convolved, pooled = base.audio_tower._get_feat_extract_output_lengths(inputs["lengths"])
        positions = torch.arange((mel.shape[-1] - 2) // 2 + 1, device=mel.device)
        mask = create_bidirectional_mask(
            config=base.audio_tower.config,
            inputs_embeds=mel.new_zeros((len(mel), len(positions), 1)),
            attention_mask=(positions[None] < convolved.to(mel.device, non_blocking=True)[:, None]).long(),
        )
        hidden = base.audio_tower(mel, attention_mask=mask).last_hidden_state
        rows = base.multi_modal_projector(hidden)
        return [cat([row[:count] for row, count in zip(rows, pooled.tolist(), strict=True)])]
