"""A receiver in Python: rows written by the encoder straight into memory of this process, by Mooncake.

Speaks the protocol of SGLang's receivers, without SGLang: it asks for the sizes, registers memory for them, asks the
encoders to write, and waits for their completion messages. The messages are pickles; they are read opcode by opcode for
the few plain fields that are wanted, and nothing in them is called or built.
"""

from __future__ import annotations

import os
import pickletools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx2
import numpy as np

from tectum.errors import DeliveryError, StartupError, TectumError, UnavailableError
from tectum.types import DTYPE_BYTES

#: seconds that memory is kept after a transfer that did not end well: writes of it may still land
QUARANTINE = 120.0


class Part(NamedTuple):
    """One part of a request: which encoder holds it, and under which id."""

    url: str
    req_id: str
    part_idx: int = 0


class Received(NamedTuple):
    """rows: `[tokens, columns]` bytes of all parts in their order, `[tokens, columns × element]` uint8. dtype: by name."""

    rows: np.ndarray[Any, Any]
    columns: int
    dtype: str

    def array(self) -> np.ndarray[Any, Any]:
        """The rows `[tokens, columns]`; bfloat16, which numpy has not, comes as its bits in uint16."""
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.dtype]
        return self.rows.view(kind)


class MooncakeReceiver:
    """One receiving rank. A context manager; not thread-safe.

    host: address of this machine that encoders reach. protocol, device: as for the encoder. patience: seconds for a
    request. `strays`: messages that were dropped, since they were of no request that is awaited, or made no sense: the port
    may be another's old one, and whoever reaches it can write to it.

    Raises StartupError `missing_dependency` or `invalid_settings`.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, protocol: str = "tcp", device: str = "", patience: float = 60.0
    ) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            import zmq
            from mooncake.engine import TransferEngine
        except ImportError as error:
            text = f'The receiver needs {error.name or error}: pip install "tectum[sglang,mooncake]"'
            raise StartupError("missing_dependency", text) from None
        self.strays = 0
        self._patience = patience
        self._host = host
        self._engine = TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise StartupError("invalid_settings", f"The transfer engine does not start with {protocol} (code {code})")
        self.session_id = f"{host}:{self._engine.get_rpc_port()}"
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.PULL)
        self._messages.setsockopt(zmq.IPV6, int(":" in host))
        self.port = self._messages.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        self._http = httpx2.Client(timeout=patience)
        self._quarantined: list[tuple[float, np.ndarray[Any, Any]]] = []

    def receive(self, parts: Sequence[Part], receive_count: int = 1) -> Received:
        """The rows of all `parts`, which lie in memory of this process that the encoders wrote to.

        receive_count: how many ranks receive this request. Raises MMError: what an encoder answered, `send_timeout` when
        a completion message stays away; the memory of a transfer that failed is kept aside for two minutes.
        """
        self._end_quarantine()
        sizes = [self._ask(part, "/scheduler_receive_meta_data", {}) for part in parts]
        columns = int(sizes[0]["embedding_dim"])
        memory = np.zeros(sum(int(size["embedding_size"]) for size in sizes), np.uint8)
        code = self._engine.register_memory(memory.ctypes.data, memory.nbytes)
        if code != 0:
            raise DeliveryError("send_failed", f"Mooncake could not register the receiver's memory (code {code})")
        try:
            dtypes = self._have_written(parts, sizes, int(memory.ctypes.data), receive_count)
        except BaseException:
            self._quarantined.append((time.monotonic() + QUARANTINE, memory))
            raise
        self._engine.unregister_memory(memory.ctypes.data)
        dtype = element_type(dtypes)
        tokens = sum(int(size["embedding_len"]) for size in sizes)
        if memory.nbytes != tokens * columns * DTYPE_BYTES[dtype]:
            raise DeliveryError("invalid_rows", f"{memory.nbytes} bytes are not {tokens} rows of {columns} {dtype}")
        return Received(memory.reshape(tokens, -1), columns, dtype)

    def _have_written(
        self, parts: Sequence[Part], sizes: Sequence[dict[str, Any]], address: int, receive_count: int
    ) -> set[str]:
        """Ask for every part, one behind the other in memory; the element types that the completion messages name."""
        for part, size in zip(parts, sizes, strict=True):
            target = {
                "prefill_host": self._host,
                "embedding_port": self.port,
                "session_id": self.session_id,
                "buffer_address": address,
                "receive_count": receive_count,
            }
            self._ask(part, "/send", {**size, **target})
            address += int(size["embedding_size"])
        waiting = {part.req_id for part in parts}
        deadline = time.monotonic() + self._patience
        dtypes = set()
        while waiting:
            message = self._message(deadline)
            if message.get("req_id") not in waiting:
                self.strays += 1
                continue
            if message.get("error_msg") is not None:
                raise _reported({"message": message["error_msg"]}, message.get("error_code"))
            waiting.remove(message["req_id"])
            dtypes.add(str(message.get("dtype")))
        return dtypes

    def _message(self, deadline: float) -> dict[str, Any]:
        """The fields of the next message; none of one that makes no sense."""
        if not self._messages.poll(int(max(deadline - time.monotonic(), 0) * 1000)):
            raise DeliveryError("send_timeout", "A completion message did not come in time")
        try:
            return fields_of(self._messages.recv_multipart()[0])
        except DeliveryError:
            return {}

    def _ask(self, part: Part, path: str, body: dict[str, Any]) -> Any:
        try:
            answer = self._http.post(part.url + path, json={**body, "req_id": part.req_id, "part_idx": part.part_idx})
        except httpx2.TransportError as error:
            raise UnavailableError(
                "server_unreachable", f"The encoder did not answer ({type(error).__name__})"
            ) from None
        if answer.status_code == 200:
            return answer.json()
        raise _reported(answer.json(), answer.status_code)

    def _end_quarantine(self) -> None:
        while self._quarantined and self._quarantined[0][0] <= time.monotonic():
            _, memory = self._quarantined.pop(0)
            self._engine.unregister_memory(memory.ctypes.data)

    def close(self) -> None:
        self._http.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> MooncakeReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def element_type(named: set[str]) -> str:
    """The element type of all parts. Raises DeliveryError `invalid_rows` where they name several, or none that is known."""
    if len(named) != 1 or not named <= DTYPE_BYTES.keys():
        raise DeliveryError("invalid_rows", f"The parts are of {', '.join(sorted(named))[:60]}, not of one known type")
    return next(iter(named))


def _reported(body: dict[str, Any], status: Any) -> TectumError:
    """The error in SGLang's form."""
    return TectumError.from_problem({**body, "detail": body.get("message"), "status": status})


def fields_of(message: bytes) -> dict[str, Any]:
    """The plain fields (text, whole numbers, None, and the names of element types) of a pickled message.

    Follows the opcodes without a pickle machine: nothing is imported, called or built. Raises DeliveryError
    `invalid_rows` for what is no such message.
    """
    found: dict[str, Any] = {}
    key: str | None = None
    try:
        for opcode, argument, _ in pickletools.genops(message):
            if opcode.name == "GLOBAL":
                value: Any = str(argument).partition(" ")[2]
            elif opcode.name == "NONE":
                value = None
            elif isinstance(argument, (str, int)):
                value = argument
            else:
                key = None
                continue
            if key is None:
                key = value if isinstance(value, str) and value.isidentifier() else None
            else:
                found[key], key = value, None
    except (ValueError, IndexError):
        raise DeliveryError("invalid_rows", "The message is no pickle") from None
    return found
