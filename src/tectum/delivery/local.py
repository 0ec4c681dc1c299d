"""What the encoder and a receiver on the same host say to each other over a Unix socket: JSON, one message a line.

The first line comes with the descriptor of the staging memory, read-only, by SCM_RIGHTS. Then the receiver asks and the
encoder answers, in order:

    {"pull": req_id}         → where the rows lie, what they are, and the generation of their lease; or {"problem": …}
    {"done": generation}     → {"done": generation}: the lease was good until now; or {"problem": …}: it was not, and what
                               was read since may be somebody else's
    {"left": generation}     → {"left": generation}: not wanted any more; the rows stay held for the next pull

Owns the form of these messages and the passing of the descriptor. Nothing is copied here, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from tectum.delivery.document import Document
from tectum.delivery.staging import Lease
from tectum.delivery.wire import Raw
from tectum.errors import DeliveryError
from tectum.types import DTYPE_BYTES, RequestMetadata

VERSION = 1
#: longest message (bytes)
MAX_LINE = 1024 * 1024


def greet(connection: socket.socket, memory: int) -> None:
    """Send the first line with a read-only descriptor of `memory`. The connection is new, so that this never blocks."""
    descriptor = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(connection, [line({"tectum": VERSION})], [descriptor])
    finally:
        os.close(descriptor)


def line(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def parse(text: bytes) -> dict[str, Any]:
    """One line. Raises DeliveryError `invalid_rows` when it is no message."""
    try:
        message = json.loads(text.decode())
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise DeliveryError("invalid_rows", "A message on the local socket makes no sense")
    return message


def grant(metadata: RequestMetadata, lease: Lease) -> dict[str, Any]:
    """The answer to a pull."""
    return {
        "req_id": metadata.req_id,
        "offset": lease.offset,
        "nbytes": lease.nbytes,
        "generation": lease.generation,
        "dtype": metadata.dtype,
        "width": metadata.width,
        "layers": metadata.deepstack_layers,
        "item_rows": list(metadata.item_rows),
        "grid_thw": [list(grid) for grid in metadata.grid_thw],
    }


def _count(value: Any) -> int:
    """A number of things. Raises ValueError for what is none."""
    if type(value) is not int or value < 0:
        raise ValueError("a count")
    return value


def granted(message: Mapping[str, Any], memory: memoryview) -> Document:
    """The rows of a grant, in place. Raises DeliveryError `invalid_rows` when it does not hold together."""
    try:
        dtype, width, arrays = str(message["dtype"]), _count(message["width"]), 1 + _count(message["layers"])
        item_rows = tuple(_count(rows) for rows in message["item_rows"])
        grid = tuple((_count(t), _count(h), _count(w)) for t, h, w in message["grid_thw"])
        offset, nbytes = _count(message["offset"]), _count(message["nbytes"])
        step = sum(item_rows) * width * DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        raise DeliveryError("invalid_rows", "A grant on the local socket makes no sense") from None
    fits = step > 0 and step * arrays == nbytes and offset + nbytes <= len(memory)
    if not fits or len(grid) not in (0, len(item_rows)):
        raise DeliveryError("invalid_rows", "A grant on the local socket does not hold together")
    offsets = tuple(range(offset, offset + nbytes, step))
    views = tuple(Raw((sum(item_rows), width), memory[start : start + step]) for start in offsets)
    return Document(str(message.get("req_id", "")), dtype, item_rows, grid, views, offsets)
