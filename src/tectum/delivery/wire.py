"""The wire format: an embedding as one safetensors document, with a checksum.

Tensors `rows` `[tokens, width]`, `item_rows` int64 `[items]`, `grid_thw` int64 `[items, 3]` (families with a grid),
`deepstack.<k>` shaped as `rows`, and `items`, bytes of a JSON list with one object an item (a tensor, so that the checksum
covers it). String metadata: `tectum` (format version), `req_id`, `dtype`, and `crc32` over the
bytes of all tensors in the order of their names. Nothing is ever unpickled; whatever a document claims is checked.

Imports neither torch nor numpy until rows are packed or unpacked, so that it may live inside an engine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from tectum.errors import DeliveryError
from tectum.types import Embedding, Grid, RequestMetadata

VERSION = "1"


class Raw(NamedTuple):
    """An array as its bytes: for rows that lie in staging memory, where there is neither torch nor a numpy type."""

    shape: tuple[int, int]
    data: memoryview


_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


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
    import numpy as np
    from safetensors import TensorSpec, serialize

    tensors = {"rows": (dtype, rows.shape, _raw(rows))}
    tensors["item_rows"] = ("int64", (len(item_rows),), np.asarray(item_rows, np.int64))
    if grid_thw:
        tensors["grid_thw"] = ("int64", (len(grid_thw), 3), np.asarray(grid_thw, np.int64).reshape(-1))
    if items:
        text = np.frombuffer(json.dumps(list(items)).encode(), np.uint8)
        tensors["items"] = ("uint8", text.shape, text)
    for number, layer in enumerate(deepstack):
        tensors[f"deepstack.{number}"] = (dtype, layer.shape, _raw(layer))
    checksum = _checksum({name: data for name, (_, _, data) in tensors.items()})
    metadata = {"tectum": VERSION, "req_id": req_id, "dtype": dtype, "crc32": f"{checksum:08x}"}
    # the specs point into `tensors`, which outlives the call
    specs = {
        name: TensorSpec(dtype=kind, shape=list(shape), data_ptr=data.ctypes.data, data_len=data.nbytes)
        for name, (kind, shape, data) in tensors.items()
    }
    return bytes(serialize(specs, metadata))


def pack_staged(metadata: RequestMetadata, views: Sequence[memoryview]) -> bytes:
    """One document of a request's staged arrays (`Lease.views`): a copy, which outlives the lease."""
    shape = (metadata.rows, metadata.width)
    rows, *deepstack = (Raw(shape, view) for view in views)
    return pack(
        rows=rows,
        item_rows=metadata.item_rows,
        grid_thw=metadata.grid_thw,
        deepstack=deepstack,
        dtype=metadata.dtype,
        req_id=metadata.req_id,
        items=[item.to_json() for item in metadata.items],
    )


def unpack(document: bytes) -> Embedding:
    """The embedding in a document: torch tensors where torch is installed, else numpy arrays.

    bfloat16 rows without torch come widened to float32, which is exact. Raises DeliveryError `invalid_rows` when
    anything is not as it should be: format, checksum, names, shapes, types, or sums.
    """
    from safetensors import SafetensorError, deserialize

    try:
        tensors: dict[str, Mapping[str, Any]] = dict(deserialize(document))
        metadata = _metadata(document)
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise DeliveryError("invalid_rows", "The document is not readable safetensors") from None
    if metadata.get("tectum") != VERSION:
        raise DeliveryError("invalid_rows", f"The document is not in Tectum's format {VERSION}")
    if f"{_checksum({name: tensor['data'] for name, tensor in tensors.items()}):08x}" != metadata.get("crc32"):
        raise DeliveryError("invalid_rows", "The checksum of the rows does not match: they were damaged on the way")
    dtype = str(metadata.get("dtype"))
    item_rows = tuple(_integers(tensors, "item_rows", 1))
    grid = _integers(tensors, "grid_thw", 2) if "grid_thw" in tensors else []
    grid_thw = tuple((int(t), int(h), int(w)) for t, h, w in grid)
    layers = _layers(tensors)
    if grid_thw and len(grid_thw) != len(item_rows):
        raise DeliveryError("invalid_rows", f"{len(item_rows)} items, but {len(grid_thw)} grids")
    items = _items(tensors, len(item_rows))
    arrays, held = _arrays([tensors["rows"], *layers], dtype)
    try:
        return Embedding(arrays[0], item_rows, grid_thw, tuple(arrays[1:]), held, metadata.get("req_id", ""), items)
    except ValueError as error:
        raise DeliveryError("invalid_rows", str(error)) from None


