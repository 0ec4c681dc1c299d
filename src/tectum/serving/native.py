"""The native HTTP door: `/v1/encode` and what belongs to a request. Thin: it reads, asks the pipeline, answers.

Owns the routes under `/v1/` that are about one request, and the form of their answers. `bodies.py` reads, `presence.py` notices
a hang-up; what a request may do next is the ledger's to say.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tectum.config import Settings
from tectum.delivery import wire
from tectum.lifecycle.events import Milestone, Reason
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.work import Job
from tectum.serving.bodies import REQ_ID, DestinationsBody, decode, read_encode_request
from tectum.serving.connection import ABORT
from tectum.serving.presence import CHUNK, Caller, body_pieces
from tectum.serving.push import Pushes
from tectum.types import Destination, EncodeRequest

InPath = Annotated[str, Path(max_length=256, pattern=REQ_ID, description="Id of a request.")]
SAFETENSORS = "application/x-safetensors"
#: documents of fewer bytes are copied and sent at once: cheaper than one call for each of their parts
COPIED = 256 * 1024
_DESTINATIONS = msgspec.json.Decoder(DestinationsBody)
_PROBLEM = {"content": {"application/problem+json": {"schema": {"type": "object"}}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request or its media is at fault.", **_PROBLEM},
    "5XX": {"description": "The service is at fault or full; `retryable` says whether to try again.", **_PROBLEM},
}


class Answer(Response):
    """A response that is worked out while the caller waits.

    A hang-up, or a reader that stalls, cancels the work: the cancelled block has told the lifecycle, and CallerGoneError goes
    on to the guard, which drops the connection.
    """

    def __init__(
        self, work: Callable[[Caller], Awaitable[None]], patience: float, *, counts_what_arrived: bool = False
    ) -> None:
        """patience, counts_what_arrived: as of a `Caller`."""
        super().__init__()
        self._work = work
        self._patience = patience
        self._counts_what_arrived = counts_what_arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get("extensions", {}).get(ABORT)
        counts = self._counts_what_arrived
        async with Caller(receive, send, self._patience, connection, counts_what_arrived=counts).watched() as caller:
            await self._work(caller)


def router(pipeline: Pipeline, pushes: Pushes, settings: Settings) -> APIRouter:
    """The routes under `/v1`, around one pipeline."""
    api = APIRouter(prefix="/v1", tags=["native"])

    @api.post(
        "/encode",
        summary="Encode pictures, clips or recordings",
        responses={200: {"content": {SAFETENSORS: {}, "application/json": {}}}, **_ERRORS},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": {"$ref": "#/components/schemas/EncodeBody"}},
                    "multipart/form-data": {
                        "schema": {
                            "type": "object",
                            "required": ["request"],
                            "properties": {"request": {"type": "string", "description": "The JSON body, as text."}},
                            "additionalProperties": {"type": "string", "format": "binary"},
                        }
                    },
                },
            }
        },
    )
    async def encode(request: Request) -> Response:
        """Encode one part. Answers when its rows are there: `inline` with them (safetensors), `hold` with metadata (JSON).
        With `push` it answers with metadata when every receiver has the rows."""
        encode_request = await read_encode_request(request, settings)
        request.state.req_id = encode_request.req_id
        return Answer(await _answering(pipeline, pushes, encode_request), settings.send_timeout)

    @api.get("/requests/{req_id}", summary="State of a request", responses=_ERRORS)
    async def status(req_id: InPath) -> JSONResponse:
        """Its state while it lives; the reason and age of its release for some time after."""
        return JSONResponse(pipeline.status(req_id))

    @api.get("/requests/{req_id}/metadata", summary="Rows, width, dtype and grid of a request", responses=_ERRORS)
    async def metadata(
        request: Request,
        req_id: InPath,
        wait: float = Query(0.0, ge=0, description="Seconds to wait for it."),
    ) -> Response:
        """Published after preprocessing, before the forward: answers while the forward runs."""
        request.state.req_id = req_id
        seconds = min(wait, settings.max_metadata_wait)

        async def work(caller: Caller) -> None:
            found = await pipeline.wait(req_id, Milestone.METADATA, seconds)
            await caller.answer(200, {"content-type": "application/json"}, json.dumps(found.to_json()).encode())

        return Answer(work, settings.send_timeout)

    @api.get("/requests/{req_id}/embedding", summary="Pull the held rows", responses=_ERRORS)
    async def embedding(request: Request, req_id: InPath) -> Response:
        """The rows as safetensors. A pull that arrived whole releases the request."""
        request.state.req_id = req_id

        async def work(caller: Caller) -> None:
            async with pipeline.pull(req_id) as job:
                await _answer_rows(caller, job)

        return Answer(work, settings.send_timeout, counts_what_arrived=True)

    @api.delete("/requests/{req_id}", summary="Release a request", responses=_ERRORS)
    async def release(req_id: InPath) -> JSONResponse:
        """Give back all it holds, at whatever stage it is. Idempotent; an id not seen yet is remembered as unwanted."""
        pipeline.release_request(req_id, Reason.CLIENT_RELEASE)
        return JSONResponse(pipeline.status(req_id))

    _add_destinations(api, pipeline, pushes, settings)
    return api


def _add_destinations(api: APIRouter, pipeline: Pipeline, pushes: Pushes, settings: Settings) -> None:
    @api.post(
        "/requests/{req_id}/destinations",
        summary="Push the rows to receivers",
        responses=_ERRORS,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/DestinationsBody"}}},
            }
        },
    )
    async def destinations(request: Request, req_id: InPath) -> Response:
        """Before or after its encode. Answers when these receivers have the rows, or with why they will not."""
        request.state.req_id = req_id
        raw = b"".join([piece async for piece in body_pieces(request.receive)])
        body = decode(_DESTINATIONS, raw, settings)
        receivers = await pushes.documents_to(body.destinations)

        async def work(caller: Caller) -> None:
            await pushes.send(req_id, receivers, body.receivers)
            found = json.dumps(pipeline.status(req_id)).encode()
            await caller.answer(200, {"content-type": "application/json"}, found)

        return Answer(work, settings.send_timeout)


async def _answering(pipeline: Pipeline, pushes: Pushes, request: EncodeRequest) -> Callable[[Caller], Awaitable[None]]:
    """How its caller is answered, by the delivery that it asked for. Raises BadRequestError for receivers that cannot be."""
    if request.delivery == "push":
        return partial(_push, pipeline, request, await pushes.documents_to(request.receivers))
    return partial(_hold if request.delivery == "hold" else _inline, pipeline, request)


async def _inline(pipeline: Pipeline, request: EncodeRequest, caller: Caller) -> None:
    async with pipeline.execute_encode_pipeline(request) as job:
        await _answer_rows(caller, job)


async def _hold(pipeline: Pipeline, request: EncodeRequest, caller: Caller) -> None:
    async with pipeline.hold(request) as job:
        assert job.staged is not None, "a held request is answered when it is staged"
        body = json.dumps({**job.staged.metadata.to_json(), "state": "staged"}).encode()
        await caller.answer(200, _headers(job, "application/json"), body)


async def _push(pipeline: Pipeline, request: EncodeRequest, to: Sequence[Destination], caller: Caller) -> None:
    metadata = await pipeline.deliver(request, to, request.receive_count)
    headers = {"content-type": "application/json", "x-tectum-req-id": request.req_id}
    await caller.answer(200, headers, json.dumps(metadata.to_json()).encode())


async def _answer_rows(caller: Caller, job: Job) -> None:
    """The rows in the wire format, large ones straight from staging memory: the lease outlasts the sending."""
    assert job.staged is not None, "only staged rows are delivered"
    document = wire.staged(job.staged.metadata, job.staged.lease.views())
    headers = _headers(job, SAFETENSORS)
    if document.nbytes < COPIED:
        await caller.answer(200, headers, document.whole())
    else:
        await caller.answer_lent(200, headers, document.nbytes, document.pieces(CHUNK))


def _headers(job: Job, content_type: str) -> dict[str, str]:
    timing = ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in job.seconds.items())
    return {"content-type": content_type, "x-tectum-req-id": job.request.req_id, "server-timing": timing}
