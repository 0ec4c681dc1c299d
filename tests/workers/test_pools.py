"""What every pool of encoders does, wherever they run: one suite for local processes, the TCP line and Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tectum.config import Settings
from tectum.errors import InternalError, TectumError, UnavailableError
from tectum.models.load import load_adapter
from tectum.pipeline.local import LocalEncoder
from tectum.pipeline.stages import Stages
from tectum.pipeline.work import PreparedPart, Staged
from tectum.types import EncodeRequest
from tectum.workers.messages import LENGTH, Encode
from tectum.workers.remote import RemoteLine
from tests import zoo
from tests.workers.harness import FLAGS, Dialling, House, house, picture, request, requests

LANES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL: its rows are several arrays."""
    return zoo.build("qwen3_vl", tmp_path_factory.mktemp("pools") / "tiny-qwen3-vl")


@pytest.fixture(scope="module", params=["local", "tcp", pytest.param("ray", marks=pytest.mark.ray)])
def built(request: pytest.FixtureRequest, model: Path) -> Iterator[House]:
    """A running pool of each kind, shared by the tests."""
    if request.param == "local":
        made = house(str(model), workers=LANES)
    elif request.param == "tcp":
        made = house(str(model), Dialling, workers="ray://auto", replicas=LANES)
    else:
        made = house(str(model), workers=request.getfixturevalue("cluster").address, replicas=LANES)
    with made as running:
        yield running


@pytest.fixture
def pool(built: House) -> Iterator[House]:
    """The pool, with all lanes up before a test and nothing left in them after it."""
    built.run(built.all_up())
    built.lost.clear()
    yield built
    built.run(built.all_up())
    left = [(lane.pending, lane.queued) for lane in built.pool._lanes]
    assert left == [({}, {})] * LANES


async def on_each_lane(pool: House, times: int = 1) -> list[list[PreparedPart]]:
    """`times` prepared parts on every lane."""
    parts = await asyncio.gather(*(pool.stages.prepare(each) for each in requests(times * LANES)))
    return [[part for part in parts if part.lane == lane] for lane in range(LANES)]


async def runs(pool: House, part: PreparedPart) -> bool:
    """Whether the part's encoder still has its inputs: a forward over them ends well."""
    (result,) = await pool.stages.encode([part])
    if isinstance(result, Staged):
        pool.stages.free(result)
    return isinstance(result, Staged)


async def has_nothing(pool: House, lane: int, ticket: int, like: PreparedPart) -> None:
    """The encoder of a lane knows no inputs under `ticket`: it is asked, past the pool's own books."""
    lease = pool.stages.pool.lease(like.metadata.nbytes, 1 + like.metadata.deepstack_layers)
    number = next(pool.pool._numbers)
    with pytest.raises(InternalError, match="KeyError") as caught:
        await pool.pool._ask(pool.pool._lanes[lane], number, Encode(number, [(ticket, lease.offset, lease.nbytes)]))
    assert caught.value.code == "encode_failed"
    pool.stages.pool.give_back(lease)


async def lost(*work: asyncio.Future[object]) -> None:
    """Each of them fails with `worker_lost`, that a caller may retry."""
    for ended in await asyncio.gather(*work, return_exceptions=True):
        assert isinstance(ended, UnavailableError), ended
        assert (ended.code, ended.status, ended.retryable) == ("worker_lost", 503, True)


@contextmanager
def stopped(pool: House, *lanes: int) -> Iterator[None]:
    """The encoders of these lanes stand still: what they are given stays as it is."""
    pids = [pool.line(lane).pid for lane in lanes]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # the test ended it


def test_nine_requests_over_three_idle_encoders_are_three_each(pool: House) -> None:
    async def test() -> None:
        parts = await asyncio.gather(*(pool.stages.prepare(each) for each in requests(9)))
        assert Counter(part.lane for part in parts) == {0: 3, 1: 3, 2: 3}
        for part in parts:
            pool.stages.forget(part)

    pool.run(test())


def test_rows_equal_those_of_an_encoder_in_this_process_to_the_bit(pool: House, model: Path) -> None:
    shapes = [[(96, 96)], [(64, 200), (120, 90)], [(256, 256)] * 16]  # the last one: 1 MB of rows

    async def rows(stages: Stages, asked: EncodeRequest) -> list[bytes]:
        part = await stages.prepare(asked)
        (staged,) = await stages.encode([part])
        assert isinstance(staged, Staged)
        got = [bytes(view) for view in staged.lease.views()]
        stages.free(staged)
        return got

    async def test() -> None:
        settings = Settings.load(**FLAGS)
        threads = torch.get_num_threads()
        async with Stages(LocalEncoder(load_adapter(str(model), device="cpu"), settings), settings) as here:
            for seed, sizes in enumerate(shapes):
                asked = request(f"r{seed}", *(picture(*size, seed) for size in sizes))
                expected = await rows(here, asked)
                assert len(expected) == 4, "the rows, and three deepstack layers"
                assert any(expected[1])
                for _ in range(LANES):
                    assert await rows(pool.stages, asked) == expected
        torch.set_num_threads(threads)

    pool.run(test())


