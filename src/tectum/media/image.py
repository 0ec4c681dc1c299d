"""Encoded bytes → one RGB picture, as a viewer would show it.

EXIF orientation is applied, transparency is composited on white, 16-bit and other deep modes are scaled to 8 bit, CMYK
is converted, and of an animation the first frame is taken. Limits are checked on the header, before anything is decoded.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from tectum.errors import BadRequestError, TectumError
from tectum.media.policy import MediaPolicy
from tectum.media.sniff import picture_format

Image.MAX_IMAGE_PIXELS = None  # our own cap is read from the header, and says which limit it is
warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged metadata: the pixels decide
_WHITE = (255, 255, 255, 255)
_ORIENTATION = 0x0112
#: EXIF orientation -> how to turn the picture upright
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, policy: MediaPolicy) -> Image.Image:
    """Decode one picture to mode RGB, fully loaded.

    Raises BadRequestError: `unsupported_media` (415), `image_too_large` (413), `media_decode_failed` (400).
    """
    name = picture_format(data)
    try:
        picture = Image.open(io.BytesIO(data), formats=[name])
        _check_size(picture, policy)
        picture.load()
        return _as_shown(picture)
    except TectumError:
        raise
    except Exception:  # decoders raise whatever they like on damaged input; all of it is the picture's fault
        text = f"The {name} picture is truncated or damaged and cannot be decoded"
        raise BadRequestError("media_decode_failed", text) from None


def _check_size(picture: Image.Image, policy: MediaPolicy) -> None:
    width, height = picture.size
    if width * height > policy.max_image_pixels:
        text = f"The picture is {width}x{height}, more than {policy.max_image_pixels} pixels (--max-image-pixels)"
        raise BadRequestError("image_too_large", text, limit=policy.max_image_pixels)


def _as_shown(picture: Image.Image) -> Image.Image:
    """RGB, upright. A plain RGB picture is passed on without a copy."""
    turn = _UPRIGHT.get(picture.getexif().get(_ORIENTATION, 1))
    if turn is not None:  # by hand: Pillow's own way writes the metadata anew, and fails where it is damaged
        picture = picture.transpose(turn)
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith(("I", "F")):
        return _deep_to_rgb(picture)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    return picture.convert("RGB")


def _deep_to_rgb(picture: Image.Image) -> Image.Image:
    """Gray values deeper than 8 bit, scaled: 16-bit integers by their full range, others by their own largest value."""
    values = np.asarray(picture)
    if picture.mode.startswith("I;16") or (picture.mode == "I" and values.min() >= 0 and values.max() < 1 << 16):
        scaled = values.astype(np.float64) / 257.0
    else:
        finite = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        top = float(finite.max())
        scaled = finite if 1.0 < top <= 255.0 else finite * (255.0 / top if top > 0 else 1.0)
    return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8)).convert("RGB")
