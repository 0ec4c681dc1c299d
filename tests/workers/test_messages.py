"""Messages between the service and an encoder: what goes in comes out, and what is no message is dropped."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tectum.errors import BadRequestError, UnavailableError
from tectum.types import EncodeRequest, ItemMetadata, MediaItem, Modality, RequestMetadata
from tectum.workers import messages
from tectum.workers.router import choose


def test_a_request_arrives_as_it_was_sent():
    items = (
        MediaItem(Modality.IMAGE, data=bytes(range(256))),
        MediaItem(Modality.IMAGE, base64="aGk="),
        MediaItem(Modality.IMAGE, url="data:image/png;base64,aGk="),
    )
    request = EncodeRequest("r", items, 3, 2, options={"max_pixels": 4, "sizes": [1, 2], "deep": {"x": None}})
    (body,) = messages.Frames().feed(messages.frame(messages.to_prepare(7, request)))
    arrived = messages.decode_for_encoder(body)
    assert arrived.ticket == 7
    assert messages.from_prepare(arrived) == request


def test_metadata_arrives_as_it_was_sent():
    items = (ItemMetadata(Modality.IMAGE, 4, (1, 4, 4), 16, (64, 64)), ItemMetadata(Modality.AUDIO, 9, None, 3))
    metadata = RequestMetadata("r", 1, 0, items, 64, 2, "bfloat16")
    (body,) = messages.Frames().feed(messages.frame(messages.Prepared(7, metadata, 0.5)))
    assert messages.decode_from_encoder(body).metadata == metadata


def test_an_error_keeps_its_code_status_item_and_details():
    error = BadRequestError("image_too_large", "The picture is 9x9", item=3, limit=64)
    there = messages.error_of(messages.problem(error))
    assert (type(there), there.to_problem()) == (BadRequestError, error.to_problem())
    full = messages.error_of(messages.problem(UnavailableError("overloaded", "full", retry_after=2.5)))
    assert (full.status, full.retry_after) == (503, 2.5)


@given(st.lists(st.binary(max_size=300)), st.integers(1, 50))
def test_frames_survive_any_cutting(bodies, step):
    frames, stream, found = messages.Frames(), b"", []
    for body in bodies:
        stream += len(body).to_bytes(8, "little") + body
    for start in range(0, len(stream), step):
        found += frames.feed(stream[start : start + step])
    assert found == bodies


@given(st.binary(max_size=200))
def test_garbage_never_decodes_to_anything_but_a_message(data):
    for decode, kinds in (
        (messages.decode_for_encoder, messages.ToEncoder),
        (messages.decode_from_encoder, messages.FromEncoder),
    ):
        try:
            assert isinstance(decode(data), kinds)
        except ValueError:
            pass


def test_a_length_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="a message of"):
        messages.Frames().feed(b"\xff" * 8)


def test_idle_encoders_share_alike_and_the_same_content_meets_again():
    loads = {0: 0, 1: 0, 2: 0}
    for number in range(9):
        loads[choose(loads, b"picture %d" % number)] += 1
    assert loads == {0: 3, 1: 3, 2: 3}
    idle = dict.fromkeys(range(3), 0)
    assert len({choose(idle, b"the same") for _ in range(5)}) == 1
    spread = Counter(choose(idle, b"%d" % number) for number in range(3000))
    assert min(spread.values()) > 900
    stays = sum(choose(idle, b"%d" % n) == choose({0: 0, 1: 0}, b"%d" % n) for n in range(3000))
    assert stays > 1900, "only what was on the lane that went moves"


def test_the_least_loaded_goes_first():
    assert {choose({0: 5, 1: 4, 2: 9}, b"%d" % number) for number in range(20)} == {1}
