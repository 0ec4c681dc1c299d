"""What a load is made of: plain data, handed from the command to each generator process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from tectum.errors import StartupError


@dataclass(frozen=True, slots=True)
class Size:
    """Pictures of this many pixels, drawn `weight` times as often as those of weight 1."""

    width: int
    height: int
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Size:
        """`224`, `640x480` or `640x480:0.3`. Raises StartupError `invalid_settings`."""
        pixels, _, weight = text.partition(":")
        width, _, height = pixels.partition("x")
        try:
            size = cls(int(width), int(height or width), float(weight or 1))
        except ValueError:
            raise StartupError(
                "invalid_settings", f"size: {text[:40]!r} is not WIDTHxHEIGHT or WIDTHxHEIGHT:WEIGHT"
            ) from None
        if not (1 <= size.width <= 16_384 and 1 <= size.height <= 16_384 and 0 < size.weight < 1e6):
            raise StartupError("invalid_settings", f"size: {text[:40]!r} is out of range")
        return size

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True)
class Plan:
    """One load, or one process's share of it.

    clients: in a closed loop each of them sends when it has its answer. rate: in an open loop (not None) requests a second
    that arrive at random (Poisson), answered or not. Shares are between 0 and 1. slow_url: where slow pictures lie.
    cancel_within: a caller that cancels hangs up at a random moment of its first so many seconds. timeout: seconds after
    which an answer is given up. probe: no load; instead a health probe and a release in turn, every `probe` seconds.
    """

    url: str
    seconds: float = 10.0
    clients: int = 8
    rate: float | None = None
    sizes: tuple[Size, ...] = (Size(224, 224),)
    slow_share: float = 0.0
    slow_url: str = ""
    repeat_share: float = 0.0
    cancel_share: float = 0.0
    cancel_within: float = 0.1
    protocol: str = "native"
    pictures: int = 32
    timeout: float = 60.0
    token: str | None = None
    seed: int = 0
    probe: float | None = None

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Plan:
        found = json.loads(text)
        return cls(**{**found, "sizes": tuple(Size(**size) for size in found["sizes"])})

    def shares(self, processes: int) -> list[Plan]:
        """This load in equal parts, one for each of `processes`; a process without a client is not needed."""
        if self.rate is not None:
            return [replace(self, rate=self.rate / processes, seed=self.seed + i) for i in range(processes)]
        counts = [self.clients // processes + (i < self.clients % processes) for i in range(processes)]
        return [replace(self, clients=count, seed=self.seed + i) for i, count in enumerate(counts) if count]

    def describe(self) -> dict[str, Any]:
        """What the report says of the load; the token is left out."""
        facts = asdict(self)
        del facts["token"]
        return {**facts, "sizes": [f"{size}:{size.weight:g}" for size in self.sizes]}
