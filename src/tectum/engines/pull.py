"""Receivers: pull held rows from an encoder into memory that the receiver chose, check them, and give the request back.

`Receiver` blocks, `AsyncReceiver` awaits; what they ask for, how an answer is read and what is refused is shared. The
bytes go from the socket straight into the buffer: no chunk is copied on the way. For everything but bulk rows, use
`tectum.engines.client`.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tectum.delivery import document
from tectum.delivery.document import Document
from tectum.delivery.wire import Sum
from tectum.engines.tls import HUNG_UP, Cert, Verify, client_context, handshake_failure
from tectum.errors import DeliveryError, InternalError, TectumError, UnavailableError

#: longest head of an answer, and longest error body, that is read (bytes)
MAX_HEAD = 64 * 1024
#: a buffer for an answer of so many bytes; what it raises goes to the caller
Allocate = Callable[[int], "memoryview | bytearray"]


class _Server(NamedTuple):
    """Where and how to ask."""

    host: str
    port: int
    secure: bool
    prefix: str
    headers: str


def _server(url: str, token: str | None) -> _Server:
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname:
        raise InternalError("internal", "An encoder's address is http://host:port or https://host:port")
    secure = split.scheme == "https"
    port = split.port or (443 if secure else 80)
    shown = f"[{split.hostname}]" if ":" in split.hostname else split.hostname
    headers = f"Host: {shown}:{port}\r\nAccept: application/x-safetensors\r\nConnection: close\r\n"
    if token is not None:
        headers += f"Authorization: Bearer {token}\r\n"
    return _Server(split.hostname, port, secure, split.path.rstrip("/"), headers)


def _request(server: _Server, method: str, path: str) -> bytes:
    return f"{method} {server.prefix}{path} HTTP/1.1\r\n{server.headers}\r\n".encode("latin-1")


def _embedding_path(req_id: str) -> str:
    return f"/v1/requests/{quote(req_id, safe='')}/embedding"


class _Answer:
    """One HTTP answer as its bytes come in: the head first, then the body into the buffer that `allocate` gave for it.

    `space()` is where the next bytes go, `took(n)` says that n came; `done` when the body is whole.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._head = memoryview(bytearray(MAX_HEAD))
        self._filled = 0
        self._body: memoryview | None = None
        self._error: tuple[int, Mapping[str, str]] | None = None
        self.checksum: Sum | None = None
        self.begun = False
        self.done = False

    def space(self) -> memoryview:
        return (self._head if self._body is None else self._body)[self._filled :]

    def took(self, count: int) -> None:
        self._filled += count
        self.begun = True
        if self._body is None:
            self._look_for_head()
        if self._body is not None and self.checksum is not None:
            self.checksum.add(self._body, self._filled)  # now, while it is in the cache
        if self._body is not None and self._filled == len(self._body):
            self.done = True

    def _look_for_head(self) -> None:
        received = bytes(self._head[: self._filled])
        end = received.find(b"\r\n\r\n")
        if end < 0:
            if self._filled == MAX_HEAD:
                raise InternalError("internal", "The encoder's answer has no end to its head")
            return
        status, headers = _parse_head(received[: end + 4])
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise InternalError("internal", "The encoder's answer does not say how long it is")
        rest = received[end + 4 :]
        if len(rest) > int(length):
            raise InternalError("internal", "The encoder's answer is longer than it says")
        if status == 200:
            self._body = memoryview(self._allocate(int(length))).cast("B")[: int(length)]
            assert len(self._body) == int(length), "the buffer takes the whole answer"
            self.checksum = Sum(len(self._body))
        else:
            self._error = (status, headers)
            self._body = memoryview(bytearray(min(int(length), MAX_HEAD)))
            rest = rest[: len(self._body)]
        self._body[: len(rest)] = rest
        self._filled = len(rest)

    def body(self) -> memoryview:
        """The whole body. Raises the error that the answer carries, or DeliveryError when it ended early."""
        if not self.done or self._body is None:
            raise DeliveryError("invalid_rows", "The encoder closed the connection before all rows were here")
        if self._error is None:
            return self._body
        status, headers = self._error
        raise TectumError.from_answer(status, bytes(self._body), headers.get("retry-after", ""), "The encoder")


def _parse_head(head: bytes) -> tuple[int, Mapping[str, str]]:
    line, _, rest = head.partition(b"\r\n")
    words = line.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise InternalError("internal", "The encoder's answer is not HTTP/1.1")
    try:
        parsed = http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException:
        raise InternalError("internal", "The encoder's answer has a head that makes no sense") from None
    return int(words[1]), {name.lower(): value for name, value in parsed.items()}


def _new_buffer(nbytes: int) -> bytearray:
    return bytearray(nbytes)


def _late(seconds: float) -> UnavailableError:
    return UnavailableError("server_unreachable", f"The encoder did not deliver within {seconds:g} s (Timeout)")


def _heard(answer: _Answer, tls: ssl.SSLContext | None) -> _Answer:
    """The answer, unless there is none and TLS may be why. Raises UnavailableError `server_unreachable`."""
    if tls is not None and not answer.begun:
        raise _hung_up()
    return answer


