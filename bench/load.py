"""The load: clients in a closed loop from a process of their own, over raw sockets so that they cost little.

Run as a process (`python -m bench.load URL SIDE CLIENTS SECONDS`): prints one JSON object. Each client sends a multipart
request, reads the whole answer, checks its row count, and sends the next. A further connection asks for `/health/live`
every 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import uvloop

from bench.pictures import jpegs

BOUNDARY = b"tectum-bench-boundary"


def encode_request(jpeg: bytes) -> bytes:
    """One complete HTTP request with one picture as a raw part."""
    body = (
        b'--%(b)s\r\nContent-Disposition: form-data; name="request"\r\n\r\n'
        b'{"items":[{"type":"image","file":"f0"}]}\r\n--%(b)s\r\n'
        b'Content-Disposition: form-data; name="f0"; filename="f0"\r\nContent-Type: image/jpeg\r\n\r\n%(d)s\r\n--%(b)s--\r\n'
    ) % {b"b": BOUNDARY, b"d": jpeg}
    head = b"POST /v1/encode HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n"
    head += b"Content-Type: multipart/form-data; boundary=%s\r\n\r\n"
    return head % (len(body), BOUNDARY) + body


async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """Send one request and read its answer: status and body."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


async def client(
    address: tuple[str, int], requests: list[bytes], rows: int, until: float, latencies: list[float]
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    number = 0
    while time.perf_counter() < until:
        started = time.perf_counter()
        status, body = await call(reader, writer, requests[number % len(requests)])
        latencies.append(time.perf_counter() - started)
        if status != 200 or b'"rows":{"dtype":"F32","shape":[%d,' % rows not in body[:600]:
            raise RuntimeError(f"status {status}, or not {rows} rows: {body[:300]!r}")
        number += 1
    writer.close()


async def probe(address: tuple[str, int], until: float, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    while time.perf_counter() < until:
        started = time.perf_counter()
        await call(reader, writer, b"GET /health/live HTTP/1.1\r\nHost: bench\r\n\r\n")
        latencies.append(time.perf_counter() - started)
        await asyncio.sleep(0.02)
    writer.close()


async def run(url: str, side: int, clients: int, seconds: float) -> dict[str, object]:
    address = (urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80)
    requests = [encode_request(jpeg) for jpeg in jpegs(side, 32)]
    rows = (side // 28) ** 2
    await client(address, requests[:8], rows, time.perf_counter() + 0.5, [])
    latencies: list[float] = []
    health: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()
    until = started + seconds
    await asyncio.gather(
        *(client(address, requests[i:] + requests[:i], rows, until, latencies) for i in range(clients)),
        probe(address, until, health),
    )
    taken = time.perf_counter() - started
    return {
        "pictures": len(latencies),
        "seconds": taken,
        "latency_ms": _percentiles(latencies),
        "health_ms": _percentiles(health),
        "generator_cpu_share": (time.process_time() - cpu) / taken,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {name: ordered[min(int(len(ordered) * q), len(ordered) - 1)] for name, q in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(value * 1e3, 2) for name, value in at.items()}


if __name__ == "__main__":
    result = uvloop.run(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
    sys.stdout.write(json.dumps(result) + "\n")
