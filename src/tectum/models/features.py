"""The adapter for whatever follows transformers' convention: `get_{image,video,audio}_features`, rows in `pooler_output`.

A family says how many rows an item yields (from sizes alone) and what its processor makes of it; the rest is here. The
model is the full one without its language model, so that the features are computed by the very code that the colocated
model runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tectum.errors import BadRequestError, InternalError
from tectum.models.adapter import Adapter, EncodedRows, ItemPlan, Prepared
from tectum.models.sampling import Sampling, frame_times, retimed, sampled_fps, step_times
from tectum.types import (
    Clip,
    ClipInfo,
    Grid,
    ItemMetadata,
    MediaInfo,
    Modality,
    PictureInfo,
    Reading,
    Recording,
    RecordingInfo,
)

if TYPE_CHECKING:
    from PIL.Image import Image


#: times that a processor holds the decoded or the scaled media while it scales them: as arrays, laid out anew, scaled
WORKING_COPIES = 3


@dataclass(frozen=True, slots=True)
class Count:
    """What an item comes to. `elements`: values of its preprocessed form."""

    rows: int
    patches: int
    elements: int
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Processors:
    """The checkpoint's own preprocessing, by modality; None where the family has no such modality."""

    image: Any = None
    video: Any = None
    audio: Any = None


