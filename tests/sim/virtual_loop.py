"""An asyncio event loop on virtual time, deterministic by seed: what is ready runs in a shuffled order, waiting is free.

Time moves only when nothing is ready, straight to the next timer. A loop with nothing ready and no timer is stuck for
ever; that is a lost wake-up, and it raises.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(AssertionError):
    """Every task waits for something that will never happen."""


class _NoIO(selectors.BaseSelector):
    """A selector without files: waiting for input moves the clock instead."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, 0, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError("nothing is ready and no timer runs: somebody waits for ever")
        if timeout > 0:
            self.now += timeout
        return []

    def get_map(self) -> Any:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0. seed: fixes the order in which ready callbacks run; None keeps asyncio's own."""

    def __init__(self, seed: int | None = None) -> None:
        self._virtual = _NoIO()
        super().__init__(self._virtual)
        self._order = None if seed is None else random.Random(seed)

    def time(self) -> float:
        return self._virtual.now

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        if self._order is not None and len(ready) > 1:
            handles = list(ready)
            self._order.shuffle(handles)
            ready.clear()
            ready.extend(handles)
        super()._run_once()  # type: ignore[misc]


def run(coroutine: Coroutine[Any, Any, T], seed: int | None = None) -> T:
    """Run a coroutine to its end on a virtual loop of its own, and close the loop."""
    loop = VirtualLoop(seed)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
