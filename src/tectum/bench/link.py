"""HTTP/1.1 over raw sockets, as little of it as a load needs, so that sending costs little beside serving."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from tectum.engines.address import server_url
from tectum.errors import StartupError


class Answer(NamedTuple):
    """head: status line and headers, lower case."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: bytes) -> bytes:
        """Its value, or nothing."""
        _, found, rest = self.head.partition(b"\r\n" + name + b": ")
        return rest.split(b"\r\n", 1)[0] if found else b""


class Link(asyncio.Protocol):
    """One connection: one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._buffer = bytearray()
        self._head: bytes | None = None
        self._length = 0

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, request: bytes) -> Answer:
        """Send a whole request and await its whole answer. Cancelling it hangs up. Raises ConnectionError."""
        assert self._transport is not None, "a link is connected before it is used"
        assert self._answer is None, "a link carries one call at a time"
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = bytes(self._buffer[:end]).lower() + b"\r\n"
            length = Answer(0, self._head, b"").header(b"content-length")
            if not length.isdigit():
                self._fail(ConnectionError("an answer without a content-length"))
                return
            self._length = int(length)
            del self._buffer[: end + 4]
        if len(self._buffer) >= self._length:
            answer = Answer(int(self._head[9:12]), self._head, bytes(self._buffer[: self._length]))
            del self._buffer[: self._length]
            self._head = None
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error if isinstance(error, ConnectionError) else ConnectionError(str(error)))
        self.close()


class Links:
    """Connections to one server, kept for reuse."""

    def __init__(self, url: str) -> None:
        """Raises StartupError `invalid_settings` for anything but http://HOST[:PORT]."""
        parts = urlsplit(server_url(url, "url"))
        if parts.scheme != "http":
            raise StartupError("invalid_settings", "url: the load speaks no TLS and goes to http:// addresses only")
        self.host = parts.hostname or ""
        self.port = parts.port or 80
        self._idle: list[Link] = []

    async def take(self) -> Link:
        """An open link. Raises ConnectionError where there is no server."""
        while self._idle:
            link = self._idle.pop()
            if link.open:
                return link
        try:
            _, link = await asyncio.get_running_loop().create_connection(Link, self.host, self.port)
        except OSError as error:
            raise ConnectionError(str(error)) from None
        return link

    def give_back(self, link: Link) -> None:
        """Keep a link whose call ended; one that is closed is forgotten."""
        if link.open:
            self._idle.append(link)

    def close(self) -> None:
        for link in self._idle:
            link.close()
