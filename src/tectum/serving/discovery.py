"""Discovery: an encoder announces itself at bootstrap servers, and `tectum bootstrap` is such a server.

The protocol is SGLang's (`/register_encoder_url`, `/unregister_encoder_url`, `/list_encoder_urls`). SGLang's own servers
forget everything when they restart, and take a registration for a sign of health: so an encoder registers again and again,
while it is healthy and no longer. Our server keeps leases beside, and looks at each encoder's health itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx2
import msgspec
from fastapi import FastAPI
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from tectum.config import Settings, is_loopback
from tectum.engines.address import server_url
from tectum.engines.tls import bearer_token
from tectum.errors import BadRequestError, StartupError, UnavailableError
from tectum.serving import problems
from tectum.serving.connection import ConnectionLimits
from tectum.serving.guard import BodyBudget, Guard, Tokens
from tectum.serving.health import Health
from tectum.serving.listen import http_within, nobody, serve_until_signal

log = logging.getLogger("tectum.discovery")

#: seconds that one call to a bootstrap server, or one probe of an encoder, may take
CALL_TIMEOUT = 2.0
#: probes in a row that an encoder may miss before it is no longer listed: one may fail under load
MISSES = 3
#: most encoders that a bootstrap server keeps
MOST_ENCODERS = 10_000
#: bytes of a call to a bootstrap server, and of all that are held at once
MOST_BODY, MOST_BODIES = 4096, 4096 * 1024
#: a call is a few short headers
_CONNECTIONS = ConnectionLimits(max_connections=1024, max_head_bytes=16 * 1024, head_timeout=10.0, stall_timeout=30.0)
_SCHEMES = frozenset({"http", "https", "grpc"})


# --- the encoder's side -----------------------------------------------------------------------------------------------


def bootstrap_urls(settings: Settings) -> list[str]:
    """The servers to register at. Raises StartupError `invalid_settings` for one that is no http(s) URL."""
    given = [url.strip() for url in settings.encoder_register_urls.split(",")]
    urls = [server_url(url, "encoder_register_urls (with commas between)") for url in given if url]
    if urls and settings.advertise_url is None and settings.host.strip("[]") in ("0.0.0.0", "::"):  # noqa: S104
        text = f"advertise_url: give the URL at which others reach this encoder; {settings.host} is every address"
        raise StartupError("invalid_settings", text)
    return urls


@asynccontextmanager
async def announced(servers: Sequence[str], url: str, health: Health, settings: Settings) -> AsyncIterator[None]:
    """Inside, `url` is registered at each of `servers`, anew every interval while healthy; on leaving it is taken out."""
    if not servers:
        yield
        return
    token = bearer_token(settings.encoder_register_token_file)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(timeout=CALL_TIMEOUT, headers=headers, trust_env=False) as http:
        beats = [
            asyncio.create_task(_keep_registered(http, server, url, health, settings.register_interval))
            for server in servers
        ]
        try:
            yield
        finally:
            for beat in beats:
                beat.cancel()
            await asyncio.gather(*beats, return_exceptions=True)
            await asyncio.gather(*(_unregister(http, server, url) for server in servers))


async def _keep_registered(http: httpx2.AsyncClient, server: str, url: str, health: Health, interval: float) -> None:
    """Register at one server for ever; a server that is away is tried again at the next beat."""
    known = None
    while True:
        if health.good():
            known = _tell_change(known, await _register(http, server, url), server)
        await asyncio.sleep(interval)


async def _register(http: httpx2.AsyncClient, server: str, url: str) -> str:
    """What came of it: `registered`, or why not."""
    try:
        status = await _status(http, "POST", f"{server}/register_encoder_url", json={"url": url})
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        return f"not registered ({type(error).__name__})"
    return "registered" if status == 200 else f"not registered (status {status})"


def _tell_change(before: str | None, now: str, server: str) -> str:
    if now != before:
        log.log(logging.INFO if now == "registered" else logging.WARNING, "bootstrap %s: %s", _shown(server), now)
    return now


async def _unregister(http: httpx2.AsyncClient, server: str, url: str) -> None:
    with suppress(httpx2.HTTPError, httpx2.InvalidURL, TimeoutError):
        await _status(http, "DELETE", f"{server}/unregister_encoder_url", json={"url": url})


async def _status(http: httpx2.AsyncClient, method: str, url: str, **more: Any) -> int:
    """The status of an answer, within `CALL_TIMEOUT` in all. What follows its head is not read: it may have no end.

    Raises httpx2.HTTPError, httpx2.InvalidURL or TimeoutError.
    """
    async with asyncio.timeout(CALL_TIMEOUT), http.stream(method, url, **more) as answer:
        return answer.status_code


def _shown(url: str) -> str:
    """A URL without the secret that it may hold."""
    split = urlsplit(url)
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}"


# --- the server's side ------------------------------------------------------------------------------------------------


class Registry:
    """Which encoders there are. A lease is renewed by a registration and by a probe that went well.

    Reads no clock: `now` is handed in, in seconds.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._until: dict[str, float] = {}
        self._missed: dict[str, int] = {}

    def register(self, url: str, now: float) -> None:
        """Raises UnavailableError `overloaded` when there is no room."""
        self._expire(now)
        if url not in self._until and len(self._until) >= MOST_ENCODERS:
            raise UnavailableError("overloaded", f"{MOST_ENCODERS} encoders are registered; no more are kept")
        self._until[url] = now + self._lease
        self._missed.setdefault(url, 0)

    def unregister(self, url: str) -> None:
        self._until.pop(url, None)
        self._missed.pop(url, None)

    def probed(self, url: str, well: bool, now: float) -> None:
        """What a probe found; an encoder taken out in the meantime stays out."""
        if url not in self._until:
            return
        self._missed[url] = 0 if well else self._missed[url] + 1
        if well:
            self._until[url] = now + self._lease

    def listed(self, now: float) -> list[str]:
        """Encoders with a lease that have not missed too many probes, in the order in which they came."""
        self._expire(now)
        return [url for url in self._until if self._missed[url] < MISSES]

    def all(self, now: float) -> list[str]:
        self._expire(now)
        return list(self._until)

    def _expire(self, now: float) -> None:
        for url in [url for url, until in self._until.items() if until <= now]:
            self.unregister(url)


