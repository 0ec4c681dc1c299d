"""Encoded bytes → one RGB picture, as a viewer would show it.

EXIF orientation is applied, transparency is composited on white, 16-bit and other deep modes are scaled to 8 bit, CMYK
is converted, and of an animation the first frame is taken; colour profiles are not applied, as the models' own processors
apply none. Limits are checked on the headers, before anything is decoded.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from tectum.errors import BadRequestError
from tectum.media.damage import blamed_on
from tectum.media.policy import MediaPolicy, refuse_thin
from tectum.media.sniff import picture_format

Image.MAX_IMAGE_PIXELS = None  # our own cap is read from the header, and says which limit it is
warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged metadata: the pixels decide
_WHITE = (255, 255, 255)
#: times that a progressive JPEG may pass over the largest picture there may be; encoders make about ten passes
MAX_PASSES = 16
#: deep pictures are scaled in strips of about so many pixels, since numbers are eight times the size of bytes
_STRIP = 1 << 20
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
#: those of them that swap width and height
_SIDEWAYS = frozenset({5, 6, 7, 8})


def decode_image(data: bytes, policy: MediaPolicy) -> Image.Image:
    """Decode one picture to mode RGB, fully loaded.

    Raises BadRequestError: `unsupported_media` (415), `image_too_large` (413), `media_refused`, `media_decode_failed` (400).
    """
    return decode_opened(open_image(data, policy))


def open_image(data: bytes, policy: MediaPolicy) -> Image.Image:
    """The picture with its header read, within the limits; nothing is decoded yet. Raises as `decode_image`."""
    name = picture_format(data)
    with blamed_on(f"{name} picture"):
        picture = Image.open(io.BytesIO(data), formats=[name])
    _check_size(picture, data, policy)
    return picture


def shown_size(picture: Image.Image) -> tuple[int, int]:
    """Width and height in pixels as an opened picture will be shown, as far as its header tells.

    A PNG that says only behind its pixels how it is turned counts as upright: Pillow would decode it to find out.
    """
    width, height = picture.size
    if picture.format == "PNG" and "exif" not in picture.info:
        return width, height
    with blamed_on(f"{picture.format} picture"):
        sideways = picture.getexif().get(_ORIENTATION, 1) in _SIDEWAYS
    return (height, width) if sideways else (width, height)


def decode_opened(picture: Image.Image) -> Image.Image:
    """What `decode_image` gives, for an opened picture, which is used up by it."""
    with blamed_on(f"{picture.format} picture"):
        picture.load()
        return _as_shown(picture)


def _check_size(picture: Image.Image, data: bytes, policy: MediaPolicy) -> None:
    width, height = picture.size
    if width * height > policy.max_image_pixels:
        text = f"The picture is {width}x{height}, more than {policy.max_image_pixels} pixels (--max-image-pixels)"
        raise BadRequestError("image_too_large", text, limit=policy.max_image_pixels)
    refuse_thin("picture", width, height, policy)
    scans = data.count(b"\xff\xda") if picture.format == "JPEG" else 1
    if scans * width * height > MAX_PASSES * policy.max_image_pixels:
        text = f"The JPEG has {scans} scans of {width}x{height} pixels: more work than --max-image-pixels allows"
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
        shown = Image.new("RGB", rgba.size, _WHITE)
        shown.paste(rgba, mask=rgba)
        return shown
    return picture.convert("RGB")


def _deep_to_rgb(picture: Image.Image) -> Image.Image:
    """Gray values deeper than 8 bit, scaled: 16-bit integers by their full range, others by their own largest value."""
    values = np.asarray(picture)
    rows = max(1, _STRIP // values.shape[1])
    strips = [values[start : start + rows] for start in range(0, values.shape[0], rows)]
    if picture.mode.startswith("I;16") or (picture.mode == "I" and values.min() >= 0 and values.max() < 1 << 16):
        factor = 1 / 257.0
    else:
        top = max(float(_finite(strip).max()) for strip in strips)
        factor = 1.0 if 1.0 < top <= 255.0 or top <= 0 else 255.0 / top
    gray = np.empty(values.shape, np.uint8)
    for start, strip in zip(range(0, values.shape[0], rows), strips, strict=True):
        gray[start : start + rows] = np.clip(np.rint(_finite(strip) * factor), 0, 255)
    return Image.fromarray(gray).convert("RGB")


def _finite(values: np.ndarray) -> np.ndarray:
    """As float64; what is not finite counts as black."""
    return np.nan_to_num(values.astype(np.float64), copy=False, nan=0.0, posinf=0.0, neginf=0.0)
