"""The load of `tectum bench`: what is drawn, how it is sent, how it is added up, and that a real server agrees."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tectum import Client
from tectum.bench import report
from tectum.bench.generator import Books, Sender, closed_loop
from tectum.bench.link import Links
from tectum.bench.null import NullUnit
from tectum.bench.pictures import Deck, Draw, distinct, jpegs
from tectum.bench.plan import Plan, Size
from tectum.bench.protocols import PROTOCOLS
from tectum.bench.run import add_up, measure, quantiles
from tectum.bench.slow import SlowServer
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, StartupError, TectumError, UnavailableError
from tests.serving.test_native import gauges, nothing_is_held, until

SMALL = Size(56, 56)
LIVE = 8


@pytest.fixture(scope="module")
def null():
    """A server whose encoder does nothing, with room for few requests."""
    flags = ("--allow-private-urls", "--log-level", "warning", "--max-live-requests", str(LIVE))
    with EncoderProcess(Path("null:3x5"), *flags) as process:
        yield process


# --- what is drawn ---


@pytest.mark.parametrize(
    ("text", "size"),
    [("224", Size(224, 224)), ("640x480", Size(640, 480)), ("64x32:0.25", Size(64, 32, 0.25))],
)
def test_a_size_is_read(text, size):
    assert Size.parse(text) == size


@pytest.mark.parametrize("text", ["", "x", "0x5", "5x-1", "99999", "5:0", "5:nan", "5x5x5", "5:inf"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(StartupError) as refused:
        Size.parse(text)
    assert refused.value.code == "invalid_settings"


def test_shares_of_a_plan_add_up_to_it():
    closed = Plan("http://x", clients=8).shares(3)
    assert sorted(part.clients for part in closed) == [2, 3, 3]
    assert len(Plan("http://x", clients=2).shares(3)) == 2
    opened = Plan("http://x", rate=30.0).shares(3)
    assert [part.rate for part in opened] == [10.0] * 3
    assert len({part.seed for part in opened}) == 3
    assert Plan.loads(opened[0].dumps()) == opened[0]


def test_draws_have_the_shares_that_were_asked_for_and_repeat_with_the_seed():
    sizes = (SMALL, Size(84, 56, 3.0))
    plan = Plan("http://x", sizes=sizes, slow_share=0.25, slow_url="http://s", cancel_share=0.1, repeat_share=0.5)
    deck, same = Deck(plan), Deck(plan)
    draws = [deck.draw() for _ in range(4000)]
    assert [same.draw() for _ in range(100)] == draws[:100]
    # four standard deviations of a binomial share over 4000 draws
    assert sum(draw.kind == "slow" for draw in draws) == pytest.approx(1000, abs=110)
    assert sum(draw.cancel_after is not None for draw in draws) == pytest.approx(400, abs=76)
    assert sum(draw.size == SMALL for draw in draws) == pytest.approx(1000, abs=110)
    inline = [draw.picture for draw in draws if draw.picture is not None]
    seen = Counter(inline)
    once = sum(count == 1 for count in seen.values())
    assert once == pytest.approx(len(inline) / 2, abs=110)  # the rest is drawn from 32 pictures of each size
    assert len(seen) - once <= 64
    assert len({draw.url for draw in draws if draw.url}) == sum(draw.kind == "slow" for draw in draws)


def test_distinct_pictures_are_other_bytes_and_the_same_pixels():
    (picture,) = jpegs(SMALL, 1)
    made = {distinct(picture, number) for number in (1, 2, 2**40)}
    assert len(made | {picture}) == 4
    for each in made:  # the comment ends where its length says, and the rest is the picture
        assert each[:4] == b"\xff\xd8\xff\xfe"
        assert each[4 + int.from_bytes(each[4:6], "big") :] == picture[2:]
    pixels = [np.asarray(Image.open(io.BytesIO(each))) for each in (picture, *made)]
    assert all(np.array_equal(pixels[0], other) for other in pixels[1:])


def test_a_closed_loop_asks_a_server_that_is_gone_ten_times_a_second():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        plan = Plan(f"http://127.0.0.1:{taken.getsockname()[1]}", seconds=0.5, clients=4)

        async def ask() -> Books:
            books = Books(time.perf_counter() + plan.seconds)
            sender = Sender(plan, Links(plan.url), PROTOCOLS[plan.protocol](plan), books)
            await closed_loop(plan, Deck(plan), sender, books)
            return books

        books = asyncio.run(ask())
    assert {outcome for _, outcome in books.groups} == {"connection_lost"}
    assert 4 <= books.done <= 4 * 6


def test_arrivals_are_poisson():
    deck = Deck(Plan("http://x", sizes=(SMALL,), pictures=1))
    gaps = np.array([deck.interval(50.0) for _ in range(20_000)])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # as of an exponential distribution


# --- how it is sent ---


def spoken_to(pieces, calls):
    """Answers of a server on loopback that sends `pieces` one by one and closes; `calls` requests on one link."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if calls > 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        links = Links(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        link = await links.take()
        async with asyncio.timeout(10):
            answers = [await link.call(b"GET / HTTP/1.1\r\n\r\n") for _ in range(calls)]
        links.give_back(link)
        links.close()
        server.close()
        return answers

    return asyncio.run(main())


