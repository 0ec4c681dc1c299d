"""Delivery to receivers of one's own: whole documents in the wire format, pushed over ZeroMQ. No pickle is in it.

Owns the form of the messages and nothing of the connections, which are `zmq.py`'s. A message is the document, in as many
frames as it has parts: the large ones are staging memory itself, the last is the checksum. A message of one frame is a
problem (JSON, as over HTTP, with the `req_id`): those rows will not come. `tectum.engines.pushed` is the other end.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Self

from tectum.delivery import wire
from tectum.delivery.base import SLICE, StagedRows
from tectum.delivery.zmq import ZmqBackend
from tectum.errors import TectumError
from tectum.types import Destination

#: parts of fewer bytes are copied: cheaper than to follow what becomes of them
LENT = 64 * 1024


class DocumentBackend:
    """Pushes documents through `messages`, which is entered before this and left after it."""

    def __init__(self, messages: ZmqBackend) -> None:
        self._messages = messages

    async def send(self, staged: StagedRows, destination: Destination) -> None:
        document = wire.staged(staged.metadata, staged.lease.views())
        frames = [part if len(part) >= LENT else bytes(part) for part in document.parts]
        await self._messages.push(destination, *frames, await _checksum(document))

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        await self._messages.push(destination, json.dumps({**error.to_problem(), "req_id": req_id}).encode())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


async def _checksum(document: wire.Unsent) -> bytes:
    """The last bytes of the document, worked out in slices between which the event loop goes on."""
    pieces = document.pieces(SLICE)
    piece = next(pieces)
    for following in pieces:
        await asyncio.sleep(0)
        piece = following
    return bytes(piece)
