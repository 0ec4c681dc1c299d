"""LLaVA-OneVision: a picture alone in its prompt is cut into tiles; among others it is one square, so its rows are few.

So rows depend on how many pictures the prompt holds: `images_in_prompt`, by default as many as the request holds. A prompt
whose pictures are spread over several encoders must say it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from PIL import Image

from tectum.errors import BadRequestError
from tectum.models.features import Count, FeaturesAdapter, flat
from tectum.models.llava import fixed_size
from tectum.models.options import FPS, MAX_FRAMES, NUM_FRAMES, Option
from tectum.types import Clip, Modality

_IN_PROMPT = Option("images_in_prompt", int, "pictures in the whole prompt (default: in this request)", most=4096)


class LlavaOnevisionAdapter(FeaturesAdapter):
    family = "llava_onevision"
    architectures = ("LlavaOnevisionForConditionalGeneration",)
    modalities = frozenset({Modality.IMAGE, Modality.VIDEO})
    read_on_host = frozenset({"alone", "frames", "image_sizes"})
    options: ClassVar = {Modality.IMAGE: (_IN_PROMPT,), Modality.VIDEO: (FPS, NUM_FRAMES, MAX_FRAMES)}
    depends_on_prompt = "a picture alone is tiled, one of several is not: option `images_in_prompt`"
    row_rule: ClassVar = {
        Modality.IMAGE: "alone: base tile + unpadded tiles + a newline for each line; among several: one tile + 1",
        Modality.VIDEO: "a quarter of the patches (rounded up a side) for each frame, + 1",
    }
    batch_bound: ClassVar = {Modality.IMAGE: 0.0, Modality.VIDEO: 0.0}

    def for_request(self, modality: Modality, options: dict[str, Any], count: int) -> dict[str, Any]:
        if modality is not Modality.IMAGE:
            return options
        if options.get("images_in_prompt", count) < count:
            text = f"Option images_in_prompt must be at least {count}, the pictures of this request"
            raise BadRequestError("invalid_option", text)
        return {"images_in_prompt": count, **options}

    @property
    def _side(self) -> int:
        """Patches along one side of a tile."""
        return int(self.config.vision_config.image_size // self.config.vision_config.patch_size)

    def _kept(self) -> int:
        """Rows of the tower that one tile keeps."""
        return self._side**2 - (self.config.vision_feature_select_strategy == "default")

    def count_picture(self, width: int, height: int, options: Mapping[str, Any]) -> Count:
        high, wide = fixed_size(self.processors.image)
        if options["images_in_prompt"] != 1:
            return Count(self._kept() + 1, self._side**2, 3 * high * wide)
        from transformers.image_processing_utils import select_best_resolution

        best = select_best_resolution((height, width), self.processors.image.image_grid_pinpoints)
        tiles = 1 + (best[0] // high) * (best[1] // wide)
        lines, columns = self._unpadded(width, height, best[0] // high, best[1] // wide)
        return Count(self._kept() + lines * (columns + 1), tiles * self._side**2, tiles * 3 * high * wide)

    def scaled_picture(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        """Among others, a picture is first padded to a square as wide as its longer side."""
        return 0 if options["images_in_prompt"] == 1 else max(width, height) ** 2

    def _unpadded(self, width: int, height: int, tiles_high: int, tiles_wide: int) -> tuple[int, int]:
        """Lines and columns of patches that show the picture and not the padding around it, scaled to the family's bound."""
        lines, columns = self._side * tiles_high, self._side * tiles_wide
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(lines * columns / (most * self._side**2))
        return (int(lines // ratio), int(columns // ratio)) if ratio > 1.1 else (lines, columns)

    def picture_inputs(self, picture: Image.Image, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        alone = options["images_in_prompt"] == 1
        # the processor tells the two cases apart by the length of the list that a picture stands in
        companion = Image.new("RGB", (1, 1))
        features = self.processors.image(images=[picture] if alone else [[picture, companion]], return_tensors="pt")
        tiles = features["pixel_values"][0]
        alone_flag = torch.tensor([alone])
        return {"pixel_values": tiles, "image_sizes": features["image_sizes"][:1], "alone": alone_flag}

    def clip_inputs(self, clip: Clip, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return frames_through(self.processors.video, clip)

    def count_clip(self, frames: int, width: int, height: int, options: Mapping[str, Any]) -> Count:
        high, wide = fixed_size(self.processors.video)
        rows = frames * math.ceil(self._side / 2) ** 2 + 1
        return Count(rows, frames * self._side**2, frames * 3 * high * wide)

    def features(self, modality: Modality, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        if modality is Modality.VIDEO:
            return [flat([self._clip(clip) for clip in inputs["pixel_values_videos"].split(inputs["frames"].tolist())])]
        alone = inputs.pop("alone").tolist()
        if all(alone):
            return super().features(modality, inputs)
        if not any(alone):
            # a count of two or more is how the model learns that a picture is not alone
            return super().features(modality, {**inputs, "batch_num_images": torch.tensor([max(2, len(alone))])})
        return [flat(self._mixed(inputs, alone))]

    def _clip(self, frames: torch.Tensor) -> torch.Tensor:
        return flat(self.model.get_video_features(pixel_values_videos=frames[None]).pooler_output)

    def _mixed(self, inputs: dict[str, torch.Tensor], alone: list[bool]) -> list[torch.Tensor]:
        """Requests of both kinds in one batch: one call each, in the order of the pictures."""
        sizes = inputs["image_sizes"].tolist()
        counts = [
            self.tiles(width, height) if single else 1 for (height, width), single in zip(sizes, alone, strict=True)
        ]
        rows = []
        for tiles, size, single in zip(inputs["pixel_values"].split(counts), inputs["image_sizes"], alone, strict=True):
            one = {"pixel_values": tiles, "image_sizes": size[None], "alone": torch.tensor([single])}
            rows += self.features(Modality.IMAGE, one)
        return rows

    def tiles(self, width: int, height: int) -> int:
        """Tiles of a picture that is alone in its prompt."""
        return self.count_picture(width, height, {"images_in_prompt": 1}).patches // self._side**2


def frames_through(processor: Any, clip: Clip) -> dict[str, torch.Tensor]:
    """A clip through a processor that makes one picture of each frame: `[frames, 3, height, width]` and their number."""
    features = processor(
        videos=[clip.frames], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt"
    )
    pixels = features["pixel_values_videos"][0]
    return {"pixel_values_videos": pixels, "frames": torch.tensor([pixels.shape[0]])}
