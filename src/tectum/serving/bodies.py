"""What a caller may send to `POST /v1/encode`, as JSON or as multipart, and how it becomes an `EncodeRequest`.

The JSON is decoded straight into typed structs: the first thing that is wrong ends it, so that its cost grows with the bytes
of the body and with nothing that a caller can make dense (64 MB take 40 ms, at worst 100 ms).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, field
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header
from starlette.requests import Request
from starlette.types import Receive

from tectum.config import MIB, Settings
from tectum.errors import BadRequestError
from tectum.serving import tenants
from tectum.serving.presence import body_pieces
from tectum.types import EncodeRequest, MediaItem, Modality

Body = TypeVar("Body", bound=Struct)
#: an id stands in URLs, logs and error frames: plain characters only
REQ_ID = r"^[A-Za-z0-9_][A-Za-z0-9._:@+=~-]*$"
#: the same for msgspec, which asks Python's `re`: there `$` also matches before a line break that ends the text
ReqId = Annotated[str, Meta(min_length=1, max_length=256, pattern=REQ_ID.replace("$", r"(?!\n)$"))]
#: quote characters that the JSON of an encode request may hold: some for each item, and some beside them
QUOTES_EACH, QUOTES_BESIDE = 24, 1024
MAX_OPTIONS = 64
#: bytes of the multipart field that holds the JSON
MAX_FIELD = 8 * MIB
#: parts of a multipart body beside its files
MAX_FIELDS = 4
#: bytes of one header of a part: a name and a filename. Each line that a header is folded into costs as much as a header
MAX_PART_HEADER = 2048


class ItemBody(Struct, forbid_unknown_fields=True):
    """One item: exactly one of `url` (https:, http:, data:, file:), `data` (base64) or `file` (a multipart part)."""

    type: Modality
    url: Annotated[str, Meta(min_length=1, description="Where the media lies, or a data: URI.")] | None = None
    data: Annotated[str, Meta(description="The media itself, base64.")] | None = None
    file: (
        Annotated[str, Meta(max_length=256, description="Name of the multipart part that holds the raw bytes.")] | None
    ) = None

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.url, self.data, self.file)) != 1:
            raise ValueError("exactly one of url, data and file must be given")


#: of one call; more may register by themselves
Addresses = Annotated[list[Annotated[str, Meta(min_length=3, max_length=300)]], Meta(max_length=256)]
Count = Annotated[int, Meta(ge=0, le=4096)]


class DeliveryBody(Struct, forbid_unknown_fields=True):
    """How the rows reach a receiver: in this answer (`inline`), held for `GET /v1/requests/{id}/embedding` (`hold`), or pushed
    to `destinations` (`host:port`) and to whoever registers at `POST /v1/requests/{id}/destinations` (`push`).

    receivers: how many there will be in all; those of `destinations` without it. Rows are held until so many have them.
    """

    mode: Literal["inline", "hold", "push"] = "inline"
    destinations: Addresses = field(default_factory=list)
    receivers: Count = 0

    def __post_init__(self) -> None:
        if (self.destinations or self.receivers) and self.mode != "push":
            raise ValueError("destinations and receivers are for mode push")


class DestinationsBody(Struct, forbid_unknown_fields=True):
    """Receivers (`host:port`) that want the rows of a request pushed, of so many `receivers` in all (0: not said)."""

    destinations: Annotated[Addresses, Meta(min_length=1)]
    receivers: Count = 0


#: whole numbers that every JSON reader keeps exact, and that fit a message to an encoder process
_EXACT = 2**53
Option = bool | Annotated[int, Meta(ge=-_EXACT, le=_EXACT)] | float | Annotated[str, Meta(max_length=256)] | None


class EncodeBody(Struct, forbid_unknown_fields=True):
    """One part of one request: items of one modality, encoded together."""

    items: Annotated[list[ItemBody], Meta(min_length=1)]
    req_id: Annotated[ReqId, Meta(description="Identity of the request; made up where it is not given.")] | None = None
    num_parts: Annotated[int, Meta(ge=1, le=4096)] = 1
    part_idx: Annotated[int, Meta(ge=0, le=4095)] = 0
    deadline_ms: Annotated[int, Meta(ge=1, le=3_600_000, description="Milliseconds until it is no use.")] | None = None
    options: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Option],
        Meta(max_length=MAX_OPTIONS, description="Processor options, such as max_pixels."),
    ] = field(default_factory=dict)
    delivery: DeliveryBody = field(default_factory=DeliveryBody)

    tenant: Annotated[
        str, Meta(max_length=256, description="On whose behalf; rows are never shared between tenants.")
    ] = ""
    content_keys: Annotated[
        bool, Meta(description="Whether the metadata names the content of each item by its key.")
    ] = False

    def __post_init__(self) -> None:
        if self.part_idx >= self.num_parts:
            raise ValueError("part_idx must be below num_parts")

    def to_request(self, files: dict[str, bytes], settings: Settings) -> EncodeRequest:
        """Raises BadRequestError `request_too_large` (items), `mixed_modalities` or `invalid_request` (no such part)."""
        check_count(len(self.items), settings)
        kinds = {item.type for item in self.items}
        if len(kinds) > 1:
            text = f"A request holds one modality, this one has {', '.join(sorted(kinds))}: send one request for each"
            raise BadRequestError("mixed_modalities", text)
        return EncodeRequest(
            req_id=self.req_id or uuid.uuid4().hex,
            items=tuple(_media_item(index, item, files) for index, item in enumerate(self.items)),
            num_parts=self.num_parts,
            part_idx=self.part_idx,
            deadline_ms=self.deadline_ms,
            options=self.options,
            delivery=self.delivery.mode,
            receivers=tuple(self.delivery.destinations),
            receive_count=self.delivery.receivers,
            tenant=tenants.effective(self.tenant),
            content_keys=self.content_keys,
        )


def check_count(items: int, settings: Settings) -> None:
    """Raises BadRequestError `request_too_large` for more items than a request may have."""
    if items > settings.max_items:
        text = f"The request has {items} items, more than --max-items {settings.max_items}"
        raise BadRequestError("request_too_large", text)


def _media_item(index: int, item: ItemBody, files: dict[str, bytes]) -> MediaItem:
    if item.file is None:
        return MediaItem(item.type, url=item.url, base64=item.data)
    if item.file not in files:
        raise BadRequestError("invalid_request", f"items.{index}.file names no part of this multipart body", item=index)
    return MediaItem(item.type, data=files[item.file])


_DECODER = msgspec.json.Decoder(EncodeBody)


def decode_encode_body(text: bytes | bytearray | str, settings: Settings) -> EncodeBody:
    """The JSON of an encode request.

    Raises BadRequestError `invalid_request` (not JSON, or a field is wrong) or `request_too_large`.
    """
    return decode(_DECODER, text, settings)


def decode(decoder: msgspec.json.Decoder[Body], text: bytes | bytearray | str, settings: Settings) -> Body:
    """A JSON body as the struct that `decoder` makes. Raises as `decode_encode_body`."""
    quotes = text.count('"') if isinstance(text, str) else text.count(b'"')
    if quotes > QUOTES_EACH * settings.max_items + QUOTES_BESIDE:  # counting is cheap, decoding millions of them is not
        raise BadRequestError("request_too_large", f"The JSON holds more than {settings.max_items} items can need")
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.MsgspecError, ValueError, RecursionError):  # UnicodeError is a ValueError
        raise BadRequestError("invalid_request", "The body is not valid JSON in UTF-8") from None


def convert(kind: type[Body], fields: dict[str, Any]) -> Body:
    """Fields that did not come as JSON, held to the same rules. Raises BadRequestError `invalid_request`."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None


