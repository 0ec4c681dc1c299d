"""The door for receivers on this host: they read the staging memory itself, and nothing is copied on the way.

A lease that is handed out is an ordinary pull of the lifecycle: its good end releases the request; a receiver that dies, hangs
up or keeps it too long ends it without, and the rows stay held for the next pull. Whoever may open the socket may read all
staged rows, so only the service's own user may.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tectum.delivery import local
from tectum.errors import BadRequestError, LifecycleError, StartupError, TectumError
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.work import Staged

log = logging.getLogger("tectum.local")

#: seconds until the next try, where a connection could not be accepted
ACCEPT_AGAIN = 0.1


@asynccontextmanager
async def local_door(pipeline: Pipeline, memory: int, path: Path, patience: float) -> AsyncIterator[None]:
    """Serve `path` inside the block. memory: descriptor of the staging memory. patience: seconds of one lease.

    Raises StartupError `invalid_settings` when the socket cannot be made.
    """
    listener = _bind(path)
    os.fchmod(memory, 0o400)  # so that a read-only descriptor cannot be opened again for writing
    connections: set[asyncio.Task[None]] = set()
    accepting = asyncio.ensure_future(_accept(listener, pipeline, memory, patience, connections))
    try:
        yield
    finally:
        for task in (accepting, *connections):
            task.cancel()
        await asyncio.gather(accepting, *connections, return_exceptions=True)
        listener.close()
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    """A listening socket that only our user may open; one that a dead service left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            if path.is_socket():
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    _remove(path)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        raise StartupError("invalid_settings", f"local_socket: {path}: {error.strerror or error}") from None
    listener.listen(128)
    listener.setblocking(False)
    return listener


async def _accept(
    listener: socket.socket, pipeline: Pipeline, memory: int, patience: float, connections: set[asyncio.Task[None]]
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:  # no descriptor is free: those who wait are served when one is
            log.warning("a receiver could not be accepted: %s", error.strerror)
            await asyncio.sleep(ACCEPT_AGAIN)
            continue
        task = asyncio.ensure_future(_Receiver(connection, pipeline, patience).serve(memory))
        connections.add(task)
        task.add_done_callback(connections.discard)


class _Receiver:
    """One connection: its leases live no longer than it does."""

    def __init__(self, connection: socket.socket, pipeline: Pipeline, patience: float) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._patience = patience
        self._leases: dict[int, tuple[asyncio.Event, asyncio.Task[None]]] = {}  # generation -> done, who holds it

    async def serve(self, memory: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            local.greet(self._connection, memory)
            buffer = b""
            while data := await loop.sock_recv(self._connection, 65536):
                *lines, buffer = (buffer + data).split(b"\n")
                for text in lines:
                    await loop.sock_sendall(self._connection, local.line(await self._answer(text)))
                if len(buffer) > local.MAX_LINE:
                    return
        except OSError:
            pass  # it went away; what it held is given back below
        finally:
            holders = [task for _, task in self._leases.values()]
            for task in holders:
                task.cancel()
            await asyncio.gather(*holders, return_exceptions=True)
            self._connection.close()

    async def _answer(self, text: bytes) -> dict[str, Any]:
        try:
            message = local.parse(text)
            if isinstance(message.get("pull"), str):
                return await self._pull(message["pull"])
            if isinstance(message.get("done"), int):
                return await self._done(message["done"])
            if isinstance(message.get("left"), int):
                return await self._left(message["left"])
            raise BadRequestError("invalid_request", "A message is a pull of a req_id, or a generation done or left")
        except TectumError as error:
            return {"problem": error.to_problem()}

    async def _pull(self, req_id: str) -> dict[str, Any]:
        done = asyncio.Event()
        granted: asyncio.Future[Staged] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._hold(req_id, granted, done))
        # the hold ends before it granted anything, or it grants: whichever comes first
        waiting: list[asyncio.Future[Any]] = [task, granted]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not granted.done():
            await task  # raises why there is none
        staged = granted.result()
        if staged.lease.generation in self._leases:
            task.cancel()
            await asyncio.wait([task])
            raise BadRequestError("invalid_request", "This connection holds these rows already")
        self._leases[staged.lease.generation] = (done, task)
        return local.grant(staged.metadata, staged.lease)

    async def _hold(self, req_id: str, granted: asyncio.Future[Staged], done: asyncio.Event) -> None:
        """A pull that lasts until the receiver is done; it is not confirmed when that takes too long."""
        async with self._pipeline.pull(req_id) as job:
            assert job.staged is not None, "only staged rows are pulled"
            granted.set_result(job.staged)
            async with asyncio.timeout(self._patience):
                await done.wait()

    async def _left(self, generation: int) -> dict[str, Any]:
        """The receiver gave this lease up: it ends unconfirmed."""
        if generation in self._leases:
            _, task = self._leases.pop(generation)
            task.cancel()
            await asyncio.wait([task])
        return {"left": generation}

    async def _done(self, generation: int) -> dict[str, Any]:
        done, task = self._leases.pop(generation, (None, None))
        if done is not None and task is not None:
            done.set()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                return {"done": generation}
        text = "This lease ended before its receiver was done: what was read may be others' by now"
        raise LifecycleError("request_released", text)
