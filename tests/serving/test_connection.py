"""A connection's own limits, on a real socket: what is no header, what is no answer, and who hears of a hang-up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from tectum.errors import TectumError
from tectum.serving.connection import Connection, ConnectionLimits

LIMITS = ConnectionLimits(max_connections=8, max_head_bytes=4096, head_timeout=10.0, stall_timeout=10.0)
CHUNKED = b"POST /x HTTP/1.1\r\nHost: here\r\nAuthorization: one\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: here\r\n\r\n"
Call = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(app: ASGIApp, refused: Callable[[TectumError], None]) -> AsyncIterator[Call]:
    """A connection to `app`, behind the protocol alone."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    config.load()
    protocol = partial(Connection, config, ServerState(), app_state={}, limits=LIMITS, refused=refused)
    loop = asyncio.get_running_loop()
    async with await loop.create_server(protocol, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def run(
    work: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], app: ASGIApp
) -> list[TectumError]:
    """Do `work` on a connection; returns what was refused on it."""
    refused: list[TectumError] = []

    async def main() -> None:
        async with asyncio.timeout(20), connected(app, refused.append) as call:
            await work(*call)

    asyncio.run(main())
    return refused


async def shown(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the headers that a request has when its body has been read."""
    request = Request(scope, receive)
    body = await request.body()
    await PlainTextResponse(f"{body!r} {request.headers.items()}")(scope, receive, send)


def hears_of_its_end(heard: asyncio.Event) -> ASGIApp:
    """An app that answers nothing, and sets `heard` when its caller is gone."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        heard.set()

    return app


def test_a_trailer_is_no_header():
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"Authorization: two\r\nX-Tenant: other\r\n\r\n")
        head, body = (await reader.readuntil(b"\r\n\r\n")), (await reader.readuntil(b"]"))
        assert head.startswith(b"HTTP/1.1 200")
        assert b"b'abc' [('host', 'here'), ('authorization', 'one'), ('transfer-encoding', 'chunked')]" in body
        writer.write(GET)  # and the next request's headers are
        assert b"('host', 'here')" in await reader.readuntil(b"]")

    assert run(work, shown) == []


@pytest.mark.parametrize("trailer", [b"X-Y: " + b"y" * 1000 + b"\r\n", b"y" * 1000], ids=["many", "one without end"])
def test_trailers_are_bounded_as_headers_are(trailer):
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"X-Y: ")
        with contextlib.suppress(ConnectionError):
            while True:  # ends with the connection, or at the test's time limit
                writer.write(trailer)
                await writer.drain()
                await asyncio.sleep(0)

    assert [error.code for error in run(work, shown)] == ["head_too_large"]


@pytest.mark.parametrize("target", [b"http://here", b"http:///x", b"x"])
def test_a_target_without_a_path_is_answered(target):
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: here\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request")

    assert [error.code for error in run(work, shown)] == ["invalid_request"]


def test_a_second_host_is_refused():
    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nhost: there\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")

    assert [error.code for error in run(work, shown)] == ["invalid_request"]


@pytest.mark.parametrize(
    "body",
    [
        b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff3\r\nabc\r\n",
        b"Transfer-Encoding: identity\r\n\r\nabc",
    ],
)
def test_a_body_that_is_framed_wrong_is_answered(body):
    heard = asyncio.Event()

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /x HTTP/1.1\r\nHost: here\r\n" + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")
        await heard.wait()

    assert [error.code for error in run(work, hears_of_its_end(heard))] == ["invalid_request"]


@pytest.mark.parametrize("ahead", [GET, CHUNKED.partition(b"3\r\n")[0]], ids=["of the request before", "of its own"])
def test_a_body_that_is_framed_wrong_is_not_answered_into_an_answer(ahead):
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(ahead)
        assert (await reader.readuntil(b"some")).startswith(b"HTTP/1.1 200")
        writer.write(CHUNKED.replace(b"3\r\nabc", b"3\r\nabcd"))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    assert [error.code for error in run(work, app)] == ["invalid_request"]


def test_the_request_that_is_answered_hears_of_the_end_not_one_that_waits_behind_it():
    heard = asyncio.Event()

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET * 20)  # more than may be sent ahead
        assert await reader.read() == b""
        await heard.wait()

    assert [error.code for error in run(work, hears_of_its_end(heard))] == ["invalid_request"]
