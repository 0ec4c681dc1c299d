"""OpenTelemetry traces: one span a request, with a child for each step of its walk.

Owns the spans. The caller's `traceparent` becomes their parent; it never names a request, and two requests with the same
one have nothing to do with each other. What a step took is known when it ended, so its span is made then, with the times
that the pipeline measured. Needs `tectum[trace]`; off without a collector's address.

    tectum.request          accept → free; code and reason where it failed
      accept                reading the content's fingerprint, and admission
      fetch, prepare        URLs; decoding and preprocessing
      queue, forward        the wait for the encoder, and the encoder
      send                  each delivery of the rows, the answer to the caller among them
      release               from the outcome until nothing uses the request's memory
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tectum.errors import StartupError, TectumError
from tectum.observe.watcher import JobView, Watcher
from tectum.types import EncodeRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

#: `traceparent` and `tracestate` of the call that is served in this context; doors set it
caller: ContextVar[Mapping[str, str] | None] = ContextVar("tectum_trace_caller", default=None)
#: headers that carry a caller's trace (W3C Trace Context)
HEADERS = ("traceparent", "tracestate")
#: a longer one is left out: the standard asks for 512 characters of `tracestate`, and a gateway's next hop bounds its heads
LONGEST = 512
#: seconds that the last spans may take to leave
PATIENCE = 3.0
_ENVIRONMENT = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def carried(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The caller's trace among a call's headers (names in lower case), as `caller` holds it."""
    names = {name.encode(): name for name in HEADERS}
    return {names[key]: value.decode("latin-1") for key, value in headers if key in names and len(value) <= LONGEST}


def wanted(endpoint: str | None) -> bool:
    """Whether a collector is given, as a setting or in OpenTelemetry's own environment variables."""
    return endpoint is not None or any(os.environ.get(name) for name in _ENVIRONMENT)


def exporting(endpoint: str | None, version: str) -> TracerProvider:
    """A provider that sends spans in batches, from a thread of its own, to the collector at `endpoint` (or the
    environment's). Raises StartupError `missing_dependency` without `tectum[trace]`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        text = f'{error.name} is not installed; run: pip install "tectum[trace]"'
        raise StartupError("missing_dependency", text) from None

    service = os.environ.get("OTEL_SERVICE_NAME", "tectum")
    resource = Resource.create({"service.name": service, "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `Tracing.close` does it, within its bound
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


@dataclass(slots=True)
class _Walk:
    """The spans of one life. began: nanoseconds since the epoch at `zero`, on `time.perf_counter`."""

    span: Span
    context: Context
    began: int
    zero: float
    forward_at: float | None = None
    ended_at: float | None = None

    def at(self, moment: float) -> int:
        return self.began + int((moment - self.zero) * 1e9)


class Tracing(Watcher):
    """Makes the spans, with a provider of OpenTelemetry's SDK."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tectum")
        self._propagator = TraceContextTextMapPropagator()
        self._walks: dict[int, _Walk] = {}

    def close(self) -> None:
        """Send what was not sent yet, for a few seconds at most: a collector that is gone does not hold up the exit."""
        sending = threading.Thread(target=self._provider.shutdown, name="tectum-trace-close", daemon=True)
        sending.start()
        sending.join(PATIENCE)

    # --- what the pipeline tells ---

    def accepted(self, job: JobView, seconds: float) -> None:
        from opentelemetry.trace import set_span_in_context

        now, zero = time.time_ns(), time.perf_counter()
        came = now - int(seconds * 1e9)
        span = self._start(job.request, came)
        walk = self._walks[job.life] = _Walk(span, set_span_in_context(span), now, zero)
        self._step(walk, "accept", zero - seconds, zero)

    def refused(self, error: TectumError, request: EncodeRequest | None = None) -> None:
        span = self._start(request, time.time_ns())
        _fail(span, error)
        span.end()

    def batch(self, jobs: Sequence[JobView]) -> None:
        now = time.perf_counter()
        for job in jobs:
            self._walks[job.life].forward_at = now

    def sent(self, job: JobView, backend: str, seconds: float, error: TectumError | None) -> None:
        now = time.perf_counter()
        self._step(self._walks[job.life], "send", now - seconds, now, error, {"tectum.backend": backend})

    def ended(self, job: JobView, reason: str, error: TectumError | None, seconds: float) -> None:
        walk = self._walks[job.life]
        walk.ended_at = time.perf_counter()
        self._stages(walk, job, str(reason), error)
        walk.span.set_attribute("tectum.reason", str(reason))
        if job.prepared is not None:
            metadata = job.prepared.metadata
            walk.span.set_attributes(
                {"tectum.rows": metadata.rows, "tectum.patches": metadata.patches, "tectum.lane": job.prepared.lane}
            )
        if error is not None:
            _fail(walk.span, error)

    def freed(self, job: JobView) -> None:
        walk = self._walks.pop(job.life)
        assert walk.ended_at is not None, "what a request holds is given back after its outcome"
        now = time.perf_counter()
        self._step(walk, "release", walk.ended_at, now)
        walk.span.end(walk.at(now))

    # --- spans ---

    def _start(self, request: EncodeRequest | None, start: int) -> Span:
        from opentelemetry.trace import SpanKind

        facts: dict[str, Any] = {}
        if request is not None:
            facts = {
                "tectum.req_id": request.req_id,
                "tectum.modality": str(request.modality),
                "tectum.items": len(request.items),
            }
        parent = self._propagator.extract(caller.get() or {})
        return self._tracer.start_span("tectum.request", parent, SpanKind.SERVER, facts, start_time=start)

    def _step(
        self,
        walk: _Walk,
        name: str,
        start: float,
        end: float,
        error: TectumError | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        span = self._tracer.start_span(name, walk.context, attributes=facts, start_time=walk.at(start))
        if error is not None:
            _fail(span, error)
        span.end(walk.at(max(start, end)))

    def _stages(self, walk: _Walk, job: JobView, reason: str, error: TectumError | None) -> None:
        """The stages that ended, each as long as it was measured; the one that failed, or was cut off, has the error."""
        assert walk.ended_at is not None, "the outcome comes first"
        seconds = job.seconds
        if not job.prepared_at:  # how much of it was fetching is not known, unless that is what failed
            fetching = error is not None and error.code in _FAILS_FETCH
            self._step(walk, "fetch" if fetching else "prepare", walk.zero, walk.ended_at, error)
            return
        prepare_at = job.prepared_at - seconds.get("prepare", 0.0)
        if any(item.remote for item in job.request.items):
            self._step(walk, "fetch", prepare_at - seconds.get("fetch", 0.0), prepare_at)
        self._step(walk, "prepare", prepare_at, job.prepared_at)
        if walk.forward_at is None:
            self._step(walk, "queue", job.prepared_at, walk.ended_at, error)
            return
        self._step(walk, "queue", job.prepared_at, walk.forward_at)
        if "forward" in seconds:
            failed = error if reason in _FAILS_FORWARD else None
            self._step(walk, "forward", walk.forward_at, walk.forward_at + seconds["forward"], failed)
        else:
            self._step(walk, "forward", walk.forward_at, walk.ended_at, error)


#: codes that only a fetch fails with
_FAILS_FETCH = frozenset({"media_fetch_failed", "media_fetch_timeout"})
#: reasons of a release that say that the forward failed, where there was one
_FAILS_FORWARD = frozenset({"encode_failed", "worker_lost"})


def _fail(span: Span, error: TectumError) -> None:
    """Mark a span failed, with what a program and a person need to know."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error.message))
    span.set_attributes({"tectum.code": error.code, "http.response.status_code": error.status})
