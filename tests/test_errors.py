"""The error in a server's answer: whatever a server says, its client gets an error of ours."""

from __future__ import annotations

import json

import pytest

from tectum.errors import LifecycleError, TectumError, UnavailableError


def test_the_error_in_an_answer_is_the_one_that_was_raised():
    raised = UnavailableError("overloaded", "The encoder is full", retry_after=3.0)
    found = TectumError.from_answer(503, json.dumps(raised.to_problem()).encode(), "3")
    assert (type(found), found.code, found.status, found.message) == (
        UnavailableError,
        "overloaded",
        503,
        "The encoder is full",
    )
    assert found.retry_after == 3.0
    released = LifecycleError("request_released", "gone", reason="pulled")
    assert TectumError.from_answer(410, json.dumps(released.to_problem()).encode(), "").details == {"reason": "pulled"}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"error": 1}', b"\xff", b"[" * 200_000])
def test_an_answer_that_is_no_problem_is_internal(body):
    found = TectumError.from_answer(502, body, "", "The encoder")
    assert (found.code, found.message) == ("internal", "The encoder answered with status 502 and no reason")


@pytest.mark.parametrize("after", ["", "soon", "-1", "Wed, 21 Oct 2015 07:28:00 GMT", "\N{SUPERSCRIPT TWO}"])
def test_a_retry_after_that_is_no_number_is_not_looked_at(after):
    assert TectumError.from_answer(503, b'{"code": "overloaded"}', after).retry_after is None
