"""From an item to its bytes: raw (as sent, or as fetched), base64, `data:` URI, allowed file. Blocking: runs in a thread.

Owns how each form is read and bounded, and is the only place that opens a path which a request names. It looks at no byte of
the media, and fetches nothing: `fetch.py` does.
"""

from __future__ import annotations

import binascii
import re
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from tectum.errors import BadRequestError
from tectum.media.fetch import too_large
from tectum.media.policy import MediaPolicy, refused
from tectum.types import MediaItem

#: characters of a percent-encoded payload: decoding takes many times its size in memory
MAX_PERCENT_ENCODED = 1024 * 1024
_WHITESPACE = str.maketrans("", "", " \t\r\n\f\v")
_URL_SAFE = str.maketrans("-_", "+/")
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+*-]+", re.ASCII)


def item_bytes(item: MediaItem, policy: MediaPolicy) -> bytes:
    """The item's encoded bytes. One that is `remote` was fetched before, and holds them.

    Raises BadRequestError: `empty_media`, `media_too_large`, `invalid_base64`, `invalid_data_uri`, `url_refused`.
    """
    if item.data is not None:
        data = item.data
    elif item.base64 is not None:
        data = decode_base64(item.base64, policy)
    else:
        data = _from_url(item.url or "", policy)
    if not data:
        raise BadRequestError("empty_media", "The item has no bytes")
    if len(data) > policy.max_media_bytes:
        raise too_large(policy.max_media_bytes)
    return data


def decode_base64(text: str, policy: MediaPolicy) -> bytes:
    """Strict base64, in the standard or the url-safe alphabet; white space is skipped, padding may be left out."""
    if len(text) > policy.max_media_bytes * 3 // 2 + 1024:
        raise too_large(policy.max_media_bytes)
    text = text.translate(_WHITESPACE)
    if "-" in text or "_" in text:
        text = text.translate(_URL_SAFE)
    text = text.rstrip("=")
    try:
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except (binascii.Error, ValueError):
        raise BadRequestError("invalid_base64", "The media is not valid base64") from None


def _from_url(url: str, policy: MediaPolicy) -> bytes:
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return decode_data_uri(url, policy)
    if scheme == "file":
        return _read_file(url, policy)
    raise refused("only https:, http:, data: and (where allowed) file: URLs are read")


def decode_data_uri(uri: str, policy: MediaPolicy) -> bytes:
    """RFC 2397: `data:[<type>][;<parameter>=<value>…][;base64],<data>`, in any case, percent-encoded where not base64."""
    if len(uri) > policy.max_media_bytes * 3 + 1024:
        raise too_large(policy.max_media_bytes)
    head, comma, payload = uri[len("data:") :].partition(",")
    if not comma:
        raise BadRequestError("invalid_data_uri", "The data: URI has no comma before its data")
    media_type, *parameters = [part.strip() for part in head.split(";")]
    if media_type and not _MEDIA_TYPE.fullmatch(media_type):
        raise BadRequestError("invalid_data_uri", "The data: URI's media type is malformed")
    if not payload:
        raise BadRequestError("empty_media", "The data: URI holds no data")
    if parameters and parameters[-1].lower() == "base64":
        return decode_base64(unquote(payload) if "%" in payload else payload, policy)
    if len(payload) > MAX_PERCENT_ENCODED:
        text = f"A data: URI of more than {MAX_PERCENT_ENCODED} characters must be base64"
        raise BadRequestError("invalid_data_uri", text)
    try:
        return unquote_to_bytes(payload.encode("ascii"))
    except UnicodeEncodeError:
        raise BadRequestError(
            "invalid_data_uri", "The data: URI holds characters that must be percent-encoded"
        ) from None


def _read_capped(path: Path, cap: int) -> bytes:
    """The file's bytes, whatever size it said it had: one byte above the cap tells that it is larger."""
    with path.open("rb") as file:
        content = file.read(cap + 1)
    if len(content) > cap:
        raise too_large(cap)
    return content


def _read_file(url: str, policy: MediaPolicy) -> bytes:
    """A file under the allowed folder, after all symbolic links are resolved."""
    if policy.allowed_media_dir is None:
        raise refused("file: URLs are not read here (--allowed-media-dir permits one folder)")
    try:
        split = urlsplit(url)
    except ValueError:
        raise refused("it is malformed") from None
    if split.netloc not in ("", "localhost") or split.query or split.fragment:
        raise refused("the file: URL names a host, a query or a fragment")
    try:
        path = Path(unquote(split.path)).resolve(strict=True)
        inside = path.is_relative_to(policy.allowed_media_dir.resolve(strict=True)) and path.is_file()
        content = _read_capped(path, policy.max_media_bytes) if inside else None
    except (OSError, ValueError, RuntimeError):
        content = None
    if content is None:  # the same answer for what is not there and what is not allowed: no probing of the disk
        raise refused("there is no such file under the allowed folder")
    return content
