"""One item, by its modality: what its header says, and what it decodes to."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

from tectum.errors import BadRequestError, TectumError
from tectum.items import wav
from tectum.media.image import decode_image, image_size
from tectum.media.policy import MediaPolicy
from tectum.types import MediaInfo, MediaItem, Modality, PictureInfo, Reading


def probe_item(data: bytes, modality: Modality, policy: MediaPolicy) -> MediaInfo:
    """What an item's header says of its size. Raises BadRequestError as decoding would for what can be seen there."""
    if modality is Modality.VIDEO:
        from tectum.media.video import probe_video

        return probe_video(data, policy)
    if modality is Modality.AUDIO:
        from tectum.media.audio import probe_audio

        return probe_audio(data, policy)
    return PictureInfo(*image_size(data, policy))


def check_together(infos: Sequence[MediaInfo], policy: MediaPolicy) -> None:
    """All pictures of a request are within its limit. Raises BadRequestError `image_too_large`, naming the one too many."""
    pixels = 0
    for index, info in enumerate(infos):
        pixels += info.width * info.height if isinstance(info, PictureInfo) else 0
        if pixels > policy.max_request_pixels:
            text = f"The pictures have more than {policy.max_request_pixels} pixels together (--max-request-pixels)"
            raise BadRequestError("image_too_large", text, item=index, limit=policy.max_request_pixels)


def decode_item(data: bytes, modality: Modality, policy: MediaPolicy, reading: Reading) -> Any:
    """A picture (PIL, RGB), a `Clip` or a `Recording`, decoded as the family wants it.

    Raises BadRequestError: `unsupported_media` (415), `image_too_large` and `media_too_large` (413),
    `media_decode_failed`, `media_refused` (400).
    """
    if modality is Modality.VIDEO:
        from tectum.media.video import decode_video

        assert reading.choose is not None, "a family that takes videos says which frames"
        return decode_video(data, policy, reading.choose)
    if modality is Modality.AUDIO:
        from tectum.media.audio import decode_audio

        return decode_audio(data, policy, reading.rate)
    return decode_image(data, policy)


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
