"""What media may come from where, and how large: limits, and which URLs may be fetched.

One parser (`urllib.parse.urlsplit`, then strict rules) makes a `Target`, and the fetcher connects to exactly that target:
what is checked is what is fetched. Nothing here does I/O.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from tectum.config import Settings
from tectum.errors import BadRequestError, StartupError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: public by number, but answered by a cloud's own platform to machines inside it
_PLATFORM_ADDRESSES = frozenset({"168.63.129.16"})
#: networks whose last 32 bits are an IPv4 address: compatible, translated, NAT64
_ENDS_IN_IPV4 = tuple(ipaddress.IPv6Network(text) for text in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96"))
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Limits for one item, and (`max_request_pixels`) for all pictures of a request. Sizes in bytes, times in seconds.

    max_aspect_ratio: of a picture or frame, longer side to shorter. max_video_frames: frames in the container, whether they
    are looked at or not. max_clip_bytes: of the frames that are.
    allowed_hosts: the only hosts that URLs may name, as ASCII names; one that starts with a dot stands for all below it.
    Empty: any host.
    """

    max_media_bytes: int = 32 * 1024 * 1024
    max_image_pixels: int = 64_000_000
    max_aspect_ratio: int = 200
    max_video_frames: int = 100_000
    max_video_seconds: float = 3600.0
    max_clip_bytes: int = 1024 * 1024 * 1024
    max_audio_seconds: float = 3600.0
    max_request_pixels: int = 256_000_000
    fetch_timeout: float = 10.0
    connect_timeout: float = 3.0
    max_redirects: int = 3
    allow_http: bool = True
    allow_private_urls: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_media_dir: Path | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> MediaPolicy:
        """The policy that the settings describe. Raises StartupError `invalid_settings` for a host that is none."""
        return cls(
            max_media_bytes=settings.max_media_bytes,
            max_image_pixels=settings.max_image_pixels,
            max_request_pixels=settings.max_request_pixels,
            max_aspect_ratio=settings.max_aspect_ratio,
            max_video_frames=settings.max_video_frames,
            max_video_seconds=settings.max_video_seconds,
            max_clip_bytes=settings.max_clip_bytes,
            max_audio_seconds=settings.max_audio_seconds,
            fetch_timeout=settings.fetch_timeout,
            allow_http=settings.allow_http,
            allow_private_urls=settings.allow_private_urls,
            allowed_hosts=tuple(
                _allowed_host(name) for name in (settings.allowed_media_hosts or "").split(",") if name
            ),
            allowed_media_dir=settings.allowed_media_dir,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart: the only form in which it is used from here on."""

    scheme: str
    host: str
    port: int
    path: str  # with its query

    @property
    def origin(self) -> str:
        """`Host` header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def parse_target(url: str, policy: MediaPolicy) -> Target:
    """An `http:` or `https:` URL as a target. Raises BadRequestError `url_refused`, saying what is not allowed."""
    if any(c.isspace() or not c.isprintable() for c in url) or "\\" in url:
        raise refused("it holds a backslash, a space or a control character")
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        raise refused("it is malformed") from None
    if split.scheme not in _DEFAULT_PORTS:
        raise refused(f"scheme {split.scheme[:20]!r} is not fetched; use https:, http: or data:")
    if split.scheme == "http" and not policy.allow_http:
        raise refused("plain http: is turned off here; use https:")
    if port == 0:
        raise refused("port 0 is no port")
    if "@" in split.netloc:
        raise refused("it holds user information")
    path = (split.path or "/") + (f"?{split.query}" if split.query else "")
    host = _host(split)
    if policy.allowed_hosts and not any(_names(host, allowed) for allowed in policy.allowed_hosts):
        raise refused("its host is not among --allowed-media-hosts")
    return Target(split.scheme, host, _DEFAULT_PORTS[split.scheme] if port is None else port, path)


def _names(host: str, allowed: str) -> bool:
    return host.endswith(allowed) if allowed.startswith(".") else host == allowed


def _allowed_host(text: str) -> str:
    """An entry of the allow-list in the form that hosts of URLs are compared in."""
    dot, name = ("." if text.strip().startswith(".") else ""), text.strip().lstrip(".")
    try:
        split = urlsplit(f"//[{name}]" if ":" in name else f"//{name}")
        if split.netloc.strip("[]") == name and "@" not in name:  # a host and nothing else
            return dot + _host(split)
    except (ValueError, BadRequestError):
        pass
    raise StartupError("invalid_settings", f"allowed_media_hosts: {text.strip()!r} is no host")


def _host(split: SplitResult) -> str:
    """The host as it is resolved: an address in canonical form, or an ASCII name."""
    host = split.hostname or ""
    try:
        if ":" in host:
            return str(ipaddress.IPv6Address(host))
        name = host.encode("idna").decode("ascii").rstrip(".")
    except (ValueError, UnicodeError):
        raise refused("its host name is malformed") from None
    if not name:
        raise refused("it has no host")
    last = name.rsplit(".", 1)[-1]
    if last.isdigit() or last.startswith("0x"):  # 0x7f000001, 2130706433, 127.1: only the plain form is an address
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise refused("its address is not in plain dotted form") from None
    return name


def check_address(address: str, policy: MediaPolicy) -> None:
    """Raises BadRequestError `url_refused` for an address that is not on the public internet, unless the policy allows it."""
    found: Address = ipaddress.ip_address(address.partition("%")[0])
    parts = [part for part in (found, _embedded(found)) if part is not None]
    if any(part.is_multicast or part.is_unspecified for part in parts):
        raise refused("it leads to a multicast or unspecified address")
    if policy.allow_private_urls:
        return
    local = isinstance(found, ipaddress.IPv6Address) and (found.is_site_local or found in _LOCAL_NAT64)
    if local or any(not part.is_global or str(part) in _PLATFORM_ADDRESSES for part in parts):
        raise refused(
            "it leads to a private, loopback, link-local or reserved address (--allow-private-urls permits it)"
        )


def _embedded(address: Address) -> Address | None:
    """The IPv4 address inside a mapped, compatible, translated, 6to4, Teredo or NAT64 one."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in network for network in _ENDS_IN_IPV4) and int(address) > 1:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def refuse_thin(what: str, width: int, height: int, policy: MediaPolicy) -> None:
    """Raises BadRequestError `media_refused` for sides further apart than the policy allows: processors that scale the shorter
    side to a given length would make a huge picture of a tiny one. what: `picture`, `clip`.
    """
    long, short = max(width, height), max(1, min(width, height))
    if long > policy.max_aspect_ratio * short:
        ratio = f"{long / short:.1f}".removesuffix(".0")
        text = f"The {what}'s sides are {ratio} to 1, more than {policy.max_aspect_ratio} to 1 (--max-aspect-ratio)"
        raise BadRequestError("media_refused", text, limit=policy.max_aspect_ratio)


def refused(why: str) -> BadRequestError:
    return BadRequestError("url_refused", f"The media URL is refused: {why}")
