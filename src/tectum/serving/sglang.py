"""SGLang's doors: what its language-only server asks of an encoder, on the same pipeline as the native door.

Owns SGLang's bodies, answers and error form, and nothing behind them. An answer to `/encode` comes when every receiver
has its rows; a registration is held until its request is there; whatever ends badly says why, in words that may be shown
to the end user, with a status that `http.HTTPStatus` knows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec
from fastapi import APIRouter
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tectum.config import Settings
from tectum.delivery.base import Deliveries, MooncakeDestination
from tectum.delivery.sglang_frames import row_width
from tectum.errors import BadRequestError, DeliveryError, LifecycleError, TectumError
from tectum.lifecycle.events import Milestone
from tectum.pipeline.pipeline import Pipeline
from tectum.serving import tenants
from tectum.serving.bodies import ReqId, check_count, decode
from tectum.serving.health import Health
from tectum.serving.native import Answer
from tectum.serving.presence import Caller, body_pieces
from tectum.serving.problems import error_headers
from tectum.serving.push import Pushes
from tectum.types import Destination, EncodeRequest, MediaItem, Modality, RequestMetadata

#: the paths of these doors; their errors have SGLang's form
PATHS = frozenset({"/encode", "/send", "/scheduler_receive_url", "/scheduler_receive_meta_data"})
_FETCHED = ("http:", "https:", "data:", "file:")
#: how the path of a file ends, told from base64; pictures as SGLang has them
_FILES = {
    Modality.IMAGE: (".png", ".jpg", ".jpeg", ".webp", ".gif"),
    Modality.VIDEO: (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif"),
    Modality.AUDIO: (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a"),
}
_LONGEST_PATH = 4096
_JSON = {"content-type": "application/json"}


Port = Annotated[int, Meta(ge=1, le=65535)]


class ItemBody(Struct):
    """An item with options beside its source. What the client says of its content (`content_hash`) is not relied on."""

    url: Annotated[str, Meta(min_length=1)]


class EncodeBody(Struct):
    """One part of a user's request. Further fields are SGLang's own and change nothing here.

    A list of one may stand as its only element, as SGLang's client does it.
    """

    req_id: ReqId
    mm_items: str | ItemBody | Annotated[list[str | ItemBody], Meta(min_length=1)]
    modality: Literal["IMAGE", "VIDEO", "AUDIO", "image", "video", "audio"]
    num_parts: Annotated[int, Meta(ge=1, le=4096)]
    part_idx: Annotated[int, Meta(ge=0, le=4095)]
    prefill_host: Annotated[str, Meta(max_length=256)] | None = None
    embedding_port: Port | Annotated[list[Port], Meta(max_length=1024)] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None

    def __post_init__(self) -> None:
        if self.part_idx >= self.num_parts:
            raise ValueError("part_idx must be below num_parts")
        if self.embedding_port and not self.prefill_host:
            raise ValueError("embedding_port needs prefill_host")

    def addresses(self) -> list[str]:
        """Where the rows go that no registration will ask for: none for `zmq_to_scheduler` and mooncake."""
        ports = [self.embedding_port] if isinstance(self.embedding_port, int) else self.embedding_port
        return [f"{self.prefill_host}:{port}" for port in ports or ()]

    def to_request(self, settings: Settings) -> EncodeRequest:
        """Raises BadRequestError `request_too_large`."""
        items = self.mm_items if isinstance(self.mm_items, list) else [self.mm_items]
        return encode_request(
            [item if isinstance(item, str) else item.url for item in items],
            Modality[self.modality.upper()],
            settings,
            req_id=self.req_id,
            num_parts=self.num_parts,
            part_idx=self.part_idx,
            deadline_ms=self.deadline_ms,
        )


class RegisterBody(Struct):
    """One receiver (a tensor-parallel rank) that wants the rows of one part."""

    req_id: ReqId
    receive_url: Annotated[str, Meta(max_length=300)]
    receive_count: Annotated[int, Meta(ge=1, le=4096)]


class MetadataBody(Struct):
    """A receiver that allocates for one part."""

    req_id: ReqId


class SendBody(Struct):
    """A receiver that has allocated for one part."""

    req_id: ReqId
    prefill_host: Annotated[str, Meta(min_length=1, max_length=256)]
    embedding_port: Port
    session_id: Annotated[str, Meta(min_length=3, max_length=300)] | None = None
    buffer_address: Annotated[int, Meta(ge=0)] | None = None
    receive_count: Annotated[int, Meta(ge=1, le=4096)] = 1

    def target(self) -> Target:
        return Target(f"{self.prefill_host}:{self.embedding_port}", self.session_id, self.buffer_address)


class Target(NamedTuple):
    """Where one receiver wants its rows: pushed to `address`; or by Mooncake into its memory, and told at `address`."""

    address: str
    session_id: str | None = None
    buffer_address: int | None = None


def sizes(metadata: RequestMetadata) -> dict[str, Any]:
    """What a receiver has to know to allocate: bytes, rows and columns, deepstack layers counted as columns."""
    return {
        "req_id": metadata.req_id,
        "part_idx": metadata.part_idx,
        "embedding_size": metadata.nbytes,
        "embedding_len": metadata.rows,
        "embedding_dim": row_width(metadata),
    }


def encode_request(sources: Sequence[str], modality: Modality, settings: Settings, **facts: Any) -> EncodeRequest:
    """The request for `sources` as SGLang writes them, for the caller's own tenant: SGLang's bodies name none.

    Raises BadRequestError `request_too_large`.
    """
    check_count(len(sources), settings)
    items = tuple(media_item(source, modality) for source in sources)
    return EncodeRequest(items=items, tenant=tenants.effective(""), **facts)


def media_item(source: str, modality: Modality) -> MediaItem:
    """An item as SGLang writes it: a URL, the path of a file, or base64 without any mark."""
    if source[:8].lower().startswith(_FETCHED):
        return MediaItem(modality, url=source)
    if len(source) < _LONGEST_PATH and source.lower().endswith(_FILES[modality]):
        return MediaItem(modality, url="file://" + quote(source))
    return MediaItem(modality, base64=source)


class Doors:
    """What stands behind the routes and the gRPC calls: one pipeline, and how receivers are reached."""

    def __init__(
        self, pipeline: Pipeline, deliveries: Deliveries, pushes: Pushes, settings: Settings, hears: bool = False
    ) -> None:
        """hears: the model takes audio."""
        self._pipeline = pipeline
        self._deliveries = deliveries
        self._pushes = pushes
        self._receivers = pushes.receivers
        self._settings = settings
        self._patience = settings.send_timeout
        self._hears = hears

    async def encode(self, body: EncodeBody) -> RequestMetadata:
        """Encode; return when the body's addresses, or where there are none the receivers that register, have their rows.

        Raises MMError.
        """
        try:
            request = body.to_request(self._settings)
            destinations = [await self._receivers.destination(address) for address in body.addresses()]
        except TectumError as refusal:
            self._pipeline.tell_refused(refusal)
            raise
        if request.modality is Modality.VIDEO and self._hears:  # SGLang asks for sound in parts of its own
            request = replace(request, options={"audio_track": "separate"})
        return await self._pipeline.deliver(request, destinations)

    async def register(self, req_id: str, address: str, receive_count: int) -> None:
        """Have the rows of `req_id` pushed to `address`, one of `receive_count`; returns when the request is there.

        A request that failed has told its receivers why; one that registers too late for that is told now, within the
        send time-out. Its call ends well then: SGLang makes a 502 of every registration that does not, and the end user
        would not see the reason. Raises LifecycleError when the request was released or never came.
        """
        destination = await self._receivers.destination(address)
        try:
            await self._pipeline.register_destinations(req_id, [destination], receive_count)
        except LifecycleError:
            raise
        except TectumError as error:
            try:
                async with asyncio.timeout(self._patience):
                    await self._deliveries.notify(req_id, destination, error)
            except (TimeoutError, DeliveryError):
                raise error from None

    async def metadata(self, req_id: str) -> RequestMetadata:
        """Rows, width and bytes as soon as preprocessing knows them. Raises LifecycleError, or what it failed with."""
        return await self._pipeline.wait(req_id, Milestone.METADATA, self._settings.max_metadata_wait)

    async def send(self, req_id: str, target: Target, receive_count: int) -> None:
        """Deliver `req_id` to `target`, one of `receive_count` (0: not said). Returns and raises as `Pushes.send`."""
        await self._pushes.send(req_id, [await self._target(target)], receive_count)

    async def _target(self, target: Target) -> Destination:
        destination = await self._receivers.destination(target.address)
        if self._settings.transfer_backend != "mooncake":
            return destination
        if target.session_id is None or not target.buffer_address:
            raise BadRequestError("invalid_request", "Mooncake delivers to a session_id and a buffer_address")
        await self._receivers.destination(target.session_id)
        return MooncakeDestination(destination.address, "mooncake", target.session_id, target.buffer_address)


def router(doors: Doors, health: Health, settings: Settings) -> APIRouter:
    """SGLang's routes: thin, each asks one door."""
    api = APIRouter(tags=["sglang"])

    async def encode(body: EncodeBody) -> None:
        await doors.encode(body)

    async def scheduler_receive_url(body: RegisterBody) -> None:
        await doors.register(body.req_id, body.receive_url, body.receive_count)

    async def scheduler_receive_meta_data(body: MetadataBody) -> dict[str, Any]:
        return sizes(await doors.metadata(body.req_id))

    async def send(body: SendBody) -> None:
        await doors.send(body.req_id, body.target(), body.receive_count)

    async def probe() -> Response:
        return Response(status_code=200 if health.good() else 503)

    for path, kind, work, summary in (
        ("/encode", EncodeBody, encode, "Encode one part; answers when every receiver has its rows"),
        (
            "/scheduler_receive_url",
            RegisterBody,
            scheduler_receive_url,
            "Register a receiver for one part, before or after its /encode",
        ),
        (
            "/scheduler_receive_meta_data",
            MetadataBody,
            scheduler_receive_meta_data,
            "Sizes of one part, before its forward",
        ),
        ("/send", SendBody, send, "Deliver one part to the receiver that asks"),
    ):
        route = _route(msgspec.json.Decoder(kind), work, settings)
        api.add_api_route(path, route, methods=["POST"], summary=summary)
    for path in ("/health", "/health_generate"):
        api.add_api_route(path, probe, methods=["GET"], summary="The encoder does its work")
        api.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
    return api


