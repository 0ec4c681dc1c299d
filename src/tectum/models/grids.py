"""What a Qwen tower derives from its grids alone: where each patch lies, and which patches it attends to.

Left to itself the model works this out in every forward, and on CUDA reads it back from the device, for which the host
waits until all that runs there is done. Here transformers' own functions work it out on the host, once for each set of
grids, and the forward takes it as the precomputed arguments that `transformers.vision_utils` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

#: given a tower and grids `[n, 3]` on the host: arguments of the tower's forward, by name
Rule = Callable[[Any, torch.Tensor], dict[str, torch.Tensor]]
#: sets of grids that are remembered, and patches up to which one is: beyond that a forward takes far longer than this
REMEMBERED = 64
MOST_PATCHES = 4096


def positions(tower: Any, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """position_ids: `[patches, 2]`, int64."""
    from transformers.vision_utils import get_vision_position_ids

    return {"position_ids": get_vision_position_ids(grids, tower.spatial_merge_size)}


def segments(tower: Any, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """cu_seqlens: where each frame's patches begin and end, int32."""
    from transformers.vision_utils import get_vision_cu_seqlens

    return {"cu_seqlens": get_vision_cu_seqlens(grids)}


def windows(tower: Any, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """window_index: `[rows]`, int64, the order in which windows take the rows; cu_window_seqlens: int32."""
    from transformers.vision_utils import get_vision_window_index

    index, bounds = get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
    return {"window_index": index, "cu_window_seqlens": bounds}


def interpolation(tower: Any, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Taps into the learned table of positions, `[patches, taps]`: interp_indices (int64), interp_weights (float32)."""
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    indices, weights = get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.config.spatial_merge_size,
    )
    return {"interp_indices": indices, "interp_weights": weights}


class GridArguments:
    """The rules of one tower, with what they gave for the latest sets of grids. One thread at a time calls it."""

    def __init__(self, tower: Any, rules: Sequence[Rule], device: torch.device) -> None:
        self._tower = tower
        self._rules = rules
        self._device = device
        # without a flash kernel the model cuts the sequence by lengths that it reads on the host
        self._lengths_on_host = tower.config._attn_implementation in ("sdpa", "eager")
        self._remembered = lru_cache(REMEMBERED)(self._work_out)

    def of(self, grids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """For grids `[n, 3]` on the host, each (time, height, width): what the forward takes beside them."""
        key = tuple(map(tuple, grids.tolist()))
        patches = sum(time * height * width for time, height, width in key)
        return self._remembered(key) if patches <= MOST_PATCHES else self._work_out(key)

    def _work_out(self, key: tuple[tuple[int, int, int], ...]) -> Mapping[str, torch.Tensor]:
        grids = torch.tensor(key)
        found = {name: tensor for rule in self._rules for name, tensor in rule(self._tower, grids).items()}
        return {name: self._placed(name, tensor) for name, tensor in found.items()}

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if name.startswith("cu_") and self._lengths_on_host else tensor.to(self._device)
