"""Traces, collected by the SDK's in-memory exporter from a real pipeline, and by a collector from a real server."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tectum.config import Settings
from tectum.delivery.base import Deliveries
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, InternalError, StartupError
from tectum.lifecycle.ledger import Limits
from tectum.observe import trace
from tectum.pipeline.batcher import Batcher
from tectum.pipeline.pipeline import Pipeline
from tectum.serving.gateway import GatewaySettings
from tectum.serving.gateway import create_app as create_gateway
from tectum.serving.grpc import grpc_door
from tectum.serving.guard import BodyBudget
from tectum.serving.health import Health
from tectum.serving.listen import nobody
from tectum.serving.push import Pushes
from tectum.serving.sglang import Doors
from tectum.serving.sglang_pb import sglang_encoder_pb2 as messages
from tectum.types import Destination, EncodeRequest, MediaItem, Modality
from tectum.workers.pool import WorkerPool
from tests.gateway.peers import Engine, running
from tests.gateway.test_gateway import chat, data_uri, post
from tests.pipeline.harness import GatedWork, inline, request, scenario, start
from tests.serving.test_native import jpeg

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"  # the example of W3C Trace Context
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def collecting():
    """Traces, and the exporter that keeps their finished spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return trace.Tracing(provider), exporter


def traced(test, **limits):
    """Run `test(pipeline, work)` with traces; returns the finished spans."""
    tracing, exporter = collecting()

    async def main(pipeline, work):
        pipeline._observers = (tracing,)
        await test(pipeline, work)

    scenario(main, **limits)
    assert not tracing._walks, "a walk outlives its request"
    return exporter.get_finished_spans()


def by_name(spans, name):
    return [span for span in spans if span.name == name]


def test_one_request_is_one_span_with_its_whole_walk_below_it():
    async def test(pipeline, work):
        await inline(pipeline, request("a"))

    spans = traced(test)
    (root,) = by_name(spans, "tectum.request")
    children = [span for span in spans if span is not root]
    assert [span.name for span in children] == ["accept", "send", "prepare", "queue", "forward", "release"]
    assert all(span.parent.span_id == root.context.span_id for span in children)
    assert root.parent is None
    assert root.status.status_code is StatusCode.UNSET
    assert root.attributes["tectum.req_id"] == "a"
    assert root.attributes["tectum.reason"] == "delivered"
    assert root.attributes["tectum.rows"] == 4
    times = {span.name: (span.start_time, span.end_time) for span in children}
    order = [times[name] for name in ("accept", "prepare", "queue", "forward", "send", "release")]
    assert all(start <= end for start, end in order)
    assert all(before[0] <= after[0] for before, after in itertools.pairwise(order))
    assert root.start_time <= order[0][0]
    assert root.end_time == order[-1][1]


def test_media_behind_a_url_has_a_fetch_of_its_own():
    async def test(pipeline, work):
        item = MediaItem(Modality.IMAGE, url="http://192.0.2.1/picture.png")
        async with pipeline.hold(EncodeRequest("a", (item,))):
            pass
        pipeline.release_request("a")

    assert len(by_name(traced(test), "fetch")) == 1


def test_the_callers_trace_is_the_parent_and_names_no_request():
    async def call(pipeline, req_id, picture):
        trace.caller.set({"traceparent": PARENT})  # as a door does, in the task of the call
        return await inline(pipeline, request(req_id, picture))

    async def test(pipeline, work):
        answers = await asyncio.gather(
            start(call(pipeline, "a", b"one")),
            start(call(pipeline, "b", b"two")),
            start(inline(pipeline, request("c"))),
        )
        assert answers == [b"one", b"two", b"picture"]

    roots = {span.attributes["tectum.req_id"]: span for span in by_name(traced(test), "tectum.request")}
    for name in ("a", "b"):
        assert format(roots[name].context.trace_id, "032x") == TRACE
        assert format(roots[name].parent.span_id, "016x") == "00f067aa0ba902b7"
    assert roots["a"].context.span_id != roots["b"].context.span_id
    assert format(roots["c"].context.trace_id, "032x") != TRACE
    assert roots["c"].parent is None


