"""All requests: who may enter, who waits for whom, what was released, and what time does to them.

This file owns every rule that spans requests: duplicate ids (R8), registrations and waits that come before their
request, tombstones (R7), time to live and deadlines (R11), limits (R14), shutdown. One request's rules are in
`machine.py`. Like it, this file does no I/O and reads no clock: `handle(event, now) -> effects`, and `next_due()` says
when to send the next `Tick`. Not thread-safe: one owner (the event loop) calls it.

An id names at most one *live* request. Each life has a number of its own, so that what still happens to an old life (a
forward that ends, a send that drains) can never touch a new one under the same id.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tectum.errors import BadRequestError, LifecycleError, TectumError, UnavailableError
from tectum.lifecycle.events import (
    Accept,
    Admit,
    AnswerTaken,
    CallerLeft,
    Close,
    Delivery,
    DestinationsAdded,
    Drained,
    Effect,
    Encoded,
    EncodeStarted,
    Ended,
    Event,
    Failed,
    Free,
    GivenUp,
    InputsLost,
    LedgerEvent,
    LifecycleViolationError,
    Metadata,
    Milestone,
    Notify,
    Prepared,
    PrepareStarted,
    Pull,
    Reason,
    Refuse,
    Register,
    Release,
    ReleaseAsked,
    SendConfirmed,
    SendFailed,
    SendStarted,
    State,
    TakeAnswer,
    Tick,
    Wait,
    WaitCancelled,
    Wake,
)
from tectum.lifecycle.machine import Request, outcome_error, short, step


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the ledger. Times in seconds, sizes in bytes; `tectum.config.Settings` states each one's meaning."""

    max_live_requests: int = 256
    max_request_patches: int = 131_072
    max_queued_patches: int = 524_288
    max_staged_bytes: int = 1 << 30
    encode_timeout: float = 120.0
    request_ttl: float = 120.0
    unknown_id_wait: float = 5.0
    tombstone_ttl: float = 300.0
    max_tombstones: int = 10_000


class Tombstone(NamedTuple):
    """What is remembered of a released id (R7). `error` is kept where a stage or a send failed with one of its own."""

    reason: Reason
    at: float
    error: TectumError | None
    life: int = 0  # the life it stands for
    unborn: bool = False  # released before it was ever seen


class _Orphan:
    """Waits and registrations for an id that is not live yet."""

    __slots__ = ("registrations", "until", "waiters")

    def __init__(self, until: float) -> None:
        self.until = until
        self.waiters: list[tuple[int, Milestone]] = []
        self.registrations: list[Register] = []


#: what a caller waits for before it takes its answer
_MILESTONE = {
    Delivery.INLINE: Milestone.STAGED,
    Delivery.HOLD: Milestone.STAGED,
    Delivery.PUSH: Milestone.ENDED,
}
_KEEPS_ERROR = frozenset({Reason.ENCODE_FAILED, Reason.SEND_FAILED})


