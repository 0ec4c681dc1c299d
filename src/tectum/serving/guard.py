"""What stands before every route: who may come in, and how much of a body, how fast. Plain ASGI, so that it costs little.

Nothing of a body is read before its request is admitted. From then on every byte is booked against one budget for all bodies
until the request is answered, and the body has to keep up a least rate.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tectum.config import Settings, is_loopback
from tectum.errors import BadRequestError, StartupError, TectumError, UnavailableError
from tectum.observe import trace
from tectum.serving import tenants
from tectum.serving.connection import ABORT
from tectum.serving.presence import CallerGoneError
from tectum.serving.problems import problem_response

log = logging.getLogger("tectum.http")

#: paths that answer without a token: probes need no secret, and an error's page and the live page's files are the same
#: for everybody (`/` answers 401 with the page, which asks for the token)
OPEN_PATHS = frozenset({"/", "/health", "/health_generate", "/health/live", "/health/ready", "/health/progress"})
OPEN_PREFIXES = ("/errors/", "/api/errors/", "/dashboard/static/")
#: seconds that the rest of a refused body is read and dropped, so that its sender gets to read why
LINGER = 2.0
#: characters of a tenant's name that are read of a header
MAX_TENANT = 256
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Tokens:
    """The bearer tokens of a file: a line `TOKEN` or `TOKEN TENANT` each, so that two are valid while callers change over.

    The file is looked at again with every request and read when it changed; while it is missing or empty, the tokens read
    last stay in force. Raises StartupError `invalid_settings` when there is none at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        try:
            self._tokens = self._read()
        except (OSError, UnicodeDecodeError):
            raise StartupError("invalid_settings", f"token_file: {path} cannot be read") from None
        if not self._tokens:
            raise StartupError("invalid_settings", f"token_file: {path} holds no token")

    def accept(self, authorization: bytes) -> bool:
        """Whether an Authorization header carries one of the tokens."""
        return self.tenant_of(authorization) is not None

    def tenant_of(self, authorization: bytes) -> str | None:
        """The tenant that the token of an Authorization header belongs to, or empty; None when there is no such token.

        Takes as long for a wrong one as for a right one.
        """
        self._reload()
        given = _given_token(authorization)
        found = None
        for token, tenant in self._tokens:
            found = tenant if hmac.compare_digest(given, token) else found
        return found

    def _reload(self) -> None:
        stamp = self._look()
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if tokens := self._read():
                self._tokens = tokens
                log.info("the token file changed: %d token(s) are valid now", len(tokens))
                return
        log.warning("the token file cannot be read or is empty; the tokens read last stay valid")

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[tuple[bytes, str]]:
        parts = [line.split(maxsplit=1) for line in self._path.read_text().splitlines()]
        return [(part[0].encode(), "".join(part[1:]).strip()) for part in parts if part]


def _given_token(authorization: bytes) -> bytes:
    """The token of a bearer header, or the password of a basic one: what HTTP clients make of `http://any:TOKEN@host`."""
    scheme, _, credentials = authorization.partition(b" ")
    kind = scheme.lower()
    if kind == b"bearer":
        return credentials
    if kind == b"basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
    return b""


@dataclass(slots=True)
class BodyBudget:
    """The bytes of all bodies that are held now, and the most there may be. refused: hears of what is not let in."""

    limit: int
    refused: Callable[[TectumError], None]
    held: int = 0

    def check(self, more: int) -> None:
        """Raises UnavailableError `overloaded` when `more` bytes do not fit."""
        if self.held + more > self.limit:
            text = f"The encoder is full: {self.held} bytes of request bodies (limit {self.limit})"
            raise UnavailableError("overloaded", text, retry_after=1.0)

    @contextlib.contextmanager
    def booked(self, size: int) -> Iterator[None]:
        """Holds a body of `size` bytes that came whole, as long as the block runs. Raises UnavailableError `overloaded`."""
        try:
            self.check(size)
        except TectumError as refusal:
            self.refused(refusal)
            raise
        self.held += size
        try:
            yield
        finally:
            self.held -= size


