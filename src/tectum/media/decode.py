"""One item, by its modality: what its header says, and what it decodes to.

Owns the choice between `image`, `video` and `audio`, and how long an opened item is kept; they own their formats. It knows no
model: how media are to be decoded is handed in (`Reading`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from tectum.errors import BadRequestError, TectumError
from tectum.items import wav
from tectum.media.image import decode_opened, open_image, shown_size
from tectum.media.policy import MediaPolicy
from tectum.types import ClipInfo, MediaInfo, MediaItem, Modality, PictureInfo, Reading


@dataclass(frozen=True, slots=True)
class Opened:
    """An item whose header was read. decode: the rest; called once, since a picture is used up by it.

    `decode` raises BadRequestError: `media_decode_failed`, `media_refused` (400), `media_too_large` (413).
    """

    info: MediaInfo
    decode: Callable[[Reading], Any]


def open_item(data: bytes, modality: Modality, policy: MediaPolicy) -> Opened:
    """What an item's header says of its size, and how to decode it: to a picture (PIL, RGB), `Clip` or `Recording`.

    Raises BadRequestError: `unsupported_media` (415), `image_too_large` and `media_too_large` (413),
    `media_refused`, `media_decode_failed` (400), for what can be seen in the header.
    """
    if modality is Modality.VIDEO:
        return _open_video(data, policy)
    if modality is Modality.AUDIO:
        return _open_audio(data, policy)
    picture = open_image(data, policy)
    return Opened(PictureInfo(*shown_size(picture)), lambda reading: decode_opened(picture))


def _open_video(data: bytes, policy: MediaPolicy) -> Opened:
    from tectum.media.video import decode_video, probe_video

    def decode(reading: Reading) -> Any:
        assert reading.choose is not None, "a family that takes videos says which frames"
        return decode_video(data, policy, reading.choose)

    return Opened(probe_video(data, policy), decode)


def _open_audio(data: bytes, policy: MediaPolicy) -> Opened:
    from tectum.media.audio import decode_audio, probe_audio

    return Opened(probe_audio(data, policy), lambda reading: decode_audio(data, policy, reading.rate))


@dataclass(frozen=True, slots=True)
class Looked:
    """What the headers of a request's items say. opened: the items themselves, or None for one to be opened again."""

    infos: Sequence[MediaInfo]
    opened: list[Opened | None]

    @property
    def pixels(self) -> int:
        """Pixels of all pictures together."""
        return sum(info.width * info.height for info in self.infos if isinstance(info, PictureInfo))

    def take(self, index: int) -> Opened | None:
        """An opened item; it is not kept here any longer, nor is what it decodes to."""
        found, self.opened[index] = self.opened[index], None
        return found


def check_together(infos: Sequence[MediaInfo], policy: MediaPolicy) -> None:
    """All pictures of a request are within its limit. Raises BadRequestError `image_too_large`, naming the one too many."""
    pixels = 0
    for index, info in enumerate(infos):
        pixels += info.width * info.height if isinstance(info, PictureInfo) else 0
        if pixels > policy.max_request_pixels:
            text = f"The pictures have more than {policy.max_request_pixels} pixels together (--max-request-pixels)"
            raise BadRequestError("image_too_large", text, item=index, limit=policy.max_request_pixels)


def check_scaled(info: MediaInfo, pixels: int, policy: MediaPolicy) -> None:
    """What a processor makes of an item on the way is within the limits of the item itself.

    pixels: of all that it makes of it before it crops. Raises BadRequestError `image_too_large` or `media_too_large`.
    """
    if isinstance(info, ClipInfo):
        if pixels * 3 > policy.max_clip_bytes:
            text = (
                f"Scaled as the model takes them, the clip's frames are {pixels * 3} bytes, "
                f"more than {policy.max_clip_bytes} (--max-clip-bytes)"
            )
            raise BadRequestError("media_too_large", text, limit=policy.max_clip_bytes)
    elif isinstance(info, PictureInfo) and pixels > policy.max_image_pixels:
        text = (
            f"Scaled as the model takes it, the picture of {info.width}x{info.height} is {pixels} pixels, "
            f"more than {policy.max_image_pixels} (--max-image-pixels)"
        )
        raise BadRequestError("image_too_large", text, limit=policy.max_image_pixels)


def small_item(modalities: Collection[Modality]) -> MediaItem:
    """A gray picture, or a second of silence for a model that only hears: to warm an encoder up with."""
    if Modality.IMAGE in modalities:
        file = io.BytesIO()
        Image.new("RGB", (224, 224), (128, 128, 128)).save(file, "JPEG")
        return MediaItem(Modality.IMAGE, data=file.getvalue())
    return MediaItem(Modality.AUDIO, data=wav(np.zeros(16000, np.float32), 16000))


class Decoded:
    """The media of one request, each decoded when it is asked for: whoever walks over them holds one at a time.

    count: items of the request. decode: index → decoded item; what it raises is given the index.
    """

    def __init__(self, count: int, decode: Callable[[int], Any]) -> None:
        self._count = count
        self._decode = decode

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._count):
            try:
                item = self._decode(index)
            except TectumError as error:
                raise error.at_item(index) from None
            yield item
            del item  # before the next one is decoded
