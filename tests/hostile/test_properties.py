"""Every fuzz target on its seeds, on what fuzzing found before, and on some inputs that are nearly right (`make fuzz`: many)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz.seeds import SEEDS
from fuzz.strategies import STRATEGIES
from fuzz.targets import TARGETS

FOUND = Path(__file__).parents[2] / "fuzz" / "found"
EACH = pytest.mark.parametrize("name", TARGETS)


def test_every_target_has_seeds_and_a_strategy() -> None:
    assert set(TARGETS) == set(SEEDS) == set(STRATEGIES)


@EACH
def test_seeds_and_former_findings(name: str) -> None:
    found = [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
    for data in [*SEEDS[name], *found]:
        TARGETS[name](data)


@EACH
def test_inputs_that_are_nearly_right(name: str) -> None:
    @settings(max_examples=100, deadline=5000, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(STRATEGIES[name])
    def check(data: bytes) -> None:
        TARGETS[name](data)

    check()
