"""What a caller may hand in as an item, and how it becomes a `MediaItem`. Shared by `Client` and `Encoder`.

Whatever lies in memory travels without loss: a picture as PNG, a list of frames as a TIFF of as many pages, samples as a
WAV file of 32-bit floats.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tectum.errors import BadRequestError
from tectum.types import MediaItem, Modality

if TYPE_CHECKING:
    from PIL.Image import Image

#: a path, an http(s) or data URL, raw bytes, a PIL picture, an item made by hand; a video also as a list of PIL pictures or
#: an array uint8 `[frames, height, width, 3]`, audio as `(samples, rate)`: floats `[n]` or `[n, channels]` within [-1, 1]
MediaLike: TypeAlias = "str | Path | bytes | bytearray | memoryview | Image | MediaItem | Sequence[Any] | Any"


def as_media_items(items: MediaLike | Sequence[MediaLike], modality: Modality) -> tuple[MediaItem, ...]:
    """One item or a list of them as media items. Files are read here; what lies in memory is kept losslessly.

    A list is always several items: one video as a list of frames stands in a list of its own.
    Raises BadRequestError `invalid_request` with the index of an item that is none of these or cannot be read.
    """
    several = items if isinstance(items, list) or (isinstance(items, tuple) and not _is_sound(items)) else [items]
    if not several:
        raise BadRequestError("invalid_request", "There are no items to encode")
    return tuple(_as_media_item(item, modality, index) for index, item in enumerate(several))


def _as_media_item(item: Any, modality: Modality, index: int) -> MediaItem:
    if isinstance(item, MediaItem):
        return item
    if isinstance(item, (bytes, bytearray, memoryview)):
        return MediaItem(modality, data=bytes(item))
    if isinstance(item, str) and item[:8].lower().startswith(("http://", "https://", "data:")):
        return MediaItem(modality, url=item)
    if isinstance(item, (str, Path)):
        try:
            return MediaItem(modality, data=Path(item).read_bytes())
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "not a path"
            raise BadRequestError("invalid_request", f"{str(item)[:80]}: {why}", item=index) from None
    data = _in_memory(item, modality)
    if data is not None:
        return MediaItem(modality, data=data)
    what = {"image": "a picture", "video": "a list of frames", "audio": "(samples, rate)"}[modality]
    text = f"An item is a path, a URL, bytes or {what}, not {type(item).__name__}"
    raise BadRequestError("invalid_request", text, item=index)


def _in_memory(item: Any, modality: Modality) -> bytes | None:
    """Pictures, frames and samples as the bytes of a file; None for anything else."""
    if _is_picture(item):
        return _pages([item], "PNG") if modality is Modality.IMAGE else _pages([item], "TIFF")
    if modality is Modality.AUDIO and _is_sound(item):
        return wav(*item)
    if modality is Modality.VIDEO and getattr(item, "ndim", 0) == 4:
        from PIL import Image

        return _pages([Image.fromarray(frame) for frame in item], "TIFF")
    if modality is Modality.VIDEO and isinstance(item, (list, tuple)) and item and all(map(_is_picture, item)):
        return _pages(list(item), "TIFF")
    return None


def _is_picture(item: Any) -> bool:
    return hasattr(item, "save") and hasattr(item, "mode")


def _is_sound(item: Any) -> bool:
    """(samples, rate). Only floats: of integers it cannot be told what is loud."""
    if not isinstance(item, (list, tuple)) or len(item) != 2 or type(item[1]) is not int:
        return False
    return getattr(getattr(item[0], "dtype", None), "kind", "") == "f" and item[0].ndim in (1, 2)


def _pages(pictures: list[Any], form: str) -> bytes:
    file = io.BytesIO()
    more: dict[str, Any] = {"save_all": True, "append_images": pictures[1:]} if form == "TIFF" else {}
    pictures[0].save(file, form, **more)
    return file.getvalue()


def wav(samples: Any, rate: int) -> bytes:
    """A WAV file of 32-bit floats. samples: `[n]` or `[n, channels]`."""
    data = samples.astype("<f4").tobytes()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    form = struct.pack("<HHIIHH", 3, channels, rate, rate * channels * 4, channels * 4, 32)  # 3: IEEE floats
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", len(head) + len(data)) + head + data
