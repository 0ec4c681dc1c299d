"""Gemma 3: a picture is a fixed number of rows; pan and scan, where asked for, adds as many for each crop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from tectum.models.features import Count, FeaturesAdapter
from tectum.models.options import Option, detail
from tectum.types import Modality


class Gemma3Adapter(FeaturesAdapter):
    family = "gemma3"
    architectures = ("Gemma3ForConditionalGeneration",)
    options: ClassVar = {
        Modality.IMAGE: (
            detail("the picture alone", "with crops (pan and scan)"),
            Option("do_pan_and_scan", bool, "add crops of a picture that is far from square"),
            Option("pan_and_scan_min_crop_size", int, "smallest side of a crop", most=4096, unit="number of pixels"),
            Option("pan_and_scan_max_num_crops", int, "at most so many crops", most=64),
            Option("pan_and_scan_min_ratio_to_activate", float, "crops from this side ratio on", least=0, most=100),
        )
    }
    row_rule: ClassVar = {Modality.IMAGE: "256 (`mm_tokens_per_image`), and as many for each crop of pan and scan"}
    batch_bound: ClassVar = {Modality.IMAGE: 0.0}

    def picture_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        from transformers import Gemma3Processor

        # the family's own defaults hold over the checkpoint's image processor: so they do in the colocated model
        default = {name: value for name, value in Gemma3Processor.images_kwargs.items() if "pan_and_scan" in name}
        asked = {name: value for name, value in options.items() if name in default}
        detail_asks = {"high": {"do_pan_and_scan": True}, "low": {"do_pan_and_scan": False}}
        return {**default, **asked, **detail_asks.get(options.get("detail", "auto"), {})}

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        views = 1 + self._crops(width, height, self.picture_arguments(options))
        size, vision = self.processors.image.size, self.config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        elements = views * 3 * size["height"] * size["width"]
        return Count(views * self.config.mm_tokens_per_image, views * patches, elements)

    @staticmethod
    def _crops(width: int, height: int, arguments: Mapping[str, Any]) -> int:
        """How many crops pan and scan makes: along the longer side, none below the smallest crop."""
        long, short = max(width, height), min(width, height)
        smallest = arguments["pan_and_scan_min_crop_size"]
        if not arguments["do_pan_and_scan"] or long / short < arguments["pan_and_scan_min_ratio_to_activate"]:
            return 0
        crops = min(long // smallest, math.floor(long / short + 0.5))
        crops = min(arguments["pan_and_scan_max_num_crops"], max(2, crops))
        return 0 if min(math.ceil(long / crops), short) < smallest else int(crops)
