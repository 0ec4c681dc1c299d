"""Scenes are what their descriptions say: words by hand, pixels by looking at them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tectum.demo import scenes
from tectum.demo.scenes import Scene, Shape


def scene(*shapes: tuple[str, str, int], axis: str = "across") -> Scene:
    return Scene(axis, (140, 112), tuple(Shape(*shape) for shape in shapes))


def test_descriptions_are_english():
    one = scene(("orange", "star", 1))
    two = scene(("orange", "star", 0), ("blue", "square", 2))
    three = scene(("red", "circle", 0), ("pink", "star", 1), ("black", "triangle", 2), axis="down")
    assert scenes.describe(one) == "an orange star in the middle"
    assert scenes.describe(two) == "an orange star on the left and a blue square on the right"
    assert scenes.describe(three) == (
        "a red circle at the top, a pink star in the middle and a black triangle at the bottom"
    )
    asked = scenes.question([two, one], Random(0), "each")
    assert asked.answer == (
        "first: an orange star on the left and a blue square on the right; second: an orange star in the middle"
    )
    assert scenes.question([two, one], Random(0), "count_each").answer == "first: two; second: one"
    assert scenes.question([three], Random(0), "count").answer == "three"


def test_a_color_is_asked_only_of_a_kind_that_is_there_once():
    twins = scene(("red", "star", 0), ("blue", "star", 2))
    assert scenes.question([twins], Random(0), "color").kind == "count"
    pair = scene(("red", "star", 0), ("blue", "star", 1), ("green", "circle", 2))
    asked = scenes.question([pair], Random(0), "color")
    assert (asked.text, asked.answer) == ("What color is the circle?", "green")


@pytest.mark.parametrize("seed", range(20))
def test_pixels_show_what_the_scene_says(seed):
    rng = Random(seed)
    drawn = scenes.random_scene(rng)
    picture, where = scenes.draw_with_map(drawn, rng)
    pixels = np.asarray(picture).astype(int)
    assert picture.size == drawn.size
    assert set(np.unique(where)) <= set(range(len(drawn.shapes) + 1))
    for index, shape in enumerate(drawn.shapes):
        rows, columns = np.nonzero(where == index + 1)
        assert len(rows) > 100
        color = np.median(pixels[rows, columns], axis=0)
        assert np.abs(color - scenes.COLORS[shape.color]).max() <= 20
        along = columns.mean() / drawn.size[0] if drawn.axis == "across" else rows.mean() / drawn.size[1]
        assert round(along * 3 - 0.5) == shape.slot


def test_the_same_random_state_draws_the_same_picture():
    def bytes_of(seed: int) -> bytes:
        rng = Random(seed)
        return scenes.draw(scenes.random_scene(rng), rng).tobytes()

    assert bytes_of(5) == bytes_of(5)
    assert bytes_of(5) != bytes_of(6)
