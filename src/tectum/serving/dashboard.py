"""The live page: `GET /`, its files, and the events that it is fed with. Off with `--no-dashboard`.

Owns what is remembered of the last outcomes, and how the service's state is put into one event a second for each open
page; while no page is open nothing runs. It reads the ledger and the encoders and changes neither. No media is kept.

The page and its files are the same for everybody and hold no figures; every figure is asked for with the token.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator
from hashlib import blake2b
from importlib.resources import files
from itertools import islice
from typing import Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

import tectum
from tectum import catalogue
from tectum.config import Settings
from tectum.errors import BadRequestError, TectumError, UnavailableError
from tectum.observe.watcher import JobView, Watcher
from tectum.pipeline.pipeline import Pipeline
from tectum.serving.guard import Tokens
from tectum.serving.presence import Caller, CallerGoneError
from tectum.types import Destination, EncodeRequest, RequestMetadata
from tectum.workers.pool import WorkerPool

#: outcomes that are remembered
KEPT = 300
#: items of a request, and live requests, that are listed at most
LISTED = 64
#: seconds between two events of an open page
INTERVAL = 1.0
#: pages that may be open at once
PAGES = 16
#: seconds that a page may take to read one event
PATIENCE = 10.0

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
_FILES = (
    *("dashboard.css", "main.js", "api.js", "now.js", "requests.js", "try.js", "rows.js", "errors.js", "icon.svg"),
    *("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"),
)
_SAMPLES = ("astronaut.jpg", "cat.jpg", "coffee.jpg", "rocket.jpg")


class Recent(Watcher):
    """An observer that remembers the last outcomes and counts all of them.

    masked: ids are shown in a form by which a request can be recognised and not be reached: where callers hold a token, an
    id is what keeps one caller's rows from another.
    """

    def __init__(self, kept: int = KEPT, *, masked: bool = False) -> None:
        self._mask = secrets.token_bytes(16) if masked else None
        self.outcomes: deque[dict[str, Any]] = deque(maxlen=kept)  # oldest first
        self.ended_count = 0
        self.items = 0
        self.rows = 0
        self.releases: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._sends: dict[int, float] = {}  # life -> its longest delivery so far

    def shown(self, req_id: str) -> str:
        """The id as the page shows it."""
        if self._mask is None:
            return req_id
        return f"{req_id[:4]}…{blake2b(req_id.encode(), key=self._mask, digest_size=4).hexdigest()}"

    def sent(self, job: JobView, backend: str, seconds: float, error: TectumError | None) -> None:
        self._sends[job.life] = max(seconds, self._sends.get(job.life, 0.0))

    def freed(self, job: JobView) -> None:
        self._sends.pop(job.life, None)

    def ended(self, job: JobView, reason: str, error: TectumError | None, seconds: float) -> None:
        self.ended_count += 1
        self.releases[str(reason)] += 1
        metadata = None if job.prepared is None else job.prepared.metadata
        stages = {stage: max(taken, 0.0) for stage, taken in job.seconds.items()}
        if job.life in self._sends:
            stages["send"] = self._sends[job.life]
        if metadata is not None and "forward" in stages:
            self.items += len(job.request.items)
            self.rows += metadata.rows
        self.outcomes.append(
            {
                "number": self.ended_count,
                "req_id": self.shown(job.request.req_id),
                "modality": str(job.request.modality),
                "items": len(job.request.items),
                "state": str(reason),
                "ended": time.time(),
                "seconds": seconds,
                "stages": stages,
                "metadata": None if metadata is None else _short(metadata.to_json()),
                "destinations": job.destinations[:LISTED] or [job.request.delivery],
                "error": None if error is None else error.to_problem(),
            }
        )

    def refused(self, error: TectumError, request: EncodeRequest | None = None) -> None:
        self.refusals[error.code] += 1

    def since(self, number: int) -> list[dict[str, Any]]:
        """Remembered outcomes after the one of that number, oldest first."""
        new = min(self.ended_count - number, len(self.outcomes))
        return list(islice(self.outcomes, len(self.outcomes) - new, None)) if new > 0 else []

    def percentiles(self) -> dict[str, list[float]]:
        """Median and 99th percentile (nearest rank, seconds) of each stage, and of the whole, over what is remembered."""
        taken: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            if outcome["error"] is None:
                for stage, seconds in (*outcome["stages"].items(), ("total", outcome["seconds"])):
                    taken.setdefault(stage, []).append(seconds)
        return {stage: [_rank(sorted(values), share) for share in (0.5, 0.99)] for stage, values in taken.items()}


def _rank(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _short(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata as it is shown: of many items, the first."""
    return {name: value[:LISTED] if isinstance(value, list) else value for name, value in metadata.items()}


