"""The demo's walk: encode in one process, use the rows in another, and compare with the model in one piece.

Two processes: the encoder server (which never loads the language model) and this one, the receiver (whose language
model has its vision tower removed, so that no row can come from a local encode). First drawn scenes and a small trained
model, which answers in words; then photographs and a model with random weights, whose rows and logits must be equal to the bit.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tectum.demo import answers
from tectum.demo.answers import STAGES, Answered, Asked
from tectum.demo.encoder_process import EncoderProcess
from tectum.demo.receiver import Receiver
from tectum.engines.client import Client
from tectum.models.tiny import build_tiny_qwen2_5_vl

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SERVER_FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--no-dashboard")
#: of the scenes that are drawn
SEED = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, both ways. Times in milliseconds by stage on the server; differences are the largest absolute ones."""

    pictures: tuple[str, ...]
    grid_thw: tuple[tuple[int, int, int], ...]
    rows: int
    milliseconds: dict[str, float]
    rows_equal: bool
    rows_max_abs: float
    logits_equal: bool
    logits_max_abs: float

    @property
    def equal(self) -> bool:
        return self.rows_equal and self.logits_equal


def run_demo(*, json_output: bool = False, swap: bool = False, seed: int = SEED) -> int:
    """Run both parts and print them, or one JSON object. Returns the exit code: 0 when all is right and equal, else 1.

    swap: also answer from rows of two pictures swapped on purpose. seed: of the drawn scenes.
    """
    asked = answers.draw_questions(seed)
    photographs = sorted(Path(str(files("tectum.demo") / "photos")).glob("*.jpg"))
    with _steps(Console(stderr=True), len(asked) + len(photographs) + 6) as step:
        answered = _answer_scenes(asked, swap, step)
        comparisons, encoder_pid = _compare_photographs(photographs, step)
    if json_output:
        sys.stdout.write(json.dumps(_summary(answered, comparisons, len(photographs), encoder_pid)) + "\n")
    else:
        _report(asked, answered, comparisons, len(photographs), encoder_pid)
    fine = [*(one.right and one.equal for one in answered), *(one.equal for one in comparisons)]
    return 0 if all(fine) else 1


def _answer_scenes(asked: Sequence[Asked], swap: bool, step: Callable[[str], None]) -> list[Answered]:
    step("starting the encoder server of the trained model")
    with EncoderProcess(answers.checkpoint(), *SERVER_FLAGS) as server:
        step("loading its language model")
        receiver = Receiver(answers.checkpoint())
        with Client(server.url) as client:
            return answers.answer_all(client, receiver, asked, swap, step)


def _compare_photographs(photographs: Sequence[Path], step: Callable[[str], None]) -> tuple[list[Comparison], int]:
    """Each photograph alone, then all in one prompt; and the number of the encoder process."""
    prompts = [(path,) for path in photographs] + [tuple(photographs)]
    with tempfile.TemporaryDirectory(prefix="tectum-demo-") as temporary:
        step("building a model with random weights")
        folder = build_tiny_qwen2_5_vl(Path(temporary) / "tiny-qwen2.5-vl")
        step("starting its encoder server")
        with EncoderProcess(folder, *SERVER_FLAGS) as server:
            step("loading its language model")
            receiver = Receiver(folder)
            comparisons = []
            with Client(server.url) as client:
                for prompt in prompts:
                    step(f"encoding {', '.join(path.stem for path in prompt)}")
                    comparisons.append(compare(receiver, client, prompt))
            return comparisons, server.pid


def compare(receiver: Receiver, client: Client, pictures: Sequence[Path]) -> Comparison:
    """Encode `pictures` through the server as one prompt, and compare rows and logits with the model in one piece."""
    timed = client.encode_timed(list(pictures))
    prompt = "".join(f"{path.stem}: {PLACE}\n" for path in pictures) + "What is in each picture?"
    logits = receiver.logits(prompt, timed.embedding)
    decoded = [Image.open(path).convert("RGB") for path in pictures]
    rows, reference_logits = receiver.rows_and_logits_in_one_piece(prompt, decoded)
    return Comparison(
        pictures=tuple(path.stem for path in pictures),
        grid_thw=timed.embedding.grid_thw,
        rows=int(timed.embedding.rows.shape[0]),
        milliseconds={stage: round(timed.seconds.get(stage, 0.0) * 1e3, 2) for stage in STAGES},
        rows_equal=torch.equal(timed.embedding.rows, rows),
        rows_max_abs=_max_abs(timed.embedding.rows, rows),
        logits_equal=torch.equal(logits, reference_logits),
        logits_max_abs=_max_abs(logits, reference_logits),
    )


def _max_abs(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


@contextmanager
def _steps(console: Console, total: int) -> Iterator[Any]:
    """A progress bar that names the step at work; silent where the output is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        started = False

        def step(what: str) -> None:
            nonlocal started
            bar.update(task, description=what, advance=1 if started else 0)
            started = True

        yield step


def _summary(
    answered: Sequence[Answered], comparisons: Sequence[Comparison], images: int, encoder_pid: int
) -> dict[str, Any]:
    return {
        "images": images,
        "rows_equal": all(comparison.rows_equal for comparison in comparisons),
        "logits_equal": all(comparison.logits_equal for comparison in comparisons),
        "encoder_pid": encoder_pid,
        "receiver_pid": os.getpid(),
        "prompts": [asdict(comparison) for comparison in comparisons],
        "answers_right": all(one.right for one in answered),
        "answers_equal": all(one.equal for one in answered),
        "answers": [one.to_json() for one in answered],
    }


def _report(
    asked: Sequence[Asked],
    answered: Sequence[Answered],
    comparisons: Sequence[Comparison],
    images: int,
    encoder_pid: int,
) -> None:
    console = Console(highlight=False)
    answers.show(console, asked, answered)
    right = sum(one.right for one in answered)
    equal = "equal to the model in one piece" if all(one.equal for one in answered) else "DIFFERENT"
    console.print(f"{right} of {len(answered)} answers are as expected; rows and answers are {equal}")
    console.print()
    table = Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=f"encoder process {encoder_pid} → receiver process {os.getpid()}, times in ms",
        title_justify="left",
    )
    for name in ("picture", "grid", "rows", *STAGES, "rows", "logits"):
        table.add_column(name, justify="right" if name in STAGES else "left", no_wrap=True)
    for comparison in comparisons:
        table.add_row(*_cells(comparison))
    console.print(table)
    verdict = "equal to the model in one piece, to the bit" if all(c.equal for c in comparisons) else "DIFFERENT"
    console.print(f"{images} photographs: rows and logits are {verdict}")


def _cells(comparison: Comparison) -> list[str]:
    one = len(comparison.pictures) == 1
    grid = "×".join(str(side) for side in comparison.grid_thw[0][1:]) if one else "each"
    return [
        comparison.pictures[0] if one else f"all {len(comparison.pictures)} together",
        grid,
        str(comparison.rows),
        *(f"{comparison.milliseconds[stage]:.1f}" for stage in STAGES),
        "equal" if comparison.rows_equal else f"[red]differ by {comparison.rows_max_abs:.1e}[/]",
        "equal" if comparison.logits_equal else f"[red]differ by {comparison.logits_max_abs:.1e}[/]",
    ]
