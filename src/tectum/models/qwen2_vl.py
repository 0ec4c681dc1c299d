"""Qwen2-VL, and what its successors share with it: patches on a (time, height, width) grid, merged 2 by 2 into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tectum.errors import BadRequestError
from tectum.models.features import Count, FeaturesAdapter
from tectum.models.grids import GridArguments, Rule, positions, segments
from tectum.models.options import FPS, MAX_FRAMES, NUM_FRAMES, detail, pixels
from tectum.types import Clip, Modality

if TYPE_CHECKING:
    from PIL.Image import Image

#: the processor refuses thinner pictures than this (side to side)
MAX_ASPECT_RATIO = 200
#: what `detail: low` scales a picture down to
LOW_DETAIL_PIXELS = 512 * 512
_BOUNDS = (
    pixels("min_pixels", "smaller media are scaled up to it"),
    pixels("max_pixels", "larger media are scaled down to it"),
)


class QwenVLAdapter(FeaturesAdapter):
    """The common part of the Qwen-VL families: their processors and their grids."""

    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    options: ClassVar = {
        Modality.IMAGE: (*_BOUNDS, detail("at most 512 x 512 pixels")),
        Modality.VIDEO: (*_BOUNDS, FPS, NUM_FRAMES, MAX_FRAMES),
    }
    default_sampling: ClassVar = {"fps": 2.0}
    frame_group = 2
    row_rule: ClassVar = {
        Modality.IMAGE: "height x width of the patch grid / 4",
        Modality.VIDEO: "time x height x width of the patch grid / 4; two frames are one step of time",
    }
    batch_bound: ClassVar = {Modality.IMAGE: 1e-5, Modality.VIDEO: 1e-5}
    #: what the tower derives from its grids
    grid_rules: ClassVar[tuple[Rule, ...]] = (positions, segments)

    def __init__(self, model: Any, processors: Any, config: Any, model_id: str, device: torch.device) -> None:
        super().__init__(model, processors, config, model_id, device)
        if getattr(processors.video, "cap_pixels_per_frame", False) is None:
            processors.video.cap_pixels_per_frame = False  # what None means today, said before every clip warns of it
        tower = model.visual if hasattr(model, "visual") else model.model.visual
        self._grid_arguments = GridArguments(tower, self.grid_rules, device)

    # --- pictures ---

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        _refuse_thin(width, height)
        size = self._size(self.processors.image, options)
        bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        patches = int(self.processors.image.get_number_of_image_patches(height, width, bounds))
        grid = (1, *self._sides(self.processors.image, height, width, size))
        assert grid[1] * grid[2] == patches, "the grid is the processor's own"
        return self._count_grid(grid, self.processors.image)

    def _count_grid(self, grid: tuple[int, int, int], processor: Any) -> Count:
        patches = grid[0] * grid[1] * grid[2]
        values = 3 * processor.temporal_patch_size * processor.patch_size**2
        return Count(patches // processor.merge_size**2, patches, patches * values, grid)

    def _sides(self, processor: Any, height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        factor = processor.patch_size * processor.merge_size
        sides = smart_resize(height, width, factor, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
        return sides[0] // processor.patch_size, sides[1] // processor.patch_size

    def picture_inputs(self, picture: Image, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        size = self._size(self.processors.image, options)
        features = self.processors.image(images=[picture], size=size, return_tensors="pt")
        return {"pixel_values": features["pixel_values"], "image_grid_thw": features["image_grid_thw"]}

    def _size(self, processor: Any, options: Mapping[str, Any]) -> dict[str, int]:
        """The processor's bounds on pixels, with the request's own where it gives them."""
        return self._bounds(processor.size, options)

    def _bounds(self, own: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, int]:
        least = options.get("min_pixels", own["shortest_edge"])
        most = options.get("max_pixels", own["longest_edge"])
        if options.get("detail") == "low":
            most = max(least, min(most, LOW_DETAIL_PIXELS))
        if least > most:
            text = f"Option min_pixels ({least}) is above max_pixels ({most}), given or the model's own"
            raise BadRequestError("invalid_option", text)
        return {"shortest_edge": least, "longest_edge": most}

    # --- the forward ---

    def placed(self, modality: Modality, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As ever, but grids stay on the host, and what follows from them comes along."""
        name = f"{modality}_grid_thw"
        if name not in inputs:
            return super().placed(modality, inputs)
        found = super().placed(modality, {key: tensor for key, tensor in inputs.items() if key != name})
        derived = self._grid_arguments.of(inputs[name])
        return {**found, name: inputs[name], **{f"{modality}_{key}": tensor for key, tensor in derived.items()}}

    # --- videos ---

    def count_clip(self, frames: int, width: int, height: int, options: Mapping[str, Any]) -> Count:
        _refuse_thin(width, height)
        processor = self.processors.video
        height_patches, width_patches = self._clip_sides(frames, height, width, self._size(processor, options))
        steps = -(-frames // processor.temporal_patch_size)
        return self._count_grid((steps, height_patches, width_patches), processor)

    def _clip_sides(self, frames: int, height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
        processor = self.processors.video
        if not processor.cap_pixels_per_frame:
            return self._sides(processor, height, width, size)
        factor = processor.patch_size * processor.merge_size
        share = int(processor.max_video_tokens * factor * factor * 0.9) * processor.temporal_patch_size // frames
        most = max(min(size["longest_edge"], share), int(size["shortest_edge"] * 1.05))
        return self._sides(processor, height, width, {**size, "longest_edge": most})

    def clip_inputs(self, clip: Clip, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        from transformers.video_utils import VideoMetadata

        info = clip.info
        metadata = VideoMetadata(
            total_num_frames=info.frames, fps=info.fps, duration=info.duration, frames_indices=list(clip.indices)
        )
        features = self.processors.video(
            videos=[clip.frames],
            video_metadata=[metadata],
            do_sample_frames=False,
            input_data_format="channels_last",
            size=self._size(self.processors.video, options),
            return_tensors="pt",
        )
        return {
            "pixel_values_videos": features["pixel_values_videos"],
            "video_grid_thw": features["video_grid_thw"],
        }


class Qwen2VLAdapter(QwenVLAdapter):
    family = "qwen2_vl"
    architectures = ("Qwen2VLForConditionalGeneration",)


def _refuse_thin(width: int, height: int) -> None:
    ratio = max(width, height) / max(1, min(width, height))
    if ratio > MAX_ASPECT_RATIO:
        shown = f"{ratio:.1f}".removesuffix(".0")
        text = f"The picture's sides are {shown} to 1; this family takes at most {MAX_ASPECT_RATIO} to 1"
        raise BadRequestError("media_refused", text, limit=MAX_ASPECT_RATIO)
