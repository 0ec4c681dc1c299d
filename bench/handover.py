"""`python -m bench.handover`: what handing rows over costs, next to the bare operation that cannot be beaten.

    local    a pull over the Unix socket, every page read                    against memcpy of as many bytes
    http     `AsyncReceiver.pull` into a buffer that is there, checksum and all   against a bare BufferedProtocol pair
    gateway  a text-only chat request through `tectum gateway`               against the same request sent straight

Each pair is measured in turns within one run, and the medians' ratio is what counts. The service is real (stages, pipeline,
doors) around an encoder that only fills memory; it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tectum.engines.local import LocalReceiver
from tectum.engines.pull import AsyncReceiver

WIDTH = 4096
ROW_BYTES = 2 * WIDTH  # bfloat16


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of the rows")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tectum-handover-") as folder:
        path = Path(folder) / "socket"
        with child("serve", str(path)) as url, child("bare", str(arguments.mib << 20)) as bare:
            report = asyncio.run(measure(url, path, bare, arguments.mib << 20, arguments.rounds))
    print(json.dumps(report, indent=1))
    return 0


@contextlib.contextmanager
def child(*words: str) -> Any:
    """Another part of this program as a process; what it prints first is where it listens."""
    process = subprocess.Popen([sys.executable, "-m", "bench.handover", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


# --- the receiver's side ---


async def measure(url: str, path: Path, bare: str, nbytes: int, rounds: int) -> dict[str, Any]:
    source, target, buffer = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8), bytearray(nbytes + 4096)
    buffer[:] = b"\x01" * len(buffer)  # pages that are there
    near, far = LocalReceiver(path), AsyncReceiver(url, timeout=60)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", "local", "bare", "http")}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for number in range(rounds + 2):
            taken = {
                "memcpy": timed(lambda: np.copyto(target, source)),
                "local": timed_local(near, await hold(client, nbytes)),
                "bare": await timed_bare(bare, memoryview(buffer)[:nbytes]),
                "http": await timed_http(far, await hold(client, nbytes), buffer),
            }
            if number >= 2:  # the first ones touch memory for the first time
                for name, value in taken.items():
                    seconds[name].append(value)
    near.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": nbytes,
        "rounds": rounds,
        "GB_per_s": {name: round(nbytes / median / 1e9, 2) for name, median in medians.items()},
        "quartiles": {name: gigabytes(nbytes, statistics.quantiles(taken)) for name, taken in seconds.items()},
        "local_of_memcpy": round(medians["memcpy"] / medians["local"], 3),
        "http_of_bare": round(medians["bare"] / medians["http"], 3),
        "gateway_ms": await gateway_overhead(rounds * 10),
    }


def gigabytes(nbytes: int, quartiles: Sequence[float]) -> list[float]:
    """First and third quartile in GB/s."""
    return [round(nbytes / seconds / 1e9, 2) for seconds in (quartiles[2], quartiles[0])]


async def hold(client: httpx2.AsyncClient, nbytes: int) -> str:
    req_id = uuid.uuid4().hex
    body = {"req_id": req_id, "items": [{"type": "image", "data": "AAAA"}], "options": {"nbytes": nbytes}}
    (await client.post("/v1/encode", json={**body, "delivery": {"mode": "hold"}})).raise_for_status()
    return req_id


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def timed_local(receiver: LocalReceiver, req_id: str) -> float:
    def work() -> None:
        with receiver.pull(req_id) as document:
            for array in document.arrays:
                np.frombuffer(array.data, np.uint8)[::4096].sum()

    return timed(work)


async def timed_http(receiver: AsyncReceiver, req_id: str, buffer: bytearray) -> float:
    started = time.perf_counter()
    await receiver.pull(req_id, lambda nbytes: memoryview(buffer)[:nbytes])
    return time.perf_counter() - started


class _Bare(asyncio.BufferedProtocol):
    def __init__(self, into: memoryview) -> None:
        self._into, self._at = into, 0
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into[self._at :] if self._at < len(self._into) else memoryview(bytearray(1))

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at >= len(self._into) and not self.whole.done():
            self.whole.set_result(None)


async def timed_bare(address: str, into: memoryview) -> float:
    host, port = address.split(":")
    started = time.perf_counter()
    transport, protocol = await asyncio.get_running_loop().create_connection(lambda: _Bare(into), host, int(port))
    await protocol.whole
    transport.close()
    return time.perf_counter() - started


async def gateway_overhead(requests: int) -> dict[str, float]:
    """Milliseconds at the median of one text-only request: straight to an engine that answers at once, and through."""
    with child("engine") as engine, child("gateway", engine) as gateway:
        taken: dict[str, list[float]] = {engine: [], gateway: []}
        async with httpx2.AsyncClient(timeout=30) as client:
            for number in range(requests):
                for url in (engine, gateway):
                    started = time.perf_counter()
                    body = {"model": "m", "messages": [{"role": "user", "content": "hello " * 200}]}
                    (await client.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
                    if number >= 5:
                        taken[url].append(1e3 * (time.perf_counter() - started))
    straight, through = (round(statistics.median(taken[url]), 3) for url in (engine, gateway))
    return {"straight": straight, "through": through, "overhead": round(through - straight, 3)}


# --- the other processes ---


class Filler:
    """`Encoders` whose rows are as many bytes as the option says: what is measured is the way of the rows."""

    lanes, depth, fuses, revision = 1, 1, False, "bench"
    on_lane_lost: Callable[[int], None]

    async def start(self, pool: Any) -> None: ...

    async def stop(self) -> None: ...

    async def prepare(self, request: Any) -> Any:
        from tectum.pipeline.work import PreparedPart
        from tectum.types import ItemMetadata, Modality, RequestMetadata

        rows = request.options["nbytes"] // ROW_BYTES
        items = (ItemMetadata(Modality.IMAGE, rows, (1, 2, 2 * rows), 4),)
        return PreparedPart(RequestMetadata(request.req_id, 1, 0, items, WIDTH, 0, "bfloat16"), None)

    def forget(self, part: Any) -> None: ...

    async def forward(self, batch: Sequence[Any], leases: Sequence[Any]) -> list[None]:
        for lease in leases:
            np.frombuffer(lease.view(), np.uint8)[::4096] = 1
        return [None] * len(batch)


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    import uvicorn

    from tectum.serving.connection import Connection, ConnectionLimits

    limits = ConnectionLimits(max_connections=64, max_head_bytes=65536, head_timeout=30, stall_timeout=30)
    protocol: Any = partial(Connection, limits=limits, refused=lambda error: None)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, http=protocol, loop="uvloop", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    await serving


async def serve(path: Path) -> None:
    from fastapi import FastAPI

    from tectum.config import Settings
    from tectum.pipeline.service import running_pipeline
    from tectum.pipeline.stages import Stages
    from tectum.serving import native
    from tectum.serving.local import local_door

    settings = Settings.load()
    async with Stages(Filler(), settings) as stages, running_pipeline(stages, settings) as pipeline:
        app = FastAPI()
        app.include_router(native.router(pipeline, settings))
        async with local_door(pipeline, stages.pool.fd, path, 30.0), listening(app) as url:
            print(url, flush=True)


async def bare(nbytes: int) -> None:
    data = memoryview(b"\x01" * nbytes)

    class Sender(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(data)

    server = await asyncio.get_running_loop().create_server(Sender, "127.0.0.1", 0)
    print(":".join(str(part) for part in server.sockets[0].getsockname()), flush=True)
    await server.serve_forever()


async def engine() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"{}"})

    async with listening(app) as url:
        print(url, flush=True)


async def gateway(engine_url: str) -> None:
    from tectum.serving.gateway import GatewaySettings, create_app

    async with listening(create_app(GatewaySettings(("http://127.0.0.1:9",), engine_url))) as url:
        print(url, flush=True)


if __name__ == "__main__":
    import uvloop

    parts: dict[str, Callable[..., Any]] = {
        "serve": lambda path: serve(Path(path)),
        "bare": lambda nbytes: bare(int(nbytes)),
        "engine": engine,
        "gateway": gateway,
    }
    if len(sys.argv) > 1 and sys.argv[1] in parts:
        uvloop.run(parts[sys.argv[1]](*sys.argv[2:]))
    else:
        sys.exit(main())
