"""Running blocking work in threads, so that cancelling the waiting coroutine loses nothing (R13).

Owns no thread: executors are handed in. Nothing here knows of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_end(executor: Executor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in `executor` and await its result.

    When the coroutine is cancelled before the function started, it never starts. When it is running, the coroutine
    stays until it has ended, and is cancelled only then: whoever frees memory afterwards knows that no thread uses it.
    """
    work = executor.submit(function, *args, **kwargs)
    waiting = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not work.cancel():
            await outlast(waiting)
        raise


async def outlast(future: asyncio.Future[T]) -> None:
    """Wait until `future` is done, however often the waiting is cancelled; its result is dropped."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    looked_at(future)


def looked_at(future: asyncio.Future[Any]) -> None:
    """`future` is done, and nobody may be left to await it: so asyncio need not report its exception as lost."""
    if not future.cancelled():
        future.exception()
