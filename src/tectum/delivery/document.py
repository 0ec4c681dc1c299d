"""An embedding's document (`wire.py`), read where it lies: its arrays are views of the receiver's own buffer, not copies.

The only reader of the format. Receivers keep rows in memory of their own choosing: pinned, shared, pre-faulted. Whatever
the document claims is checked before a view of it is given out. Imports neither torch nor numpy until rows are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tectum.delivery.wire import NAMES, TENSORS, VERSION, Raw, Sum
from tectum.errors import DeliveryError
from tectum.types import DTYPE_BYTES, Embedding, Grid

#: longest header (bytes) that is parsed; ours have a few hundred, and 24 more for each item
MAX_HEADER = 1024 * 1024
#: most items of a document: more than any server takes in one request
MAX_ITEMS = 10_000
#: longest facts (bytes) that are parsed; ours have some hundred for each item
MAX_FACTS = 16 * 1024 * 1024
#: most that one side of a tensor may have
_MAX_SIDE = 2**40
_ITEM_BYTES = {**DTYPE_BYTES, "int64": 8, "uint8": 1}


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int
    data: memoryview


class Document(NamedTuple):
    """One part's rows in place.

    arrays: the rows, then the deepstack layers, each `[tokens, width]` of `dtype` as its bytes. offsets: where each
    begins in the buffer. item_rows sum to `tokens`; grid_thw and items (further facts) have one entry for each item, or
    none at all.
    """

    req_id: str
    dtype: str
    item_rows: tuple[int, ...]
    grid_thw: tuple[Grid, ...]
    arrays: tuple[Raw, ...]
    offsets: tuple[int, ...]
    items: tuple[Mapping[str, Any], ...] = ()

    @property
    def rows(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def width(self) -> int:
        return self.arrays[0].shape[1]

    def finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return all(_finite(array.data, self.dtype) for array in self.arrays)

    def embedding(self) -> Embedding:
        """The same rows as arrays on the same memory: torch tensors where torch is installed, else numpy arrays.

        The buffer must be writable for torch. bfloat16 rows without torch are widened to float32, in a copy.
        """
        arrays, held = zip(*(_array(array, self.dtype) for array in self.arrays), strict=True)
        return Embedding(arrays[0], self.item_rows, self.grid_thw, tuple(arrays[1:]), held[0], self.req_id, self.items)


def read(buffer: memoryview, checksum: Sum | None = None) -> Document:
    """The document that fills `buffer` (bytes). checksum: of what came, where it was summed as it came.

    Raises DeliveryError `invalid_rows` when anything is not as it should be.
    """
    tensors, metadata = _parse(buffer)
    if metadata.get("tectum") != VERSION:
        raise DeliveryError("invalid_rows", f"The document is not in Tectum's format {VERSION}")
    if not (checksum or Sum(len(buffer))).holds(buffer):
        raise DeliveryError("invalid_rows", "The checksum of the rows does not match: they were damaged on the way")
    item_rows = tuple(_integers(tensors, "item_rows", 1))
    flat = _integers(tensors, "grid_thw", 2) if "grid_thw" in tensors else []
    grid_thw = tuple((flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3))
    dtype = metadata.get("dtype", "")
    arrays = _arrays(tensors, dtype)
    if grid_thw and len(grid_thw) != len(item_rows):
        raise DeliveryError("invalid_rows", f"{len(item_rows)} items, but {len(grid_thw)} grids")
    if sum(item_rows) != arrays[0].shape[0]:
        raise DeliveryError(
            "invalid_rows", f"item_rows sum to {sum(item_rows)}, but there are {arrays[0].shape[0]} rows"
        )
    raws = tuple(Raw((array.shape[0], array.shape[1]), array.data) for array in arrays)
    starts = tuple(array.start for array in arrays)
    items = _items(tensors, len(item_rows))
    return Document(metadata.get("req_id", ""), dtype, item_rows, grid_thw, raws, starts, items)


def _parse(buffer: memoryview) -> tuple[dict[str, _Tensor], Mapping[str, str]]:
    """The tensors by name, and the string metadata. Tensors fill the rest of the buffer, without gap or overlap."""
    length = int.from_bytes(buffer[:8], "little")
    if len(buffer) < 8 or not 2 <= length <= min(MAX_HEADER, len(buffer) - 8):
        raise DeliveryError("invalid_rows", "The document is not readable safetensors")
    try:
        header = json.loads(str(buffer[8 : 8 + length], "utf-8"))
        metadata = header.pop("__metadata__", {})
        tensors = {str(name): _tensor(entry, buffer, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DeliveryError("invalid_rows", "The document is not readable safetensors") from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DeliveryError("invalid_rows", "The metadata of the document are not all text")
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, len(tensor.data))):
        if tensor.start != end:
            raise DeliveryError("invalid_rows", "The tensors of the document overlap or leave gaps")
        end += len(tensor.data)
    if end != len(buffer):
        raise DeliveryError("invalid_rows", "The document is longer or shorter than its header says")
    return tensors, metadata


def _tensor(entry: Mapping[str, Any], buffer: memoryview, base: int) -> _Tensor:
    dtype, shape, (start, end) = NAMES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    count = 1
    if len(shape) > 2:
        raise ValueError("dimensions")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_SIDE:
            raise ValueError("a size")
        count *= size
    if type(start) is not int or type(end) is not int or start < 0 or end - start != count * _ITEM_BYTES[dtype]:
        raise ValueError("offsets")
    return _Tensor(dtype, tuple(shape), base + start, buffer[base + start : base + end])


def _integers(tensors: Mapping[str, _Tensor], name: str, ndim: int) -> list[int]:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != "int64" or len(tensor.shape) != ndim:
        raise DeliveryError("invalid_rows", f"Tensor {name} is missing or not int64 of {ndim} dimensions")
    if tensor.shape[0] > MAX_ITEMS:
        raise DeliveryError("invalid_rows", f"Tensor {name} has {tensor.shape[0]} items, more than {MAX_ITEMS}")
    cells = range(0, len(tensor.data), 8) if ndim == 1 or tensor.shape[1] == 3 else None
    values = [int.from_bytes(tensor.data[at : at + 8], "little", signed=True) for at in cells or ()]
    if cells is None or any(value < 0 for value in values):
        raise DeliveryError("invalid_rows", f"Tensor {name} holds values that cannot be")
    return values


def _items(tensors: Mapping[str, _Tensor], count: int) -> tuple[Mapping[str, Any], ...]:
    """The facts of each item, where the document has them."""
    tensor = tensors.get("items")
    if tensor is None:
        return ()
    try:
        found: Any = json.loads(str(tensor.data, "utf-8")) if len(tensor.data) <= MAX_FACTS else None
    except (ValueError, RecursionError):
        found = None
    complete = isinstance(found, list) and len(found) == count and all(isinstance(facts, dict) for facts in found)
    if tensor.dtype != "uint8" or not complete:
        raise DeliveryError("invalid_rows", f"The facts of the {count} items cannot be read")
    return tuple(found)


def _arrays(tensors: Mapping[str, _Tensor], dtype: str) -> list[_Tensor]:
    """The rows and the deepstack layers, all of one shape and type; no other tensor may be there."""
    layers: list[_Tensor] = []
    while (layer := tensors.get(f"deepstack.{len(layers)}")) is not None:
        layers.append(layer)
    rows = tensors.get("rows")
    known = {*TENSORS, *(f"deepstack.{number}" for number in range(len(layers)))}
    if rows is None or set(tensors) - known:
        raise DeliveryError("invalid_rows", "The document has no rows, or tensors that are not Tectum's")
    for array in (rows, *layers):
        if array.dtype != dtype or dtype not in DTYPE_BYTES or len(array.shape) != 2:
            raise DeliveryError(
                "invalid_rows", f"Rows are {array.dtype} {list(array.shape)[:4]}, not {dtype[:20]} [tokens, width]"
            )
        if array.shape != rows.shape:
            raise DeliveryError(
                "invalid_rows", f"A deepstack layer is {list(array.shape)}, the rows are {list(rows.shape)}"
            )
    return [rows, *layers]


def _finite(data: memoryview, dtype: str) -> bool:
    import numpy as np

    if dtype == "bfloat16":  # numpy has none: an exponent of all ones is what makes a NaN or an infinity
        return not bool(((np.frombuffer(data, np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(data, dtype)).all())


def _array(array: Raw, dtype: str) -> tuple[Any, str]:
    from importlib.util import find_spec

    if find_spec("torch") is not None:
        import torch

        kind = getattr(torch, dtype)
        if not len(array.data):
            return torch.empty(array.shape, dtype=kind), dtype
        return torch.frombuffer(array.data, dtype=kind).view(array.shape), dtype
    import numpy as np

    if dtype != "bfloat16":
        return np.frombuffer(array.data, dtype).reshape(array.shape), dtype
    wide = (np.frombuffer(array.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return wide.reshape(array.shape), "float32"
