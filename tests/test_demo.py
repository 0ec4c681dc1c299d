"""The demo proves equality, and would show a difference."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from tectum.demo.run import Receiver
from tectum.engines.client import Client, TimedEmbedding


def test_the_demo_is_equal_in_two_processes():
    command = [sys.executable, "-m", "tectum", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert (found["images"], found["rows_equal"], found["logits_equal"]) == (4, True, True)
    assert found["encoder_pid"] != found["receiver_pid"]
    assert [prompt["rows"] for prompt in found["prompts"]] == [256, 176, 176, 176, 784]


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
        assert receiver.compare(client, [coffee]).equal
        swapped = receiver.compare(Swapping(client), [coffee])
    assert not swapped.rows_equal
    assert not swapped.logits_equal
    assert swapped.logits_max_abs > 1e-3
