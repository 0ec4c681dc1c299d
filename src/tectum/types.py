"""The nouns of Tectum: what a request is made of, and what comes back.

Plain frozen dataclasses, shared by every room of the house. Nothing here does I/O, and importing this
module imports neither torch nor numpy, so that it may live inside an engine's environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

#: bytes of one element, by the name that safetensors, torch and the wire share
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Grid = tuple[int, int, int]


class Modality(StrEnum):
    """What kind of media an item holds. A part (one request at one encoder) holds one modality."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One picture, clip or recording as it came in: untrusted, undecoded.

    Exactly one of `url` (`https:`, `http:`, `data:`, `file:`), `data` (raw bytes) or `base64` (text) is set.
    """

    modality: Modality
    url: str | None = None
    data: bytes | None = field(default=None, repr=False)
    base64: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.url, self.data, self.base64)) != 1:
            raise ValueError("a media item needs exactly one of url, data or base64")

    @property
    def remote(self) -> bool:
        """Whether it lies behind an `http:` or `https:` URL, and has to be fetched."""
        return self.url is not None and self.url[:8].lower().startswith(("http:", "https:"))

    def without_media(self) -> MediaItem:
        """The same item without its bytes; where they lay is kept."""
        return self if self.remote else MediaItem(self.modality, data=b"")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a receiver waits for rows. Counted by `address`: a retry to the same address is the same destination (R9).

    `address` is opaque here (`inline:3`, `pull:7`, `tcp://10.0.0.4:5000`); the delivery backend that made it reads it.
    """

    address: str
    backend: str = field(default="inline", compare=False)


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One part of one user request: all its items go through one encoder and share one fate.

    tenant: on whose behalf; rows are never shared between tenants. content_keys: whether the metadata names its content.
    receivers, receive_count: to whom (`host:port`) its rows are pushed, and how many receivers there will be in all (0: those).
    fresh: it is encoded whatever is known of its content, and nothing of it is kept.
    """

    req_id: str
    items: tuple[MediaItem, ...]
    num_parts: int = 1
    part_idx: int = 0
    deadline_ms: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    delivery: Literal["inline", "hold", "push"] = "inline"
    receivers: tuple[str, ...] = ()
    receive_count: int = 0
    tenant: str = ""
    content_keys: bool = False
    fresh: bool = False

    @property
    def modality(self) -> Modality:
        return self.items[0].modality

    def without_media(self) -> EncodeRequest:
        """The same request without bytes of its media: what is kept of it once they were preprocessed."""
        return replace(self, items=tuple(item.without_media() for item in self.items))


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """What is known of one item before the forward.

    rows: embedding rows this item yields; equal to its placeholders in the prompt.
    grid_thw: patches in time, height and width, where the family has a grid.
    patches: cost of the forward, in the tower's input patches (of audio: positions that its layers see).
    source_size: decoded (width, height) in pixels.
    second_per_grid: seconds that one step of the grid's time axis covers (videos of families that place rows in time).
    timestamps: seconds from the start, one for each step of the time axis; empty for pictures and audio.
    facts: whatever else a receiver may want to know, JSON-able: how a video was sampled, the length of a recording…
    """

    modality: Modality
    rows: int
    grid_thw: Grid | None
    patches: int
    source_size: tuple[int, int] | None = None
    second_per_grid: float | None = None
    timestamps: tuple[float, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The item as receivers are told of it: all but its modality and its cost, its facts beside the rest."""
        return {
            "rows": self.rows,
            "grid_thw": None if self.grid_thw is None else list(self.grid_thw),
            "source_size": None if self.source_size is None else list(self.source_size),
            "second_per_grid": self.second_per_grid,
            "timestamps": list(self.timestamps),
            **self.facts,
        }


# --- media on their way from the decoder to the encoder ---


