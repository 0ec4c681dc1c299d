"""R1 memory, R2 one release, R3 sends after release, R4 release during an encode, R5 release before it."""

from __future__ import annotations

from tests.sim.checkers.base import Checker
from tests.sim.world import Step, World


class Memory(Checker):
    """R1: memory is never freed or reused while an encode or a send uses it."""

    rule = "R1"

    def after(self, world: World, step: Step) -> None:
        for free in step.all(world.E.Free):
            self.must(not world.lives[free.life].used, f"life {free.life} was freed while it is used")
        for life in world.holding():
            if life.sends and life.buffer is not None:
                self.must(
                    world.buffers[life.buffer] == life.life, f"a send of life {life.life} reads another life's rows"
                )


class OneRelease(Checker):
    """R2: one outcome a life, one Free a life; the first reason asked for wins and is kept."""

    rule = "R2"

    def __init__(self) -> None:
        super().__init__()
        self._ended: set[int] = set()
        self._freed: set[int] = set()

    def after(self, world: World, step: Step) -> None:
        for ended in step.all(world.E.Ended):
            self.must(ended.life not in self._ended, f"life {ended.life} ended twice")
            self._ended.add(ended.life)
            asked = getattr(step.event, "reason", None)
            if isinstance(step.event, (world.E.ReleaseAsked, world.E.Failed, world.E.GivenUp, world.E.Release)):
                refused_for_size = isinstance(step.event, world.E.Prepared)
                self.must(
                    refused_for_size or ended.reason == asked,
                    f"asked to release for {asked}, released for {ended.reason}",
                )
            if len(step.all(world.E.Ended)) <= world.limits.max_tombstones:
                stone = world.ledger.tombstone(world.lives[ended.life].req_id, world.now)
                self.must(stone is not None and stone.reason == ended.reason, "the reason is not kept")
        for free in step.all(world.E.Free):
            self.must(
                free.life not in self._freed and free.life in self._ended, f"life {free.life} freed twice or alive"
            )
            self._freed.add(free.life)
        if step.was_ended and isinstance(step.event, (world.E.ReleaseAsked, world.E.Release)):
            others = [effect for effect in step.effects if not isinstance(effect, world.E.Drained)]
            self.must(not others, "a second release had an effect")


class NoSendAfterRelease(Checker):
    """R3: a send is admitted only while the request is live and nobody asked to release it; else refused at once, why."""

    rule = "R3"

    def after(self, world: World, step: Step) -> None:
        E = world.E
        if not isinstance(step.event, (E.TakeAnswer, E.Pull)):
            return
        answer = step.first(E.Admit, E.Refuse)
        self.must(answer is not None, "a send was left without an answer")
        live = step.life is not None and step.life.ended is None and step.life.staged
        self.must(isinstance(answer, E.Admit) == live, f"admitted={isinstance(answer, E.Admit)}, live={live}")
        ended, when = step.grave or (None, 0.0)
        if isinstance(step.event, E.TakeAnswer) and not live:
            if ended is None or ended.life != step.event.life:  # its own end is forgotten
                self.must(answer.error.code == "request_not_found", "told the end of another life")
                return
            code = _TOLD_WAITERS.get(str(ended.reason))
            if code is not None:  # it never stopped waiting: it hears what the others who waited heard
                self.must(answer.error.code == code, f"a caller whose request ended by {ended.reason} heard otherwise")
                return
        elif step.life is not None:
            return
        if ended is not None:
            self._says_why(answer.error, ended, world.now - when)

    def _says_why(self, error: object, ended: object, age: float) -> None:
        kept = getattr(ended, "error", None)
        if str(getattr(ended, "reason", "")) in ("encode_failed", "send_failed"):
            self.must(error.to_problem() == kept.to_problem(), "the failure's own error was replaced")  # type: ignore[attr-defined,union-attr]
            return
        details = getattr(error, "details", {})
        self.must(details.get("reason") == str(ended.reason), "the refusal does not name the reason")  # type: ignore[attr-defined]
        self.must(abs(details.get("age_s", -1) - age) < 0.01, "the refusal does not name the age")


#: what those who wait at the moment of a release are told, where its reason has a code of its own
_TOLD_WAITERS = {"deadline": "deadline_exceeded", "shutdown": "shutting_down", "worker_lost": "worker_lost"}


class ReleaseDuringEncode(Checker):
    """R4: a release during an encode takes effect when it ends; nothing is staged or sent after it."""

    rule = "R4"

    def after(self, world: World, step: Step) -> None:
        for effect in step.all(world.E.StartSend):
            self.must(world.lives[effect.life].ended is None, f"life {effect.life} is sent after its release")
        life = step.life
        if (
            life is None
            or not step.was_ended
            or not isinstance(step.event, (world.E.Encoded, world.E.Prepared, world.E.Failed))
        ):
            return
        freed = step.first(world.E.Free) is not None
        self.must(
            freed != bool(life.sends), f"life {life.life}: its last stage ended, freed={freed}, sends={life.sends}"
        )
        self.must(
            step.first(world.E.Wake, world.E.StartSend) is None, "somebody was told of rows of a released request"
        )


class ReleaseBeforeEncode(Checker):
    """R5: a release before the encode is remembered: the encode never starts."""

    rule = "R5"

    def after(self, world: World, step: Step) -> None:
        if isinstance(step.event, (world.E.PrepareStarted, world.E.EncodeStarted)) and (
            step.was_ended or step.life is None
        ):
            self.must(step.first(world.E.Refuse) is not None, "a stage started after the release")
        if isinstance(step.event, world.E.Accept):
            unborn = step.grave is not None and step.grave[0] is None
            if unborn and not step.waiters_before:
                self.must(step.first(world.E.Refuse) is not None, "an encode released beforehand was accepted")


CHECKERS = [Memory, OneRelease, NoSendAfterRelease, ReleaseDuringEncode, ReleaseBeforeEncode]
