"""Pictures to send: smooth random JPEGs, the same in every process, and as many different ones as are asked for."""

from __future__ import annotations

import io
import random
import struct
from dataclasses import dataclass

import numpy as np

from tectum.bench.plan import Plan, Size
from tectum.errors import StartupError


def jpegs(size: Size, count: int) -> list[bytes]:
    """`count` smooth random pictures as JPEG at quality 90. Raises StartupError `missing_dependency` without Pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise StartupError("missing_dependency", "Pillow is not installed; run: pip install pillow") from None

    made = []
    for seed in range(count):
        small = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        file = io.BytesIO()
        picture = Image.fromarray(small).resize((size.width, size.height), Image.Resampling.BICUBIC)
        picture.save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def distinct(jpeg: bytes, number: int) -> bytes:
    """The same picture as other bytes: with a comment (JPEG's COM segment) that holds `number`."""
    return jpeg[:2] + struct.pack(">BBHQ", 0xFF, 0xFE, 10, number) + jpeg[2:]


@dataclass(frozen=True, slots=True)
class Draw:
    """The next request: a picture's bytes, or a slow URL; seconds after which its caller hangs up, where it does."""

    size: Size
    picture: bytes | None
    url: str
    cancel_after: float | None

    @property
    def kind(self) -> str:
        return "inline" if self.picture is not None else "slow"


class Deck:
    """Draws requests as a plan mixes them; for one seed always the same ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)  # noqa: S311 - a load, not a secret
        self._weights = [size.weight for size in plan.sizes]
        self._pictures = {size: jpegs(size, plan.pictures) for size in plan.sizes}
        self._number = plan.seed << 40  # no two processes send the same one

    def draw(self) -> Draw:
        plan, chance = self._plan, self._random.random
        size = self._random.choices(plan.sizes, self._weights)[0]
        cancel = chance() * plan.cancel_within if chance() < plan.cancel_share else None
        index = self._random.randrange(plan.pictures)
        self._number += 1
        if chance() < plan.slow_share:
            return Draw(size, None, f"{plan.slow_url}/{size}/{index}?n={self._number}", cancel)
        picture = self._pictures[size][index]
        return Draw(size, picture if chance() < plan.repeat_share else distinct(picture, self._number), "", cancel)

    def interval(self, rate: float) -> float:
        """Seconds to the next arrival of a Poisson process."""
        return self._random.expovariate(rate)
