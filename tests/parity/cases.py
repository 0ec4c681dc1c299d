"""The cases: for each family and modality, requests of 1, 2 and 3 items of different sizes, alone and beside another.

Each result says what was compared, whether it is equal to the bit, by how much it differs at most, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tectum.delivery import wire
from tectum.engines.transformers import splice
from tectum.errors import TectumError
from tectum.models.adapter import EncodedRows, Prepared
from tectum.models.load import load_adapter
from tectum.types import Clip, ClipInfo, Embedding, Modality, PictureInfo, Recording, RecordingInfo
from tests import zoo
from tests.parity.colocated import Colocated, Reference

SIZES = [(200, 120), (90, 90), (300, 140)]
SECONDS = [1.3, 2.1, 3.0]
#: a family whose colocated model stacks the clips of a prompt needs them alike
CLIPS = [(9, 112, 84), (4, 84, 112), (6, 128, 96)]
ALIKE = {"llava_onevision", "internvl", "smolvlm"}
NOT_EQUAL = float("inf")


@dataclass(frozen=True)
class Result:
    family: str
    modality: str
    case: str
    equal: bool
    max_abs: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.max_abs <= self.bound

    def json(self) -> dict[str, Any]:
        found = asdict(self)
        found["max_abs"] = None if self.max_abs == NOT_EQUAL else self.max_abs
        return {**found, "passed": self.passed}


@dataclass(frozen=True)
class Plant:
    """A planted error: what happens to an encoded request, to its preprocessing, or to the reference's processor."""

    encoded: Callable[[Prepared, EncodedRows], EncodedRows] | None = None
    prepared: Callable[[Prepared], Prepared] | None = None
    backend: str | None = None


def items(family: str, modality: str, count: int) -> list[Any]:
    """Media as a decoder hands them over: pictures, `Clip`s, samples."""
    if modality == "image":
        return [zoo.picture(*SIZES[i], seed=i) for i in range(count)]
    if modality == "audio":
        return [zoo.tone(SECONDS[i], seed=i) for i in range(count)]
    return [clip(*(CLIPS[0] if family in ALIKE else CLIPS[i]), seed=i) for i in range(count)]


def clip(frames: int, width: int, height: int, seed: int = 0, fps: float = 8.0) -> Clip:
    """A clip of which every second frame was taken."""
    times = tuple(i / fps for i in range(2 * frames))
    info = ClipInfo(width, height, 2 * frames, times, fps, 2 * frames / fps)
    return Clip(zoo.frames(frames, width, height, seed), tuple(range(0, 2 * frames, 2)), info)


