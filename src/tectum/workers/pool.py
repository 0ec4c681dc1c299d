"""The encoders of one service: work is routed to them, and one that dies or stalls is replaced.

Owns which lane does what, and how many lanes are up. Where an encoder runs is a `Launcher`'s to know (`process.py`: here;
`ray.py`: on a cluster). The pool offers `Encoders` to the stages; a request's life is not its concern: it fails what ran on
a dead encoder with `worker_lost`, and says that the lane was lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tectum.config import Settings
from tectum.delivery.staging import Lease, StagingPool
from tectum.errors import BadRequestError, StartupError, TectumError, UnavailableError
from tectum.pipeline.limits import fuses
from tectum.pipeline.threads import looked_at, outlast
from tectum.pipeline.work import PreparedPart
from tectum.types import EncodeRequest
from tectum.workers import messages
from tectum.workers.line import EncoderLine, Launcher
from tectum.workers.messages import Encode, Encoded, Failed, Forget, FromEncoder, Prepared
from tectum.workers.process import LocalProcesses
from tectum.workers.router import choose
from tectum.workers.scaling import Scaler

log = logging.getLogger("tectum.workers")

#: seconds before a process that ended is started again: doubled each time it does not last, up to the second number
BACKOFF, LONGEST_BACKOFF = 0.25, 30.0
#: a process that lived this long (seconds) is started again without further delay
PROVEN = 60.0
#: patches that a request is taken for until they are known
USUAL_PATCHES = 1024
#: seconds by which a look at an encoder may be late; beyond that this process itself stood still
LATE = 0.5
#: seconds beyond `--stall-timeout` that an encoder gets to say itself what hangs, and to end
OWN_WORD = 1.5
#: share of `--stall-timeout` that an encoder gets to say something after such a standstill, before it is looked at again
ANEW = 0.25
#: seconds between two looks at how many encoders are needed, where that number may change
LOOK_EVERY = 0.5


class _Lane:
    """One encoder after another, and what the present one has to do."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: EncoderLine | None = None  # the one that is up
        self.keeper: asyncio.Task[None] | None = None  # keeps it up; None: this lane is not wanted now
        self.leaving = False  # gets no new work, and is stopped when it has none left
        self.pending: dict[int, asyncio.Future[Any]] = {}  # ticket or batch -> whoever awaits it
        self.queued: dict[int, int] = {}  # ticket -> patches of what is prepared or on its way
        self.last_step = 0.0  # when something was finished last, or the first thing began
        self.watch: asyncio.TimerHandle | None = None  # the next look at whether it stalls


