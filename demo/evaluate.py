"""Measure the demo's model on scenes that it was not trained on: `python -m demo.evaluate` (some minutes).

Nothing of the training is used: transformers' own `AutoProcessor`, `AutoModelForImageTextToText` and greedy `generate`, in
the checkpoint's own type. An answer counts when it is the expected one to the letter, "an orange star" included.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tectum.demo import scenes
from tectum.demo.answers import checkpoint
from tectum.demo.receiver import Receiver

#: training draws from the seeds 1000 and up, one a process
SEED = 77
#: prompts that are answered together
BATCH = 25
#: kind of question, number of pictures, most shapes a picture, and the share that is promised
CASES = (
    ("describe", 1, 2, 0.97),
    ("count", 1, 2, 0.98),
    ("color", 1, 2, 0.97),
    ("each", 2, 2, 0.92),
    ("nth", 2, 2, 0.92),
    ("count_each", 2, 2, 0.98),
    ("describe", 1, 3, None),
    ("count", 1, 3, None),
    ("each", 3, 2, None),
)


@dataclass(frozen=True, slots=True)
class Score:
    """right: exact answers of `asked`. promised: the share that should be reached, where one is promised."""

    kind: str
    pictures: int
    most_shapes: int
    right: int
    asked: int
    promised: float | None

    @property
    def share(self) -> float:
        return self.right / self.asked

    def interval(self) -> tuple[float, float]:
        """95 % interval of the share (Wilson, 1927)."""
        z, n, p = 1.96, self.asked, self.share
        center, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (center - spread) / (1 + z * z / n), (center + spread) / (1 + z * z / n)


def score(receiver: Receiver, case: tuple[str, int, int, float | None], prompts: int, quiet: bool) -> Score:
    """Prompts of one length are answered together, which needs no padding and so changes no input."""
    kind, pictures, most, promised = case
    rng, right = Random(f"{SEED} {case[:3]}"), 0
    alike: dict[tuple, list[tuple[scenes.Question, list]]] = defaultdict(list)
    for _ in range(prompts):
        asked, drawn = _draw(rng, kind, pictures, most)
        alike[asked.text, *(picture.size for picture in drawn)].append((asked, drawn))
    for group in track(list(alike.values()), f"{kind}, {pictures} picture(s)", transient=True, disable=quiet):
        for first in range(0, len(group), BATCH):
            some = group[first : first + BATCH]
            texts = [receiver.prompt(pictures, asked.text) for asked, _ in some]
            found = receiver.answers_in_one_piece(texts, [drawn for _, drawn in some])
            right += sum(text == asked.answer for text, (asked, _) in zip(found, some, strict=True))
    return Score(kind, pictures, most, right, prompts, promised)


def _draw(rng: Random, kind: str, pictures: int, most: int) -> tuple[scenes.Question, list]:
    """Drawn scenes of one to `most` shapes, and a question of that kind about them."""
    while True:
        some = [scenes.random_scene(rng, shapes=rng.randint(1, most)) for _ in range(pictures)]
        asked = scenes.question(some, rng, kind)
        if asked.kind == kind:
            return asked, [scenes.draw(scene, rng) for scene in some]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=checkpoint(), help="default: the one that ships")
    parser.add_argument("--prompts", type=int, default=300, help="of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    receiver = Receiver(chosen.checkpoint)
    started = time.perf_counter()
    scores = [score(receiver, case, chosen.prompts, chosen.json) for case in CASES]
    if chosen.json:
        sys.stdout.write(json.dumps([{**asdict(one), "share": one.share} for one in scores]) + "\n")
    else:
        _show(scores, time.perf_counter() - started)
    return 0 if all(one.promised is None or one.share >= one.promised for one in scores) else 1


def _show(scores: list[Score], seconds: float) -> None:
    table = Table(box=SIMPLE_HEAD, title=f"exact answers on held-out scenes ({seconds:.0f} s)", title_justify="left")
    for name in ("question", "pictures", "shapes", "exact", "share", "95 % interval", "promise"):
        table.add_column(name, no_wrap=True)
    for one in scores:
        low, high = one.interval()
        promised = (
            "" if one.promised is None else f"{one.promised:.0%}{'' if one.share >= one.promised else ': NOT kept'}"
        )
        table.add_row(
            one.kind,
            str(one.pictures),
            f"1–{one.most_shapes}",
            f"{one.right}/{one.asked}",
            f"{one.share:.1%}",
            f"{low:.1%} – {high:.1%}",
            promised,
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
