"""`Encoder`: what it says to wrong arguments, and its end."""

from __future__ import annotations

import threading

import pytest

from tectum import Encoder
from tectum.errors import MMError, StartupError
from tests import zoo


@pytest.fixture(scope="module")
def encoder(tiny):
    with Encoder(str(tiny), forward_threads=1) as made:
        yield made


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        ({"modality": "smell"}, "unsupported_modality", 400),
        ({"modality": None}, "unsupported_modality", 400),
        ({"options": [("max_pixels", 1)]}, "invalid_option", 400),
        ({"options": {"max_pixels": "many"}}, "invalid_option", 400),
        ({"deadline_ms": 0}, "invalid_request", 400),
        ({"deadline_ms": 1.5}, "invalid_request", 400),
    ],
)
def test_wrong_arguments_are_errors_of_the_tree_and_leave_it_working(encoder, arguments, code, status):
    with pytest.raises(MMError) as caught:
        encoder.encode(zoo.picture(64, 64), **arguments)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert encoder.encode(zoo.picture(64, 64)).rows.shape[0] == 4


def test_an_encoder_that_cannot_start_leaves_no_thread(tiny):
    before = threading.active_count()
    with pytest.raises(StartupError, match="is no host"):
        Encoder(str(tiny), allowed_media_hosts="any@host")
    assert threading.active_count() == before


def test_a_call_while_the_encoder_closes_is_refused_at_once(tiny):
    encoder = Encoder(str(tiny), forward_threads=1)
    goes_on, closing = threading.Event(), threading.Thread(target=encoder.close)
    said: list[str] = []

    def ask() -> None:
        try:
            encoder.encode(zoo.picture(64, 64))
        except MMError as error:
            said.append(error.code)

    encoder._loop.call_soon_threadsafe(goes_on.wait, 30)  # so that the end takes as long as this test
    closing.start()
    try:
        while not encoder._closed:
            closing.join(0.01)
        asked = threading.Thread(target=ask)
        asked.start()
        asked.join(5)
        assert said == ["shutting_down"], "it waits for the end of others"
    finally:
        goes_on.set()
        closing.join(30)
    assert not closing.is_alive()


def test_closing_from_several_threads_at_once_ends_and_later_calls_say_so(tiny):
    encoder = Encoder(str(tiny), forward_threads=1)
    threads = [threading.Thread(target=encoder.close, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    with pytest.raises(MMError) as caught:
        encoder.encode(zoo.picture(64, 64))
    assert (caught.value.code, caught.value.status) == ("shutting_down", 503)