class Upload:
    """One request's body on its way in: its bytes are counted, booked and timed. A context manager: it gives them back.

    coming: whether there is a body at all. `receive` and `send` stand before those of ASGI.
    """

    def __init__(self, coming: bool, receive: Receive, send: Send, budget: BodyBudget, settings: Settings) -> None:
        self._receive = receive
        self._send = send
        self._budget = budget
        self._settings = settings
        self._started = asyncio.get_running_loop().time()
        self._size = 0
        self._ended = not coming

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *exc: object) -> None:
        self._budget.held -= self._size

    async def receive(self) -> Message:
        """Raises BadRequestError `body_too_large` or `request_timeout`, or UnavailableError `overloaded`."""
        if self._ended:
            return await self._receive()  # whoever asks now wants to hear of a hang-up
        grace, rate = self._settings.body_grace, self._settings.min_body_rate
        try:
            async with asyncio.timeout_at(self._started + grace + self._size / rate):
                message = await self._receive()
        except TimeoutError:
            text = f"The body is slower than {rate} bytes a second (after {grace:g} s)"
            raise BadRequestError("request_timeout", text) from None
        more = len(message.get("body", b""))
        check_size(self._size + more, self._settings.max_body_bytes)
        self._budget.check(more)
        self._budget.held += more
        self._size += more
        self._ended = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """An answer that comes before the body has ended is the connection's last: the rest of it will not be parsed."""
        if self._ended:
            await self._send(message)
        elif message["type"] == "http.response.start":
            head = [(name, value) for name, value in message.get("headers", []) if name.lower() != b"connection"]
            await self._send({**message, "headers": [*head, (b"connection", b"close")]})
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            await self._linger()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        """Closing at once would reset the connection, and the caller might lose the answer while it still sends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while (await self._receive()).get("more_body", False):
                    pass


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise BadRequestError("body_too_large", f"The body is larger than {limit} bytes")


def _as_problem(path: str, error: TectumError) -> Response:
    return problem_response(error)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


class Guard:
    """Refuses requests without a token (401), and bodies that are too large (413), too many (503) or too slow (408).

    hung_up: hears of each caller that left, or stopped reading, before it was answered.
    refuse: makes the answer to a refused request, from its path and the error. is_open: paths that need no token.
    with_body: methods that may bring a body.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        tokens: Tokens | None,
        budget: BodyBudget,
        hung_up: Callable[[], None],
        refuse: Callable[[str, TectumError], Response] = _as_problem,
        is_open: Callable[[str], bool] = _is_open,
        with_body: frozenset[str] = _WITH_BODY,
    ) -> None:
        self.app = app
        self._is_open = is_open
        self._with_body = with_body
        self._settings = settings
        self._tokens = tokens
        self._budget = budget
        self._hung_up = hung_up
        self._refuse = refuse
        # a page whose name was made to lead here (DNS rebinding) is of the same site to its browser: only Host tells
        self._answers_this_host_alone = tokens is None and is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        declared = int(length) if length.isdigit() else 0
        coming = declared > 0 or b"transfer-encoding" in headers
        with Upload(coming, receive, send, self._budget, self._settings) as upload:
            try:
                self._admit(scope, headers, coming, declared)
            except TectumError as refusal:
                self._budget.refused(refusal)
                await self._refuse(scope["path"], refusal)(scope, upload.receive, upload.send)
                return
            try:
                await self.app(scope, upload.receive, upload.send)
            except CallerGoneError:
                log.debug("a caller hung up, or stopped reading, before it was answered")
                self._hung_up()
                scope.get("extensions", {}).get(ABORT, {}).get("call", _nothing)()

    def _admit(self, scope: Scope, headers: dict[bytes, bytes], coming: bool, declared: int) -> None:
        """Raises TectumError for a request that is not let in. Looks at its headers alone."""
        if not self._is_open(scope["path"]):  # those a link of any site may lead to
            self._check_caller(headers)
        if coming and scope["method"] not in self._with_body:
            raise BadRequestError("invalid_request", f"A {scope['method'][:20]} request takes no body")
        if coming and b"upgrade" in headers and b"upgrade" in headers.get(b"connection", b"").lower():
            # the parser skips the body of such a request; some clients (Java's, by default) ask it of every call
            raise BadRequestError("invalid_request", "No other protocol is spoken here: send the body without Upgrade")
        plain = headers.get(b"content-encoding", b"identity").lower() == b"identity"
        if not plain or headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            text = "Compressed bodies are not taken: send it without Content-Encoding, and chunked at most"
            raise BadRequestError("invalid_request", text)
        check_size(declared, self._settings.max_body_bytes)
        self._budget.check(declared)

    def _check_caller(self, headers: dict[bytes, bytes]) -> None:
        """Who calls, and on whose behalf. Raises BadRequestError: `unauthorized`, or `cross_site` where there are no tokens."""
        tenant = ""
        if self._tokens is not None:
            found = self._tokens.tenant_of(headers.get(b"authorization", b""))
            if found is None:
                raise BadRequestError("unauthorized", "A bearer token is needed: Authorization: Bearer …")
            tenant = found
        elif _from_another_site(headers):
            text = "A page of another site sent this; a server without a token answers no other site's pages"
            raise BadRequestError("cross_site", text)
        elif self._answers_this_host_alone and not _names_this_host(headers.get(b"host", b""), self._settings):
            text = "The Host header is no name of this host: name it in --allowed-hosts, or give the server a token"
            raise BadRequestError("cross_site", text)
        tenants.of_caller.set(tenant or named_by_proxy(headers, self._settings))


def named_by_proxy(headers: Mapping[bytes, bytes], settings: Settings) -> str:
    """The tenant that a trusted proxy names in a call's headers, or empty. Their names are lower case."""
    name = settings.tenant_header
    return headers.get(name.lower().encode(), b"").decode("latin-1")[:MAX_TENANT] if name else ""


def _names_this_host(host: bytes, settings: Settings) -> bool:
    """Whether a Host header, where there is one, holds a loopback name or address, or a name that the settings allow."""
    if not host:
        return True
    try:
        name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name.endswith(".localhost") or name in settings.allowed_host_names


def _from_another_site(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser says that a page from elsewhere made the request: any page can reach a loopback address."""
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return True
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        return not is_loopback(urlsplit(origin.decode("latin-1")).hostname or "")
    except ValueError:
        return True


def _nothing() -> None:
    pass


class TraceCaller:
    """Notes the trace that a call belongs to (its `traceparent`), for whoever makes spans, or calls others, in serving it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            trace.caller.set(trace.carried(scope["headers"]))  # a call is served in a context of its own
        await self.app(scope, receive, send)
