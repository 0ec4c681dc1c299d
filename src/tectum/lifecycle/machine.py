"""One request's life: its states, the events that move it, the effects that follow. All of it is `TABLE`.

This file owns every rule about a single request (R1-R6, R9, R10, R12 of `docs/lifecycle.md`); `ledger.py` owns what
spans requests (ids, budgets, tombstones, time). Neither does I/O, knows asyncio or torch, or reads a clock: an event
comes in, effects go out, and the shell in `tectum.pipeline` carries them out and nothing more.

Theory of operation. A request is *used* while a stage (prepare or encode) or a send reads or writes its memory. Its
state says how far it came. A release is asked for by many and decided once (`_release`): everybody who waits learns the
outcome at that moment, and the memory is freed at that moment too, unless it is used: then the request is DRAINING
until the last use ends. So `Free` is emitted exactly once a life, and never while a use is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tectum.errors import DeliveryError, InternalError, LifecycleError, TectumError, UnavailableError
from tectum.lifecycle.events import (
    SUCCESS,
    Address,
    Admit,
    AnswerTaken,
    CallerLeft,
    Delivery,
    DestinationsAdded,
    Effect,
    Encoded,
    EncodeStarted,
    Ended,
    Event,
    Failed,
    Free,
    GivenUp,
    InputsLost,
    LifecycleViolationError,
    Metadata,
    Milestone,
    Notify,
    Prepared,
    PrepareStarted,
    Reason,
    Refuse,
    ReleaseAsked,
    SendConfirmed,
    SendFailed,
    SendStarted,
    StartSend,
    State,
    Wake,
)

# --- one request -----------------------------------------------------------------------------------------------------


class Request:
    """The record of one life. Only the actions below change it; sets are made when first needed."""

    __slots__ = (
        "accepted_at",
        "active_sends",
        "callers",
        "confirmed",
        "deadline",
        "declared",
        "error",
        "fingerprint",
        "last_activity",
        "life",
        "lost",
        "metadata",
        "pulled",
        "reason",
        "registered",
        "req_id",
        "stage_open",
        "state",
        "waiters",
        "waiting_destinations",
    )

    def __init__(self, life: int, req_id: str, fingerprint: bytes, deadline: float | None, now: float) -> None:
        self.life = life
        self.req_id = req_id
        self.fingerprint = fingerprint
        self.state = State.ACCEPTED
        self.accepted_at = now
        self.last_activity = now
        self.deadline = deadline
        self.callers: dict[int, Delivery] = {}  # waiter -> how it wants its rows; all that have not hung up
        self.pulled = False  # somebody pulled a whole copy since the last caller asked to hold one
        self.declared = 0  # receivers that were announced
        self.registered: set[Address] | None = None  # receivers that registered, by address (R9)
        self.metadata: Metadata | None = None
        self.reason: Reason | None = None
        self.error: TectumError | None = None
        self.stage_open = False  # a prepare or an encode uses the request
        self.active_sends: dict[Address, int] = {}  # address -> sends in flight to it
        self.confirmed: set[Address] | None = None
        self.lost: dict[Address, TectumError] | None = None  # destinations whose delivery failed for good
        self.waiting_destinations: tuple[Address, ...] = ()  # registered, not yet sent to
        self.waiters: list[tuple[int, Milestone]] = []

    @property
    def used(self) -> bool:
        return self.stage_open or bool(self.active_sends)

    @property
    def settled(self) -> bool:
        """Everybody expected has a copy of its own, or is lost for good (R10).

        Each inline caller reads its own; one pull serves all who asked to hold the rows; receivers count by address, and a
        caller that has the rows pushed waits for one at least.
        """
        confirmed, registered = self.confirmed or set(), self.registered or set()
        if not confirmed and not self.lost:
            return False
        for waiter, delivery in self.callers.items():
            if delivery is Delivery.INLINE and waiter not in confirmed:
                return False
            if delivery is Delivery.HOLD and not self.pulled:
                return False
            if delivery is Delivery.PUSH and not registered:
                return False
        receivers = len(registered & (confirmed | set(self.lost or ())))
        return receivers >= max(self.declared, len(registered))

    @property
    def on_its_way(self) -> bool:
        """Every receiver that was announced or registered has its rows, is lost for good, or is being sent to."""
        registered = self.registered or set()
        done = (self.confirmed or set()) | set(self.lost or ())
        return bool(registered) and len(registered) >= self.declared and registered <= done | set(self.active_sends)

    def add_caller(self, waiter: int, delivery: Delivery) -> None:
        """One more caller wants the rows. Who asks to hold them is promised a pull that is still to come."""
        self.callers[waiter] = delivery
        if delivery is Delivery.HOLD:
            self.pulled = False

    def reached(self, milestone: Milestone) -> bool:
        if milestone is Milestone.METADATA:
            return self.metadata is not None
        return milestone is Milestone.STAGED and self.state is State.STAGED


Action = Callable[[Request, Any, list[Effect]], None]


class Move(NamedTuple):
    """One cell of the table: the next state (None: the action decides) and what to do."""

    to: State | None
    action: Action


def _begin_stage(request: Request, event: Event, effects: list[Effect]) -> None:
    """The stage may start; its use is counted."""
    assert not request.stage_open, "two stages use one request"
    request.stage_open = True
    effects.append(Admit(request.life))


def _publish(request: Request, event: Prepared, effects: list[Effect]) -> None:
    """Metadata is published, whoever waits for it wakes (R6)."""
    _close_stage(request)
    request.metadata = event.metadata
    _wake(request, Milestone.METADATA, effects)


def _stage(request: Request, event: Encoded, effects: list[Effect]) -> None:
    """Rows are held; whoever waits for them wakes, and every registered destination is sent to."""
    _close_stage(request)
    _wake(request, Milestone.STAGED, effects)
    _start_sends(request, effects)


def _end_stage(request: Request, event: Event, effects: list[Effect]) -> None:
    """The last stage of a released request ended: what it made is dropped (R4)."""
    _close_stage(request)
    _free_if_unused(request, effects)


def _fail(request: Request, event: Failed | GivenUp, effects: list[Effect]) -> None:
    """Release for the failure; everybody gets the error as it was raised."""
    request.stage_open = False
    _release(request, event.reason, event.error, effects)


def _end_stage_if_any(request: Request, event: Event, effects: list[Effect]) -> None:
    """A stage that still ran has ended with it; where none ran, nothing (R4)."""
    if request.stage_open:
        _end_stage(request, event, effects)


def _stands(request: Request, event: Event, effects: list[Effect]) -> None:
    """Nothing: the rows are there, whole."""


def _take_answer(request: Request, event: AnswerTaken, effects: list[Effect]) -> None:
    """The answer stands; an inline caller may read the rows now, and that use is counted (R1)."""
    if request.callers[event.waiter] is Delivery.INLINE:
        _open_send(request, event.waiter)
    effects.append(Admit(request.life))


def _lose_inputs(request: Request, event: InputsLost, effects: list[Effect]) -> None:
    """Release as `worker_lost`: there is nothing left to encode."""
    _release(request, Reason.WORKER_LOST, None, effects)


def _begin_send(request: Request, event: SendStarted, effects: list[Effect]) -> None:
    """The send may read the rows; its use is counted (R1)."""
    _open_send(request, event.address)
    effects.append(Admit(request.life))


def _confirm(request: Request, event: SendConfirmed, effects: list[Effect]) -> None:
    """One destination has its rows; when all have, release (R10)."""
    _close_send(request, event.address)
    if request.confirmed is None:
        request.confirmed = set()
    request.confirmed.add(event.address)
    request.pulled |= event.reason is Reason.PULLED
    if request.lost is not None:
        request.lost.pop(event.address, None)  # a retry made good
    _settle(request, event.reason, effects)


def _lose(request: Request, event: SendFailed, effects: list[Effect]) -> None:
    """One destination will not have its rows; the others are not touched by that."""
    _close_send(request, event.address)
    if event.final and event.address not in (request.confirmed or ()):
        if request.lost is None:
            request.lost = {}
        request.lost[event.address] = event.error
    _settle(request, Reason.DELIVERED, effects)


def _end_send(request: Request, event: SendConfirmed | SendFailed, effects: list[Effect]) -> None:
    """A send of a released request ended; after the last one the memory is freed (R1)."""
    _close_send(request, event.address)
    _free_if_unused(request, effects)


def _add_destinations(request: Request, event: DestinationsAdded, effects: list[Effect]) -> None:
    """Destinations are counted by address (R9); a lost one that registers again is tried again."""
    lost = request.lost or {}
    if request.registered is None:
        request.registered = set()
    fresh = tuple(a for a in dict.fromkeys(event.addresses) if a not in request.registered or a in lost)
    for address in fresh:
        lost.pop(address, None)
    request.registered.update(fresh)
    request.declared = max(request.declared, event.expected)
    request.waiting_destinations += fresh
    effects.append(Admit(request.life))
    if request.state is State.STAGED:
        _start_sends(request, effects)


def _caller_left(request: Request, event: CallerLeft, effects: list[Effect]) -> None:
    """Its wait and its copy are given up; when no caller is left, release, unless all rows are on their way.

    A receiver may close its connection once it has the rows, before the send heard of it: that aborts nothing (R13).
    """
    request.waiters = [entry for entry in request.waiters if entry[0] != event.waiter]
    del request.callers[event.waiter]
    if not request.callers and not request.on_its_way:
        _release(request, Reason.CLIENT_ABORT, None, effects)
    elif request.state is State.STAGED:
        _settle(request, Reason.DELIVERED, effects)


def _ask_release(request: Request, event: ReleaseAsked, effects: list[Effect]) -> None:
    """Release now, or as soon as the last use ends (R1, R4)."""
    _release(request, event.reason, None, effects)


def _refuse_not_ready(request: Request, event: Event, effects: list[Effect]) -> None:
    """Refused (409): there are no rows yet."""
    effects.append(Refuse(not_ready(request.req_id, request.state)))


def _refuse_released(request: Request, event: Event, effects: list[Effect]) -> None:
    """Refused (410): a release was asked for (R3, R5)."""
    effects.append(Refuse(request.error or outcome_error(request.req_id, _reason(request), None)))


def _ignore(request: Request, event: Event, effects: list[Effect]) -> None:
    """Nothing: the first release wins (R2)."""


def _not_needed(request: Request, event: Event, effects: list[Effect]) -> None:
    """Nothing: the inputs are not needed any more, or the running encode reports its own end."""


S = State
_RELEASE: dict[type, Move] = {Failed: Move(None, _fail), ReleaseAsked: Move(None, _ask_release)}

#: every move there is; an event without a cell in its state is a defect of the shell (`LifecycleViolationError`)
TABLE: dict[State, dict[type, Move]] = {
    S.ACCEPTED: {
        PrepareStarted: Move(S.ACCEPTED, _begin_stage),
        Prepared: Move(S.PREPARED, _publish),
        SendStarted: Move(S.ACCEPTED, _refuse_not_ready),
        DestinationsAdded: Move(S.ACCEPTED, _add_destinations),
        CallerLeft: Move(None, _caller_left),
        **_RELEASE,
    },
    S.PREPARED: {
        EncodeStarted: Move(S.ENCODING, _begin_stage),
        InputsLost: Move(None, _lose_inputs),
        GivenUp: Move(None, _fail),
        SendStarted: Move(S.PREPARED, _refuse_not_ready),
        DestinationsAdded: Move(S.PREPARED, _add_destinations),
        CallerLeft: Move(None, _caller_left),
        **_RELEASE,
    },
    S.ENCODING: {
        Encoded: Move(S.STAGED, _stage),
        InputsLost: Move(S.ENCODING, _not_needed),
        GivenUp: Move(None, _fail),
        SendStarted: Move(S.ENCODING, _refuse_not_ready),
        DestinationsAdded: Move(S.ENCODING, _add_destinations),
        CallerLeft: Move(None, _caller_left),
        **_RELEASE,
    },
    S.STAGED: {
        InputsLost: Move(S.STAGED, _not_needed),
        GivenUp: Move(S.STAGED, _stands),
        AnswerTaken: Move(S.STAGED, _take_answer),
        SendStarted: Move(S.STAGED, _begin_send),
        SendConfirmed: Move(None, _confirm),
        SendFailed: Move(None, _lose),
        DestinationsAdded: Move(S.STAGED, _add_destinations),
        CallerLeft: Move(None, _caller_left),
        ReleaseAsked: Move(None, _ask_release),
    },
    S.DRAINING: {
        Prepared: Move(None, _end_stage),
        Encoded: Move(None, _end_stage),
        Failed: Move(None, _end_stage),
        InputsLost: Move(S.DRAINING, _not_needed),
        GivenUp: Move(None, _end_stage_if_any),
        SendConfirmed: Move(None, _end_send),
        SendFailed: Move(None, _end_send),
        PrepareStarted: Move(S.DRAINING, _refuse_released),
        EncodeStarted: Move(S.DRAINING, _refuse_released),
        CallerLeft: Move(S.DRAINING, _ignore),
        ReleaseAsked: Move(S.DRAINING, _ignore),
    },
    S.RELEASED: {},
}


def step(request: Request, event: Event, effects: list[Effect]) -> None:
    """Apply one event and append what follows from it. Raises LifecycleViolationError for an impossible one."""
    move = TABLE[request.state].get(type(event))
    if move is None:
        raise LifecycleViolationError(f"{type(event).__name__} in state {request.state} of request {request.req_id}")
    if move.to is not None:
        request.state = move.to
    move.action(request, event, effects)


# --- the few moves that the actions share ----------------------------------------------------------------------------


def _release(request: Request, reason: Reason, error: TectumError | None, effects: list[Effect]) -> None:
    """The one path of release (R2): everybody learns the outcome now; the memory goes when nobody uses it."""
    assert request.reason is None, "released twice"
    request.reason = reason
    request.error = None if reason in SUCCESS else error or outcome_error(request.req_id, reason, None)
    for waiter, _ in request.waiters:
        effects.append(Wake(waiter, request.metadata if request.error is None else None, request.error))
    request.waiters = []
    if request.error is not None:
        effects.extend(Notify(request.req_id, at, request.error) for at in request.waiting_destinations)
    request.waiting_destinations = ()
    request.state = State.DRAINING
    effects.append(Ended(request.life, reason, request.error))
    _free_if_unused(request, effects)


def _free_if_unused(request: Request, effects: list[Effect]) -> None:
    if not request.used:
        request.state = State.RELEASED
        effects.append(Free(request.life))


def _settle(request: Request, reason: Reason, effects: list[Effect]) -> None:
    """Release once everybody expected is settled; for a failed delivery only after the last send has ended."""
    if not request.settled:
        return
    if not request.lost:
        _release(request, reason, None, effects)
    elif not request.active_sends:
        _release(request, Reason.SEND_FAILED, next(iter(request.lost.values())), effects)


def _start_sends(request: Request, effects: list[Effect]) -> None:
    for address in request.waiting_destinations:
        _open_send(request, address)
        effects.append(StartSend(request.life, address))
    request.waiting_destinations = ()


def _close_stage(request: Request) -> None:
    if not request.stage_open:
        raise LifecycleViolationError(f"a stage of request {request.req_id} ended that never started")
    request.stage_open = False


def _open_send(request: Request, address: Address) -> None:
    request.active_sends[address] = request.active_sends.get(address, 0) + 1


def _close_send(request: Request, address: Address) -> None:
    left = request.active_sends.get(address, 0) - 1
    if left < 0:
        raise LifecycleViolationError(f"a send to {address} ended that never started")
    if left:
        request.active_sends[address] = left
    else:
        del request.active_sends[address]


def _wake(request: Request, milestone: Milestone, effects: list[Effect]) -> None:
    staying = []
    for waiter, wanted in request.waiters:
        if wanted is milestone:
            effects.append(Wake(waiter, request.metadata, None))
        else:
            staying.append((waiter, wanted))
    request.waiters = staying


def _reason(request: Request) -> Reason:
    assert request.reason is not None, "a released request has a reason"
    return request.reason


# --- the errors that a life can end in -------------------------------------------------------------------------------

_ADVICE = {
    Reason.DELIVERED: "every expected receiver has its rows; encode again to get them anew",
    Reason.PULLED: "its rows were pulled; encode again to get them anew",
    Reason.CLIENT_RELEASE: "it was released on request; encode again under a new id",
    Reason.CLIENT_ABORT: "its caller hung up; encode again",
    Reason.DEADLINE: "its deadline passed; encode again with more time",
    Reason.EXPIRED: "nobody fetched it within its time to live; encode again or raise --request-ttl",
    Reason.ENCODE_FAILED: "its encode failed",
    Reason.SEND_FAILED: "its delivery failed; encode again",
    Reason.WORKER_LOST: "its encoder died; encode again",
    Reason.SHUTDOWN: "the server is shutting down; encode elsewhere",
}


def short(req_id: str) -> str:
    """An id as it may stand in an error text."""
    return req_id if len(req_id) <= 64 else req_id[:61] + "..."


def outcome_error(req_id: str, reason: Reason, age: float | None) -> TectumError:
    """What those who still want something of a released request are told. `age` is None at the moment of release."""
    when = "just now" if age is None else f"{age:.1f} s ago"
    if age is None and reason is Reason.DEADLINE:
        return LifecycleError("deadline_exceeded", f"Request {short(req_id)} did not finish before its deadline")
    if age is None and reason is Reason.SHUTDOWN:
        return UnavailableError("shutting_down", "The encoder is shutting down", retry_after=1.0)
    if age is None and reason is Reason.WORKER_LOST:
        return UnavailableError("worker_lost", "The encoder that held this request died; retry", retry_after=1.0)
    if age is None and reason is Reason.ENCODE_FAILED:
        return InternalError("encode_failed", f"Encoding of request {short(req_id)} failed")
    if age is None and reason is Reason.SEND_FAILED:
        return DeliveryError("send_failed", f"Delivery of request {short(req_id)} failed")
    text = f"Encoder request was released: {short(req_id)} ({reason}, {when}); {_ADVICE[reason]}"
    return LifecycleError("request_released", text, reason=str(reason), age_s=round(age or 0.0, 3))


def not_ready(req_id: str, state: State) -> TectumError:
    text = f"No embedding available for request: {short(req_id)} (it is {state}); wait for it and ask again"
    return LifecycleError("embedding_not_ready", text, retry_after=1.0, state=str(state))
