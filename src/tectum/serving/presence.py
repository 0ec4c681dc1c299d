"""Is the caller still there? A caller that hangs up on a plain call cancels its work (and nobody else's).

Owns the sending of one answer, and the watch for a hang-up beside it. What a cancelled call means for its request is not
decided here: the block that is cancelled tells the lifecycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive, Send

from tectum.pipeline.threads import outlast
from tectum.serving.connection import Unread

#: written to the socket at once; between chunks a hang-up is noticed
CHUNK = 1024 * 1024
#: seconds between two looks at what has not arrived: at first, and at most
FIRST_LOOK, LAST_LOOK = 0.0005, 0.02


class CallerGoneError(Exception):
    """The caller closed its connection, or stopped reading; nobody is left to answer. The guard drops the connection."""


async def body_pieces(receive: Receive) -> AsyncGenerator[bytes, None]:
    """A request's body as it comes. Raises CallerGoneError when it ends before its end."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGoneError
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


class Caller:
    """One HTTP caller that waits for its answer. patience: seconds that it may take to read it.

    connection: what `serving/connection.py` says of it, where it is one of ours. counts_what_arrived: an answer is over when
    the caller's kernel has it, and not already when ours has: for rows that nobody could get again.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        patience: float,
        connection: Mapping[str, Any] | None = None,
        *,
        counts_what_arrived: bool = False,
    ) -> None:
        self._receive = receive
        self._send = send
        self._patience = patience
        self._connection = connection
        self._counts_what_arrived = counts_what_arrived
        self._unread: Unread | None = None  # once the whole answer is written
        self._answered = False

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Caller]:
        """Run the block as long as the caller is connected; raise CallerGoneError out of it as soon as it is not."""
        task = asyncio.current_task()
        assert task is not None, "an answer is worked out in a task"
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._answered and (self._unread is None or self._unread.nbytes):
                gone = True
                task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield self
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise CallerGoneError from None
        finally:
            watcher.cancel()

    async def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send the whole answer. Returns when it has left for the caller; a hang-up before that cancels the block.

        Raises CallerGoneError when the caller does not read it in time: rows must not be held by a stalled reader.
        """
        view = memoryview(body)
        pieces = (view[start : start + CHUNK] for start in range(0, len(body), CHUNK))
        await self._answer_in_time(status, headers, len(body), pieces)

    async def answer_lent(
        self, status: int, headers: dict[str, str], nbytes: int, pieces: Iterable[memoryview]
    ) -> None:
        """As `answer`, of memory that is only lent: when this has ended, however it ended, the connection reads none of it.

        pieces: `nbytes` in all, each looked at when the one before has left.
        """
        if self._connection is None:
            await self._answer_in_time(status, headers, nbytes, map(bytes, pieces))
            return
        try:
            await self._answer_in_time(status, headers, nbytes, pieces)
        except BaseException:
            self._answered = True  # in part: what follows is no hang-up
            self._connection["call"]()
            await outlast(asyncio.ensure_future(self._connection["closed"].wait()))
            raise

    async def _answer_in_time(
        self, status: int, headers: dict[str, str], nbytes: int, pieces: Iterable[bytes | memoryview]
    ) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._answer(status, headers, nbytes, pieces)
        except TimeoutError:
            raise CallerGoneError from None

    async def _answer(
        self, status: int, headers: dict[str, str], nbytes: int, pieces: Iterable[bytes | memoryview]
    ) -> None:
        head = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        head.append((b"content-length", str(nbytes).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        for piece in pieces:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        # An empty piece waits until the socket took the last one; then the watcher has its turn. Only now is a
        # disconnect still a hang-up: after the closing message the server reports one for every answer.
        await self._send({"type": "http.response.body", "body": b"", "more_body": True})
        await asyncio.sleep(0)
        if self._counts_what_arrived and self._connection is not None:
            await self._arrival(self._connection)
        self._answered = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _arrival(self, connection: Mapping[str, Any]) -> None:
        """Wait until the caller's kernel has all that was written. A caller that has it and closes has not hung up.

        Raises CallerGoneError when the connection is closed already.
        """
        try:
            unread = connection["unread"]()
        except (OSError, AttributeError):  # a closed connection may have no socket any more
            raise CallerGoneError from None
        pause = FIRST_LOOK
        with unread as self._unread:
            try:
                while unread.nbytes:
                    await asyncio.sleep(pause)  # the kernel tells nobody of an acknowledgement
                    pause = min(2 * pause, LAST_LOOK)
                self._answered = True
            finally:
                self._unread = None