class WorkerPool:
    """`Encoders` of `model`: `settings.workers` processes, or actors of the Ray cluster that it names.

    tell: called with lane, what is being loaded, and the fraction done. launcher: where encoders come from, when not from
    where the settings say. card: the model's, once started.
    """

    def __init__(
        self,
        model: str,
        settings: Settings,
        tell: Callable[[int, str, float], None] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._launcher = launcher or _launcher(model, settings)
        self.lanes = self._launcher.most
        self.depth = 2  # the next forward crosses the line while the last one runs
        self.fuses = False
        self.on_lane_lost: Callable[[int], None] = _nothing
        self.card: dict[str, Any] = {}
        self.revision = ""
        self.restarts = 0
        self._settings = settings
        self._tell = tell or _silent
        self._lanes = [_Lane(number) for number in range(self.lanes)]
        self._numbers = itertools.count(1)  # tickets and batches; 0 is the start
        self._scaling: asyncio.Task[None] | None = None

    # --- start and end ---

    async def start(self, pool: StagingPool) -> None:
        """Start all encoders at once. Raises StartupError as loading does; then none is left."""
        self._loop = asyncio.get_running_loop()
        starting: list[asyncio.Task[None]] = []
        try:
            await self._launcher.open(pool)
            starting = [asyncio.ensure_future(self._launch(lane)) for lane in self._lanes[: self._launcher.least]]
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise
        self.fuses = fuses(self._settings, self.card["device"])
        self.revision = self.card["revision"]
        for lane in self._lanes[: self._launcher.least]:
            lane.keeper = asyncio.ensure_future(self._keep_up(lane))
        if self._launcher.least < self._launcher.most:
            self._scaling = asyncio.ensure_future(self._scale())

    async def stop(self) -> None:
        """End all encoders, and fail what they still had to do. Idempotent."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.gather(self._scaling, return_exceptions=True)
        await asyncio.gather(*(self._give_up(lane) for lane in self._lanes))
        await self._launcher.close()

    async def _launch(self, lane: _Lane) -> None:
        def take(message: FromEncoder) -> None:
            self._take(lane, message)

        def tell(what: str, fraction: float) -> None:
            self._tell(lane.number, what, fraction)

        process = await self._launcher.launch(lane.number, take, tell)
        if self.revision and process.card["revision"] != self.revision:
            await process.stop()
            text = "The checkpoint was changed under a running service: restart the service to serve the new weights"
            raise StartupError("invalid_checkpoint", text)
        lane.process = process
        self.card = process.card
        log.info("lane %d is up: encoder process %d %s", lane.number, process.pid, process.node)

    async def _keep_up(self, lane: _Lane) -> None:
        """Have an encoder up in a lane, and replace it whenever it ends."""
        delay = 0.0
        while True:
            while lane.process is None:
                await asyncio.sleep(delay)
                delay = min(max(2 * delay, BACKOFF), LONGEST_BACKOFF)
                try:
                    await self._launch(lane)
                except (TectumError, OSError) as error:  # also no descriptor, no memory for another process
                    log.error("lane %d cannot be started: %s", lane.number, error)
                except Exception:
                    log.exception("lane %d cannot be started", lane.number)
            process, began = lane.process, self._loop.time()
            await asyncio.shield(process.gone)
            log.error("encoder process %d (lane %d) ended %s; it is replaced", process.pid, lane.number, process.how)
            lane.process = None
            self._forget_all(lane, process.crashed)
            self.on_lane_lost(lane.number)
            self.restarts += 1
            delay = BACKOFF if self._loop.time() - began > PROVEN else max(delay, BACKOFF)

    async def _give_up(self, lane: _Lane) -> None:
        """End a lane's encoder for good; whatever it still had to do fails."""
        keeper, lane.keeper = lane.keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        process, lane.process = lane.process, None
        if process is not None:
            await process.stop()
        if lane.watch is not None:
            lane.watch.cancel()
            lane.watch = None
        self._forget_all(lane)
        lane.leaving = False

    # --- as many as the work needs ---

    async def _scale(self) -> None:
        """Add and take away encoders as the queue grows and shrinks."""
        scaler = Scaler(self._launcher.least, self._launcher.most, self._settings.replica_patches)
        while True:
            await asyncio.sleep(LOOK_EVERY)
            for lane in self._lanes:
                if lane.leaving and not lane.pending and not lane.queued:
                    log.warning("lane %d is idle and given up", lane.number)
                    await self._give_up(lane)
            kept = [lane for lane in self._lanes if lane.keeper is not None and not lane.leaving]
            wanted = scaler.wanted(len(kept), self._queued_patches(), self._loop.time())
            for lane in kept[wanted:]:
                lane.leaving = True
            spare = [lane for lane in self._lanes if lane not in kept]
            for lane in spare[: max(wanted - len(kept), 0)]:
                self._take_up(lane)

    def _take_up(self, lane: _Lane) -> None:
        """Have a lane kept up (again)."""
        lane.leaving = False
        if lane.keeper is None:
            log.warning("lane %d is started: %d patches are queued", lane.number, self._queued_patches())
            lane.keeper = asyncio.ensure_future(self._keep_up(lane))

    def _queued_patches(self) -> int:
        return sum(sum(lane.queued.values()) for lane in self._lanes)

    def _forget_all(self, lane: _Lane, crashed: bool = False) -> None:
        """Its process is gone: whoever waits for it learns that.

        One that crashed over the only media it was preparing, with no forward under way, crashed over those: to try them again
        would take the next encoder along.
        """
        pending, lane.pending = lane.pending, {}
        # what is queued are tickets: of a pending forward the number is not among them
        alone = crashed and len(pending) == 1 and next(iter(pending)) in lane.queued
        lane.queued.clear()
        for future in pending.values():
            if future.done():
                continue
            if alone:
                text = "The decoder or the processor crashed over these media"
                future.set_exception(BadRequestError("media_decode_failed", text))
            else:
                future.set_exception(_worker_lost("The encoder process that worked on this request died; retry"))

    # --- what the stages ask ---

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        """Raises UnavailableError `worker_lost` when no process is up, or the chosen one dies."""
        loads = {
            lane.number: sum(lane.queued.values())
            for lane in self._lanes
            if lane.process is not None and not lane.process.ended and not lane.leaving
        }
        if not loads:
            raise _worker_lost("No encoder process is up; one is being started")
        lane = self._lanes[choose(loads, _content_hint(request))]
        ticket = next(self._numbers)
        lane.queued[ticket] = USUAL_PATCHES
        try:
            answer = await self._ask(lane, ticket, messages.to_prepare(ticket, request))
        except (OverflowError, TypeError):
            self._drop(lane, ticket)
            raise BadRequestError("invalid_option", "An option holds a value that no encoder takes") from None
        except BaseException:
            self._drop(lane, ticket)
            raise
        assert isinstance(answer, Prepared), "a prepare is answered by its metadata"
        if ticket in lane.queued:
            lane.queued[ticket] = answer.metadata.patches
        return PreparedPart(answer.metadata, ticket, lane.number)

    def forget(self, part: PreparedPart) -> None:
        self._drop(self._lanes[part.lane], part.ticket)

    async def forward(self, batch: Sequence[PreparedPart], leases: Sequence[Lease]) -> list[TectumError | None]:
        lane = self._lanes[batch[0].lane]
        if any(part.ticket not in lane.queued for part in batch):
            raise _worker_lost("The encoder process that held this request died; retry")
        number = next(self._numbers)
        members = [(part.ticket, lease.offset, lease.nbytes) for part, lease in zip(batch, leases, strict=True)]
        answer = await self._ask(lane, number, Encode(number, members))
        assert isinstance(answer, Encoded), "an encode is answered member by member"
        for part, problem in zip(batch, answer.errors, strict=True):
            if problem is None:
                lane.queued.pop(part.ticket, None)  # there its inputs are gone already
        return [None if problem is None else messages.error_of(problem) for problem in answer.errors]

    async def _ask(self, lane: _Lane, number: int, message: messages.Message) -> Any:
        """Send work and await its end. A cancelled encode is awaited all the same: it still writes to staging memory."""
        assert lane.process is not None, "work is given to a lane that is up"
        if not lane.pending:
            lane.last_step = self._loop.time()
        if lane.watch is None:
            self._look_in(lane, self._settings.stall_timeout)
        lane.process.send(message)
        future = lane.pending[number] = self._loop.create_future()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if isinstance(message, Encode):
                await outlast(future)
            else:  # it still counts as pending until the encoder answers: one that hangs is noticed all the same
                future.add_done_callback(looked_at)
            raise

    def _drop(self, lane: _Lane, ticket: int) -> None:
        if lane.queued.pop(ticket, None) is not None and lane.process is not None:
            lane.process.send(Forget(ticket))

    # --- what the processes say ---

    def _take(self, lane: _Lane, message: FromEncoder) -> None:
        lane.last_step = self._loop.time()
        if isinstance(message, Failed):
            future = lane.pending.pop(message.number, None)
            if future is not None and not future.done():
                future.set_exception(messages.error_of(message.problem))
        elif isinstance(message, (Prepared, Encoded)):
            number = message.ticket if isinstance(message, Prepared) else message.batch
            future = lane.pending.pop(number, None)
            if future is not None and not future.done():
                future.set_result(message)

    # --- health ---

    @property
    def up(self) -> int:
        """How many processes are up."""
        return sum(lane.process is not None for lane in self._lanes)

    def stalled_for(self) -> float:
        """The longest time (seconds) that a process with pending work has not finished any step of it; 0 when idle."""
        now = self._loop.time()
        return max((now - lane.last_step for lane in self._lanes if lane.pending), default=0.0)

    def describe(self) -> list[dict[str, Any]]:
        """Each lane: its process, and what it has to do."""
        return [
            {
                "lane": lane.number,
                "pid": None if lane.process is None else lane.process.pid,
                "node": "" if lane.process is None else lane.process.node,
                "pending": len(lane.pending),
                "queued_patches": sum(lane.queued.values()),
            }
            for lane in self._lanes
        ]

    def _look_in(self, lane: _Lane, seconds: float) -> None:
        lane.watch = self._loop.call_later(seconds, self._look, lane, self._loop.time() + seconds)

    def _look(self, lane: _Lane, due: float) -> None:
        """Replace a process that has finished nothing for too long; look again as long as it has work.

        A look that comes late proves nothing: this process was suspended or starved, perhaps the encoder with it, and what
        the encoder said in the meantime is still unread.
        """
        lane.watch = None
        if lane.process is None or not lane.pending:
            return
        now, timeout = self._loop.time(), self._settings.stall_timeout + OWN_WORD
        idle = now - lane.last_step
        if now - due > LATE:
            log.warning("the service stood still for %.1f s; lane %d is looked at again", now - due, lane.number)
            self._look_in(lane, ANEW * timeout)
        elif idle < timeout:
            self._look_in(lane, timeout - idle)
        else:
            log.error("encoder process %d finished no step for %.0f s and is replaced", lane.process.pid, idle)
            lane.process.kill()


def _launcher(model: str, settings: Settings) -> Launcher:
    """Where the settings say that encoders run. Raises StartupError `missing_dependency` without Ray."""
    if settings.ray_address is None:
        return LocalProcesses(model, settings)
    from tectum.workers.ray import RayActors

    return RayActors(model, settings)


def _content_hint(request: EncodeRequest) -> bytes:
    """Equal for the same content, and nearly always different for other content: enough to prefer a lane by."""
    pieces = []
    for item in request.items:
        media = item.data or (item.base64 or item.url or "").encode("utf-8", "surrogatepass")
        pieces.append(b"%d:%b%b" % (len(media), media[:64], media[-64:]))
    return b"".join(pieces)


def _worker_lost(text: str) -> UnavailableError:
    return UnavailableError("worker_lost", text, retry_after=1.0)


def _nothing(lane: int) -> None: ...


def _silent(lane: int, what: str, fraction: float) -> None: ...
