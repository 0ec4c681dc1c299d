"""What a caller may hand in as a picture, and how it becomes a `MediaItem`. Shared by `Client` and `Encoder`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tectum.errors import BadRequestError
from tectum.types import MediaItem, Modality

if TYPE_CHECKING:
    from PIL.Image import Image

#: a path, an http(s) or data URL, raw bytes, a PIL picture, or an item made by hand
MediaLike: TypeAlias = "str | Path | bytes | bytearray | memoryview | Image | MediaItem"


def as_media_items(items: MediaLike | Sequence[MediaLike], modality: Modality) -> tuple[MediaItem, ...]:
    """One item or a list of them as media items. Files are read here; pictures are kept losslessly, as PNG.

    Raises BadRequestError `invalid_request` with the index of an item that is none of these or cannot be read.
    """
    several = items if isinstance(items, (list, tuple)) else [items]
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
    if hasattr(item, "save") and hasattr(item, "mode"):
        file = io.BytesIO()
        item.save(file, "PNG")
        return MediaItem(modality, data=file.getvalue())
    text = f"An item is a path, a URL, bytes or a picture, not {type(item).__name__}"
    raise BadRequestError("invalid_request", text, item=index)
