"""One connection, before and after a request: how many, how large a head may be, and how long anything may stall.

uvicorn's protocol does the HTTP; what it leaves unbounded is bounded here: connections, the bytes and the time of a request
line with its headers, trailers, requests sent ahead, and a reader that takes nothing. After a request, it tells what of an
answer its peer does not have yet. It knows no route and reads no body.
"""

from __future__ import annotations

import asyncio
import http
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tectum.delivery.kernel import unacknowledged
from tectum.errors import BadRequestError, TectumError, UnavailableError
from tectum.serving.problems import problem_response

#: requests that a caller may send on one connection before it has read the first answer
MAX_AHEAD = 8
MAX_HEADERS = 100
#: seconds that a closed connection may take to read its last bytes
CLOSING = 5.0
#: key of the scope's extensions: its `call` drops the connection at once, its event `closed` says that it holds nothing any
#: more, and its `unread` makes an `Unread`. Where the key is there, a connection that takes the next piece of a body holds none
#: of those before
ABORT = "tectum.abort"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """max_head_bytes: request line and headers. head_timeout, stall_timeout (a reader that takes nothing): seconds."""

    max_connections: int
    max_head_bytes: int
    head_timeout: float
    stall_timeout: float


class Unread:
    """What was written to a connection and is not in its peer's kernel yet. A context manager.

    Looks at the connection through a descriptor of its own, so that it can be asked when the connection was closed.
    """

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        """Raises OSError when the connection is closed already."""
        self._descriptor = os.dup(transport.get_extra_info("socket").fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    @property
    def nbytes(self) -> int:
        """Bytes that the peer's kernel has not acknowledged; once the connection is lost, as many as there were then."""
        return unacknowledged(self._descriptor)


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol within limits. `refused` hears of every refusal, for the metrics."""

    def __init__(
        self, *args: Any, limits: ConnectionLimits, refused: Callable[[TectumError], None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._refused = refused
        self._in_head = True  # between the end of one request and the end of the next one's headers
        self._head_bytes = 0
        self._beside_body = 0  # bytes since a body's last piece: what frames its chunks, and trailers
        self._answering: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait behind this one
        self._deaf = False
        self._closed = asyncio.Event()
        self._refusal: TectumError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # --- limits ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A body may be lent memory: writing pauses while any of it is buffered. TLS pauses at its limit, others beyond it.
        transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1, low=0)
        self._start_head_timer()
        if len(self.connections) > self._limits.max_connections:
            self.app = self._turn_away
            if len(self.connections) > 2 * self._limits.max_connections:
                self._refused(_too_many())
                self.abort()

    async def _turn_away(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = _too_many()
        self._refused(error)
        head, body = problem_parts(error)
        await send({"type": "http.response.start", "status": error.status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            self._start_head_timer()
        else:
            self._beside_body += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # whatever was raised in a callback, too
            self._refuse(self._refusal or BadRequestError("invalid_request", "This is not a request in HTTP/1.1"))
        except httptools.HttpParserUpgrade:  # answered in HTTP/1.1 all the same, and nothing is read after it
            self._deaf = True
            self.cycle.keep_alive = False
        else:
            if (self._head_bytes if self._in_head else self._beside_body) > self._limits.max_head_bytes:
                self._refuse(self._head_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)
        # else it is a trailer, which must not pass for a header (RFC 9110, 6.5.1): those were looked at before the body

    def on_body(self, body: bytes) -> None:
        self._beside_body = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_head_bytes or len(self.headers) > MAX_HEADERS:
            self._refusal = self._head_too_large()
            raise self._refusal
        if len(self.pipeline) >= MAX_AHEAD:
            text = f"More than {MAX_AHEAD} requests were sent before an answer was read"
            self._refusal = BadRequestError("invalid_request", text)
            raise self._refusal
        if (
            sum(name == b"host" for name, _ in self.headers) > 1
        ):  # RFC 9112, 3.2: proxies before us may read another one
            self._refusal = BadRequestError("invalid_request", "The request has more than one Host header")
            raise self._refusal
        self._stop_head_timer()
        super().on_headers_complete()
        self._in_head = False
        self._head_bytes = self._beside_body = 0
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_begin(self) -> None:
        super().on_message_begin()
        unread = partial(Unread, self.transport)
        self.scope["extensions"] = {ABORT: {"call": self.abort, "closed": self._closed, "unread": unread}}

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_head_timer()  # what comes ahead of time may take its time: an earlier request is being answered
            return
        if not self._head_bytes:  # opened and never used: there is no request to refuse
            self.transport.close()
            self._abort_later()
            return
        seconds = self._limits.head_timeout
        self._refuse(BadRequestError("request_timeout", f"The request's headers took longer than {seconds:g} s"))

    def _head_too_large(self) -> BadRequestError:
        text = f"The request line and headers are larger than {self._limits.max_head_bytes} bytes"
        return BadRequestError("head_too_large", text)

    # --- a reader that takes nothing ---

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._limits.stall_timeout, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    # --- the end ---

    def abort(self) -> None:
        """Drop the connection, and what it has not read, now."""
        self._tell_hang_up()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self.pipeline.clear()
        self._tell_hang_up()
        super().connection_lost(exc)
        self._closed.set()

    def _tell_hang_up(self) -> None:
        """uvicorn tells the newest request alone, which may wait behind the one that is being answered."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # so that uvicorn does not report an answer that was not finished
            self._answering.message_event.set()

    def _is_unanswered(self) -> bool:
        """Whether the body that is coming belongs to the request whose turn it is, and nothing of its answer has been sent."""
        cycle = self.cycle
        return not self._in_head and cycle is self._answering and cycle is not None and not cycle.response_started

    def _abort_later(self) -> None:
        """A closing transport still waits for its reader; not for ever."""
        self.loop.call_later(CLOSING, self.transport.abort)

    def _refuse(self, error: TectumError) -> None:
        """Answer what never became a request, or a request whose body came to nothing, and close."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        self._deaf = True
        self._refused(error)
        unanswered = self._is_unanswered()
        if not unanswered and self.cycle is not None and not self.cycle.response_complete:
            self.abort()  # an earlier request's answer is under way: this one cannot be written into it
            return
        if unanswered:
            self._tell_hang_up()  # this is its answer
        if unanswered or self._head_bytes:
            head, body = problem_parts(error)
            line = f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}\r\n".encode()
            self.transport.write(line + b"".join(b"%s: %s\r\n" % header for header in head) + b"\r\n" + body)
        self.transport.close()
        self._abort_later()


def _too_many() -> UnavailableError:
    return UnavailableError("overloaded", "The encoder is full: too many open connections", retry_after=1.0)


def problem_parts(error: TectumError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error as `application/problem+json`, on a connection that is closed after it."""
    response = problem_response(error)
    return [*response.raw_headers, (b"connection", b"close")], bytes(response.body)
