"""A receiver that rows are pushed to, over ZeroMQ, into memory that it chose: the other end of `delivery/documents.py`.

Owns one PULL socket. Whoever reaches it can write to it: so every message is checked before its rows are given out, what
makes no sense is dropped and counted, and with CURVE only encoders that are known get that far. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from tectum.delivery import document
from tectum.delivery.document import Document
from tectum.delivery.wire import Sum
from tectum.errors import DeliveryError, StartupError, TectumError

if TYPE_CHECKING:
    import zmq

#: a buffer for a document of so many bytes; what it raises goes to the caller
Allocate = Callable[[int], "memoryview | bytearray"]
#: messages that may wait to be received; further ones wait at their encoder
_WAITING = 64
#: bytes of one frame: rows of one request
_MOST = 1024**3
#: frames of one message: a document has at most six, and one for each deepstack layer
_FRAMES = 256
#: bytes of a message that reports an error
_PROBLEM = 64 * 1024
#: characters of a request's id
_ID = 256
#: seconds of one look at the socket
_LOOK = 3600.0


class Pushed(NamedTuple):
    """What came for one request: its rows (`document`), or why there will be none (`error`)."""

    req_id: str
    document: Document | None
    error: TectumError | None

    def rows(self) -> Document:
        """The rows. Raises the encoder's error where there are none."""
        if self.document is None:
            raise self.error or DeliveryError("invalid_rows", "A message had neither rows nor an error")
        return self.document


class PushReceiver:
    """Waits for rows at `address`. A context manager; for one thread at a time.

    host: an address of this machine that encoders reach. port: 0 takes a free one. max_bytes: most bytes of one frame.
    secret_key_file: this receiver's CURVE certificate (pyzmq's, with the secret key): rows then come encrypted.
    encoder_key_files: the encoders' certificates (public keys), which alone may push then; without them, whoever knows this
    receiver's public key. `strays`: messages that were dropped, since they made no sense.

    Raises StartupError: `missing_dependency` (pyzmq), `invalid_settings` (keys that cannot be read or that lack their other
    half, an address that is taken or none).
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_bytes: int = _MOST,
        secret_key_file: str | Path | None = None,
        encoder_key_files: Sequence[str | Path] = (),
    ) -> None:
        try:
            import zmq
        except ImportError:
            raise StartupError("missing_dependency", 'The receiver needs pyzmq: pip install "tectum[zmq]"') from None
        if not 0 <= port < 65536:  # libzmq takes another port for it, without a word
            raise StartupError("invalid_settings", f"port: {port} is not between 0 and 65535")
        if encoder_key_files and secret_key_file is None:  # or anybody could push, in the clear
            raise StartupError("invalid_settings", "encoder_key_files: they need a secret_key_file")
        self.strays = 0
        self._context = zmq.Context()
        self._authenticator: object = None
        try:
            self._socket = self._context.socket(zmq.PULL)
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            self._socket.setsockopt(zmq.RCVHWM, _WAITING)
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            if secret_key_file is not None:
                self._authenticator = _seal(
                    self._socket, Path(secret_key_file), [Path(file) for file in encoder_key_files]
                )
            shown = f"[{host}]" if ":" in host else host
            self._socket.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise StartupError("invalid_settings", f"The receiver cannot listen at {host}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        #: `host:port`, as an encoder is told
        self.address = bound.removeprefix("tcp://")

    def receive(self, timeout: float = 30.0, allocate: Allocate = bytearray) -> Pushed:
        """What comes next, for whichever request. allocate: gives the buffer that its document fills, `nbytes` long.

        It is asked again after a message that was dropped: the buffer that it gave for that one is free.
        timeout: seconds. Raises DeliveryError `send_timeout` when nothing came in time, and what `allocate` raises.
        """
        deadline = time.monotonic() + timeout
        left = timeout
        while left >= 0:
            if self._socket.poll(math.ceil(min(left, _LOOK) * 1000)):
                frames = self._next(deadline)
                buffer = _buffer(frames, allocate) if len(frames) > 1 else None
                try:
                    return _problem(frames) if buffer is None else _rows(frames, buffer)
                except DeliveryError:
                    self.strays += 1
            left = deadline - time.monotonic()
        text = f"No rows came within {timeout:g} s; {self.strays} messages that made no sense were dropped so far"
        raise DeliveryError("send_timeout", text)

    def _next(self, deadline: float) -> list[zmq.Frame]:
        """The frames of the next message; none of one that has more of them than a document, which is thrown away.

        That takes until `deadline` at most: what is left of it then comes as a message of its own.
        """
        frames: list[zmq.Frame] = []
        more = True
        while more and len(frames) < _FRAMES:
            frames.append(self._socket.recv(copy=False))
            more = frames[-1].more
        while more and time.monotonic() < deadline:
            frames = []
            more = self._socket.recv(copy=False).more
        return [] if more else frames

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()  # type: ignore[attr-defined]
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _buffer(frames: Sequence[zmq.Frame], allocate: Allocate) -> memoryview:
    """Where the document in these frames goes, as long as it."""
    nbytes = sum(len(frame.buffer) for frame in frames)
    buffer = memoryview(allocate(nbytes)).cast("B")[:nbytes]
    assert len(buffer) == nbytes, "the buffer takes the whole document"
    return buffer


def _rows(frames: Sequence[zmq.Frame], buffer: memoryview) -> Pushed:
    """The document in these frames, copied into `buffer` and summed on the way. Raises DeliveryError `invalid_rows`."""
    checksum, filled = Sum(len(buffer)), 0
    for frame in frames:
        part = frame.buffer
        buffer[filled : filled + len(part)] = part
        filled += len(part)
        checksum.add(buffer, filled)
    found = document.read(buffer, checksum)
    return Pushed(_named(found.req_id), found, None)


def _problem(frames: Sequence[zmq.Frame]) -> Pushed:
    """The error that a message reports. Raises DeliveryError `invalid_rows` for what is none."""
    try:
        # given bytes, json would look for other encodings, in files: a process without descriptors has none
        problem = json.loads(frames[0].bytes.decode()) if frames and len(frames[0].buffer) <= _PROBLEM else None
    except (ValueError, RecursionError):
        problem = None
    if not isinstance(problem, dict):
        raise DeliveryError("invalid_rows", "The message is neither a document nor a problem")
    return Pushed(_named(problem.get("req_id")), None, TectumError.from_problem(problem))


def _named(req_id: object) -> str:
    """The id, where it can be one: text that may stand in a log. Raises DeliveryError `invalid_rows`."""
    if not isinstance(req_id, str) or not 0 < len(req_id) <= _ID or not req_id.isprintable():
        raise DeliveryError("invalid_rows", "The message names no request")
    return req_id


def _seal(socket: zmq.Socket[bytes], own: Path, encoders: Sequence[Path]) -> object:
    """Have `socket` speak CURVE, to `encoders` alone where there are some. Returns what checks their keys, or None."""
    from zmq.auth.thread import ThreadAuthenticator

    from tectum.delivery.curve import key_pair, need_curve, public_key

    need_curve("secret_key_file")
    public, secret = key_pair("secret_key_file", own)
    known = {public_key("encoder_key_files", file) for file in encoders}
    authenticator = None
    if known:
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=_Known(known))
    socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
    return authenticator


class _Known:
    """What libzmq asks about a peer's public key."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys
