"""R6 metadata, R7 tombstones, R8 duplicates, R9 counting destinations, R10 delivered."""

from __future__ import annotations

from tests.sim.checkers.base import Checker
from tests.sim.world import Step, World


class MetadataPublished(Checker):
    """R6: metadata is published after preprocessing; those who waited wake, on failure with the original error."""

    rule = "R6"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        woken = {wake.waiter: wake for wake in step.all(E.Wake)}
        if isinstance(step.event, E.Prepared) and step.life is not None and step.life.queued:
            for waiter in step.waiters_before:
                if waiter.milestone is E.Milestone.METADATA:
                    wake = woken.get(waiter.number)
                    self.must(wake is not None and wake.metadata is step.event.metadata, "a metadata waiter sleeps on")
        given_up = isinstance(step.event, E.GivenUp) and step.life is not None and not step.life.staged
        if (isinstance(step.event, E.Failed) or given_up) and not step.was_ended:
            for waiter in step.waiters_before:
                if waiter.kind != "register":
                    wake = woken.get(waiter.number)
                    self.must(
                        wake is not None and wake.error is step.event.error,
                        "a waiter did not get the stage's own error",
                    )
        if isinstance(step.event, E.Encoded) and not step.was_ended:
            for waiter in step.waiters_before:
                if waiter.milestone is E.Milestone.STAGED:
                    self.must(waiter.number in woken, "a waiter for the rows sleeps on")


class Tombstones(Checker):
    """R7: after release, late sends, waits and registrations are answered at once, for a bounded time and number."""

    rule = "R7"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        held = len(world.ledger._tombstones)
        if held > world.limits.max_tombstones:
            self.must(False, f"{held} tombstones are held")
        if not isinstance(step.event, (E.Wait, E.Register, E.Pull)) or step.life is not None:
            return
        answer = step.first(E.Wake, E.Refuse)
        if step.grave is not None:
            self.must(
                answer is not None and answer.error is not None, f"{step.event.req_id} was released, nobody says so"
            )
            if step.grave[0] is None or step.grave[0].reason not in (E.Reason.ENCODE_FAILED, E.Reason.SEND_FAILED):
                self.must(answer.error.code == "request_released", f"answered with {answer.error.code}")
        elif answer is not None and answer.error is not None:
            self.must(answer.error.code == "request_not_found", f"forgotten or unseen, yet {answer.error.code}")


class Duplicates(Checker):
    """R8: a live id with the same content joins; with other content it gets 409, and the first is untouched."""

    rule = "R8"

    def after(self, world: World, step: Step) -> None:
        if not isinstance(step.event, world.E.Accept) or step.life is None or step.is_new:
            return
        answer = step.first(world.E.Admit, world.E.Refuse)
        if step.event.fingerprint == step.life.fingerprint:
            self.must(isinstance(answer, world.E.Admit) and answer.joined, "the same content did not join")
            self.must(answer.life == step.life.life, "joined another life")
        else:
            refused = isinstance(answer, world.E.Refuse) and answer.error.status == 409
            self.must(refused, "other content was not refused with 409")
            self.must(len(step.effects) == 1, "the first was touched")


class CountedByAddress(Checker):
    """R9: a destination counts once however often it registers, and is sent to once."""

    rule = "R9"

    def after(self, world: World, step: Step) -> None:
        for effect in step.all(world.E.StartSend):
            life = world.lives[effect.life]
            self.must(effect.address not in life.confirmed, f"{effect.address} is sent what it has")
            self.must(life.sends.count(effect.address) == 1, f"{effect.address} is sent to twice at once")
        ended = step.first(world.E.Ended)
        if ended is not None and ended.reason == world.E.Reason.DELIVERED:
            life = world.lives[ended.life]
            self.must(
                not life.registered - life.confirmed, "released as delivered, but a registered receiver has no rows"
            )


class Delivered(Checker):
    """R10: delivered means that every expected destination confirmed; then released, without waiting for a sweep."""

    rule = "R10"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        ended = step.first(E.Ended)
        if ended is not None and ended.reason in (E.Reason.DELIVERED, E.Reason.PULLED):
            life = world.lives[ended.life]
            missing = world.without_copy(life)
            self.must(not missing and not life.lost, f"released as {ended.reason}, yet without a copy: {missing}")
        if isinstance(step.event, (E.SendConfirmed, E.SendFailed)) and step.life is not None and not step.was_ended:
            settled = world.settled(step.life) and (not step.life.lost or not step.life.sends)
            self.must((ended is not None) == settled, f"settled={settled}, released={ended is not None}")
            if ended is not None and step.life.lost:
                self.must(ended.reason == E.Reason.SEND_FAILED, "a lost destination is called delivered")


CHECKERS = [MetadataPublished, Tombstones, Duplicates, CountedByAddress, Delivered]
