"""The demo's walk: build a small model, encode photographs in one process, use their rows in another, compare.

Two processes: the encoder server (which never loads the language model) and this one, the receiver (whose language
model has its vision tower removed, so that no row can come from a local encode). The reference is the ordinary model
in one piece. Everything must be equal to the bit.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
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

from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.client import Client
from tectum.engines.transformers import language_inputs, mm_encoder_outputs
from tectum.models.load import quiet
from tectum.models.tiny import build_tiny_qwen2_5_vl
from tectum.types import Embedding

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
STAGES = ("fetch", "prepare", "queue", "forward")


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


def run_demo(*, json_output: bool = False) -> int:
    """Run the demo and print its table or its JSON. Returns the exit code: 0 when everything is equal, else 1."""
    console = Console(stderr=True)
    photographs = sorted(Path(str(files("tectum.demo") / "photos")).glob("*.jpg"))
    prompts = [(path,) for path in photographs] + [tuple(photographs)]
    with tempfile.TemporaryDirectory(prefix="tectum-demo-") as temporary, _steps(console, len(prompts) + 3) as step:
        step("building a small Qwen2.5-VL checkpoint")
        folder = build_tiny_qwen2_5_vl(Path(temporary) / "tiny-qwen2.5-vl")
        step("starting the encoder server")
        with EncoderProcess(folder, "--forward-threads", "1", "--log-level", "warning") as server:
            step("loading the language model")
            receiver = Receiver(folder)
            comparisons = []
            with Client(server.url) as client:
                for prompt in prompts:
                    step(f"encoding {', '.join(path.stem for path in prompt)}")
                    comparisons.append(receiver.compare(client, prompt))
            encoder_pid = server.pid
    _report(console, comparisons, len(photographs), encoder_pid, json_output)
    return 0 if all(comparison.equal for comparison in comparisons) else 1


class Receiver:
    """The language model's process: one model without a tower that is fed rows, and one in one piece to compare with."""

    def __init__(self, folder: Path) -> None:
        import transformers

        torch.set_num_threads(1)
        with quiet(transformers):
            self.processor = transformers.AutoProcessor.from_pretrained(folder)
            self.reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
            self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
        del self.model.model.visual

    def compare(self, client: Client, pictures: Sequence[Path]) -> Comparison:
        """Encode `pictures` through the server as one prompt, and compare rows and logits with the model in one piece."""
        timed = client.encode_timed(list(pictures))
        prompt = "".join(f"{path.stem}: {PLACE}\n" for path in pictures) + "What is in each picture?"
        logits = self.logits(prompt, timed.embedding)
        rows, reference_logits = self._in_one_piece(prompt, pictures)
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

    @torch.inference_mode()
    def logits(self, prompt: str, embedding: Embedding) -> torch.Tensor:
        """Logits `[1, tokens, vocabulary]` from delivered rows, by the model that has no vision tower."""
        inputs = language_inputs(self.processor, prompt, embedding)
        result: torch.Tensor = self.model(
            **inputs, mm_encoder_outputs=mm_encoder_outputs(self.model.config, embedding)
        ).logits
        return result

    @torch.inference_mode()
    def _in_one_piece(self, prompt: str, pictures: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor]:
        decoded = [Image.open(path).convert("RGB") for path in pictures]
        inputs = self.processor(text=[prompt], images=decoded, return_tensors="pt")
        features = self.reference.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return torch.cat(list(features.pooler_output)), self.reference(**inputs).logits


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


def _report(
    console: Console, comparisons: Sequence[Comparison], images: int, encoder_pid: int, json_output: bool
) -> None:
    rows_equal = all(comparison.rows_equal for comparison in comparisons)
    logits_equal = all(comparison.logits_equal for comparison in comparisons)
    if json_output:
        summary = {
            "images": images,
            "rows_equal": rows_equal,
            "logits_equal": logits_equal,
            "encoder_pid": encoder_pid,
            "receiver_pid": os.getpid(),
            "prompts": [asdict(comparison) for comparison in comparisons],
        }
        sys.stdout.write(json.dumps(summary) + "\n")
        return
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
    Console().print(table)
    verdict = "equal to the model in one piece, to the bit" if rows_equal and logits_equal else "DIFFERENT"
    Console().print(f"{images} photographs: rows and logits are {verdict}", highlight=False)


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
