"""Training examples: drawn pictures as tensors, and prompts about them as token ids, positions and answers.

The tensors are those that the processor and the model's own position numbering give (`tests/demo` holds them equal),
made without them, because they would cost more than the training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo.forward import CELL, PATCH
from tectum.demo import scenes
from tectum.demo.scenes import Question, Scene

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])
COLORS, SHAPES = tuple(scenes.COLORS), scenes.SHAPES
PLACES = tuple(dict.fromkeys(place for words in scenes.PLACES.values() for place in words))
#: a class that no loss is taken of
IGNORED = -100
#: pixels of a 28 × 28 cell: a shape that covers so many is what the cell shows, and below so few the cell is ground
SHOWN, HIDDEN = 80, 8


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn scene. patches: uint8 `[patches, 588]`. labels: int64 `[cells, 3]`, of color (0 for ground), shape, place."""

    scene: Scene
    patches: np.ndarray
    labels: np.ndarray

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width in patches."""
        width, height = self.scene.size
        return height // PATCH, width // PATCH


def draw_picture(rng: Random) -> Picture:
    scene = scenes.random_scene(rng)
    picture, where = scenes.draw_with_map(scene, rng)
    pixels = np.asarray(picture)
    height, width = (side // CELL for side in pixels.shape[:2])
    blocks = pixels.reshape(height, 2, PATCH, width, 2, PATCH, 3)
    patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * PATCH * PATCH)
    return Picture(scene, patches, _labels(scene, where))


def _labels(scene: Scene, where: np.ndarray) -> np.ndarray:
    """What each cell shows, for the auxiliary loss: the same for all the rows that the tower gives."""
    height, width = (side // CELL for side in where.shape)
    cells = where.reshape(height, CELL, width, CELL).transpose(0, 2, 1, 3).reshape(height * width, -1)
    covered = np.stack([(cells == index + 1).sum(1) for index in range(len(scene.shapes))], 1)
    labels = np.full((len(cells), 3), IGNORED)
    for cell, (best, pixels) in enumerate(zip(covered.argmax(1), covered.max(1), strict=True)):
        if pixels >= SHOWN:
            shape = scene.shapes[best]
            color, kind = 1 + COLORS.index(shape.color), SHAPES.index(shape.kind)
            labels[cell] = color, kind, PLACES.index(scene.place(shape))
        elif pixels <= HIDDEN:
            labels[cell, 0] = 0
    return labels


def normalise(patches: Sequence[np.ndarray]) -> Tensor:
    """float32 `[pictures, patches, 588]` of pictures of one size, as the image processor normalises them."""
    pixels = torch.from_numpy(np.stack(patches)).float().unflatten(-1, (3, PATCH * PATCH)) / 255
    return ((pixels - MEAN[:, None]) / STD[:, None]).flatten(2)


@dataclass(frozen=True, slots=True)
class Prompt:
    """pictures: numbers of pictures in a pool. ids, answers: `[tokens]`. positions: `[3, tokens]`."""

    pictures: tuple[int, ...]
    ids: np.ndarray
    answers: np.ndarray
    positions: np.ndarray


class PromptWriter:
    """Writes prompts as the chat template does, with the model's position numbers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._known: dict[str, list[int]] = {}

    def _encode(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 50_000:
                self._known.clear()
            self._known[text] = self._tokenizer(text).input_ids
        return self._known[text]

    def write(self, numbers: Sequence[int], pictures: Sequence[Picture], turns: Sequence[Question]) -> Prompt:
        """One conversation about `pictures`; the questions after the first are asked in turns of their own."""
        ids: list[int] = []
        answers: list[bool] = []
        positions: list[np.ndarray] = []
        position = 0

        def say(text: str, answer: bool = False) -> None:
            nonlocal position
            tokens = self._encode(text)
            ids.extend(tokens)
            answers.extend([answer] * len(tokens))
            positions.append(np.tile(np.arange(position, position + len(tokens)), (3, 1)))
            position += len(tokens)

        def show(picture: Picture) -> None:
            nonlocal position
            height, width = (side // 2 for side in picture.grid)
            ids.extend([self._placeholder] * (height * width))
            answers.extend([False] * (height * width))
            row, column = np.divmod(np.arange(height * width), width)
            positions.append(np.stack([np.zeros_like(row), row, column]) + position)
            position += max(height, width)

        for turn, asked in enumerate(turns):
            say("<|im_start|>user\n")
            if turn == 0:
                for index, picture in enumerate(pictures):
                    if len(pictures) > 1:
                        say(("first:", " second:", " third:")[index])
                    say("<|vision_start|>")
                    show(picture)
                    say("<|vision_end|>")
            say(asked.text + "<|im_end|>\n<|im_start|>assistant\n")
            say(asked.answer + "<|im_end|>", answer=True)
            say("\n")
        return Prompt(tuple(numbers), np.array(ids), np.array(answers), np.concatenate(positions, 1))


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded prompts. pictures: their numbers, in the order of the placeholders."""

    pictures: list[int]
    ids: Tensor
    answers: Tensor
    positions: Tensor


def batch(prompts: Sequence[Prompt], pad: int) -> Batch:
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = np.full((len(prompts), longest), pad)
    answers = np.zeros((len(prompts), longest), bool)
    positions = np.zeros((3, len(prompts), longest), np.int64)
    for index, prompt in enumerate(prompts):
        tokens = len(prompt.ids)
        ids[index, :tokens], answers[index, :tokens] = prompt.ids, prompt.answers
        positions[:, index, :tokens] = prompt.positions
    pictures = [number for prompt in prompts for number in prompt.pictures]
    return Batch(pictures, *(torch.from_numpy(array) for array in (ids, answers, positions)))
