"""How many encoders run, as work queues up and drains."""

from __future__ import annotations

import asyncio

import pytest

from tectum.workers import pool as pools
from tectum.workers import scaling
from tectum.workers.scaling import GROW_AFTER, SHRINK_AFTER, Scaler
from tests.workers.harness import Dialling, house, requests


def test_it_grows_to_what_a_lasting_queue_needs_and_shrinks_one_by_one():
    scaler = Scaler(least=1, most=4, patches=100)
    assert scaler.wanted(1, 100, 0.0) == 1
    assert scaler.wanted(1, 250, 1.0) == 1, "a moment is no queue"
    assert scaler.wanted(1, 250, 1.0 + GROW_AFTER) == 3
    assert scaler.wanted(3, 9_999, 10.0) == 3
    assert scaler.wanted(3, 9_999, 10.0 + GROW_AFTER) == 4, "never more than the most"
    assert scaler.wanted(4, 0, 20.0) == 4
    assert scaler.wanted(4, 0, 19.9 + SHRINK_AFTER) == 4
    assert scaler.wanted(4, 0, 20.0 + SHRINK_AFTER) == 3
    assert scaler.wanted(3, 0, 20.1 + SHRINK_AFTER) == 3, "each step waits again"
    assert scaler.wanted(1, 0, 1000.0) == 1, "never fewer than the least"


def test_a_queue_that_drains_in_between_starts_the_clock_again():
    scaler = Scaler(least=1, most=4, patches=100)
    assert scaler.wanted(1, 250, 0.0) == 1
    assert scaler.wanted(1, 50, 1.9) == 1
    assert scaler.wanted(1, 250, 2.0) == 1
    assert scaler.wanted(1, 250, 2.1) == 1
    assert scaler.wanted(2, 300, 5.0) == 3


def test_a_pool_takes_on_an_encoder_for_queued_work_and_lets_it_go_idle(tiny, monkeypatch):
    monkeypatch.setattr(scaling, "GROW_AFTER", 0.0)
    monkeypatch.setattr(scaling, "SHRINK_AFTER", 0.0)
    monkeypatch.setattr(pools, "LOOK_EVERY", 0.05)
    settings = {"workers": "ray://auto", "replicas": 1, "max_replicas": 2, "replica_patches": 100}
    with house(str(tiny), Dialling, **settings) as made:

        async def test():
            assert (made.pool.lanes, made.pool.up) == (2, 1)
            parts = await asyncio.gather(*(made.stages.prepare(each) for each in requests(6)))
            assert {part.lane for part in parts} == {0}
            assert sum(part.metadata.patches for part in parts) > 100
            await made.until(lambda: made.pool.up == 2)
            late = await made.stages.prepare(requests(7)[6])
            assert late.lane == 1, "the new one has less to do"
            for part in parts:
                made.stages.forget(part)
            await made.until(lambda: made.pool._lanes[1].leaving)
            after = await made.stages.prepare(requests(8)[7])
            assert after.lane == 0, "one that leaves gets no new work, however little it has"
            assert made.pool.up == 2, "it finishes what it has"
            (staged,) = await made.stages.encode([late])
            made.stages.free(staged)
            await made.until(lambda: made.pool.up == 1)
            assert made.pool.restarts == 0
            assert made.lost == []
            made.stages.forget(after)

        made.run(test())


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_ray_gives_and_takes_encoders(tiny, cluster, monkeypatch):
    monkeypatch.setattr(scaling, "SHRINK_AFTER", 0.0)
    with house(str(tiny), workers=cluster.address, replicas=1, max_replicas=3, replica_patches=100) as made:

        async def test():
            parts = await asyncio.gather(*(made.stages.prepare(each) for each in requests(9)))
            await made.until(lambda: made.pool.up == 3)
            for part in parts:
                made.stages.forget(part)
            await made.until(lambda: made.pool.up == 1)
            (part,) = [await made.stages.prepare(each) for each in requests(1)]
            (staged,) = await made.stages.encode([part])
            made.stages.free(staged)

        made.run(test())
