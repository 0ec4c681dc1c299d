"""The load on SGLang's doors: clients in a closed loop that ask as its language server does, and wait for their rows.

Run as a process (`python -m bench.sglang_load URL SIDE CLIENTS SECONDS`): prints one JSON object. Each client posts
`/encode` and `/scheduler_receive_url`, and goes on when its rows have come over ZMQ: the language server waits for the
rows, not for the answers. The answers are read all the same, and each must be a 200.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
import uuid
from urllib.parse import urlsplit

import uvloop
import zmq
import zmq.asyncio

from tectum.bench.pictures import jpegs
from tectum.bench.plan import Size

#: seconds after which rows are given up, and answers that have not come when all rows have
PATIENCE, ANSWER_PATIENCE = 30.0, 5.0


class Connections:
    """Keep-alive connections to one server, as many as are needed at once."""

    def __init__(self, url: str) -> None:
        self._address = (urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> None:
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(*self._address)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        content = await reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path}: {answer[:40]!r} {content[:200]!r}")
        self._free.append((reader, writer))


class Receiver:
    """One PULL socket for all clients: whose rows came is read off the id in the metadata."""

    def __init__(self, nbytes: int) -> None:
        self._socket = zmq.asyncio.Context().socket(zmq.PULL)
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._nbytes = nbytes
        self._waiting: dict[bytes, asyncio.Future[None]] = {}

    def expect(self, rid: str) -> asyncio.Future[None]:
        future = self._waiting[rid.encode()] = asyncio.get_running_loop().create_future()
        return future

    async def receive_forever(self) -> None:
        while True:
            head, *body = await self._socket.recv_multipart(copy=False)
            rid = next(rid for rid in self._waiting if rid in head.bytes)
            if not body or len(body[0]) != self._nbytes:
                raise RuntimeError(f"no rows of {self._nbytes} bytes: {head.bytes[:300]!r}")
            self._waiting.pop(rid).set_result(None)


async def client(
    connections: Connections, receiver: Receiver, pictures: list[str], until: float, latencies: list[float]
) -> set[asyncio.Task[None]]:
    """Ask until the clock says `until`; returns the answers that are still to come."""
    answers: set[asyncio.Task[None]] = set()
    number = 0
    while time.perf_counter() < until:
        rid = uuid.uuid4().hex
        encode, register = bodies(rid, pictures[number % len(pictures)], receiver.address)
        started = time.perf_counter()
        rows = receiver.expect(rid)
        for path, body in (("/encode", encode), ("/scheduler_receive_url", register)):
            answers.add(asyncio.create_task(connections.post(path, body)))
        try:
            async with asyncio.timeout(PATIENCE):
                await rows
        except TimeoutError:
            raise RuntimeError(f"rows that were asked for did not come within {PATIENCE:g} s") from None
        latencies.append(time.perf_counter() - started)
        for answer in [answer for answer in answers if answer.done()]:
            answers.remove(answer)
            answer.result()
        number += 1
    return answers


async def answered(answers: set[asyncio.Task[None]]) -> int:
    """Wait for answers, each of which must be a 200; returns how many have not come within `ANSWER_PATIENCE`."""
    if not answers:
        return 0
    done, missing = await asyncio.wait(answers, timeout=ANSWER_PATIENCE)
    for answer in missing:
        answer.cancel()
    for answer in done:
        answer.result()
    return len(missing)


def bodies(rid: str, picture: str, address: str) -> tuple[bytes, bytes]:
    part = {
        "mm_items": [picture],
        "num_parts": 1,
        "part_idx": 0,
        "req_id": f"{rid}_local_part_0",
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": None,
    }
    place = {"req_id": part["req_id"], "receive_count": 1, "receive_url": address, "modality": "IMAGE"}
    return json.dumps(part).encode(), json.dumps(place).encode()


async def run(url: str, side: int, clients: int, seconds: float, row_bytes: int) -> dict[str, object]:
    pictures = ["data:image/jpeg;base64," + base64.b64encode(jpeg).decode() for jpeg in jpegs(Size(side, side), 32)]
    connections, receiver = Connections(url), Receiver((side // 28) ** 2 * row_bytes)
    receiving = asyncio.create_task(receiver.receive_forever())

    async def load(length: float) -> tuple[list[float], float, int]:
        latencies: list[float] = []
        started = time.perf_counter()
        calls = (
            client(connections, receiver, pictures[i:] + pictures[:i], started + length, latencies)
            for i in range(clients)
        )
        working = asyncio.gather(*calls)
        await asyncio.wait((working, receiving), return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            receiving.result()
        left = await working
        taken = time.perf_counter() - started
        return latencies, taken, await answered(set().union(*left))

    await load(2.0)
    cpu = time.process_time()
    latencies, taken, unanswered = await load(seconds)
    return {
        "pictures": len(latencies),
        "seconds": taken,
        "unanswered": unanswered,
        "latency_ms": _percentiles(latencies),
        "generator_cpu_share": (time.process_time() - cpu) / taken,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {name: ordered[min(int(len(ordered) * q), len(ordered) - 1)] for name, q in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(value * 1e3, 2) for name, value in at.items()}


if __name__ == "__main__":
    found = uvloop.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
    sys.stdout.write(json.dumps(found) + "\n")
