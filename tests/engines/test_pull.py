"""Receivers: rows straight into the receiver's buffer, checked; whatever goes wrong on the way is that pull's error."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Callable

import pytest
import torch

from tectum import Client
from tectum.delivery import wire
from tectum.engines.pull import AsyncReceiver, Receiver
from tectum.errors import DeliveryError, InternalError, LifecycleError, TectumError, UnavailableError
from tests import zoo


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    zoo.picture(140, 90, seed).save(file, "PNG")
    return file.getvalue()


def pull_sync(url: str, req_id: str, timeout: float = 20.0, **kwargs):
    return Receiver(url, timeout=timeout).pull(req_id, **kwargs)


def pull_async(url: str, req_id: str, timeout: float = 20.0, **kwargs):
    return asyncio.run(AsyncReceiver(url, timeout=timeout).pull(req_id, **kwargs))


both = pytest.mark.parametrize("pull", [pull_sync, pull_async], ids=["sync", "async"])


@both
def test_rows_land_in_the_given_buffer_and_the_request_is_given_back(server, pull):
    with Client(server.url) as client:
        expected = client.encode([png(1), png(2)])
        req_id = client.hold([png(1), png(2)])["req_id"]
        buffer = bytearray(1 << 20)
        document = pull(server.url, req_id, allocate=lambda nbytes: memoryview(buffer)[:nbytes])
        rows = torch.frombuffer(buffer, dtype=torch.float32, count=expected.rows.numel(), offset=document.offsets[0])
        assert torch.equal(rows.view(expected.rows.shape), expected.rows)
        assert torch.equal(document.embedding().rows, expected.rows)
        assert (document.item_rows, document.grid_thw) == (expected.item_rows, expected.grid_thw)
        assert document.finite()
        assert client.status(req_id)["reason"] == "pulled"


@both
def test_the_encoders_own_errors_arrive(server, pull):
    with Client(server.url) as client:
        req_id = client.hold(png())["req_id"]
        Receiver(server.url).release(req_id)
    with pytest.raises(LifecycleError) as caught:
        pull(server.url, req_id)
    assert (caught.value.code, caught.value.status) == ("request_released", 410)
    with pytest.raises(LifecycleError) as caught:
        pull(server.url, "never-seen")
    assert (caught.value.code, caught.value.status) == ("request_not_found", 404)


class Peer:
    """A server that says what a test wants, byte for byte, to one caller."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(talk,), daemon=True)
        self._thread.start()

    def _serve(self, talk: Callable[[socket.socket], None]) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(65536)
            talk(connection)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        self._thread.join(10)


def answer(body: bytes, length: int | None = None, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def a_document() -> bytes:
    return wire.pack(
        rows=torch.ones(4, 8), item_rows=[4], grid_thw=[(1, 4, 4)], deepstack=[], dtype="float32", req_id="r"
    )


@both
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer(a_document()[:-20], len(a_document())), DeliveryError),
        (answer(a_document()[:-1] + b"\x77"), DeliveryError),
        (answer(a_document() + b"more"), DeliveryError),
        (answer(b""), DeliveryError),
        (answer(b"nonsense" * 9), DeliveryError),
        (b"HTTP/1.1 200 OK\r\n\r\n", InternalError),
        (b"SSH-2.0-x\r\n\r\n", InternalError),
        (b"x" * 70_000, InternalError),
        (answer(b"{}", status="502 Bad Gateway"), InternalError),
        (b"", DeliveryError),
    ],
    ids=["short", "damaged", "longer", "empty", "nonsense", "no length", "no http", "endless head", "502", "silence"],
)
def test_an_answer_that_is_not_what_was_sent_is_refused(pull, said, kind):
    with Peer(lambda connection: connection.sendall(said)) as peer, pytest.raises(TectumError) as caught:
        pull(peer.url, "r")
    assert type(caught.value) is kind, caught.value


@both
def test_a_trickle_ends_at_the_deadline(pull):
    """Each byte comes in time, the whole never does."""
    stop = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while not stop.wait(0.02):
            try:
                connection.sendall(b"x")
            except OSError:
                return

    with Peer(trickle) as peer:
        with pytest.raises(UnavailableError, match=r"within 0\.3 s"):
            pull(peer.url, "r", timeout=0.3)
        stop.set()


@both
def test_nobody_there_and_a_buffer_that_is_refused(pull, server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnavailableError, match="ConnectionRefused"):
        pull(f"http://127.0.0.1:{port}", "r")

    def refuse(nbytes: int) -> memoryview:
        raise DeliveryError("invalid_rows", f"{nbytes} bytes are too many")

    with Client(server.url) as client:
        req_id = client.hold(png())["req_id"]
        with pytest.raises(DeliveryError, match="too many"):
            pull(server.url, req_id, allocate=refuse)
        client.release(req_id)


def test_a_cancelled_pull_writes_nothing_any_more():
    """The peer goes on sending after the receiver gave up: its buffer stays as it was at that moment."""
    begun, cancelled = threading.Event(), threading.Event()

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nab")
        begun.set()
        cancelled.wait(10)
        try:
            connection.sendall(b"z" * 998)
        except OSError:
            pass

    async def main(url: str) -> bytearray:
        buffer = bytearray(1000)
        landed = asyncio.Event()

        def allocate(nbytes: int) -> bytearray:
            landed.set()
            return buffer

        pull = asyncio.ensure_future(AsyncReceiver(url).pull("r", allocate))
        await landed.wait()
        pull.cancel()
        await asyncio.wait([pull])
        cancelled.set()
        await asyncio.to_thread(peer._thread.join, 10)
        assert pull.cancelled()
        return buffer

    with Peer(talk) as peer:
        assert b"z" not in asyncio.run(main(peer.url))


def test_close_ends_what_still_runs():
    waiting = threading.Event()

    def silent(connection: socket.socket) -> None:
        waiting.set()
        connection.recv(1)

    with Peer(silent) as peer:
        receiver = Receiver(peer.url, timeout=60)
        errors: list[TectumError] = []

        def pull() -> None:
            try:
                receiver.pull("r")
            except TectumError as error:
                errors.append(error)

        thread = threading.Thread(target=pull)
        thread.start()
        assert waiting.wait(10)
        receiver.close()
        thread.join(10)
        assert not thread.is_alive()
        assert [error.code for error in errors] == ["invalid_rows"]
