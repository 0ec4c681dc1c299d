"""A receiver on the encoder's host: it reads the encoder's own staging memory, and nothing is copied on the way.

Owns one connection and one read-only map. The rows of a pull may be read inside its block only; at its end the encoder says
whether the lease was good all the time, and where it was not, what was read is refused. Where there is no socket (the encoder
runs elsewhere, or without `--local-socket`) `HostReceiver` pulls over HTTP instead.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tectum.delivery import local
from tectum.delivery.document import Document
from tectum.engines.pull import Receiver
from tectum.engines.tls import Cert, Verify
from tectum.errors import DeliveryError, TectumError, UnavailableError


class LocalReceiver:
    """Pulls over the Unix socket at `path` (the encoder's `--local-socket`). Thread-safe; several pulls may be open at once.

    timeout: seconds that the encoder may take to answer. Raises UnavailableError `server_unreachable`.
    """

    def __init__(self, path: str | Path, *, timeout: float = 30.0) -> None:
        self._lock = threading.Lock()
        self._buffer = b""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(timeout)
        try:
            self._connection.connect(str(path))
            self._map = self._receive_memory()
        except (OSError, TectumError) as error:
            self._connection.close()
            raise _gone(error) from None

    @contextmanager
    def pull(self, req_id: str) -> Iterator[Document]:
        """The rows held under `req_id`, in place and read-only, for the length of the block. Its good end releases the request.

        Raises the encoder's own error at the start; at the end LifecycleError `request_released` when the lease did not
        last (the encoder's `--send-timeout`): then throw away what was read. Out of a block left by an exception the rows
        stay held.
        """
        message = self._ask({"pull": req_id})
        try:
            yield local.granted(message, memoryview(self._map))
        except BaseException:
            with suppress(TectumError):  # where the encoder is gone, so is the lease
                self._ask({"left": message["generation"]})
            raise
        self._ask({"done": message["generation"]})

    @property
    def connected(self) -> bool:
        """Whether the encoder is still at the other end."""
        with self._lock:
            if self._buffer:
                return True
            try:
                # a socket with a timeout waits that long in each recv, whatever its flags say: so it is looked at first
                looked = select.poll()
                looked.register(self._connection, select.POLLIN)
                return not looked.poll(0) or self._connection.recv(1, socket.MSG_PEEK) != b""
            except (OSError, ValueError):  # closed: it has no descriptor any more
                return False

    def close(self) -> None:
        """Hang up: what was not done goes back to the encoder. The map stays until its last view is gone."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> LocalReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receive_memory(self) -> mmap.mmap:
        self._buffer, descriptors, _, _ = socket.recv_fds(self._connection, 4096, 1)
        try:
            if local.parse(self._line()).get("tectum") != local.VERSION or len(descriptors) != 1:
                raise DeliveryError("invalid_rows", "The local socket is no encoder's of this version")
            return mmap.mmap(descriptors[0], os.fstat(descriptors[0]).st_size, access=mmap.ACCESS_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            try:
                self._connection.sendall(local.line(message))
                answer = local.parse(self._line())
            except OSError as error:
                raise _gone(error) from None
        if isinstance(answer.get("problem"), dict):
            raise TectumError.from_problem(answer["problem"])
        return answer

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            data = self._connection.recv(65536)
            if not data or len(self._buffer) > local.MAX_LINE:
                raise ConnectionResetError
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\n")
        return text


class HostReceiver:
    """The nearest way to an encoder's rows: its staging memory where its socket is here, else HTTP. Thread-safe.

    url, token, timeout, verify, cert: as of `Receiver`. path: the encoder's `--local-socket`; it may come and go.
    """

    def __init__(
        self,
        url: str,
        path: str | Path | None,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        verify: Verify = True,
        cert: Cert | None = None,
    ) -> None:
        self._http = Receiver(url, token=token, timeout=timeout, verify=verify, cert=cert)
        self._path = path
        self._timeout = timeout
        self._local: LocalReceiver | None = None
        self._lock = threading.Lock()

    @contextmanager
    def pull(self, req_id: str) -> Iterator[Document]:
        """As `LocalReceiver.pull`; over HTTP the rows are copies, and the request is released at the start."""
        local_receiver = self._nearby()
        if local_receiver is None:
            yield self._http.pull(req_id)
            return
        with local_receiver.pull(req_id) as document:
            yield document

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
        self._http.close()

    def _nearby(self) -> LocalReceiver | None:
        """The connection to the encoder's socket, made again when it broke; None where there is no encoder behind it."""
        if self._path is None:
            return None
        with self._lock:
            if self._local is None or not self._local.connected:
                try:
                    self._local = LocalReceiver(self._path, timeout=self._timeout)
                except UnavailableError:
                    return None
            return self._local


def _gone(error: Exception) -> UnavailableError:
    return UnavailableError("server_unreachable", f"The encoder's local socket did not answer ({type(error).__name__})")