class FeaturesAdapter(Adapter):
    """One encoder whose model has `get_*_features`. A family overrides what differs."""

    modalities: ClassVar[frozenset[Modality]] = frozenset({Modality.IMAGE})
    #: how frames are taken where neither the request nor the checkpoint says so
    default_sampling: ClassVar[Mapping[str, float]] = {"num_frames": 8}
    #: frames that form one step of the time axis
    frame_group: ClassVar[int] = 1
    #: what receivers of this family want to know of each clip beyond its frames and times
    clip_facts: ClassVar[Mapping[str, Any]] = {}
    #: the family's rule takes a rate and a bound on the number at once
    rate_and_number: ClassVar[bool] = False
    #: inputs that the family itself reads, on the host: on a device that would wait for all that runs there
    read_on_host: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, model: torch.nn.Module, processors: Processors, config: Any, model_id: str, device: torch.device
    ) -> None:
        self.model_id = model_id
        self.config = config
        self.device = device
        self.processors = processors
        self.width = self.row_width(config)
        self.deepstack_layers = self.deepstack_of(config)
        self.model: Any = model.to(device).eval()
        self._torch_dtype = next(model.parameters()).dtype
        self.dtype = str(self._torch_dtype).removeprefix("torch.")
        self.encoder_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.sampling = Sampling(processors.video, self.default_sampling, self.frame_group, self.rate_and_number)

    # --- what a family says ---

    @classmethod
    def row_width(cls, config: Any) -> int:
        """Columns of the rows, read from the model's config: those of the language model's embeddings."""
        return int(config.get_text_config().hidden_size)

    @classmethod
    def deepstack_of(cls, config: Any) -> int:
        return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())

    @classmethod
    def refuse(cls, config: Any) -> str | None:
        """Why a checkpoint of a known architecture cannot be served all the same, or None."""
        return None

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        """What a picture of that size comes to. Raises BadRequestError `media_refused`, `invalid_option`."""
        raise NotImplementedError

    def scaled_picture(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        """Pixels of what the processor makes of a picture before it crops, cuts or squares it; 0: nothing of note."""
        size = self.picture_arguments(options).get("size", self.processors.image.size)
        return scaled_pixels(size, width, height)

    def count_clip(self, frames: int, width: int, height: int, options: Mapping[str, Any]) -> Count:
        """What `frames` frames of that size come to."""
        raise NotImplementedError

    def count_recording(self, samples: int, longest: int) -> Count:
        """What a recording of that many samples, at the processor's rate, comes to; `longest` is that of its prompt."""
        raise NotImplementedError

    def picture_inputs(self, picture: Image, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Arguments of the features call for one picture; each tensor's first axis is joined with the others'."""
        features = self.processors.image(images=[picture], return_tensors="pt", **self.picture_arguments(options))
        return {"pixel_values": features["pixel_values"]}

    def picture_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The request's options in the words of the image processor."""
        return {}

    def clip_inputs(self, clip: Clip, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def recording_inputs(self, recordings: Sequence[Any], longest: int) -> dict[str, torch.Tensor]:
        """As `picture_inputs`, for all recordings of a request at once: some families pad them to the longest.

        recordings: float32 `[samples]` each. longest: samples of the longest in their prompt.
        """
        raise NotImplementedError

    # --- before the forward ---

    def reading(self, modality: Modality, options: Mapping[str, Any]) -> Reading:
        if modality is Modality.VIDEO:
            read = self.read_options(modality, options)

            def choose(info: ClipInfo) -> list[int]:
                self._refuse_unheard(info, read)
                return self.sampling.choose(info, read)

            return Reading(choose=choose)
        return Reading(rate=getattr(self.processors.audio, "sampling_rate", 16000))

    def plan(self, infos: Sequence[MediaInfo], options: Mapping[str, Any]) -> tuple[ItemPlan, ...]:
        modality = MODALITY_OF[type(infos[0])]
        read = self.for_request(modality, self.read_options(modality, options), len(infos))
        lengths = [self._samples(info) for info in infos if isinstance(info, RecordingInfo)]
        longest = max([read.get("padded_samples", 0), *lengths])
        plans = []
        for index, info in enumerate(infos):
            try:
                count, decoded, scaled = self._count(info, read, longest)
            except BadRequestError as error:
                raise error.at_item(index) from None
            held = decoded + WORKING_COPIES * max(decoded, 3 * scaled) + 2 * 4 * count.elements
            plans.append(ItemPlan(count.rows, count.patches, scaled, held))
        return tuple(plans)

    def _samples(self, info: RecordingInfo) -> int:
        """Samples of a recording at the family's rate, as far as its container says."""
        return max(1, math.ceil((info.seconds or 0.0) * self.processors.audio.sampling_rate - 1e-6))

    def _count(self, info: MediaInfo, options: Mapping[str, Any], longest: int) -> tuple[Count, int, int]:
        """The count, bytes of the decoded media, and `ItemPlan.scaled`. longest: samples of the longest in the prompt."""
        if isinstance(info, PictureInfo):
            size = (info.width, info.height)
            return self.count_picture(*size, options), math.prod(size) * 3, self.scaled_picture(*size, options)
        if isinstance(info, ClipInfo):
            size = (info.width, info.height)
            frames = len(self.sampling.choose(info, options))
            scaled = frames * scaled_pixels(self.processors.video.size, *size)
            return self.count_clip(frames, *size, options), frames * math.prod(size) * 3, scaled
        samples = self._samples(info)
        return self.count_recording(samples, longest), samples * 4, 0

    def for_request(self, modality: Modality, options: dict[str, Any], count: int) -> dict[str, Any]:
        """The options with those made explicit that depend on how many items the request holds."""
        return options

    def content_options(self, modality: Modality, given: Mapping[str, Any], count: int) -> dict[str, Any]:
        return self.for_request(modality, self.read_options(modality, given), count)

    @torch.inference_mode()
    def prepare(
        self, media: Iterable[Any], options: Mapping[str, Any], modality: Modality = Modality.IMAGE
    ) -> Prepared:
        read = self.read_options(modality, options)
        if modality is Modality.AUDIO:
            inputs, items = self._prepare_recordings(list(media), read)
        else:
            one = self._prepare_picture if modality is Modality.IMAGE else self._prepare_clip
            counted = media if isinstance(media, Sized) else list(media)
            read = self.for_request(modality, read, len(counted))
            parts, items = [], []
            for index, item in enumerate(counted):
                try:
                    part, metadata = one(item, read)
                except BadRequestError as error:
                    raise error.at_item(index) from None
                parts.append(part)
                items.append(metadata)
            inputs = join(parts)
        if self.device.type == "cuda":
            inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
        return Prepared(inputs, tuple(items))

    def _prepare_picture(
        self, picture: Image, options: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], ItemMetadata]:
        count = self.count_picture(*picture.size, options)
        inputs = self.picture_inputs(picture, options)
        return inputs, ItemMetadata(Modality.IMAGE, count.rows, count.grid, count.patches, picture.size)

    def _prepare_clip(self, clip: Clip, options: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], ItemMetadata]:
        self._refuse_unheard(clip.info, options)
        clip = replace(clip, info=retimed(clip.info, options))
        frames, height, width, _ = clip.frames.shape
        count = self.count_clip(frames, width, height, options)
        facts = {**self.sampling.describe(clip, options), **self.clip_facts}
        if clip.info.has_audio:
            facts["audio_track"] = options.get("audio_track", "not heard: the model has no audio")
        seconds = self.frame_group / sampled_fps(clip)
        times = step_times(frame_times(clip), self.frame_group)
        metadata = ItemMetadata(
            Modality.VIDEO, count.rows, count.grid, count.patches, (width, height), seconds, times, facts
        )
        return self.clip_inputs(clip, options), metadata

    def _refuse_unheard(self, info: ClipInfo, options: Mapping[str, Any]) -> None:
        """A model that hears must not lose a clip's sound without anybody having said so."""
        if info.has_audio and Modality.AUDIO in self.modalities and "audio_track" not in options:
            text = (
                "The clip has sound, and the model hears: say audio_track=separate (an audio request brings it) or drop"
            )
            raise BadRequestError("media_refused", text)

    def _prepare_recordings(
        self, recordings: list[Recording], options: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], list[ItemMetadata]]:
        longest = max(options.get("padded_samples", 0), *(len(recording.samples) for recording in recordings))
        items = []
        for index, recording in enumerate(recordings):
            try:
                items.append(self._recording_metadata(recording, longest))
            except BadRequestError as error:
                raise error.at_item(index) from None
        return self.recording_inputs([recording.samples for recording in recordings], longest), items

    def _recording_metadata(self, recording: Recording, longest: int) -> ItemMetadata:
        count = self.count_recording(len(recording.samples), longest)
        if count.rows < 1:
            raise BadRequestError("media_refused", f"The recording is {recording.seconds:.3f} s, too short for one row")
        facts = {
            "seconds": recording.seconds,
            "seconds_used": min(recording.seconds, self.longest_recording()),
            "source_rate": recording.info.rate,
            "source_channels": recording.info.channels,
            **self.recording_facts(len(recording.samples), longest),
        }
        return ItemMetadata(Modality.AUDIO, count.rows, count.grid, count.patches, facts=facts)

    def recording_facts(self, samples: int, longest: int) -> dict[str, Any]:
        """What receivers of this family want to know of a recording beyond its rows; arguments as in `count_recording`."""
        return {}

    def longest_recording(self) -> float:
        """Seconds of a recording that the family's processor keeps; the rest it cuts off."""
        return float("inf")

    # --- the forward ---

    def compile(self) -> None:
        """Let torch.compile make the towers faster. Rows are then near those of the model in one piece, not equal."""
        for tower in towers(self.model):
            tower.compile(dynamic=True)  # without it, every size of picture would be compiled anew
        self.compiled = True

    @torch.inference_mode()
    def encode(self, batch: Sequence[Prepared]) -> list[EncodedRows]:
        modality = batch[0].modality
        arrays = self.features(modality, self.placed(modality, join([member.inputs for member in batch])))
        if len(batch) == 1:
            return [EncodedRows(arrays[0], tuple(arrays[1:]))]
        counts = [member.rows for member in batch]
        if arrays[0].shape[0] != sum(counts):  # whose rows are missing cannot be told, so nobody's can be trusted
            text = f"Encoder produced {arrays[0].shape[0]} tokens, but preprocessor metadata expected {sum(counts)}"
            raise InternalError("row_mismatch", text, rows=arrays[0].shape[0], expected=sum(counts))
        split = zip(*(array.split(counts) for array in arrays), strict=True)
        return [EncodedRows(rows, tuple(layers)) for rows, *layers in split]

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """All rows `[sum, width]` of the batch in order, and after them its deepstack layers in the same shape."""
        call = getattr(self.model, f"get_{modality}_features")
        output = call(**inputs)
        layers = getattr(output, "deepstack_features", None) or ()
        return [flat(output.pooler_output), *(flat(layer) for layer in layers)]

    def placed(self, modality: Modality, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The arguments of the features call, on the device and, where they are real numbers, in the tower's dtype."""

        def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in self.read_on_host:
                return tensor
            dtype = self._torch_dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(self.device, dtype, non_blocking=True)

        return {name: move(name, tensor) for name, tensor in inputs.items()}


def scaled_pixels(size: Mapping[str, int], width: int, height: int) -> int:
    """Pixels of a picture that a processor scales to `size` with its sides kept in proportion; 0 where they are not.

    A size with both edges is the Qwen families': bounds on pixels, and what is scaled to them is the preprocessed form.
    """
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    long, short = max(width, height), max(1, min(width, height))
    if shortest and not longest:
        return shortest * int(shortest * long / short)
    if longest and not shortest:
        other = int(longest * short / long)
        return longest * max(1, other + other % 2)
    return 0


def towers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The encoder's large parts: children of the model, or of its base model, that hold weights."""
    parts: list[torch.nn.Module] = []
    for name, child in model.named_children():
        parts += child.children() if name == "model" else [child]
    return [part for part in parts if any(True for _ in part.parameters())]


#: what an item's header gives → what the item is
MODALITY_OF = {PictureInfo: Modality.IMAGE, ClipInfo: Modality.VIDEO, RecordingInfo: Modality.AUDIO}


def flat(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """`[n, width]` from a tensor of any rank, or from one tensor for each item."""
    if isinstance(rows, torch.Tensor):
        return rows.reshape(-1, rows.shape[-1])
    return cat([part.reshape(-1, part.shape[-1]) for part in rows])


def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor; a single one is passed on without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def join(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The inputs of several items or requests as one, along the first axis; a shorter last axis is padded with zeros."""
    if len(parts) == 1:
        return dict(parts[0])
    joined = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        longest = max(tensor.shape[-1] for tensor in tensors)
        padded = [
            tensor
            if tensor.ndim < 2 or tensor.shape[-1] == longest
            else torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1]))
            for tensor in tensors
        ]
        joined[name] = cat(padded)
    return joined
