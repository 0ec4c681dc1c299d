"""InternVL: a picture as tiles and a thumbnail, each the same number of rows; a frame of a video is one tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tectum.errors import BadRequestError
from tectum.models.features import Count, FeaturesAdapter, flat
from tectum.models.llava import fixed_size
from tectum.models.llava_onevision import frames_through
from tectum.models.options import FPS, MAX_FRAMES, NUM_FRAMES, Option, detail
from tectum.types import Clip, Modality

_TILES = (
    Option("min_patches", int, "at least so many tiles", most=64),
    Option("max_patches", int, "at most so many tiles, the thumbnail not counted", most=64),
)


class InternVLAdapter(FeaturesAdapter):
    family = "internvl"
    architectures = ("InternVLForConditionalGeneration",)
    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    options: ClassVar = {
        Modality.IMAGE: (*_TILES, detail("one tile", "tiles")),
        Modality.VIDEO: (FPS, NUM_FRAMES, MAX_FRAMES),
    }
    row_rule: ClassVar = {
        Modality.IMAGE: "a quarter of a tile's patches (256 of 448 x 448) for each tile and the thumbnail",
        Modality.VIDEO: "a quarter of a tile's patches for each frame",
    }
    batch_bound: ClassVar = {Modality.IMAGE: 0.0, Modality.VIDEO: 0.0}

    def tiles(self, count: int, processor: Any) -> Count:
        """`count` tiles of the size that the processor makes."""
        high, wide = fixed_size(processor)
        vision = self.config.vision_config
        patches = (high // vision.patch_size[0]) * (wide // vision.patch_size[1])
        rows = int(patches * self.config.downsample_ratio**2)
        return Count(count * rows, count * patches, count * 3 * high * wide)

    def picture_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        own = self.processors.image
        least = options.get("min_patches", own.min_patches)
        most = options.get("max_patches", own.max_patches)
        if least > most:
            raise BadRequestError("invalid_option", f"Option min_patches ({least}) is above max_patches ({most})")
        return {"crop_to_patches": options.get("detail") != "low", "min_patches": least, "max_patches": most}

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        processor = self.processors.image
        return self.tiles(
            processor.get_number_of_image_patches(height, width, self.picture_arguments(options)), processor
        )

    def count_clip(self, frames: int, width: int, height: int, options: Mapping[str, Any]) -> Count:
        return self.tiles(frames, self.processors.video)

    def clip_inputs(self, clip: Clip, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"pixel_values": frames_through(self.processors.video, clip)["pixel_values_videos"]}

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [flat(self.model.get_image_features(**inputs).pooler_output)]
