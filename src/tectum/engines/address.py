"""Addresses of servers, as people write them into flags and calls: a mistake shows at the start, and not with each request."""

from __future__ import annotations

from urllib.parse import urlsplit

from tectum.errors import StartupError


def server_url(url: str, setting: str) -> str:
    """`url` without a slash at its end. setting: what it was given as, for the error.

    Raises StartupError `invalid_settings` for anything but the http or https URL of one server.
    """
    try:
        split = urlsplit(url)
        usable = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:  # the port is no number, or the brackets of an address do not match
        usable = False
    if not usable or any(char.isspace() or char == "," or not char.isprintable() for char in url):
        raise StartupError("invalid_settings", f"{setting}: {url[:80]!r} is not the http://host:port of one server")
    return url.rstrip("/")
