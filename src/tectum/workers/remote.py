"""Encoders on other machines, the service's side: they connect over TCP, prove themselves, and their rows are read from
the socket straight into staging memory.

Owns the listener and the bytes that come in. Whoever connects must sign a fresh challenge with the service's secret, and
gets a signature back, so that the secret never travels here and an encoder obeys no stranger. Until then a connection
may say one short message within seconds. Nothing is encrypted: this is for a network that the cluster trusts.
Who starts the encoders is not known here (`RemoteEncoder`): Ray does (`ray.py`).
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import tectum
from tectum.config import Settings
from tectum.delivery.staging import StagingPool
from tectum.errors import DeliveryError, StartupError
from tectum.workers import messages
from tectum.workers.line import EncoderLine, Tell
from tectum.workers.messages import (
    LENGTH,
    Challenge,
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Message,
    RowsFollow,
    Start,
    Welcome,
)

log = logging.getLogger("tectum.workers")

#: longest message (bytes) of an encoder, and of somebody who has not proved to be one
MAX_MESSAGE, MAX_HELLO = 16 * 1024 * 1024, 1024
#: seconds that a new connection has to prove itself, and how many may be at it at once
PATIENCE, MAX_STRANGERS = 5.0, 64
NONCE = 32
#: bytes of rows read and summed before the event loop does something else
CHUNK = 256 * 1024
#: seconds of silence after which the other end is asked whether it is there, between questions, and how many stay unanswered
KEEPALIVE = (10, 5, 3)


def proof(secret: bytes, side: str, lane: int, asked: bytes, asks: bytes) -> bytes:
    """That `side` (`encoder` or `service`) of a lane knows the secret: over what it was asked, and what it asks."""
    return hmac.digest(secret, b"tectum %b %d " % (side.encode(), lane) + asked + asks, "sha256")


def watch_over(link: socket.socket) -> None:
    """Small messages leave at once, and a machine that vanished without a word is noticed."""
    idle, interval, count = KEEPALIVE
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (idle + interval * count))


class RemoteEncoder(Protocol):
    """Who runs the encoder of one lane, and starts it again when it ends."""

    async def place(self) -> str:
        """Start it unless it runs or is being started again; returns where it runs and will connect from.

        Raises StartupError when it never will.
        """

    def kill(self) -> None:
        """End it at once, whatever it does; it is started again."""

    async def retire(self) -> None:
        """End it, until it is placed again. Idempotent."""


class Listener:
    """Where encoders connect. One line a lane: the newest that proved itself."""

    def __init__(self, host: str, port: int) -> None:
        self.secret = secrets.token_bytes(32)
        self.refused = 0  # connections that did not prove themselves
        self.pool: StagingPool
        self._asked = (host.strip("[]"), port)
        self._server: asyncio.Server | None = None
        self._strangers: set[RemoteLine] = set()
        self._lines: dict[int, RemoteLine] = {}
        self._arrived = asyncio.Event()  # set for a moment whenever a line proved itself

    async def open(self, pool: StagingPool) -> None:
        """Listen. Raises StartupError `port_in_use` or `invalid_settings`."""
        self.pool = pool
        host, port = self._asked
        try:
            self._server = await asyncio.get_running_loop().create_server(lambda: RemoteLine(self), host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartupError(
                    "port_in_use", f"Port {port} on {host} is in use; give another --workers-port"
                ) from None
            raise StartupError("invalid_settings", f"workers_host: {host} is no address of this machine") from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for line in [*self._strangers, *self._lines.values()]:
            line.cut()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that encoders connect to."""
        assert self._server is not None, "it listens"
        return self._asked[0], self._server.sockets[0].getsockname()[1]

    async def line(self, lane: int) -> RemoteLine:
        """The line of a lane, as soon as one that was not given out yet has connected."""
        while (line := self._lines.get(lane)) is None or line.given_out:
            await self._arrived.wait()
        line.given_out = True
        return line

    # --- what the lines report ---

    def connected(self, line: RemoteLine) -> bool:
        """A stranger came; whether there is room for it."""
        self._strangers.add(line)
        return len(self._strangers) <= MAX_STRANGERS

    def refuse(self, why: str) -> None:
        self.refused += 1
        log.warning("refused a connection to the encoders' port: %s", why)

    def proved(self, line: RemoteLine, lane: int) -> None:
        """It is the encoder of a lane. An older line of that lane leads nowhere any more."""
        self._strangers.discard(line)
        old = self._lines.get(lane)
        self._lines[lane] = line
        if old is not None:
            old.cut()
        self._arrived.set()
        self._arrived.clear()

    def lost(self, line: RemoteLine) -> None:
        self._strangers.discard(line)
        for lane in [lane for lane, known in self._lines.items() if known is line]:
            del self._lines[lane]