class Ledger:
    """The one owner of every request's state.

    `handle` applies one event and returns the effects to carry out, in order. For an event that asks (Accept, TakeAnswer,
    Pull, Register, PrepareStarted, EncodeStarted) exactly one of them is `Admit` or `Refuse`.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.closing = False
        self.queued_patches = 0  # prepared, not yet in a forward
        self.staged_bytes = 0  # promised at Prepared, given back at Free
        self._next_life = 1
        self._lives: dict[int, Request] = {}  # every life that still holds something, draining ones too
        self._by_id: dict[str, Request] = {}  # the live one under each id
        self._orphans: dict[str, _Orphan] = {}
        self._tombstones: OrderedDict[str, Tombstone] = OrderedDict()  # oldest first
        # (due, sequence, life or waiter or id): a heap; whether an entry still means anything is checked when it is popped
        self._timers: list[tuple[float, int, str | int]] = []
        self._sequence = 0
        self._waiting: dict[int, str] = {}  # waiter -> the id it waits for (bounded waits only)
        self._ends: deque[float] = deque(maxlen=32)  # recent times of release, for Retry-After
        self._handlers: dict[type, Callable[[Any, float, list[Effect]], None]] = {
            Accept: self._accept,
            Wait: self._wait,
            WaitCancelled: self._wait_cancelled,
            Register: self._register,
            TakeAnswer: self._take_answer,
            Pull: self._pull,
            Release: self._release,
            Close: self._close,
            Tick: self._tick,
            Prepared: self._prepared,
            **dict.fromkeys(_LIFE_EVENTS, self._step),
        }

    # --- what the shell asks ---

    def handle(self, event: LedgerEvent, now: float) -> list[Effect]:
        """Apply one event at time `now` (seconds, monotonic). Raises LifecycleViolationError for an impossible one."""
        effects: list[Effect] = []
        self._handlers[type(event)](event, now, effects)
        if self.closing and not self._lives:
            effects.append(Drained())
        return effects

    def next_due(self) -> float | None:
        """When the next `Tick` is needed, or None when nothing waits for time: an idle ledger needs no polling."""
        return self._timers[0][0] if self._timers else None

    def find(self, req_id: str) -> Request | None:
        """The live request under this id."""
        return self._by_id.get(req_id)

    def life(self, life: int) -> Request | None:
        """A life that still holds something, draining ones too."""
        return self._lives.get(life)

    def tombstone(self, req_id: str, now: float) -> Tombstone | None:
        """What is remembered of a released id, or None when it was never seen or is forgotten."""
        self._bury(now)
        return self._tombstones.get(req_id)

    def by_state(self) -> dict[State, int]:
        """How many lives are in each state that holds something."""
        counts: dict[State, int] = {state: 0 for state in State if state is not State.RELEASED}
        for request in self._lives.values():
            counts[request.state] += 1
        return counts

    def unfinished(self) -> int:
        """Lives that somebody still works for: a stage, a send or the queue; not rows that wait to be pulled."""
        return sum(request.used or request.state is not State.STAGED for request in self._lives.values())

    def lives(self) -> Iterator[Request]:
        """Every life that still holds something, draining ones included."""
        return iter(self._lives.values())

    def __len__(self) -> int:
        return len(self._lives)

    # --- the door ---

    def _accept(self, event: Accept, now: float, effects: list[Effect]) -> None:
        live = self._by_id.get(event.req_id)
        if live is not None:
            self._join(live, event, now, effects)
            return
        refusal = self._refusal(event, now)
        if refusal is not None:
            effects.append(Refuse(refusal))
            return
        request = Request(self._next_life, event.req_id, event.fingerprint, event.deadline, now)
        self._next_life += 1
        self._lives[request.life] = request
        self._by_id[event.req_id] = request
        self._tombstones.pop(event.req_id, None)  # a new life under an old id
        request.add_caller(event.waiter, event.delivery)
        request.waiters.append((event.waiter, _MILESTONE[event.delivery]))
        self._schedule(self._due(request), request.life)
        effects.append(Admit(request.life))
        self._adopt_orphan(request, now, effects)

    def _join(self, live: Request, event: Accept, now: float, effects: list[Effect]) -> None:
        """R8: the same content joins, other content leaves the first untouched."""
        if live.fingerprint != event.fingerprint:
            text = f"Request id {short(event.req_id)} is live with other content; use a new id"
            effects.append(Refuse(LifecycleError("request_conflict", text)))
            return
        live.add_caller(event.waiter, event.delivery)
        live.last_activity = now
        effects.append(Admit(live.life, joined=True))
        self._add_waiter(live, event.waiter, _MILESTONE[event.delivery], effects)

    def _refusal(self, event: Accept, now: float) -> TectumError | None:
        """R14 and R5: why this request may not enter, if so."""
        if self.closing:
            return outcome_error(event.req_id, Reason.SHUTDOWN, None)
        stone = self.tombstone(event.req_id, now)
        if stone is not None and stone.unborn:
            return self._released(event.req_id, stone, now)
        if event.deadline is not None and event.deadline <= now:
            return outcome_error(event.req_id, Reason.DEADLINE, None)
        return self.overload(now)

    def overload(self, now: float) -> TectumError | None:
        """R14: the limit that is reached, so that no further request is taken at this moment; None while there is room."""
        limits = self.limits
        if len(self._lives) >= limits.max_live_requests:
            return self._overloaded(f"{len(self._lives)} live requests (limit {limits.max_live_requests})", now)
        if self.queued_patches >= limits.max_queued_patches:
            return self._overloaded(f"{self.queued_patches} queued patches (limit {limits.max_queued_patches})", now)
        if self.staged_bytes >= limits.max_staged_bytes:
            return self._overloaded(f"{self.staged_bytes} staged bytes (limit {limits.max_staged_bytes})", now)
        return None

    def _overloaded(self, what: str, now: float) -> TectumError:
        return UnavailableError("overloaded", f"The encoder is full: {what}", retry_after=self._retry_after(now))

    def _retry_after(self, now: float) -> float:
        """Seconds until about a tenth of what lives will have ended, by the recent rate; between 1 and 30."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 1.0
        rate = len(self._ends) / (now - self._ends[0])
        return min(max(len(self._lives) / 10 / rate, 1.0), 30.0)

    def _adopt_orphan(self, request: Request, now: float, effects: list[Effect]) -> None:
        """Whoever came before the request is now its."""
        orphan = self._orphans.pop(request.req_id, None)
        if orphan is None:
            return
        request.waiters.extend(orphan.waiters)
        for early in orphan.registrations:
            self._waiting.pop(early.waiter, None)
            effects.append(Wake(early.waiter, None, None))
            follow: list[Effect] = []
            step(request, DestinationsAdded(request.life, early.addresses, early.expected), follow)
            effects.extend(effect for effect in follow if not isinstance(effect, Admit))

    # --- budgets ---

    def _prepared(self, event: Prepared, now: float, effects: list[Effect]) -> None:
        """The size is known now: the request keeps its place only when it fits (R14)."""
        request = self._life(event.life, event)
        refusal = self._too_large(event.metadata, now) if request.state is State.ACCEPTED else None
        if refusal is not None:
            self._step(Failed(event.life, refusal), now, effects)
            return
        if request.state is State.ACCEPTED:
            self.queued_patches += event.metadata.patches
            self.staged_bytes += event.metadata.nbytes
        self._step(event, now, effects)

    def _too_large(self, metadata: Metadata, now: float) -> TectumError | None:
        limits = self.limits
        if metadata.nbytes > limits.max_staged_bytes:
            text = f"The rows take {metadata.nbytes} bytes, more than --max-staged-bytes {limits.max_staged_bytes}"
            return BadRequestError("request_too_large", text)
        most = min(limits.max_request_patches, limits.max_queued_patches)
        if metadata.patches > most:
            text = f"The request has {metadata.patches} patches, at most {most} are taken (--max-request-patches)"
            return BadRequestError("request_too_large", text, limit=most)
        if self.staged_bytes + metadata.nbytes > limits.max_staged_bytes:
            return self._overloaded(f"{self.staged_bytes} staged bytes (limit {limits.max_staged_bytes})", now)
        if self.queued_patches + metadata.patches > limits.max_queued_patches:
            return self._overloaded(f"{self.queued_patches} queued patches (limit {limits.max_queued_patches})", now)
        return None

    # --- one life ---

    def _step(self, event: Event, now: float, effects: list[Effect]) -> None:
        request = self._lives.get(event.life)
        if request is None:
            self._after_life(event, effects)
            return
        was = request.state
        first = len(effects)
        step(request, event, effects)
        request.last_activity = now
        if was is State.PREPARED and request.state is not State.PREPARED and request.metadata is not None:
            self.queued_patches -= request.metadata.patches
        if request.state is State.STAGED and (was is not State.STAGED or type(event) in (SendConfirmed, SendFailed)):
            self._schedule(self._due(request), request.life)  # idle time runs from here
        for effect in effects[first:]:
            self._keep_books(request, effect, now)

    def _keep_books(self, request: Request, effect: Effect, now: float) -> None:
        """On `Ended` the id is free again and a tombstone stands; on `Free` the bytes come back."""
        if isinstance(effect, Wake):
            self._waiting.pop(effect.waiter, None)
        elif isinstance(effect, Ended):
            assert self._by_id.pop(request.req_id) is request, "the id names another life"
            error = effect.error.bare() if effect.error is not None and effect.reason in _KEEPS_ERROR else None
            self._remember(request.req_id, Tombstone(effect.reason, now, error, effect.life))
            self._ends.append(now)
        elif isinstance(effect, Free):
            del self._lives[request.life]
            if request.metadata is not None:
                self.staged_bytes -= request.metadata.nbytes
            self._drop_idle_timers()

    def _after_life(self, event: Event, effects: list[Effect]) -> None:
        """An event for a life that holds nothing any more: asking is refused, leaving is fine, the rest cannot be."""
        if isinstance(event, (PrepareStarted, EncodeStarted)):
            effects.append(Refuse(LifecycleError("request_released", "Encoder request was released before this stage")))
        elif not isinstance(event, (ReleaseAsked, CallerLeft, InputsLost, GivenUp)):
            raise LifecycleViolationError(f"{type(event).__name__} for life {event.life}, which holds nothing")

    def _life(self, life: int, event: Event) -> Request:
        request = self._lives.get(life)
        if request is None:
            raise LifecycleViolationError(f"{type(event).__name__} for life {life}, which holds nothing")
        return request

    # --- by id: waits, registrations, pulls, releases ---

    def _wait(self, event: Wait, now: float, effects: list[Effect]) -> None:
        request = self._by_id.get(event.req_id)
        if request is not None:
            self._waiting[event.waiter] = event.req_id
            self._schedule(event.until, -event.waiter)
            self._add_waiter(request, event.waiter, event.milestone, effects)
            return
        stone = self.tombstone(event.req_id, now)
        if stone is not None:
            effects.append(Wake(event.waiter, None, self._released(event.req_id, stone, now)))
            return
        orphan = self._orphan(event.req_id, now)
        if orphan is None or event.until <= now:
            effects.append(Wake(event.waiter, None, unknown(event.req_id)))
            return
        orphan.waiters.append((event.waiter, event.milestone))
        self._waiting[event.waiter] = event.req_id
        self._schedule(event.until, -event.waiter)

    def _add_waiter(self, request: Request, waiter: int, milestone: Milestone, effects: list[Effect]) -> None:
        if request.reached(milestone):
            self._waiting.pop(waiter, None)
            effects.append(Wake(waiter, request.metadata, None))
        else:
            request.waiters.append((waiter, milestone))

    def _wait_cancelled(self, event: WaitCancelled, now: float, effects: list[Effect]) -> None:
        req_id = self._waiting.pop(event.waiter, None)
        if req_id is None:
            return
        holder: Request | _Orphan | None = self._by_id.get(req_id) or self._orphans.get(req_id)
        if holder is not None:
            holder.waiters = [entry for entry in holder.waiters if entry[0] != event.waiter]
        if isinstance(holder, _Orphan):
            holder.registrations = [r for r in holder.registrations if r.waiter != event.waiter]
            self._drop_empty_orphan(req_id, holder)

    def _register(self, event: Register, now: float, effects: list[Effect]) -> None:
        request = self._by_id.get(event.req_id)
        if request is not None:
            self._step(DestinationsAdded(request.life, event.addresses, event.expected), now, effects)
            effects.append(Wake(event.waiter, None, None))
            return
        stone = self.tombstone(event.req_id, now)
        if stone is not None:
            effects.append(Refuse(self._released(event.req_id, stone, now)))
            return
        orphan = self._orphan(event.req_id, now)
        if orphan is None:
            effects.append(Refuse(unknown(event.req_id)))
            return
        orphan.registrations.append(event)
        self._waiting[event.waiter] = event.req_id
        effects.append(Admit(0))

    def _take_answer(self, event: TakeAnswer, now: float, effects: list[Effect]) -> None:
        request = self._lives.get(event.life)
        if request is not None and request.reason is None:
            self._step(AnswerTaken(event.life, event.waiter), now, effects)
            return
        stone = self.tombstone(event.req_id, now)
        if stone is None or stone.life != event.life:  # the id lives again, or its end is forgotten
            effects.append(Refuse(unknown(event.req_id)))
            return
        # its caller never stopped waiting: an end with a code of its own (a deadline, a shutdown) is told as to the others
        error = outcome_error(event.req_id, stone.reason, None)
        if stone.error is not None or error.code == "request_released":
            error = self._released(event.req_id, stone, now)
        effects.append(Refuse(error))

    def _pull(self, event: Pull, now: float, effects: list[Effect]) -> None:
        request = self._by_id.get(event.req_id)
        if request is not None:
            self._step(SendStarted(request.life, event.address), now, effects)
            return
        stone = self.tombstone(event.req_id, now)
        error = unknown(event.req_id) if stone is None else self._no_rows(event.req_id, stone, now)
        effects.append(Refuse(error))

    def _release(self, event: Release, now: float, effects: list[Effect]) -> None:
        request = self._by_id.get(event.req_id)
        if request is not None:
            self._step(ReleaseAsked(request.life, event.reason), now, effects)
            return
        if self.tombstone(event.req_id, now) is None:
            stone = Tombstone(event.reason, now, None, unborn=True)
            self._remember(event.req_id, stone)
            self._fail_orphan(event.req_id, self._released(event.req_id, stone, now), effects)

    # --- those who came before their request ---

    def _orphan(self, req_id: str, now: float) -> _Orphan | None:
        """The waiting room of an id not seen yet; None when ids are not held or too many are."""
        orphan = self._orphans.get(req_id)
        hold = self.limits.unknown_id_wait
        if orphan is not None or hold <= 0 or self.closing or len(self._orphans) >= self.limits.max_tombstones:
            return orphan
        orphan = self._orphans[req_id] = _Orphan(now + hold)
        self._schedule(orphan.until, req_id)
        return orphan

    def _fail_orphan(self, req_id: str, error: TectumError, effects: list[Effect]) -> None:
        orphan = self._orphans.pop(req_id, None)
        if orphan is None:
            return
        for waiter, _ in orphan.waiters:
            self._waiting.pop(waiter, None)
            effects.append(Wake(waiter, None, error))
        for early in orphan.registrations:
            self._waiting.pop(early.waiter, None)
            effects.append(Wake(early.waiter, None, error))
            effects.extend(Notify(req_id, address, error) for address in dict.fromkeys(early.addresses))

    def _drop_empty_orphan(self, req_id: str, orphan: _Orphan) -> None:
        if not orphan.waiters and not orphan.registrations:
            del self._orphans[req_id]

    # --- tombstones ---

    def _remember(self, req_id: str, stone: Tombstone) -> None:
        self._tombstones.pop(req_id, None)
        self._tombstones[req_id] = stone
        while len(self._tombstones) > self.limits.max_tombstones:
            self._tombstones.popitem(last=False)

    def _bury(self, now: float) -> None:
        """Forget what is too old. Called on each look-up: memory is bounded by number, age matters when asked for."""
        while self._tombstones:
            req_id = next(iter(self._tombstones))
            if self._tombstones[req_id].at + self.limits.tombstone_ttl > now:
                return
            del self._tombstones[req_id]

    def _released(self, req_id: str, stone: Tombstone, now: float) -> TectumError:
        return stone.error.bare() if stone.error is not None else outcome_error(req_id, stone.reason, now - stone.at)

    def _no_rows(self, req_id: str, stone: Tombstone, now: float) -> TectumError:
        """The answer to a pull or a send after the release (R3): reason, age, and what to do."""
        if stone.error is not None:
            return stone.error.bare()
        age = now - stone.at
        what = f"no staged embedding for req_id={short(req_id)} (already released)"
        text = f"{what}: {stone.reason}, {age:.1f} s ago; encode again"
        return LifecycleError("request_released", text, reason=str(stone.reason), age_s=round(age, 3))

    # --- time ---

    def _schedule(self, due: float | None, key: str | int) -> None:
        """key: a life (> 0), a waiter (< 0, negated) or the id of an orphan."""
        if due is None:
            return
        self._sequence += 1
        heapq.heappush(self._timers, (due, self._sequence, key))
        self._drop_idle_timers()

    def _drop_idle_timers(self) -> None:
        """Forget timers of what ended early, once they are most of them: memory follows what lives, at little cost."""
        if len(self._timers) > 64 + 4 * (len(self._lives) + len(self._waiting) + len(self._orphans)):
            self._timers = [timer for timer in self._timers if self._awaited(timer[2])]
            heapq.heapify(self._timers)

    def _awaited(self, key: str | int) -> bool:
        if isinstance(key, str):
            return key in self._orphans
        return key in self._lives if key > 0 else -key in self._waiting

    def _due(self, request: Request) -> float | None:
        """When time releases this request, or None while nothing but its last use can (R11)."""
        if request.reason is not None:
            return None
        if request.state is not State.STAGED:
            latest = request.accepted_at + self.limits.encode_timeout
            return latest if request.deadline is None else request.deadline
        idle = None if request.active_sends else request.last_activity + self.limits.request_ttl
        if request.deadline is None:
            return idle
        return request.deadline if idle is None else min(request.deadline, idle)

    def _tick(self, event: Tick, now: float, effects: list[Effect]) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, key = heapq.heappop(self._timers)
            if isinstance(key, str):
                orphan = self._orphans.get(key)
                if orphan is not None and orphan.until <= now:
                    self._fail_orphan(key, unknown(key), effects)
            elif key < 0:
                self._wait_is_over(-key, effects)
            else:
                self._life_is_due(key, now, effects)

    def _life_is_due(self, life: int, now: float, effects: list[Effect]) -> None:
        request = self._lives.get(life)
        if request is None or request.reason is not None:
            return
        due = self._due(request)
        if due is None or due > now:  # a send holds the sweep off, or there was activity: look again later
            self._schedule(due if due is not None else now + self.limits.request_ttl, life)
            return
        late = request.state is not State.STAGED or (request.deadline is not None and request.deadline <= now)
        self._step(ReleaseAsked(life, Reason.DEADLINE if late else Reason.EXPIRED), now, effects)

    def _wait_is_over(self, waiter: int, effects: list[Effect]) -> None:
        req_id = self._waiting.pop(waiter, None)
        if req_id is None:
            return
        request, orphan = self._by_id.get(req_id), self._orphans.get(req_id)
        if request is not None:
            request.waiters = [entry for entry in request.waiters if entry[0] != waiter]
            text = f"Request {short(req_id)} is still {request.state}; wait again"
            effects.append(Wake(waiter, None, LifecycleError("metadata_timeout", text, retry_after=1.0)))
        elif orphan is not None:
            orphan.waiters = [entry for entry in orphan.waiters if entry[0] != waiter]
            effects.append(Wake(waiter, None, unknown(req_id)))
            self._drop_empty_orphan(req_id, orphan)

    # --- the end ---

    def _close(self, event: Close, now: float, effects: list[Effect]) -> None:
        self.closing = True
        for req_id in list(self._orphans):
            self._fail_orphan(req_id, outcome_error(req_id, Reason.SHUTDOWN, None), effects)
        if event.fail_live:
            for life in [request.life for request in self._lives.values() if request.reason is None]:
                self._step(ReleaseAsked(life, Reason.SHUTDOWN), now, effects)


#: what the shell reports of a life; the other events of a life come from an event by id, above
_LIFE_EVENTS = (
    PrepareStarted,
    EncodeStarted,
    Encoded,
    Failed,
    InputsLost,
    GivenUp,
    SendConfirmed,
    SendFailed,
    CallerLeft,
    ReleaseAsked,
)


def unknown(req_id: str) -> TectumError:
    text = f"No embedding available for request: {short(req_id)} (this id was never seen, or is forgotten)"
    return LifecycleError("request_not_found", text)
