"""Errors at the door: every failure leaves as `application/problem+json` (RFC 9457), whatever raised it.

Owns that form and its headers; which error it is was decided where it was raised.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tectum.errors import BadRequestError, InternalError, TectumError

log = logging.getLogger("tectum.http")

MEDIA_TYPE = "application/problem+json"


def problem_response(error: TectumError, req_id: str | None = None) -> Response:
    body = msgspec.json.encode(error.to_problem(req_id), enc_hook=str)
    return Response(body, error.status, error_headers(error), MEDIA_TYPE)


def error_headers(error: TectumError) -> dict[str, str]:
    """The headers of the answer to an error, whatever form its body has: when to try again, what credentials are read."""
    headers = {} if error.retry_after is None else {"retry-after": str(math.ceil(error.retry_after))}
    return {**headers, "www-authenticate": "Bearer"} if error.status == 401 else headers


def from_validation(error: RequestValidationError) -> TectumError:
    """Which part of the path or the query is wrong and why; the value itself is never repeated."""
    first: dict[str, Any] = dict(error.errors()[0])
    where = ".".join(str(part) for part in first["loc"])
    return BadRequestError("invalid_request", f"{where[:80]}: {first['msg']}")


def install(app: FastAPI) -> None:
    """Register the handlers of every kind of failure on `app`."""

    async def on_tectum(request: Request, error: Exception) -> Response:
        assert isinstance(error, TectumError), "each handler is given errors of its own kind"
        return problem_response(error, getattr(request.state, "req_id", None))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "each handler is given errors of its own kind"
        return problem_response(from_validation(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "each handler is given errors of its own kind"
        if error.status_code == 404:
            return problem_response(
                BadRequestError("not_found", "There is no such page; /openapi.json lists those there are")
            )
        if error.status_code == 405:
            text = f"{request.method[:20]} is not offered here; /openapi.json lists what is"
            return problem_response(BadRequestError("method_not_allowed", text))
        return problem_response(BadRequestError("invalid_request", str(error.detail)))

    async def on_other(request: Request, error: Exception) -> Response:
        text = f"Unexpected {type(error).__name__}; the server's log has more"
        return problem_response(InternalError("internal", text), getattr(request.state, "req_id", None))

    app.add_exception_handler(TectumError, on_tectum)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_other)
