"""Delivery: staged rows to a receiver that waits somewhere else.

Owns the backends of one server, by name, and how their bytes are read. It never releases a request and knows no
request's state: the lifecycle admits each send, and frees the rows only after `send` has returned. So `send`, however
it ends, ends only when nothing reads the rows any more.

A backend is one small file. Imports no torch, and no backend's library until the backend is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Protocol, Self

from tectum.config import Settings
from tectum.errors import BadRequestError, DeliveryError, StartupError, TectumError
from tectum.types import Destination, RequestMetadata

#: bytes that one turn of the event loop may copy
SLICE = 4 * 1024 * 1024


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host may stand in brackets or bare.

    Raises BadRequestError `invalid_request`.
    """
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadRequestError("invalid_request", "The receiver's address is not host:port")
    if not all(c.isascii() and (c.isalnum() or c in ".:-_%") for c in host):
        raise BadRequestError("invalid_request", "The receiver's host is no name and no address")
    return host, int(port)


def zmq_destination(host: str, port: int, backend: str = "zmq") -> Destination:
    """A receiver that binds a PULL socket at `host` (an address) and `port`: SGLang's (`zmq`), or one's own (`documents`)."""
    return Destination(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", backend)


@dataclass(frozen=True, slots=True)
class MooncakeDestination(Destination):
    """A receiver that wants the rows in its memory. Counted by `address`, where its completion message goes.

    session_id: its transfer engine, `host:port`. buffer_address: where the rows go, registered by the receiver.
    """

    session_id: str = field(default="", compare=False)
    buffer_address: int = field(default=0, compare=False)


class Lease(Protocol):
    """Staging memory, as much as a backend may know of it."""

    def views(self) -> list[memoryview]:
        """The staged arrays, each as its bytes: the rows, then the deepstack layers."""


class StagedRows(Protocol):
    """A request's rows in staging memory, as the pipeline hands them over."""

    @property
    def metadata(self) -> RequestMetadata: ...
    @property
    def lease(self) -> Lease: ...


class Backend(Protocol):
    """One way to reach receivers."""

    async def send(self, staged: StagedRows, destination: Destination) -> None:
        """Deliver, and return when the receiver's side has taken the rows; ends only when nothing reads them any more.

        Raises DeliveryError `send_failed`. Sets no time limit of its own: the caller cancels it.
        """

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        """Tell the receiver that its rows will not come, and why."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


async def row_bytes(staged: StagedRows) -> memoryview:
    """All rows as one block, deepstack layers as further columns: `[rows, width × (1 + layers)]`, row-major.

    Without deepstack it is the staging memory itself, with it a copy (`woven`).
    """
    views = staged.lease.views()
    return views[0] if len(views) == 1 else await woven(staged)


async def woven(staged: StagedRows) -> memoryview:
    """A copy of all rows as one block, as in `row_bytes`.

    Made in slices between which the event loop goes on; a cancellation stops it there, and nothing is read afterwards.
    """
    import numpy as np

    rows = staged.metadata.rows
    arrays = [np.frombuffer(view, np.uint8).reshape(rows, -1) for view in staged.lease.views()]
    width = arrays[0].shape[1]
    block = np.empty((rows, width * len(arrays)), np.uint8)
    step = max(SLICE // block.shape[1], 1)
    for start in range(0, rows, step):
        for column, array in enumerate(arrays):
            block[start : start + step, column * width : (column + 1) * width] = array[start : start + step]
        await asyncio.sleep(0)
    return block.reshape(-1).data


class Deliveries:
    """The backends of one server, and what the stages call. An async context manager."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = dict(backends)
        self._stack = AsyncExitStack()
        self._receipts: dict[tuple[str, str], list[asyncio.Future[None]]] = {}

    async def send(self, staged: StagedRows, destination: Destination) -> None:
        """Deliver to `destination` by the backend it names. Never releases. Raises DeliveryError."""
        receipts = (staged.metadata.req_id, destination.address)
        try:
            await self._backend(destination).send(staged, destination)
        except TectumError as error:
            self._sign(receipts, error)
            raise
        except BaseException:
            self._sign(receipts, DeliveryError("send_timeout", "The delivery to a receiver was given up"))
            raise
        self._sign(receipts, None)

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        """Tell `destination` that the rows of `req_id` will not come."""
        self._sign((req_id, destination.address), error)
        await self._backend(destination).notify(req_id, destination, error)

    @contextmanager
    def receipt(self, req_id: str, destination: Destination) -> Iterator[asyncio.Future[None]]:
        """A future that follows the next delivery of `req_id` to `destination`: done with it, or failed as it failed."""
        key = (req_id, destination.address)
        receipt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._receipts.setdefault(key, []).append(receipt)
        try:
            yield receipt
        finally:
            receipt.cancel()
            waiting = self._receipts[key]
            waiting.remove(receipt)
            if not waiting:
                del self._receipts[key]

    def _sign(self, key: tuple[str, str], error: TectumError | None) -> None:
        for receipt in self._receipts.get(key, ()):
            if receipt.done():
                continue
            if error is None:
                receipt.set_result(None)
            else:
                receipt.set_exception(error.bare())
                receipt.exception()  # looked at: whoever waited may have left

    def _backend(self, destination: Destination) -> Backend:
        backend = self._backends.get(destination.backend)
        if backend is None:
            raise DeliveryError("send_failed", f"No delivery backend {destination.backend!r} runs here")
        return backend

    async def __aenter__(self) -> Deliveries:
        for backend in self._backends.values():
            await self._stack.enter_async_context(backend)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()


#: what `--transfer-backend` needs: libraries, and the extras that bring them
_NEEDED = {
    "zmq": (("zmq",), "zmq"),
    "zmq_to_scheduler": (("zmq",), "sglang"),
    "zmq_to_tokenizer": (("zmq",), "sglang"),
    "mooncake": (("zmq", "mooncake.engine"), "sglang,mooncake"),
}


def deliveries(settings: Settings) -> Deliveries:
    """The backends that the settings ask for. Raises StartupError `missing_dependency` that says what to install."""
    if settings.transfer_backend == "none":
        return Deliveries({})
    libraries, extras = _NEEDED[settings.transfer_backend]
    for library in libraries:
        try:
            import_module(library)
        except ImportError as error:
            text = f"--transfer-backend {settings.transfer_backend} needs {library} ({error}): "
            raise StartupError("missing_dependency", text + f'pip install "tectum[{extras}]"') from None
    from tectum.delivery.documents import DocumentBackend
    from tectum.delivery.zmq import ZmqBackend

    messages = ZmqBackend(settings)
    backends: dict[str, Backend] = {"zmq": messages, "documents": DocumentBackend(messages)}
    if settings.transfer_backend == "mooncake":
        from tectum.delivery.mooncake import MooncakeBackend

        backends["mooncake"] = MooncakeBackend(settings, messages)
    return Deliveries(backends)
