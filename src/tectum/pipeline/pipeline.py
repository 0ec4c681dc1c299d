"""The walk of one request through the stages: the async shell around the lifecycle.

Owns tasks, futures and the timer; asks `tectum.lifecycle` what may happen and carries out what follows. It decides
nothing about a request's life itself. The work of the stages is handed in (`Work`; the real one is `stages.py`), and
time is the event loop's, so that a simulator can drive this very file on a virtual clock.

The walk: accept → (task) prepare → metadata published → batcher → (encode loop) forward → staged → sends → released.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from operator import methodcaller
from typing import Any

from tectum.errors import DeliveryError, InternalError, TectumError
from tectum.lifecycle.events import (
    Accept,
    Address,
    Admit,
    CallerLeft,
    Close,
    Delivery,
    Drained,
    Effect,
    Encoded,
    EncodeStarted,
    Ended,
    Failed,
    Free,
    GivenUp,
    InputsLost,
    LedgerEvent,
    Milestone,
    Notify,
    Prepared,
    PrepareStarted,
    Pull,
    Reason,
    Refuse,
    Register,
    Release,
    SendConfirmed,
    SendFailed,
    StartSend,
    TakeAnswer,
    Tick,
    Wait,
    WaitCancelled,
    Wake,
)
from tectum.lifecycle.ledger import Ledger, Limits, unknown
from tectum.lifecycle.machine import outcome_error
from tectum.pipeline.batcher import Batcher
from tectum.pipeline.fingerprint import fingerprint
from tectum.pipeline.threads import looked_at
from tectum.pipeline.work import Job, Observer, PreparedPart, Staged, Work
from tectum.types import Destination, EncodeRequest, RequestMetadata

log = logging.getLogger("tectum.pipeline")


class _Lane:
    """What waits for one encoder, and the loop that feeds it."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.work_waits = asyncio.Event()
        self.running: set[asyncio.Task[None]] = set()  # forwards under way
        self.loop: asyncio.Task[None] | None = None


