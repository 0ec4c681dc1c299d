"""Train the demo's model from nothing on a CPU: `python -m demo.train FOLDER` (about an hour on two free cores).

Three stages, each with its own cosine schedule:

1. **tower**: three linear heads, thrown away afterwards, name the color, the kind and the place of what each row shows.
   This dense supervision teaches in minutes what answers alone take hours to teach.
2. **language**: the language model learns to read the tower's rows, which are computed once and kept.
3. **together**: everything, at a lower rate, on answers and a little on the heads.

Data parallel over processes of one thread each: the operations are small, so that threads in one process would mostly
wait for each other. After each stage the checkpoint in FOLDER is complete; FOLDER/float32 holds what `--start` resumes from.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from demo import architecture, examples
from demo.examples import COLORS, IGNORED, PLACES, SHAPES, Batch, Picture, Prompt, PromptWriter, draw_picture
from demo.forward import answer_logits, tower_rows
from tectum.demo import scenes

HEADS = (1 + len(COLORS), len(SHAPES), len(PLACES))
HELD_OUT = [("describe", 1), ("count", 1), ("color", 1), ("each", 2), ("nth", 2), ("each", 3)]


@dataclass(frozen=True, slots=True)
class Stage:
    """steps: of the optimizer. batch: pictures or prompts a step and process. rate: the highest learning rate."""

    name: str
    steps: int
    batch: int
    rate: float


STAGES = (Stage("tower", 900, 64, 2e-3), Stage("language", 1410, 24, 1.2e-3), Stage("together", 658, 16, 4e-4))


class Trainer:
    """One process of the training: model, data of its own, and the averaging of gradients with the others."""

    def __init__(self, rank: int, world: int, folder: Path, start: Path | None, pictures: int) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.rng = Random(1000 + rank)
        tokenizer = architecture.build_tokenizer()
        self.processor = architecture.build_processor(tokenizer)
        self.model = architecture.build_model(tokenizer)
        if start is not None:
            kept = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
            self.model.load_state_dict(kept.state_dict())
        self.model.config.text_config._attn_implementation = "demo_training"
        self.visual = self.model.model.visual
        torch.manual_seed(0)
        self.heads = nn.Linear(architecture.WIDTH, sum(HEADS))
        self.writer = PromptWriter(tokenizer)
        self.pad = tokenizer.pad_token_id
        self.pool = [draw_picture(self.rng) for _ in range(pictures // world)]
        held = Random(1)
        self.held = [p for p in (draw_picture(held) for _ in range(400)) if len(p.scene.shapes) < 3]
        self.rows: list[Tensor] = []
        self.queues: dict[int, list[list[Prompt]]] = {}

    def run(self, stage: Stage) -> None:
        loss_of, modules = {
            "tower": (self._tower_loss, [self.visual, self.heads]),
            "language": (self._language_loss, [self.model.model.language_model, self.model.lm_head]),
            "together": (self._joint_loss, [self.model, self.heads]),
        }[stage.name]
        if stage.name == "language":
            self.rows = self._rows_of(self.pool)
        self._optimise(stage, loss_of, [p for module in modules for p in module.parameters()])
        self.save()

    def _optimise(self, stage: Stage, loss_of: Callable[[int], tuple[Tensor, float]], weights: list[Any]) -> None:
        groups = [
            {"params": [p for p in weights if p.ndim >= 2], "weight_decay": 0.05},
            {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=stage.rate, betas=(0.9, 0.98), fused=True)
        begun, shown, loss_mean, right_mean = time.monotonic(), time.monotonic(), 0.0, 0.0
        for step in range(stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = stage.rate * min(1.0, (step + 1) / 100, 0.01 + _cosine(step / stage.steps))
            loss, right = loss_of(stage.batch)
            loss.backward()
            self._average_gradients(weights)
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            share = 0.05 if step else 1.0
            loss_mean, right_mean = (
                loss_mean + share * (loss.item() - loss_mean),
                right_mean + share * (right - right_mean),
            )
            if self.rank == 0 and time.monotonic() - shown > 30:
                shown = time.monotonic()
                self._say(stage, step, f"{shown - begun:.0f} s loss {loss_mean:.4f} right {right_mean:.4f}")
            if stage.name != "tower" and (step + 1) % 250 == 0:
                self._check(stage, step)

    def _average_gradients(self, weights: list[Any]) -> None:
        flat = torch.cat([p.grad.flatten() for p in weights])
        dist.all_reduce(flat)
        for weight, gradient in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            weight.grad.copy_(gradient.view_as(weight)).div_(self.world)

    # --- losses: of one batch, with the share of answers (or colors) that were right ---

    def _tower_loss(self, size: int) -> tuple[Tensor, float]:
        grid = self.rng.choice(self.pool).grid
        chosen = [p for p in self.rng.sample(self.pool, min(len(self.pool), 6 * size)) if p.grid == grid][:size]
        rows = self._encode([p.patches for p in chosen], grid)
        return self._heads_loss(rows, torch.cat([torch.from_numpy(p.labels) for p in chosen]))

    def _heads_loss(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        color, kind, place = self.heads(rows).float().split(HEADS, -1)
        guesses = ((color, labels[:, 0]), (kind, labels[:, 1]), (place, labels[:, 2]))
        losses = [F.cross_entropy(guess, label, ignore_index=IGNORED) for guess, label in guesses]
        shown = labels[:, 1] != IGNORED
        right = torch.stack([(guess.argmax(-1) == label)[shown] for guess, label in guesses]).all(0)
        return torch.stack(losses).sum(), right.float().mean().item()

    def _language_loss(self, size: int) -> tuple[Tensor, float]:
        made = self._next_batch(size)
        return self._answer_loss(made, torch.cat([self.rows[number] for number in made.pictures]).float())

    def _answer_loss(self, made: Batch, rows: Tensor) -> tuple[Tensor, float]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = answer_logits(self.model, made.ids, made.positions, rows, made.answers)
        wanted = made.ids[made.answers]
        return F.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean().item()

    def _joint_loss(self, size: int) -> tuple[Tensor, float]:
        made = self._next_batch(size)
        pictures = [self.pool[number] for number in made.pictures]
        rows = self._encode_mixed(pictures)
        loss, right = self._answer_loss(made, rows)
        heads_loss, _ = self._heads_loss(rows, torch.cat([torch.from_numpy(p.labels) for p in pictures]))
        return loss + 0.1 * heads_loss, right

    # --- data ---

    def _encode(self, patches: list[Any], grid: tuple[int, int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tower_rows(self.visual, examples.normalise(patches), *grid).float()

    def _encode_mixed(self, pictures: list[Picture]) -> Tensor:
        """Rows of pictures of several sizes, in order: one forward a size."""
        rows: list[Tensor] = [torch.empty(0)] * len(pictures)
        for grid in {picture.grid for picture in pictures}:
            numbers = [number for number, picture in enumerate(pictures) if picture.grid == grid]
            encoded = self._encode([pictures[number].patches for number in numbers], grid)
            for number, of_one in zip(numbers, encoded.chunk(len(numbers)), strict=True):
                rows[number] = of_one
        return torch.cat(rows)

    @torch.no_grad()
    def _rows_of(self, pictures: list[Picture]) -> list[Tensor]:
        """The rows of each picture, in bfloat16."""
        rows: list[Tensor] = []
        for first in range(0, len(pictures), 128):
            some = pictures[first : first + 128]
            cells = [picture.grid[0] * picture.grid[1] // 4 for picture in some]
            rows += [part.clone() for part in self._encode_mixed(some).bfloat16().split(cells)]
        return rows

    def _next_batch(self, size: int) -> Batch:
        """Prompts of similar length with the same number of pictures, so that little is padding."""
        count = self.rng.choices((1, 2, 3), (35, 50, 15))[0]
        queue = self.queues.setdefault(count, [])
        if not queue:
            size = max(4, round(size * {1: 1.0, 2: 0.6, 3: 0.42}[count]))
            prompts = sorted((self._prompt(self.pool, count) for _ in range(8 * size)), key=lambda p: len(p.ids))
            queue += [prompts[first : first + size] for first in range(0, len(prompts), size)]
            self.rng.shuffle(queue)
        return examples.batch(queue.pop(), self.pad)

    def _prompt(self, pool: list[Picture], count: int) -> Prompt:
        numbers = [self.rng.randrange(len(pool)) for _ in range(count)]
        pictures = [pool[number] for number in numbers]
        turns = [scenes.question([picture.scene for picture in pictures], self.rng) for _ in range(2)]
        return self.writer.write(numbers, pictures, turns if self.rng.random() < 0.5 else turns[:1])

    # --- progress ---

    @torch.no_grad()
    def _check(self, stage: Stage, step: int) -> None:
        """The share of held-out prompts (at most two shapes a picture) whose every answer token is right, by kind."""
        if self.rank:
            return
        rows, found = self._rows_of(self.held), {}
        for kind, count in HELD_OUT:
            rng, prompts = Random(5), []
            while len(prompts) < 96:
                numbers = [rng.randrange(len(self.held)) for _ in range(count)]
                pictures = [self.held[number] for number in numbers]
                asked = scenes.question([picture.scene for picture in pictures], rng, kind)
                if asked.kind == kind:
                    prompts.append(self.writer.write(numbers, pictures, [asked]))
            found[f"{kind} {count}"] = sum(self._all_right(prompts[i : i + 48], rows) for i in (0, 48)) / 96
        self._say(stage, step, "held out: " + ", ".join(f"{name} {share:.3f}" for name, share in found.items()))
        self.save()

    def _all_right(self, prompts: list[Prompt], rows: list[Tensor]) -> int:
        made = examples.batch(prompts, self.pad)
        given = torch.cat([rows[number] for number in made.pictures]).float()
        with torch.autocast("cpu", torch.bfloat16):
            logits = answer_logits(self.model, made.ids, made.positions, given, made.answers)
        right = torch.ones_like(made.answers)
        right[made.answers] = logits.argmax(-1) == made.ids[made.answers]
        return int(right.all(1).sum())

    def _say(self, stage: Stage, step: int, text: str) -> None:
        print(f"{stage.name} {step + 1}/{stage.steps} {text}", flush=True)

    def save(self) -> None:
        """The checkpoint as it ships (bfloat16), and in float32 beside it."""
        if self.rank:
            return
        self.model.save_pretrained(self.folder / "float32")
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(self.folder)
        for folder in (self.folder, self.folder / "float32"):
            self.processor.save_pretrained(folder)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def _process(rank: int, chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    address = f"tcp://127.0.0.1:{chosen.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=chosen.processes)
    trainer = Trainer(rank, chosen.processes, chosen.folder, chosen.start, chosen.pictures)
    for stage in _stages(chosen):
        trainer.run(stage)
    dist.destroy_process_group()


def _stages(chosen: argparse.Namespace) -> Iterator[Stage]:
    for stage in STAGES:
        if stage.name in chosen.stages:
            yield Stage(stage.name, max(1, round(stage.steps * chosen.scale)), stage.batch, stage.rate)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from (such as FOLDER/float32)")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="which stages to run")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of steps")
    parser.add_argument("--pictures", type=int, default=16_000, help="drawn for training, over all processes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--port", type=int, default=29_533, help="on loopback, for the processes to meet")
    chosen = parser.parse_args()
    torch.multiprocessing.start_processes(_process, (chosen,), chosen.processes, start_method="spawn")


if __name__ == "__main__":
    main()