def _route(
    decoder: msgspec.json.Decoder[Any], work: Callable[[Any], Awaitable[Any]], settings: Settings
) -> Callable[[Request], Awaitable[Response]]:
    """A route that reads its body, and works on it while its caller waits."""

    async def route(request: Request) -> Response:
        async with aclosing(body_pieces(request.receive)) as pieces:
            raw = b"".join([piece async for piece in pieces])
        try:
            body = decode(decoder, raw, settings)
        except TectumError:
            request.state.req_id = _req_id(raw)
            raise
        return _answer(body, work, settings)

    return route


def _answer(body: Any, work: Callable[[Any], Awaitable[Any]], settings: Settings) -> Response:
    """Do the work while the caller waits, and answer with what it returns, or in SGLang's error form."""

    async def answering(caller: Caller) -> None:
        try:
            found = await work(body)
        except TectumError as error:
            await _refuse(caller, error, body.req_id)
        else:
            await caller.answer(200, _JSON, json.dumps(found).encode())

    return Answer(answering, settings.send_timeout)


def refusal(error: TectumError, req_id: str | None) -> Response:
    """The answer to a request that was refused as it was read, or before."""
    return JSONResponse(error_body(error, req_id), error.status, error_headers(error))


async def _refuse(caller: Caller, error: TectumError, req_id: str | None) -> None:
    headers = {**_JSON, **error_headers(error)}
    await caller.answer(error.status, headers, json.dumps(error_body(error, req_id)).encode())


def _req_id(raw: bytes) -> str | None:
    """The id in a body that was refused, where it can be read and shown."""
    try:
        found = json.loads(raw).get("req_id")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found[:256] if isinstance(found, str) and found.isprintable() else None


def error_body(error: TectumError, req_id: str | None = None) -> dict[str, Any]:
    """SGLang's error form, and what is known beyond it."""
    known = {**error.to_problem(), "status": "error", "message": error.message, "req_id": req_id}
    del known["detail"], known["title"]
    return known
