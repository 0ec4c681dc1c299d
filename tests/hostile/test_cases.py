"""Each case is a test; see `cases.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.__main__ import run_one
from tests.hostile.cases import Case
from tests.hostile.servers import Servers, running
from tests.hostile.situations import CASES, ELSEWHERE, SITUATIONS, cases_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with running() as made:
        yield made


#: a quarter of a minute and more each: `python -m tests.hostile` has them, too
SLOW = {"L14", "H1", "S7"}


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in SLOW], ids=lambda case: case.name)
def test_case(case: Case, servers: Servers) -> None:
    result = run_one(case, servers)
    assert result["holds"], f"{case.what}: expected {case.expected!r}, got {result['got']!r}"


def test_every_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_situation_is_a_case_or_shown_elsewhere(situation: str) -> None:
    assert bool(cases_of(situation)) != (situation in ELSEWHERE)
    if situation in ELSEWHERE:
        path, _, name = ELSEWHERE[situation][0].partition("::")
        assert f"def {name}" in (ROOT / path).read_text()