def _hung_up() -> UnavailableError:
    return UnavailableError("server_unreachable", f"No answer from the encoder: {HUNG_UP}")


def _unreachable(error: Exception, tls: ssl.SSLContext | None) -> UnavailableError:
    if (reason := handshake_failure(error)) is not None:
        return UnavailableError("server_unreachable", f"No TLS with the encoder: {reason}")
    if tls is not None and isinstance(error, ConnectionResetError):
        return _hung_up()
    return UnavailableError("server_unreachable", f"The encoder did not answer ({type(error).__name__})")


class Receiver:
    """Pulls from one encoder; blocks. Thread-safe: each pull has a connection of its own.

    url: `http(s)://host:port`. token: the encoder's bearer token. timeout: seconds for one call in all, however slowly
    bytes trickle in. verify, cert: as in `Client`. Raises StartupError `invalid_settings` for files that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        verify: Verify = True,
        cert: Cert | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._server = _server(url, token)
        self._timeout = timeout
        self._tls = client_context(url, verify, cert)
        self._open: set[socket.socket] = set()

    def pull(self, req_id: str, allocate: Allocate = _new_buffer) -> Document:
        """The rows held under `req_id`, read in place: `allocate(nbytes)` gives the buffer that the document fills.

        A pull that arrived whole releases the request at the encoder. Raises the encoder's own error (LifecycleError
        `request_not_found`, `embedding_not_ready`, `request_released`), UnavailableError `server_unreachable`, or
        DeliveryError `invalid_rows` when what came is not what was sent.
        """
        answer = self._call("GET", _embedding_path(req_id), allocate)
        return document.read(answer.body(), answer.checksum)

    def release(self, req_id: str) -> None:
        """Give back all that the request holds, at whatever stage it is. Idempotent."""
        self._call("DELETE", f"/v1/requests/{quote(req_id, safe='')}", _new_buffer).body()

    def close(self) -> None:
        """Hang up on whatever still runs: those calls fail at once."""
        for connection in tuple(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _call(self, method: str, path: str, allocate: Allocate) -> _Answer:
        until = time.monotonic() + self._timeout
        answer = _Answer(allocate)
        try:
            with self._connect() as connection:
                self._open.add(connection)
                try:
                    self._exchange(connection, _request(self._server, method, path), answer, until)
                finally:
                    self._open.discard(connection)
        except TimeoutError:
            raise _late(self._timeout) from None
        except OSError as error:
            raise _unreachable(error, self._tls) from None
        return _heard(answer, self._tls)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._server.host, self._server.port), self._timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return connection
        return self._tls.wrap_socket(connection, server_hostname=self._server.host)

    def _exchange(self, connection: socket.socket, request: bytes, answer: _Answer, until: float) -> None:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        connection.sendall(request)
        while not answer.done:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            count = connection.recv_into(answer.space())
            if not count:
                return
            answer.took(count)


class AsyncReceiver:
    """As `Receiver`, for an event loop. Cancelling a call hangs up; then nothing is written to the buffer any more."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        verify: Verify = True,
        cert: Cert | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._server = _server(url, token)
        self._timeout = timeout
        self._tls = client_context(url, verify, cert)

    async def pull(self, req_id: str, allocate: Allocate = _new_buffer) -> Document:
        """As `Receiver.pull`. Rows are summed as they come, a little at a time, so that the event loop goes on."""
        answer = await self._call("GET", _embedding_path(req_id), allocate)
        return document.read(answer.body(), answer.checksum)

    async def release(self, req_id: str) -> None:
        """As `Receiver.release`."""
        (await self._call("DELETE", f"/v1/requests/{quote(req_id, safe='')}", _new_buffer)).body()

    async def _call(self, method: str, path: str, allocate: Allocate) -> _Answer:
        loop = asyncio.get_running_loop()
        answer = _Answer(allocate)
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(self._timeout):
                transport, protocol = await loop.create_connection(
                    lambda: _Into(answer, _request(self._server, method, path)),
                    self._server.host,
                    self._server.port,
                    ssl=self._tls,
                )
                await protocol.ended
        except TimeoutError:
            raise _late(self._timeout) from None
        except OSError as error:
            raise _unreachable(error, self._tls) from None
        finally:
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        return _heard(answer, self._tls)


class _Into(asyncio.BufferedProtocol):
    """Receives one answer straight into its buffer."""

    def __init__(self, answer: _Answer, request: bytes) -> None:
        self._answer = answer
        self._request = request
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream connection"
        transport.write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:
        # after the last byte nothing more is awaited: what comes all the same is read into the void
        return self._answer.space() if not self.ended.done() else memoryview(bytearray(1024))

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended.done():
            return
        try:
            self._answer.took(nbytes)
        except Exception as error:
            self.ended.set_exception(error)
            return
        if self._answer.done:
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            if exc is not None:
                self.ended.set_exception(exc)
            else:
                self.ended.set_result(None)
