"""Fetching for an engine's scheduler, in a process of its own: pull rows from encoders, check them, say so.

A process, since a scheduler that waits for its workers spins, and leaves its other threads almost no turn of the
interpreter; and since checksums must not take the scheduler's. It maps the scheduler's memory file and writes rows where they
will be read. Both ends talk in JSON lines over a socket pair; the process ends when the scheduler's end is closed, however.

Imports no torch: `python -m tectum.engines.fetcher SOCKET_FD MEMORY_FD` is there in half a second.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from tectum.delivery.document import Document
from tectum.delivery.staging import Lease, StagingMap
from tectum.delivery.wire import Raw
from tectum.engines.pull import Receiver
from tectum.errors import DeliveryError, InternalError, TectumError, UnavailableError
from tectum.types import DTYPE_BYTES, Grid

log = logging.getLogger("tectum.engines")

#: pulls at the same time
THREADS = 8


class Shape(NamedTuple):
    """What the language model takes: columns of a row, deepstack layers, and the element type (`DTYPE_BYTES`)."""

    width: int
    layers: int
    dtype: str

    def nbytes(self, rows: int) -> int:
        return rows * self.width * (1 + self.layers) * DTYPE_BYTES[self.dtype]


class Source(NamedTuple):
    """Where the rows of one item are held: which encoder, under which request id."""

    encoder: str
    req_id: str


@dataclass(frozen=True, slots=True)
class Want:
    """One item that a request needs.

    key: the content key, equal for equal rows. index: its place among the request's items. rows: placeholders in the
    prompt. grid: what the prompt was built with, where known. source: where to fetch. local: whether the engine may
    encode it itself.
    """

    key: str
    index: int
    rows: int
    grid: Grid | None
    source: Source | None
    local: bool = False


class Encoders(NamedTuple):
    """Who may be asked, and how. timeout: seconds for one item. verify, cert: as in `Client`, files by their names."""

    urls: tuple[str, ...]
    token: str | None
    timeout: float
    verify: str | bool = True
    cert: tuple[str, str] | None = None


def check(document: Document, want: Want, shape: Shape) -> None:
    """What came is what the prompt has placeholders for and what the language model takes. Raises DeliveryError."""
    found = Shape(document.width, len(document.arrays) - 1, document.dtype)
    if found != shape:
        text = f"Rows are {found.width} wide with {found.layers} deepstack layers of {found.dtype}, not {shape.width}"
        raise DeliveryError("invalid_rows", f"{text} with {shape.layers} of {shape.dtype}")
    if document.item_rows != (want.rows,):
        raise DeliveryError("invalid_rows", f"Rows {document.item_rows[:4]} came for {want.rows} placeholders")
    if want.grid is not None and document.grid_thw != (want.grid,):
        text = f"Rows of grid {document.grid_thw[:4]} came for a prompt of grid {want.grid}"
        raise DeliveryError("invalid_rows", text)


class Fetcher:
    """The scheduler's end. `poll` resolves the futures that `submit` gave. Only `wait` blocks, and writing a short line."""

    def __init__(self, encoders: Encoders, shape: Shape, memory: int) -> None:
        self._start: dict[str, Any] = {**encoders._asdict(), "shape": shape}
        self._memory = memory
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Future[Document], Lease]] = {}
        self._buffer = b""
        self._launch()

    def _launch(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tectum.engines.fetcher", str(theirs.fileno()), str(self._memory)]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(), self._memory))
        self._buffer = b""
        self._line.sendall(json.dumps(self._start).encode() + b"\n")

    def submit(self, want: Want, lease: Lease) -> Future[Document]:
        """Fetch `want` from its source into `lease`; the future has the rows in place, or the TectumError."""
        future: Future[Document] = Future()
        ticket = next(self._numbers)
        self._pending[ticket] = (future, lease)
        message = {"ticket": ticket, "want": astuple(want), "offset": lease.offset, "nbytes": lease.nbytes}
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lost()
        return future

    def poll(self) -> None:
        """Take in what the process says, without waiting for it."""
        if not self._pending:
            return
        while True:
            try:
                data = self._line.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def wait(self, seconds: float) -> None:
        """Until there is something to `poll`, at most `seconds`; with nothing pending, not at all."""
        if self._pending:
            told = select.poll()  # `select.select` knows no descriptor above 1023, and an engine may have more
            told.register(self._line, select.POLLIN)
            told.poll(seconds * 1000)

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _take(self, message: Mapping[str, Any]) -> None:
        future, lease = self._pending.pop(message["ticket"])
        if "problem" in message:
            future.set_exception(TectumError.from_problem(message["problem"]))
        else:
            future.set_result(_document(message, lease))

    def _lost(self) -> None:
        """The process died: what it was fetching fails, and another one is started. It writes nothing any more."""
        log.error("the fetching process ended; it is started again")
        self.close()
        pending, self._pending = self._pending, {}
        for future, _ in pending.values():
            future.set_exception(UnavailableError("worker_lost", "The process that fetched these rows died; retry"))
        self._launch()


def _document(message: Mapping[str, Any], lease: Lease) -> Document:
    rows, width = message["shape"]
    step = rows * width * DTYPE_BYTES[message["dtype"]]
    view = lease.view()
    arrays = tuple(Raw((rows, width), view[at : at + step]) for at in message["offsets"])
    grid = tuple((t, h, w) for t, h, w in message["grid_thw"])
    return Document(
        message["req_id"], message["dtype"], tuple(message["item_rows"]), grid, arrays, tuple(message["offsets"])
    )


# --- the process ---


class _Process:
    """Pulls in threads; answers each line with one of its own, in any order."""

    def __init__(self, line: socket.socket, memory: StagingMap, start: Mapping[str, Any]) -> None:
        self._line = line
        self._memory = memory
        self._shape = Shape(*start["shape"])
        how = {name: start[name] for name in ("token", "timeout", "verify", "cert")}
        self._receivers = {url: Receiver(url, **how) for url in start["urls"]}
        self._threads = ThreadPoolExecutor(THREADS, "tectum-fetch")
        self._lock = threading.Lock()

    def take(self, message: Mapping[str, Any]) -> None:
        self._threads.submit(self._answer, message)

    def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            answer = _facts(self._fetch(message))
        except TectumError as error:
            answer = {"problem": error.to_problem()}
        except Exception as error:
            log.exception("unexpected failure while fetching rows")
            failure = InternalError("internal", f"Unexpected {type(error).__name__} while fetching rows")
            answer = {"problem": failure.to_problem()}
        with self._lock:
            self._line.sendall(json.dumps({"ticket": message["ticket"], **answer}).encode() + b"\n")

    def _fetch(self, message: Mapping[str, Any]) -> Document:
        key, index, rows, grid, source, local = message["want"]
        want = Want(key, index, rows, None if grid is None else tuple(grid), Source(*source), local)
        buffer = self._memory.memory(message["offset"], message["nbytes"])

        def allocate(nbytes: int) -> memoryview:
            if nbytes > len(buffer):
                raise DeliveryError("invalid_rows", f"{nbytes} bytes came for an item of {want.rows} rows")
            return buffer[:nbytes]

        assert want.source is not None, "only what has a source is fetched"
        document = self._receivers[want.source.encoder].pull(want.source.req_id, allocate)
        check(document, want, self._shape)
        if not document.finite():
            raise DeliveryError("invalid_rows", "The rows hold NaN or infinite values")
        return document


def _facts(document: Document) -> dict[str, Any]:
    return {
        "req_id": document.req_id,
        "dtype": document.dtype,
        "shape": [document.rows, document.width],
        "item_rows": list(document.item_rows),
        "grid_thw": [list(grid) for grid in document.grid_thw],
        "offsets": list(document.offsets),
    }


def main(line_fd: int, memory_fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the scheduler
    line = socket.socket(fileno=line_fd)
    process: _Process | None = None
    with line.makefile("rb") as lines:
        for text in lines:
            message = json.loads(text)
            if process is None:
                process = _Process(line, StagingMap(memory_fd), message)
            else:
                process.take(message)
    os._exit(0)  # also out of pulls that run: nobody waits for them any more


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
