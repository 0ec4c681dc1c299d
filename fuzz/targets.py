"""What is fuzzed: one function for each parser, from bytes to nothing. It raises where the parser breaks its contract.

The contract of all: what is wrong with the input is a TectumError of 4xx (`wire`: `invalid_rows`) whose text keeps the rules
of errors; nothing else is raised, and nothing takes long (the fuzzer's own time limit).
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch  # noqa: F401  # `wire` imports it when rows arrive, which must not count as a hang
import zmq
from starlette.requests import Request

from tectum.config import Settings
from tectum.delivery import local, wire
from tectum.delivery.base import split_address
from tectum.engines import pushed, receiver
from tectum.errors import MAX_TEXT, TectumError, clean_text
from tectum.media.image import decode_image, open_image, shown_size
from tectum.media.policy import MediaPolicy, check_address, parse_target
from tectum.media.source import decode_base64, item_bytes
from tectum.serving import sglang
from tectum.serving.bodies import DestinationsBody, decode, decode_encode_body, read_encode_request
from tectum.serving.chat import Chat, Held, is_in_utf8
from tectum.types import MediaItem, Modality
from tectum.workers.messages import Frames, frame, to_prepare

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}
SETTINGS = Settings(max_items=8, max_body_bytes=1 << 20)
POLICY = MediaPolicy(max_media_bytes=1 << 20, max_image_pixels=1 << 16, max_request_pixels=1 << 17)


def target(parse: Target) -> Target:
    @functools.wraps(parse)
    def lawful(data: bytes) -> None:
        try:
            parse(data)
        except TectumError as error:
            check_error(error)

    TARGETS[parse.__name__] = lawful
    return lawful


def check_error(error: TectumError) -> None:
    """The rules of errors (DESIGN: errors are an interface)."""
    assert 400 <= error.status < 500 or error.code == "invalid_rows", error.code
    assert len(error.message) <= MAX_TEXT
    assert error.message.isprintable()
    assert len(json.dumps(error.to_problem())) <= 1024


@target
def data_uri(data: bytes) -> None:
    url = "data:" + data.decode("utf-8", "surrogateescape")
    read = item_bytes(MediaItem(Modality.IMAGE, url=url), POLICY)
    assert 0 < len(read) <= POLICY.max_media_bytes


@target
def base64_text(data: bytes) -> None:
    read = decode_base64(data.decode("latin-1"), POLICY)
    assert len(read) <= len(data)


@target
def url(data: bytes) -> None:
    """Whatever is accepted is read by the parser of the standard library as the very same target."""
    found = parse_target(data.decode("utf-8", "surrogateescape"), POLICY)
    again = urlsplit(f"{found.scheme}://{found.origin}{found.path}")
    assert (again.scheme, again.hostname, again.username) == (found.scheme, found.host, None)
    assert (again.port or {"http": 80, "https": 443}[found.scheme]) == found.port
    assert found.host.isascii()
    assert not set(found.origin + found.path) & set("\\ \r\n\t\0")
    try:
        address = ipaddress.ip_address(found.host)
    except ValueError:
        assert not found.host.replace(".", "").isdigit(), "a number that resolvers would take for an address"
        return
    try:
        check_address(str(address), POLICY)
    except TectumError:
        return
    assert address.is_global
    assert not address.is_multicast


@target
def file_url(data: bytes) -> None:
    """Nothing is read where no folder is allowed."""
    item_bytes(MediaItem(Modality.IMAGE, url="file:" + data.decode("utf-8", "surrogateescape")), POLICY)
    raise AssertionError("a file was read")


@target
def json_body(data: bytes) -> None:
    request = decode_encode_body(data, SETTINGS).to_request({}, SETTINGS)
    assert 1 <= len(request.items) <= SETTINGS.max_items
    assert 0 <= request.part_idx < request.num_parts <= 4096
    Frames().feed(frame(to_prepare(1, request)))  # what passes the door passes on to an encoder process


def drive(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


@target
def multipart(data: bytes) -> None:
    """The first byte says how the body is cut into pieces; up to the first line break stands the content type's tail."""
    tail, _, body = data[1:].partition(b"\n")
    step = data[0] + 1 if data else 1
    pieces = [body[at : at + step * 7] for at in range(0, len(body), step * 7)] or [b""]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    headers = [(b"content-type", b"multipart/form-data; boundary=b" + tail)]
    request = Request({"type": "http", "method": "POST", "headers": headers, "path": "/"}, receive)
    drive(read_encode_request(request, SETTINGS))


@target
def wire_document(data: bytes) -> None:
    """Also what a hostile encoder may answer to a receiver: nothing but `invalid_rows`."""
    embedding = wire.unpack(data)
    assert sum(embedding.item_rows) == embedding.rows.shape[0]


@target
def picture(data: bytes) -> None:
    size = shown_size(open_image(data, POLICY))
    decoded = decode_image(data, POLICY)
    assert (decoded.mode, sorted(decoded.size)) == ("RGB", sorted(size))  # a PNG may say behind its pixels how it lies
    assert decoded.width * decoded.height <= POLICY.max_image_pixels