#: what a field may hold, by its name, where that is a choice: the library does not say
_CHOICES = {"type": tuple(Modality), "mode": get_args(get_type_hints(DeliveryBody)["mode"])}


def _wrong_field(said: str) -> BadRequestError:
    """msgspec says `<what> - at `$.items[3].url``; where comes first here, and no value or long name is repeated."""
    what, at, where = said.rpartition(" - at `$")
    if not at:
        what, where = said, ""
    path = where.rstrip("`").replace("[...]", "").replace("[", ".").replace("]", "").strip(".")
    parts = path.split(".")
    item = int(parts[1]) if len(parts) > 1 and parts[0] == "items" and parts[1].isdigit() else None
    told, quoted, name = what.partition("`")
    if told.startswith("Object contains unknown field"):
        what = f"there is no field `{name.rstrip('`')[:40]}`"
    elif told.startswith("Invalid enum value"):
        known = _CHOICES.get(parts[-1])
        what = f"not one of {', '.join(known)}" if known else "not one of those that are known"
    else:
        what = told + quoted + name
    return BadRequestError("invalid_request", f"{path[:80] or 'body'}: {what}", item=item)


async def read_encode_request(request: Request, settings: Settings) -> EncodeRequest:
    """The encode request in an HTTP body: JSON, or multipart with a `request` field (the JSON) and file parts.

    Raises BadRequestError (a field, the form, or the size is wrong), or CallerGoneError (nobody sends it any more).
    """
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        return await _read_multipart(request, settings)
    body = bytearray()
    async for piece in body_pieces(request.receive):
        body += piece
    return decode_encode_body(body, settings).to_request({}, settings)


