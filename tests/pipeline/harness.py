"""The real pipeline with stages that the test opens one by one: no sleeps, every order on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tectum.errors import TectumError
from tectum.lifecycle.ledger import Limits
from tectum.pipeline.batcher import Batcher
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.work import PreparedPart, Staged
from tectum.types import Destination, EncodeRequest, ItemMetadata, MediaItem, Modality, RequestMetadata
from tests.sim.virtual_loop import run

ROWS = 4


class Gate:
    """Stops whoever passes until it is opened; `reached` says that somebody stands before it."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        self.outcome: Exception | None = None

    async def passing(self) -> None:
        """Waits, and under cancellation stays until the gate opens: as a thread does that cannot be stopped."""
        self.reached.set()
        cancelled: asyncio.CancelledError | None = None
        while not self.open.is_set():
            try:
                await self.open.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if self.outcome is not None:
            raise self.outcome


class GatedWork:
    """Stages of one step each, behind gates where the test put one; counts what it does and holds."""

    lanes = 1
    depth = 1

    def __init__(self) -> None:
        self.lose_lane: Callable[[int], None] = lambda lane: None
        self.forgotten: list[str] = []
        self.gates: dict[tuple[str, str], Gate] = {}
        self.prepared: list[str] = []
        self.forwards: list[list[str]] = []
        self.sent: list[str] = []
        self.notified: list[tuple[str, TectumError]] = []
        self.held: set[str] = set()
        self.member_errors: dict[str, TectumError] = {}

    def watch_lanes(self, on_lost: Callable[[int], None]) -> None:
        self.lose_lane = on_lost

    def forget(self, part: PreparedPart) -> None:
        self.forgotten.append(part.metadata.req_id)

    def gate(self, stage: str, name: str) -> Gate:
        """Put a gate before `stage` of request (or destination) `name`."""
        return self.gates.setdefault((stage, name), Gate())

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        self.prepared.append(request.req_id)
        await self._pass("prepare", request.req_id)
        item = ItemMetadata(Modality.IMAGE, ROWS, (1, 4, 4), 16)
        return PreparedPart(RequestMetadata(request.req_id, 1, 0, (item,), 8, 0, "float32"), request.items[0].data)

    async def encode(self, batch: Sequence[PreparedPart]) -> list[Staged | TectumError]:
        names = [part.metadata.req_id for part in batch]
        self.forwards.append(names)
        for name in names:
            await self._pass("encode", name)
        results: list[Staged | TectumError] = []
        for part in batch:
            name = part.metadata.req_id
            if name in self.member_errors:
                results.append(self.member_errors[name])
            else:
                self.held.add(name)
                results.append(Staged(part.metadata, part.ticket))
        return results

    async def send(self, staged: Staged, destination: Destination) -> None:
        await self._pass("send", destination.address)
        assert staged.metadata.req_id in self.held, "a send reads rows that are gone"
        self.sent.append(destination.address)

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        self.notified.append((destination.address, error))

    def free(self, staged: Staged) -> None:
        self.held.remove(staged.metadata.req_id)

    async def _pass(self, stage: str, name: str) -> None:
        gate = self.gates.get((stage, name))
        if gate is not None:
            await gate.passing()


def request(req_id: str = "r", picture: bytes = b"picture", **facts: Any) -> EncodeRequest:
    return EncodeRequest(req_id, (MediaItem(Modality.IMAGE, data=picture),), **facts)


def scenario(test: Callable[[Pipeline, GatedWork], Awaitable[None]], *, fuse: bool = False, **limits: Any) -> None:
    """Run a test on a virtual clock; afterwards nothing may be held, and no task may be left (R16)."""

    async def main() -> None:
        work = GatedWork()
        pipeline = Pipeline(work, Limits(**limits), [Batcher(fuse=fuse, batch_patches=1000)], send_timeout=30.0)
        await pipeline.start()
        await test(pipeline, work)
        await pipeline.drain(300)
        assert not work.held, "rows are still held"
        assert (len(pipeline.ledger), pipeline.ledger.staged_bytes) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"

    run(main())


async def inline(pipeline: Pipeline, encode: EncodeRequest) -> bytes:
    """Encode and read the rows at once; the fake rows are the request's own picture."""
    async with pipeline.execute_encode_pipeline(encode) as job:
        assert job.staged is not None
        return bytes(job.staged.lease)


async def hold(pipeline: Pipeline, encode: EncodeRequest) -> None:
    async with pipeline.hold(encode):
        pass


def start(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)
