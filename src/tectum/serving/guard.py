"""What stands before every route: the bearer token and the cap on a body. Plain ASGI, so that it costs little."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tectum.errors import BadRequestError, StartupError
from tectum.serving.problems import problem_response

#: paths that answer without a token: probes need no secret, and an error's page and the live page's files are the same
#: for everybody (`/` answers 401 with the page, which asks for the token)
OPEN_PATHS = frozenset({"/", "/health/live", "/health/ready", "/health/progress"})
OPEN_PREFIXES = ("/errors/", "/api/errors/", "/dashboard/static/")


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


class Guard:
    """Refuses requests without the token (401) and bodies above the cap (413), before a route sees them."""

    def __init__(self, app: ASGIApp, *, token: bytes | None, max_body_bytes: int) -> None:
        self.app = app
        self._expected = None if token is None else b"Bearer " + token
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected is not None and not _is_open(scope["path"]):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = BadRequestError("unauthorized", "A bearer token is needed: Authorization: Bearer …")
                await problem_response(error)(scope, receive, send)
                return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            await problem_response(self._too_large())(scope, receive, send)
            return
        await self.app(scope, self._capped(receive), send)

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
