"""What every model family offers: decoded media in, rows out. One adapter is one loaded encoder.

An adapter knows its family's processor and tower, and nothing of requests, queues or delivery. Its promise: the rows of
one request equal, to the bit, those that the full model computes for the same media in one prompt.

The walk of one request: `reading` says how its media are to be decoded, `plan` what they will cost (from their headers
alone), `prepare` preprocesses them one by one, `encode` runs one forward for several requests, `check` compares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tectum.errors import InternalError
from tectum.models.options import Option, read_options
from tectum.types import ItemMetadata, MediaInfo, Modality, Reading


@dataclass(slots=True)
class Prepared:
    """One request, preprocessed: the tower's inputs, and for each item the rows that it will yield."""

    inputs: dict[str, torch.Tensor]
    items: tuple[ItemMetadata, ...]

    @property
    def modality(self) -> Modality:
        return self.items[0].modality

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

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        return (self.rows, *self.deepstack)

    def sums(self) -> torch.Tensor:
        """One for each array, float32, on the encoder's device. Nothing is waited for."""
        return torch.stack([array.sum(dtype=torch.float32) for array in self.arrays])


def check_finite(sums: torch.Tensor) -> None:
    """The rows that add up to `sums` hold no NaN and no infinity. Raises InternalError `non_finite_rows`.

    A sum in float32 is finite exactly when every element is: it cannot overflow at these magnitudes. Reading one that is on a
    device would wait for the device.
    """
    if not bool(torch.isfinite(sums).all()):
        raise InternalError("non_finite_rows", "The encoder produced NaN or infinite values for this request")


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What one item will cost, known from its header.

    rows, patches: as in its metadata; of a recording whose container does not tell its length, the most there can be.
    scaled: pixels of the picture, or of all frames, that its processor makes of it before it crops, cuts or squares it.
    nbytes: memory of its preprocessing at the worst moment: the decoded media, three copies of them or of what they are
    scaled to, whichever is larger, and twice the preprocessed form.
    """

    rows: int
    patches: int
    scaled: int
    nbytes: int


class Adapter(ABC):
    """One loaded encoder.

    model_id: folder name or hub id. width: columns of the rows. dtype: of weights and rows, a key of `DTYPE_BYTES`.
    encoder_bytes: bytes of the weights held. modalities: what `prepare` takes.
    """

    family: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    modalities: ClassVar[frozenset[Modality]]
    #: what a request may ask for, by modality
    options: ClassVar[Mapping[Modality, tuple[Option, ...]]] = {}
    #: modules of the full model that the encoder does not need: neither built at size nor read
    left_out: ClassVar[tuple[str, ...]] = ("model.language_model", "model.text_model", "lm_head")
    #: families whose rows of an item depend on what else stands in its prompt say so here (docs/models.md quotes it)
    depends_on_prompt: ClassVar[str] = ""
    #: how rows are counted, in a phrase for docs/models.md
    row_rule: ClassVar[Mapping[Modality, str]] = {}
    #: largest difference of a row in a fused batch from the same row alone (fp32); 0.0 is bitwise
    batch_bound: ClassVar[Mapping[Modality, float]] = {}

    model_id: str
    architecture: str
    width: int
    deepstack_layers: int
    dtype: str
    device: torch.device
    encoder_bytes: int
    #: whether torch.compile has the towers
    compiled: bool = False

    @abstractmethod
    def plan(self, infos: Sequence[MediaInfo], options: Mapping[str, Any]) -> tuple[ItemPlan, ...]:
        """Rows and cost of a request's items from their headers, before anything is decoded. Pure and quick.

        Raises BadRequestError: `media_refused` with the item's index, `invalid_option`.
        """

    @abstractmethod
    def reading(self, modality: Modality, options: Mapping[str, Any]) -> Reading:
        """How to decode the media of a request. Raises BadRequestError `invalid_option`."""

    @abstractmethod
    def prepare(
        self, media: Iterable[Any], options: Mapping[str, Any], modality: Modality = Modality.IMAGE
    ) -> Prepared:
        """Preprocess decoded items (pictures: PIL, RGB; else `Clip`, `Recording`) on the CPU. From several threads at once.

        `media` is walked once and nothing of it is kept, so that what decodes as it is walked holds one item at a time
        (it must know its length; a plain generator is read to its end first).
        Raises BadRequestError: `media_refused` with the item's index (the family cannot take it), `invalid_option`.
        """

    @abstractmethod
    def encode(self, batch: Sequence[Prepared]) -> list[EncodedRows]:
        """One forward over all members of `batch` (of one modality), split again by member. Called from one thread."""

    def deepstack_layers_of(self, modality: Modality) -> int:
        """How many deepstack layers the rows of this modality carry: audio has none."""
        return 0 if modality is Modality.AUDIO else self.deepstack_layers

    def read_options(self, modality: Modality, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a request, checked. Raises BadRequestError `invalid_option` for what the family does not take."""
        return read_options(self.family, modality, self.options.get(modality, ()), given)

    def content_options(self, modality: Modality, given: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The options that decide an item's rows, defaults that depend on the request made explicit: for content keys.

        count: items of the request. Raises BadRequestError `invalid_option`.
        """
        return self.read_options(modality, given)

    def check(self, prepared: Prepared, encoded: EncodedRows) -> None:
        """What came out has the form that was announced; its values are not looked at. Raises InternalError `row_mismatch`."""
        tokens = encoded.rows.shape[0]
        if tokens != prepared.rows or tokens == 0:
            text = f"Encoder produced {tokens} tokens, but preprocessor metadata expected {prepared.rows}"
            raise InternalError("row_mismatch", text, rows=tokens, expected=prepared.rows)
        arrays = encoded.arrays
        shape, dtype = (tokens, self.width), getattr(torch, self.dtype)
        count = 1 + self.deepstack_layers_of(prepared.modality)
        if len(arrays) != count or any(a.shape != shape or a.dtype != dtype for a in arrays):
            found = f"{len(arrays)} arrays, rows {tuple(encoded.rows.shape)} {encoded.rows.dtype}"
            expected = f"{count} arrays of {shape} {self.dtype}"
            raise InternalError("row_mismatch", f"Encoder produced {found}, but its config promises {expected}")
