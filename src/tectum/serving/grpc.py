"""SGLang's gRPC door: the `sglang.grpc.encoder.SglangEncoder` service, with the standard health and reflection services.

The same doors as over HTTP, behind other messages. Every error of Tectum's has its gRPC status; its text is the
status's, and the whole of it travels in the trailing metadata `tectum-problem-bin` (JSON, as over HTTP), from which
`TectumError.from_problem` makes it again.

A message is read when its call was admitted, not before: few at a time, booked against the one budget of all bodies until
its call ends. What waits unread is bounded by HTTP/2's windows.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tectum.config import Settings
from tectum.errors import BadRequestError, InternalError, StartupError, TectumError, UnavailableError
from tectum.observe import trace
from tectum.serving import tenants
from tectum.serving.bodies import check_count, convert
from tectum.serving.guard import BodyBudget, Tokens, named_by_proxy
from tectum.serving.health import Health
from tectum.serving.listen import bracketed
from tectum.serving.sglang import Doors, EncodeBody, RegisterBody, SendBody, sizes
from tectum.serving.sglang_pb import sglang_encoder_pb2 as messages

log = logging.getLogger("tectum.grpc")

SERVICE = "sglang.grpc.encoder.SglangEncoder"
#: seconds between two looks at the health that a `Watch` follows
WATCH_INTERVAL = 1.0
#: seconds that calls in flight may take when the server stops: the pipeline was drained before
STOP_GRACE = 1.0
#: how a `data:` URI begins that holds no picture
_NAMED = frozenset({"data:video/", "data:audio/"})
Context: TypeAlias = Any  # grpc.aio.ServicerContext: grpcio comes without types


class Encoder:
    """The three calls. The message of `Encode` has no modality; its items are pictures, unless their `data:` URIs say else."""

    def __init__(self, doors: Doors, settings: Settings, budget: BodyBudget) -> None:
        self._doors = doors
        self._settings = settings
        self._admission = _Admission(settings, budget)

    async def encode(self, body: EncodeBody) -> messages.EncodeResponse:
        """Answers with the sizes when every receiver has its rows."""
        found = sizes(await self._doors.encode(body))
        return messages.EncodeResponse(
            **{name: found[name] for name in messages.EncodeResponse.DESCRIPTOR.fields_by_name}
        )

    async def send(self, body: SendBody) -> messages.SendResponse:
        """The rows are kept until as many receivers had them as `SchedulerReceiveUrl` announced."""
        await self._doors.send(body.req_id, body.target(), 0)
        return messages.SendResponse()

    async def scheduler_receive_url(self, body: RegisterBody) -> messages.SchedulerReceiveUrlResponse:
        await self._doors.register(body.req_id, body.receive_url, body.receive_count)
        return messages.SchedulerReceiveUrlResponse()

    def handlers(self) -> grpc.GenericRpcHandler:
        calls: Mapping[str, tuple[Callable[[Any], Awaitable[Any]], Callable[[bytes], Any]]] = {
            "Encode": (self.encode, partial(_encode_body, settings=self._settings)),
            "Send": (self.send, _send_body),
            "SchedulerReceiveUrl": (self.scheduler_receive_url, _register_body),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                # on the wire a stream of one message is a message; but here it is read when the handler asks for it
                name: grpc.stream_unary_rpc_method_handler(
                    _reporting(call, read, self._admission), response_serializer=_serialized
                )
                for name, (call, read) in calls.items()
            },
        )


def _encode_body(raw: bytes, settings: Settings) -> EncodeBody:
    """What the message of `Encode` holds. The message itself is dropped, so that media are in memory once.

    Raises BadRequestError `invalid_request`, `request_too_large` or `unsupported_modality`.
    """
    asked = messages.EncodeRequest.FromString(raw)
    check_count(len(asked.mm_items), settings)  # counting them is cheap, looking at millions is not
    items = list(asked.mm_items)
    return convert(
        EncodeBody,
        {
            "req_id": asked.req_id,
            "mm_items": items,
            "modality": _modality(items),
            "num_parts": asked.num_parts,
            "part_idx": asked.part_idx,
            "prefill_host": asked.prefill_host or None,
            "embedding_port": list(asked.embedding_port) or None,
        },
    )


def _send_body(raw: bytes) -> SendBody:
    """What the message of `Send` holds. Raises BadRequestError `invalid_request`."""
    asked = messages.SendRequest.FromString(raw)
    return convert(
        SendBody,
        {
            "req_id": asked.req_id,
            "prefill_host": asked.prefill_host,
            "embedding_port": asked.embedding_port,
            "session_id": asked.session_id or None,
            "buffer_address": asked.buffer_address or None,
        },
    )


def _register_body(raw: bytes) -> RegisterBody:
    """What the message of `SchedulerReceiveUrl` holds. Raises BadRequestError `invalid_request`."""
    asked = messages.SchedulerReceiveUrlRequest.FromString(raw)
    count = max(asked.receive_count, 1)
    return convert(RegisterBody, {"req_id": asked.req_id, "receive_url": asked.receive_url, "receive_count": count})


def _modality(items: Sequence[str]) -> str:
    """What all `items` are. Raises BadRequestError `unsupported_modality` for a message that cannot say it."""
    named = {item[5:10].upper() if item[:11].lower() in _NAMED else "IMAGE" for item in items}
    if len(named) > 1:
        text = "gRPC encode only supports IMAGE modality; clips or recordings come alone, in data: URIs of their type"
        raise BadRequestError("unsupported_modality", text)
    return named.pop() if named else "IMAGE"


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class _Admission:
    """How many calls there are at once, how many of them read their message, and the bytes of all messages.

    gRPC hands out a message whole, and says nothing of its size before. So at most as many are read at once as would fit the
    budget if each was the largest: what is on its way takes up to --max-bodies-bytes beside what is booked.
    """

    def __init__(self, settings: Settings, budget: BodyBudget) -> None:
        self.budget = budget
        self._most = settings.max_connections
        self._grace = settings.body_grace
        self._patience = settings.body_grace + settings.max_body_bytes / settings.min_body_rate
        self._readers = asyncio.Semaphore(settings.max_bodies_bytes // settings.max_body_bytes)
        self._calls = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call, from its start to its end. Raises UnavailableError `overloaded`."""
        if self._calls >= self._most:
            raise self._refused(
                UnavailableError("overloaded", "The encoder is full: too many gRPC calls at once", retry_after=1.0)
            )
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def read(self, context: Context) -> bytes:
        """The call's message. Raises UnavailableError `overloaded`, BadRequestError `request_timeout` or `invalid_request`."""
        try:
            async with asyncio.timeout(self._grace):
                await self._readers.acquire()
        except TimeoutError:
            text = "The encoder is full: too many gRPC messages on their way"
            raise self._refused(UnavailableError("overloaded", text, retry_after=1.0)) from None
        try:
            async with asyncio.timeout(self._patience):
                message = await context.read()
        except TimeoutError:
            text = f"The message took longer than {self._patience:g} s (--body-grace and --min-body-rate)"
            raise self._refused(BadRequestError("request_timeout", text)) from None
        finally:
            self._readers.release()
        if message is grpc.aio.EOF:
            raise self._refused(BadRequestError("invalid_request", "The call came without a message"))
        return bytes(message)

    def understood(self, raw: bytes, read: Callable[[bytes], Any]) -> Any:
        """What `read` makes of a message. Raises BadRequestError for one that says nothing the call can do."""
        try:
            return read(raw)
        except DecodeError:
            text = "The message is none that this call takes"
            raise self._refused(BadRequestError("invalid_request", text)) from None
        except TectumError as error:
            raise self._refused(error) from None

    def _refused(self, error: TectumError) -> TectumError:
        self.budget.refused(error)
        return error


