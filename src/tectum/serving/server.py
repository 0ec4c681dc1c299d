"""`tectum serve`: take the port, load the encoder, open the doors, and on SIGTERM finish what was accepted.

Owns the process: socket, signals, exit. The port is taken first, so that a mistake shows before minutes of loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import uvicorn
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tectum.config import Settings
from tectum.errors import StartupError
from tectum.observe import logs
from tectum.observe.metrics import Metrics
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.service import running_pipeline
from tectum.pipeline.stages import Stages
from tectum.serving.app import create_app
from tectum.serving.local import local_door
from tectum.workers.pool import WorkerPool

log = logging.getLogger("tectum.server")

#: seconds that an idle connection is kept: longer than our clients keep theirs, so that they never meet a closed one
KEEP_ALIVE = 75


def serve(model: str, settings: Settings, console: Console | None = None) -> int:
    """Serve `model` until SIGTERM or SIGINT; returns the exit code (0 when all accepted work was finished).

    Raises StartupError: `port_in_use`, `model_not_found`, `unsupported_architecture`, `invalid_settings`.
    """
    console = console or Console(stderr=True)
    logs.configure(settings.log_level)
    listener = bind(settings.host, settings.port)
    with listener:
        return uvloop.run(_serve(model, settings, listener, console))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartupError `port_in_use` or `invalid_settings`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise StartupError("invalid_settings", f"host: {host} is no address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError("port_in_use", f"Port {port} on {host} is in use; give another --port") from None
        raise StartupError("invalid_settings", f"host: cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(2048)
    return listener


async def _serve(model: str, settings: Settings, listener: socket.socket, console: Console) -> int:
    metrics = Metrics()
    async with AsyncExitStack() as open_:
        with _loading(model, settings, console) as tell:
            pool = WorkerPool(model, settings, tell)
            stages = await open_.enter_async_context(Stages(pool, settings))
        _say_loaded(pool, console)
        observers = (metrics, logs.RequestLog())
        pipeline = await open_.enter_async_context(running_pipeline(stages, settings, observers))
        if settings.local_socket is not None:
            door = local_door(pipeline, stages.pool.fd, settings.local_socket, settings.send_timeout)
            await open_.enter_async_context(door)
        metrics.watch(pipeline.ledger, pool)
        metrics.watch_reuse(stages.reuse)
        app = create_app(pipeline, pool, settings, metrics)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http="httptools",
                date_header=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=1,
            )
        )
        stop = _stop_on_signals()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        console.print(f"ready on http://{shown}:{port}", highlight=False, soft_wrap=True)
        await asyncio.wait([asyncio.ensure_future(stop.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
        finished = await _drain(pipeline, settings, console)
        server.stop.set()
        await serving
    if not finished:
        # a stage that cannot be stopped may still hold a thread, and the interpreter would wait for it
        sys.stderr.flush()
        os._exit(1)
    return 0


async def _drain(pipeline: Pipeline, settings: Settings, console: Console) -> bool:
    live = len(pipeline.ledger)
    console.print(f"draining: finishing {live} request(s), at most {settings.drain_timeout:g} s", highlight=False)
    finished = await pipeline.drain(settings.drain_timeout)
    console.print("drained" if finished else "stopped with requests unfinished", highlight=False)
    return finished


def _stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


class _Server(uvicorn.Server):
    """uvicorn without its ten wake-ups a second and without its signal handlers: the process above owns both."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        self.listening.set()
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _loading(model: str, settings: Settings, console: Console) -> Iterator[Callable[[int, str, float], None]]:
    """A progress bar for each encoder process, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = [bar.add_task(f"{number}: starting {model}", total=1.0) for number in range(settings.workers)]
        yield lambda lane, what, fraction: bar.update(tasks[lane], description=f"{lane}: {what}", completed=fraction)


def _say_loaded(pool: WorkerPool, console: Console) -> None:
    card, many = pool.card, f" in {pool.lanes} processes" if pool.lanes > 1 else ""
    size = f"{card['encoder_bytes'] / 1e6:.1f} MB of {card['dtype']} on {card['device']}{many}"
    console.print(f"loaded {card['family']} encoder: {size}", highlight=False)
