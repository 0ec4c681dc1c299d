"""What every model family offers: decoded media in, rows out. One adapter is one loaded encoder.

An adapter knows its family's processor and tower, and nothing of requests, queues or delivery. Its promise: the rows of
one request equal, to the bit, those that the full model computes for the same media in one prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tectum.errors import InternalError
from tectum.types import ItemMetadata, Modality


@dataclass(slots=True)
class Prepared:
    """One request, preprocessed: the tower's inputs, and for each item the rows that it will yield."""

    inputs: dict[str, torch.Tensor]
    items: tuple[ItemMetadata, ...]

    @property
    def rows(self) -> int:
        return sum(item.rows for item in self.items)

    @property
    def patches(self) -> int:
        return sum(item.patches for item in self.items)


@dataclass(slots=True)
class EncodedRows:
    """One request's rows `[tokens, width]` on the encoder's device, and its deepstack layers (same shape, first first)."""

    rows: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()


class Adapter(ABC):
    """One loaded encoder.

    model_id: folder name or hub id. width: columns of the rows. dtype: of weights and rows, a key of `DTYPE_BYTES`.
    encoder_bytes: bytes of the weights held. modalities: what `prepare` takes.
    """

    family: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    modalities: ClassVar[frozenset[Modality]]
    #: checkpoint keys of the encoder start with one of these
    prefixes: ClassVar[tuple[str, ...]]

    model_id: str
    architecture: str
    width: int
    deepstack_layers: int
    dtype: str
    device: torch.device
    encoder_bytes: int

    @classmethod
    @abstractmethod
    def build_tower(cls, config: Any, dtype: torch.dtype) -> torch.nn.Module:
        """The family's encoder, uninitialised, on the CPU."""

    @classmethod
    @abstractmethod
    def row_width(cls, config: Any) -> int:
        """Columns of the rows, read from the model's config."""

    @abstractmethod
    def prepare(self, media: Sequence[Any], options: Mapping[str, Any]) -> Prepared:
        """Preprocess decoded items (pictures: PIL, RGB) on the CPU. Called from several threads at once.

        Raises BadRequestError: `media_refused` with the item's index (the family cannot take it), `invalid_option`.
        """

    @abstractmethod
    def encode(self, batch: Sequence[Prepared]) -> list[EncodedRows]:
        """One forward over all members of `batch`, split again by member. Called from one thread."""

    def check(self, prepared: Prepared, encoded: EncodedRows) -> None:
        """What came out is what was announced. Raises InternalError `row_mismatch` or `non_finite_rows`."""
        tokens = encoded.rows.shape[0]
        if tokens != prepared.rows or tokens == 0:
            text = f"Encoder produced {tokens} tokens, but preprocessor metadata expected {prepared.rows}"
            raise InternalError("row_mismatch", text, rows=tokens, expected=prepared.rows)
        arrays = (encoded.rows, *encoded.deepstack)
        shape, dtype = (tokens, self.width), getattr(torch, self.dtype)
        if len(arrays) != 1 + self.deepstack_layers or any(a.shape != shape or a.dtype != dtype for a in arrays):
            found = f"{len(arrays)} arrays, rows {tuple(encoded.rows.shape)} {encoded.rows.dtype}"
            expected = f"{1 + self.deepstack_layers} arrays of {shape} {self.dtype}"
            raise InternalError("row_mismatch", f"Encoder produced {found}, but its config promises {expected}")
        # a sum in float32 is finite exactly when every element is: it cannot overflow at these magnitudes
        totals = torch.stack([array.sum(dtype=torch.float32) for array in arrays])
        if not bool(torch.isfinite(totals).all()):
            raise InternalError("non_finite_rows", "The encoder produced NaN or infinite values for this request")
