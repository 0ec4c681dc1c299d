"""One encoder as the service sees it, whatever carries the words: told to start, spoken to, and noticed when it ends.

What both kinds of line share (`process.py`: a process of this machine; `remote.py`: one on any machine). A line decides
nothing: what its end means is `pool.py`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, cast

from tectum.delivery.staging import StagingPool
from tectum.errors import StartupError, TectumError
from tectum.workers import messages
from tectum.workers.messages import Failed, FromEncoder, Loading, Message, Ready, Start

log = logging.getLogger("tectum.workers")

#: called with what is being loaded, and the fraction done
Tell = Callable[[str, float], None]


class EncoderLine:
    """A connection to one encoder, from its start to the end of `gone`.

    gone: done once the encoder is out of reach, by whatever cause; from then on nobody writes to staging memory for it.
    garbage: messages that were dropped because they do not decode, or were not asked for.
    pid: of its process. node: the machine it runs on, where that is not this one. card: its model's, once ready.
    how: it ended, in words for the log, where that is known. crashed: by a fault in what it executed, not by somebody's hand.
    """

    pid = 0
    node = ""

    def __init__(self) -> None:
        self.garbage = 0
        self.card: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.how = "unexpectedly"
        self.crashed = False
        self.ended = False  # though what it said last may still be on its way
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._tell: Tell = _silent
        self._on_message: Callable[[FromEncoder], None] = _ignore
        self._transport: asyncio.WriteTransport | None = None

    async def begin(self, start: Start, on_message: Callable[[FromEncoder], None], tell: Tell) -> None:
        """Have the encoder loaded and warm. Raises StartupError as loading does; what comes afterwards is `on_message`'s."""
        self._tell, self._on_message = tell, on_message
        self.send(start)
        self.card = await self._ready

    def send(self, message: Message) -> None:
        """Send a message; to an encoder that is gone it is dropped."""
        if not self.ended and self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.frame(message))

    def kill(self) -> None:
        """End the encoder at once, whatever it does (also where it is stopped)."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the encoder for good; afterwards it is gone."""
        raise NotImplementedError

    # --- what the encoder says ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are none by their class

    def _drop(self, why: str) -> None:
        self.garbage += 1
        log.warning("dropped a message of encoder process %d that %s", self.pid, why)

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
            self._ready.exception()  # retrieved, should nobody await it any more


class Launcher(Protocol):
    """Where encoders come from: processes of this machine, or a cluster's.

    most: how many lanes there are. least: how many of them are always kept up.
    """

    most: int
    least: int

    async def open(self, pool: StagingPool) -> None:
        """Get ready to launch encoders that write into `pool`. Raises StartupError."""

    async def launch(self, lane: int, on_message: Callable[[FromEncoder], None], tell: Tell) -> EncoderLine:
        """The next encoder of a lane, loaded and warm. Raises StartupError; then, and when cancelled, none is left."""

    async def close(self) -> None:
        """End what `open` began; the lines are stopped already. Idempotent."""


def _silent(what: str, fraction: float) -> None: ...


def _ignore(message: FromEncoder) -> None: ...