def _reporting(
    call: Callable[[Any], Awaitable[Any]], read: Callable[[bytes], Any], admission: _Admission
) -> Callable[[Any, Context], Awaitable[Any]]:
    """The call, admitted, with its failures turned into gRPC statuses. read: makes what it takes of a message."""

    async def admitted(context: Context) -> Any:
        with admission.call():
            raw = await admission.read(context)
            with admission.budget.booked(len(raw)):
                asked = admission.understood(raw, read)
                del raw
                return await call(asked)

    async def handle(_: Any, context: Context) -> Any:
        try:
            return await admitted(context)
        except TectumError as error:
            failure = error.bare()  # its traceback would keep the message
        except Exception as error:
            log.exception("a gRPC call failed")
            failure = InternalError("internal", f"Unexpected {type(error).__name__}; the server's log has more")
        return await _abort(context, failure)

    return handle


async def _abort(context: Context, error: TectumError) -> None:
    metadata = [("tectum-problem-bin", json.dumps(error.to_problem()).encode())]
    if error.retry_after is not None:
        metadata.append(("grpc-retry-pushback-ms", str(int(error.retry_after * 1000)).encode()))
    await context.abort(grpc.StatusCode[error.spec.grpc], error.message, tuple(metadata))


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1: the encoder's state at the moment of asking, for the server as a whole and for the encoder service."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:  # noqa: N802
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service here")
        return self._state(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        """The state, and each change of it."""
        last = None
        while True:
            state = self._state(request.service)
            if state != last:
                yield state
                last = state
            await asyncio.sleep(WATCH_INTERVAL)

    def _state(self, service: str) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        if service not in ("", SERVICE):
            return states(status=states.SERVICE_UNKNOWN)
        return states(status=states.SERVING if self._health.good() else states.NOT_SERVING)


class _Callers(grpc.aio.ServerInterceptor):
    """Refuses calls without a bearer token where there are some, health excepted, and notes of the others on whose behalf they
    come, and the trace that they belong to.
    """

    def __init__(self, settings: Settings, refused: Callable[[TectumError], None]) -> None:
        """refused: hears of each refusal. Raises StartupError `invalid_settings` for a token file that is none."""
        self._settings = settings
        self._tokens = None if settings.token_file is None else Tokens(settings.token_file)

        async def refuse(asked: Any, context: Context) -> None:
            error = BadRequestError("unauthorized", "A bearer token is needed: authorization: Bearer …")
            refused(error)
            await _abort(context, error)

        self._refusal = grpc.stream_unary_rpc_method_handler(refuse)  # of a stranger's message nothing is read

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(details)
        headers = {name.encode(): _as_bytes(value) for name, value in details.invocation_metadata}
        tenant: str | None = ""
        if self._tokens is not None:
            tenant = self._tokens.tenant_of(headers.get(b"authorization", b""))
        if tenant is None:
            return self._refusal
        tenants.of_caller.set(tenant or named_by_proxy(headers, self._settings))  # a call is a task of its own
        trace.caller.set(trace.carried(headers.items()))
        return await continuation(details)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _credentials(settings: Settings) -> Any:
    """The same papers as on the HTTP port, or None without TLS: a client's certificate stands for its token there, too."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    pair = settings.tls_key.read_bytes(), settings.tls_cert.read_bytes()
    authority = None if settings.tls_client_ca is None else settings.tls_client_ca.read_bytes()
    return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)


@asynccontextmanager
async def grpc_door(doors: Doors, health: Health, settings: Settings, budget: BodyBudget) -> AsyncIterator[int]:
    """The gRPC server, open on `--grpc-port`; yields the port. Raises StartupError `port_in_use`."""
    server = grpc.aio.server(
        interceptors=[_Callers(settings, budget.refused)],
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.bdp_probe", 0),  # a guess at the link's capacity would let each unread message fill megabytes
        ],
        maximum_concurrent_rpcs=2 * settings.max_connections,  # between the two, calls are told why they are refused
    )
    server.add_generic_rpc_handlers((Encoder(doors, settings, budget).handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(health), server)
    reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
    host = settings.host.strip("[]")
    address, credentials = f"{bracketed(host)}:{settings.grpc_port}", _credentials(settings)
    try:
        port = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError:
        text = f"Port {settings.grpc_port} on {host} is in use; give another --grpc-port"
        raise StartupError("port_in_use", text) from None
    await server.start()
    try:
        yield port
    finally:
        await server.stop(STOP_GRACE)