async def _read_multipart(request: Request, settings: Settings) -> EncodeRequest:
    described: list[bytes] = []
    files: dict[str, bytes] = {}
    try:
        with _parser(request.headers["content-type"], settings.max_items) as parser:
            async with aclosing(_parts(parser, request.receive)) as parts:
                async for part, content in parts:
                    _keep(part, content, described, files)
    except MultipartError as error:
        # further arguments may hold a header as it came
        text = f"The multipart body is malformed: {error.args[0]}"
        raise BadRequestError("invalid_request", text) from None
    if not described:
        raise BadRequestError("invalid_request", "The multipart body needs a field named request that holds the JSON")
    return decode_encode_body(described[-1], settings).to_request(files, settings)


async def _parts(parser: PushMultipartParser, receive: Receive) -> AsyncGenerator[tuple[MultipartSegment, bytes], None]:
    """Each part of a multipart body once it has come whole, and its content. Raises MultipartError, CallerGoneError."""
    content: list[bytes] = []
    async with aclosing(body_pieces(receive)) as pieces:
        async for piece in pieces:
            for event in parser.parse(piece) if piece else ():
                if isinstance(event, MultipartSegment):
                    part = event
                elif event is not None:
                    content.append(event)
                else:
                    yield part, b"".join(content)
                    content.clear()


def _parser(content_type: str, max_items: int) -> PushMultipartParser:
    """For the parts of a body of this type. Raises MultipartError, or BadRequestError `invalid_request`."""
    _, parameters = parse_options_header(content_type)
    if parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise BadRequestError("invalid_request", "The multipart body's charset is not UTF-8")
    return PushMultipartParser(
        parameters.get("boundary", ""),
        max_header_size=MAX_PART_HEADER,
        max_segment_count=max_items + MAX_FIELDS,
    )


def _keep(part: MultipartSegment, content: bytes, described: list[bytes], files: dict[str, bytes]) -> None:
    """One part that has come whole: the field that holds the JSON, or a file by its name.

    A file need not say what it was called (RFC 7578, 4.2), and some say so in a form that is not read (`filename*`).
    """
    if part.name == "request" and part.filename is None:
        if len(content) > MAX_FIELD:
            raise MultipartError(f"The field named request is larger than {MAX_FIELD} bytes")
        described.append(content)
    else:
        files[part.name or ""] = content


def openapi_schemas() -> dict[str, Any]:
    """The JSON schemas of the bodies, by name, for the OpenAPI document."""
    bodies = (EncodeBody, DestinationsBody)
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    return schemas