class Dashboard:
    """What an open page is told."""

    def __init__(self, pipeline: Pipeline, pool: WorkerPool, settings: Settings, recent: Recent) -> None:
        self._pipeline = pipeline
        self._pool = pool
        self._settings = settings
        self._recent = recent
        self.open_pages = 0

    def state(self, since: int) -> dict[str, Any]:
        """The service as it is now, and the outcomes after the one numbered `since`."""
        ledger, recent, settings = self._pipeline.ledger, self._recent, self._settings
        return {
            "at": time.time(),
            "version": tectum.__version__,
            "model": self._pool.card,
            "closing": ledger.closing,
            "live": {str(state): count for state, count in ledger.by_state().items()},
            "queued_patches": ledger.queued_patches,
            "staged_bytes": ledger.staged_bytes,
            "limits": {
                "live": settings.max_live_requests,
                "queued_patches": settings.max_queued_patches,
                "staged_bytes": settings.max_staged_bytes,
            },
            "totals": {"ended": recent.ended_count, "items": recent.items, "rows": recent.rows},
            "releases": recent.releases,
            "refusals": recent.refusals,
            "stages": recent.percentiles(),
            "workers": self._pool.describe(),
            "restarts": self._pool.restarts,
            "living": list(islice(self._living(), LISTED)),
            "outcomes": recent.since(since),
        }

    def _living(self) -> Iterator[dict[str, Any]]:
        """Live requests as the page lists them."""
        now = asyncio.get_running_loop().time()
        for request in self._pipeline.ledger.lives():
            metadata = request.metadata if isinstance(request.metadata, RequestMetadata) else None
            yield {
                "req_id": self._recent.shown(request.req_id),
                "state": str(request.state),
                "seconds": now - request.accepted_at,
                "metadata": None if metadata is None else _short(metadata.to_json()),
                "destinations": [a.address for a in request.registered or () if isinstance(a, Destination)][:LISTED],
            }

    def events(self, since: int) -> Response:
        """One event a second for as long as the page is open. Raises UnavailableError `overloaded` when many are."""
        if self.open_pages >= PAGES:
            raise UnavailableError("overloaded", f"{PAGES} live pages are open already; close one", retry_after=5.0)
        return _Events(self, since)


class _Events(Response):
    """Server-sent events to one page, until it is closed, stops reading, or the service shuts down."""

    def __init__(self, dashboard: Dashboard, since: int) -> None:
        super().__init__()
        self._dashboard = dashboard
        self._since = since

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._dashboard.open_pages += 1
        try:
            async with Caller(receive, send, PATIENCE).watched():
                await self._feed(send)
        except CallerGoneError:
            pass  # a page was closed: that is how each of them ends
        except TimeoutError:
            raise CallerGoneError from None
        finally:
            self._dashboard.open_pages -= 1

    async def _feed(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            state = self._dashboard.state(self._since)
            self._since = state["totals"]["ended"]
            event = f"id: {self._since}\ndata: {json.dumps(state)}\n\n".encode()
            async with asyncio.timeout(PATIENCE):
                await send({"type": "http.response.body", "body": event, "more_body": not state["closing"]})
            if state["closing"]:
                return
            await asyncio.sleep(INTERVAL)


def router(dashboard: Dashboard, tokens: Tokens | None) -> APIRouter:
    """`/`, `/dashboard/static/…` and `/dashboard/events`. tokens: those that callers may send, where they need one."""
    api = APIRouter(include_in_schema=False)
    page = _read("index.html")
    static = {name: _read(name) for name in _FILES}
    static.update({f"samples/{name}": files("tectum.demo").joinpath("photos", name).read_bytes() for name in _SAMPLES})

    @api.get("/")
    async def index(request: Request) -> Response:
        """The page; with status 401 it is the same and asks for the token."""
        given = request.headers.get("authorization", "").encode()
        known = tokens is None or tokens.accept(given)
        challenge = {} if known else {"www-authenticate": "Bearer"}
        return HTMLResponse(page, 200 if known else 401, {**_HEADERS, **challenge})

    @api.get("/dashboard/static/{name:path}")
    async def file(name: str) -> Response:
        if name not in static:
            raise BadRequestError("not_found", "There is no such page; /openapi.json lists those there are")
        return Response(static[name], headers=_HEADERS, media_type=_TYPES[name[name.rindex(".") :]])

    @api.get("/dashboard/events")
    async def events(since: int = Query(0, ge=0)) -> Response:
        return dashboard.events(since)

    @api.get("/dashboard/errors")
    async def errors() -> Response:
        return JSONResponse([_listed(entry) for entry in catalogue.entries()])

    return api


def _read(name: str) -> bytes:
    return files("tectum.serving").joinpath("static", name).read_bytes()


def _listed(entry: catalogue.Entry) -> dict[str, Any]:
    """What the page lists and searches of an error; its own page has the rest."""
    return {
        "code": entry.code,
        "status": entry.spec.status,
        "retryable": entry.spec.retryable,
        "message": entry.message,
        "meaning": entry.meaning,
        "when": entry.when,
        "todo": list(entry.todo),
        "related": list(entry.related),
    }
