"""A bounded slice of the simulation, and the proof that it can fail."""

from __future__ import annotations

from itertools import permutations

import pytest

from tectum.lifecycle import events as E
from tectum.lifecycle.ledger import Limits
from tests.sim import pure, shell
from tests.sim.checkers import all_checkers
from tests.sim.mutants import MUTANTS, hunt, source
from tests.sim.world import Size, World

RULES = {f"R{number}" for number in range(1, 17)}


@pytest.mark.parametrize(("run_seed", "seeds"), [(pure.run_seed, 4000), (shell.run_seed, 400)], ids=["pure", "shell"])
def test_no_seed_breaks_a_rule(run_seed, seeds):
    checked = set()
    for seed in range(seeds):
        result = run_seed(seed)
        assert not result.failure, f"seed {seed}: {result.failure}"
        checked |= {rule for rule, count in result.coverage.items() if count}
    assert checked == RULES, "a rule was never really checked"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_every_planted_bug_is_caught(mutant):
    assert source(mutant.file).count(mutant.old) == 1, "the line to change is gone, or there are several"
    assert hunt(mutant, 10_000)["caught"], "the simulator does not see this bug"


def test_a_seed_replays_exactly():
    assert shell.run_seed(7).trace == shell.run_seed(7).trace
    assert pure.run_seed(7).coverage == pure.run_seed(7).coverage


#: an operation and the one that must come before it
OPERATIONS = {
    "encode": None,
    "encoded": "encode",
    "send a": None,
    "sent a": "send a",
    "send b": None,
    "sent b": "send b",
    "release": None,
    "expire": None,
}


def test_all_interleavings_of_two_sends_a_release_an_encode_and_an_expiry():
    """Every order that is possible, with every checker on: a model check by exhaustion."""
    orders = [
        order
        for order in permutations(OPERATIONS)
        if all(before is None or order.index(before) < order.index(name) for name, before in OPERATIONS.items())
    ]
    assert len(orders) == 5040  # 8! / 2**3
    for order in orders:
        checkers = all_checkers()
        world = World(Limits(**pure.LIMITS), checkers)
        for _ in "ab":  # two callers that read inline: waiters 1 and 2
            caller = world.new_waiter("caller", "r", milestone=E.Milestone.STAGED, delivery=E.Delivery.INLINE)
            world.apply(E.Accept("r", b"", caller.number, E.Delivery.INLINE))
        world.apply(E.PrepareStarted(1))
        world.apply(E.Prepared(1, Size(10, 10)))
        for operation in order:
            _operate(world, operation)
        _finish(world)
        for checker in checkers:
            checker.at_end(world)


def _operate(world: World, operation: str) -> None:
    life = world.lives[1]
    what, _, name = operation.partition(" ")
    caller = "ab".find(name) + 1
    if what == "encode":
        world.apply(E.EncodeStarted(1))
    elif what == "encoded" and life.stage == "encode":
        world.apply(E.Encoded(1))
    elif what == "send" and (life.staged or life.ended):  # a caller takes its answer only when it was woken
        world.apply(E.TakeAnswer("r", 1, caller))
    elif what == "sent" and caller in life.sends:
        world.apply(E.SendConfirmed(1, caller))
    elif what == "release":
        world.apply(E.ReleaseAsked(1, E.Reason.CLIENT_RELEASE))
    elif what == "expire":
        world.advance(31)


def _finish(world: World) -> None:
    for name in ("encoded", "sent a", "sent b", "expire"):
        _operate(world, name)
