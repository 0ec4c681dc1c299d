"""Encoder processes on this machine: started, spoken to over a Unix socket, and noticed when they end.

Owns the socket and the process id. Rows never pass here: the process maps the staging memory and writes them there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from tectum.config import MIB, Settings
from tectum.delivery.staging import StagingPool
from tectum.errors import StartupError
from tectum.workers import messages
from tectum.workers.line import EncoderLine, Tell
from tectum.workers.messages import FromEncoder, Start

log = logging.getLogger("tectum.workers")

#: glibc's allocator is to keep what it has: an encoder frees and takes blocks of the same sizes all the time, and what goes
#: back to the system each time has to be faulted in again each time
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(512 * MIB), "MALLOC_MMAP_THRESHOLD_": str(512 * MIB)}
#: signals by which a process ends over what it executed
FAULTS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
#: seconds that what a process said last may take to be read
LAST_WORDS = 1.0


class LocalProcesses:
    """`Launcher` of `settings.workers` processes."""

    def __init__(self, model: str, settings: Settings) -> None:
        self.most = self.least = settings.lanes
        self._model = model
        self._settings = settings.model_dump(mode="json", exclude_unset=True)
        self._pool: StagingPool | None = None

    async def open(self, pool: StagingPool) -> None:
        self._pool = pool

    async def launch(self, lane: int, on_message: Callable[[FromEncoder], None], tell: Tell) -> WorkerProcess:
        assert self._pool is not None, "opened before it launches"
        process = WorkerProcess()
        try:
            await process.spawn(self._pool.fd)
            await process.begin(Start(self._model, lane, self._settings), on_message, tell)
        except BaseException:
            await process.stop()
            raise
        return process

    async def close(self) -> None:
        self._pool = None


class WorkerProcess(EncoderLine, asyncio.Protocol):
    """An encoder process of this machine; it is `gone` when the process has ended and what it said last was read."""

    def __init__(self) -> None:
        super().__init__()
        self._frames = messages.Frames()

    async def spawn(self, staging_fd: int) -> None:
        """Start the process and connect to it."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._spawn(there, staging_fd)
            await self._loop.create_unix_connection(lambda: self, sock=here)
        except BaseException:
            here.close()
            raise

    def _spawn(self, there: socket.socket, staging_fd: int) -> None:
        with there:
            command = [sys.executable, "-m", "tectum.workers.worker", str(there.fileno()), str(staging_fd)]
            # not asyncio's subprocess: starting one takes a millisecond, and the pidfd below tells of its end
            self._process = subprocess.Popen(
                command,
                pass_fds=(there.fileno(), staging_fd),
                stdin=subprocess.DEVNULL,
                env={**KEEP_MEMORY, **os.environ},
            )
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # unwatched it must not live
            self._process.kill()
            self._process.wait()
            raise
        self.pid = self._process.pid
        self._loop.add_reader(self._pidfd, self._on_exit)

    def kill(self) -> None:
        if not self.ended:  # else its number may be another's by now
            os.kill(self.pid, signal.SIGKILL)

    async def stop(self, patience: float = 5.0) -> None:
        """Close the line, upon which the process ends; kill it when it does not."""
        if not self.pid:  # it never came to be
            return
        if self._transport is not None:
            self._transport.close()
        try:
            async with asyncio.timeout(patience):
                await asyncio.shield(self.gone)
        except TimeoutError:
            self.kill()
            await self.gone

    # --- asyncio's side ---

    def data_received(self, data: bytes) -> None:
        try:
            bodies = self._frames.feed(data)
        except ValueError:
            log.error("encoder process %d speaks another language; it is replaced", self.pid)
            self.kill()
            return
        for body in bodies:
            try:
                message = messages.decode_from_encoder(body)
            except ValueError:
                self._drop("does not decode")
                continue
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.ended:
            self._finish()
        else:
            self.kill()  # a process that does not listen any more must not write either

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self.how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self.crashed = -code in FAULTS
        self.ended = True
        if self._transport is None:
            self._finish()
        else:  # it ends once all was read, unless a child that lives on holds its other end
            self._loop.call_later(LAST_WORDS, self._finish)

    def _finish(self) -> None:
        if self.gone.done():
            return
        text = f"The encoder process ended {self.how} while starting; its log has more"
        self._answer_start(error=StartupError("invalid_checkpoint", text))
        self.gone.set_result(None)
        if self._transport is not None:
            self._transport.close()
