"""A picture server on loopback that takes its time: what is behind the slow URLs of a load. Runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tectum.bench.pictures import distinct, jpegs
from tectum.bench.plan import Plan


class SlowServer:
    """Answers `GET /{size}/{index}?n={number}` with that picture, `delay` seconds later. A context manager with a `url`."""

    def __init__(self, plan: Plan, delay: float) -> None:
        self._delay = delay
        self._pictures = {str(size): jpegs(size, plan.pictures) for size in plan.sizes}
        self._started = threading.Event()
        self.url = ""

    def __enter__(self) -> SlowServer:
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="tectum-slow", daemon=True)
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._answers: set[asyncio.Task[Any]] = set()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=4096)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path, _, number = head.split(b" ", 2)[1].decode().partition("?n=")
            _, size, index = path.split("/")
            await asyncio.sleep(self._delay)
            picture = distinct(self._pictures[size][int(index)], int(number))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(picture))
            writer.write(picture)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, ValueError, KeyError, IndexError):
            pass  # whoever asked went away, or is no encoder: there is nobody to tell
        finally:
            writer.close()
