"""What a checker is."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.sim.world import Step, World


class ViolationError(AssertionError):
    """A rule was broken."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Checker:
    """Watches one rule. `count` says how often it was checked where it could have been broken."""

    rule: ClassVar[str]

    def __init__(self) -> None:
        self.count = 0

    def after(self, world: World, step: Step) -> None:
        """Called after every step."""

    def at_end(self, world: World) -> None:
        """Called when everything has come to rest."""

    def must(self, holds: Any, text: str) -> None:
        """One non-trivial check."""
        self.count += 1
        if not holds:
            raise ViolationError(self.rule, text)
