"""Prometheus metrics. Owns names and labels; is told outcomes by the pipeline and reads gauges when scraped.

Names follow vLLM and SGLang where they have one for the same thing (`…_queue_time_seconds`, `…_e2e_request_latency_seconds`,
`num_requests`, `…_cache_queries`, `…_cache_hits`), so that dashboards read alike. docs/grafana/tectum.json shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tectum.errors import TectumError
from tectum.observe.watcher import JobView, Watcher
from tectum.types import EncodeRequest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PATCHES = tuple(4**exponent for exponent in range(2, 11))  # 16 … 1,048,576
#: stage -> its metric; a stage is a key of a job's `seconds`
_STAGES = {
    "fetch": ("encoder_fetch_time_seconds", "Seconds in which the media behind URLs were fetched."),
    "prepare": ("encoder_prepare_time_seconds", "Seconds of decoding and preprocessing, with the wait for their turn."),
    "queue": ("encoder_queue_time_seconds", "Seconds that a prepared request waited for its forward."),
    "forward": ("encoder_forward_time_seconds", "Seconds of the forward, until rows were staged."),
}


class _Ledger(Protocol):
    queued_patches: int
    staged_bytes: int

    def __len__(self) -> int: ...
    def by_state(self) -> Mapping[Any, int]: ...


class _Bodies(Protocol):
    held: int


class _Encoders(Protocol):
    restarts: int

    @property
    def up(self) -> int: ...


class _Cache(Protocol):
    nbytes: int


class _Reuse(Protocol):
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def cache(self) -> _Cache: ...


class Metrics(Watcher):
    """All metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[Any, ...], Any] = {}
        self._received = self._counter("encoder_requests_received", "Requests that were accepted.", "modality")
        self._finished = self._counter("encoder_requests", "Requests whose outcome is decided.", "modality", "status")
        self._releases = self._counter("encoder_releases", "Releases by reason.", "reason")
        self._refusals = self._counter("encoder_refusals", "Requests refused at the door, by code.", "code")
        self._items = self._counter("encoder_items", "Items that were encoded.", "modality")
        self._rows = self._counter("encoder_rows", "Embedding rows produced.", "modality")
        self._stages = {
            stage: self._histogram(*named, _SECONDS, "modality", "status") for stage, named in _STAGES.items()
        }
        self._latency = self._histogram(
            "encoder_e2e_request_latency_seconds",
            "Seconds from acceptance to the outcome.",
            _SECONDS,
            "modality",
            "status",
        )
        self._hang_ups = self._counter("encoder_hang_ups", "Callers that left before their answer.")
        self._transfer = self._histogram(
            "encoder_transfer_time_seconds", "Seconds of one delivery of rows.", _SECONDS, "backend", "status"
        )
        self._batch_requests = self._histogram(
            "encoder_batch_requests", "Requests in one forward.", _COUNTS, "modality"
        )
        self._batch_items = self._histogram("encoder_batch_items", "Items in one forward.", _COUNTS, "modality")
        self._batch_patches = self._histogram(
            "encoder_batch_patches", "Input patches in one forward.", _PATCHES, "modality"
        )

    def watch(self, ledger: _Ledger, encoders: _Encoders) -> None:
        """Have gauges read from the ledger and the encoders whenever somebody scrapes."""
        self.registry.register(_Now(ledger, encoders))

    def watch_bodies(self, budget: _Bodies) -> None:
        """Have the bytes of request bodies read whenever somebody scrapes."""
        text = "Bytes of request bodies that are held."
        Gauge("encoder_body_bytes", text, registry=self.registry).set_function(lambda: budget.held)

    def watch_pages(self, count: Callable[[], int]) -> None:
        """Have the number of open live pages read whenever somebody scrapes."""
        Gauge("encoder_live_pages", "Live pages that are open.", registry=self.registry).set_function(count)

    def watch_reuse(self, reuse: _Reuse) -> None:
        """Have look-ups by content, and what is kept of it, read whenever somebody scrapes."""
        self.registry.register(_Known(reuse))

    # --- what the doors tell ---

    def hung_up(self) -> None:
        """A caller left, or stopped reading, before it was answered."""
        self._hang_ups.inc()

    # --- what the pipeline tells ---

    def accepted(self, job: JobView, seconds: float) -> None:
        self._of(self._received, job.request.modality).inc()

    def refused(self, error: TectumError, request: EncodeRequest | None = None) -> None:
        self._of(self._refusals, error.code).inc()

    def batch(self, jobs: Sequence[JobView]) -> None:
        modality = jobs[0].request.modality
        self._of(self._batch_requests, modality).observe(len(jobs))
        self._of(self._batch_items, modality).observe(sum(len(job.request.items) for job in jobs))
        patches = sum(job.prepared.metadata.patches for job in jobs if job.prepared is not None)
        self._of(self._batch_patches, modality).observe(patches)

    def sent(self, job: JobView, backend: str, seconds: float, error: TectumError | None) -> None:
        self._of(self._transfer, backend, _status(error)).observe(seconds)

    def ended(self, job: JobView, reason: str, error: TectumError | None, seconds: float) -> None:
        modality, status = job.request.modality, _status(error)
        self._of(self._finished, modality, status).inc()
        self._of(self._releases, reason).inc()
        self._of(self._latency, modality, status).observe(seconds)
        for stage, taken in job.seconds.items():
            if stage in self._stages:
                self._of(self._stages[stage], modality, status).observe(taken)
        if job.prepared is not None and "forward" in job.seconds:
            self._of(self._items, modality).inc(len(job.request.items))
            self._of(self._rows, modality).inc(job.prepared.metadata.rows)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _of(self, metric: Any, *labels: str) -> Any:
        """The child of a metric with these labels. The library looks each one up under a lock, which takes longer."""
        child = self._children.get((metric, *labels))
        if child is None:
            child = self._children[metric, *labels] = metric.labels(*labels)
        return child

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class _Now:
    """What is read when somebody scrapes: nothing has to be counted twice."""

    def __init__(self, ledger: _Ledger, encoders: _Encoders) -> None:
        self._ledger = ledger
        self._encoders = encoders

    def collect(self) -> Iterator[Metric]:
        ledger, encoders = self._ledger, self._encoders
        states = GaugeMetricFamily("encoder_num_requests", "Live requests by state.", labels=["state"])
        for state, count in ledger.by_state().items():
            states.add_metric([str(state)], count)
        yield states
        yield GaugeMetricFamily("encoder_live_requests", "Requests that hold something.", len(ledger))
        yield GaugeMetricFamily(
            "encoder_queued_patches", "Input patches that wait for a forward.", ledger.queued_patches
        )
        yield GaugeMetricFamily("encoder_staged_bytes", "Bytes promised to or held for receivers.", ledger.staged_bytes)
        yield GaugeMetricFamily("encoder_workers_up", "Encoder processes that are up.", encoders.up)
        yield CounterMetricFamily(
            "encoder_worker_restarts", "Encoder processes that were started again.", encoders.restarts
        )


class _Known:
    """What is known by content, read when somebody scrapes."""

    def __init__(self, reuse: _Reuse) -> None:
        self._reuse = reuse

    def collect(self) -> Iterator[Metric]:
        reuse = self._reuse
        queries = "Requests looked up by content: where a cache is kept, or content keys are asked for."
        yield CounterMetricFamily("encoder_cache_queries", queries, value=reuse.hits + reuse.misses)
        hits = "Requests whose rows were known by content, or encoded for another at that moment."
        yield CounterMetricFamily("encoder_cache_hits", hits, value=reuse.hits)
        yield GaugeMetricFamily("encoder_cache_bytes", "Bytes of rows kept by content.", reuse.cache.nbytes)


def _status(error: TectumError | None) -> str:
    return "ok" if error is None else str(error.status)
