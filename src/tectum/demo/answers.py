"""First part of the demo: questions about drawn scenes, answered in words from delivered rows.

The encoder process gets PNG files and gives rows; the receiver's model has no tower. Its answers must be those of the model
in one piece, and, as far as the small model is right, those that the scenes were drawn from. Rows that are swapped on
purpose must swap the answer: then the rows carry the pictures.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tectum.demo import scenes
from tectum.demo.preview import can_show, preview
from tectum.demo.receiver import Receiver
from tectum.demo.scenes import Question
from tectum.engines.client import Client
from tectum.types import Embedding

STAGES = ("fetch", "prepare", "queue", "forward")
#: of the drawn scenes that are shown, in pixels: one size, so that rows can change places
SIZE = (140, 112)
#: width of a preview in character cells
COLUMNS = 20


def checkpoint() -> Path:
    """The small trained model that ships with the package."""
    return Path(str(files("tectum.demo") / "model"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about PIL pictures. swapped: the right answer when the first two pictures change places."""

    pictures: tuple[Any, ...]
    question: Question
    swapped: str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer from delivered rows. Times in milliseconds by stage; `generate` is the receiver's.

    swapped, swapped_expected: the answer from swapped rows, where that was asked for.
    """

    pictures: int
    question: str
    answer: str
    expected: str
    one_piece: str
    rows: int
    rows_equal: bool
    milliseconds: dict[str, float]
    swapped: str | None = None
    swapped_expected: str | None = None

    @property
    def right(self) -> bool:
        return self.answer == self.expected and self.swapped == self.swapped_expected

    @property
    def equal(self) -> bool:
        """To the model in one piece."""
        return self.rows_equal and self.answer == self.one_piece

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "right": self.right, "equal": self.equal}


def draw_questions(seed: int) -> list[Asked]:
    """Three scenes with a question each, and one about the first two together."""
    rng = Random(seed)
    drawn = [scenes.random_scene(rng, shapes=count, size=SIZE) for count in (1, 2, 2)]
    pictures = [scenes.draw(scene, rng) for scene in drawn]
    asked = [
        Asked((picture,), scenes.question([scene], rng, kind))
        for scene, picture, kind in zip(drawn, pictures, ("describe", "describe", "color"), strict=True)
    ]
    first, second = drawn[:2]
    swapped = scenes.question([second, first], rng, "each").answer
    asked.append(Asked(tuple(pictures[:2]), scenes.question([first, second], rng, "each"), swapped))
    return asked


def answer_all(
    client: Client, receiver: Receiver, asked: Sequence[Asked], swap: bool, step: Callable[[str], None]
) -> list[Answered]:
    """Encode through the server, answer here; `swap`: also from rows of the first two pictures swapped."""
    answered = []
    for one in asked:
        step(one.question.text)
        answered.append(_answer(client, receiver, one, swap and one.swapped is not None))
    return answered


def _answer(client: Client, receiver: Receiver, asked: Asked, swap: bool) -> Answered:
    prompt = receiver.prompt(len(asked.pictures), asked.question.text)
    timed = client.encode_timed([png(picture) for picture in asked.pictures])
    text, seconds = receiver.answer(prompt, timed.embedding)
    rows, _ = receiver.rows_and_logits_in_one_piece(prompt, asked.pictures)
    milliseconds = {stage: round(timed.seconds.get(stage, 0.0) * 1e3, 2) for stage in STAGES}
    return Answered(
        pictures=len(asked.pictures),
        question=asked.question.text,
        answer=text,
        expected=asked.question.answer,
        one_piece=receiver.answer_in_one_piece(prompt, asked.pictures),
        rows=int(timed.embedding.rows.shape[0]),
        rows_equal=torch.equal(timed.embedding.rows, rows),
        milliseconds={**milliseconds, "generate": round(seconds * 1e3, 2)},
        swapped=receiver.answer(prompt, swap_rows(timed.embedding))[0] if swap else None,
        swapped_expected=asked.swapped if swap else None,
    )


def swap_rows(embedding: Embedding) -> Embedding:
    """The same embedding with the rows of the first two items in each other's place."""
    first, second, *others = embedding.split()
    one, two, *further = embedding.item_rows
    return dataclasses.replace(
        embedding,
        rows=torch.cat([second, first, *others]),
        item_rows=(two, one, *further),
        grid_thw=(embedding.grid_thw[1], embedding.grid_thw[0], *embedding.grid_thw[2:]),
    )


def png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def show(console: Console, asked: Sequence[Asked], answered: Sequence[Answered]) -> None:
    """Each question with its pictures (where the terminal can), its answers and its times."""
    shown = can_show(console)
    for one, found in zip(asked, answered, strict=True):
        console.print(beside(one.pictures, _lines(found)) if shown else _lines(found))
        console.print()


def beside(pictures: Sequence[Any], lines: Text) -> Table:
    """Previews of PIL pictures, and `lines` to their right."""
    columns = COLUMNS if len(pictures) == 1 else (COLUMNS - 2) // 2
    previews = Table.grid(padding=(0, 1))
    previews.add_row(*(preview(picture, columns) for picture in pictures))
    table = Table.grid(padding=(0, 2))
    table.add_row(previews, lines)
    return table


def _lines(found: Answered) -> Text:
    right, wrong = "green", "bold red"
    text = Text()
    text.append(f"{found.question}\n", "bold")
    text.append("answer    ").append(f"{found.answer}\n", right if found.answer == found.expected else wrong)
    text.append(f"expected  {found.expected}\n")
    if found.swapped is not None:
        right_swapped = found.swapped == found.swapped_expected
        text.append("rows swapped: ").append(f"{found.swapped}\n", right if right_swapped else wrong)
    verdict = f"{found.rows} rows and the answer equal the one-process model"
    if not found.equal:
        verdict = "NOT equal to the one-process model"
    text.append(f"{verdict}\n", "" if found.equal else wrong)
    times = " · ".join(f"{stage} {taken:.1f}" for stage, taken in found.milliseconds.items())
    text.append(f"{times} ms", "dim")
    return text
