"""The messages that SGLang's receiver reads: a pickled `EmbeddingData`, and the rows beside it.

Owns the form of the messages; sends nothing. The pickles are written opcode by opcode (protocol 2, documented in
`pickletools`), so neither SGLang nor torch is needed here, nothing but the few names below can ever stand in one, and
nothing is read back: this project unpickles nothing. SGLang's unpickler admits exact names only, which are these.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tectum.errors import StartupError, TectumError
from tectum.types import DTYPE_BYTES, Modality, RequestMetadata


class Name(NamedTuple):
    """A global as a pickle names it."""

    module: str
    attribute: str


class Names(NamedTuple):
    """Where one range of SGLang's releases keeps the two classes of its protocol."""

    embedding: Name
    modality: Name


_LONG_TENSOR, _FLOAT_TENSOR = Name("torch", "LongTensor"), Name("torch", "FloatTensor")
#: `Modality` is an enum in SGLang; these are its values
_MODALITIES = {Modality.IMAGE: 1, Modality.VIDEO: 2, Modality.AUDIO: 3}
_PART = "_local_part_"

Value = object


class _Global(NamedTuple):
    """The object behind a name."""

    name: Name


class _Call(NamedTuple):
    """What calling the object behind a name returns: REDUCE."""

    name: Name
    arguments: tuple[Value, ...]


def embedding_message(metadata: RequestMetadata, names: Names) -> bytes:
    """The metadata frame of a delivery; it is also mooncake's completion message.

    Its shape is `[rows, width × (1 + deepstack layers)]`: SGLang takes the deepstack layers as further columns.
    """
    assert metadata.dtype in DTYPE_BYTES, "rows are of a float type that torch has by this name"
    state = {
        **_identity(metadata.req_id, metadata.num_parts, metadata.part_idx, metadata.modality, names),
        "grid_dim": _grid(metadata),
        **_times(metadata),
        "dtype": _Global(Name("torch", metadata.dtype)),
        "shape": [metadata.rows, row_width(metadata)],
        "error_msg": None,
        "error_code": None,
    }
    return _pickle(names.embedding, state)


def _grid(metadata: RequestMetadata) -> Value:
    """What the receiver counts placeholders by: patches, or of each recording the frames of its spectrogram.

    For families whose receivers count no frames, a recording's rows.
    """
    if metadata.modality is not Modality.AUDIO:
        return [list(grid) for grid in metadata.grid_thw]
    return _Call(_LONG_TENSOR, ([item.facts.get("mel_frames", item.rows) for item in metadata.items],))


def _times(metadata: RequestMetadata) -> dict[str, Value]:
    """When the steps of each clip are: times, where the prompt writes them out; else how long a step is.

    Never both: Qwen3-VL's receiver fails on lengths. They are a tensor, since Qwen3-Omni's calls a tensor's methods on each.
    """
    if metadata.modality is not Modality.VIDEO:
        return {}
    if all(item.facts.get("timestamps_in_prompt") for item in metadata.items):
        return {"video_timestamps": [list(item.timestamps) for item in metadata.items]}
    steps = [item.second_per_grid for item in metadata.items]
    return {} if None in steps else {"second_per_grid_ts": _Call(_FLOAT_TENSOR, (steps,))}


def error_message(req_id: str, error: TectumError, names: Names) -> bytes:
    """The only frame that a receiver gets whose rows will not come. It takes the text and the status from it."""
    part_idx = part_of(req_id)
    state = {
        **_identity(req_id, part_idx + 1, part_idx, Modality.IMAGE, names),
        "grid_dim": None,
        "dtype": None,
        "shape": None,
        "error_msg": error.message,
        "error_code": error.status,
    }
    return _pickle(names.embedding, state)


def row_width(metadata: RequestMetadata) -> int:
    """Columns of a row as SGLang counts them."""
    return metadata.width * (1 + metadata.deepstack_layers)


def part_of(req_id: str) -> int:
    """The part that SGLang's HTTP ids carry (`<rid>_local_part_<i>`); 0 where there is none."""
    digits = req_id.rpartition(_PART)[2]
    return int(digits) if _PART in req_id and digits.isascii() and digits.isdigit() and len(digits) < 6 else 0


def _identity(req_id: str, num_parts: int, part_idx: int, modality: Modality, names: Names) -> dict[str, Value]:
    """The fields that every message has; the receiver's `__init__` does not run, so each has to be set."""
    return {
        "req_id": req_id,
        "num_parts": num_parts,
        "part_idx": part_idx,
        "modality": _Call(names.modality, (_MODALITIES[modality],)),
        "embedding": None,
        "send_time": None,
    }


# --- the pickle -------------------------------------------------------------------------------------------------------


def _pickle(cls: Name, state: dict[str, Value]) -> bytes:
    """`cls.__new__(cls)` with `state` as its dictionary: NEWOBJ, then BUILD."""
    return b"\x80\x02" + _global(cls) + b")\x81" + _value(state) + b"b."


def _value(value: Value) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "replace")
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, _Global):
        return _global(value.name)
    if isinstance(value, _Call):
        return _global(value.name) + b"(" + b"".join(map(_value, value.arguments)) + b"tR"
    if isinstance(value, list):
        return b"](" + b"".join(map(_value, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_value(key) + _value(item) for key, item in value.items()) + b"u"
    raise TypeError(f"{type(value).__name__} has no place in a message")


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _global(name: Name) -> bytes:
    return b"c" + name.module.encode() + b"\n" + name.attribute.encode() + b"\n"


# --- releases ---------------------------------------------------------------------------------------------------------

_MOVED_RECEIVER = "sglang.srt.disaggregation.encoder.receiver"
_FIRST_RECEIVER = "sglang.srt.disaggregation.encode_receiver"
#: since which release the classes lie where, newest first; read from the released wheels
_SINCE: tuple[tuple[tuple[int, int, int], Names], ...] = (
    ((0, 5, 23), Names(Name(_MOVED_RECEIVER, "EmbeddingData"), Name("sglang.srt.multimodal.modality", "Modality"))),
    ((0, 5, 19), Names(Name(_MOVED_RECEIVER, "EmbeddingData"), Name("sglang.srt.managers.schedule_batch", "Modality"))),
    ((0, 5, 12), Names(Name(_FIRST_RECEIVER, "EmbeddingData"), Name("sglang.srt.managers.schedule_batch", "Modality"))),
)


def names_of(version: str) -> Names:
    """The names that SGLang `version` (`0.5.23`) unpickles. Raises StartupError `invalid_settings` for one before 0.5.12."""
    try:
        major, minor, patch = (int(part) for part in version.split(".")[:3])
    except ValueError:
        raise StartupError("invalid_settings", f"sglang_version: {version!r} is no release such as 0.5.23") from None
    for since, names in _SINCE:
        if (major, minor, patch) >= since:
            return names
    raise StartupError(
        "invalid_settings", f"sglang_version: {version} has another protocol; 0.5.12 and later are served"
    )
