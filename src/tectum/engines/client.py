"""The HTTP client of a Tectum server: `Client` blocks, `AsyncClient` awaits. Both give the same `Embedding`.

Owns the calls and how answers are read; every decision is shared, and only the waiting differs. Light: imports no torch
until rows arrive.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx2

from tectum.delivery import wire
from tectum.engines.address import server_url
from tectum.engines.tls import HUNG_UP, Cert, Verify, client_context, handshake_failure
from tectum.errors import BadRequestError, TectumError, UnavailableError
from tectum.items import MediaLike, as_media_items
from tectum.types import Embedding, MediaItem, Modality

#: seconds that an idle connection is kept: shorter than the server's 75, so that a call never meets a closing one
KEEP_ALIVE = 50.0


@dataclass(frozen=True, slots=True)
class TimedEmbedding:
    """An embedding and what its stages took on the server, in seconds by stage (`fetch`, `prepare`, `queue`, `forward`)."""

    embedding: Embedding
    seconds: dict[str, float]


_INLINE = {"mode": "inline"}
_HOLD = {"mode": "hold"}


@dataclass(frozen=True, slots=True)
class _Call:
    """One HTTP call, ready to be sent."""

    method: str
    path: str
    content: dict[str, Any] = field(default_factory=dict)


def _encode_call(
    items: MediaLike | Sequence[MediaLike],
    delivery: Mapping[str, Any],
    req_id: str | None,
    options: Mapping[str, Any] | None,
    deadline_ms: int | None,
    modality: str,
) -> _Call:
    if modality not in list(Modality):
        text = f"{str(modality)[:40]!r} is no modality; there are {', '.join(Modality)}"
        raise BadRequestError("unsupported_modality", text)
    media = as_media_items(items, Modality(modality))
    body: dict[str, Any] = {
        "items": [_describe(index, item) for index, item in enumerate(media)],
        "options": dict(options or {}),
        "delivery": dict(delivery),
    }
    body.update({key: value for key, value in (("req_id", req_id), ("deadline_ms", deadline_ms)) if value is not None})
    files = {f"item-{index}": (f"item-{index}", item.data) for index, item in enumerate(media) if item.data is not None}
    if not files:
        return _Call("POST", "/v1/encode", {"json": body})
    return _Call("POST", "/v1/encode", {"data": {"request": json.dumps(body)}, "files": files})


def _describe(index: int, item: MediaItem) -> dict[str, str]:
    """Raw bytes travel as a part of their own; what is text already goes in the JSON."""
    if item.data is not None:
        return {"type": str(item.modality), "file": f"item-{index}"}
    if item.base64 is not None:
        return {"type": str(item.modality), "data": item.base64}
    return {"type": str(item.modality), "url": item.url or ""}


def _checked(response: httpx2.Response) -> httpx2.Response:
    """The response, or the error it carries, as it was raised on the server."""
    if response.is_success:
        return response
    raise TectumError.from_answer(response.status_code, response.content, response.headers.get("retry-after", ""))


def _unreachable(url: str, error: Exception) -> UnavailableError:
    if (reason := handshake_failure(error)) is not None:
        return UnavailableError("server_unreachable", f"No TLS with the encoder: {reason}")
    if url.startswith("https:") and isinstance(error, (httpx2.RemoteProtocolError, httpx2.ReadError)):
        return UnavailableError("server_unreachable", f"No answer from the encoder: {HUNG_UP}")
    return UnavailableError("server_unreachable", f"The encoder at {url} did not answer ({type(error).__name__})")


def _timed(response: httpx2.Response) -> TimedEmbedding:
    seconds = {}
    for entry in response.headers.get("server-timing", "").split(","):
        name, _, duration = entry.strip().partition(";dur=")
        if duration:
            seconds[name] = float(duration) / 1e3
    return TimedEmbedding(wire.unpack(response.content), seconds)


def _options(url: str, token: str | None, timeout: float, verify: Verify, cert: Cert | None) -> dict[str, Any]:
    return {
        "base_url": url,
        "verify": client_context(url, verify, cert) or True,
        "timeout": timeout,
        "headers": {"authorization": f"Bearer {token}"} if token else {},
        "limits": httpx2.Limits(keepalive_expiry=KEEP_ALIVE),
        "trust_env": False,
    }


class Client:
    """Calls one Tectum server. Thread-safe; use it as a context manager or `close()` it.

    url: `http://host:port` or `https://host:port`. token: the server's bearer token. timeout: seconds for one call.
    verify: whose certificates are believed: the system's authorities (True), those of a PEM file, nobody's (False: all are
    taken), or as an ssl.SSLContext says. cert: PEM files of our own certificate and its key, for mutual TLS.
    Raises StartupError `invalid_settings` for a URL or files that cannot be used. Every method raises the server's own error (a
    TectumError with code and status), or UnavailableError `server_unreachable`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 120.0,
        verify: Verify = True,
        cert: Cert | None = None,
    ) -> None:
        self.url = server_url(url, "url")
        self._http = httpx2.Client(**_options(self.url, token, timeout, verify, cert))

    def encode(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> Embedding:
        """Encode one item or a list (paths, bytes, URLs, PIL pictures, MediaItems); rows `[tokens, width]` in order."""
        return self.encode_timed(
            items, req_id=req_id, options=options, deadline_ms=deadline_ms, modality=modality
        ).embedding

    def encode_timed(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> TimedEmbedding:
        """As `encode`, with what each stage took on the server."""
        return _timed(self._send(_encode_call(items, _INLINE, req_id, options, deadline_ms, modality)))

    def hold(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> dict[str, Any]:
        """Encode and keep the rows on the server; returns their metadata. `embedding(req_id)` fetches them."""
        call = _encode_call(items, _HOLD, req_id, options, deadline_ms, modality)
        return dict(self._send(call).json())

    def push(
        self,
        items: MediaLike | Sequence[MediaLike],
        destinations: Sequence[str] = (),
        *,
        receivers: int = 0,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> dict[str, Any]:
        """Encode and have the rows pushed to `destinations` (`host:port`, see `tectum.engines.pushed`).

        Returns the metadata when every receiver has them.
        receivers: how many there will be in all, those that `register` included; 0: those of `destinations`.
        """
        call = _encode_call(items, _push(destinations, receivers), req_id, options, deadline_ms, modality)
        return dict(self._send(call).json())

    def register(self, req_id: str, destinations: Sequence[str], *, receivers: int = 0) -> dict[str, Any]:
        """Have rows pushed to `destinations`, before or after their encode; returns its state when these have them.

        receivers: how many there will be in all; 0: not said here.
        """
        return dict(self._send(_destinations_call(req_id, destinations, receivers)).json())

    def embedding(self, req_id: str) -> Embedding:
        """Pull held rows; that releases the request."""
        return wire.unpack(self._send(_request_call("GET", req_id, "/embedding")).content)

    def metadata(self, req_id: str, wait: float = 0.0) -> dict[str, Any]:
        """Rows, width, dtype and grid, as soon as preprocessing knows them; waits up to `wait` seconds."""
        return dict(self._send(_request_call("GET", req_id, f"/metadata?wait={wait}")).json())

    def status(self, req_id: str) -> dict[str, Any]:
        """State of a request, or the reason of its release."""
        return dict(self._send(_request_call("GET", req_id)).json())

    def release(self, req_id: str) -> dict[str, Any]:
        """Give back all that a request holds, at whatever stage it is."""
        return dict(self._send(_request_call("DELETE", req_id)).json())

    def models(self) -> list[dict[str, Any]]:
        """What the server serves: family, width, dtype, modalities."""
        return list(self._send(_Call("GET", "/v1/models")).json()["data"])

    def _send(self, call: _Call) -> httpx2.Response:
        try:
            return _checked(self._http.request(call.method, call.path, **call.content))
        except (httpx2.TransportError, httpx2.InvalidURL, ssl.SSLError) as error:
            raise _unreachable(self.url, error) from None

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncClient:
    """As `Client`, for an event loop. Cancelling a call hangs up, and the server gives the request up."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 120.0,
        verify: Verify = True,
        cert: Cert | None = None,
    ) -> None:
        self.url = server_url(url, "url")
        self._http = httpx2.AsyncClient(**_options(self.url, token, timeout, verify, cert))

    async def encode(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> Embedding:
        """Encode one item or a list (paths, bytes, URLs, PIL pictures, MediaItems); rows `[tokens, width]` in order."""
        call = _encode_call(items, _INLINE, req_id, options, deadline_ms, modality)
        return _timed(await self._send(call)).embedding

    async def hold(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> dict[str, Any]:
        """Encode and keep the rows on the server; returns their metadata."""
        call = _encode_call(items, _HOLD, req_id, options, deadline_ms, modality)
        return dict((await self._send(call)).json())

    async def push(
        self,
        items: MediaLike | Sequence[MediaLike],
        destinations: Sequence[str] = (),
        *,
        receivers: int = 0,
        req_id: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
        modality: str = "image",
    ) -> dict[str, Any]:
        """As `Client.push`."""
        call = _encode_call(items, _push(destinations, receivers), req_id, options, deadline_ms, modality)
        return dict((await self._send(call)).json())

    async def register(self, req_id: str, destinations: Sequence[str], *, receivers: int = 0) -> dict[str, Any]:
        """As `Client.register`."""
        return dict((await self._send(_destinations_call(req_id, destinations, receivers))).json())

    async def embedding(self, req_id: str) -> Embedding:
        """Pull held rows; that releases the request."""
        return wire.unpack((await self._send(_request_call("GET", req_id, "/embedding"))).content)

    async def metadata(self, req_id: str, wait: float = 0.0) -> dict[str, Any]:
        """Rows, width, dtype and grid, as soon as preprocessing knows them; waits up to `wait` seconds."""
        return dict((await self._send(_request_call("GET", req_id, f"/metadata?wait={wait}"))).json())

    async def status(self, req_id: str) -> dict[str, Any]:
        """State of a request, or the reason of its release."""
        return dict((await self._send(_request_call("GET", req_id))).json())

    async def release(self, req_id: str) -> dict[str, Any]:
        """Give back all that a request holds, at whatever stage it is."""
        return dict((await self._send(_request_call("DELETE", req_id))).json())

    async def _send(self, call: _Call) -> httpx2.Response:
        try:
            return _checked(await self._http.request(call.method, call.path, **call.content))
        except (httpx2.TransportError, httpx2.InvalidURL, ssl.SSLError) as error:
            raise _unreachable(self.url, error) from None

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _push(destinations: Sequence[str], receivers: int) -> dict[str, Any]:
    return {"mode": "push", "destinations": list(destinations), "receivers": receivers}


def _destinations_call(req_id: str, destinations: Sequence[str], receivers: int) -> _Call:
    body = {"destinations": list(destinations), "receivers": receivers}
    return _Call("POST", _path(req_id, "/destinations"), {"json": body})


def _request_call(method: str, req_id: str, tail: str = "") -> _Call:
    return _Call(method, _path(req_id, tail))


def _path(req_id: str, tail: str) -> str:
    return f"/v1/requests/{quote(req_id, safe='')}{tail}"
