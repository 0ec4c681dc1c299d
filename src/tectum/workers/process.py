"""One encoder process as the service sees it: started, spoken to, and noticed when it ends.

Owns the socket and the process id. It decides nothing: what its end means is `pool.py`'s to say.
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
from typing import Any, cast

from tectum.config import Settings
from tectum.errors import StartupError, TectumError
from tectum.workers import messages
from tectum.workers.messages import Failed, FromEncoder, Loading, Message, Ready, Start

log = logging.getLogger("tectum.workers")


class WorkerProcess(asyncio.Protocol):
    """An encoder process, from `launch` to the end of `gone`.

    gone: done once the process has ended, by whatever cause; from then on nobody writes to staging memory for it.
    garbage: messages that were dropped because they do not decode.
    """

    def __init__(self, lane: int, on_message: Callable[[FromEncoder], None]) -> None:
        self.lane = lane
        self.garbage = 0
        self._on_message = on_message
        self._frames = messages.Frames()
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._tell: Callable[[str, float], None] = _nothing
        self._transport: asyncio.WriteTransport | None = None

    async def launch(
        self, model: str, settings: Settings, staging_fd: int, tell: Callable[[str, float], None]
    ) -> dict[str, Any]:
        """Start the process and wait until its encoder is loaded and warm; returns its model card.

        tell: called with what is being loaded and the fraction done. Raises StartupError as loading does.
        """
        self._tell = tell
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            command = [sys.executable, "-m", "tectum.workers.worker", str(there.fileno()), str(staging_fd)]
            # a fork takes a millisecond, and its end is watched through a descriptor of its own: asyncio's way adds nothing
            self._process = subprocess.Popen(  # noqa: ASYNC220
                command, pass_fds=(there.fileno(), staging_fd), stdin=subprocess.DEVNULL
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        await self._loop.create_unix_connection(lambda: self, sock=here)
        self.send(Start(model, self.lane, settings.model_dump(mode="json")))
        try:
            return await self._ready
        except BaseException:
            await self.stop()
            raise

    def send(self, message: Message) -> None:
        """Send a message; to a process that is gone it is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.frame(message))

    def kill(self) -> None:
        """End the process at once, whatever it does (also where it is stopped)."""
        if not self.gone.done():
            os.kill(self.pid, signal.SIGKILL)

    async def stop(self, patience: float = 5.0) -> None:
        """Close the line, upon which the process ends; kill it when it does not."""
        if self._transport is not None:
            self._transport.close()
        try:
            async with asyncio.timeout(patience):
                await asyncio.shield(self.gone)
        except TimeoutError:
            self.kill()
            await self.gone

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are none by their class

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
                self.garbage += 1
                log.warning("dropped a message of encoder process %d that does not decode", self.pid)
                continue
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.kill()  # a process that does not listen any more must not write either

    def _take(self, message: FromEncoder) -> None:
        if isinstance(message, Loading):
            self._tell(message.what, message.fraction)
        elif isinstance(message, Ready):
            self._answer_start(card=message.card)
        elif isinstance(message, Failed) and not self._ready.done():
            self._answer_start(error=messages.error_of(message.problem))
        else:
            self._on_message(message)

    def _answer_start(self, card: dict[str, Any] | None = None, error: TectumError | None = None) -> None:
        if self._ready.done():
            return
        if card is not None:
            self._ready.set_result(card)
        else:
            self._ready.set_exception(error or StartupError("invalid_checkpoint", "The encoder process did not start"))

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        if not self._ready.done():
            text = f"The encoder process ended with code {code} while starting; its log has more"
            self._answer_start(error=StartupError("invalid_checkpoint", text))
        self.gone.set_result(None)
        if self._transport is not None:
            self._transport.close()


def _nothing(what: str, fraction: float) -> None: ...
