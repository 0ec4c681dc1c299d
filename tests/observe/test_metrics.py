"""Metrics, read as Prometheus reads them, against what was done to a real pipeline."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from tectum.errors import BadRequestError, DeliveryError
from tectum.lifecycle.events import Milestone, Reason
from tectum.observe.metrics import Metrics
from tectum.types import Destination
from tests.pipeline.harness import inline, request, scenario, start

DOCS = Path(__file__).parents[2] / "docs"


class Encoders:
    """What the metrics read of the encoder processes."""

    up = 2
    restarts = 3


def values(metrics: Metrics) -> dict[str, float]:
    """`name{label="value"}` -> value, buckets left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            if not sample.name.endswith(("_bucket", "_created")):
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def watched(test, **limits):
    """Run `test(pipeline, work, read)` with metrics on a pipeline of gated stages."""
    metrics = Metrics()

    async def main(pipeline, work):
        pipeline._observers = (metrics,)
        metrics.watch(pipeline.ledger, Encoders())
        await test(pipeline, work, lambda: values(metrics))

    scenario(main, **limits)
    return values(metrics)


def test_a_walk_is_counted_once_at_each_step():
    async def test(pipeline, work, read):
        assert await inline(pipeline, request("a")) == b"picture"
        gate = work.gate("prepare", "bad")
        gate.outcome = BadRequestError("media_decode_failed", "The JPEG picture is truncated", item=0)
        gate.open.set()
        with_error = start(inline(pipeline, request("bad")))
        await asyncio.wait([with_error])
        assert with_error.exception() is not None

    seen = watched(test)
    assert seen['encoder_requests_received_total{modality="image"}'] == 2
    assert seen['encoder_requests_total{modality="image",status="ok"}'] == 1
    assert seen['encoder_requests_total{modality="image",status="400"}'] == 1
    assert seen['encoder_releases_total{reason="delivered"}'] == 1
    assert seen['encoder_releases_total{reason="encode_failed"}'] == 1
    assert seen['encoder_e2e_request_latency_seconds_count{modality="image",status="400"}'] == 1
    assert seen['encoder_queue_time_seconds_count{modality="image",status="ok"}'] == 1
    assert seen['encoder_forward_time_seconds_count{modality="image",status="ok"}'] == 1
    assert seen['encoder_transfer_time_seconds_count{backend="inline",status="ok"}'] == 1
    assert seen['encoder_items_total{modality="image"}'] == 1
    assert seen['encoder_rows_total{modality="image"}'] == 4


def test_batches_are_counted_by_their_requests_items_and_patches():
    metrics = Metrics()

    async def test(pipeline, work):
        pipeline._observers = (metrics,)
        first = work.gate("encode", "0")
        calls = [start(inline(pipeline, request("0")))]
        await first.reached.wait()
        calls += [start(inline(pipeline, request(name))) for name in "123"]
        await asyncio.gather(*(pipeline.wait(name, Milestone.METADATA, 5) for name in "123"))
        first.open.set()
        await asyncio.gather(*calls)
        assert work.forwards == [["0"], ["1", "2", "3"]]

    scenario(test, fuse=True)
    seen = values(metrics)
    assert seen['encoder_batch_requests_count{modality="image"}'] == 2
    assert seen['encoder_batch_requests_sum{modality="image"}'] == 4
    assert seen['encoder_batch_items_sum{modality="image"}'] == 4
    assert seen['encoder_batch_patches_sum{modality="image"}'] == 4 * 16


def test_deliveries_are_counted_by_backend_and_outcome():
    async def test(pipeline, work, read):
        works, fails = Destination("tcp://one", "zmq"), Destination("tcp://two", "shm")
        work.gate("send", "tcp://two").outcome = DeliveryError("send_failed", "The receiver refused the rows")
        work.gate("send", "tcp://two").open.set()
        registering = start(pipeline.register_destinations("r", [works, fails], 2))
        delivering = start(pipeline.deliver(request("r")))
        await registering
        await asyncio.wait([delivering])
        assert delivering.exception() is not None
        async with pipeline.hold(request("h")):
            pass
        async with pipeline.pull("h"):
            pass

    seen = watched(test)
    assert seen['encoder_transfer_time_seconds_count{backend="zmq",status="ok"}'] == 1
    assert seen['encoder_transfer_time_seconds_count{backend="shm",status="502"}'] == 1
    assert seen['encoder_transfer_time_seconds_count{backend="pull",status="ok"}'] == 1
    assert seen['encoder_releases_total{reason="send_failed"}'] == 1
    assert seen['encoder_releases_total{reason="pulled"}'] == 1


