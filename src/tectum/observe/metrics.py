"""Prometheus metrics. Owns names and labels; is told outcomes by the pipeline and reads gauges when scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tectum.errors import TectumError

if TYPE_CHECKING:
    from tectum.types import EncodeRequest, RequestMetadata

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class _Ledger(Protocol):
    queued_patches: int
    staged_bytes: int

    def __len__(self) -> int: ...


class _Bodies(Protocol):
    held: int


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
        self._hang_ups = Counter("encoder_hang_ups", "Callers that left before their answer.", registry=self.registry)
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

    def watch_bodies(self, budget: _Bodies) -> None:
        text = "Bytes of request bodies that are held."
        Gauge("encoder_body_bytes", text, registry=self.registry).set_function(lambda: budget.held)

    def hung_up(self) -> None:
        """A caller left, or stopped reading, before it was answered."""
        self._hang_ups.inc()

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
        """A request was not accepted, by the door or by the ledger."""
        self._refusals.labels(error.code).inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
