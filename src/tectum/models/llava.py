"""LLaVA: one picture of fixed size, the rows of one layer of a CLIP or SigLIP tower, projected."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from tectum.models.features import Count, FeaturesAdapter
from tectum.types import Modality

_TOWERS = ("clip_vision_model", "siglip_vision_model")


class LlavaAdapter(FeaturesAdapter):
    family = "llava"
    architectures = ("LlavaForConditionalGeneration",)
    row_rule: ClassVar = {
        Modality.IMAGE: "patches of the processor's crop (576 for 336 x 336), whatever the picture's size"
    }
    batch_bound: ClassVar = {Modality.IMAGE: 0.0}

    @classmethod
    def refuse(cls, config: Any) -> str | None:
        tower = config.vision_config.model_type
        return None if tower in _TOWERS else f"its tower is {tower}; known are: {', '.join(_TOWERS)}"

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        return self._count_of_all

    def scaled_picture(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        if self.processors.image.do_pad:  # to a square as wide as the longer side
            return max(width, height) ** 2
        return super().scaled_picture(width, height, options)

    @cached_property
    def _count_of_all(self) -> Count:
        """What every picture comes to, since all are made one size."""
        high, wide = fixed_size(self.processors.image)
        patch, vision = self.config.vision_config.patch_size, self.config.vision_config
        patches = (high // patch) * (wide // patch)
        rows = patches + (vision.model_type == "clip_vision_model")  # CLIP's class token
        rows -= self.config.vision_feature_select_strategy == "default"  # which this strategy drops: the first row
        return Count(rows, patches, 3 * high * wide)


def fixed_size(processor: Any) -> tuple[int, int]:
    """(height, width) of what a processor with one output size yields: its crop, else its size."""
    size = processor.crop_size if processor.do_center_crop else processor.size
    if size.get("height"):
        return int(size["height"]), int(size["width"])
    return int(size["shortest_edge"]), int(size["shortest_edge"])
