"""Staging memory: leases, generations, the budget, and closing."""

from __future__ import annotations

import pytest
import torch

from tectum.delivery.staging import StagingPool
from tectum.errors import LifecycleError, UnavailableError


def test_staged_rows_do_not_share_memory_with_the_forward():
    pool = StagingPool(1 << 20)
    rows = torch.arange(12.0).reshape(3, 4)
    lease = pool.stage([rows, rows + 1])
    rows.zero_()
    first, second = lease.arrays()
    assert first.tolist() == torch.arange(12.0).reshape(3, 4).tolist()
    assert second.tolist() == (torch.arange(12.0) + 1).reshape(3, 4).tolist()


def test_a_stale_lease_is_refused_never_misread():
    pool = StagingPool(1 << 20)
    lease = pool.stage([torch.ones(2, 2)])
    pool.give_back(lease)
    reused = pool.stage([torch.full((2, 2), 7.0)])
    with pytest.raises(LifecycleError, match="belongs to others"):
        lease.arrays()
    assert reused.arrays()[0].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(lease)


def test_the_budget_is_kept_and_given_back():
    pool = StagingPool(100)
    lease = pool.stage([torch.zeros(20)])
    with pytest.raises(UnavailableError) as full:
        pool.stage([torch.zeros(10)])
    assert full.value.code == "overloaded"
    pool.give_back(lease)
    assert (pool.leased_bytes, pool.leases) == (0, 0)
    pool.give_back(pool.stage([torch.zeros(25)]))


def test_a_closing_pool_refuses_and_says_so():
    pool = StagingPool(1000)
    lease = pool.stage([torch.ones(3)])
    pool.close()
    with pytest.raises(UnavailableError) as closing:
        pool.stage([torch.ones(3)])
    assert closing.value.code == "shutting_down"
    assert lease.arrays()[0].tolist() == [1.0, 1.0, 1.0]
    pool.give_back(lease)


@pytest.mark.gpu
def test_rows_from_the_device_land_in_pinned_memory_on_a_stream_of_their_own():
    pool = StagingPool(1 << 24, cuda=True)
    rows = torch.randn(1000, 64, device="cuda")
    lease = pool.stage([rows])
    (host,) = lease.arrays()
    assert host.is_pinned()
    assert torch.equal(host, rows.cpu())
    pool.give_back(lease)
