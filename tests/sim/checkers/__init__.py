"""One checker a rule. Each observes events, effects and the world's model, and counts what it really checked."""

from __future__ import annotations

from tests.sim.checkers import r01_r05, r06_r10, r11_r16
from tests.sim.checkers.base import Checker, ViolationError


def all_checkers() -> list[Checker]:
    """A fresh set for one run."""
    return [cls() for module in (r01_r05, r06_r10, r11_r16) for cls in module.CHECKERS]


__all__ = ["Checker", "ViolationError", "all_checkers"]
