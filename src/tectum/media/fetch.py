"""Fetching media over http(s): checked before each connection, capped while it streams, done by one deadline.

Names are resolved once, each address is checked, and the connection goes to a checked address, never to the name again.
No cookies, no proxies from the environment, no connection shared between hosts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urljoin

import httpx2

from tectum.errors import BadRequestError
from tectum.media.policy import MediaPolicy, Target, check_address, parse_target

_REDIRECTS = {301, 302, 303, 307, 308}
#: names that are resolved at once; a resolver that hangs must not take threads from anything but other fetches
_RESOLVERS = 16


def _unbooked(nbytes: int) -> None: ...


class Fetcher:
    """Fetches URLs under one policy. An async context manager; `fetch` may run many times at once."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, "tectum-resolve")

    async def __aenter__(self) -> Fetcher:
        self._client = httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            # no keep-alive: connections are pooled by address, and two names behind one address must not share one
            limits=httpx2.Limits(max_connections=128, max_keepalive_connections=0),
            timeout=httpx2.Timeout(self._policy.fetch_timeout, connect=self._policy.connect_timeout),
        )
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))  # neither kept nor sent
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._client.aclose()

    async def fetch(self, url: str, book: Callable[[int], None] = _unbooked) -> bytes:
        """The body behind `url`. Cancelling it closes the connection. book: told of each piece's bytes; may raise.

        Raises BadRequestError: `url_refused` (also for where a redirect leads), `media_too_large` (413),
        `media_fetch_failed` or `media_fetch_timeout` (424: the fault lies with the other server).
        """
        try:
            async with asyncio.timeout(self._policy.fetch_timeout):
                return await self._follow(url, book)
        except (TimeoutError, httpx2.TimeoutException):
            text = f"Fetching the media took longer than {self._policy.fetch_timeout:g} s"
            raise BadRequestError("media_fetch_timeout", text) from None
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
            text = f"The media could not be fetched ({type(error).__name__})"
            raise BadRequestError("media_fetch_failed", text) from None

    async def _follow(self, url: str, book: Callable[[int], None]) -> bytes:
        for _ in range(self._policy.max_redirects + 1):
            target = parse_target(url, self._policy)
            found = await self._get(target, await self._resolve(target), book)
            if isinstance(found, bytes):
                return found
            url = urljoin(f"{target.scheme}://{target.origin}{target.path}", found)
        raise BadRequestError(
            "media_fetch_failed", f"The media URL redirects more than {self._policy.max_redirects} times"
        )

    async def _get(self, target: Target, addresses: list[str], book: Callable[[int], None]) -> bytes | str:
        """The body, or where a redirect leads; from the first address that takes the connection."""
        for address in addresses[:-1]:
            try:
                return await self._get_from(target, address, book)
            except httpx2.ConnectError:
                continue
        return await self._get_from(target, addresses[-1], book)

    async def _get_from(self, target: Target, address: str, book: Callable[[int], None]) -> bytes | str:
        async with self._client.stream(
            "GET",
            f"{target.scheme}://{_bracketed(address)}:{target.port}{target.path}",
            headers={"Host": target.origin, "Accept": "*/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": target.host},
        ) as response:
            location = response.headers.get("location")
            if response.status_code in _REDIRECTS and location:
                return str(location)
            return await self._body(response, book)

    async def _resolve(self, target: Target) -> list[str]:
        """Checked addresses. All of a name's must be allowed: a name may not mix public and private ones."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._resolvers, _look_up, target.host, target.port)
        except OSError:
            raise BadRequestError("media_fetch_failed", "The host of the media URL cannot be resolved") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for address in addresses:
            check_address(address, self._policy)
        return addresses

    async def _body(self, response: httpx2.Response, book: Callable[[int], None]) -> bytes:
        if response.status_code != 200:
            text = f"The media's server answered with status {response.status_code}"
            raise BadRequestError("media_fetch_failed", text, remote_status=response.status_code)
        cap = self._policy.max_media_bytes
        declared = response.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > cap:
            raise too_large(cap)
        body = bytearray()
        async for chunk in response.aiter_raw():
            book(len(chunk))
            body += chunk
            if len(body) > cap:
                raise too_large(cap)
        return bytes(body)


def _look_up(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def too_large(cap: int) -> BadRequestError:
    return BadRequestError("media_too_large", f"The media is larger than {cap} bytes (--max-media-bytes)", limit=cap)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