@target
def error_text(data: bytes) -> None:
    """Secrets of a URL never come through, whatever stands around it."""
    text = data.decode("utf-8", "replace")
    for around in (f"{text} https://user:c4n4ry@h/p?s=c4n4ry", f"https://user:c4n4ry@h/p#c4n4ry {text}"):
        cleaned = clean_text(around)
        assert len(cleaned) <= MAX_TEXT
        assert cleaned.isprintable()
        assert "c4n4ry" not in cleaned or "c4n4ry" in text


@target
def problem(data: bytes) -> None:
    """What a hostile server may answer to the client."""
    try:
        document = json.loads(data)
    except ValueError:
        return
    if isinstance(document, dict):
        TectumError.from_problem(document).to_problem()


@target
def sglang_body(data: bytes) -> None:
    """A JSON body of SGLang's doors, or a registration at the native one; the first byte says which."""
    kinds = (sglang.EncodeBody, sglang.RegisterBody, sglang.MetadataBody, sglang.SendBody, DestinationsBody)
    body = decode(msgspec.json.Decoder(kinds[data[0] % len(kinds)] if data else sglang.EncodeBody), data[1:], SETTINGS)
    if isinstance(body, sglang.EncodeBody):
        assert body.part_idx < body.num_parts
        request = body.to_request(SETTINGS)
        assert 1 <= len(request.items) <= SETTINGS.max_items
        Frames().feed(frame(to_prepare(1, request)))
        for address in body.addresses():
            split_address(address)
    elif isinstance(body, sglang.SendBody):
        split_address(body.target().address)


@target
def grpc_message(data: bytes) -> None:
    """The messages of the gRPC door; the first byte says which."""
    from google.protobuf.message import DecodeError

    from tectum.serving import grpc  # a process that fuzzes other things has no use for its threads

    reads = (lambda raw: grpc._encode_body(raw, SETTINGS), grpc._send_body, grpc._register_body)
    try:
        body = reads[data[0] % len(reads) if data else 0](data[1:])
    except DecodeError:
        return  # the door answers INVALID_ARGUMENT
    if isinstance(body, sglang.EncodeBody):
        assert 1 <= len(body.to_request(SETTINGS).items) <= SETTINGS.max_items


@target
def chat_body(data: bytes) -> None:
    """What the gateway passes on holds no media, as a plain reader of JSON sees it, and was refused or all found."""
    if not is_in_utf8(data):
        return
    found = Chat.read(data)
    seen = _media_of(data)
    if found is None:
        assert seen == 0, "media would reach the engine"
        return
    assert len(found.media) == seen
    found.options()
    held = [Held("http://e", "r", "k", medium.modality, {"n": 1}) for medium in found.media]
    assert _media_of(found.rewritten(held)) == 0


def _media_of(data: bytes) -> int:
    """Media parts of a chat request: by their type, or where they have none by the first field that is a medium's.

    Strings that are passed on unread may hold bytes that are no UTF-8, which a lenient reader would replace.
    """
    try:
        body = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return 0
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return 0
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    media = ("image_url", "video_url", "audio_url", "input_audio")

    def kind(part: dict[str, Any]) -> Any:
        named = part.get("type")
        return named if isinstance(named, str) and named else next((name for name in media if name in part), None)

    return sum(kind(part) in media for part in parts)


@target
def pushed_message(data: bytes) -> None:
    """What whoever reaches a receiver's port may send to it. The first byte says how long its frames are; 0 says one frame."""
    step = data[0] * 8 if data and data[0] else len(data) + 1
    frames = [zmq.Frame(data[1:][at : at + step]) for at in range(0, len(data) - 1, step)] or [zmq.Frame(b"")]
    buffer = pushed._buffer(frames, bytearray) if len(frames) > 1 else None
    came = pushed._problem(frames) if buffer is None else pushed._rows(frames, buffer)
    assert came.req_id.isprintable()
    if came.document is not None:
        came.document.embedding()


@target
def mooncake_message(data: bytes) -> None:
    """A completion message: a pickle that is never loaded."""
    assert all(isinstance(value, str | int | None) for value in receiver.fields_of(data).values())


@target
def local_line(data: bytes) -> None:
    """A line of the Unix socket, as the encoder reads it and as a receiver takes a grant."""
    granted = local.granted(local.parse(data), memoryview(bytearray(4096)))
    assert granted.rows >= 0
    assert granted.width > 0
    assert sum(len(array.data) for array in granted.arrays) <= 4096
    granted.embedding()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@target
def http(data: bytes) -> None:
    """Bytes of a connection, cut at the first byte's step, into the real connection, guard and bodies."""
    from fuzz.http import exchange

    answers = _loop().run_until_complete(exchange(data[1:], step=1 + (data[0] if data else 0)))
    check_answers(answers)


def check_answers(answers: bytes) -> None:
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        version, status = lines[0].split(b" ")[:2]
        assert version == b"HTTP/1.1"
        assert status == b"100" or 200 <= int(status) < 500, lines[0]
        length = next((int(line[16:]) for line in lines if line.lower().startswith(b"content-length: ")), 0)
        answers = rest if rest.startswith(b"HTTP/1.1 ") else rest[length:]  # an answer to HEAD has a length and no body
