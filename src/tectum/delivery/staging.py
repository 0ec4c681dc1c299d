"""Staging: host memory in which finished rows wait for their receivers.

Owns the memory, and nothing else: when a lease may be given back is decided in `tectum.lifecycle`. All of it is one memory
file (memfd), mapped by this process and by each encoder process, so that an encoder writes rows where receivers read
them and nothing is copied between the two. Pages take memory only once they were written.

Knows no torch: rows are bytes here; their shape and type are in the metadata. One owner (the event loop) calls the pool.
"""

from __future__ import annotations

import mmap
import os

from tectum.errors import LifecycleError, UnavailableError

#: smallest block (bytes); blocks are powers of two
SMALLEST = 64 * 1024
#: written pages kept for reuse when nobody leases them (bytes); what is beyond goes back to the system
KEPT = 256 * 1024 * 1024


class Lease:
    """The right to read one request's staged arrays, until it is given back.

    offset: where its block begins in the memory file. nbytes: bytes of all arrays together. generation: differs for
    each lease, so that a handle to an earlier one at the same place is refused.
    """

    __slots__ = ("_arrays", "_pool", "generation", "nbytes", "offset", "size")

    def __init__(self, pool: StagingPool, offset: int, size: int, nbytes: int, arrays: int, generation: int) -> None:
        self._pool = pool
        self._arrays = arrays
        self.offset = offset
        self.size = size
        self.nbytes = nbytes
        self.generation = generation

    def view(self) -> memoryview:
        """All staged bytes, in place. Raises LifecycleError `request_released` when the lease was given back."""
        if not self._pool.holds(self.offset, self.generation):
            raise LifecycleError("request_released", "These rows were given back; their memory belongs to others now")
        return self._pool.memory(self.offset, self.nbytes)

    def views(self) -> list[memoryview]:
        """The staged arrays, each as its bytes: the rows, then the deepstack layers. Raises as `view`."""
        whole, step = self.view(), self.nbytes // self._arrays
        return [whole[start : start + step] for start in range(0, self.nbytes, step)]


class StagingPool:
    """Hands out leases within a byte budget. `fd` and `capacity` are what another process needs to map the memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.leased_bytes = 0
        # twice the budget: blocks are rounded up to powers of two, and addresses that nobody writes cost nothing
        self.capacity = _block_size(2 * max_bytes)
        self.fd = os.memfd_create("tectum-staging", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.capacity)
        self._map = mmap.mmap(self.fd, self.capacity)
        self._blocks = _Blocks(self.capacity)
        self._generations: dict[int, int] = {}  # offset -> generation of the lease that holds it
        self._next = 1
        self._closing = False

    @property
    def leases(self) -> int:
        """How many are out."""
        return len(self._generations)

    def lease(self, nbytes: int, arrays: int = 1) -> Lease:
        """Memory for `arrays` arrays of `nbytes` in all.

        Raises UnavailableError: `shutting_down` once the pool is closing, `overloaded` when the budget is spent.
        """
        assert nbytes > 0, "a request has rows"
        assert nbytes % arrays == 0, "a request's arrays are of one size"
        if self._closing:
            raise UnavailableError("shutting_down", "The staging pool is closing; no new rows are held")
        size = _block_size(nbytes)
        fits = self.leased_bytes + nbytes <= self.max_bytes
        offset = self._blocks.take(size) if fits else None
        if offset is None:
            text = f"Staging holds {self.leased_bytes} of {self.max_bytes} bytes; {nbytes} more do not fit"
            raise UnavailableError("overloaded", text, retry_after=1.0)
        self.leased_bytes += nbytes
        lease = Lease(self, offset, size, nbytes, arrays, self._next)
        self._generations[offset] = self._next
        self._next += 1
        return lease

    def give_back(self, lease: Lease) -> None:
        """End a lease; its memory may be reused from now on. Nobody may read or write it: the lifecycle sees to that."""
        assert self.holds(lease.offset, lease.generation), "a lease was given back twice"
        del self._generations[lease.offset]
        self.leased_bytes -= lease.nbytes
        self._blocks.give_back(lease.offset, lease.size)
        written = os.fstat(self.fd).st_blocks * 512
        if written - self.leased_bytes > KEPT:
            self._map.madvise(mmap.MADV_REMOVE, lease.offset, lease.size)
        self._close_if_done()

    def holds(self, offset: int, generation: int) -> bool:
        """Whether the lease of this generation is the one that holds the block at `offset`."""
        return self._generations.get(offset) == generation

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes, whoever holds a lease on them: `Lease.view` is the way that looks."""
        return memoryview(self._map)[offset : offset + nbytes]

    def close(self) -> None:
        """Refuse new leases; leases that are out stay good, and with the last of them the memory goes."""
        self._closing = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._closing and not self._generations and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StagingMap:
    """The same memory in another process: there an encoder writes rows. fd: its copy of the pool's descriptor."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of one lease."""
        return memoryview(self._map)[offset : offset + nbytes]


class _Blocks:
    """Which parts of the memory are free: a buddy allocator. The block given back last is handed out first (warm)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: dict[int, dict[int, None]] = {capacity: {0: None}}  # size -> offsets, newest last

    def take(self, size: int) -> int | None:
        """The offset of a free block of `size` bytes (a power of two), or None when there is none."""
        found = size
        while not self._free.get(found):
            found *= 2
            if found > self._capacity:
                return None
        offset, _ = self._free[found].popitem()
        while found > size:
            found //= 2
            self._free.setdefault(found, {})[offset + found] = None
        return offset

    def give_back(self, offset: int, size: int) -> None:
        """Free a block, and join it with its other half as long as that is free too."""
        while size < self._capacity:
            other = offset ^ size
            halves = self._free.setdefault(size, {})
            if other not in halves:
                break
            del halves[other]
            offset, size = min(offset, other), size * 2
        self._free.setdefault(size, {})[offset] = None


def _block_size(nbytes: int) -> int:
    """The next power of two, from `SMALLEST` up."""
    return max(SMALLEST, 1 << (nbytes - 1).bit_length())