@dataclass(slots=True)
class _Batch:
    """A forward that runs there. slots: offset and length of each member's rows. complete: members whose rows are here."""

    slots: list[tuple[int, int]]
    complete: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Arriving:
    """Rows on their way in. slot: where they go; None when nobody asked for them, and they are read past."""

    rows: RowsFollow
    slot: memoryview | None
    read: int = 0
    crc32: int = 0


class RemoteLine(EncoderLine, asyncio.BufferedProtocol):
    """A TCP connection to an encoder on any machine; it is `gone` when the connection is.

    The socket is read into one of three places: a length, a message, or the slot of rows that a message announced.
    """

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.encoder: RemoteEncoder | None = None
        self.given_out = False
        self._listener = listener
        self._proved = False
        self._nonce = secrets.token_bytes(NONCE)
        self._deadline: asyncio.TimerHandle | None = None
        self._head = bytearray(LENGTH.size)
        self._body: bytearray | None = None  # of the message that is being read; None while its length is
        self._filled = 0
        self._arriving: _Arriving | None = None
        self._past = bytearray(0)
        self._batches: dict[int, _Batch] = {}

    # --- the service's side ---

    def send(self, message: Message) -> None:
        if isinstance(message, Encode):
            self._batches[message.batch] = _Batch([(offset, nbytes) for _, offset, nbytes in message.members])
        super().send(message)

    def cut(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def kill(self) -> None:
        if self.encoder is not None and not self.gone.done():
            self.encoder.kill()
        self.cut()

    async def stop(self) -> None:
        assert self.encoder is not None, "a line that was begun has its encoder"
        await self.encoder.retire()
        self.cut()
        await self.gone

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        watch_over(transport.get_extra_info("socket"))
        if not self._listener.connected(self):
            self._refuse("too many at once")
            return
        self._deadline = self._loop.call_later(PATIENCE, self._refuse, "it said nothing in time")
        super().send(Challenge(self._nonce))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._arriving = None
        self._batches.clear()
        self._listener.lost(self)
        text = "The connection to the encoder broke while it was starting; its log on its node has more"
        self._answer_start(error=StartupError("invalid_checkpoint", text))
        self.gone.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        arriving = self._arriving
        if arriving is None:
            return memoryview(self._head if self._body is None else self._body)[self._filled :]
        size = min(CHUNK, arriving.rows.nbytes - arriving.read)
        if arriving.slot is not None:
            return arriving.slot[arriving.read : arriving.read + size]
        return memoryview(self._past)[:size]

    def buffer_updated(self, nbytes: int) -> None:
        if self._arriving is not None:
            self._read_rows(self._arriving, nbytes)
            return
        self._filled += nbytes
        if self._filled < len(self._head if self._body is None else self._body):
            return
        self._filled = 0
        if self._body is None:
            self._read_length()
        else:
            body, self._body = self._body, None
            self._read_message(body)

    def _read_length(self) -> None:
        (length,) = LENGTH.unpack(self._head)
        if not 0 < length <= (MAX_MESSAGE if self._proved else MAX_HELLO):
            self._break_off(f"a message of {length} bytes")
        else:
            self._body = bytearray(length)

    def _read_message(self, body: bytearray) -> None:
        if not self._proved:
            self._read_hello(body)
            return
        try:
            message = messages.decode_from_afar(body)
        except ValueError:
            self._drop("does not decode")
            return
        if isinstance(message, RowsFollow):
            self._expect_rows(message)
        elif isinstance(message, Encoded):
            self._take_encoded(message)
        else:
            if isinstance(message, Failed):
                self._batches.pop(message.number, None)
            self._take(message)

    # --- who it is ---

    def _read_hello(self, body: bytearray) -> None:
        try:
            hello = messages.decode_hello(body)
        except ValueError:
            self._refuse("it speaks another language")
            return
        secret = self._listener.secret
        expected = proof(secret, "encoder", hello.lane, self._nonce, hello.nonce)
        if len(hello.nonce) != NONCE or not hmac.compare_digest(hello.proof, expected):
            self._refuse("it does not know the secret")
        elif hello.version != tectum.__version__:
            self._refuse(f"it is of version {hello.version[:20]!r}, and this is {tectum.__version__}")
        else:
            assert self._deadline is not None, "a stranger has a deadline"
            self._deadline.cancel()
            self._proved, self.pid = True, hello.pid
            super().send(Welcome(proof(secret, "service", hello.lane, hello.nonce, self._nonce)))
            self._listener.proved(self, hello.lane)

    def _refuse(self, why: str) -> None:
        self._listener.refuse(why)
        self.cut()

    def _break_off(self, what: str) -> None:
        """The stream is out of step: nothing that follows can be told apart into messages."""
        if not self._proved:
            self._refuse(what)
            return
        self.garbage += 1
        log.error("encoder process %d sent %s and is replaced", self.pid, what)
        self.kill()

    # --- its rows ---

    def _expect_rows(self, rows: RowsFollow) -> None:
        slot = self._slot(rows)
        if slot is None and not 0 < rows.nbytes <= self._listener.pool.max_bytes:
            self._break_off(f"rows of {rows.nbytes} bytes")
            return
        if slot is None:
            self._drop("announces rows that nobody asked for")
            self._past = bytearray(CHUNK)
        self._arriving = _Arriving(rows, slot)

    def _slot(self, rows: RowsFollow) -> memoryview | None:
        """Where these rows go, if they were asked for, in this size, and did not come yet."""
        batch = self._batches.get(rows.batch)
        if batch is None or not 0 <= rows.member < len(batch.slots) or rows.member in batch.complete:
            return None
        offset, nbytes = batch.slots[rows.member]
        return self._listener.pool.memory(offset, nbytes) if nbytes == rows.nbytes else None

    def _read_rows(self, arriving: _Arriving, nbytes: int) -> None:
        """Sum up what came, while it is in the cache."""
        if arriving.slot is not None:
            came = arriving.slot[arriving.read : arriving.read + nbytes]
            arriving.crc32 = zlib.crc32(came, arriving.crc32)
        arriving.read += nbytes
        if arriving.read < arriving.rows.nbytes:
            return
        self._arriving = None
        if arriving.slot is not None and arriving.crc32 == arriving.rows.crc32:
            self._batches[arriving.rows.batch].complete.add(arriving.rows.member)

    def _take_encoded(self, message: Encoded) -> None:
        """Pass the answer on; a member whose rows are not here has failed."""
        batch = self._batches.get(message.batch)
        if batch is None or len(batch.slots) != len(message.errors):
            self._drop("answers no batch")
            return
        del self._batches[message.batch]
        damaged = messages.problem(DeliveryError("invalid_rows", "The rows were damaged on the way from their encoder"))
        errors = [
            damaged if error is None and member not in batch.complete else error
            for member, error in enumerate(message.errors)
        ]
        self._take(Encoded(message.batch, errors, message.seconds))


class RemoteLauncher:
    """`Launcher` of encoders that somebody else starts, and that connect here."""

    def __init__(self, model: str, settings: Settings) -> None:
        self.least, self.most = settings.replicas, settings.lanes
        self.listener = Listener(settings.workers_host, settings.workers_port)
        self._model = model
        self._settings = settings
        self._encoders: dict[int, RemoteEncoder] = {}

    def encoder(self, lane: int) -> RemoteEncoder:
        """Who runs the encoder of a lane."""
        raise NotImplementedError

    async def open(self, pool: StagingPool) -> None:
        await self.listener.open(pool)

    async def launch(self, lane: int, on_message: Callable[[FromEncoder], None], tell: Tell) -> RemoteLine:
        encoder = self._encoders.get(lane) or self._encoders.setdefault(lane, self.encoder(lane))
        try:
            line = await self._connected(lane, encoder, tell)
            told = self._settings.model_dump(mode="json", exclude_unset=True)
            await line.begin(Start(self._model, lane, told), on_message, tell)
        except BaseException:
            self._encoders.pop(lane, None)
            await encoder.retire()
            raise
        return line

    async def _connected(self, lane: int, encoder: RemoteEncoder, tell: Tell) -> RemoteLine:
        tell("waiting for a place", 0.0)
        where = "no place was found for it"
        try:
            async with asyncio.timeout(self._settings.replica_timeout):
                node = await encoder.place()
                where = f"it runs, but did not get through to {self._settings.workers_host}"
                line = await self.listener.line(lane)
        except TimeoutError:
            text = f"An encoder did not connect within {self._settings.replica_timeout:g} s: {where}"
            raise StartupError("cluster_unavailable", text) from None
        line.encoder, line.node = encoder, node
        return line

    async def close(self) -> None:
        await asyncio.gather(*(encoder.retire() for encoder in self._encoders.values()))
        self._encoders.clear()
        await self.listener.close()
