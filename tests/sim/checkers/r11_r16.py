"""R11 time, R12 outcomes, R13 cancelling, R14 limits, R15 neighbours, R16 rest."""

from __future__ import annotations

from tests.sim.checkers.base import Checker
from tests.sim.world import Life, Step, World


class Time(Checker):
    """R11: the time to live runs from the last activity; an active send holds the sweep off; nobody is overdue."""

    rule = "R11"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        for ended in step.all(E.Ended):
            life = world.lives[ended.life]
            if ended.reason == E.Reason.EXPIRED:
                idle = world.now - life.last_activity
                self.must(idle >= world.limits.request_ttl - 1e-6, f"expired {idle:.3f} s after its last activity")
                self.must(not life.sends, "expired during a send")
            elif ended.reason == E.Reason.DEADLINE:
                self.must(self._due(world, life) <= world.now + 1e-6, "its deadline had not passed")
        if isinstance(step.event, world.E.Tick):
            for life in world.holding():
                if life.ended is None:
                    self.must(self._due(world, life) > world.now - 1e-6, f"life {life.life} is overdue")

    def _due(self, world: World, life: Life) -> float:
        if not life.staged:
            return life.accepted_at + world.limits.encode_timeout if life.deadline is None else life.deadline
        idle = float("inf") if life.sends else life.last_activity + world.limits.request_ttl
        return min(idle, float("inf") if life.deadline is None else life.deadline)


class Outcomes(Checker):
    """R12: one outcome for each request, and every caller, receiver and waiter learns it, once."""

    rule = "R12"

    def after(self, world: World, step: Step) -> None:
        for wake in step.all(world.E.Wake):
            waiter = world.waiters[wake.waiter]
            self.must(len(waiter.answers) == 1, f"waiter {wake.waiter} was answered {len(waiter.answers)} times")
        for ended in step.all(world.E.Ended):
            for waiter in world.waiters.values():
                if waiter.life == ended.life and waiter.kind in ("caller", "wait") and not waiter.gone:
                    self.must(waiter.answers, f"life {ended.life} ended and its {waiter.kind} was not told")

        if isinstance(step.event, world.E.InputsLost) and step.life is not None and not step.was_ended:
            ended = step.first(world.E.Ended)
            waited = step.life.size is not None and not step.life.staged and step.life.stage is None
            self.must((ended is not None) == waited, "only what waits for its forward ends with its encoder")
            if ended is not None:
                self.must(ended.reason == world.E.Reason.WORKER_LOST, f"lost with its encoder, yet {ended.reason}")
                self.must(ended.error.status == 503 and ended.error.retryable, "the caller is not told to retry")

        if isinstance(step.event, world.E.GivenUp) and step.life is not None and not step.was_ended:
            ended = step.first(world.E.Ended)
            self.must((ended is not None) != step.life.staged, "rows that are there stay, and nothing else does")

    def at_end(self, world: World) -> None:
        for life in world.lives.values():
            self.must(life.ended is not None, f"life {life.life} has no outcome")
        for waiter in world.waiters.values():
            self.must(waiter.answers or waiter.gone, f"{waiter.kind} {waiter.number} waits for ever")
        for (req_id, address), told in world.receivers.items():
            self.must(told, f"the receiver at {address} never heard of {req_id}")


class Cancelling(Checker):
    """R13: whoever leaves loses nothing: what still uses memory is drained first, and the one who left is not woken."""

    rule = "R13"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        if isinstance(step.event, E.CallerLeft) and step.life is not None and step.life.used:
            self.must(step.first(E.Free) is None, "freed under a running stage or send when a caller left")
        if isinstance(step.event, (E.CallerLeft, E.WaitCancelled)):
            woken = any(wake.waiter == step.event.waiter for wake in step.all(E.Wake))
            self.must(not woken, "one who left was woken")
        for wake in step.all(E.Wake):
            if world.waiters[wake.waiter].gone:
                self.must(False, "one who left was woken")
        ended = step.first(E.Ended)
        if isinstance(step.event, E.CallerLeft) and step.life is not None and not step.was_ended:
            alone = not step.life.callers
            if alone and not world.under_way(step.life):
                self.must(ended is not None, "the last caller left and its work goes on")
            elif alone:
                self.must(ended is None or ended.reason != E.Reason.CLIENT_ABORT, "aborted with its rows on their way")
            elif ended is not None:
                self.must(ended.reason != E.Reason.CLIENT_ABORT, "one caller left and took the others' request along")


class Limits(Checker):
    """R14: limits are checked at the door: 503 with Retry-After, and never exceeded; accepted + refused = sent."""

    rule = "R14"

    def after(self, world: World, step: Step) -> None:
        limits, E = world.limits, world.E
        if world.held_bytes() > limits.max_staged_bytes:
            self.must(False, f"{world.held_bytes()} bytes are held")
        if world.queued_patches() > limits.max_queued_patches:
            self.must(False, f"{world.queued_patches()} patches are queued")
        if len(world.holding()) > limits.max_live_requests:
            self.must(False, f"{len(world.holding())} requests live")
        if not isinstance(step.event, world.E.Accept):
            return
        answer = step.first(E.Admit, E.Refuse)
        self.must(answer is not None, "sent, but neither accepted nor refused")
        if isinstance(answer, E.Refuse) and answer.error.code == "overloaded":
            full = (
                len(world.holding()) >= limits.max_live_requests
                or world.queued_patches() >= limits.max_queued_patches
                or world.held_bytes() >= limits.max_staged_bytes
            )
            self.must(full, "refused as overloaded, but nothing is full")
            self.must(answer.error.status == 503 and answer.error.retry_after, "no Retry-After")


class Neighbours(Checker):
    """R15: one request's failure never touches another."""

    rule = "R15"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        if not isinstance(step.event, (E.Failed, E.GivenUp, E.SendFailed)) or step.life is None:
            return
        mine = {w.number for w in world.waiters.values() if w.life == step.life.life}
        for effect in step.effects:
            if isinstance(effect, (E.Ended, E.Free, E.StartSend)):
                self.must(effect.life == step.life.life, f"life {step.life.life} failed and life {effect.life} felt it")
            elif isinstance(effect, E.Wake):
                self.must(effect.waiter in mine, "somebody else's waiter was woken by a failure")


class Rest(Checker):
    """R16: when all have ended, nothing is held: no bytes, no patches, no request, no waiter, no buffer."""

    rule = "R16"

    def at_end(self, world: World) -> None:
        ledger = world.ledger
        self.must(len(ledger) == 0, f"{len(ledger)} requests are still in the registry")
        self.must(ledger.staged_bytes == 0, f"{ledger.staged_bytes} staged bytes are left")
        self.must(ledger.queued_patches == 0, f"{ledger.queued_patches} queued patches are left")
        self.must(not ledger._waiting and not ledger._orphans, "somebody is still remembered as waiting")
        self.must(all(owner is None for owner in world.buffers.values()), "a buffer was never given back")
        self.must(len(ledger._timers) <= 64 + 4, f"{len(ledger._timers)} timers are left")


CHECKERS = [Time, Outcomes, Cancelling, Limits, Neighbours, Rest]
