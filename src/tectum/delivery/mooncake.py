"""Delivery by Mooncake: a write into memory that the receiver registered, then a completion message over ZeroMQ.

Owns the transfer engine and the memory that it reads. A write that was given up may still be read from long after the
engine has reported it as failed: so the engine never reads staging memory, but a registered copy of the rows, made once a
request and shared by its receivers. A copy whose write failed or ran out of time is kept untouched for `QUARANTINE`
seconds; the rows themselves are free as soon as the send has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np

from tectum.config import Settings
from tectum.delivery.base import MooncakeDestination, StagedRows, woven
from tectum.delivery.zmq import ZmqBackend
from tectum.errors import DeliveryError, StartupError, TectumError
from tectum.types import Destination

log = logging.getLogger("tectum.delivery")

#: seconds that memory is kept whose write did not end well: longer than the engine's own patience of a minute
QUARANTINE = 120.0
T = TypeVar("T")


class _Copy:
    """The rows of one request in registered memory, for as many sends as use it at once."""

    def __init__(self, rows: memoryview) -> None:
        self.rows = rows
        self.address = int(np.frombuffer(rows, np.uint8).ctypes.data)
        self.users = 0
        self.suspect = False  # a write out of it did not end well


class MooncakeBackend:
    """Writes to any number of receivers at once, each in a thread of its own; completion and errors go by `messages`."""

    def __init__(self, settings: Settings, messages: ZmqBackend) -> None:
        self._messages = messages
        self._host = settings.mooncake_host or settings.host.strip("[]")
        self._protocol, self._device = settings.mooncake_protocol, settings.mooncake_device
        self._most_threads = settings.max_receivers
        self._most_quarantined = settings.max_staged_bytes
        self._threads = 0
        self._met: set[str] = set()  # sessions whose engine has answered
        self._copies: dict[int, _Copy] = {}  # by the identity of the lease, which lives as long as its sends
        self._quarantined: list[_Copy] = []
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(math.ceil(settings.send_timeout)))

    async def send(self, staged: StagedRows, destination: Destination) -> None:
        assert isinstance(destination, MooncakeDestination), "the door makes these for this backend"
        copy = self._copies.get(id(staged.lease))
        if copy is None:
            copy = await self._copy(staged)
        copy.users += 1
        try:
            await self._write(copy, destination)
        finally:
            copy.users -= 1
            if not copy.users:
                self._copies.pop(id(staged.lease), None)
                self._retire(copy)
        await self._messages.complete(staged, destination)

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        await self._messages.notify(req_id, destination, error)

    async def _copy(self, staged: StagedRows) -> _Copy:
        """The registered copy that all sends of this request share.

        Raises DeliveryError when it cannot be registered, or too much memory is in quarantine.
        """
        waiting = sum(copy.rows.nbytes for copy in self._quarantined)
        if waiting + staged.metadata.nbytes > self._most_quarantined:
            raise DeliveryError(
                "send_failed", f"{waiting} bytes of failed transfers are in quarantine; try again later"
            )
        copy = _Copy(await woven(staged))
        registering = _in_thread(lambda: self._engine.register_memory(copy.address, copy.rows.nbytes))
        try:
            code = await asyncio.shield(registering)
        except BaseException:
            registering.add_done_callback(lambda done: self._unregister(copy))  # it ends all the same
            raise
        if code != 0:
            raise DeliveryError("send_failed", f"Mooncake could not register the rows' memory (code {code})")
        shared = self._copies.setdefault(id(staged.lease), copy)
        if shared is not copy:  # another send of the same request was quicker
            self._unregister(copy)
        return shared

    async def _write(self, copy: _Copy, destination: MooncakeDestination) -> None:
        """One write off the event loop. Given up, it leaves the copy suspect, and its thread to the engine's patience."""
        session, there = destination.session_id, destination.buffer_address
        if session not in self._met:
            await self._meet(session, there)
        writing = self._apart(lambda: self._engine.transfer_sync_write(session, copy.address, there, copy.rows.nbytes))
        code = None
        try:
            code = await asyncio.shield(writing)
        finally:
            if code != 0:
                copy.suspect = True
                self._met.discard(session)
        if code != 0:
            text = f"Mooncake could not write to the receiver (code {code}): it is gone, or its buffer not registered"
            raise DeliveryError("send_failed", text)

    async def _meet(self, session: str, there: int) -> None:
        """Make sure that the receiver's engine answers.

        The engine holds all other transfers up while it first connects to a peer, for a minute where that one is silent.
        So an engine of its own makes the first contact: what a silent peer holds up is only that.
        """
        scouting = self._apart(lambda: _first_contact(self._initialized(), session, there))
        if not await asyncio.shield(scouting):
            text = "Mooncake does not reach the receiver's memory: it is gone, or its buffer not registered"
            raise DeliveryError("send_failed", text)
        self._met.add(session)

    def _initialized(self) -> Any:
        """A new engine. Raises StartupError `invalid_settings` when it does not start. Blocking."""
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        code = engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device)
        if code != 0:
            text = f"mooncake_protocol: the transfer engine does not start with {self._protocol} (code {code})"
            raise StartupError("invalid_settings", text)
        return engine

    def _apart(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """`call` in a thread of its own. Raises DeliveryError when too many run: those that hang end by themselves."""
        if self._threads >= self._most_threads:
            text = (
                f"Rows are on their way to {self._most_threads} receivers, the most allowed at once (--max-receivers)"
            )
            raise DeliveryError("send_failed", text)
        self._threads += 1
        running = _in_thread(call)
        running.add_done_callback(self._ended)
        return running

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._threads -= 1
        if not running.cancelled():
            running.exception()  # looked at: whoever waited may have left

    def _retire(self, copy: _Copy) -> None:
        """Nobody sends out of it any more: give it back, or, when a write may still read it, only after the quarantine."""
        if not copy.suspect:
            self._unregister(copy)
            return
        log.warning("%d bytes of a failed transfer are in quarantine for %g s", copy.rows.nbytes, QUARANTINE)
        self._quarantined.append(copy)
        asyncio.get_running_loop().call_later(QUARANTINE, self._end_quarantine, copy)

    def _end_quarantine(self, copy: _Copy) -> None:
        self._quarantined.remove(copy)
        self._unregister(copy)

    def _unregister(self, copy: _Copy) -> None:
        self._engine.unregister_memory(copy.address)

    async def __aenter__(self) -> Self:
        """Raises StartupError `invalid_settings` when the engine does not start."""
        log.warning("Mooncake's engine listens on every address and asks for no token: keep it in a trusted network")
        log.warning("Mooncake's messages carry no dtype: start SGLang with the --dtype of this encoder")
        self._engine: Any = await _in_thread(self._initialized)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._copies.clear()


def _first_contact(engine: Any, session: str, there: int) -> bool:
    """Whether the engine behind `session` lets one byte of its memory be read. (Few calls of the engine let go of the GIL:
    this is one.)"""
    here = np.zeros(1, np.uint8)
    address = int(here.ctypes.data)
    return engine.register_memory(address, 1) == 0 and engine.transfer_sync_read(session, address, there, 1) == 0


def _in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run `call` in a thread of its own, which neither a full pool delays nor the end of the process waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (call(), None)
        except BaseException as error:
            outcome = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="tectum-mooncake", daemon=True).start()
    return future
