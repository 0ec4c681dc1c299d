"""The demo's trained model behind a real vLLM: what mixed-up rows would do is a wrong sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tectum.demo import answers
from tectum.demo.encoder_process import EncoderProcess, ServerProcess
from tectum.demo.engines import asking, vllm
from tests.compat_vllm.conftest import PYTHON


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    python = asking.python_of("vllm", Path(PYTHON or ""))
    with (
        EncoderProcess(answers.checkpoint(), "--forward-threads", "1") as encoder,
        vllm.engine(python, answers.checkpoint(), encoder.url) as (url, _),
        ServerProcess("gateway", "--encoders", encoder.url, "--engine", url, "--port", "0") as running,
    ):
        yield running.url


@pytest.mark.parametrize("seed", [2, 4])
def test_two_pictures_are_told_apart_in_words_in_either_order(gateway, seed):
    """The expected sentences are those that the scenes were drawn from."""
    asked = answers.draw_questions(seed)[-1]
    assert asked.swapped not in (None, asked.question.answer)
    assert asking.ask(gateway, asked) == asked.question.answer
    assert asking.ask(gateway, replace(asked, pictures=asked.pictures[::-1])) == asked.swapped
    assert asking.ask(gateway, asked) == asked.question.answer


def test_the_demo_drives_vllm_and_says_so():
    command = [sys.executable, "-m", "tectum", "demo", "--engine", "vllm", "--engine-python", str(PYTHON), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert (said["engine"], said["answers_right"], len(said["answers"])) == ("vLLM 0.32.0", True, 4)
    assert said["from_tectum"] == 3, "three scenes, one picture each; the question about two of them repeats those"
    assert all(one["answer"] == one["expected"] == one["one_piece"] for one in said["answers"])
