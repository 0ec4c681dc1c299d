"""The reference: transformers' own model and processor, in one piece, on the same media in one prompt.

Nothing of `tectum.models` is used here, so that the two sides have only transformers in common.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tectum.types import Clip
from tests import zoo

#: what a receiver does not have: everything that the encoder looks at
MEDIA_INPUTS = {"pixel_values", "pixel_values_videos", "input_features", "pixel_attention_mask", "image_sizes"}
MEDIA_INPUTS |= {"batch_num_images", "feature_attention_mask"}
ENCODERS = {"clip", "siglip", "dinov2", "whisper"}


@dataclass
class Reference:
    """What the model in one piece makes of one request. placeholders: tokens of the prompt that rows take the place of."""

    rows: torch.Tensor
    deepstack: list[torch.Tensor]
    placeholders: int | None
    inputs: dict[str, Any]
    logits: torch.Tensor | None


class Colocated:
    """One family's checkpoint, loaded whole."""

    def __init__(
        self, family: str, folder: Path, dtype: torch.dtype = torch.float32, backend: str | None = None
    ) -> None:
        self.family = family
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=dtype).eval()
        if family in ENCODERS or family == "voxtral":
            auto = (
                transformers.AutoFeatureExtractor
                if family in ("whisper", "voxtral")
                else transformers.AutoImageProcessor
            )
            self.processor = auto.from_pretrained(folder)
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder) if family == "voxtral" else None
        else:
            self.processor = transformers.AutoProcessor.from_pretrained(folder)
        if backend is not None:
            self.processor.image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)

    @torch.no_grad()
    def run(self, modality: str, items: Sequence[Any], **more: Any) -> Reference:
        """Rows, placeholders and logits of one prompt with these items. more: the processor's own arguments."""
        inputs = {name: self._cast(value) for name, value in self._inputs(modality, items, **more).items()}
        rows, deepstack = self._rows(modality, inputs)
        if self.family in ENCODERS:
            return Reference(rows, [], None, inputs, None)
        token = self._token(modality)
        placeholders = int((inputs["input_ids"] == token).sum())
        return Reference(rows, deepstack, placeholders, inputs, self.model(**inputs).logits)

    def without_media(self, reference: Reference) -> dict[str, Any]:
        return {name: value for name, value in reference.inputs.items() if name not in MEDIA_INPUTS}

    def _cast(self, value: Any) -> Any:
        """Pixels and spectrograms in the model's type, as its callers must; times in seconds stay as they are."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            return value.to(self.model.dtype)
        return value

    # --- the processor ---

    def _inputs(self, modality: str, items: Sequence[Any], **more: Any) -> dict[str, Any]:
        if self.family in ENCODERS:
            if modality == "image":
                return dict(self.processor(images=list(items), return_tensors="pt", **more))
            return dict(self.processor(list(items), sampling_rate=16000, return_tensors="pt", **more))
        prompt = "a" + "".join(zoo.PLACEHOLDERS[self.family][modality] + "b" for _ in items) + " what?"
        if self.family == "voxtral":
            return self._voxtral(prompt, items)
        named = {"image": {"images": list(items)}, "audio": {"audio": list(items), "sampling_rate": 16000}}.get(
            modality
        )
        if modality == "image" and self.family in ("idefics3", "smolvlm", "llava_onevision"):
            named = {"images": [list(items)]}
        if modality == "video":
            named = self._videos(items)
        found = self.processor(text=[prompt], return_tensors="pt", **named, **more)
        return {name: value for name, value in found.items() if name not in ("rows", "cols", "video_metadata")}

    def _videos(self, clips: Sequence[Clip]) -> dict[str, Any]:
        metadata = [
            transformers.video_utils.VideoMetadata(
                total_num_frames=clip.info.frames,
                fps=clip.info.fps,
                duration=clip.info.duration,
                frames_indices=list(clip.indices),
                width=clip.info.width,
                height=clip.info.height,
            )
            for clip in clips
        ]
        named = {"videos": [clip.frames for clip in clips], "video_metadata": metadata, "do_sample_frames": False}
        if "omni" in self.family:  # its processor does not look at the metadata: it must be told
            named["fps"] = metadata[0].sampled_fps
        return named

    def _voxtral(self, prompt: str, items: Sequence[Any]) -> dict[str, Any]:
        """As VoxtralProcessor does it: each recording in whole windows, so many tokens for each."""
        window, frames = self.processor.n_samples, self.processor.nb_max_frames
        config = self.model.config.audio_config
        per_window = config.max_source_positions * config.hidden_size // config.intermediate_size
        mels, pieces = [], prompt.split("[AUDIO]")
        text = pieces[0]
        for samples, piece in zip(items, pieces[1:], strict=True):
            arguments = {"padding": True, "truncation": False, "pad_to_multiple_of": window}
            found = self.processor(samples, sampling_rate=16000, return_tensors="pt", **arguments)["input_features"]
            chunks = found.reshape(self.processor.feature_size, -1, frames).transpose(0, 1)
            mels.append(chunks)
            text += "[AUDIO]" * (per_window * len(chunks)) + piece
        return {**self.tokenizer([text], return_tensors="pt"), "input_features": torch.cat(mels)}

    # --- the features ---

    def _rows(self, modality: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        base = getattr(self.model, "model", self.model)
        if self.family in ENCODERS:
            return _flat(self._encoder_states(inputs)), []
        if self.family == "qwen2_audio":
            return self._caught(inputs), []
        call = getattr(base, f"get_{modality}_features", None) or base.get_image_features
        names = inspect.signature(call).parameters
        arguments = {name: value for name, value in inputs.items() if name in names}
        output = call(**arguments)
        layers = getattr(output, "deepstack_features", None) or []
        pooled = (
            output.pooler_output if getattr(output, "pooler_output", None) is not None else output.last_hidden_state
        )
        return _flat(pooled), [_flat(layer) for layer in layers]

    def _encoder_states(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.family == "whisper":
            return self.model.model.encoder(inputs["input_features"]).last_hidden_state
        tower = self.model if self.family == "dinov2" else self.model.vision_model
        return tower(inputs["pixel_values"]).last_hidden_state

    def _caught(self, inputs: dict[str, Any]) -> torch.Tensor:
        """What the model's forward scatters into its prompt, caught on its way into the language model."""
        caught: dict[str, torch.Tensor] = {}

        def hook(module: Any, arguments: Any, named: dict[str, Any]) -> None:
            caught["embeds"] = named["inputs_embeds"]

        handle = self.model.model.language_model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            self.model(**inputs)
        finally:
            handle.remove()
        return caught["embeds"][inputs["input_ids"] == self._token("audio")]

    def _token(self, modality: str) -> int:
        config = self.model.config
        if modality == "video" and self.family in ("internvl", "smolvlm"):
            return int(config.image_token_id)
        return int(getattr(config, f"{modality}_token_id"))


def _flat(rows: Any) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows.reshape(-1, rows.shape[-1])
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in rows])