def test_a_killed_encoder_fails_its_work_at_once_and_its_lane_comes_back(pool: House) -> None:
    async def test() -> None:
        first = await on_each_lane(pool, times=2)
        lane = 1
        (waits, runs_), pid, restarts = first[lane], pool.line(lane).pid, pool.pool.restarts
        with stopped(pool, lane):
            preparing = [asyncio.ensure_future(pool.stages.prepare(each)) for each in requests(LANES)]
            encoding = asyncio.ensure_future(pool.stages.encode([runs_]))
            await pool.until(lambda: sum(task.done() for task in preparing) == LANES - 1)
            await pool.until(lambda: len(pool.pool._lanes[lane].pending) == 2)
            killed = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            (in_prepare,) = [task for task in preparing if not task.done()]
            await lost(in_prepare, encoding)
            assert time.monotonic() - killed < 0.5, "it waited for something"
        assert pool.lost == [lane]
        assert pool.stages.pool.leases == 0, "the forward that died gave its memory back"
        await lost(asyncio.ensure_future(pool.stages.encode([waits])))
        others = [part for each in (0, 2) for part in first[each]] + [
            t.result() for t in preparing if t is not in_prepare
        ]
        assert all([await runs(pool, part) for part in others]), "the others lost nothing"
        await pool.all_up()
        assert pool.pool.restarts == restarts + 1
        assert pool.line(lane).pid != pid
        for (part,) in await on_each_lane(pool):
            assert await runs(pool, part)

    pool.run(test())


def test_a_lane_that_is_down_gets_no_work(pool: House) -> None:
    async def test() -> None:
        os.kill(pool.line(0).pid, signal.SIGKILL)
        await pool.until(lambda: pool.pool.up == LANES - 1)
        parts = await asyncio.gather(*(pool.stages.prepare(each) for each in requests(6)))
        assert Counter(part.lane for part in parts) == {1: 3, 2: 3}
        for part in parts:
            pool.stages.forget(part)

    pool.run(test())


@pytest.mark.parametrize(
    ("media", "code", "status"),
    [(picture(64, 64)[:80], "media_decode_failed", 400), (b"not a picture at all", "unsupported_media", 415)],
)
def test_bad_media_keep_code_status_and_item_over_the_hop(pool: House, media: bytes, code: str, status: int) -> None:
    async def test() -> None:
        with pytest.raises(TectumError) as caught:
            await pool.stages.prepare(request("r", picture(64, 64), media, picture(64, 64)))
        error = caught.value
        assert (error.code, error.status, error.item) == (code, status, 1)
        for (part,) in await on_each_lane(pool):
            assert await runs(pool, part), "the next request is served"

    pool.run(test())


def test_a_cancelled_prepare_leaves_no_inputs_behind(pool: House) -> None:
    async def test() -> None:
        with stopped(pool, *range(LANES)):
            preparing = asyncio.ensure_future(pool.stages.prepare(requests(1)[0]))
            await pool.until(lambda: any(lane.pending for lane in pool.pool._lanes))
            (lane,) = [lane for lane in pool.pool._lanes if lane.pending]
            (ticket,) = lane.queued
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            assert preparing.cancelled()
        after = await on_each_lane(pool)  # whatever came before it is done
        await has_nothing(pool, lane.number, ticket, after[0][0])
        for (part,) in after:
            assert await runs(pool, part), "what was not cancelled is there"

    pool.run(test())


def test_a_forgotten_part_frees_its_inputs(pool: House) -> None:
    async def test() -> None:
        for forgotten, kept in await on_each_lane(pool, times=2):
            pool.stages.forget(forgotten)
            pool.stages.forget(forgotten)
            await has_nothing(pool, forgotten.lane, forgotten.ticket, forgotten)
            assert await runs(pool, kept)
            await has_nothing(pool, kept.lane, kept.ticket, kept)

    pool.run(test())


def heard(line: object, data: bytes) -> None:
    """Have a line read these bytes, as from its socket."""
    if not isinstance(line, RemoteLine):
        line.data_received(data)  # type: ignore[attr-defined]
        return
    while data:
        buffer = line.get_buffer(len(data))
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        line.buffer_updated(size)
        data = data[size:]


@pytest.mark.parametrize("body", [b"\xc1\xff garbage", b"\x93\xa7Encoded\x01", b"\x80"])
def test_garbage_from_an_encoder_is_counted_and_dropped(pool: House, body: bytes) -> None:
    async def test() -> None:
        line = pool.line(0)
        before, restarts = line.garbage, pool.pool.restarts
        heard(line, LENGTH.pack(len(body)) + body)
        assert line.garbage == before + 1
        for (part,) in await on_each_lane(pool):
            assert await runs(pool, part)
        assert pool.line(0) is line
        assert pool.pool.restarts == restarts

    pool.run(test())


def test_garbage_to_an_encoder_is_dropped(pool: House) -> None:
    async def test() -> None:
        line = pool.line(0)
        assert line._transport is not None
        line._transport.write(LENGTH.pack(9) + b"\xc1 garbage")
        for (part,) in await on_each_lane(pool):
            assert await runs(pool, part)
        assert pool.line(0) is line

    pool.run(test())


def test_an_encoder_whose_messages_have_no_end_is_replaced(pool: House) -> None:
    async def test() -> None:
        pid = pool.line(2).pid
        heard(pool.line(2), LENGTH.pack(1 << 60))
        await pool.until(lambda: pool.lost == [2])
        await pool.all_up()
        assert pool.line(2).pid != pid
        for (part,) in await on_each_lane(pool):
            assert await runs(pool, part)

    pool.run(test())
