"""Delivery over ZeroMQ: PUSH to a PULL socket. As SGLang's receivers take it, metadata and rows are two frames.

Owns the connections: one for each receiver, kept while it is of use, closed when it idles or its peer goes, and limited
in number. Rows go out of staging memory itself; a send ends only after libzmq has let go of that memory.

ZeroMQ acknowledges nothing and calls a message sent whose peer was killed half-way. So the kernel is asked: a delivery
counts when the peer's kernel has acknowledged every byte of it (`tcpi_bytes_acked`), and it fails when the connection
ends before. What the peer's process does with bytes that its kernel took is beyond any sender's knowledge.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from tectum.config import Settings
from tectum.delivery.base import StagedRows, row_bytes
from tectum.delivery.curve import key_pair, need_curve, public_key
from tectum.delivery.kernel import unacknowledged
from tectum.delivery.sglang_frames import Names, embedding_message, error_message, names_of
from tectum.errors import DeliveryError, TectumError
from tectum.types import Destination

#: ZeroMQ sockets that a connection takes: its own, and both ends of its monitor
_SOCKETS_EACH = 3
#: where `tcpi_bytes_acked` (u64) stands in Linux's `struct tcp_info`
_BYTES_ACKED = 120
#: seconds between two looks at the kernel's counter, at first and at most: there is no event for it
_FIRST_LOOK, _LAST_LOOK = 0.0005, 0.02
#: seconds after which a receiver that has not answered makes room for another
_LATE = 1.0
#: bytes that CURVE adds to a frame: its command's name, a nonce, the flags and the box's tag (CurveZMQ, 'MESSAGE')
_SEALING = 8 + 8 + 1 + 16


class ZmqBackend:
    """Sends to any number of receivers at once; none waits for another. Other backends `push` messages of their own."""

    def __init__(self, settings: Settings) -> None:
        """Raises StartupError: `invalid_settings` for keys that are none, `missing_dependency` for a libzmq without CURVE."""
        self._names: Names = names_of(settings.sglang_version)
        self._most = settings.max_receivers
        self._idle = settings.receiver_idle
        self._curve = _curve(settings)
        self._connections: OrderedDict[str, _Connection] = OrderedDict()  # least recently used first

    async def send(self, staged: StagedRows, destination: Destination) -> None:
        message = embedding_message(staged.metadata, self._names)
        connection = self._connection(destination.address)
        with connection:
            await connection.push(message, await row_bytes(staged))

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        await self.push(destination, error_message(req_id, error, self._names))

    async def complete(self, staged: StagedRows, destination: Destination) -> None:
        """Tell a receiver that its rows lie where it wanted them: the metadata alone."""
        await self.push(destination, embedding_message(staged.metadata, self._names))

    async def push(self, destination: Destination, *frames: bytes | memoryview) -> None:
        """One message of these frames, as `_Connection.push` sends it. Raises DeliveryError `send_failed`."""
        with self._connection(destination.address) as connection:
            await connection.push(*frames)

    def open_connections(self) -> int:
        return len(self._connections)

    def _connection(self, endpoint: str) -> _Connection:
        """The connection to `endpoint`, made where there is none. Raises DeliveryError when all are in use."""
        connection = self._connections.get(endpoint)
        if connection is None:
            self._make_room()
            connection = _Connection(self._context, endpoint, self._idle, self._forget, self._curve)
            self._connections[endpoint] = connection
        self._connections.move_to_end(endpoint)
        return connection

    def _make_room(self) -> None:
        if len(self._connections) < self._most:
            return
        kept = self._connections.values()
        spare = next((one for one in kept if not one.users), None) or next((one for one in kept if one.is_late()), None)
        if spare is None:
            text = f"Rows are on their way to {self._most} receivers, the most allowed at once (--max-receivers)"
            raise DeliveryError("send_failed", text)
        spare.close()

    def _forget(self, connection: _Connection) -> None:
        if self._connections.get(connection.endpoint) is connection:
            del self._connections[connection.endpoint]

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_EACH * self._most + 16)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in list(self._connections.values()):
            connection.close()
        self._context.destroy(linger=0)


class _Connection:
    """A PUSH socket to one receiver, used as a context: closed when nobody has used it for `idle` seconds."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        idle: float,
        on_close: Callable[[_Connection], None],
        curve: _Curve | None,
    ) -> None:
        self.endpoint = endpoint
        self.users = 0
        self._idle = idle
        self._late_from = asyncio.get_running_loop().time() + _LATE
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._up: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._acknowledged: _Acknowledged | None = None
        self._end = 0  # where the last message ends among the bytes that libzmq was given
        self._under_way = 0  # messages that have not arrived
        self._timer: asyncio.TimerHandle | None = None
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # what is queued dies with its peer: the next one there is another
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what may wait is bounded by the staging budget
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._sealing = 0 if curve is None else _SEALING
        if curve is not None:
            curve.apply(self._socket)
        self._events = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._watcher = self._loop.create_task(self._watch())
        self._socket.connect(endpoint)

    def is_late(self) -> bool:
        """Whether nobody has answered there for a while: what waits for it may wait for a receiver that is not there at all."""
        return not self._up.done() and self._loop.time() >= self._late_from

    async def push(self, *frames: bytes | memoryview) -> None:
        """Send one message; returns when the peer's kernel has all of it. Raises DeliveryError `send_failed`.

        However it ends, nothing reads what a memoryview shows afterwards. A message that is given up on its way takes the
        connection with it, and all that is queued there: a peer that stalls for one stalls for all.
        """
        if not self._up.done():
            await asyncio.wait((self._up, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._up.done():
            text = "The receiver did not answer, and its place was needed for another (--max-receivers)"
            raise DeliveryError("send_failed", text)
        if self._lost.done():
            raise _gone()
        assert self._acknowledged is not None, "a connection that is up is known to the kernel"
        if not self._under_way:  # whatever was acknowledged since is libzmq's own: it answers a peer's heartbeats
            self._acknowledged.start(self._end)
        self._under_way += 1
        freed: asyncio.Future[None] = self._loop.create_future()
        queued = self._queue(frames, freed)
        try:
            await self._unless_lost(queued)
            self._end += sum(_on_the_wire(len(frame) + self._sealing) for frame in frames)
            await self._arrival(self._end, freed)
        except BaseException:
            queued.cancel()
            self.close()
            raise
        finally:
            self._under_way -= 1
            await _outlast(freed)

    def _queue(self, frames: Sequence[bytes | memoryview], freed: asyncio.Future[None]) -> asyncio.Future[Any]:
        """Offer one message to libzmq; `freed` is done when it has let go of all that is lent to it, or of the last frame.

        No frame may be referred to afterwards, or it would never be free.
        """
        lent = [number for number, frame in enumerate(frames) if isinstance(frame, memoryview)] or [len(frames) - 1]
        held = _Held(len(lent), freed)
        message = [held.tracked(frame) if number in lent else frame for number, frame in enumerate(frames)]
        return asyncio.ensure_future(self._socket.send_multipart(message, copy=False))

    async def _unless_lost(self, future: asyncio.Future[Any]) -> None:
        if not future.done():
            await asyncio.wait((future, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise _gone()
        future.result()

    async def _arrival(self, end: int, freed: asyncio.Future[None]) -> None:
        """Wait until the peer's kernel has acknowledged the stream up to `end`."""
        await asyncio.wait((freed, self._lost), return_when=asyncio.FIRST_COMPLETED)
        pause = _FIRST_LOOK
        while not self._has_arrived(end):
            if self._lost.done():
                raise _gone()
            await asyncio.wait((self._lost,), timeout=pause)
            pause = min(2 * pause, _LAST_LOOK)

    def _has_arrived(self, end: int) -> bool:
        assert self._acknowledged is not None, "messages are queued on connections that are up"
        return self._acknowledged.now() >= end

    async def _watch(self) -> None:
        """Follow what the connection tells about itself, until it is lost."""
        while True:
            event = await recv_monitor_message(self._events)
            if event["event"] == zmq.EVENT_CONNECTED:
                if self._acknowledged is not None:  # an earlier attempt ended before its handshake
                    self._acknowledged.stop()
                self._acknowledged = _Acknowledged(event["value"])
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._acknowledged is not None:
                self._up.set_result(None)
            elif self._up.done():
                self.close()
                return

    def close(self) -> None:
        """Drop the connection and whatever is queued on it. Idempotent."""
        if self._lost.done():
            return
        self._lost.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._watcher.cancel()
        if self._acknowledged is not None:
            self._acknowledged.stop()
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=0)
        self._on_close(self)

    def __enter__(self) -> Self:
        self.users += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self

    def __exit__(self, *exc: object) -> None:
        self.users -= 1
        if self.users or self._lost.done():
            return
        if not self._up.done():
            self.close()
        else:
            self._timer = self._loop.call_later(self._idle, self.close)


class _Acknowledged:
    """How many bytes of a connection the peer's kernel has acknowledged, counted from `start`.

    Looks at the connection through a descriptor of its own, so that the last count can be read when libzmq has closed
    its own.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._base = 0
        self._last = 0

    def start(self, count: int) -> None:
        """From `count` on: called when nothing is queued. What the kernel has of before, such as the handshake, is left out."""
        acknowledged, before = self._read(), -1
        while acknowledged != before:  # what is acknowledged between the two looks would count twice, and never arrive
            waiting = unacknowledged(self._socket.fileno())
            before, acknowledged = acknowledged, self._read()
        self._base = acknowledged + waiting - count

    def now(self) -> int:
        if self._socket.fileno() >= 0:
            self._last = self._read()
        return self._last - self._base

    def stop(self) -> None:
        self.now()
        self._socket.close()

    def _read(self) -> int:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        count: int = struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        return count


def _on_the_wire(size: int) -> int:
    """Bytes of a frame of `size` bytes with its header (ZMTP 3.1, section 'Framing')."""
    return size + (2 if size < 256 else 9)


@dataclass(frozen=True, slots=True)
class _Curve:
    """CURVE keys in Z85: the receivers' public one, and the pair of this server."""

    receivers: bytes
    public: bytes
    secret: bytes

    def apply(self, push: zmq.asyncio.Socket) -> None:
        push.curve_serverkey, push.curve_publickey, push.curve_secretkey = self.receivers, self.public, self.secret


def _curve(settings: Settings) -> _Curve | None:
    """The keys that the settings name, or None where they name none. Raises StartupError, as `ZmqBackend` says."""
    theirs, ours = settings.zmq_curve_server_key_file, settings.zmq_curve_secret_key_file
    if theirs is None or ours is None:
        return None
    need_curve("zmq_curve_server_key_file")
    public, secret = key_pair("zmq_curve_secret_key_file", ours)
    return _Curve(public_key("zmq_curve_server_key_file", theirs), public, secret)


class _Held:
    """So many frames of one message over memory that is not libzmq's own. `freed` is done when it has let go of all.

    pyzmq offers only a tracker to block on. Its event is set from pyzmq's thread, and here tells the loop.
    """

    def __init__(self, frames: int, freed: asyncio.Future[None]) -> None:
        self._left = frames
        self._freed = freed
        self._loop = freed.get_loop()

    def tracked(self, data: bytes | memoryview) -> zmq.Frame:
        """A frame over `data` itself."""
        frame = zmq.Frame(data, track=True, copy=False)
        for event in frame.tracker.events:
            event.set = self._tell
        return frame

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._let_go)

    def _let_go(self) -> None:
        self._left -= 1
        if not self._left:
            self._freed.set_result(None)


async def _outlast(future: asyncio.Future[None]) -> None:
    """Wait until `future` is done, however often the waiting is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _gone() -> DeliveryError:
    return DeliveryError("send_failed", "The receiver closed its connection before all of its rows had arrived")
