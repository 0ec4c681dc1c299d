"""What the service and an encoder say to each other: msgpack messages over a socket, each behind its length.

On one machine that is a Unix socket, and rows never pass there: they are written into staging memory that both map. An
encoder elsewhere comes over TCP: it first proves that it knows the service's secret, and its rows follow a message that
announces them (`remote.py`). Nothing is pickled, and a message that does not decode is dropped by its receiver.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from tectum.errors import TectumError
from tectum.types import EncodeRequest, MediaItem, Modality, RequestMetadata

#: longest message (bytes); a request body is smaller
MAX_MESSAGE = 5 * 1024**3
LENGTH = struct.Struct("<Q")


class Message(msgspec.Struct, tag=True, array_like=True):
    """Any message."""


# --- to the encoder ---


class Start(Message):
    """The first message. lane: which encoder this one is. settings: those that the service was given, as JSON-able values
    (`tectum.config.ToldSettings`).
    """

    model: str
    lane: int
    settings: dict[str, Any]


class Item(msgspec.Struct, array_like=True):
    """One item's media, in one of three forms."""

    url: str | None = None
    data: bytes | None = None
    base64: str | None = None


class Prepare(Message):
    """Decode and preprocess; answered by `Prepared` or `Failed`. The inputs are kept under `ticket`."""

    ticket: int
    req_id: str
    modality: str
    num_parts: int
    part_idx: int
    options: dict[str, Any]
    items: list[Item]


class Encode(Message):
    """One forward; answered by `Encoded` or `Failed`. members: (ticket, offset and length of its rows in staging)."""

    batch: int
    members: list[tuple[int, int, int]]


class Forget(Message):
    """The inputs under `ticket` are not needed (any more)."""

    ticket: int


# --- from the encoder ---


class Loading(Message):
    """Progress of the start: what is done, and the fraction of bytes read."""

    what: str
    fraction: float


class Ready(Message):
    """The encoder is loaded and warm. card: its entry in `/v1/models`."""

    card: dict[str, Any]


class Prepared(Message):
    """seconds: what decoding and preprocessing took, without the wait for their turn."""

    ticket: int
    metadata: RequestMetadata
    seconds: float


class Encoded(Message):
    """errors: for each member None, or its problem. Rows of those without one are in staging. Their inputs are gone."""

    batch: int
    errors: list[dict[str, Any] | None]
    seconds: float


class Failed(Message):
    """The work under a ticket or batch number failed as a whole; at the start the number is 0."""

    number: int
    problem: dict[str, Any]


# --- over TCP only ---


class Challenge(Message):
    """The service's first word to whoever connects: what the answer must sign."""

    nonce: bytes


class Hello(Message):
    """The encoder's answer. proof: that it knows the secret (`remote.proof`). It asks for one in return, of `nonce`."""

    lane: int
    version: str
    pid: int
    nonce: bytes
    proof: bytes


class Welcome(Message):
    """The service's proof that it knows the secret too."""

    proof: bytes


class RowsFollow(Message):
    """`nbytes` bytes of rows come next, for a member (by its index) of a batch. crc32: over those bytes."""

    batch: int
    member: int
    nbytes: int
    crc32: int


ToEncoder = Start | Prepare | Encode | Forget
FromEncoder = Loading | Ready | Prepared | Encoded | Failed

_encode = msgspec.msgpack.Encoder().encode
decode_for_encoder: Callable[[bytes | bytearray | memoryview], ToEncoder] = msgspec.msgpack.Decoder(ToEncoder).decode
decode_from_encoder: Callable[[bytes | bytearray | memoryview], FromEncoder] = msgspec.msgpack.Decoder(
    FromEncoder
).decode
decode_from_afar: Callable[[bytes | bytearray | memoryview], FromEncoder | RowsFollow] = msgspec.msgpack.Decoder(
    FromEncoder | RowsFollow
).decode
decode_challenge: Callable[[bytes | bytearray | memoryview], Challenge] = msgspec.msgpack.Decoder(Challenge).decode
decode_hello: Callable[[bytes | bytearray | memoryview], Hello] = msgspec.msgpack.Decoder(Hello).decode
decode_welcome: Callable[[bytes | bytearray | memoryview], Welcome] = msgspec.msgpack.Decoder(Welcome).decode


def frame(message: Message) -> bytes:
    """One message as it goes over the socket."""
    body = _encode(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages' bodies. Raises ValueError when a length cannot be."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now."""
        self._buffer += data
        bodies, start = [], 0
        while len(self._buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes")
            end = start + LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(memoryview(self._buffer)[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


def to_prepare(ticket: int, request: EncodeRequest) -> Prepare:
    """The message for a request; its items carry their media."""
    items = [Item(item.url, item.data, item.base64) for item in request.items]
    options = dict(request.options)
    return Prepare(ticket, request.req_id, request.modality, request.num_parts, request.part_idx, options, items)


def from_prepare(message: Prepare) -> EncodeRequest:
    """The request in a message."""
    modality = Modality(message.modality)
    items = tuple(MediaItem(modality, item.url, item.data, item.base64) for item in message.items)
    return EncodeRequest(message.req_id, items, message.num_parts, message.part_idx, options=message.options)


def problem(error: TectumError) -> dict[str, Any]:
    """An error as it travels: its code, status, text, item and details survive the hop."""
    found = error.to_problem()
    return found if error.retry_after is None else {**found, "retry_after": error.retry_after}


def error_of(found: dict[str, Any]) -> TectumError:
    """The error that `problem` described."""
    return TectumError.from_problem(found, found.get("retry_after"))
