"""Pure level: run programs against the ledger, shrink what fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType

from tectum.lifecycle import ledger as ledger_module
from tests.sim.checkers import ViolationError, all_checkers
from tests.sim.program import Action, come_to_rest, perform, random_program
from tests.sim.world import World

#: tight enough that random programs reach every one of them
LIMITS = {
    "max_live_requests": 4,
    "max_queued_patches": 600,
    "max_staged_bytes": 600,
    "encode_timeout": 30.0,
    "request_ttl": 20.0,
    "unknown_id_wait": 4.0,
    "tombstone_ttl": 25.0,
    "max_tombstones": 3,
}


@dataclass
class Result:
    """One program's run."""

    steps: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    rule: str | None = None
    trace: list[str] = field(default_factory=list)


def run_program(program: list[Action], ledger: ModuleType = ledger_module) -> Result:
    """Run one program with every checker on. A crash of the core is a failure too."""
    checkers = all_checkers()
    world = World(ledger.Limits(**LIMITS), checkers, ledger)
    result = Result()
    try:
        for action in program:
            perform(world, action)
        come_to_rest(world)
        for checker in checkers:
            checker.at_end(world)
    except ViolationError as violation:
        result.failure, result.rule = str(violation), violation.rule
    except Exception as error:
        result.failure, result.rule = f"crash: {type(error).__name__}: {error}", "crash"
    result.steps = world.steps
    for checker in checkers:
        result.coverage[checker.rule] += checker.count
    if result.failure:
        result.trace = [
            f"{now:8.2f}  {event}\n" + "".join(f"            -> {e}\n" for e in effects)
            for now, event, effects in world.trace
        ]
    return result


def run_seed(seed: int, ledger: ModuleType = ledger_module) -> Result:
    return run_program(random_program(seed), ledger)


def shrink(program: list[Action], rule: str | None) -> list[Action]:
    """The shortest program found, by leaving out ever smaller pieces, that still breaks the same rule."""
    size = max(len(program) // 2, 1)
    while size:
        start = 0
        while start < len(program):
            shorter = program[:start] + program[start + size :]
            if run_program(shorter).rule == rule:
                program = shorter
            else:
                start += size
        size //= 2
    return program
