"""Staging: host memory in which finished rows wait for their receivers.

Owns the buffers, and nothing else: when a lease may be given back is decided in `tectum.lifecycle`. Rows are copied in
once, so that no receiver ever reads memory that a later forward may write. On CUDA the copy runs on a stream of its
own into pinned memory, and a reader first waits for that copy alone (`Lease.wait`), never for the device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tectum.errors import LifecycleError, UnavailableError

if TYPE_CHECKING:
    import torch

#: smallest buffer (bytes); sizes are powers of two, so that buffers are reused between requests of like size
SMALLEST = 64 * 1024
#: free buffers kept for reuse, in bytes over all sizes
KEPT = 256 * 1024 * 1024


class _Buffer:
    """One piece of host memory and how often it changed hands."""

    __slots__ = ("generation", "memory")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.generation = 0


class Lease:
    """The right to read one request's staged arrays, until it is given back.

    nbytes: bytes of the rows held. Reading through a lease that was given back raises LifecycleError
    (`request_released`): the buffer's generation has moved on.
    """

    __slots__ = ("_arrays", "_buffer", "_copied", "_generation", "nbytes")

    def __init__(
        self, buffer: _Buffer, arrays: tuple[torch.Tensor, ...], nbytes: int, copied: torch.cuda.Event | None
    ) -> None:
        self._buffer = buffer
        self._generation = buffer.generation
        self._arrays = arrays
        self._copied = copied
        self.nbytes = nbytes

    def wait(self) -> None:
        """Block until the copy from the device has landed. Call it off the event loop."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def arrays(self) -> tuple[torch.Tensor, ...]:
        """The staged arrays, in the order given, as views of host memory. Raises LifecycleError when stale."""
        if self._generation != self._buffer.generation:
            raise LifecycleError("request_released", "These rows were given back; their memory belongs to others now")
        self.wait()
        return self._arrays


class StagingPool:
    """Hands out leases. Thread-safe: the forward thread stages, the event loop gives back."""

    def __init__(self, max_bytes: int, *, cuda: bool = False) -> None:
        self.max_bytes = max_bytes
        self.leased_bytes = 0
        self.leases = 0
        self._cuda = cuda
        self._stream: torch.cuda.Stream | None = None
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._kept = 0
        self._closing = False
        self._lock = threading.Lock()

    def stage(self, arrays: Sequence[torch.Tensor]) -> Lease:
        """Copy `arrays` (any shapes, one request's rows) into host memory.

        Raises UnavailableError: `shutting_down` once the pool is closing, `overloaded` when the budget is spent.
        """
        nbytes = sum(array.nbytes for array in arrays)
        buffer = self._take(nbytes)
        try:
            return self._fill(buffer, arrays, nbytes)
        except BaseException:
            self._return(buffer, nbytes)
            raise

    def give_back(self, lease: Lease) -> None:
        """End a lease; its memory may be reused from now on. Nobody may be reading: the lifecycle sees to that."""
        assert lease._generation == lease._buffer.generation, "a lease was given back twice"
        lease.wait()  # a copy that still writes must not land in the next owner's rows
        self._return(lease._buffer, lease.nbytes)

    def close(self) -> None:
        """Refuse new leases and drop free buffers; leases that are out stay good."""
        with self._lock:
            self._closing = True
            self._free.clear()
            self._kept = 0

    def _take(self, nbytes: int) -> _Buffer:
        import torch

        size = _size_class(nbytes)
        with self._lock:
            if self._closing:
                raise UnavailableError("shutting_down", "The staging pool is closing; no new rows are held")
            if self.leased_bytes + nbytes > self.max_bytes:
                text = f"Staging holds {self.leased_bytes} of {self.max_bytes} bytes; {nbytes} more do not fit"
                raise UnavailableError("overloaded", text, retry_after=1.0)
            self.leased_bytes += nbytes
            self.leases += 1
            if self._free[size]:
                self._kept -= size
                return self._free[size].pop()
        try:
            return _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda))
        except BaseException:
            with self._lock:
                self.leased_bytes -= nbytes
                self.leases -= 1
            raise

    def _return(self, buffer: _Buffer, nbytes: int) -> None:
        size = buffer.memory.numel()
        with self._lock:
            buffer.generation += 1
            self.leased_bytes -= nbytes
            self.leases -= 1
            if not self._closing and self._kept + size <= KEPT:
                self._free[size].append(buffer)
                self._kept += size

    def _fill(self, buffer: _Buffer, arrays: Sequence[torch.Tensor], nbytes: int) -> Lease:
        import torch

        views, start = [], 0
        for array in arrays:
            piece = buffer.memory[start : start + array.nbytes]
            views.append(piece.view(array.dtype).view(array.shape))
            start += array.nbytes
        if not (arrays and arrays[0].is_cuda):
            for view, array in zip(views, arrays, strict=True):
                view.copy_(array)
            return Lease(buffer, tuple(views), nbytes, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(arrays[0].device)
        self._stream.wait_stream(torch.cuda.current_stream(arrays[0].device))
        with torch.cuda.stream(self._stream):
            for view, array in zip(views, arrays, strict=True):
                view.copy_(array, non_blocking=True)
                array.record_stream(self._stream)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Lease(buffer, tuple(views), nbytes, copied)


def _size_class(nbytes: int) -> int:
    """The next power of two, from `SMALLEST` up."""
    return max(SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
