"""Rows go out of staging memory itself; when an answer has ended, however it ended, none of them is still on its way from there.

A real connection under uvloop, with and without TLS, and a reader with a tiny socket buffer: the memory is overwritten the moment
the answer is over, and what the reader gets afterwards must be what was there before.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from contextlib import suppress
from functools import partial

import pytest
import trustme
import uvicorn
import uvloop

from tectum.serving.connection import ABORT, Connection, ConnectionLimits
from tectum.serving.presence import Caller, CallerGoneError

LIMITS = ConnectionLimits(max_connections=8, max_head_bytes=65536, head_timeout=10, stall_timeout=10)
#: larger than any socket buffer on the way, and with a last piece that is smaller than what a transport likes to buffer
SIZE = 24 * 1024 * 1024 + 60_000
PIECE = 256 * 1024


class Lender:
    """An ASGI app that lends its memory for each answer, and writes zeros over it when that has ended."""

    def __init__(self, patience: float) -> None:
        self.memory = bytearray(random.Random(1).randbytes(SIZE))
        self.was = bytes(self.memory)
        self.ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self._patience = patience

    async def __call__(self, scope, receive, send) -> None:
        view = memoryview(self.memory)
        pieces = (view[start : start + PIECE] for start in range(0, SIZE, PIECE))
        failure: BaseException | None = None
        try:
            async with Caller(receive, send, self._patience, scope["extensions"][ABORT]).watched() as caller:
                try:
                    await caller.answer_lent(200, {}, SIZE, pieces)
                finally:
                    self.memory[:] = bytes(SIZE)
        except BaseException as error:
            failure = error
        self.ended.set_result(failure)


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority, theirs = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    return theirs, ours


async def exchange(patience: float, tls: bool, reader) -> tuple[bytes, Lender]:
    """One request to a lender; `reader(connection, lender)` gives what the caller read of the body."""
    theirs, ours = contexts() if tls else (None, None)
    lender = Lender(patience)
    protocol = partial(Connection, limits=LIMITS, refused=lambda error: None)
    config = uvicorn.Config(lender, http=protocol, lifespan="off", log_config=None)
    config.load()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(config)
    made = partial(config.http_protocol_class, config=config, server_state=server.server_state, app_state={})
    serving = await asyncio.get_running_loop().create_server(made, sock=listener, ssl=theirs)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(connection.connect, listener.getsockname())
        if ours is not None:
            connection = await asyncio.to_thread(ours.wrap_socket, connection, server_hostname="127.0.0.1")
        connection.settimeout(20)
        with connection:
            await asyncio.to_thread(connection.sendall, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            body = await reader(connection, lender)
    serving.close()
    return body, lender


def read(connection: socket.socket, nbytes: int) -> bytes:
    """Up to `nbytes`, or what there was when the connection ended."""
    found = bytearray()
    with suppress(ConnectionResetError, ssl.SSLError):
        while len(found) < nbytes and (data := connection.recv(65536)):
            found += data
    return bytes(found)


plain_and_tls = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


@plain_and_tls
def test_what_is_overwritten_after_the_end_arrives_as_it_was(tls):
    async def reader(connection, lender):
        data = await asyncio.to_thread(read, connection, SIZE)
        await lender.ended
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return body + await asyncio.to_thread(read, connection, SIZE - len(body))

    body, lender = uvloop.run(exchange(20, tls, reader))
    assert lender.ended.result() is None
    assert body == lender.was


@plain_and_tls
def test_a_reader_that_stalls_gets_none_of_what_comes_after(tls):
    async def reader(connection, lender):
        first = await asyncio.to_thread(read, connection, 100_000)
        await lender.ended
        return (first + await asyncio.to_thread(read, connection, SIZE)).partition(b"\r\n\r\n")[2]

    body, lender = uvloop.run(exchange(0.3, tls, reader))
    assert isinstance(lender.ended.result(), CallerGoneError)
    assert 0 < len(body) < SIZE
    assert body == lender.was[: len(body)]


def test_a_caller_that_hangs_up_ends_the_lending():
    async def reader(connection, lender):
        first = await asyncio.to_thread(read, connection, 100_000)
        connection.close()
        await lender.ended
        return first

    _, lender = uvloop.run(exchange(20, False, reader))
    assert isinstance(lender.ended.result(), CallerGoneError)