def _raw(array: Any) -> Any:
    """The array's bytes as a flat numpy array, without a copy where it is contiguous."""
    import numpy as np

    if isinstance(array, Raw):
        return np.frombuffer(array.data, np.uint8)
    if hasattr(array, "detach"):  # torch: numpy has no bfloat16, so look at its bytes
        import torch

        return array.detach().contiguous().view(torch.uint8).numpy().reshape(-1)
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _checksum(data: Mapping[str, Any]) -> int:
    checksum = 0
    for name in sorted(data):
        checksum = zlib.crc32(data[name], checksum)
    return checksum


def _metadata(document: bytes) -> dict[str, str]:
    """The string metadata, which the library's parser leaves out. The document was parsed, so its header is sound."""
    length = int.from_bytes(document[:8], "little")
    found = json.loads(document[8 : 8 + length]).get("__metadata__", {})
    return {str(key): str(value) for key, value in found.items()}


def _integers(tensors: Mapping[str, Mapping[str, Any]], name: str, ndim: int) -> list[Any]:
    import numpy as np

    tensor = tensors.get(name)
    if tensor is None or tensor["dtype"] != "I64" or len(tensor["shape"]) != ndim:
        raise DeliveryError("invalid_rows", f"Tensor {name} is missing or not int64 of {ndim} dimensions")
    values = np.frombuffer(tensor["data"], np.int64).reshape(tensor["shape"])
    if (ndim == 2 and tensor["shape"][1] != 3) or bool((values < 0).any()):
        raise DeliveryError("invalid_rows", f"Tensor {name} holds values that cannot be")
    return list(values.tolist())


def _items(tensors: Mapping[str, Mapping[str, Any]], count: int) -> tuple[Mapping[str, Any], ...]:
    """The facts of each item, where the document has them."""
    tensor = tensors.get("items")
    if tensor is None:
        return ()
    try:
        found = json.loads(bytes(tensor["data"]))
    except ValueError:
        found = None
    if tensor["dtype"] != "U8" or not isinstance(found, list) or len(found) != count:
        raise DeliveryError("invalid_rows", f"The facts of the {count} items cannot be read")
    if not all(isinstance(facts, dict) for facts in found):
        raise DeliveryError("invalid_rows", f"The facts of the {count} items cannot be read")
    return tuple(found)


def _layers(tensors: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The deepstack tensors in order; no other tensor may be there."""
    layers: list[Mapping[str, Any]] = []
    while (layer := tensors.get(f"deepstack.{len(layers)}")) is not None:
        layers.append(layer)
    known = {"rows", "item_rows", "grid_thw", "items", *(f"deepstack.{number}" for number in range(len(layers)))}
    if "rows" not in tensors or set(tensors) - known:
        raise DeliveryError("invalid_rows", "The document has no rows, or tensors that are not Tectum's")
    return layers


def _arrays(tensors: Sequence[Mapping[str, Any]], dtype: str) -> tuple[list[Any], str]:
    """The float tensors as arrays, and the type they are held in."""
    for tensor in tensors:
        if _NAMES.get(tensor["dtype"]) != dtype or len(tensor["shape"]) != 2:
            text = f"Rows are {tensor['dtype']} {tensor['shape']}, not {dtype[:20]} [tokens, width]"
            raise DeliveryError("invalid_rows", text)
    if find_spec("torch") is not None:
        return [_torch_array(tensor, dtype) for tensor in tensors], dtype
    import numpy as np

    if dtype != "bfloat16":
        return [np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"]) for tensor in tensors], dtype
    wide = [(np.frombuffer(tensor["data"], np.uint16).astype(np.uint32) << 16).view(np.float32) for tensor in tensors]
    return [array.reshape(tensor["shape"]) for array, tensor in zip(wide, tensors, strict=True)], "float32"


def _torch_array(tensor: Mapping[str, Any], dtype: str) -> Any:
    import torch

    if not len(tensor["data"]):
        return torch.empty(tensor["shape"], dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(tensor["data"]), dtype=getattr(torch, dtype)).view(tensor["shape"])