class Pipeline:
    """Runs requests. One event loop owns it; every method is called there.

    `start()` first, `drain()` last.
    """

    def __init__(
        self,
        work: Work,
        limits: Limits,
        batchers: Sequence[Batcher],
        *,
        send_timeout: float = 30.0,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.ledger = Ledger(limits)
        self._work = work
        self._lanes = [_Lane(batcher) for batcher in batchers]
        self._send_timeout = send_timeout
        self._observers = observers
        self._jobs: dict[int, Job] = {}
        self._futures: dict[int, asyncio.Future[Any]] = {}  # waiter -> whoever awaits it
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()  # reports to receivers: a shutdown lets them out
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._drained = asyncio.Event()
        self._carry: dict[type, Callable[[Any], None]] = {
            Wake: self._on_wake,
            StartSend: self._on_start_send,
            Notify: self._on_notify,
            Ended: self._on_ended,
            Free: self._on_free,
            Drained: lambda effect: self._drained.set(),
        }

    # --- what doors call ---

    async def start(self) -> None:
        assert len(self._lanes) == self._work.lanes, "one batcher a lane"
        self._loop = asyncio.get_running_loop()
        self._work.watch_lanes(self._on_lane_lost)
        for lane in self._lanes:
            lane.loop = self._spawn(self._encode_forever(lane))

    @asynccontextmanager
    async def execute_encode_pipeline(self, request: EncodeRequest) -> AsyncIterator[Job]:
        """Encode `request` for a caller who reads the rows at once; inside the block `job.staged` may be read.

        The block is the delivery: when it ends well the caller has its rows; when it is left by an exception or a
        cancellation, the caller is gone. Raises MMError with the status of whatever went wrong.
        """
        life, waiter, _ = await self._call(request, Delivery.INLINE)
        job = self._jobs[self._ask(TakeAnswer(request.req_id, life, waiter))]
        started = time.perf_counter()
        try:
            yield job
        except BaseException as error:
            failure = _as_send_error(error)
            self._observe_sent(job, "inline", started, failure)
            self._handle(SendFailed(life, waiter, failure, final=False))
            self._handle(CallerLeft(life, waiter))
            raise
        self._observe_sent(job, "inline", started, None)
        self._handle(SendConfirmed(life, waiter))

    @asynccontextmanager
    async def hold(self, request: EncodeRequest) -> AsyncIterator[Job]:
        """Encode `request` and keep its rows for a later pull; inside the block the caller is answered."""
        life, waiter, _ = await self._call(request, Delivery.HOLD)
        job = self._jobs[self._ask(TakeAnswer(request.req_id, life, waiter))]
        try:
            yield job
        except BaseException:
            self._handle(CallerLeft(life, waiter))
            raise

    async def deliver(
        self, request: EncodeRequest, destinations: Sequence[Destination] = (), receive_count: int = 0
    ) -> RequestMetadata:
        """Encode `request` for the receivers that register for it; returns when every one of them has its rows.

        destinations: receivers that are known already. receive_count: how many there will be in all (0: not said).
        Raises MMError: what the encode failed with, or the error of a delivery that failed for good.
        """
        _, _, metadata = await self._call(request, Delivery.PUSH, tuple(destinations), receive_count)
        assert isinstance(metadata, RequestMetadata), "a delivered request was prepared"
        return metadata

    @asynccontextmanager
    async def pull(self, req_id: str) -> AsyncIterator[Job]:
        """Read held rows; inside the block `job.staged` may be read, and its good end confirms that they arrived.

        Raises LifecycleError: `request_not_found`, `embedding_not_ready`, `request_released` with its reason and age.
        """
        address = Destination(f"pull:{next(self._numbers)}")
        job = self._jobs[self._ask(Pull(req_id, address))]
        started = time.perf_counter()
        try:
            yield job
        except BaseException as error:
            failure = _as_send_error(error)
            self._observe_sent(job, "pull", started, failure)
            self._handle(SendFailed(job.life, address, failure, final=False))
            raise
        self._observe_sent(job, "pull", started, None)
        self._handle(SendConfirmed(job.life, address, Reason.PULLED))

    async def wait(self, req_id: str, milestone: Milestone, seconds: float) -> RequestMetadata:
        """Wait for `req_id` to reach `milestone`, at most `seconds`; answers at once when it did, or was released.

        Raises LifecycleError `metadata_timeout` (still working), `request_not_found`, or what the request ended with.
        """
        waiter, future = self._new_waiter()
        self._handle(Wait(req_id, waiter, milestone, self._loop.time() + seconds))
        try:
            metadata: RequestMetadata = await future
            return metadata
        finally:
            self._forget(waiter, WaitCancelled(waiter))

    async def register_destinations(
        self, req_id: str, destinations: Sequence[Destination], receive_count: int = 0
    ) -> None:
        """Have the rows pushed to `destinations` when they are staged; `receive_count` receivers will register in all.

        May come before the request: returns when the request is there, or raises when it is not in time.
        """
        waiter, future = self._new_waiter()
        try:
            self._ask(Register(req_id, tuple(destinations), receive_count, waiter))
            await future
        finally:
            self._forget(waiter, WaitCancelled(waiter))

    def tell_refused(self, error: TectumError) -> None:
        """Tell the observers of a request that a door refused: it began no life, and may not even have been read."""
        self._observe(methodcaller("refused", error))

    def overload(self) -> TectumError | None:
        """What the next request would be refused with because a limit is reached (R14); None while there is room."""
        return self.ledger.overload(self._loop.time())

    def release_request(self, req_id: str, reason: Reason = Reason.CLIENT_RELEASE) -> None:
        """Give back everything that `req_id` holds; for an id not seen yet, remember that it is not wanted (R5)."""
        self._handle(Release(req_id, reason))

    def status(self, req_id: str) -> dict[str, Any]:
        """State of a live or released request. Raises LifecycleError `request_not_found`."""
        now = self._loop.time()
        live = self.ledger.find(req_id)
        if live is not None:
            job = self._jobs[live.life]
            metadata = None if job.prepared is None else job.prepared.metadata.to_json()
            age = round(now - live.accepted_at, 3)
            return {"req_id": req_id, "state": str(live.state), "age_s": age, "metadata": metadata}
        stone = self.ledger.tombstone(req_id, now)
        if stone is None:
            raise unknown(req_id)
        since = round(now - stone.at, 3)
        answer = {"req_id": req_id, "state": "released", "reason": str(stone.reason), "released_s": since}
        return answer if stone.error is None else {**answer, "error": stone.error.to_problem()}

    async def drain(self, timeout: float) -> bool:
        """Refuse new work, let accepted work finish, then fail the rest; at most `timeout` seconds in all.

        True when everything accepted was finished: delivered, or staged for a pull that did not come. After False some
        thread may still run a stage that cannot be stopped, and the process has to end it.
        """
        grace = min(1.0, timeout / 4)
        self._handle(Close(fail_live=False))
        finished = drained = await self._wait_drained(timeout - grace)
        if not drained:
            finished = not self.ledger.unfinished()  # rows that nobody pulled are no unfinished work
            self._handle(Close(fail_live=True))
            encoding = {task for lane in self._lanes for task in (lane.loop, *lane.running)}
            for task in self._tasks - encoding:
                task.cancel()
            if not await self._wait_drained(grace):
                log.error("shutting down while a stage still runs")
                return False
        await self._wait_told(grace)
        await self._stop_tasks()
        return finished

    async def _wait_told(self, seconds: float) -> None:
        """Receivers that wait for rows hear that none will come (R12), as far as they listen."""
        if self._telling:
            _, late = await asyncio.wait(tuple(self._telling), timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _wait_drained(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    # --- the caller's side of one request ---

    async def _call(
        self,
        request: EncodeRequest,
        delivery: Delivery,
        destinations: tuple[Destination, ...] = (),
        receive_count: int = 0,
    ) -> tuple[int, int, Any]:
        """Accept (or join) and await the answer: the life, the waiter that this caller is, and what it was woken with.

        A caller that leaves before is reported to the ledger.
        """
        came = time.perf_counter()
        digest = await fingerprint(request)
        waiter, future = self._new_waiter()
        now = self._loop.time()
        deadline = None if request.deadline_ms is None else now + request.deadline_ms / 1000
        try:
            life = self._ask(Accept(request.req_id, digest, waiter, delivery, deadline))
        except TectumError as refusal:
            del self._futures[waiter]
            self._observe(methodcaller("refused", refusal, request))
            raise
        if life not in self._jobs:
            job = self._jobs[life] = Job(life, request, now)
            self._observe(methodcaller("accepted", job, time.perf_counter() - came))
            job.walk = self._spawn(self._walk(job))
        if destinations or receive_count:  # in the turn of the Accept, so that they are this life's
            self._handle(Register(request.req_id, destinations, receive_count, next(self._numbers)))
        try:
            return life, waiter, await future
        except asyncio.CancelledError:
            self._forget(waiter, CallerLeft(life, waiter))
            raise

    # --- the stages ---

    async def _walk(self, job: Job) -> None:
        """Prepare one request and hand it to the batcher."""
        if not self._may(PrepareStarted(job.life)):
            return
        try:
            prepared = await self._work.prepare(job.request)
        except TectumError as error:
            self._handle(Failed(job.life, error, _failure_reason(error)))
        except asyncio.CancelledError:
            self._handle(Failed(job.life, InternalError("internal", "The prepare stage was cancelled")))
            raise
        except Exception as error:
            self._handle(Failed(job.life, _unexpected(error, "preparing")))
        else:
            job.prepared = prepared
            job.request = job.request.without_media()  # rows may be held for long, and nobody looks at media again
            job.seconds.update(prepared.seconds)
            job.prepared_at = time.perf_counter()
            self._handle(Prepared(job.life, prepared.metadata))
            # refused for its size, or released in the meantime: then it holds nothing any more
            if job.life in self._jobs:
                lane = self._lanes[prepared.lane]
                lane.batcher.put(job)
                lane.work_waits.set()

    async def _encode_forever(self, lane: _Lane) -> None:
        """Keep one encoder busy while anything waits for it. A defect met on one batch never stops the others."""
        while True:
            await lane.work_waits.wait()
            taken: list[Job] = []
            try:
                taken = lane.batcher.take()
                batch = [job for job in taken if self._may(EncodeStarted(job.life))]
                if not len(lane.batcher):
                    lane.work_waits.clear()
                if batch:
                    task = self._spawn(self._encode_safely(batch))
                    lane.running.add(task)
                    task.add_done_callback(lane.running.discard)
                    if len(lane.running) >= self._work.depth:
                        await asyncio.wait(lane.running, return_when=asyncio.FIRST_COMPLETED)
            except Exception as error:
                log.exception("a defect in the encode loop")
                self._give_up(taken, _unexpected(error, "encoding"))

    async def _encode_safely(self, batch: list[Job]) -> None:
        try:
            await self._encode(batch)
        except Exception as error:
            log.exception("a defect in an encode")
            self._give_up(batch, _unexpected(error, "encoding"))

    def _give_up(self, batch: list[Job], error: TectumError) -> None:
        for job in batch:
            self._handle(GivenUp(job.life, error))

    async def _encode(self, batch: list[Job]) -> None:
        """One forward. A batch that fails as a whole is retried one by one, so that only the culprit fails (R15)."""
        self._observe(methodcaller("batch", batch))
        started = time.perf_counter()
        try:
            results = await self._work.encode([_prepared(job) for job in batch])
        except asyncio.CancelledError:
            self._fail_for_shutdown(batch, started)
            raise
        except Exception as failure:
            if len(batch) > 1 and not _lost(failure):
                log.warning("a fused batch of %d failed and is retried one by one: %s", len(batch), failure)
                await self._encode_apart(batch)
                return
            error = failure if isinstance(failure, TectumError) else _unexpected(failure, "encoding")
            results = [error] * len(batch)
        self._finish(batch, results, started)

    async def _encode_apart(self, batch: list[Job]) -> None:
        for index, job in enumerate(batch):
            try:
                await self._encode([job])
            except asyncio.CancelledError:
                self._fail_for_shutdown(batch[index + 1 :], time.perf_counter())
                raise

    def _fail_for_shutdown(self, batch: list[Job], started: float) -> None:
        self._finish(batch, [outcome_error(job.request.req_id, Reason.SHUTDOWN, None) for job in batch], started)

    def _finish(self, batch: list[Job], results: Sequence[Staged | TectumError], started: float) -> None:
        assert len(results) == len(batch), "an encode answers for every member of its batch"
        ended = time.perf_counter()
        for job, result in zip(batch, results, strict=True):
            job.seconds["queue"] = started - job.prepared_at
            job.seconds["forward"] = ended - started
            if isinstance(result, TectumError):
                self._handle(Failed(job.life, result, _failure_reason(result)))
            else:
                job.staged = result
                self._handle(Encoded(job.life))

    async def send_to_destination(self, job: Job, destination: Destination) -> None:
        """One delivery to one registered receiver, within its own bound. Its use is counted already; it never releases."""
        assert job.staged is not None, "only staged rows are sent"
        error: TectumError | None = None
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._send_timeout):
                await self._work.send(job.staged, destination)
        except TectumError as failure:
            error = failure
        except TimeoutError:
            text = f"Delivery to a receiver was not confirmed within {self._send_timeout:g} s"
            error = DeliveryError("send_timeout", text)
        except asyncio.CancelledError:
            error = DeliveryError("send_failed", "The delivery was cancelled")
            self._observe_sent(job, destination.backend, started, error)
            self._handle(SendFailed(job.life, destination, error))
            raise
        except Exception as failure:
            error = _unexpected(failure, "sending")
        self._observe_sent(job, destination.backend, started, error)
        if error is None:
            self._handle(SendConfirmed(job.life, destination))
        else:
            self._handle(SendFailed(job.life, destination, error))

    # --- carrying out effects ---

    def _handle(self, event: LedgerEvent) -> Admit | Refuse | None:
        """Give one event to the ledger and carry out what follows, in order. Returns its answer, where it was asked."""
        answer: Admit | Refuse | None = None
        effects: list[Effect] = self.ledger.handle(event, self._loop.time())
        for effect in effects:
            if isinstance(effect, (Admit, Refuse)):
                answer = effect
            else:
                self._carry[type(effect)](effect)
        self._arm_timer()
        return answer

    def _ask(self, event: LedgerEvent) -> int:
        """An event that asks: the life it was admitted for, or the refusal raised."""
        answer = self._handle(event)
        assert answer is not None, "an asking event is always answered"
        if isinstance(answer, Refuse):
            raise answer.error
        return answer.life

    def _may(self, event: LedgerEvent) -> bool:
        return isinstance(self._handle(event), Admit)

    def _on_wake(self, effect: Wake) -> None:
        future = self._futures.pop(effect.waiter, None)
        if future is None or future.done():
            return  # its coroutine was cancelled in this very tick, and will say so
        if effect.error is None:
            future.set_result(effect.metadata)
        else:
            future.set_exception(effect.error)

    def _on_start_send(self, effect: StartSend) -> None:
        job, destination = self._jobs[effect.life], _destination(effect.address)
        job.destinations.append(destination.address)
        self._spawn(self.send_to_destination(job, destination))

    def _on_notify(self, effect: Notify) -> None:
        task = self._loop.create_task(self._tell(effect.req_id, _destination(effect.address), effect.error))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, req_id: str, destination: Destination, error: TectumError) -> None:
        try:
            async with asyncio.timeout(self._send_timeout):
                await self._work.notify(req_id, destination, error)
        except Exception as failure:  # a failure while reporting never hides the first one
            log.warning("could not tell a receiver about %s: %s", error.code, type(failure).__name__)

    def _on_ended(self, effect: Ended) -> None:
        job = self._jobs[effect.life]
        if job.prepared is not None:
            self._lanes[job.prepared.lane].batcher.discard(effect.life)
        if job.walk is not None and job.walk is not asyncio.current_task():
            job.walk.cancel()
        seconds = self._loop.time() - job.accepted_at
        self._observe(methodcaller("ended", job, effect.reason, effect.error, seconds))

    def _on_free(self, effect: Free) -> None:
        job = self._jobs.pop(effect.life)
        if job.prepared is not None:
            self._work.forget(job.prepared)
            job.prepared = None
        if job.staged is not None:
            staged, job.staged = job.staged, None
            self._work.free(staged)
        self._observe(methodcaller("freed", job))

    def _on_lane_lost(self, number: int) -> None:
        """An encoder died. Its running stages fail by themselves; what waited for its forward is told to the ledger."""
        lost = [job.life for job in self._jobs.values() if job.prepared is not None and job.prepared.lane == number]
        for life in lost:
            self._handle(InputsLost(life))

    def _observe_sent(self, job: Job, backend: str, started: float, error: TectumError | None) -> None:
        self._observe(methodcaller("sent", job, backend, time.perf_counter() - started, error))

    def _observe(self, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                log.exception("an observer failed")

    # --- small things ---

    def _new_waiter(self) -> tuple[int, asyncio.Future[Any]]:
        waiter = next(self._numbers)
        future = self._futures[waiter] = self._loop.create_future()
        # an answer that comes in the very tick in which its caller left is nobody's, and no defect
        future.add_done_callback(looked_at)
        return waiter, future

    def _forget(self, waiter: int, event: LedgerEvent) -> None:
        """The coroutine that awaited `waiter` ends: tell the ledger, unless the ledger ended the wait itself."""
        future = self._futures.pop(waiter, None)
        if future is not None or isinstance(event, CallerLeft):
            self._handle(event)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a pipeline task failed", exc_info=task.exception())

    def _arm_timer(self) -> None:
        """One timer, for the earliest thing that waits for time; an idle pipeline has none."""
        due = self.ledger.next_due()
        if self._timer is not None:
            if due is not None and self._timer_due <= due:  # not the handle's own `when`: some loops round it
                return
            self._timer.cancel()
        self._timer = None
        if due is not None:
            self._timer, self._timer_due = self._loop.call_at(due, self._on_time), due

    def _on_time(self) -> None:
        self._timer = None
        self._handle(Tick())

    async def _stop_tasks(self) -> None:
        """End the encode loop and whatever still runs, once nothing lives any more."""
        running = tuple(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _prepared(job: Job) -> PreparedPart:
    assert job.prepared is not None, "only prepared jobs are encoded"
    return job.prepared


def _destination(address: Address) -> Destination:
    assert isinstance(address, Destination), "the pipeline registers destinations only"
    return address


def _unexpected(error: Exception, doing: str) -> TectumError:
    """Ours is the fault. The text names the kind of failure only: its own words may hold paths or addresses."""
    log.error("unexpected failure while %s", doing, exc_info=error)
    return InternalError("encode_failed", f"Unexpected {type(error).__name__} while {doing}; the server's log has more")


def _lost(error: Exception) -> bool:
    return isinstance(error, TectumError) and error.code == "worker_lost"


def _failure_reason(error: TectumError) -> Reason:
    return Reason.WORKER_LOST if _lost(error) else Reason.ENCODE_FAILED


def _as_send_error(error: BaseException) -> TectumError:
    return error if isinstance(error, TectumError) else DeliveryError("send_failed", "The receiver went away")