class Family:
    """Both sides of one family: the model in one piece, and the encoder on its own."""

    def __init__(self, name: str, folder: Path, *, dtype: str = "float32", plant: Plant | None = None) -> None:
        self.name = name
        self.plant = plant or Plant()
        zoo.build(name, folder)
        self.colocated = Colocated(name, folder, getattr(torch, dtype), self.plant.backend)
        self.adapter = load_adapter(str(folder), device="cpu", dtype=dtype)

    def modalities(self) -> list[str]:
        return sorted(str(modality) for modality in self.adapter.modalities)

    def cases(self, modality: str, counts: Sequence[int] = (1, 2, 3)) -> Iterator[Result]:
        references = {count: self.colocated.run(modality, items(self.name, modality, count)) for count in counts}
        for count, reference in references.items():
            yield from self._alone(modality, count, reference)
        if len(counts) > 1:
            yield from self._together(modality, {count: references[count] for count in counts[:2]})

    # --- one request ---

    def _alone(self, modality: str, count: int, reference: Reference) -> Iterator[Result]:
        label = f"{count} item{'s' * (count > 1)}"
        prepared = self._prepare(modality, count)
        planned = sum(plan.rows for plan in self.adapter.plan(self._infos(modality, count), self._options(modality)))
        placeholders = prepared.rows if reference.placeholders is None else reference.placeholders
        counts = {planned, prepared.rows, placeholders, reference.rows.shape[0]}
        yield self._said(modality, f"counts, {label}", len(counts) == 1)
        (encoded,) = self._encode([prepared])
        yield self._compare(modality, f"rows, {label}", encoded, reference, 0.0)
        yield from self._metadata(modality, label, prepared, count, reference)
        if reference.logits is not None:
            yield self._logits(modality, f"logits, {label}", prepared, encoded, reference)

    def _prepare(self, modality: str, count: int) -> Prepared:
        media = items(self.name, modality, count)
        if modality == "audio":
            media = [Recording(samples, 16000, RecordingInfo(len(samples) / 16000, 16000, 1)) for samples in media]
        prepared = self.adapter.prepare(media, self._options(modality), Modality(modality))
        return self.plant.prepared(prepared) if self.plant.prepared else prepared

    def _options(self, modality: str) -> dict[str, Any]:
        """A clip of the cases has all of its frames chosen; the plan is told as much."""
        return {}

    def _infos(self, modality: str, count: int) -> list[Any]:
        media = items(self.name, modality, count)
        if modality == "image":
            return [PictureInfo(*picture.size) for picture in media]
        if modality == "audio":
            return [RecordingInfo(len(samples) / 16000, 16000, 1) for samples in media]
        return [
            ClipInfo(
                c.info.width, c.info.height, len(c.indices), c.info.times[: len(c.indices)], 8.0, 1.0, sampled=True
            )
            for c in media
        ]

    def _encode(self, batch: list[Prepared]) -> list[EncodedRows]:
        found = self.adapter.encode(batch)
        if self.plant.encoded is None:
            return found
        return [self.plant.encoded(prepared, encoded) for prepared, encoded in zip(batch, found, strict=True)]

    def _metadata(
        self, modality: str, label: str, prepared: Prepared, count: int, reference: Reference
    ) -> Iterator[Result]:
        """Grids, and for videos the times, against the processor's own and against the clips' frame numbers."""
        grid = reference.inputs.get(f"{modality}_grid_thw")
        if grid is not None:
            mine = [list(item.grid_thw or ()) for item in prepared.items]
            yield self._said(modality, f"grids, {label}", mine == grid.tolist())
        if modality != "video":
            return
        group = 2 if grid is not None else 1
        expected = [_times(c, group) for c in items(self.name, modality, count)]
        off = max(
            float(np.abs(np.subtract(item.timestamps, times)).max())
            if len(item.timestamps) == len(times)
            else NOT_EQUAL
            for item, times in zip(prepared.items, expected, strict=True)
        )
        yield Result(self.name, modality, f"timestamps, {label}", off == 0.0, off, 1e-9)
        seconds = reference.inputs.get("second_per_grid_ts", reference.inputs.get("video_second_per_grid"))
        if seconds is not None:
            mine = torch.tensor([float(item.second_per_grid or 0) for item in prepared.items], dtype=torch.float64)
            off = float((mine - torch.as_tensor(seconds, dtype=torch.float64)).abs().max())
            yield Result(self.name, modality, f"seconds a step, {label}", off == 0.0, off, 1e-6)

    @torch.inference_mode()
    def _logits(
        self, modality: str, case: str, prepared: Prepared, encoded: EncodedRows, reference: Reference
    ) -> Result:
        """Rows through the wire into the language model, against the model in one piece."""
        try:
            embedding = _through_the_wire(prepared, encoded)
            inputs = splice(self.colocated.model, self.colocated.without_media(reference), embedding, modality)
        except (TectumError, ValueError):
            return self._said(modality, case, False)
        return self._difference(modality, case, self.colocated.model(**inputs).logits, reference.logits, 0.0)

    # --- two requests in one batch ---

    def _together(self, modality: str, references: dict[int, Reference]) -> Iterator[Result]:
        prepared = [self._prepare(modality, count) for count in references]
        bound = self._batch_bound(modality, references)
        label = "batch of " + " and ".join(str(count) for count in references)
        together = zip(references.values(), self._encode(prepared), strict=True)
        for number, (reference, encoded) in enumerate(together, 1):
            yield self._compare(modality, f"rows, {label}: request {number}", encoded, reference, bound)

    def _batch_bound(self, modality: str, references: dict[int, Reference]) -> float:
        """The family's own in float32; in half precision four units in the last place of the largest value."""
        dtype = self.colocated.model.dtype
        if dtype == torch.float32:
            return self.adapter.batch_bound.get(Modality(modality), 0.0)
        return 4 * torch.finfo(dtype).eps * max(float(r.rows.abs().max()) for r in references.values())

    # --- comparing ---

    def _compare(self, modality: str, case: str, encoded: EncodedRows, reference: Reference, bound: float) -> Result:
        mine, theirs = [encoded.rows, *encoded.deepstack], [reference.rows, *reference.deepstack]
        if [a.shape for a in mine] != [a.shape for a in theirs]:
            return self._said(modality, case, False)
        return self._difference(modality, case, torch.stack(mine), torch.stack(theirs), bound)

    def _difference(self, modality: str, case: str, mine: Any, theirs: Any, bound: float) -> Result:
        off = float((mine.float() - theirs.float()).abs().max())
        equal = torch.equal(mine, theirs)
        return Result(self.name, modality, case, equal, 0.0 if equal else off, bound)

    def _said(self, modality: str, case: str, right: bool) -> Result:
        return Result(self.name, modality, case, right, 0.0 if right else NOT_EQUAL, 0.0)


def _times(c: Clip, group: int) -> list[float]:
    """By hand: frame number over rate, and the middle of the first and last frame of each group; the last is repeated."""
    numbers = list(c.indices) + [c.indices[-1]] * (-len(c.indices) % group)
    return [(numbers[i] + numbers[i + group - 1]) / 2 / c.info.fps for i in range(0, len(numbers), group)]


def _through_the_wire(prepared: Prepared, encoded: EncodedRows) -> Embedding:
    grids = [item.grid_thw for item in prepared.items if item.grid_thw is not None]
    document = wire.pack(
        rows=encoded.rows,
        item_rows=[item.rows for item in prepared.items],
        grid_thw=grids,
        deepstack=encoded.deepstack,
        dtype=str(encoded.rows.dtype).removeprefix("torch."),
        req_id="parity",
        items=[item.to_json() for item in prepared.items],
    )
    return wire.unpack(document)
