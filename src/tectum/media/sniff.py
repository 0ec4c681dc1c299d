"""What kind of media are these bytes? Magic bytes decide; a name or a declared type never does."""

from __future__ import annotations

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


def picture_format(data: bytes) -> str:
    """Pillow's name of the picture format. Raises BadRequestError `unsupported_media` (415) that names the real type."""
    from PIL import Image

    found = media_type(data)
    name = PICTURES.get(found)
    Image.init()
    if name is None or name not in Image.OPEN:
        accepted = ", ".join(dict.fromkeys(name for name in PICTURES.values() if name in Image.OPEN))
        raise BadRequestError(
            "unsupported_media", f"The item is {found}; pictures are taken as {accepted}", found=found
        )
    return name


def media_type(data: bytes) -> str:
    """MIME type by content; `text/html`, `image/svg+xml`, `text/plain` or `application/octet-stream` where no magic fits."""
    guess = filetype.guess_mime(data)
    if guess is not None:
        return str(guess)
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
