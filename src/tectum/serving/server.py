"""`tectum serve`: take the port, load the encoder, open the doors, and on SIGTERM finish what was accepted.

Owns the process: socket, signals, exit. The port is taken first, so that a mistake shows before minutes of loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, cast

import prometheus_client
import uvicorn
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from starlette.types import ASGIApp

import tectum
from tectum.config import Settings
from tectum.delivery.base import Deliveries, deliveries
from tectum.errors import StartupError
from tectum.observe import logs, trace
from tectum.observe.metrics import Metrics
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.service import running_pipeline
from tectum.pipeline.stages import Stages
from tectum.pipeline.work import Observer
from tectum.serving.app import create_app
from tectum.serving.connection import ConnectionLimits
from tectum.serving.dashboard import Recent
from tectum.serving.discovery import announced, bootstrap_urls
from tectum.serving.guard import BodyBudget, Tokens
from tectum.serving.health import Health
from tectum.serving.listen import BACKLOG, bind, bracketed, http_within
from tectum.serving.local import local_door
from tectum.serving.push import Pushes
from tectum.serving.sglang import Doors
from tectum.serving.tls import tls_context
from tectum.types import Modality
from tectum.workers.pool import WorkerPool

log = logging.getLogger("tectum.server")


def serve(model: str, settings: Settings, console: Console | None = None) -> int:
    """Serve `model` until SIGTERM or SIGINT; returns the exit code (0 when all accepted work was finished).

    Raises StartupError: `port_in_use`, `model_not_found`, `unsupported_architecture`, `invalid_settings`,
    `missing_dependency`.
    """
    console = console or Console(stderr=True)
    logs.configure(settings.log_level, settings.log_format)
    tls = tls_context(settings)
    if settings.token_file is not None:
        Tokens(settings.token_file)  # a mistake shows before minutes of loading
    listener = bind(settings.host, settings.port)
    _allow_files(settings.max_connections)
    with listener:
        sending = deliveries(settings)  # before the minutes of loading: a library may be missing
        bootstrap_urls(settings)
        if settings.grpc_port is not None:
            _import_grpc_door()
        return uvloop.run(_serve(model, settings, sending, listener, tls, console, _voice(settings, console)))


def _voice(settings: Settings, console: Console) -> Callable[[str], None]:
    """How the server says where it is in its own life: to people, or, where logs are JSON, as a log line like any other."""
    if settings.log_format == "json":
        return log.info
    return functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)


def _allow_files(connections: int) -> None:
    """Raise the limit of open files so far that connections are refused by their own limit, which says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _configured(app: ASGIApp, settings: Settings, pipeline: Pipeline, tls: ssl.SSLContext | None) -> uvicorn.Config:
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_head_bytes=settings.max_head_bytes,
        head_timeout=settings.head_timeout,
        stall_timeout=settings.send_timeout,
    )
    config = http_within(
        limits,
        app,
        pipeline.tell_refused,
        lifespan="off",
        date_header=False,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    config.load()
    return config


async def _serve(
    model: str,
    settings: Settings,
    sending: Deliveries,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    console: Console,
    say: Callable[[str], None],
) -> int:
    prometheus_client.disable_created_metrics()  # this process is ours: a second series beside each counter helps nobody
    metrics = Metrics()
    observers: list[Observer] = [metrics, logs.RequestLog()]
    async with AsyncExitStack() as open_:
        await open_.enter_async_context(sending)
        if trace.wanted(settings.trace_endpoint):
            tracing = trace.Tracing(trace.exporting(settings.trace_endpoint, tectum.__version__))
            open_.callback(tracing.close)
            observers.append(tracing)
        if not console.is_terminal:  # which has a bar
            say(f"loading the encoder of {model}")
        with _loading(model, settings, console) as tell:
            pool = WorkerPool(model, settings, tell)
            stages = await open_.enter_async_context(Stages(pool, settings, sending))
        say(_loaded(pool))
        recent = Recent(masked=settings.token_file is not None) if settings.dashboard else None
        if recent is not None:
            observers.append(recent)
        pipeline = await open_.enter_async_context(running_pipeline(stages, settings, observers))
        if settings.local_socket is not None:
            door = local_door(pipeline, stages.pool.fd, settings.local_socket, settings.send_timeout)
            await open_.enter_async_context(door)
        metrics.watch(pipeline.ledger, pool)
        metrics.watch_reuse(stages.reuse)
        hears = Modality.AUDIO in pool.card["modalities"]
        health, pushes = Health(pipeline, pool, settings), Pushes(pipeline, sending, settings)
        doors = Doors(pipeline, sending, pushes, settings, hears)
        budget = BodyBudget(settings.max_bodies_bytes, pipeline.tell_refused)
        app = create_app(pipeline, pool, settings, metrics, pushes, doors, health, recent, budget)
        if settings.grpc_port is not None:
            grpc_port = await open_.enter_async_context(_import_grpc_door()(doors, health, settings, budget))
            say(f"grpc on {bracketed(settings.host.strip('[]'))}:{grpc_port}")
        server = _Server(_configured(app, settings, pipeline, tls), settings.head_timeout)
        stop = _stop_on_signals()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        host, port = listener.getsockname()[:2]
        url = f"{'http' if tls is None else 'https'}://{bracketed(host)}:{port}"
        gc.collect()
        gc.freeze()  # what is there stays: a collection that walks it would hold every caller up for 30 ms
        say(f"ready on {url}")
        async with announced(bootstrap_urls(settings), settings.advertise_url or url, health, settings):
            await asyncio.wait([asyncio.ensure_future(stop.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
        finished = await _drain(pipeline, settings, say)
        server.stop.set()
        await serving
    if not finished:
        # a stage that cannot be stopped may still hold a thread, and the interpreter would wait for it
        sys.stderr.flush()
        os._exit(1)
    return 0


def _import_grpc_door() -> Callable[..., AbstractAsyncContextManager[int]]:
    """Raises StartupError `missing_dependency`."""
    try:
        from tectum.serving.grpc import grpc_door
    except ModuleNotFoundError as error:
        text = f'--grpc-port needs {error.name}: pip install "tectum[sglang]"'
        raise StartupError("missing_dependency", text) from None
    return grpc_door


async def _drain(pipeline: Pipeline, settings: Settings, say: Callable[[str], None]) -> bool:
    live = len(pipeline.ledger)
    say(f"draining: finishing {live} request(s), at most {settings.drain_timeout:g} s")
    finished = await pipeline.drain(settings.drain_timeout)
    say("drained" if finished else "stopped with requests unfinished")
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

    def __init__(self, config: uvicorn.Config, handshake: float) -> None:
        super().__init__(config)
        self._handshake = handshake
        self.listening = asyncio.Event()
        self.stop = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's for sockets that are there, but a TLS handshake gets no longer than a request's headers."""
        assert sockets is not None, "the port is taken before the server is made"

        def protocol() -> asyncio.Protocol:
            made: Any = self.config.http_protocol_class
            return cast(asyncio.Protocol, made(config=self.config, server_state=self.server_state, app_state={}))

        loop = asyncio.get_running_loop()
        patience = None if self.config.ssl is None else self._handshake
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, ssl=self.config.ssl, ssl_handshake_timeout=patience, backlog=BACKLOG
            )
            for sock in sockets
        ]
        self.started = True

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
        tasks = [bar.add_task(f"{number}: starting {model}", total=1.0) for number in range(settings.lanes)]
        with logs.above_the_bar():
            yield lambda lane, what, fraction: bar.update(
                tasks[lane], description=f"{lane}: {what}", completed=fraction
            )


def _loaded(pool: WorkerPool) -> str:
    card, many = pool.card, f" in {pool.up} processes" if pool.up > 1 else ""
    size = f"{card['encoder_bytes'] / 1e6:.1f} MB of {card['dtype']} on {card['device']}{many}"
    return f"loaded {card['family']} encoder: {size}"
