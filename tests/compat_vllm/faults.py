"""An encoder that goes wrong on purpose: it serves documents that a test prepared, and breaks off, stalls or lies with them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

Talk = Callable[[socket.socket], None]


class FaultyEncoder:
    """What `plant` gave for a request id is what a pull of it gets, once. asked: ids that were pulled."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []
        self.heads: list[str] = []
        self.over = threading.Event()
        self._planted: dict[str, Talk] = {}

    def plant(self, req_id: str, talk: Talk) -> dict[str, str]:
        """What a request names as its item's place."""
        self._planted[req_id] = talk
        return {"encoder": self.url, "req_id": req_id}

    def __enter__(self) -> FaultyEncoder:
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            head = connection.recv(65536).decode("latin-1")
            req_id = head.split(" ")[1].split("/")[3]
            self.asked.append(req_id)
            self.heads.append(head)
            try:
                self._planted.pop(req_id, _released)(connection)
            except OSError:
                pass  # the receiver hung up first


def whole(document: bytes) -> Talk:
    """The document as an encoder sends it."""
    return lambda connection: connection.sendall(_head(len(document)) + document)


def cut(document: bytes) -> Talk:
    """The encoder dies half-way through."""
    return lambda connection: connection.sendall(_head(len(document)) + document[: len(document) // 2])


def stalled(document: bytes, over: threading.Event) -> Talk:
    """The encoder sends half of it and then hangs."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(_head(len(document)) + document[: len(document) // 2])
        over.wait(60)

    return talk


def _released(connection: socket.socket) -> None:
    """What an encoder says of rows that were pulled before."""
    problem = b'{"code": "request_released", "status": 410, "detail": "it was pulled"}'
    connection.sendall(_head(len(problem), "410 Gone") + problem)


def _head(length: int, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n".encode()