class UrlBody(Struct):
    url: Annotated[str, Meta(min_length=1, max_length=300)]


_DECODER = msgspec.json.Decoder(UrlBody)


def _url(body: bytes) -> str:
    """Raises BadRequestError `invalid_request` for what holds no encoder's URL."""
    try:
        return _checked(_DECODER.decode(body).url)
    except (msgspec.MsgspecError, ValueError):
        raise BadRequestError("invalid_request", "url: the body is not JSON with the URL of an encoder") from None


def bootstrap_app(registry: Registry, host: str, token_file: Path | None, probe_interval: float) -> ASGIApp:
    """The bootstrap server behind its guard: SGLang's three calls, and `/health`.

    Raises StartupError `invalid_settings` for a token file that is none.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        probing = asyncio.create_task(_probe_forever(registry, probe_interval, time.monotonic))
        yield
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)

    # the pages are of other hosts' scripts, and a redirect would lead to whatever name the Host header holds
    app = FastAPI(title="Tectum bootstrap", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    problems.install(app)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="The server answers")
    async def alive() -> Response:
        return Response("OK")

    @app.post("/register_encoder_url", summary="Keep an encoder for the length of a lease")
    async def register(request: Request) -> Response:
        registry.register(_url(await request.body()), time.monotonic())
        return Response("OK")

    @app.delete("/unregister_encoder_url", summary="Take an encoder out")
    async def unregister(request: Request) -> Response:
        registry.unregister(_url(await request.body()))
        return Response("OK")

    @app.get("/list_encoder_urls", summary="Encoders that are alive and well")
    async def listed() -> Response:
        return JSONResponse({"encoder_urls": registry.listed(time.monotonic())})

    door = Settings.model_construct(
        host=host, token_file=token_file, max_body_bytes=MOST_BODY, max_bodies_bytes=MOST_BODIES
    )
    return Guard(
        app,
        settings=door,
        tokens=None if token_file is None else Tokens(token_file),
        budget=BodyBudget(MOST_BODIES, nobody),
        hung_up=nobody,
        is_open="/health".__eq__,
        with_body=frozenset({"POST", "DELETE"}),
    )


def serve_bootstrap(host: str, port: int, token_file: Path | None, lease: float, probe_interval: float) -> int:
    """`tectum bootstrap`: serve until SIGTERM or SIGINT. Raises StartupError: `port_in_use`, `invalid_settings`."""
    if not is_loopback(host) and token_file is None:
        text = f"host {host} is reachable from outside: give --token-file, or listen on 127.0.0.1"
        raise StartupError("invalid_settings", text)
    app = bootstrap_app(Registry(lease), host, token_file, probe_interval)
    serve_until_signal(http_within(_CONNECTIONS, app), host, port, "bootstrap")
    return 0


def _checked(url: str) -> str:
    """Raises BadRequestError `invalid_request` for what cannot be an encoder's URL."""
    try:
        split = urlsplit(url)
        usable = split.scheme in _SCHEMES and bool(split.hostname) and split.port != 0
    except ValueError:
        usable = False
    if not usable or any(c.isspace() or not c.isprintable() for c in url):
        raise BadRequestError("invalid_request", "url: not the http, https or grpc URL of an encoder")
    return url.rstrip("/")


async def _probe_forever(registry: Registry, interval: float, clock: Callable[[], float]) -> None:
    """Ask every encoder's `/health`, which tells of its progress. One that speaks gRPC lives by its registrations."""
    async with httpx2.AsyncClient(timeout=CALL_TIMEOUT, trust_env=False) as http:
        while True:
            urls = [url for url in registry.all(clock()) if urlsplit(url).scheme != "grpc"]
            for url, well in zip(urls, await asyncio.gather(*(_is_well(http, url) for url in urls)), strict=True):
                registry.probed(url, well, clock())
            await asyncio.sleep(interval)


async def _is_well(http: httpx2.AsyncClient, url: str) -> bool:
    try:
        return await _status(http, "GET", f"{url}/health") == 200
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError):
        return False
