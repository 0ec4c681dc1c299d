"""Qwen2-VL, and what its successors share with it: patches on a (time, height, width) grid, merged 2 by 2 into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tectum.errors import BadRequestError
from tectum.models.adapter import Adapter, EncodedRows, Prepared
from tectum.types import ItemMetadata, Modality

if TYPE_CHECKING:
    from PIL.Image import Image

#: the processor refuses thinner pictures than this (side to side)
MAX_ASPECT_RATIO = 200
#: upper bound of the pixel options: beyond it a picture would be scaled up to gigabytes
MAX_OPTION_PIXELS = 1 << 28


class QwenVLAdapter(Adapter):
    """The common part of the Qwen-VL families; a family names its tower and its width."""

    modalities = frozenset({Modality.IMAGE})
    prefixes = ("visual.", "model.visual.")
    options: ClassVar[tuple[str, ...]] = ("max_pixels", "min_pixels")

    def __init__(
        self, tower: torch.nn.Module, processor: Any, config: Any, model_id: str, device: torch.device
    ) -> None:
        self.model_id = model_id
        self.architecture = config.architectures[0]
        self.device = device
        self.width = self.row_width(config)
        self.deepstack_layers = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        self._tower = tower.to(device).eval()
        self._processor = processor
        self._merged = processor.merge_size**2
        self._torch_dtype = next(tower.parameters()).dtype
        self.dtype = str(self._torch_dtype).removeprefix("torch.")
        self.encoder_bytes = sum(p.nbytes for p in tower.parameters())

    # --- before the forward ---

    def prepare(self, media: Sequence[Image], options: Mapping[str, Any]) -> Prepared:
        size = self._size(options)
        pixels, grids, items = [], [], []
        for index, picture in enumerate(media):
            _refuse_thin(picture, index)
            features = self._processor(images=[picture], size=size, return_tensors="pt")
            pixels.append(features["pixel_values"])
            grids.append(features["image_grid_thw"])
            items.append(self._item(picture, features["image_grid_thw"][0].tolist()))
        inputs = {"pixel_values": _cat(pixels), "grid_thw": _cat(grids)}
        if self.device.type == "cuda":
            inputs["pixel_values"] = inputs["pixel_values"].pin_memory()
        return Prepared(inputs, tuple(items))

    def _item(self, picture: Image, grid: list[int]) -> ItemMetadata:
        time, height, width = grid
        patches = time * height * width
        return ItemMetadata(Modality.IMAGE, patches // self._merged, (time, height, width), patches, picture.size)

    def _size(self, options: Mapping[str, Any]) -> dict[str, int]:
        """The processor's bounds on pixels, with the request's own where it gives them."""
        for name, value in options.items():
            if name not in self.options:
                text = f"Unknown option {name[:40]!r}; {self.family} takes: {', '.join(self.options)}"
                raise BadRequestError("invalid_option", text)
            if type(value) is not int or not 1 <= value <= MAX_OPTION_PIXELS:
                text = f"Option {name} must be a whole number of pixels from 1 to {MAX_OPTION_PIXELS}"
                raise BadRequestError("invalid_option", text)
        default = self._processor.size
        least = options.get("min_pixels", default["shortest_edge"])
        most = options.get("max_pixels", default["longest_edge"])
        if least > most:
            text = f"Option min_pixels ({least}) is above max_pixels ({most}), given or the model's own"
            raise BadRequestError("invalid_option", text)
        return {"shortest_edge": least, "longest_edge": most}

    # --- the forward ---

    @torch.inference_mode()
    def encode(self, batch: Sequence[Prepared]) -> list[EncodedRows]:
        pixels = _cat([member.inputs["pixel_values"] for member in batch])
        grid = _cat([member.inputs["grid_thw"] for member in batch])
        output = self._tower(
            pixels.to(self.device, self._torch_dtype, non_blocking=True),
            grid_thw=grid.to(self.device, non_blocking=True),
        )
        arrays = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        if len(batch) == 1:
            return [EncodedRows(arrays[0], tuple(arrays[1:]))]
        counts = [member.rows for member in batch]
        split = zip(*(array.split(counts) for array in arrays), strict=True)
        return [EncodedRows(rows, tuple(layers)) for rows, *layers in split]


class Qwen2VLAdapter(QwenVLAdapter):
    family = "qwen2_vl"
    architectures = ("Qwen2VLForConditionalGeneration",)

    @classmethod
    def build_tower(cls, config: Any, dtype: torch.dtype) -> torch.nn.Module:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as Tower

        return Tower._from_config(config.vision_config, dtype=dtype)

    @classmethod
    def row_width(cls, config: Any) -> int:
        return int(config.vision_config.hidden_size)


def _cat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor; a single one is passed on without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _refuse_thin(picture: Image, index: int) -> None:
    ratio = max(picture.size) / min(picture.size)
    if ratio > MAX_ASPECT_RATIO:
        text = f"The picture's sides are {ratio:.1f} to 1; this family takes at most {MAX_ASPECT_RATIO} to 1"
        raise BadRequestError("media_refused", text, item=index, limit=MAX_ASPECT_RATIO)
