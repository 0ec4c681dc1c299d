"""The doors that carry the load answer past the router exactly as they would through it."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from tectum.errors import TectumError, UnavailableError
from tectum.serving import hot, problems


def made(shortcut: bool) -> FastAPI:
    """An application with one endpoint, reached by the shortcut or through the router."""
    api = APIRouter(prefix="/v1")

    @api.post("/work")
    async def work(request: Request) -> Response:
        body = (await request.body()).decode()
        request.state.req_id = "r1"
        if body == "full":
            raise UnavailableError("overloaded", "The encoder is full: of tests", retry_after=2.0)
        if body == "defect":
            raise RuntimeError("a secret")
        return PlainTextResponse(f"{body} {'/'.join(scope_marks(request))}")

    app = FastAPI(docs_url=None, redoc_url=None)
    problems.install(app)
    app.include_router(api)
    doors = hot.endpoints(api.routes, frozenset({"/v1/work"}))
    assert list(doors) == [("POST", "/v1/work")]
    way = doors if shortcut else {}
    app.add_middleware(hot.HotDoors, doors=way, refused=lambda error: None, refuse=as_problem)
    return app


def as_problem(path: str, error: TectumError, req_id: str | None) -> Response:
    return problems.problem_response(error, req_id)


def scope_marks(request: Request) -> list[str]:
    """What only the router leaves in a request's scope."""
    return [mark for mark in ("endpoint", "path_params") if mark in request.scope]


def asked(app: ASGIApp, method: str, path: str, body: str = "") -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)

    async def call() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, content=body)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/work", "full", 503),
        ("POST", "/v1/work", "defect", 500),
        ("GET", "/v1/work", "", 405),
        ("POST", "/v1/work/", "", 307),
        ("POST", "/v1/other", "", 404),
    ],
)
def test_errors_are_the_same_on_both_ways(method, path, body, status):
    direct, routed = [asked(made(shortcut), method, path, body) for shortcut in (True, False)]
    assert direct.status_code == routed.status_code == status
    assert direct.content == routed.content
    assert sorted(direct.headers.items()) == sorted(routed.headers.items())
    assert b"secret" not in direct.content


def test_the_shortcut_is_taken():
    assert (asked(made(True), "POST", "/v1/work", "well")).text == "well "
    assert (asked(made(False), "POST", "/v1/work", "well")).text == "well endpoint/path_params"


def test_what_a_door_raises_is_answered_in_the_form_of_its_path():
    async def door(request: Request) -> Response:
        raise UnavailableError("overloaded", "The encoder is full: of tests", retry_after=2.0)

    def refuse(path: str, error: TectumError, req_id: str | None) -> Response:
        return PlainTextResponse(f"{path} {error.code} {req_id}", error.status)

    told: list[TectumError] = []
    app = hot.HotDoors(FastAPI(), {("POST", "/encode"): door}, told.append, refuse)
    answer = asked(app, "POST", "/encode")
    assert (answer.status_code, answer.text) == (503, "/encode overloaded None")
    assert [error.code for error in told] == ["overloaded"]
