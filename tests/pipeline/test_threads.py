"""R13 for real threads: whoever is cancelled stays until its thread has ended."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tectum.pipeline.threads import run_to_end


def test_a_cancelled_wait_outlasts_the_running_function_and_never_starts_a_queued_one():
    async def main():
        started, finish, ran = threading.Event(), threading.Event(), []

        def slow():
            started.set()
            finish.wait(10)
            ran.append("slow")

        with ThreadPoolExecutor(1) as executor:
            running = asyncio.create_task(run_to_end(executor, slow))
            await asyncio.to_thread(started.wait, 10)
            queued = asyncio.create_task(run_to_end(executor, ran.append, "queued"))
            await asyncio.sleep(0)
            running.cancel()
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            assert not running.done(), "the function still runs"
            running.cancel()  # asking twice changes nothing
            finish.set()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert ran == ["slow"]

    asyncio.run(main())
