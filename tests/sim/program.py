"""Random programs for the pure ledger: lists of small actions that stay valid when any of them is left out.

An action is (name, numbers…). Numbers pick among what there is at that moment (modulo), so that a program shrinks by
deleting actions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tectum.errors import DeliveryError, InternalError, LifecycleError
from tectum.lifecycle.events import Delivery, Milestone
from tests.sim.world import Life, Size, Waiter, World

Action = tuple[Any, ...]

IDS = 4
#: what a caller waits for
MILESTONE = {
    Delivery.INLINE: Milestone.STAGED,
    Delivery.HOLD: Milestone.STAGED,
    Delivery.PUSH: Milestone.ENDED,
}
ADDRESSES = 3

#: name → (weight, how many numbers it takes)
ACTIONS: dict[str, tuple[int, int]] = {
    "accept": (16, 5),
    "prepare": (14, 1),
    "prepared": (14, 3),
    "encode": (12, 1),
    "encoded": (12, 1),
    "fail": (4, 2),
    "lose": (3, 1),
    "give_up": (2, 2),
    "pull": (8, 1),
    "take": (8, 1),
    "send_ok": (10, 1),
    "send_fail": (5, 2),
    "register": (8, 4),
    "wait": (6, 3),
    "leave": (4, 1),
    "unwait": (2, 1),
    "release": (4, 2),
    "release_life": (3, 2),
    "advance": (8, 1),
    "close": (0, 1),
}


#: from the door to staged rows
WALK = ("accept", "prepare", "prepared", "encode", "encoded")
#: actions whose first number picks an id
BY_ID = frozenset({"accept", "pull", "register", "wait", "release"})


def random_program(seed: int, length: int = 60) -> list[Action]:
    rng = random.Random(seed)
    names = [name for name, (weight, _) in ACTIONS.items() if weight]
    weights = [ACTIONS[name][0] for name in names]
    program: list[Action] = []
    narrow = rng.random() < 0.3  # all is about one id, which begins staged: deep histories of a single life
    for name in rng.choices(names, weights, k=rng.randrange(8, length)):
        numbers = [rng.randrange(1 << 16) for _ in range(ACTIONS[name][1])]
        if narrow and name in BY_ID:
            numbers[0] = 0
        program.append((name, *numbers))
    if narrow:
        program[:0] = [(name, *([0] * ACTIONS[name][1])) for name in WALK]
    if rng.random() < 0.2:
        program.insert(rng.randrange(len(program)), ("close", rng.randrange(2)))
    return program


def perform(world: World, action: Action) -> None:
    """Do one action, where there is something to do it to."""
    name, *numbers = action
    DO[name](world, *numbers)


def _pick(candidates: list[Any], number: int) -> Any | None:
    return candidates[number % len(candidates)] if candidates else None


def _lives(world: World, which: Callable[[Life], bool]) -> list[Life]:
    return [life for life in world.lives.values() if not life.freed and which(life)]


def _accept(world: World, req: int, content: int, kind: int, deadline: int, _: int) -> None:
    req_id, fingerprint = f"r{req % IDS}", b"other" if content % 4 == 3 else b"content"
    delivery = list(world.E.Delivery)[kind % 3]
    waiter = world.new_waiter("caller", req_id, delivery=delivery, milestone=MILESTONE[delivery])
    until = world.now + 1 + deadline % 40 if deadline % 5 == 1 else None
    step = world.apply(world.E.Accept(req_id, fingerprint, waiter.number, delivery, until))
    world.sent += 1
    if step.first(world.E.Refuse) is not None:
        world.refused += 1
        waiter.answers.append(step.first(world.E.Refuse))
    else:
        world.accepted += 1


def _prepare(world: World, number: int) -> None:
    ready = [life for life in world.lives.values() if life.stage is None and life.size is None]
    life = _pick([life for life in ready if not life.freed or number % 3 == 0], number)
    if life is not None:
        world.apply(world.E.PrepareStarted(life.life))


def _prepared(world: World, number: int, nbytes: int, patches: int) -> None:
    life = _pick(_lives(world, lambda life: life.stage == "prepare"), number)
    if life is not None:
        world.apply(world.E.Prepared(life.life, Size(1 + nbytes % 400, 1 + patches % 400)))


def _encode(world: World, number: int) -> None:
    life = _pick([x for x in world.lives.values() if x.size and x.stage is None and not x.staged], number)
    if life is not None:
        world.apply(world.E.EncodeStarted(life.life))


def _encoded(world: World, number: int) -> None:
    life = _pick(_lives(world, lambda life: life.stage == "encode"), number)
    if life is not None:
        world.apply(world.E.Encoded(life.life))


def _fail(world: World, number: int, kind: int) -> None:
    life = _pick(_lives(world, lambda life: life.stage is not None), number)
    if life is not None:
        reason = world.E.Reason.WORKER_LOST if kind % 3 == 0 else world.E.Reason.ENCODE_FAILED
        world.apply(world.E.Failed(life.life, InternalError("encode_failed", f"stage {kind}"), reason))


def _lose(world: World, number: int) -> None:
    """The encoder that prepared a request dies, whatever became of the request since."""
    life = _pick([life for life in world.lives.values() if life.size], number)
    if life is not None:
        world.apply(world.E.InputsLost(life.life))


def _give_up(world: World, number: int, kind: int) -> None:
    """A defect ends the work on a request that was prepared, whatever became of it since."""
    life = _pick([life for life in world.lives.values() if life.size], number)
    if life is not None:
        world.apply(world.E.GivenUp(life.life, InternalError("encode_failed", f"defect {kind}")))


def _pull(world: World, req: int) -> None:
    world.apply(world.E.Pull(f"r{req % IDS}", f"pull:{world.steps}"))


def _answered(world: World) -> list[Waiter]:
    """Callers that were woken with an answer and have not taken it: also those that come too late."""
    return [
        waiter
        for waiter in world.waiters.values()
        if waiter.kind == "caller"
        and not waiter.gone
        and not waiter.took
        and waiter.life is not None
        and waiter.answers
        and waiter.answers[0].error is None
        and waiter.delivery != world.E.Delivery.PUSH
    ]


def _take(world: World, number: int) -> None:
    waiter = _pick(_answered(world), number)
    if waiter is not None:
        waiter.took = True
        world.apply(world.E.TakeAnswer(waiter.req_id, waiter.life, waiter.number))


def _sending(world: World, number: int) -> tuple[Life, str] | None:
    return _pick([(life, address) for life in world.lives.values() for address in life.sends], number)


def _send_ok(world: World, number: int) -> None:
    found = _sending(world, number)
    if found is not None:
        life, address = found
        reason = world.E.Reason.PULLED if str(address).startswith("pull") else world.E.Reason.DELIVERED
        world.apply(world.E.SendConfirmed(life.life, address, reason))


def _send_fail(world: World, number: int, kind: int) -> None:
    found = _sending(world, number)
    if found is not None:
        life, address = found
        final = str(address).startswith("a")
        world.apply(world.E.SendFailed(life.life, address, DeliveryError("send_failed", f"send {kind}"), final))
        if address in world.waiters:  # an inline caller that did not get its rows is gone
            world.apply(world.E.CallerLeft(life.life, address))


def _register(world: World, req: int, first: int, several: int, expected: int) -> None:
    req_id = f"r{req % IDS}"
    addresses = tuple(f"a{(first + i) % ADDRESSES}" for i in range(1 + several % 2))
    count = expected % 3
    live = world.by_id.get(req_id)
    waiter = world.new_waiter(
        "register", req_id, expected=count, addresses=addresses, life=None if live is None else live.life
    )
    known = {address: (req_id, address) in world.receivers for address in addresses}
    for address in addresses:
        world.receivers.setdefault((req_id, address), [])
    step = world.apply(world.E.Register(req_id, addresses, count, waiter.number))
    if step.first(world.E.Refuse) is not None:
        waiter.answers.append(step.first(world.E.Refuse))
        for address, was_known in known.items():
            if not was_known:
                world.receivers[(req_id, address)].append("refused")


def _wait(world: World, req: int, milestone: int, seconds: int) -> None:
    req_id = f"r{req % IDS}"
    wanted = list(world.E.Milestone)[milestone % 3]
    waiter = world.new_waiter("wait", req_id, milestone=wanted, until=world.now + seconds % 20)
    live = world.by_id.get(req_id)
    waiter.life = None if live is None else live.life
    world.apply(world.E.Wait(req_id, waiter.number, wanted, waiter.until))


def _leave(world: World, number: int) -> None:
    """A caller hangs up before it has its answer whole: while it waits, or a holder while it is answered."""
    waiting = [w for w in world.waiters.values() if w.kind == "caller" and not w.gone and w.life and not w.answers]
    held = [w for w in _answered(world) if w.delivery == world.E.Delivery.HOLD]
    waiter = _pick(waiting + held, number)
    if waiter is not None:
        waiter.took = True
        world.apply(world.E.CallerLeft(waiter.life, waiter.number))


def _unwait(world: World, number: int) -> None:
    waiter = _pick([w for w in world.waiters.values() if w.kind == "wait" and not w.gone and not w.answers], number)
    if waiter is not None:
        waiter.gone = True
        world.apply(world.E.WaitCancelled(waiter.number))


def _release(world: World, req: int, kind: int) -> None:
    reason = (world.E.Reason.CLIENT_RELEASE, world.E.Reason.CLIENT_ABORT)[kind % 2]
    world.apply(world.E.Release(f"r{req % IDS}", reason))


def _release_life(world: World, number: int, kind: int) -> None:
    reason = (world.E.Reason.CLIENT_ABORT, world.E.Reason.WORKER_LOST)[kind % 2]
    life = _pick(list(world.lives.values()), number)
    if life is not None:
        world.apply(world.E.ReleaseAsked(life.life, reason))


def _advance(world: World, tenths: int) -> None:
    world.advance((tenths % 120 if tenths % 3 else tenths % 260) / 10)


def _close(world: World, hard: int) -> None:
    world.closing = True
    world.apply(world.E.Close(bool(hard)))


DO: dict[str, Callable[..., None]] = {
    "accept": _accept,
    "prepare": _prepare,
    "prepared": _prepared,
    "encode": _encode,
    "encoded": _encoded,
    "fail": _fail,
    "lose": _lose,
    "give_up": _give_up,
    "pull": _pull,
    "take": _take,
    "send_ok": _send_ok,
    "send_fail": _send_fail,
    "register": _register,
    "wait": _wait,
    "leave": _leave,
    "unwait": _unwait,
    "release": _release,
    "release_life": _release_life,
    "advance": _advance,
    "close": _close,
}


def come_to_rest(world: World) -> None:
    """End every stage and send honestly, and let time do the rest."""
    for life in list(world.lives.values()):
        if life.stage == "prepare":
            world.apply(world.E.Failed(life.life, LifecycleError("deadline_exceeded", "at rest")))
        elif life.stage == "encode":
            world.apply(world.E.Encoded(life.life))
    while (found := _sending(world, 0)) is not None:
        world.apply(world.E.SendConfirmed(found[0].life, found[1]))
    limits = world.limits
    for _ in range(4):
        world.advance(limits.encode_timeout + limits.request_ttl + limits.unknown_id_wait + 60)
        while (found := _sending(world, 0)) is not None:
            world.apply(world.E.SendConfirmed(found[0].life, found[1]))
