"""Drawn scenes of coloured shapes, and questions about them with their answers: what the demo's model was trained on.

Owns what a scene is, how it looks and how it is put into words. A scene drawn from the same random state is the same
picture everywhere. Knows nothing of models and of servers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

COLORS = {
    "red": (220, 35, 35),
    "green": (35, 150, 55),
    "blue": (35, 75, 215),
    "yellow": (245, 215, 35),
    "orange": (245, 130, 20),
    "purple": (125, 45, 165),
    "pink": (250, 140, 190),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star")
PLACES = {
    "across": ("on the left", "in the middle", "on the right"),
    "down": ("at the top", "in the middle", "at the bottom"),
}
ORDINALS = ("first", "second", "third")
NUMBERS = ("zero", "one", "two", "three")
#: of a picture, in pixels: multiples of 28, so that the processor resizes nothing and a row stands for 28 × 28 pixels
SIDES = (112, 140)
#: what is asked about one picture, and about several, with how often
KINDS_OF_ONE = {"describe": 60, "count": 15, "color": 25}
KINDS_OF_MANY = {"each": 70, "nth": 15, "count_each": 15}


@dataclass(frozen=True, slots=True)
class Shape:
    """color, kind: words from `COLORS` and `SHAPES`. slot: 0, 1 or 2 along the scene's axis."""

    color: str
    kind: str
    slot: int


@dataclass(frozen=True, slots=True)
class Scene:
    """axis: `across` or `down`. size: width and height in pixels. shapes: in reading order."""

    axis: str
    size: tuple[int, int]
    shapes: tuple[Shape, ...]

    def place(self, shape: Shape) -> str:
        return PLACES[self.axis][shape.slot]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one picture or several, and the only right answer."""

    kind: str
    text: str
    answer: str


def random_scene(rng: Random, *, shapes: int | None = None, size: tuple[int, int] | None = None) -> Scene:
    """A scene with `shapes` shapes (one to three; by default mostly one or two) in `size` pixels."""
    count = shapes or rng.choices((1, 2, 3), (40, 48, 12))[0]
    return Scene(
        axis=rng.choice(tuple(PLACES)),
        size=size or (rng.choice(SIDES), rng.choice(SIDES)),
        shapes=tuple(
            Shape(rng.choice(tuple(COLORS)), rng.choice(SHAPES), slot) for slot in sorted(rng.sample(range(3), count))
        ),
    )


def draw(scene: Scene, rng: Random) -> Any:
    """The scene as an RGB PIL picture of `scene.size`: shapes vary in size, turn, place and shade, the ground in tone."""
    return draw_with_map(scene, rng)[0]


def draw_with_map(scene: Scene, rng: Random) -> tuple[Any, Any]:
    """`draw`, and which shape each pixel shows: uint8 `[height, width]`, 0 for the ground, i + 1 for shape i."""
    import numpy as np
    from PIL import Image, ImageDraw

    width, height = scene.size
    finer = 3  # drawn larger and scaled down: smooth edges
    tone = rng.randint(165, 248)
    picture = Image.new("RGB", (width * finer, height * finer), _shade((tone, tone, tone), 12, rng))
    where = Image.new("L", scene.size)
    paper, chart = ImageDraw.Draw(picture), ImageDraw.Draw(where)
    for index, shape in enumerate(scene.shapes):
        outline = _outline(scene, shape, rng)
        color = _shade(COLORS[shape.color], 14, rng)
        paper.polygon([(x * finer, y * finer) for x, y in outline], fill=color)
        chart.polygon(outline, fill=index + 1)
    pixels = np.asarray(picture.resize(scene.size, Image.Resampling.BICUBIC)).astype(np.float32)
    grain = np.random.default_rng(rng.getrandbits(32)).standard_normal(pixels.shape, dtype=np.float32)
    pixels += grain * max(0.0, rng.uniform(-2.0, 5.0))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), np.asarray(where)


def _shade(color: tuple[int, int, int], by: int, rng: Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, part + rng.randint(-by, by))) for part in color)


def _outline(scene: Scene, shape: Shape, rng: Random) -> list[tuple[float, float]]:
    """The shape's corners in pixels; a circle has many."""
    width, height = scene.size
    radius = rng.uniform(0.12, 0.22 if len(scene.shapes) == 1 else 0.155) * min(width, height)
    along, aside = (shape.slot + 0.5) / 3 + rng.uniform(-0.035, 0.035), 0.5 + rng.uniform(-0.13, 0.13)
    x, y = (along, aside) if scene.axis == "across" else (aside, along)
    reach = 1.2 * radius
    x, y = min(max(x * width, reach), width - reach), min(max(y * height, reach), height - reach)
    corners, outer, inner, first = {
        "circle": (48, 1.0, 1.0, 0.0),
        "square": (4, 1.15, 1.15, math.pi / 4),
        "triangle": (3, 1.2, 1.2, -math.pi / 2),
        "star": (10, 1.2, 0.5, -math.pi / 2),
    }[shape.kind]
    turn = first + rng.uniform(-0.2, 0.2)
    points = []
    for corner in range(corners):
        reach = radius * (inner if corner % 2 else outer)
        angle = turn + 2 * math.pi * corner / corners
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def describe(scene: Scene) -> str:
    """Such as "an orange star on the left and a blue square on the right"."""
    parts = [f"{_article(s.color)} {s.color} {s.kind} {scene.place(s)}" for s in scene.shapes]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def question(scenes: Sequence[Scene], rng: Random, kind: str | None = None) -> Question:
    """A question of `kind` (a random one by default) about one scene, or about two or three in order.

    `color` needs a scene with a kind of shape that it shows once; for others a `count` question comes back.
    """
    weights = KINDS_OF_ONE if len(scenes) == 1 else KINDS_OF_MANY
    kind = kind or rng.choices(tuple(weights), tuple(weights.values()))[0]
    if kind == "color":
        once = [s for s in scenes[0].shapes if sum(other.kind == s.kind for other in scenes[0].shapes) == 1]
        if once:
            shape = rng.choice(once)
            return Question("color", f"What color is the {shape.kind}?", shape.color)
        kind = "count"
    if kind == "count":
        return Question(kind, "How many shapes?", NUMBERS[len(scenes[0].shapes)])
    if kind == "describe":
        return Question(kind, "What is in the picture?", describe(scenes[0]))
    if kind == "nth":
        index = rng.randrange(len(scenes))
        return Question(kind, f"What is in the {ORDINALS[index]} picture?", describe(scenes[index]))
    if kind == "count_each":
        counts = [NUMBERS[len(scene.shapes)] for scene in scenes]
        return Question(kind, "How many shapes are in each picture?", _in_order(counts))
    return Question("each", "What is in each picture?", _in_order([describe(scene) for scene in scenes]))


def _in_order(answers: Sequence[str]) -> str:
    return "; ".join(f"{ordinal}: {answer}" for ordinal, answer in zip(ORDINALS, answers, strict=False))
