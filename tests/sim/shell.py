"""Shell level: the real `Pipeline` on a virtual clock, with work that suspends, fails and is cancelled anywhere.

Actors (callers, pullers, receivers, waiters, releasers) run as tasks; any of them may be cancelled at any suspension
point. The same checkers watch every event that the shell gives to the ledger, and the fake memory below notices whoever
reads rows that are not there any more, or another request's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tectum.errors import BadRequestError, DeliveryError, InternalError, TectumError, UnavailableError
from tectum.lifecycle import events as E
from tectum.lifecycle.ledger import Ledger, Limits
from tectum.pipeline.batcher import Batcher
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.work import PreparedPart, Staged
from tectum.types import Destination, EncodeRequest, ItemMetadata, MediaItem, Modality, RequestMetadata
from tests.sim.checkers import Checker, ViolationError, all_checkers
from tests.sim.program import MILESTONE
from tests.sim.pure import LIMITS, Result
from tests.sim.virtual_loop import run
from tests.sim.world import World

IDS = 5


@dataclass
class Buffer:
    """Rows of one request; scribbled over when they are given back."""

    content: bytes | None
    readers: int = 0


@dataclass
class FakeWork:
    """Stages whose length, failure and drain are random by seed. Memory is real enough to be misused."""

    rng: random.Random
    lanes: int = 1
    depth: int = 1
    held: set[int] = field(default_factory=set)
    forwards: list[str] = field(default_factory=list)
    deaths: list[int] = field(default_factory=lambda: [0, 0, 0])  # of each lane's encoder
    on_lost: Any = None

    def watch_lanes(self, on_lost: Any) -> None:
        self.on_lost = on_lost

    def die(self, lane: int) -> None:
        """The encoder of a lane dies; what runs there notices at its next step, what is prepared there is gone."""
        self.deaths[lane] += 1
        self.on_lost(lane)

    def forget(self, part: PreparedPart) -> None:
        pass

    def _still(self, lane: int, deaths: int) -> None:
        if self.deaths[lane] != deaths:
            raise UnavailableError("worker_lost", "planted")

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        lane = self.rng.randrange(self.lanes)
        deaths = self.deaths[lane]
        await self._work(3.0)
        self._still(lane, deaths)
        self._maybe_fail(0.08, BadRequestError("media_decode_failed", "planted", item=0))
        rows = 1 + self.rng.randrange(8)
        item = ItemMetadata(Modality.IMAGE, rows, (1, 2, 2 * rows), 4 * rows)
        metadata = RequestMetadata(request.req_id, 1, 0, (item,), 4, 0, "float32")
        return PreparedPart(metadata, request.items[0].data, lane)

    async def encode(self, batch: Sequence[PreparedPart]) -> list[Staged | TectumError]:
        self.forwards += [part.metadata.req_id for part in batch]
        (lane,) = {part.lane for part in batch}
        deaths = self.deaths[lane]
        await self._work(4.0)
        self._still(lane, deaths)
        self._maybe_fail(0.08, InternalError("encode_failed", "planted"))
        results: list[Staged | TectumError] = []
        for part in batch:
            if self.rng.random() < 0.08:
                results.append(InternalError("row_mismatch", "planted"))
                continue
            buffer = Buffer(part.ticket)
            self.held.add(id(buffer))
            results.append(Staged(part.metadata, buffer))
        return results

    async def send(self, staged: Staged, destination: Destination) -> None:
        await self.read(staged.lease, staged.lease.content, 40.0 if self.rng.random() < 0.1 else 4.0)
        self._maybe_fail(0.15, DeliveryError("send_failed", "planted"))

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        await asyncio.sleep(self.rng.random())
        self._maybe_fail(0.2, DeliveryError("send_failed", "the report failed too"))

    def free(self, staged: Staged) -> None:
        buffer: Buffer = staged.lease
        if buffer.readers or id(buffer) not in self.held:
            raise ViolationError("R1", "rows were given back while read, or twice")
        self.held.discard(id(buffer))
        buffer.content = None

    async def read(self, buffer: Buffer, expected: bytes | None, seconds: float) -> None:
        """Read rows over some time; what is cancelled still reads for a while (a transfer that must drain)."""
        buffer.readers += 1
        try:
            await self._work(seconds)
        finally:
            buffer.readers -= 1
            if buffer.content != expected or expected is None:
                raise ViolationError("R1", "a reader found rows that are gone, or another request's")

    async def _work(self, seconds: float) -> None:
        """Some time; under cancellation it goes on to its end first, as a thread does (R13)."""
        end = asyncio.get_running_loop().time() + self.rng.random() * seconds
        cancelled: asyncio.CancelledError | None = None
        while (left := end - asyncio.get_running_loop().time()) > 1e-9:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError as error:
                cancelled = error
                end = min(end, asyncio.get_running_loop().time() + self.rng.random())
        if cancelled is not None:
            raise cancelled

    def _maybe_fail(self, chance: float, error: Exception) -> None:
        if self.rng.random() < chance:
            raise error if self.rng.random() < 0.7 else RuntimeError("planted")


class Watcher:
    """Feeds what the shell tells the ledger to the pure level's world and checkers."""

    def __init__(self, ledger: Ledger, checkers: list[Checker]) -> None:
        self.world = World(ledger.limits, checkers)
        self.world.ledger = _Inner(ledger)
        ledger.handle = self.handle  # type: ignore[method-assign]

    def handle(self, event: Any, now: float) -> list[Any]:
        world = self.world
        world.now = now
        waiter = getattr(event, "waiter", None)
        if isinstance(event, (E.Accept, E.Wait, E.Register)):
            self._introduce(event)
        elif isinstance(event, E.WaitCancelled) and waiter in world.waiters:
            world.waiters[waiter].gone = True
            for address in world.waiters[waiter].addresses:  # who hangs up while its registration is held withdraws it
                world.receivers[(world.waiters[waiter].req_id, address)].append("withdrawn")
        step = world.apply(event)
        refusal = step.first(E.Refuse)
        if refusal is not None and waiter in world.waiters and not isinstance(event, E.CallerLeft):
            world.waiters[waiter].answers.append(refusal)
            for address in world.waiters[waiter].addresses:
                world.receivers[(event.req_id, address)].append("refused")
        return step.effects

    def _introduce(self, event: Any) -> None:
        from tests.sim.world import Waiter

        kind = {E.Accept: "caller", E.Wait: "wait", E.Register: "register"}[type(event)]
        waiter = Waiter(event.waiter, kind, event.req_id, milestone=_milestone(event))
        waiter.delivery = getattr(event, "delivery", None)
        if not isinstance(event, E.Accept):
            live = self.world.by_id.get(event.req_id)
            waiter.life = None if live is None else live.life
        if isinstance(event, E.Register):
            waiter.addresses, waiter.expected = event.addresses, event.expected
            for address in event.addresses:
                self.world.receivers.setdefault((event.req_id, address), [])
        self.world.waiters[event.waiter] = waiter