@dataclass(frozen=True, slots=True)
class PictureInfo:
    """What a picture's header says: pixels as it will be shown, that is after its orientation flag."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ClipInfo:
    """What is known of a video before any frame of it is decoded.

    frames: packets of the picture track. times: seconds from the start of each, in the order of display.
    fps: frames over duration, so that a variable rate gives its mean; 24 where the container holds no times at all.
    duration: seconds, from the times and not from what the header claims. has_audio: there is an audio track.
    sampled: its frames were chosen by the caller already (a list of frames): all of them are used.
    """

    width: int
    height: int
    frames: int
    times: tuple[float, ...]
    fps: float
    duration: float
    has_audio: bool = False
    sampled: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A decoded video: `frames` uint8 RGB `[n, height, width, 3]` are those of `indices` among all frames of `info`.

    repeated: how many of them could not be decoded, and repeat the frame before them as a player would show it.
    """

    frames: Any
    indices: tuple[int, ...]
    info: ClipInfo
    repeated: int = 0


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """What is known of a recording before it is decoded. seconds is None where its container does not say."""

    seconds: float | None
    rate: int
    channels: int


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A decoded recording: `samples` float32 `[n]`, mono, at `rate` per second, nominally within [-1, 1]."""

    samples: Any
    rate: int
    info: RecordingInfo

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


MediaInfo = PictureInfo | ClipInfo | RecordingInfo


@dataclass(frozen=True, slots=True)
class Reading:
    """How a family wants one request's media decoded.

    choose: of a video, the indices of the frames to decode, ascending and with repeats where a short clip is padded.
    rate: of audio, samples per second.
    """

    choose: Callable[[ClipInfo], Sequence[int]] | None = None
    rate: int = 16000


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """What is published after preprocessing and before the forward (R6), so that receivers can allocate.

    width: columns of `rows`. deepstack_layers: how many further `[rows, width]` arrays follow.
    dtype: one of `DTYPE_BYTES`, both of the staged rows and on the wire.
    content_keys: the key of each item's content (`tectum.cache.key`), where they were worked out.
    """

    req_id: str
    num_parts: int
    part_idx: int
    items: tuple[ItemMetadata, ...]
    width: int
    deepstack_layers: int
    dtype: str
    content_keys: tuple[str, ...] = ()

    @property
    def modality(self) -> Modality:
        return self.items[0].modality

    @property
    def item_rows(self) -> tuple[int, ...]:
        """Rows of each item, in order."""
        return tuple(item.rows for item in self.items)

    @property
    def rows(self) -> int:
        """Rows of all items together."""
        return sum(item.rows for item in self.items)

    @property
    def patches(self) -> int:
        """Cost of the forward: input patches of all items together."""
        return sum(item.patches for item in self.items)

    @property
    def grid_thw(self) -> tuple[Grid, ...]:
        """The grid of each item that has one."""
        return tuple(item.grid_thw for item in self.items if item.grid_thw is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, deepstack included."""
        return self.rows * self.width * (1 + self.deepstack_layers) * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """What `GET /v1/requests/{id}/metadata` answers."""
        return {
            "req_id": self.req_id,
            "num_parts": self.num_parts,
            "part_idx": self.part_idx,
            "modality": str(self.modality),
            "rows": self.rows,
            "item_rows": list(self.item_rows),
            "grid_thw": [list(grid) for grid in self.grid_thw],
            "items": [item.to_json() for item in self.items],
            "width": self.width,
            "deepstack_layers": self.deepstack_layers,
            "dtype": self.dtype,
            "bytes": self.nbytes,
            **({"content_keys": list(self.content_keys)} if self.content_keys else {}),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The rows of one part, in the order of its items.

    rows: `[tokens, width]`; a `torch.Tensor` where torch is installed, else a `numpy.ndarray`.
    item_rows: rows of each item; they sum to `tokens`.
    grid_thw: (time, height, width) in patches for each item, empty for families without a grid.
    deepstack: further `[tokens, width]` arrays, first layer first (Qwen3-VL), else empty.
    dtype: element type of the arrays, a key of `DTYPE_BYTES`.
    items: for each item what `ItemMetadata.to_json` says of it (timestamps, seconds a step, …); empty where not sent.
    """

    rows: Any
    item_rows: tuple[int, ...]
    grid_thw: tuple[Grid, ...]
    deepstack: tuple[Any, ...]
    dtype: str
    req_id: str = ""
    items: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        tokens = self.rows.shape[0]
        if sum(self.item_rows) != tokens:
            raise ValueError(f"item_rows sum to {sum(self.item_rows)}, but there are {tokens} rows")
        for layer in self.deepstack:
            if tuple(layer.shape) != tuple(self.rows.shape):
                raise ValueError(f"a deepstack layer is {tuple(layer.shape)}, the rows are {tuple(self.rows.shape)}")

    @property
    def width(self) -> int:
        """Columns of a row."""
        return int(self.rows.shape[1])

    def split(self) -> list[Any]:
        """The rows of each item on their own: a list of views `[item_rows[i], width]`."""
        starts = [sum(self.item_rows[:i]) for i in range(len(self.item_rows))]
        return [self.rows[start : start + n] for start, n in zip(starts, self.item_rows, strict=True)]
