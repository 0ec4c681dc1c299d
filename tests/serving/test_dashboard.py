"""The live page's data: what is remembered, what a page is told, and that nothing runs for a page that is closed.

The page itself is tested in a browser (`make test-browser`).
"""

from __future__ import annotations

import json
import time

import httpx2
import pytest

from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, UnavailableError
from tectum.lifecycle.events import Reason
from tectum.pipeline.work import Job, PreparedPart
from tectum.serving.dashboard import PAGES, Recent
from tectum.types import EncodeRequest, ItemMetadata, MediaItem, Modality, RequestMetadata
from tests.serving.test_native import gauges, jpeg, until


def job(number: int, forward: float | None = 0.2, media: bytes = b"secret pixels") -> Job:
    request = EncodeRequest(f"r{number}", (MediaItem(Modality.IMAGE, data=media),))
    made = Job(number, request, 0.0)
    if forward is not None:
        item = ItemMetadata(Modality.IMAGE, 6, (1, 4, 6), 24)
        metadata = RequestMetadata(request.req_id, 1, 0, (item,), 64, 0, "float32")
        made.prepared = PreparedPart(metadata, ticket=number)
        made.seconds = {"fetch": 0.0, "prepare": 0.1, "queue": 0.05, "forward": forward}
    return made


def events(url: str, since: int = 0):
    """The events of a page that is open as long as this is read."""
    with httpx2.stream("GET", f"{url}/dashboard/events?since={since}", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_outcomes_are_remembered_up_to_a_bound_and_counted_for_ever():
    recent = Recent(kept=3)
    for number in range(1, 6):
        recent.sent(job(number), "inline", 0.15, None)
        recent.ended(job(number), Reason.DELIVERED, None, 0.5)
        recent.freed(job(number))
    assert [outcome["req_id"] for outcome in recent.outcomes] == ["r3", "r4", "r5"]
    assert (recent.ended_count, recent.items, recent.rows) == (5, 5, 30)
    assert [outcome["number"] for outcome in recent.since(4)] == [5]
    assert [outcome["number"] for outcome in recent.since(0)] == [3, 4, 5]
    assert recent.since(5) == recent.since(99) == []
    assert recent.outcomes[0]["stages"] == {"fetch": 0.0, "prepare": 0.1, "queue": 0.05, "forward": 0.2, "send": 0.15}
    recent.ended(job(6), Reason.EXPIRED, None, 9.0)
    assert "send" not in recent.outcomes[-1]["stages"], "a delivery is its own request's"
    assert "secret" not in json.dumps(list(recent.outcomes))


def test_percentiles_are_nearest_ranks_of_what_went_well():
    recent = Recent()
    for number in range(1, 101):
        recent.ended(job(number, forward=number / 1000), Reason.DELIVERED, None, 1.0)
    failure = BadRequestError("media_decode_failed", "The picture cannot be decoded", item=0)
    recent.ended(job(101, forward=None), Reason.ENCODE_FAILED, failure, 9.0)
    assert recent.percentiles()["forward"] == [0.050, 0.099]
    assert recent.percentiles()["total"] == [1.0, 1.0]
    assert recent.outcomes[-1]["error"]["code"] == "media_decode_failed"
    recent.refused(UnavailableError("overloaded", "The encoder is full"))
    assert recent.refusals == {"overloaded": 1}


def test_a_page_is_told_once_a_second_and_only_what_is_new(server):
    page = events(server.url)
    first = next(page)
    assert first["limits"]["live"] == 256
    assert first["workers"][0]["pid"] not in (None, server.pid)
    parts = {"request": (None, json.dumps({"req_id": "seen", "items": [{"type": "image", "file": "f"}]})), "f": jpeg()}
    began = time.monotonic()
    assert httpx2.post(f"{server.url}/v1/encode", files=parts).status_code == 200
    told = [next(page), next(page)]
    new = [outcome for state in told for outcome in state["outcomes"]]
    assert [outcome["req_id"] for outcome in new] == ["seen"]
    assert set(new[0]["stages"]) == {"fetch", "prepare", "queue", "forward", "send"}
    assert new[0]["metadata"]["item_rows"] == [64]
    assert told[-1]["totals"]["ended"] == first["totals"]["ended"] + 1
    assert time.monotonic() - began > 0.9
    page.close()
    until(lambda: gauges(server)["encoder_live_pages"] == 0)


def test_a_held_request_is_shown_while_it_lives(server):
    body = {
        "request": (
            None,
            json.dumps({"req_id": "held", "items": [{"type": "image", "file": "f"}], "delivery": {"mode": "hold"}}),
        )
    }
    assert httpx2.post(f"{server.url}/v1/encode", files={**body, "f": jpeg()}).status_code == 200
    state = next(events(server.url))
    assert state["live"]["staged"] == 1
    assert state["staged_bytes"] == state["living"][0]["metadata"]["bytes"] == 64 * 64 * 4
    httpx2.delete(f"{server.url}/v1/requests/held")
    assert next(events(server.url))["live"]["staged"] == 0


def test_pages_are_bounded(server):
    pages = [events(server.url) for _ in range(PAGES)]
    for page in pages:
        next(page)
    answer = httpx2.get(f"{server.url}/dashboard/events")
    assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
    for page in pages:
        page.close()
    until(lambda: gauges(server)["encoder_live_pages"] == 0)
    assert next(events(server.url))["closing"] is False


@pytest.mark.parametrize("name", ["main.js", "vendor/uPlot.min.css", "samples/cat.jpg"])
def test_files_of_the_page_come_with_its_policy(server, name):
    answer = httpx2.get(f"{server.url}/dashboard/static/{name}")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["../dashboard.py", "%2e%2e/dashboard.py", "index.html", "samples/LICENSES.md", ""])
def test_no_other_file_is_served(server, name):
    assert httpx2.get(f"{server.url}/dashboard/static/{name}").status_code == 404


def test_an_open_page_does_not_hold_up_the_shutdown(tiny):
    with EncoderProcess(tiny, "--forward-threads", "1", "--log-level", "warning") as server:
        page = events(server.url)
        next(page)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 6
        assert not [line for line in server.lines if "ERROR" in line or "Traceback" in line]


def test_where_there_is_a_token_ids_can_be_told_apart_and_not_used():
    recent = Recent(masked=True)
    shown = recent.shown("secret-id-1")
    assert shown == recent.shown("secret-id-1") != recent.shown("secret-id-2")
    assert "secret-id" not in shown
    assert Recent().shown("plain") == "plain"
