"""Staging memory: leases, generations, the budget, and closing."""

from __future__ import annotations

import os
import random

import pytest

from tectum.delivery.staging import KEPT, SMALLEST, StagingMap, StagingPool
from tectum.errors import LifecycleError, UnavailableError


def test_another_process_writes_where_receivers_read():
    pool = StagingPool(1 << 20)
    there = StagingMap(os.dup(pool.fd))
    lease = pool.lease(24, arrays=3)
    there.memory(lease.offset, 24)[:] = bytes(range(24))
    assert [bytes(view) for view in lease.views()] == [bytes(range(i, i + 8)) for i in (0, 8, 16)]


def test_a_stale_lease_is_refused_never_misread():
    pool = StagingPool(1 << 20)
    lease = pool.lease(4)
    pool.give_back(lease)
    reused = pool.lease(4)
    reused.view()[:] = b"mine"
    assert reused.offset == lease.offset, "the block given back last is warm, and handed out first"
    with pytest.raises(LifecycleError, match="belongs to others"):
        lease.view()
    assert bytes(reused.view()) == b"mine"
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(lease)


def test_the_budget_is_kept_and_given_back():
    pool = StagingPool(100)
    lease = pool.lease(80)
    with pytest.raises(UnavailableError) as full:
        pool.lease(40)
    assert full.value.code == "overloaded"
    pool.give_back(lease)
    assert (pool.leased_bytes, pool.leases) == (0, 0)
    pool.give_back(pool.lease(100))


def test_a_closing_pool_refuses_and_says_so():
    pool = StagingPool(1000)
    lease = pool.lease(3)
    lease.view()[:] = b"abc"
    pool.close()
    with pytest.raises(UnavailableError) as closing:
        pool.lease(3)
    assert closing.value.code == "shutting_down"
    assert bytes(lease.view()) == b"abc"
    pool.give_back(lease)
    assert pool.fd == -1, "the memory goes with the last lease"


def test_leases_never_overlap_and_everything_can_be_leased_again():
    rng, pool, held = random.Random(5), StagingPool(64 * SMALLEST), []
    for step in range(3000):
        if held and rng.random() < 0.5:
            lease, mark = held.pop(rng.randrange(len(held)))
            assert bytes(lease.view()) == mark * lease.nbytes, "somebody else wrote here"
            pool.give_back(lease)
            continue
        try:
            lease = pool.lease(rng.choice([1, 700, SMALLEST, SMALLEST + 1, 5 * SMALLEST]))
        except UnavailableError:
            continue
        mark = bytes([step % 251])
        lease.view()[:] = mark * lease.nbytes
        held.append((lease, mark))
    for lease, _ in held:
        pool.give_back(lease)
    whole = pool.lease(64 * SMALLEST)
    assert (whole.offset, pool.leases) == (0, 1)


def test_memory_that_nobody_leases_goes_back_to_the_system():
    pool = StagingPool(KEPT + (64 << 20))
    leases = [pool.lease(32 << 20) for _ in range(KEPT // (32 << 20) + 2)]
    for lease in leases:
        view = lease.view()
        for page in range(0, lease.nbytes, 4096):
            view[page] = 1
    assert os.fstat(pool.fd).st_blocks * 512 > KEPT
    for lease in leases:
        pool.give_back(lease)
    assert os.fstat(pool.fd).st_blocks * 512 <= KEPT
