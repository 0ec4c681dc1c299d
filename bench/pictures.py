"""Distinct JPEG pictures of one size, the same in every process."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def jpegs(side: int, count: int) -> list[bytes]:
    """`count` smooth random pictures of `side` × `side` pixels, as JPEG at quality 90."""
    made = []
    for seed in range(count):
        small = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made
