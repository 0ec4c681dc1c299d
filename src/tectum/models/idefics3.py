"""Idefics3: a picture as tiles and the whole of it once more, each the same number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tectum.errors import BadRequestError
from tectum.models.features import Count, FeaturesAdapter, flat
from tectum.models.options import Option, detail
from tectum.types import Modality

if TYPE_CHECKING:
    from PIL.Image import Image


class Idefics3Adapter(FeaturesAdapter):
    family = "idefics3"
    architectures = ("Idefics3ForConditionalGeneration",)
    options: ClassVar = {
        Modality.IMAGE: (
            detail("the whole picture once, without tiles", "tiles"),
            Option("do_image_splitting", bool, "cut the picture into tiles"),
            Option("longest_edge", int, "scale the picture to this side before it is cut", most=4096),
        )
    }
    row_rule: ClassVar = {Modality.IMAGE: "169 (`image_seq_len`) for each tile, and for the whole picture"}
    batch_bound: ClassVar = {Modality.IMAGE: 0.0}

    def _tile(self) -> int:
        return int(self.processors.image.max_image_size["longest_edge"])

    def tiles(self, count: int) -> Count:
        """`count` tiles: rows, patches and values of them."""
        patches = (self._tile() // self.config.vision_config.patch_size) ** 2
        return Count(count * patches // self.config.scale_factor**2, count * patches, count * 3 * self._tile() ** 2)

    def picture_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        edge = options.get("longest_edge", self.processors.image.size["longest_edge"])
        if edge < self._tile():
            text = f"Option longest_edge must be at least {self._tile()} pixels, the side of a tile"
            raise BadRequestError("invalid_option", text)
        splitting = options.get("do_image_splitting", self.processors.image.do_image_splitting)
        return {
            "size": {"longest_edge": edge},
            "do_image_splitting": bool(splitting) and options.get("detail") != "low",
        }

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        arguments = self.picture_arguments(options)
        tiles, _, _ = self.processors.image.get_number_of_image_patches(height, width, arguments)
        return self.tiles(max(1, tiles))

    def picture_inputs(self, picture: Image, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        features = self.processors.image(images=[[picture]], return_tensors="pt", **self.picture_arguments(options))
        return tiles_of(features)

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        # the model sorts pictures by prompt; all tiles of a batch may stand in one
        whole = {name: tensor[None] for name, tensor in inputs.items()}
        return [flat(self.model.get_image_features(**whole).pooler_output)]


def tiles_of(features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tiles `[n, 3, side, side]` and their mask `[n, side, side]` of the one prompt that was preprocessed."""
    return {name: features[name][0] for name in ("pixel_values", "pixel_attention_mask") if name in features}
