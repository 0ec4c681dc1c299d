"""`tectum gateway`: OpenAI chat requests in, media to the encoders, everything else to the engine. For vLLM.

Each picture, clip and recording is encoded and held by an encoder; the engine gets the request with metadata in its place (what
its placeholders are counted by, and a uuid that is the content key), and says so in `ec_transfer_params`, so that
`tectum.engines.vllm` finds the rows. Requests without media, and every other path, pass through untouched.

Owns the two hops of one request: what was held for it is given back when it ends, however it ends. It decodes no media; the
request's JSON is `chat.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import msgspec
from msgspec import Raw
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tectum.config import Settings, is_loopback
from tectum.engines.address import server_url
from tectum.engines.tls import HUNG_UP, bearer_token, client_context, handshake_failure, papers
from tectum.errors import BadRequestError, InternalError, StartupError, TectumError, UnavailableError
from tectum.observe import logs, trace
from tectum.serving.chat import Chat, Held, Medium, form_of, is_in_utf8
from tectum.serving.connection import ConnectionLimits
from tectum.serving.guard import BodyBudget, Guard, Tokens, TraceCaller
from tectum.serving.listen import http_within, nobody, serve_until_signal
from tectum.serving.presence import body_pieces
from tectum.serving.problems import error_headers

T = TypeVar("T")
log = logging.getLogger("tectum.gateway")

CHAT = "/v1/chat/completions"
#: bodies above this many bytes are taken apart in a thread
IN_THREAD = 512 * 1024
#: seconds that running requests have to end after SIGTERM
GRACE = 60
#: seconds that the engine and the encoders have to say that they are ready
PROBE_TIMEOUT = 5.0
#: what a body must hold, in some way, to hold media
_MARKS = (b"image", b"video", b"audio", b"\\u")  # the last begins an escape, which may spell any of them
#: headers that belong to one hop, and those that are made anew for the next
_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host", b"content-length"}
)
#: paths that need no token: probes
_OPEN = frozenset({"/health/live", "/health/ready"})
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=50.0)


@dataclass(frozen=True)
class GatewaySettings:
    """encoders, engine: `http(s)://host:port`. Token files hold one token on their first line: the one that callers must
    send, and those that the encoders and the engine want (without the latter the caller's own passes on). ca_file, cert_file,
    key_file: for those of them that are https: whose certificates are believed, and the one that is shown.

    Raises StartupError `invalid_settings`.
    """

    encoders: tuple[str, ...]
    engine: str
    host: str = "127.0.0.1"
    port: int = 30200
    token_file: Path | None = None
    encoder_token_file: Path | None = None
    engine_token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    max_body_bytes: int = 64 * 1024 * 1024
    encode_timeout: float = 120.0

    def __post_init__(self) -> None:
        if not self.encoders:
            raise StartupError("invalid_settings", "encoders: give at least one")
        for url in self.encoders:
            server_url(url, "encoders (one each time)")
        server_url(self.engine, "engine")
        if not is_loopback(self.host) and self.token_file is None:
            text = f"host {self.host} is reachable from outside: give --token-file, or listen on 127.0.0.1"
            raise StartupError("invalid_settings", text)
        papers(self.ca_file, self.cert_file, self.key_file)

    def context(self) -> ssl.SSLContext | None:
        """For whoever is https among the encoders and the engine; None where nobody is.

        Raises StartupError `invalid_settings` for files that cannot be used, or that nobody is there for.
        """
        urls = (*self.encoders, self.engine)
        secure = next((url for url in urls if _is_https(url)), self.engine)
        return client_context(secure, *papers(self.ca_file, self.cert_file, self.key_file))


# --- the encoders ---


class Encoders:
    """Several encoders. The same content goes to the same one as long as it is there; when it is not, to the next."""

    def __init__(
        self, urls: Sequence[str], token: str | None, timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._clients = {
            url.rstrip("/"): httpx2.AsyncClient(
                base_url=url.rstrip("/"),
                headers=headers,
                verify=tls or True,
                timeout=httpx2.Timeout(timeout, connect=5.0),
                limits=_LIMITS,
                trust_env=False,
            )
            for url in urls
        }
        self._families: dict[str, str] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def holding(
        self, media: Sequence[Medium], options: Mapping[str, Any], tenant: str
    ) -> AsyncIterator[list[Held]]:
        """Rows of all media, held inside the block. Raises the first error, with the index of its medium."""
        tickets = [_Ticket(uuid.uuid4().hex, index) for index in range(len(media))]
        try:
            encodes = (self._encode(ticket, each, options, tenant) for ticket, each in zip(tickets, media, strict=True))
            yield await _all(encodes)
        finally:
            self._release(tickets)

    async def _encode(self, ticket: _Ticket, medium: Medium, options: Mapping[str, Any], tenant: str) -> Held:
        """On the encoder that this content prefers, or, where that one cannot, on the next."""
        body = msgspec.json.encode(
            {
                "req_id": ticket.req_id,
                "items": [{"type": medium.modality, medium.source: medium.text}],
                "options": options,
                "delivery": {"mode": "hold"},
                "tenant": tenant,
                "content_keys": True,
            }
        )
        failure: TectumError | None = None
        for encoder in self._preferred(medium.text):
            ticket.asked.append(encoder)
            try:
                form = form_of(await self._family(encoder), medium.modality)
                return _held(encoder, medium.modality, form, await self._post(encoder, body))
            except UnavailableError as error:
                log.warning("an encoder cannot take a medium: %s", error)
                self._families.pop(encoder, None)  # when it is back it may serve another model
                failure = error
            except TectumError as error:
                error.item = ticket.index
                raise
        assert failure is not None, "there is at least one encoder"
        raise failure

    async def _family(self, encoder: str) -> str:
        """The family of the model that an encoder serves: asked for once."""
        if encoder not in self._families:
            answer = await self._ask(encoder, "GET", "/v1/models")
            try:
                self._families[encoder] = str(answer["data"][0]["family"])
            except (KeyError, IndexError, TypeError):
                raise UnavailableError("server_unreachable", "An encoder does not say what it serves") from None
        return self._families[encoder]

    async def _post(self, encoder: str, body: bytes) -> dict[str, Any]:
        trace_of_caller = {name: value.encode("latin-1") for name, value in (trace.caller.get() or {}).items()}
        headers = [("content-type", b"application/json"), *trace_of_caller.items()]
        return await self._ask(encoder, "POST", "/v1/encode", content=body, headers=headers)

    async def _ask(self, encoder: str, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            answer = await self._clients[encoder].request(method, path, **more)
        except httpx2.TransportError as error:
            text = f"No encoder answered ({_note(error, 'an encoder', encoder)})"
            raise UnavailableError("server_unreachable", text, retry_after=1.0) from None
        if not answer.is_success:
            after = answer.headers.get("retry-after", "")
            raise TectumError.from_answer(answer.status_code, answer.content, after, "An encoder")
        try:
            return dict(answer.json())
        except (ValueError, TypeError):
            raise UnavailableError("server_unreachable", "An encoder gave an answer that is not JSON") from None

    def _preferred(self, url: Raw) -> list[str]:
        """Rendezvous hashing: a content's order of encoders moves as little as possible when one comes or goes.

        Both ends and the length of its URL stand for the content: contents that share them merely share their order.
        """
        view = memoryview(url)
        content = b"%d:" % len(view) + bytes(view[:4096]) + bytes(view[-4096:])
        return sorted(
            self._clients, key=lambda encoder: blake2b(content + encoder.encode(), digest_size=8).digest(), reverse=True
        )

    def _release(self, tickets: Sequence[_Ticket]) -> None:
        """Give back what may still be held, without keeping anybody waiting. Pulled rows are given back already."""
        for ticket in tickets:
            for encoder in ticket.asked:
                task = asyncio.ensure_future(self._delete(encoder, ticket.req_id))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def _delete(self, encoder: str, req_id: str) -> None:
        try:
            await self._clients[encoder].delete(f"/v1/requests/{req_id}")
        except httpx2.TransportError:
            pass  # the encoder is gone, and what it held with it; otherwise its time to live ends the hold

    async def ready(self) -> bool:
        """Whether some encoder is up and well. They may all be full at this moment: text needs none of them."""
        probes = (_is_ready(client, "/health", "an encoder", url) for url, client in self._clients.items())
        return any(await asyncio.gather(*probes))

    async def aclose(self) -> None:
        await asyncio.gather(*self._releasing, return_exceptions=True)
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))


@dataclass(slots=True)
class _Ticket:
    """One medium's request at the encoders. asked: those that may hold something for it."""

    req_id: str
    index: int
    asked: list[str] = field(default_factory=list)


def _held(
    encoder: str,
    modality: str,
    form: Callable[[Mapping[str, Any]], dict[str, Any]],
    metadata: Mapping[str, Any],
) -> Held:
    try:
        (key,), (item,) = metadata["content_keys"], metadata["items"]
        return Held(encoder, str(metadata["req_id"]), str(key), modality, form(item))
    except (KeyError, TypeError, ValueError):
        raise InternalError("internal", "The encoder's answer has no content key, or lacks facts of its item") from None


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order; when one fails or the caller is cancelled, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the gateway itself ---


class Gateway:
    """The ASGI application; `create_app` puts the guard before it."""

    def __init__(self, settings: GatewaySettings) -> None:
        encoder_token = bearer_token(settings.encoder_token_file)
        engine_token = bearer_token(settings.engine_token_file)
        tls = settings.context()
        self._encoders = Encoders(settings.encoders, encoder_token, settings.encode_timeout, tls)
        self._engine_auth = None if engine_token is None else f"Bearer {engine_token}".encode()
        self._engine_url = settings.engine.rstrip("/")
        self._engine = httpx2.AsyncClient(
            base_url=self._engine_url,
            verify=tls or True,
            timeout=httpx2.Timeout(None, connect=5.0),
            limits=_LIMITS,
            trust_env=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                await self._http(scope, receive, send)
            except TectumError as error:  # raised before anything was answered
                await _openai_error(error)(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health/live":
            await JSONResponse({"status": "live"})(scope, receive, send)
            return
        async with aclosing(body_pieces(receive)) as pieces:
            body = b"".join([piece async for piece in pieces])
        probe = scope["path"] == "/health/ready"
        work = asyncio.ensure_future(self._ready(scope, receive, send) if probe else self._serve(scope, body, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # a caller that hung up cancels the work on both sides; when the work is done this does nothing
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})
        if not work.cancelled():
            work.result()

    async def _serve(self, scope: Scope, body: bytes, send: Send) -> None:
        _check_path(scope["path"])
        chat, asks = None, scope["path"] == CHAT and scope["method"] == "POST"
        if asks and not is_in_utf8(body):
            raise BadRequestError("invalid_request", "The request is not a JSON object in UTF-8")
        if asks and any(mark in body for mark in _MARKS):
            chat = Chat.read(body) if len(body) < IN_THREAD else await asyncio.to_thread(Chat.read, body)
        if chat is None:
            await self._forward(scope, body, send)
            return
        async with self._encoders.holding(chat.media, chat.options(), _tenant(scope)) as held:
            await self._forward(scope, chat.rewritten(held), send)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """The request to the engine, its answer back as it comes: status, headers and bytes."""
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP]
        if self._engine_auth is not None:
            headers = [(name, value) for name, value in headers if name != b"authorization"]
            headers.append((b"authorization", self._engine_auth))
        target = scope.get("raw_path", scope["path"].encode()) + (
            b"?" + scope["query_string"] if scope["query_string"] else b""
        )
        request = self._engine.build_request(
            scope["method"], target.decode("latin-1"), headers=headers, content=body or None
        )
        try:
            answer = await self._engine.send(request, stream=True)
        except httpx2.TransportError as error:
            text = f"The engine did not answer ({_note(error, 'the engine', self._engine_url)})"
            raise UnavailableError("server_unreachable", text, retry_after=1.0) from None
        try:
            kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOP]
            if (length := answer.headers.get("content-length")) is not None:
                kept.append((b"content-length", length.encode()))
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx2.TransportError as error:
            # the head has left: the caller learns it from a connection that ends early
            log.warning("the engine's answer broke off: %s", type(error).__name__)
        finally:
            await answer.aclose()

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await _is_ready(self._engine, "/health", "the engine", self._engine_url):
            raise UnavailableError("server_unreachable", "The engine is not ready", retry_after=1.0)
        if not await self._encoders.ready():
            raise UnavailableError("server_unreachable", "No encoder is ready", retry_after=1.0)
        await JSONResponse({"status": "ready"})(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self._encoders.aclose()
                await self._engine.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return


def create_app(settings: GatewaySettings) -> ASGIApp:
    """The gateway behind its guard. Raises StartupError when a token file cannot be read."""
    door = _door(settings)
    return Guard(
        TraceCaller(Gateway(settings)),
        settings=door,
        tokens=None if settings.token_file is None else Tokens(settings.token_file),
        budget=BodyBudget(door.max_bodies_bytes, nobody),
        hung_up=nobody,
        refuse=lambda path, error: _openai_error(error),
        is_open=_OPEN.__contains__,
    )


def _door(settings: GatewaySettings) -> Settings:
    """The limits of an encoder's door, by their defaults: what the environment says is for encoders."""
    return Settings.model_construct(
        host=settings.host,
        token_file=settings.token_file,
        max_body_bytes=settings.max_body_bytes,
        max_bodies_bytes=max(8 * settings.max_body_bytes, Settings.model_fields["max_bodies_bytes"].default),
    )


def run(settings: GatewaySettings) -> int:
    """Serve until SIGTERM or SIGINT; running requests get `GRACE` seconds to finish. Raises StartupError."""
    logs.configure("info")
    door = _door(settings)
    limits = ConnectionLimits(door.max_connections, door.max_head_bytes, door.head_timeout, door.send_timeout)
    config = http_within(limits, create_app(settings), timeout_graceful_shutdown=GRACE)
    serve_until_signal(config, settings.host, settings.port, "ready")
    return 0


def _check_path(path: str) -> None:
    """Raises BadRequestError for a path that would lead elsewhere once it is normalised: to chat, say, past this gateway."""
    if any(segment in ("", ".", "..") for segment in path.split("/")[1:-1]) or path.endswith(("/.", "/..")):
        raise BadRequestError("invalid_request", "A path with empty or dotted segments is not passed on")


def _is_https(url: str) -> bool:
    return url.startswith("https://")


async def _is_ready(client: httpx2.AsyncClient, path: str, who: str, url: str) -> bool:
    """Whether a probe is answered well, and soon. The answer's head says it; what follows is not read."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT), client.stream("GET", path) as answer:
            return answer.is_success
    except TimeoutError:
        return False
    except httpx2.TransportError as error:
        _note(error, who, url)  # where it is TLS, the log has to say so
        return False


def _note(error: httpx2.TransportError, who: str, url: str) -> str:
    """Log what TLS has, or may have, to do with a failure; returns its kind, as callers are told it.

    They are not told the reason: it names hosts, and it is the operator who can mend it.
    """
    reason = handshake_failure(error)
    hung_up = isinstance(error, (httpx2.RemoteProtocolError, httpx2.ReadError))
    if reason is not None:
        log.warning("no TLS with %s at %s: %s", who, _netloc(url), reason)
    elif hung_up and _is_https(url):
        log.warning("no answer from %s at %s: %s", who, _netloc(url), HUNG_UP)
    return type(error).__name__ if reason is None else "TLS failed, the gateway's log says why"


def _netloc(url: str) -> str:
    """Host and port, without the credentials that a URL may hold."""
    return httpx2.URL(url).netloc.decode("ascii")


def _openai_error(error: TectumError) -> JSONResponse:
    """The error in the form that OpenAI's clients read. Its status is the one it was raised with, wherever that was."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    about: dict[str, Any] = {"message": error.message, "type": kind, "param": None, "code": error.code}
    if error.item is not None:
        about["item"] = error.item
    return JSONResponse({"error": about}, error.status, error_headers(error))


def _tenant(scope: Scope) -> str:
    """Callers with different credentials never share rows. The credential itself goes nowhere."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    return blake2b(given, digest_size=16).hexdigest() if given else ""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