def _milestone(event: Any) -> E.Milestone | None:
    """What a waiter waits for; of a caller it follows from how it wants its rows."""
    return MILESTONE[event.delivery] if isinstance(event, E.Accept) else getattr(event, "milestone", None)


class _Inner:
    """The ledger as the world calls it, under the watcher's hook."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.handle = ledger.handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def __len__(self) -> int:
        return len(self._ledger)


class Actors:
    """What the outside does to the pipeline."""

    def __init__(self, pipeline: Pipeline, work: FakeWork, rng: random.Random) -> None:
        self.pipeline, self.work, self.rng = pipeline, work, rng

    def request(self, delivery: Any) -> EncodeRequest:
        number = self.rng.randrange(IDS)
        content = b"picture %d%s" % (number, b" other" if self.rng.random() < 0.15 else b"")
        deadline = 1000 * self.rng.randrange(1, 20) if self.rng.random() < 0.2 else None
        item = MediaItem(Modality.IMAGE, data=content)
        return EncodeRequest(f"r{number}", (item,), deadline_ms=deadline, delivery=delivery)

    async def inline(self) -> None:
        request = self.request("inline")
        async with self.pipeline.execute_encode_pipeline(request) as job:
            assert job.staged is not None
            await self.work.read(job.staged.lease, request.items[0].data, 3.0)

    async def hold_and_pull(self) -> None:
        request = self.request("hold")
        async with self.pipeline.hold(request):
            await asyncio.sleep(self.rng.random())
        await asyncio.sleep(self.rng.random() * 30)
        async with self.pipeline.pull(request.req_id) as job:
            assert job.staged is not None
            await self.work.read(job.staged.lease, job.staged.lease.content, 3.0)

    async def push(self) -> None:
        """A call whose rows go to receivers that register before, at the same time, or not at all."""
        request = self.request("push")
        await self.pipeline.deliver(request)

    async def pull(self) -> None:
        async with self.pipeline.pull(f"r{self.rng.randrange(IDS)}") as job:
            assert job.staged is not None
            await self.work.read(job.staged.lease, job.staged.lease.content, 3.0)

    async def wait(self) -> None:
        milestone = self.rng.choice(list(E.Milestone))
        await self.pipeline.wait(f"r{self.rng.randrange(IDS)}", milestone, self.rng.random() * 20)

    async def register(self) -> None:
        addresses = [Destination(f"tcp://{self.rng.randrange(3)}", "fake") for _ in range(1 + self.rng.randrange(2))]
        await self.pipeline.register_destinations(f"r{self.rng.randrange(IDS)}", addresses, self.rng.randrange(3))

    async def release(self) -> None:
        self.pipeline.release_request(f"r{self.rng.randrange(IDS)}")

    async def one(self, delay: float) -> None:
        """One actor, after some time; an error that Tectum reports is an outcome, anything else is a defect."""
        await asyncio.sleep(delay)
        weights = {
            self.inline: 8,
            self.hold_and_pull: 5,
            self.push: 3,
            self.pull: 2,
            self.wait: 4,
            self.register: 4,
            self.release: 2,
        }
        act = self.rng.choices(list(weights), list(weights.values()))[0]
        try:
            await act()
        except TectumError:
            pass


async def _scenario(seed: int, checkers: list[Checker], trace: list[Any]) -> World:
    rng = random.Random(seed)
    work = FakeWork(random.Random(seed + 1), lanes=1 + seed % 3, depth=1 + seed % 2)
    fuse = rng.random() < 0.5
    batchers = [Batcher(fuse=fuse, batch_patches=64) for _ in range(work.lanes)]
    limits = Limits(**{**LIMITS, "max_live_requests": 5, "max_staged_bytes": 200, "max_queued_patches": 60})  # type: ignore[arg-type]
    pipeline = Pipeline(work, limits, batchers, send_timeout=10.0)
    watcher = Watcher(pipeline.ledger, checkers)
    watcher.world.trace = trace
    await pipeline.start()
    actors = Actors(pipeline, work, rng)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(actors.one(rng.random() * 60)) for _ in range(rng.randrange(4, 24))]
    for lane in range(work.lanes):
        if rng.random() < 0.4:
            loop.call_later(rng.random() * 60, work.die, lane)
    for task in tasks:
        if rng.random() < 0.3:
            loop.call_later(rng.random() * 70, task.cancel)
    if rng.random() < 0.5:
        await asyncio.wait(tasks)
    else:
        await asyncio.sleep(rng.random() * 60)
    await pipeline.drain(rng.random() * 40)
    while len(pipeline.ledger):  # noqa: ASYNC110 - a drain that ran out of time leaves a stage that cannot be stopped: let it end
        await asyncio.sleep(1)
    await pipeline.drain(10)
    await asyncio.wait(tasks)
    _defects(tasks)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left or work.held:
        raise ViolationError("R16", f"{len(left)} tasks and {len(work.held)} buffers are left")
    return watcher.world


def _defects(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()  # type: ignore[misc]


def run_seed(seed: int) -> Result:
    """One scenario. A stuck loop (somebody waits for ever) is a violation of R12."""
    logging.disable(logging.CRITICAL)
    checkers, result = all_checkers(), Result()
    trace: list[tuple[float, Any, list[Any]]] = []
    try:
        world = run(_scenario(seed, checkers, trace), seed)
        for checker in checkers:
            checker.at_end(world)
        result.steps = world.steps
    except ViolationError as violation:
        result.failure, result.rule = str(violation), violation.rule
    except Exception as error:
        result.failure, result.rule = f"{type(error).__name__}: {error}", "crash"
    finally:
        logging.disable(logging.NOTSET)
    for checker in checkers:
        result.coverage[checker.rule] += checker.count
    result.trace = [f"{now:8.2f}  {event} -> {effects}\n" for now, event, effects in trace]
    return result
