"""Pools of encoders for the tests: local processes, processes that connect over TCP, and actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from tectum.config import Settings
from tectum.pipeline.stages import Stages
from tectum.types import EncodeRequest, MediaItem, Modality
from tectum.workers.line import EncoderLine, Launcher
from tectum.workers.pool import WorkerPool
from tectum.workers.remote import RemoteLauncher
from tests import zoo

FLAGS: dict[str, Any] = {"forward_threads": 1, "log_level": "warning"}
PROGRAM = """
import sys
from tectum.workers import afar
host, port, secret, lane = sys.stdin.readline().split()
afar.work(host, int(port), bytes.fromhex(secret), int(lane))
"""


class Dialling(RemoteLauncher):
    """The TCP line without Ray: this process starts the encoders itself."""

    def encoder(self, lane: int) -> DiallingProcess:
        return DiallingProcess(self, lane)


class DiallingProcess:
    """See `RemoteEncoder`."""

    def __init__(self, launcher: Dialling, lane: int) -> None:
        self._launcher = launcher
        self._lane = lane
        self._process: subprocess.Popen[bytes] | None = None

    async def place(self) -> str:
        if self._process is None or self._process.poll() is not None:
            host, port = self._launcher.listener.address
            told = f"{host} {port} {self._launcher.listener.secret.hex()} {self._lane}\n"
            self._process = subprocess.Popen(  # noqa: ASYNC220 (a fork takes a millisecond)
                [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE
            )
            assert self._process.stdin is not None
            self._process.stdin.write(told.encode())
            self._process.stdin.flush()
        return "here"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def retire(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait, 10)


class House:
    """Stages on a running pool, on an event loop that stands still between two `run`s."""

    def __init__(self, runner: asyncio.Runner, pool: WorkerPool, stages: Stages) -> None:
        self._runner = runner
        self.pool = pool
        self.stages = stages
        self.lost: list[int] = []
        stages.watch_lanes(self.lost.append)

    def run(self, test: Awaitable[Any]) -> Any:
        return self._runner.run(test)

    def line(self, lane: int) -> EncoderLine:
        found = self.pool._lanes[lane].process
        assert found is not None, "this lane is down"
        return found

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Poll: what is waited for happens in other processes, which this one hears of at its own time."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def all_up(self) -> None:
        await self.until(lambda: self.pool.up == self.pool.lanes)


@contextmanager
def house(model: str, launcher: Callable[[str, Settings], Launcher] | None = None, **settings: Any) -> Iterator[House]:
    """A pool with the encoder of `model`; afterwards nothing may be staged, and no encoder is left."""
    given = Settings.load(**FLAGS, **settings)

    async def build() -> Stages:
        pool = WorkerPool(model, given, launcher=launcher and launcher(model, given))
        return await Stages(pool, given).__aenter__()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stages = runner.run(build())
        pool = stages.encoders
        assert isinstance(pool, WorkerPool)
        try:
            yield House(runner, pool, stages)
            assert (stages.pool.leases, stages.pool.leased_bytes) == (0, 0)
        finally:
            pids = [each["pid"] for each in pool.describe() if each["pid"]]
            runner.run(stages.__aexit__(None, None, None))
            runner.run(_ended(pids))


async def _ended(pids: list[int]) -> None:
    async with asyncio.timeout(20):
        while any(still_runs(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def still_runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"  # a zombie is its parent's to collect


def picture(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    zoo.picture(width, height, seed).save(file, "PNG")
    return file.getvalue()


def request(req_id: str, *pictures: bytes) -> EncodeRequest:
    return EncodeRequest(req_id, tuple(MediaItem(Modality.IMAGE, data=data) for data in pictures))


def requests(number: int) -> list[EncodeRequest]:
    """So many small requests of different content, and each of as many patches."""
    return [request(f"r{seed}", picture(96, 96, seed)) for seed in range(number)]