def test_what_is_live_is_read_when_somebody_scrapes():
    async def test(pipeline, work, read):
        forward, prepare = work.gate("encode", "forward"), work.gate("prepare", "prepare")
        async with pipeline.hold(request("held")):
            pass
        calls = [start(inline(pipeline, request(name))) for name in ("forward", "prepare")]
        await forward.reached.wait()
        await prepare.reached.wait()
        calls.append(start(inline(pipeline, request("queued"))))
        await pipeline.wait("queued", Milestone.METADATA, 5)
        now = read()
        states = {state: now[f'encoder_num_requests{{state="{state}"}}'] for state in pipeline.ledger.by_state()}
        assert states == {"accepted": 1, "prepared": 1, "encoding": 1, "staged": 1, "draining": 0}
        assert now["encoder_live_requests"] == 4
        assert now["encoder_queued_patches"] == 16
        assert now["encoder_staged_bytes"] == 3 * 4 * 8 * 4  # three prepared ones: 4 rows of 8 float32
        assert (now["encoder_workers_up"], now["encoder_worker_restarts_total"]) == (2, 3)
        pipeline.release_request("forward", Reason.CLIENT_RELEASE)
        assert read()['encoder_num_requests{state="draining"}'] == 1
        forward.open.set()
        prepare.open.set()
        await asyncio.gather(*calls, return_exceptions=True)
        pipeline.release_request("held")

    after = watched(test)
    assert after["encoder_live_requests"] == after["encoder_staged_bytes"] == after["encoder_queued_patches"] == 0


def test_refusals_are_counted_by_cause():
    async def test(pipeline, work, read):
        gate = work.gate("prepare", "a")
        first = start(inline(pipeline, request("a")))
        await gate.reached.wait()
        over = start(inline(pipeline, request("b")))
        conflict = start(inline(pipeline, request("a", b"another picture")))
        await asyncio.wait([over, conflict])
        assert over.exception().code == "overloaded"
        gate.open.set()
        await first

    seen = watched(test, max_live_requests=1)
    assert seen['encoder_refusals_total{code="overloaded"}'] == 1
    assert seen['encoder_refusals_total{code="request_conflict"}'] == 1
    assert seen['encoder_requests_received_total{modality="image"}'] == 1


REUSE = SimpleNamespace(hits=2, misses=1, cache=SimpleNamespace(nbytes=640))


def test_the_cache_counts_queries_and_hits():
    metrics = Metrics()
    metrics.watch_reuse(REUSE)
    seen = values(metrics)
    assert seen["encoder_cache_queries_total"] == 3
    assert seen["encoder_cache_hits_total"] == 2
    assert seen["encoder_cache_bytes"] == 640


def exposed() -> dict[str, set[str]]:
    """Every name that Prometheus sees -> its labels."""
    metrics = Metrics()

    async def watch(pipeline, work):
        metrics.watch(pipeline.ledger, Encoders())

    scenario(watch)
    metrics.watch_bodies(SimpleNamespace(held=0))
    metrics.watch_pages(lambda: 0)
    metrics.watch_reuse(REUSE)
    labels = {}
    for collector in list(metrics.registry._collector_to_names):
        for family in collector.collect():
            names = getattr(collector, "_labelnames", ()) or [key for s in family.samples for key in s.labels]
            total = "_total" if family.type == "counter" else ""
            for suffix in ("_bucket", "_sum", "_count") if family.type == "histogram" else (total,):
                labels[family.name + suffix] = {*names, "le"} if suffix == "_bucket" else set(names)
    return labels


def families(names) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_every_query_of_the_dashboard_names_a_metric_and_labels_that_exist():
    labels = exposed()
    dashboard = json.loads((DOCS / "grafana" / "tectum.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 15
    shown = set()
    for query in queries:
        named = set(re.findall(r"encoder_\w+", query))
        assert named, query
        assert named <= set(labels), (query, named - set(labels))
        shown |= named
        for group in re.findall(r"by \(([^)]*)\)", query):
            by = {label.strip() for label in group.split(",")} - {"instance"}  # which Prometheus adds
            assert all(by <= labels[name] for name in named), query
    assert families(shown) == families(labels), "a metric is not on the dashboard"


def test_the_docs_list_every_metric_with_its_labels():
    labels = exposed()
    found = {}
    for line in (DOCS / "observability.md").read_text().splitlines():
        if line.startswith("| `encoder_"):
            _, names, columns, *_ = line.split("|")
            for name in re.findall(r"`(\w+)`", names):
                found[name] = {label.strip() for label in columns.split(",")} - {""}
    summed = {name: own for name, own in labels.items() if not name.endswith(("_bucket", "_sum"))}
    assert found == {re.sub("_count$", "", name): own for name, own in summed.items()}
