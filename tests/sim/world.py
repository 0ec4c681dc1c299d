"""An honest shell around the pure ledger, with a model of its own: memory, callers, receivers, waiters.

The world carries effects out and remembers what happened; it never looks into the ledger's own books, so that the
checkers compare two independent accounts. Rows lie in numbered buffers that are handed out again as soon as they are
freed: whoever still reads one then finds another life's rows in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tectum.errors import TectumError
from tectum.lifecycle import events
from tectum.lifecycle import ledger as ledger_module


class Size(NamedTuple):
    """Metadata as far as the core reads it."""

    nbytes: int
    patches: int


@dataclass
class Life:
    """What the world knows of one life."""

    life: int
    req_id: str
    fingerprint: bytes
    accepted_at: float
    deadline: float | None
    stage: str | None = None  # "prepare" or "encode" while one is open
    size: Size | None = None
    queued: bool = False
    staged: bool = False
    buffer: int | None = None
    sends: list[Any] = field(default_factory=list)  # open, by address
    callers: dict[int, str] = field(default_factory=dict)  # waiter -> inline, hold or push; all that have not left
    read: set[int] = field(default_factory=set)  # inline callers that have their rows
    pulled_at: int = -1  # step of the last whole pull
    held_at: int = -1  # step of the last caller that asked to hold the rows
    registered: set[str] = field(default_factory=set)
    declared: int = 0
    confirmed: set[Any] = field(default_factory=set)
    lost: dict[str, TectumError] = field(default_factory=dict)
    last_activity: float = 0.0
    ended: Any = None  # the Ended effect
    ended_at: float = 0.0
    freed: bool = False

    @property
    def used(self) -> bool:
        return self.stage is not None or bool(self.sends)


@dataclass
class Waiter:
    """Somebody who waits: a caller, a metadata wait or a registration."""

    number: int
    kind: str
    req_id: str
    milestone: Any = None
    life: int | None = None
    until: float | None = None
    delivery: Any = None  # of a caller
    expected: int = 0  # of a registration
    addresses: tuple[str, ...] = ()  # of a registration
    gone: bool = False
    took: bool = False  # of a caller: it asked for its answer
    answers: list[Any] = field(default_factory=list)


@dataclass
class Step:
    """One event, what followed, and when."""

    number: int
    now: float
    event: Any
    effects: list[Any]
    life: Life | None  # the life the event was about, as it is after the event
    was_ended: bool  # whether that life had ended before the event
    waiters_before: tuple[Waiter, ...]  # who waited on that life before the event
    grave: tuple[Any, float] | None  # what was remembered of the event's id
    is_new: bool  # whether the event began the life

    def first(self, *kinds: type) -> Any:
        return next((effect for effect in self.effects if isinstance(effect, kinds)), None)

    def all(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


class World:
    """One run. `ledger` is the module under test (a mutant replaces it)."""

    def __init__(self, limits: Any, checkers: Iterable[Any], ledger: Any = ledger_module) -> None:
        self.E = events
        self.limits = limits
        self.ledger = ledger.Ledger(limits)
        self.now = 0.0
        self.lives: dict[int, Life] = {}
        self.by_id: dict[str, Life] = {}
        self.waiters: dict[int, Waiter] = {}
        self.buffers: dict[int, int | None] = {}  # buffer -> life whose rows it holds
        self.receivers: dict[tuple[str, str], list[str]] = {}  # (id, address) -> what it was told
        self.graves: dict[str, tuple[Any, float]] = {}  # released id -> (Ended, or None for one never seen; when)
        self.closing = False
        self.steps = 0
        self.sent = self.accepted = self.refused = 0
        self.trace: list[tuple[float, Any, list[Any]]] = []
        self.checkers = list(checkers)
        self._next_waiter = 1

    # --- events ---

    def apply(self, event: Any) -> Step:
        life = self._life_of(event)
        was_ended = life is not None and life.ended is not None
        before = tuple(
            w
            for w in self.waiters.values()
            if life is not None and w.life == life.life and not w.answers and not w.gone
        )
        grave = self.grave(getattr(event, "req_id", ""))
        effects = self.ledger.handle(event, self.now)
        self.trace.append((self.now, event, effects))
        self.steps += 1
        begun = self._carry_asked(event, effects) if life is None else None
        is_new, life = begun is not None, begun or life
        if life is not None:
            self._model(event, effects, life)
        for effect in effects:
            self._carry(effect, life)
        step = Step(self.steps, self.now, event, effects, life, was_ended, before, grave, is_new)
        released_unseen = isinstance(event, self.E.Release) and life is None and grave is None
        if released_unseen:
            self.bury(event.req_id, None)
        for checker in self.checkers:
            checker.after(self, step)
        return step

    def advance(self, seconds: float) -> None:
        """Let time pass, with a Tick whenever the ledger asked for one."""
        target = self.now + seconds
        while (due := self.ledger.next_due()) is not None and due <= target:
            self.now = max(self.now, due)
            self.apply(self.E.Tick())
        self.now = target

    def new_waiter(self, kind: str, req_id: str, **facts: Any) -> Waiter:
        waiter = Waiter(self._next_waiter, kind, req_id, **facts)
        self._next_waiter += 1
        self.waiters[waiter.number] = waiter
        return waiter

    # --- the model ---

    def _life_of(self, event: Any) -> Life | None:
        if hasattr(event, "life"):
            return self.lives.get(event.life)
        return self.by_id.get(getattr(event, "req_id", ""))

    def _carry_asked(self, event: Any, effects: list[Any]) -> Life | None:
        """A new life begins."""
        admitted = next((effect for effect in effects if isinstance(effect, self.E.Admit)), None)
        if not isinstance(event, self.E.Accept) or admitted is None:
            return None
        life = Life(admitted.life, event.req_id, event.fingerprint, self.now, event.deadline)
        self.lives[life.life] = self.by_id[event.req_id] = life
        self.graves.pop(event.req_id, None)
        for waiter in self.waiters.values():
            early = waiter.req_id == event.req_id and waiter.life is None and not waiter.answers and not waiter.gone
            if early and waiter.kind != "caller":
                waiter.life = life.life
                life.registered.update(waiter.addresses)
                life.declared = max(life.declared, waiter.expected)
        return life

    def _model(self, event: Any, effects: list[Any], life: Life) -> None:  # noqa: C901 - one case an event
        E = self.E
        admitted = any(isinstance(effect, E.Admit) for effect in effects)
        if not isinstance(event, (E.Wait, E.Tick)) and not (isinstance(event, E.Accept) and not admitted):
            life.last_activity = self.now
        match event:
            case E.Accept() if admitted:
                life.callers[event.waiter] = event.delivery
                if event.delivery == E.Delivery.HOLD:
                    life.held_at = self.steps
                self.waiters[event.waiter].life = life.life
            case E.Register() if admitted:
                self._registered(life, event.addresses, event.expected)
            case E.PrepareStarted() if admitted:
                life.stage = "prepare"
            case E.EncodeStarted() if admitted:
                life.stage, life.queued = "encode", False
            case E.Prepared():
                life.stage = None
                if not any(isinstance(e, E.Ended) for e in effects) and life.ended is None:
                    life.size, life.queued = event.metadata, True
            case E.Encoded():
                life.stage = None
                self._stage(life)
            case E.Failed() | E.GivenUp():
                life.stage = None
            case E.Pull() if admitted:
                life.sends.append(event.address)
            case E.TakeAnswer() if admitted and life.callers[event.waiter] == E.Delivery.INLINE:
                life.sends.append(event.waiter)
            case E.SendConfirmed():
                life.sends.remove(event.address)
                if event.address in self.waiters:
                    life.read.add(event.address)
                if event.reason == E.Reason.PULLED:
                    life.pulled_at = self.steps
                life.confirmed.add(event.address)
                life.lost.pop(event.address, None)
                self._tell(life.req_id, event.address, "rows")
            case E.SendFailed():
                life.sends.remove(event.address)
                if event.final and event.address not in life.confirmed:
                    life.lost[event.address] = event.error
                    self._tell(life.req_id, event.address, "failed")
            case E.CallerLeft():
                self.waiters[event.waiter].gone = True
                if event.waiter in life.callers and life.ended is None:
                    del life.callers[event.waiter]

    def _registered(self, life: Life, addresses: Iterable[str], expected: int) -> None:
        for address in addresses:
            life.lost.pop(address, None)
            life.registered.add(address)
            self.receivers.setdefault((life.req_id, address), [])
        life.declared = max(life.declared, expected)

    def _stage(self, life: Life) -> None:
        """Rows are written into the first free buffer, whether or not anybody still wants them."""
        free = [number for number, owner in self.buffers.items() if owner is None]
        life.buffer = free[0] if free else len(self.buffers)
        self.buffers[life.buffer] = life.life
        life.staged = True

    def _carry(self, effect: Any, about: Life | None) -> None:
        E = self.E
        match effect:
            case E.Wake():
                self.waiters[effect.waiter].answers.append(effect)
            case E.StartSend():
                self.lives[effect.life].sends.append(effect.address)
            case E.Notify():
                self._tell(effect.req_id, effect.address, "error")
            case E.Ended():
                life = self.lives[effect.life]
                if life.ended is None:
                    life.ended, life.ended_at = effect, self.now
                life.queued = False
                if self.by_id.get(life.req_id) is life:
                    del self.by_id[life.req_id]
                self.bury(life.req_id, effect)
            case E.Free():
                life = self.lives[effect.life]
                life.freed = True
                if life.buffer is not None:
                    self.buffers[life.buffer] = None

    def _tell(self, req_id: str, address: str, what: str) -> None:
        if (req_id, address) in self.receivers:
            self.receivers[(req_id, address)].append(what)

    def bury(self, req_id: str, ended: Any) -> None:
        """Remember a released id: the newest ones, as many as the limits say."""
        self.graves.pop(req_id, None)
        self.graves[req_id] = (ended, self.now)
        while len(self.graves) > self.limits.max_tombstones:
            del self.graves[next(iter(self.graves))]

    # --- what the checkers ask ---

    def grave(self, req_id: str) -> tuple[Any, float] | None:
        """What must be remembered of `req_id` now, if anything: (Ended or None, when)."""
        found = self.graves.get(req_id)
        return found if found is not None and self.now < found[1] + self.limits.tombstone_ttl else None

    def without_copy(self, life: Life) -> list[str]:
        """Who was to have a copy and has none, lost receivers left out: callers by their number, receivers by address."""
        deliveries = self.E.Delivery
        missing = [
            f"inline caller {number}"
            for number, delivery in life.callers.items()
            if delivery == deliveries.INLINE and number not in life.read
        ]
        if deliveries.HOLD in life.callers.values() and life.pulled_at < life.held_at:
            missing.append("whoever pulls the held rows")
        if deliveries.PUSH in life.callers.values() and not life.registered:
            missing.append("a receiver that is to register")
        done = life.confirmed | set(life.lost)
        missing += [f"receiver {address}" for address in life.registered - done]
        missing += ["a receiver that is announced"] * (life.declared - len(life.registered))
        return missing

    def settled(self, life: Life) -> bool:
        """Everybody who was to have a copy has it, or is lost for good."""
        return bool(life.confirmed or life.lost) and not self.without_copy(life)

    def under_way(self, life: Life) -> bool:
        """Receivers are known, and each of those that lack rows, announced ones too, is being sent to."""
        lacking = life.registered - life.confirmed - set(life.lost)
        return bool(life.registered) and life.declared <= len(life.registered) and lacking <= set(life.sends)

    def queued_patches(self) -> int:
        return sum(life.size.patches for life in self.lives.values() if life.queued and life.size)

    def held_bytes(self) -> int:
        return sum(life.size.nbytes for life in self.lives.values() if life.size and not life.freed)

    def holding(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.freed]
