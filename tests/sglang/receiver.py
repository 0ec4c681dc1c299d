"""An independent minimal receiver, after SGLang's published protocol: no code of Tectum's, none of SGLang's.

It binds a PULL socket, reads messages with an unpickler that admits exactly SGLang's list of names (stand-ins here), and
puts the parts of a request together in part order.
"""

from __future__ import annotations

import collections
import enum
import io
import pickle
from http import HTTPStatus
from typing import Any

import torch
import zmq

PATIENCE = 20_000  # milliseconds
#: why a test of Mooncake is skipped
MOONCAKE_MISSING = (
    "needs tectum[mooncake], and the system's libibverbs1, libnuma1 and libcurl4 (its wheel links to them)"
)


class EmbeddingData:
    """SGLang builds it without `__init__`: whatever a field is missing for shows at once."""

    FIELDS = frozenset(
        [
            "req_id",
            "num_parts",
            "part_idx",
            "grid_dim",
            "modality",
            "embedding",
            "send_time",
            "dtype",
            "shape",
            "error_msg",
            "error_code",
        ]
    )
    #: what the receiver looks for in the messages of clips
    OF_CLIPS = frozenset(["second_per_grid_ts", "video_timestamps"])


class Modality(enum.Enum):
    IMAGE = 1
    VIDEO = 2
    AUDIO = 3


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, embedding: tuple[str, str], modality: tuple[str, str]) -> None:
        super().__init__(io.BytesIO(data))
        self.admitted: dict[tuple[str, str], Any] = {
            embedding: EmbeddingData,
            modality: Modality,
            ("torch", "float32"): torch.float32,
            ("torch", "bfloat16"): torch.bfloat16,
            ("torch", "float16"): torch.float16,
            ("torch", "LongTensor"): torch.LongTensor,
            ("torch", "FloatTensor"): torch.FloatTensor,
            ("collections", "OrderedDict"): collections.OrderedDict,
        }

    def find_class(self, module: str, name: str) -> Any:
        return self.admitted[module, name]


NEWEST = (
    ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"),
    ("sglang.srt.multimodal.modality", "Modality"),
)


def read(data: bytes, names: tuple[tuple[str, str], tuple[str, str]] = NEWEST) -> EmbeddingData:
    """The message in a metadata frame. Raises KeyError for a name that is not admitted."""
    message = _Unpickler(bytes(data), *names).load()
    assert isinstance(message, EmbeddingData)
    of_clips = EmbeddingData.OF_CLIPS if message.modality is Modality.VIDEO else set()
    assert set(vars(message)) - of_clips == EmbeddingData.FIELDS
    for name in ("num_parts", "part_idx"):
        assert type(getattr(message, name)) is int
    assert message.error_code is None or (type(message.error_code) is int and HTTPStatus(message.error_code))
    return message


class Receiver:
    """One rank's PULL socket. A context manager; `port` is where it listens. keys: public and secret, makes it a CURVE server."""

    def __init__(
        self, host: str = "127.0.0.1", rcvhwm: int | None = None, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        self.socket.setsockopt(zmq.LINGER, 0)
        if rcvhwm is not None:
            self.socket.setsockopt(zmq.RCVHWM, rcvhwm)
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = keys
        shown = f"[{host}]" if ":" in host else host
        self.port = self.socket.bind_to_random_port(f"tcp://{shown}")
        self.address = f"{shown}:{self.port}"

    def message(self, patience: int = PATIENCE) -> tuple[EmbeddingData, torch.Tensor | None]:
        """The next message: its metadata, and its rows where it has a second frame."""
        if not self.socket.poll(patience):
            raise TimeoutError("nothing came")
        head, *body = self.socket.recv_multipart()
        message = read(head)
        if not body:
            return message, None
        assert len(body) == 1, "a message has one or two frames"
        assert message.error_msg is None
        rows = torch.frombuffer(bytearray(body[0]), dtype=message.dtype).reshape(message.shape)
        return message, rows

    def rows(self, rid: str, patience: int = PATIENCE) -> tuple[torch.Tensor, list[list[int]]]:
        """All parts of `rid`, concatenated in part order, and their grids."""
        parts: dict[int, tuple[torch.Tensor, list[list[int]]]] = {}
        num_parts = 1
        while len(parts) < num_parts:
            message, rows = self.message(patience)
            assert message.req_id == f"{rid}_local_part_{message.part_idx}"
            assert rows is not None, message.error_msg
            assert message.part_idx not in parts, "a part came twice"
            num_parts = message.num_parts
            parts[message.part_idx] = (rows, message.grid_dim)
        ordered = [parts[index] for index in sorted(parts)]
        return torch.cat([rows for rows, _ in ordered]), [grid for _, grids in ordered for grid in grids]

    def is_silent(self, milliseconds: int = 200) -> bool:
        return not self.socket.poll(milliseconds)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
