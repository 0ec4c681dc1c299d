"""Delivery of large rows over ZeroMQ: this project's backend, or a bare pyzmq pair, to a receiver in another process.

`python -m bench.zmq_pair receive` prints its port, then for each message read a line; `python -m bench.zmq_pair
send-bare|send-tectum PORT MEBIBYTES NUMBER` sends and prints the seconds until the last one is done. Four messages are
on their way at once on either side.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque

import numpy as np
import uvloop
import zmq

IN_FLIGHT = 4
WIDTH = 2048


def receive() -> None:
    socket = zmq.Context().socket(zmq.PULL)
    sys.stdout.write(f"{socket.bind_to_random_port('tcp://127.0.0.1')}\n")
    sys.stdout.flush()
    while True:
        _, rows = socket.recv_multipart(copy=False)
        np.frombuffer(rows.buffer, np.uint8)[::4096].max()  # one byte of each page, as whoever uses them would
        sys.stdout.write("\n")
        sys.stdout.flush()


def send_bare(port: int, mebibytes: int, number: int) -> float:
    socket = zmq.Context().socket(zmq.PUSH)
    socket.connect(f"tcp://127.0.0.1:{port}")
    rows = np.ones(mebibytes << 20, np.uint8)
    on_their_way: deque[zmq.MessageTracker] = deque()
    started = time.perf_counter()
    for _ in range(number):
        if len(on_their_way) == IN_FLIGHT:
            on_their_way.popleft().wait()
        on_their_way.append(socket.send_multipart([b"x" * 400, rows], copy=False, track=True))
    for tracker in on_their_way:
        tracker.wait()
    return time.perf_counter() - started


class _Staged:
    """Rows as the pipeline hands them over, in plain memory."""

    def __init__(self, mebibytes: int) -> None:
        from tectum.types import ItemMetadata, Modality, RequestMetadata

        self._rows = np.ones(mebibytes << 20, np.uint8)
        tokens = len(self._rows) // (4 * WIDTH)
        item = ItemMetadata(Modality.IMAGE, tokens, (1, 2, tokens * 2), tokens * 4)
        self.metadata = RequestMetadata("bench", 1, 0, (item,), WIDTH, 0, "float32")
        self.lease = self

    def views(self) -> list[memoryview]:
        return [self._rows.data]


async def send_tectum(port: int, mebibytes: int, number: int) -> float:
    from tectum.config import Settings
    from tectum.delivery.base import zmq_destination
    from tectum.delivery.zmq import ZmqBackend

    staged, left = _Staged(mebibytes), iter(range(number))
    async with ZmqBackend(Settings()) as backend:

        async def sender() -> None:
            for _ in left:
                await backend.send(staged, zmq_destination("127.0.0.1", port))

        started = time.perf_counter()
        await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))
        return time.perf_counter() - started


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    numbers = [int(argument) for argument in sys.argv[2:5]]
    taken = send_bare(*numbers) if sys.argv[1] == "send-bare" else uvloop.run(send_tectum(*numbers))
    sys.stdout.write(f"{taken}\n")
