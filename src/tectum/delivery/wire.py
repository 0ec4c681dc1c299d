"""The wire format: an embedding as one safetensors document, with a checksum.

Tensors `rows` `[tokens, width]`, `item_rows` int64 `[items]`, `grid_thw` int64 `[items, 3]` (families with a grid),
`deepstack.<k>` shaped as `rows`, `items`, bytes of a JSON list with one object an item, and `xxh3`, 8 bytes that end the
document: XXH3-64 (canonical form) over all bytes before them, so that a document can be sent while it is being summed. String
metadata: `tectum` (format version), `req_id` and `dtype`. Nothing is ever unpickled; whatever a document claims is checked.

Owns how a document is written and summed; `document.py` reads it. Imports neither torch nor numpy until rows are packed, so
that it may live inside an engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_64

from tectum.types import Embedding, Grid, RequestMetadata

VERSION = "2"
#: the tensors that a document may have, beside `deepstack.<k>`
TENSORS = frozenset({"rows", "item_rows", "grid_thw", "items", "xxh3"})
#: the element types of its tensors: safetensors' name of each, and ours
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "U8": "uint8"}
_CODES = {name: code for code, name in NAMES.items()}
#: bytes of the checksum
SUM_BYTES = 8
#: the header ends at a multiple of so many bytes
ALIGNMENT = 8


class Raw(NamedTuple):
    """An array as its bytes: for rows that lie in staging memory, where there is neither torch nor a numpy type."""

    shape: tuple[int, int]
    data: memoryview


class Unsent(NamedTuple):
    """A document that was not put together: its parts where they lie, the checksum still to come.

    nbytes: of the whole document. parts: header and tensors, in order.
    """

    nbytes: int
    parts: tuple[memoryview, ...]

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The document from its first byte to its last, at most `size` bytes at a time; it is summed as it goes."""
        checksum = xxh3_64()
        for part in self.parts:
            for start in range(0, len(part), size):
                piece = part[start : start + size]
                checksum.update(piece)
                yield piece
        yield memoryview(checksum.digest())

    def whole(self) -> bytes:
        """The document in one piece: a copy, which outlives its parts."""
        return b"".join(self.pieces(self.nbytes))


def pack(
    *,
    rows: Any,
    item_rows: Sequence[int],
    grid_thw: Sequence[Grid],
    deepstack: Sequence[Any],
    dtype: str,
    req_id: str,
    items: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """One document. `rows` and `deepstack`, `[tokens, width]` in host memory: torch tensors, numpy arrays or `Raw`.

    items: further facts of each item, JSON-able (`ItemMetadata.to_json`); either none or one an item.
    """
    return _unsent(rows, item_rows, grid_thw, deepstack, dtype, req_id, items).whole()


def staged(metadata: RequestMetadata, views: Sequence[memoryview]) -> Unsent:
    """The document of a request's staged arrays (`Lease.views`). Nothing is copied: it is good as long as the lease."""
    shape = (metadata.rows, metadata.width)
    rows, *deepstack = (Raw(shape, view) for view in views)
    items = [item.to_json() for item in metadata.items]
    return _unsent(rows, metadata.item_rows, metadata.grid_thw, deepstack, metadata.dtype, metadata.req_id, items)


def _unsent(
    rows: Any,
    item_rows: Sequence[int],
    grid_thw: Sequence[Grid],
    deepstack: Sequence[Any],
    dtype: str,
    req_id: str,
    items: Sequence[Mapping[str, Any]],
) -> Unsent:
    """The tensors in the order of their alignment, as safetensors wants them: 64-bit integers, rows, bytes."""
    tensors: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
    tensors["item_rows"] = ("int64", (len(item_rows),), _integer_bytes(item_rows))
    if grid_thw:
        flat = [side for grid in grid_thw for side in grid]
        tensors["grid_thw"] = ("int64", (len(grid_thw), 3), _integer_bytes(flat))
    tensors["rows"] = (dtype, tuple(rows.shape), _raw(rows))
    for number, layer in enumerate(deepstack):
        tensors[f"deepstack.{number}"] = (dtype, tuple(layer.shape), _raw(layer))
    if items:
        facts = memoryview(json.dumps(list(items)).encode())
        tensors["items"] = ("uint8", (len(facts),), facts)
    header: dict[str, Any] = {"__metadata__": {"tectum": VERSION, "req_id": req_id, "dtype": dtype}}
    end = 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": _CODES[kind], "shape": shape, "data_offsets": (end, end + len(data))}
        end += len(data)
    header["xxh3"] = {"dtype": "U8", "shape": (SUM_BYTES,), "data_offsets": (end, end + SUM_BYTES)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    return Unsent(len(head) + end + SUM_BYTES, (head, *(data for _, _, data in tensors.values())))


class Sum:
    """The checksum of a document of `nbytes` while it comes in, in any portions."""

    def __init__(self, nbytes: int) -> None:
        self._end = nbytes - SUM_BYTES
        self._summed = 0
        self._checksum = xxh3_64()

    def add(self, document: memoryview, filled: int) -> None:
        """The first `filled` bytes of `document` are here."""
        end = min(filled, self._end)
        if end > self._summed:
            self._checksum.update(document[self._summed : end])
            self._summed = end

    def holds(self, document: memoryview) -> bool:
        """Whether the last bytes are the checksum over those before."""
        self.add(document, len(document))
        return self._checksum.digest() == document[-SUM_BYTES:]


def unpack(packed: bytes) -> Embedding:
    """The embedding in a document, on memory of its own: torch tensors where torch is installed, else numpy arrays.

    bfloat16 rows without torch come widened to float32, which is exact. Raises DeliveryError `invalid_rows` when
    anything is not as it should be: format, checksum, names, shapes, types, or sums.
    """
    from tectum.delivery import document  # the reader of what is written here

    return document.read(memoryview(bytearray(packed))).embedding()


def _raw(array: Any) -> memoryview:
    """The array's bytes, without a copy where it is contiguous."""
    if isinstance(array, Raw):
        return array.data
    import numpy as np

    if hasattr(array, "detach"):  # torch: numpy has no bfloat16, so look at its bytes
        import torch

        return array.detach().contiguous().view(torch.uint8).numpy().reshape(-1).data
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def _integer_bytes(values: Sequence[int]) -> memoryview:
    return memoryview(b"".join(value.to_bytes(8, "little", signed=True) for value in values))
