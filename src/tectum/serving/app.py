"""The application: every door on one pipeline, the pages about the service itself, and what guards them.

Owns the order in which they stand before each other, from the guard inwards, and the probes. It starts nothing: pipeline,
encoders and observers are handed in by `server.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse, Response

import tectum
from tectum import catalogue
from tectum.config import Settings
from tectum.errors import TectumError
from tectum.observe import trace
from tectum.observe.metrics import Metrics
from tectum.pipeline.pipeline import Pipeline
from tectum.serving import dashboard, hot, native, problems, sglang
from tectum.serving.bodies import openapi_schemas
from tectum.serving.guard import BodyBudget, Guard, Tokens, TraceCaller
from tectum.serving.health import Health
from tectum.serving.push import Pushes
from tectum.workers.pool import WorkerPool

#: where the work comes in
HOT_PATHS = sglang.PATHS | {"/v1/encode"}


def create_app(
    pipeline: Pipeline,
    pool: WorkerPool,
    settings: Settings,
    metrics: Metrics,
    pushes: Pushes,
    doors: sglang.Doors,
    health: Health,
    recent: dashboard.Recent | None = None,
    budget: BodyBudget | None = None,
) -> FastAPI:
    """The ASGI application, on a pipeline and the encoders that work for it. `doors` are SGLang's.

    recent: the observer whose outcomes the live page shows; without it there is no page.
    budget: what bodies are booked against, where another door shares it; else one of its own, from the settings.
    Raises StartupError when the token file cannot be read.
    """
    app = FastAPI(
        title="Tectum",
        version=tectum.__version__,
        description="Vision and audio encoders as a service: rows for a language model that runs elsewhere.",
        docs_url=None,  # its page would load a script from another host
        redoc_url=None,
        redirect_slashes=False,  # it would lead to whatever name the Host header holds
    )
    problems.install(app)
    routers = [native.router(pipeline, pushes, settings)]
    if settings.serves_sglang:
        routers.append(sglang.router(doors, health, settings))
    else:
        _add_short_health(app, health)
    for router in routers:
        app.include_router(router)
    _add_health(app, pipeline, pool, health)
    _add_pages(app, pool, settings, metrics)
    _add_catalogue(app)
    app.openapi = _documented(app.openapi)  # type: ignore[method-assign]
    budget = budget or BodyBudget(settings.max_bodies_bytes, pipeline.tell_refused)
    metrics.watch_bodies(budget)
    tokens = None if settings.token_file is None else Tokens(settings.token_file)
    if recent is not None:
        page = dashboard.Dashboard(pipeline, pool, settings, recent)
        app.include_router(dashboard.router(page, tokens))
        metrics.watch_pages(lambda: page.open_pages)
    carrying = hot.endpoints((route for router in routers for route in router.routes), HOT_PATHS)
    app.add_middleware(hot.HotDoors, doors=carrying, refused=pipeline.tell_refused, refuse=_refusal)
    if trace.wanted(settings.trace_endpoint):
        app.add_middleware(TraceCaller)
    app.add_middleware(Guard, settings=settings, tokens=tokens, budget=budget, hung_up=metrics.hung_up, refuse=_refusal)
    return app


def _refusal(path: str, error: TectumError, req_id: str | None = None) -> Response:
    """The answer to a request that no route sees, or that was refused as it was read, as callers of its path read it."""
    return sglang.refusal(error, req_id) if path in sglang.PATHS else problems.problem_response(error, req_id)


def _add_health(app: FastAPI, pipeline: Pipeline, pool: WorkerPool, health: Health) -> None:
    """Probes. None of them waits for others' work, so that they never queue behind it."""

    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", tags=["health"], summary="The process answers")
    async def live() -> Response:
        return JSONResponse({"status": "live"})

    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health/ready", tags=["health"], summary="The next request is taken")
    async def ready() -> Response:
        health.check_ready()
        health.check_room()
        return JSONResponse({"status": "ready", "live_requests": len(pipeline.ledger), "workers_up": pool.up})

    @app.head("/health/progress", include_in_schema=False)
    @app.get("/health/progress", tags=["health"], summary="Work that was accepted gets done")
    async def progress() -> Response:
        """Unhealthy when an encoder with pending work has finished no step for three quarters of `--stall-timeout`."""
        stalled = health.check_progress()
        return JSONResponse({"status": "progressing", "stalled_s": round(stalled, 3), "workers": pool.describe()})

    @app.get("/health/encode", tags=["health"], summary="A small item is encoded")
    async def encode() -> Response:
        """The whole walk but for fetching and delivery, where nothing else is to do; a busy server's own work says as much."""
        return JSONResponse(await health.check_encode())


def _add_short_health(app: FastAPI, health: Health) -> None:
    """`/health`, where vLLM and SGLang have it; SGLang's doors bring their own."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["health"], summary="New work is taken, and accepted work gets done")
    async def short() -> Response:
        health.check_ready()
        health.check_progress()
        return JSONResponse({"status": "ready"})


def _add_pages(app: FastAPI, pool: WorkerPool, settings: Settings, metrics: Metrics) -> None:
    @app.get("/v1/models", tags=["native"], summary="The model that is served")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [pool.card]})

    @app.get("/v1/limits", tags=["native"], summary="The limits in force")
    async def limits() -> Response:
        return JSONResponse(settings.limits())

    @app.get("/metrics", tags=["health"], summary="Prometheus metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")


def _add_catalogue(app: FastAPI) -> None:
    """The error reference: `type` of every problem leads here."""
    policy = {"Content-Security-Policy": catalogue.CONTENT_SECURITY_POLICY}

    @app.get("/errors", tags=["errors"], summary="Every error code", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(catalogue.index_html(), headers=policy)

    @app.get("/errors/{code}", tags=["errors"], summary="What an error means", response_class=HTMLResponse)
    async def page(code: str) -> Response:
        return HTMLResponse(catalogue.to_html(catalogue.entry(code)), headers=policy)

    @app.get("/api/errors/{code}", tags=["errors"], summary="What an error means, for programs")
    async def data(code: str) -> Response:
        return JSONResponse(catalogue.to_json(catalogue.entry(code)))


def _documented(openapi: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The OpenAPI document with the schema of the encode body, which the route reads by hand, and without FastAPI's 422.

    A wrong parameter is answered 400, as `problems.py` says.
    """

    def document() -> dict[str, Any]:
        schema = openapi()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(openapi_schemas())
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for methods in schema["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        return schema

    return document
