"""The demo proves that answers, rows and logits are equal, and would show a difference."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from tectum.demo import answers
from tectum.demo.preview import preview
from tectum.demo.receiver import Receiver
from tectum.demo.run import compare
from tectum.engines.client import Client, TimedEmbedding
from tectum.types import Embedding


def test_the_demo_is_right_and_equal_in_two_processes():
    command = [sys.executable, "-m", "tectum", "demo", "--json", "--swap"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert (found["images"], found["rows_equal"], found["logits_equal"]) == (4, True, True)
    assert found["encoder_pid"] != found["receiver_pid"]
    assert [prompt["rows"] for prompt in found["prompts"]] == [256, 176, 176, 176, 784]
    assert (found["answers_right"], found["answers_equal"]) == (True, True)
    assert [(one["pictures"], one["rows"]) for one in found["answers"]] == [(1, 20), (1, 20), (1, 20), (2, 40)]
    both = found["answers"][-1]
    first, second = (found["answers"][index]["answer"] for index in (0, 1))
    assert both["answer"] == f"first: {first}; second: {second}"
    assert both["swapped"] == f"first: {second}; second: {first}"
    assert set(both["milliseconds"]) == {"fetch", "prepare", "queue", "forward", "generate"}


def test_rows_of_another_picture_are_seen(tiny, server):
    photographs = sorted(Path(str(files("tectum.demo") / "photos")).glob("*.jpg"))
    coffee, rocket = photographs[2], photographs[3]

    class Swapping:
        """A client whose rows come from the wrong picture of the same size."""

        def __init__(self, client):
            self.client = client

        def encode_timed(self, pictures):
            right = self.client.encode_timed(pictures)
            wrong = self.client.encode_timed([rocket])
            return TimedEmbedding(dataclasses.replace(right.embedding, rows=wrong.embedding.rows), {})

    receiver = Receiver(tiny)
    with Client(server.url) as client:
        assert compare(receiver, client, [coffee]).equal
        swapped = compare(receiver, Swapping(client), [coffee])
    assert not swapped.rows_equal
    assert not swapped.logits_equal
    assert swapped.logits_max_abs > 1e-3


def test_an_answer_that_differs_is_neither_right_nor_equal():
    answered = answers.Answered(1, "How many shapes?", "two", "one", "two", 20, True, {})
    assert (answered.right, answered.equal) == (False, True)
    assert not dataclasses.replace(answered, one_piece="one").equal
    assert not dataclasses.replace(answered, rows_equal=False).equal
    right = dataclasses.replace(answered, answer="one")
    assert right.right
    assert not dataclasses.replace(right, swapped="one", swapped_expected="two").right


def test_swapped_rows_keep_their_grids():
    with_two = answers.draw_questions(1)[-1]
    assert len(with_two.pictures) == 2
    assert with_two.swapped != with_two.question.answer
    rows = torch.arange(10.0).view(5, 2)
    embedding = Embedding(rows, (2, 3), ((1, 2, 4), (1, 2, 6)), (), "float32")
    swapped = answers.swap_rows(embedding)
    assert swapped.rows[:, 0].tolist() == [4.0, 6.0, 8.0, 0.0, 2.0]
    assert (swapped.item_rows, swapped.grid_thw) == ((3, 2), ((1, 2, 6), (1, 2, 4)))


def test_the_checkpoint_is_small_and_says_what_it_is():
    weights = answers.checkpoint() / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    card = (answers.checkpoint() / "README.md").read_text()
    for part in ("Data", "Recipe", "Accuracy", "Limits", "Apache-2.0"):
        assert part in card


def test_a_preview_shows_the_colors_of_its_picture():
    picture = Image.new("RGB", (40, 20), (255, 0, 0))
    picture.paste((0, 0, 255), (0, 10, 40, 20))
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="truecolor", width=40)
    console.print(preview(picture, 4))
    assert output.getvalue().count("▀") == 4
    assert "38;2;255;0;0;48;2;0;0;255m▀" in output.getvalue()


@pytest.mark.parametrize("seed", range(3))
def test_questions_are_about_pictures_of_one_size(seed):
    asked = answers.draw_questions(seed)
    assert {picture.size for one in asked for picture in one.pictures} == {answers.SIZE}
    assert [len(one.pictures) for one in asked] == [1, 1, 1, 2]
    assert asked[-1].question.answer == f"first: {asked[0].question.answer}; second: {asked[1].question.answer}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["vllm"], "missing_dependency", "make compat-vllm"),
        (["sglang"], "missing_dependency", "make compat-sglang"),
        (["sglang", "--swap"], "invalid_settings", "leave out --swap"),
        (["vllm", "--swap"], "invalid_settings", "leave out --swap"),
        (["vllm", "--engine-python", "/no/such/python"], "invalid_settings", "engine_python"),
        (["x"], "invalid_settings", "vllm or sglang"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_in_words(arguments, code, words, tmp_path):
    command = [sys.executable, "-m", "tectum", "demo", "--json", "--engine", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == code
    assert words in json.dumps(error)
