"""The measurement counts what it says, and the checkpoint that ships passes a short one."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random

import pytest

from demo import evaluate


def test_the_shipped_model_answers():
    command = [sys.executable, "-m", "demo.evaluate", "--json", "--prompts", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    found = {(one["kind"], one["pictures"], one["most_shapes"]): one["share"] for one in json.loads(done.stdout)}
    assert set(found) == {case[:3] for case in evaluate.CASES}
    assert min(found["describe", 1, 2], found["color", 1, 2], found["count", 1, 2]) >= 0.75
    assert found["each", 2, 2] >= 0.5


def test_held_out_scenes_have_the_kind_and_the_shapes_that_are_asked_for():
    rng = Random(3)
    for kind, pictures, most, _ in evaluate.CASES:
        asked, drawn = evaluate._draw(rng, kind, pictures, most)
        assert (asked.kind, len(drawn)) == (kind, pictures)
        if kind == "each":
            assert asked.answer.count(":") == pictures
        if kind == "describe":
            assert (
                1
                <= asked.answer.count(" in the ") + asked.answer.count(" on the ") + asked.answer.count(" at the ")
                <= most
            )


def test_only_the_exact_answer_counts():
    class Parrot:
        """A receiver that is always almost right."""

        def prompt(self, pictures, question):
            return question

        def answers_in_one_piece(self, prompts, pictures):
            return ["a orange star in the middle" for _ in prompts]

    scored = evaluate.score(Parrot(), ("describe", 1, 2, 0.97), 20, quiet=True)
    assert (scored.right, scored.asked, scored.share) == (0, 20, 0.0)


def test_the_interval_is_wilsons():
    low, high = evaluate.Score("describe", 1, 2, 81, 263, None).interval()
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe (1998), table I, method 3