def test_the_trace_of_a_grpc_call_is_the_parent_and_each_call_has_its_own():
    """Through the real door and a real channel; two calls at once, and one that belongs to no trace."""
    tracing, exporter = collecting()
    settings = Settings(transfer_backend="zmq_to_scheduler", grpc_port=0)
    carried = {"a": (("traceparent", PARENT), ("tracestate", "vendor=1")), "b": (("traceparent", OTHER),), "c": ()}

    async def main():
        pipeline = Pipeline(GatedWork(), Limits(), [Batcher(fuse=False, batch_patches=1000)], observers=(tracing,))
        await pipeline.start()
        doors = Doors(pipeline, Deliveries({}), Pushes(pipeline, Deliveries({}), settings), settings)
        health, budget = Health(pipeline, WorkerPool("model", settings), settings), BodyBudget(1 << 20, nobody)
        async with (
            grpc_door(doors, health, settings, budget) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            encode = channel.unary_unary(
                "/sglang.grpc.encoder.SglangEncoder/Encode",
                messages.EncodeRequest.SerializeToString,
                messages.EncodeResponse.FromString,
            )
            part = {"mm_items": [data_uri()], "num_parts": 1, "prefill_host": "127.0.0.1", "embedding_port": [9]}
            asked = {name: messages.EncodeRequest(req_id=name, **part) for name in carried}
            await asyncio.gather(*(encode(asked[name], timeout=20, metadata=carried[name]) for name in carried))
        assert await pipeline.drain(5)

    asyncio.run(main())
    roots = {
        each.attributes["tectum.req_id"]: each for each in by_name(exporter.get_finished_spans(), "tectum.request")
    }
    for name, parent in (("a", PARENT), ("b", OTHER)):
        _, trace_id, span_id, _ = parent.split("-")
        assert format(roots[name].context.trace_id, "032x") == trace_id
        assert format(roots[name].parent.span_id, "016x") == span_id
    assert roots["a"].context.trace_state.to_header() == "vendor=1"
    assert roots["b"].context.trace_state.to_header() == ""
    assert roots["c"].parent is None


@pytest.mark.parametrize("header", ["", "00-zz-00-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", "\xff" * 300])
def test_a_traceparent_that_is_none_starts_a_trace_of_its_own(header):
    async def test(pipeline, work):
        trace.caller.set({"traceparent": header})
        await inline(pipeline, request("a"))

    (root,) = by_name(traced(test), "tectum.request")
    assert root.parent is None


def test_a_caller_that_does_not_sample_gets_no_spans():
    async def test(pipeline, work):
        trace.caller.set({"traceparent": PARENT[:-2] + "00"})
        await inline(pipeline, request("a"))

    assert traced(test) == ()


def test_a_failure_carries_its_code_and_reason_where_it_happened():
    async def test(pipeline, work):
        for stage, name, error in (
            ("prepare", "p", BadRequestError("media_decode_failed", "The JPEG picture is truncated", item=0)),
            ("prepare", "f", BadRequestError("media_fetch_failed", "The media's server answered with status 404")),
            ("encode", "e", InternalError("non_finite_rows", "The rows hold values that are not finite")),
        ):
            work.gate(stage, name).outcome = error
            work.gate(stage, name).open.set()
            await asyncio.wait([start(inline(pipeline, request(name)))])

    spans = traced(test)
    roots = {span.attributes["tectum.req_id"]: span for span in by_name(spans, "tectum.request")}
    for name, code, status, stage in (
        ("p", "media_decode_failed", 400, "prepare"),
        ("f", "media_fetch_failed", 424, "fetch"),
        ("e", "non_finite_rows", 500, "forward"),
    ):
        root = roots[name]
        failed = [s for s in spans if s.parent is not None and s.parent.span_id == root.context.span_id]
        failed = [span for span in failed if span.status.status_code is StatusCode.ERROR]
        assert [span.name for span in failed] == [stage]
        assert root.status.status_code is StatusCode.ERROR
        for span in (root, *failed):
            assert span.attributes["tectum.code"] == code
            assert span.attributes["http.response.status_code"] == status
        assert root.attributes["tectum.reason"] == "encode_failed"


def test_a_refusal_is_a_span_with_its_code():
    async def test(pipeline, work):
        gate = work.gate("prepare", "a")
        first = start(inline(pipeline, request("a")))
        await gate.reached.wait()
        await asyncio.wait([start(inline(pipeline, request("b")))])
        gate.open.set()
        await first

    roots = {s.attributes["tectum.req_id"]: s for s in by_name(traced(test, max_live_requests=1), "tectum.request")}
    assert roots["b"].attributes["tectum.code"] == "overloaded"
    assert roots["a"].status.status_code is StatusCode.UNSET


def test_a_send_that_drains_after_the_release_still_belongs_to_the_walk():
    async def test(pipeline, work):
        gate = work.gate("send", "tcp://one")
        registering = start(pipeline.register_destinations("r", [Destination("tcp://one", "zmq")], 1))
        delivering = start(pipeline.deliver(request("r")))
        await gate.reached.wait()
        pipeline.release_request("r")
        gate.open.set()
        await asyncio.wait([registering, delivering])

    spans = traced(test)
    (root,), (send,), (release,) = (by_name(spans, name) for name in ("tectum.request", "send", "release"))
    assert send.attributes["tectum.backend"] == "zmq"
    assert root.attributes["tectum.reason"] == "client_release"
    assert release.end_time >= send.end_time
    assert root.end_time >= send.end_time


class Collector:
    """An OTLP/HTTP collector on loopback: the spans that were posted to /v1/traces."""

    def __enter__(self):
        self.spans, self.attributes = [], {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                        collector.attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
                        collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_a_server_sends_its_traces_to_the_collector(tiny, how, monkeypatch):
    with Collector() as collector:
        if how == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            flags = ()
        else:
            flags = ("--trace-endpoint", collector.url)
        with EncoderProcess(tiny, "--forward-threads", "1", "--log-level", "warning", *flags) as server:
            answer = httpx2.post(
                f"{server.url}/v1/encode",
                data={"request": '{"items":[{"type":"image","file":"f"}],"req_id":"mine"}'},
                files={"f": jpeg()},
                headers={"traceparent": PARENT},
            )
            assert answer.status_code == 200
            assert answer.headers["x-tectum-req-id"] == "mine"
            assert httpx2.post(f"{server.url}/v1/encode", content=b"{}").status_code == 400
            assert server.stop() == 0  # what was not sent yet is sent now
        ours = [span for span in collector.spans if span.trace_id.hex() == TRACE]
        assert {span.name for span in ours} == {
            "tectum.request",
            "accept",
            "prepare",
            "queue",
            "forward",
            "send",
            "release",
        }
        (root,) = (span for span in ours if span.name == "tectum.request")
        assert root.parent_span_id.hex() == "00f067aa0ba902b7"
        assert collector.attributes["service.name"] == "tectum"


def test_a_callers_trace_goes_through_the_gateway_to_the_encoder_and_to_the_engine(tiny):
    """What is no trace, or is longer than need be passed on, disturbs nothing: the request is served."""
    engine, flags = Engine(), ("--forward-threads", "1", "--log-level", "warning")
    with (
        Collector() as collector,
        EncoderProcess(tiny, *flags, "--trace-endpoint", collector.url) as encoder,
        running(engine) as engine_url,
        running(create_gateway(GatewaySettings((encoder.url,), engine_url))) as gateway,
    ):
        sent = [
            {"traceparent": PARENT, "tracestate": "vendor=1,other=2"},
            {"traceparent": OTHER, "tracestate": ",".join(f"v{number}={'x' * 250}" for number in range(31))},
            {"traceparent": "\xff" * 300},
            {},
        ]
        for number, headers in enumerate(sent):
            given = {name: value.encode("latin-1") for name, value in headers.items()}
            assert post(gateway, chat(data_uri(number)), **given).status_code == 200
        seen = [headers for method, _, headers, _ in engine.seen if method == "POST"]
        assert [{name: each[name] for name in trace.HEADERS if name in each} for each in seen] == sent
        assert encoder.stop() == 0
    roots = [span for span in collector.spans if span.name == "tectum.request"]
    assert len(roots) == len(sent)
    known = {f"00-{each.trace_id.hex()}-{each.parent_span_id.hex()}-01": each.trace_state for each in roots}
    assert known[PARENT] == "vendor=1,other=2"
    assert known[OTHER] == ""
    assert sum(not each.parent_span_id for each in roots) == 2


def test_a_collector_that_is_gone_disturbs_neither_requests_nor_the_exit(tiny):
    with EncoderProcess(tiny, "--forward-threads", "1", "--trace-endpoint", "http://127.0.0.1:9") as server:
        form = {"request": '{"items":[{"type":"image","file":"f"}]}'}
        assert httpx2.post(f"{server.url}/v1/encode", data=form, files={"f": jpeg()}).status_code == 200
        started = time.monotonic()
        assert server.stop(patience=30) == 0
        assert time.monotonic() - started < trace.PATIENCE + 3  # by itself it would try for ten seconds


def test_traces_without_their_extra_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r'pip install "tectum\[trace\]"') as missing:
        trace.exporting("http://127.0.0.1:9", "1")
    assert missing.value.code == "missing_dependency"


def test_traces_are_off_unless_a_collector_is_given(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert not trace.wanted(None)
    assert trace.wanted("http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318/v1/traces")
    assert trace.wanted(None)
    program = "import sys, tectum.serving.server; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
