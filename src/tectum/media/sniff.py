"""What kind of media are these bytes? Magic bytes decide; a name or a declared type never does.

Owns the types that are told apart, and which pictures are taken; decodes nothing.
"""

from __future__ import annotations

import contextlib
from functools import cache

import filetype

from tectum.errors import BadRequestError

#: MIME types of pictures that are decoded; HEIC only where Pillow has learnt it
PICTURES = {
    "image/jpeg": "JPEG",
    "image/png": "PNG",
    "image/apng": "PNG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
    "image/avif": "AVIF",
    "image/heic": "HEIF",
}
#: major brands of the ISO base media format that are pictures, whatever else is listed after them
_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "image/heic"),
    **dict.fromkeys((b"avif", b"avis"), "image/avif"),
}
_JPEG_XL = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")


@cache
def _readable() -> frozenset[str]:
    """Pillow's names of what it can open here; HEIC where pillow-heif is installed."""
    from PIL import Image

    with contextlib.suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
    Image.init()
    return frozenset(Image.OPEN)


def picture_format(data: bytes) -> str:
    """Pillow's name of the picture format. Raises BadRequestError `unsupported_media` (415) that names the real type."""
    found = media_type(data)
    name = PICTURES.get(found)
    readable = _readable()
    if name is None or name not in readable:
        accepted = ", ".join(dict.fromkeys(name for name in PICTURES.values() if name in readable))
        raise BadRequestError(
            "unsupported_media", f"The item is {found}; pictures are taken as {accepted}", found=found
        )
    return name


def media_type(data: bytes) -> str:
    """MIME type by content; `text/html`, `image/svg+xml`, `text/plain` or `application/octet-stream` where no magic fits."""
    if data[4:8] == b"ftyp" and (found := _BRANDS.get(bytes(data[8:12]))) is not None:
        return found
    guess = filetype.guess_mime(data)
    if guess is not None:
        return str(guess)
    if data.startswith(_JPEG_XL):
        return "image/jxl"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "text/html"
    if head.startswith(b"<svg") or (head.startswith((b"<?xml", b"<!--")) and b"<svg" in head):
        return "image/svg+xml"
    try:
        data[:64].decode("ascii")
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain"