def test_an_answer_in_pieces_is_put_together_and_the_link_used_again():
    pieces = [b"HTTP/1.1 2", b"00 OK\r\nContent-Length: 5\r\nServer-Timing: a;dur=1\r\n\r", b"\nab", b"cde"]
    first, second = spoken_to(pieces, 2)
    assert (first.status, first.body, first.header(b"server-timing")) == (200, b"abcde", b"a;dur=1")
    assert (second.status, second.body) == (503, b"")


@pytest.mark.parametrize(
    "pieces", [[b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"], [b"HTTP/1.1 200 OK\r\n\r\nabc"], [b""]]
)
def test_half_an_answer_is_a_lost_connection(pieces):
    with pytest.raises(ConnectionError):
        spoken_to(pieces, 1)


def test_the_slow_server_takes_its_time_and_serves_the_picture():
    plan = Plan("http://x", sizes=(SMALL,), pictures=2)
    with SlowServer(plan, 0.2) as slow:
        answer = httpx2.get(f"{slow.url}/{SMALL}/1?n=7")
        assert answer.content == distinct(jpegs(SMALL, 2)[1], 7)
        assert answer.elapsed.total_seconds() >= 0.2


# --- how it is added up ---


def book(kind, outcome, latencies, in_window):
    group = {"kind": kind, "outcome": outcome, "latency_us": latencies, "in_window": in_window}
    return {"groups": [group], "stages": {"forward": [2.0]}, "lag_us": [], "cpu": 1.0, "seconds": 4.0}


def test_books_are_added_up():
    books = [book("inline", "ok", [1000, 3000], 2), book("inline", "ok", [2000, 9000], 1)]
    books += [book("inline", "overloaded", [100], 1), book("slow", "ok", [5000], 0)]
    found = add_up(books, seconds=2.0)
    inline = found["kinds"]["inline"]
    assert (inline["sent"], inline["outcomes"], inline["rate"]) == (5, {"ok": 4, "overloaded": 1}, 1.5)
    assert inline["latency_ms"] == {"p50": 3.0, "p90": 9.0, "p99": 9.0, "max": 9.0}
    assert (found["sent"], found["rate"]) == (6, 1.5)  # the slow one came after the window
    assert found["generator_cpu_share"] == 1.0  # four processes, a quarter of a core each
    assert found["stages_ms"] == {"forward": 2.0}


def test_quantiles_are_by_nearest_rank():
    assert quantiles(list(range(1000, 101_000, 1000))) == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 100.0}
    assert quantiles([]) == {}


# --- against a real server ---


def finished(server):
    pattern = r'encoder_requests_total\{modality="image",status="(\w+)"\}'
    return {m[1]: value for name, value in gauges(server).items() if (m := re.fullmatch(pattern, name))}


def test_the_server_counted_what_the_load_says(server):
    before = finished(server).get("ok", 0)
    result = measure(Plan(server.url, seconds=1.0, clients=3, sizes=(SMALL,)), processes=2, probe=0.05)
    found = result["kinds"]["inline"]
    assert found["outcomes"] == {"ok": found["sent"]}
    assert finished(server)["ok"] - before == found["sent"] + 1  # and the one that was tried first
    assert found["rate"] > 0
    assert set(result["stages_ms"]) == {"fetch", "prepare", "queue", "forward"}
    for probe in (result["probes"]["live"], result["probes"]["release"]):
        assert probe["outcomes"] == {"ok": probe["sent"]}
        assert probe["latency_ms"]["p50"] > 0
    assert "send_lag_ms" not in result


@pytest.fixture(scope="module")
def sglangs(tiny):
    """A server with SGLang's doors open."""
    flags = ("--forward-threads", "1", "--log-level", "warning", "--transfer-backend", "zmq_to_scheduler")
    with EncoderProcess(tiny, *flags, "--allow-private-urls") as process:
        yield process


def test_a_load_in_sglangs_protocol_waits_for_its_rows(sglangs):
    plan = Plan(sglangs.url, seconds=1.0, clients=3, sizes=(SMALL,), protocol="sglang", slow_share=0.2)
    before = gauges(sglangs).get('encoder_releases_total{reason="delivered"}', 0)
    result = measure(plan, probe=0.05, slow_seconds=0.1)
    kinds = result["kinds"]
    assert [kind["outcomes"] for kind in kinds.values()] == [{"ok": kind["sent"]} for kind in kinds.values()]
    until(lambda: nothing_is_held(sglangs))
    delivered = gauges(sglangs)['encoder_releases_total{reason="delivered"}'] - before
    assert delivered == result["sent"] + 2  # and one of each kind that was tried first
    assert kinds["slow"]["latency_ms"]["p50"] >= 100
    (probed,) = result["probes"].values()
    assert probed["outcomes"] == {"ok": probed["sent"]}


@pytest.mark.parametrize(
    ("picture", "code"), [(b"no picture", "unsupported_media"), (b"", "empty_media")], ids=["no picture", "nothing"]
)
def test_what_sglangs_door_refuses_is_booked_by_its_code(sglangs, picture, code):
    async def ask() -> str:
        plan = Plan(sglangs.url)
        links, speaker = Links(plan.url), PROTOCOLS["sglang"](plan)
        async with asyncio.timeout(20):
            outcome = await speaker.encode(links, Draw(SMALL, picture, "", None))
        speaker.close()
        links.close()
        return outcome.code

    assert asyncio.run(ask()) == code
    until(lambda: nothing_is_held(sglangs))


def test_callers_in_sglangs_protocol_that_hang_up_leave_nothing_behind(sglangs):
    plan = Plan(sglangs.url, seconds=1.0, clients=6, sizes=(SMALL,), protocol="sglang")
    result = measure(replace(plan, cancel_share=0.5, cancel_within=0.02))
    outcomes = result["kinds"]["inline"]["outcomes"]
    assert set(outcomes) == {"ok", "cancelled"}
    until(lambda: nothing_is_held(sglangs))


def test_slow_urls_take_as_long_as_their_server_and_the_others_do_not(null):
    plan = Plan(null.url, seconds=1.0, rate=8.0, sizes=(SMALL,), slow_share=0.5)
    result = measure(plan, slow_seconds=0.5)
    assert result["kinds"]["slow"]["latency_ms"]["p50"] >= 500
    assert result["kinds"]["inline"]["latency_ms"]["p50"] < 500
    assert result["send_lag_ms"]["p50"] >= 0


def test_beyond_its_limit_all_that_was_sent_was_answered_or_refused(null):
    before = gauges(null).get('encoder_refusals_total{code="overloaded"}', 0)
    result = measure(Plan(null.url, seconds=1.0, clients=4 * LIVE, sizes=(SMALL,), slow_share=0.5), slow_seconds=0.3)
    outcomes = Counter()
    for kind in result["kinds"].values():
        outcomes.update(kind["outcomes"])
    assert set(outcomes) == {"ok", "overloaded"}
    assert sum(outcomes.values()) == result["sent"]
    assert gauges(null)['encoder_refusals_total{code="overloaded"}'] - before == outcomes["overloaded"]


def test_callers_that_hang_up_leave_nothing_behind(null):
    plan = Plan(null.url, seconds=1.0, clients=6, sizes=(SMALL,), slow_share=0.5, cancel_share=0.5, cancel_within=0.2)
    result = measure(plan, slow_seconds=0.2)
    assert sum(kind["outcomes"].get("cancelled", 0) for kind in result["kinds"].values()) > 0
    until(lambda: nothing_is_held(null))


def test_the_null_encoder_answers_its_rows(null):
    with Client(null.url) as client:
        embedding = client.encode([jpegs(SMALL, 1)[0], b"no picture at all"])
    assert tuple(embedding.rows.shape) == (6, 5)
    assert embedding.item_rows == (3, 3)
    assert not embedding.rows.any()


@pytest.mark.parametrize("name", ["null:", "null:0x4", "null:4", "null:4x4x4", "null:9999999x4"])
def test_a_null_encoder_needs_a_shape(name):
    with pytest.raises(StartupError) as refused:
        NullUnit(name)
    assert refused.value.code == "model_not_found"


def test_a_server_that_refuses_or_is_not_there_is_said_at_once(server):
    with pytest.raises(BadRequestError, match="--allow-private-urls"):
        measure(Plan(server.url, sizes=(SMALL,), slow_share=1.0))
    with pytest.raises(UnavailableError) as gone:
        measure(Plan("http://127.0.0.1:9", sizes=(SMALL,)))
    assert gone.value.code == "server_unreachable"
    with pytest.raises(TectumError):
        measure(Plan("ftp://127.0.0.1", sizes=(SMALL,)))


def test_the_command_prints_a_table_or_json(null):
    command = [sys.executable, "-m", "tectum", "bench", null.url, "--seconds", "0.3", "--size", "56", "--clients", "2"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "inline" in table
    assert "of a core" in table
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    result = json.loads(done.stdout)
    assert result["kinds"]["inline"]["sent"] == result["sent"] > 0
    assert "token" not in result["plan"]


def test_a_table_names_each_kind_and_what_went_wrong():
    found = add_up([book("inline", "ok", [1000], 1), book("inline", "overloaded", [100], 1)], 1.0)
    console = Console(record=True, width=140, file=io.StringIO())
    report.show(console, {"plan": Plan("http://x", rate=5.0).describe(), **found})
    text = console.export_text()
    assert "5 requests/s, open loop" in text
    assert "1 overloaded" in text
