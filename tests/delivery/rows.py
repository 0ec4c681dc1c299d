"""Staged rows for the tests of delivery: real arrays behind the two things that a backend may look at."""

from __future__ import annotations

import torch

from tectum.types import ItemMetadata, Modality, RequestMetadata


class Lease:
    def __init__(self, arrays: tuple[torch.Tensor, ...]) -> None:
        self._arrays = arrays

    def views(self) -> list[memoryview]:
        return [array.view(torch.uint8).numpy().reshape(-1).data for array in self._arrays]


class Rows:
    """`rows` rows of `width`, random, with `layers` deepstack arrays."""

    def __init__(self, req_id: str = "r_local_part_0", rows: int = 64, width: int = 64, layers: int = 0) -> None:
        item = ItemMetadata(Modality.IMAGE, rows, (1, 16, rows // 4), rows * 4)
        self.metadata = RequestMetadata(req_id, 1, 0, (item,), width, layers, "float32")
        self.arrays = tuple(torch.rand(rows, width) for _ in range(1 + layers))
        self.lease = Lease(self.arrays)

    @property
    def expected(self) -> torch.Tensor:
        return torch.cat(self.arrays, dim=1)
