"""Prometheus metrics. Owns names and labels; is told outcomes by the pipeline and reads gauges when scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tectum.errors import TectumError

if TYPE_CHECKING:
    from tectum.types import EncodeRequest, RequestMetadata

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class _Ledger(Protocol):
    queued_patches: int
    staged_bytes: int

    def __len__(self) -> int: ...


class _Encoders(Protocol):
    restarts: int

    @property
    def up(self) -> int: ...


class _Prepared(Protocol):
    @property
    def metadata(self) -> RequestMetadata: ...


class _Job(Protocol):
    @property
    def request(self) -> EncodeRequest: ...
    @property
    def prepared(self) -> _Prepared | None: ...
    @property
    def seconds(self) -> dict[str, float]: ...


class _Cache(Protocol):
    nbytes: int


class _Reuse(Protocol):
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def cache(self) -> _Cache: ...


class _ReuseCollector(Collector):
    """Counters that are kept elsewhere."""

    def __init__(self, reuse: _Reuse) -> None:
        self._reuse = reuse

    def collect(self) -> Iterator[Metric]:
        hits = "Requests whose rows were known by content, or encoded for another at that moment."
        yield CounterMetricFamily("encoder_cache_hits", hits, value=self._reuse.hits)
        misses = "Requests with a content key that needed a forward."
        yield CounterMetricFamily("encoder_cache_misses", misses, value=self._reuse.misses)
        yield GaugeMetricFamily("encoder_cache_bytes", "Bytes of rows kept by content.", self._reuse.cache.nbytes)


class Metrics:
    """All metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "encoder_requests", "Requests that ended, by outcome.", ["modality", "status"], registry=self.registry
        )
        self._releases = Counter("encoder_releases", "Releases by reason.", ["reason"], registry=self.registry)
        self._refusals = Counter(
            "encoder_refusals", "Requests refused at the door, by code.", ["code"], registry=self.registry
        )
        self._items = Counter("encoder_items", "Items that were encoded.", ["modality"], registry=self.registry)
        self._rows = Counter("encoder_rows", "Embedding rows produced.", ["modality"], registry=self.registry)
        self._stage = Histogram(
            "encoder_stage_seconds",
            "Seconds of each stage of a request.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._total = Histogram(
            "encoder_request_seconds",
            "Seconds from acceptance to release.",
            ["modality"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def watch(self, ledger: _Ledger, encoders: _Encoders) -> None:
        """Gauges that are read from the ledger and the encoders when somebody scrapes."""
        for name, text, read in (
            ("encoder_live_requests", "Requests that hold something.", lambda: len(ledger)),
            ("encoder_queued_patches", "Input patches that wait for a forward.", lambda: ledger.queued_patches),
            ("encoder_staged_bytes", "Bytes promised to or held for receivers.", lambda: ledger.staged_bytes),
            ("encoder_workers_up", "Encoder processes that are up.", lambda: encoders.up),
            ("encoder_worker_restarts", "Encoder processes that were started again.", lambda: encoders.restarts),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def watch_reuse(self, reuse: _Reuse) -> None:
        """Requests answered without a forward, those that led one, and what is kept, read when somebody scrapes."""
        self.registry.register(_ReuseCollector(reuse))

    def ended(self, job: _Job, reason: str, error: TectumError | None, seconds: float) -> None:
        """One request's outcome is decided."""
        modality = str(job.request.modality)
        self._requests.labels(modality, "ok" if error is None else str(error.status)).inc()
        self._releases.labels(str(reason)).inc()
        self._total.labels(modality).observe(seconds)
        for stage, taken in job.seconds.items():
            self._stage.labels(stage).observe(taken)
        if job.prepared is not None and "forward" in job.seconds:
            self._items.labels(modality).inc(len(job.request.items))
            self._rows.labels(modality).inc(job.prepared.metadata.rows)

    def refused(self, error: TectumError) -> None:
        """A request was not accepted."""
        self._refusals.labels(error.code).inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
