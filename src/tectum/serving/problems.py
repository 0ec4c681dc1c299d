"""Errors at the door: every failure leaves as `application/problem+json` (RFC 9457), whatever raised it."""

from __future__ import annotations

import logging
import math
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from tectum.errors import BadRequestError, InternalError, TectumError

log = logging.getLogger("tectum.http")

MEDIA_TYPE = "application/problem+json"


def problem_response(error: TectumError, req_id: str | None = None) -> JSONResponse:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.to_problem(req_id), error.status, headers, MEDIA_TYPE)


def from_validation(error: ValidationError | RequestValidationError) -> TectumError:
    """Which field is wrong and why; the value itself is never repeated."""
    if isinstance(error, ValidationError):
        found = error.errors(include_input=False, include_url=False, include_context=False)
    else:
        found = list(error.errors())
    first: dict[str, Any] = dict(found[0])
    where = ".".join(str(part) for part in first["loc"]) or "body"
    item = first["loc"][1] if len(first["loc"]) > 1 and first["loc"][0] == "items" else None
    text = f"{where[:80]}: {first['msg']}"
    return BadRequestError("invalid_request", text, item=item if isinstance(item, int) else None)


def install(app: FastAPI) -> None:
    """Register the handlers of every kind of failure on `app`."""

    async def on_tectum(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, TectumError)
        return problem_response(error, getattr(request.state, "req_id", None))

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, (ValidationError, RequestValidationError))
        return problem_response(from_validation(error))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem_response(
                BadRequestError("not_found", "There is no such page; see /docs for those there are")
            )
        if error.status_code == 405:
            text = f"{request.method} is not offered here; see /docs"
            return problem_response(BadRequestError("method_not_allowed", text))
        return problem_response(BadRequestError("invalid_request", str(error.detail)))

    async def on_other(request: Request, error: Exception) -> JSONResponse:
        text = f"Unexpected {type(error).__name__}; the server's log has more"
        return problem_response(InternalError("internal", text), getattr(request.state, "req_id", None))

    app.add_exception_handler(TectumError, on_tectum)
    app.add_exception_handler(ValidationError, on_validation)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_other)
