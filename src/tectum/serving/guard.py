"""What stands before every route: the bearer token and the cap on a body. Plain ASGI, so that it costs little."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tectum.errors import BadRequestError, StartupError, TectumError
from tectum.serving.problems import problem_response

#: paths that answer without a token: probes need no secret, and an error's page is the same for everybody
OPEN_PATHS = frozenset({"/health", "/health_generate", "/health/live", "/health/ready", "/health/progress"})
OPEN_PREFIXES = ("/errors/", "/api/errors/")


def read_token(path: Path | None) -> bytes | None:
    """The first line of the token file. Raises StartupError `invalid_settings` when there is none."""
    if path is None:
        return None
    try:
        token = path.read_text().splitlines()[0].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        raise StartupError("invalid_settings", f"token_file: {path} cannot be read or is empty") from None
    if not token:
        raise StartupError("invalid_settings", f"token_file: the first line of {path} is empty")
    return token.encode()


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def _given_token(headers: dict[bytes, bytes]) -> bytes:
    """The token in a bearer header, or the password of a basic one: what an HTTP client makes of `http://any:TOKEN@host`."""
    kind, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return credentials
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


class Guard:
    """Refuses requests without the token (401) and bodies above the cap (413), before a route sees them.

    refuse: makes the answer to a refused request, from its path and the error.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: bytes | None,
        max_body_bytes: int,
        refuse: Callable[[str, TectumError], Response] = lambda path, error: problem_response(error),
    ) -> None:
        self.app = app
        self._token = token
        self._max_body = max_body_bytes
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._may_pass(scope["path"], headers):
            error = BadRequestError("unauthorized", "A bearer token is needed: Authorization: Bearer …")
            await self._refuse(scope["path"], error)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            await self._refuse(scope["path"], self._too_large())(scope, receive, send)
            return
        await self.app(scope, self._capped(receive), send)

    def _may_pass(self, path: str, headers: dict[bytes, bytes]) -> bool:
        return self._token is None or _is_open(path) or hmac.compare_digest(_given_token(headers), self._token)

    def _capped(self, receive: Receive) -> Receive:
        """A body without a declared length is counted as it comes."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> BadRequestError:
        return BadRequestError("body_too_large", f"The body is larger than --max-body-bytes {self._max_body}")
