"""SGLang's gRPC door, called through plain channels."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import threading

import grpc
import httpx2
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tectum import Client
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import TectumError, UnavailableError
from tectum.serving.sglang_pb import sglang_encoder_pb2 as messages
from tests.serving.test_native import gauges, jpeg, nothing_is_held, refusals, until
from tests.sglang.conftest import FLAGS, grpc_target
from tests.sglang.language_server import data_uri
from tests.sglang.receiver import Receiver

SERVICE = "sglang.grpc.encoder.SglangEncoder"


class Stub:
    """The service as a client sees it: names on the wire, no code of the server's."""

    def __init__(self, channel: grpc.Channel, **metadata: str) -> None:
        self._channel = channel
        self._metadata = tuple(metadata.items())

    def later(self, name: str, request: object) -> grpc.Future:
        answer = getattr(messages, f"{name}Response").FromString
        call = self._channel.unary_unary(f"/{SERVICE}/{name}", lambda message: message.SerializeToString(), answer)
        return call.future(request, timeout=20, metadata=self._metadata)

    def encode(self, rid: str, items: list[str], **facts: object) -> grpc.Future:
        part = {"num_parts": 1, "part_idx": 0, "prefill_host": "127.0.0.1", **facts}
        return self.later("Encode", messages.EncodeRequest(req_id=rid, mm_items=items, **part))

    def register(self, rid: str, receiver: Receiver, count: int = 1) -> grpc.Future:
        asked = messages.SchedulerReceiveUrlRequest(req_id=rid, receive_url=receiver.address, receive_count=count)
        return self.later("SchedulerReceiveUrl", asked)

    def send(self, rid: str, receiver: Receiver) -> grpc.Future:
        asked = messages.SendRequest(req_id=rid, prefill_host="127.0.0.1", embedding_port=receiver.port)
        return self.later("Send", asked)


@pytest.fixture(scope="module")
def channel(encoder_grpc):
    with grpc.insecure_channel(grpc_target(encoder_grpc)) as made:
        yield made


@pytest.fixture(scope="module")
def stub(channel):
    return Stub(channel)


def failure(call: grpc.Future) -> tuple[grpc.StatusCode, TectumError]:
    """The status of a call that fails, and the error that travels with it."""
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    problem = dict(caught.value.trailing_metadata())["tectum-problem-bin"]
    return caught.value.code(), TectumError.from_problem(json.loads(problem))


@pytest.mark.parametrize("order", ["registered first", "encoded first", "port in the message"])
def test_rows_arrive(stub, encoder_grpc, colocated, order):
    picture, rid = jpeg(224, 224, 1), f"grpc-{order.replace(' ', '-')}"
    with Receiver() as receiver:
        ports = [receiver.port] if order == "port in the message" else []
        registered = [stub.register(rid, receiver)] if order == "registered first" else []
        encoded = stub.encode(rid, [data_uri(picture)], embedding_port=ports)
        if order == "encoded first":
            registered.append(stub.register(rid, receiver))
        message, rows = receiver.message()
        assert torch.equal(rows, colocated([picture]))
        assert (message.req_id, message.part_idx, message.num_parts) == (rid, 0, 1)
        answer = encoded.result()
        assert (answer.embedding_size, answer.embedding_len, answer.embedding_dim) == (64 * 64 * 4, 64, 64)
        for call in registered:
            call.result()
    until(lambda: nothing_is_held(encoder_grpc))


def test_send_frees_nothing_before_all_announced_receivers_had_their_rows(stub, encoder_grpc, colocated):
    picture = jpeg(224, 224, 2)
    with Receiver() as one, Receiver() as two:
        encoded = stub.encode("announced", [data_uri(picture)])
        stub.register("announced", one, count=2).result()
        assert torch.equal(one.message()[1], colocated([picture]))
        assert not nothing_is_held(encoder_grpc)
        stub.send("announced", two).result()
        assert torch.equal(two.message()[1], colocated([picture]))
        encoded.result()
        until(lambda: nothing_is_held(encoder_grpc))
        status, error = failure(stub.send("announced", two))
        assert (status, error.code, error.details["reason"]) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "request_released",
            "delivered",
        )


def test_a_failure_reaches_caller_and_receiver(stub):
    with Receiver() as receiver:
        registered = stub.register("bad", receiver)
        status, error = failure(stub.encode("bad", [data_uri(jpeg()), data_uri(jpeg()[:-300])]))
        assert (status, error.code, error.status, error.item) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "media_decode_failed",
            400,
            1,
        )
        message, rows = receiver.message()
        assert (message.error_code, message.error_msg, rows) == (400, error.message, None)
        registered.result()


@pytest.mark.parametrize("kind", ["video/mp4", "audio/wav"])
def test_kinds_that_do_not_mix(stub, kind):
    status, error = failure(stub.encode("kind", [data_uri(jpeg()), f"data:{kind};base64,AAAA"]))
    assert (status, error.code) == (grpc.StatusCode.INVALID_ARGUMENT, "unsupported_modality")
    assert error.message.startswith("gRPC encode only supports IMAGE modality")


def test_a_modality_that_the_model_does_not_take(stub):
    status, error = failure(stub.encode("deaf", ["data:audio/wav;base64,AAAA"]))
    assert (status, error.code) == (grpc.StatusCode.INVALID_ARGUMENT, "unsupported_modality")


@pytest.mark.parametrize(
    ("facts", "items"),
    [
        ({}, []),
        ({"num_parts": 0}, ["AAAA"]),
        ({"part_idx": 1}, ["AAAA"]),
        ({"embedding_port": [70000]}, ["AAAA"]),
        ({"embedding_port": [80], "prefill_host": ""}, ["AAAA"]),
    ],
)
def test_wrong_messages(stub, encoder_grpc, facts, items):
    before = refusals(encoder_grpc)
    status, error = failure(stub.encode("wrong", items, **facts))
    assert (status, error.code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
    assert refusals(encoder_grpc) == before + 1


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("SchedulerReceiveUrl", {"receive_url": "127.0.0.1:" + "1" * 5000}),
        ("SchedulerReceiveUrl", {"receive_url": "a" * 10_000_000 + ":5"}),
        ("SchedulerReceiveUrl", {"receive_url": "127.0.0.1:5", "receive_count": 4097}),
        ("Send", {"prefill_host": "a" * 10_000_000, "embedding_port": 5}),
        ("Send", {"prefill_host": "127.0.0.1", "embedding_port": 0}),
        ("Send", {"prefill_host": "127.0.0.1", "embedding_port": 5, "session_id": "a" * 301}),
    ],
)
def test_receivers_are_named_within_the_bounds_of_the_http_door(stub, encoder_grpc, name, facts):
    before = refusals(encoder_grpc)
    status, error = failure(stub.later(name, getattr(messages, f"{name}Request")(req_id="wrong", **facts)))
    assert (status, error.code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
    assert refusals(encoder_grpc) == before + 1
    assert error.message.split(":")[0] in facts  # refused by the field's bound, before any address was looked at


def test_items_are_counted_before_they_are_looked_at(stub):
    """Their number comes first: whether they are of one kind is no question any more."""
    items = ["data:video/mp4;base64,", *[""] * 100_000]
    status, error = failure(stub.encode("many", items))
    assert (status, error.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "request_too_large")


def test_an_unknown_id_is_not_held_for_long(stub):
    with Receiver() as receiver:
        for call in (stub.register("never", receiver), stub.send("never", receiver)):
            assert failure(call)[0] is grpc.StatusCode.NOT_FOUND


def test_a_caller_that_cancels_releases_its_request(stub, encoder_grpc):
    call = stub.encode("cancelled", [data_uri(jpeg())])
    until(lambda: not nothing_is_held(encoder_grpc))
    call.cancel()
    until(lambda: nothing_is_held(encoder_grpc))


def test_health_and_reflection(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=5)
    assert {s.name for s in answer.list_services_response.service} >= {SERVICE, "grpc.health.v1.Health"}


@pytest.mark.parametrize("limit", [("--max-live-requests", "1"), ("--max-staged-bytes", str(64 * 64 * 4))])
def test_a_full_encoder_is_not_ready_for_more_and_not_sick(tiny, limit):
    """One picture's rows are held: they are the one live request, and all of the bytes."""
    with EncoderProcess(tiny, *FLAGS, *limit, "--grpc-port", "0") as process, Client(process.url) as client:
        assert httpx2.get(f"{process.url}/health/ready").status_code == 200
        client.hold(jpeg(224, 224), req_id="held")
        ready = httpx2.get(f"{process.url}/health/ready")
        assert (ready.status_code, ready.json()["code"]) == (503, "overloaded")
        assert int(ready.headers["retry-after"]) >= 1
        with pytest.raises(UnavailableError) as refused:
            client.encode(jpeg(224, 224, 1))
        assert refused.value.message == ready.json()["detail"]
        well = ("/health", "/health_generate", "/health/live", "/health/progress")
        assert [httpx2.get(process.url + path).status_code for path in well] == [200] * 4
        with grpc.insecure_channel(grpc_target(process)) as channel:
            state = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        client.release("held")
        until(lambda: httpx2.get(f"{process.url}/health/ready").status_code == 200)


def test_health_follows_the_encoder(tiny):
    """Its only process is killed again and again: not serving while none is up, and serving when one is."""
    with (
        EncoderProcess(tiny, *FLAGS, "--grpc-port", "0") as process,
        grpc.insecure_channel(grpc_target(process)) as open_,
    ):
        states = health_pb2_grpc.HealthStub(open_).Watch(health_pb2.HealthCheckRequest(service=""), timeout=60)
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        for child in children:
            subprocess.run(["kill", f"-{signal.SIGKILL.value}", child], check=False)
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        states.cancel()


def test_the_token_is_needed(tiny, tmp_path):
    token = tmp_path / "token"
    token.write_text("sesame\n")
    flags = (*FLAGS, "--grpc-port", "0", "--token-file", str(token))
    with EncoderProcess(tiny, *flags) as process, grpc.insecure_channel(grpc_target(process)) as open_:
        for metadata in ({}, {"authorization": "Bearer other"}):
            status, error = failure(Stub(open_, **metadata).encode("r", [data_uri(jpeg())]))
            assert (status, error.status) == (grpc.StatusCode.UNAUTHENTICATED, 401)
        more = threading.Event()
        silent = open_.stream_unary(f"/{SERVICE}/Encode").future(iter(more.wait, True), timeout=20)
        assert failure(silent)[0] is grpc.StatusCode.UNAUTHENTICATED, "refused before its message is there"
        more.set()
        metrics = httpx2.get(f"{process.url}/metrics", headers={"authorization": "Bearer sesame"}, trust_env=False).text
        assert 'encoder_refusals_total{code="unauthorized"} 3.0' in metrics
        with Receiver() as receiver:
            known = Stub(open_, authorization="Bearer sesame")
            known.encode("r", [data_uri(jpeg())], embedding_port=[receiver.port]).result()
        check = health_pb2_grpc.HealthStub(open_).Check(health_pb2.HealthCheckRequest(service=""), timeout=5)
        assert check.status == health_pb2.HealthCheckResponse.SERVING


SMALL_FLAGS = ("--max-body-bytes", "200000", "--max-bodies-bytes", "400000", "--max-connections", "4")


@pytest.fixture(scope="module")
def small(tiny):
    """An encoder whose bodies may take 400 kB, two of the largest, and that has four calls at most."""
    with EncoderProcess(tiny, *FLAGS, "--grpc-port", "0", *SMALL_FLAGS) as process:
        yield process


@pytest.fixture
def small_stub(small):
    with grpc.insecure_channel(grpc_target(small)) as made:
        yield Stub(made)
    until(lambda: gauges(small)["encoder_body_bytes"] == 0)


def padded(size: int) -> str:
    """A picture as base64, `size` characters: what follows its end is not looked at."""
    picture = jpeg(224, 224, 3)
    return base64.b64encode(picture + bytes(size * 3 // 4 - len(picture))).decode()


def test_messages_are_booked_with_all_other_bodies(small, small_stub):
    """Two of 180 kB are held until their receivers come; a third does not fit, over either door; then it does."""
    held = [small_stub.encode(f"held-{number}", [padded(180_000)]) for number in range(2)]
    until(lambda: gauges(small)["encoder_body_bytes"] > 360_000)
    status, error = failure(small_stub.encode("third", [padded(180_000)]))
    assert (status, error.code, error.retry_after) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded", None)
    assert "bytes of request bodies (limit 400000)" in error.message
    answer = httpx2.post(f"{small.url}/v1/encode", content=bytes(100_000), trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
    assert gauges(small)['encoder_refusals_total{code="overloaded"}'] == 2
    with Receiver() as receiver:
        small_stub.register("held-0", receiver).result()
        held[0].result()
        small_stub.encode("third", [padded(180_000)], embedding_port=[receiver.port]).result()
    held[1].cancel()


def test_so_many_calls_at_once(small, small_stub):
    waiting = [small_stub.encode(f"waiting-{number}", [padded(20_000)]) for number in range(4)]
    until(lambda: gauges(small)["encoder_live_requests"] == 4)
    status, error = failure(small_stub.encode("fifth", [padded(20_000)]))
    assert (status, error.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
    assert error.message == "The encoder is full: too many gRPC calls at once"
    for call in waiting:
        call.cancel()
    until(lambda: nothing_is_held(small))
    with Receiver() as receiver:
        small_stub.encode("fifth", [padded(20_000)], embedding_port=[receiver.port]).result()


def test_a_message_above_the_limit_is_not_taken(small, small_stub):
    call = small_stub.encode("large", [padded(250_000)])
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not [line for line in small.lines if "Traceback" in line]


def test_calls_without_their_message(small):
    """None at all, and bytes that are no message; the next call is served."""
    with grpc.insecure_channel(grpc_target(small)) as channel:
        path = f"/{SERVICE}/Encode"
        for call in (
            channel.stream_unary(path).future(iter(()), timeout=20),
            channel.unary_unary(path).future(b"\xff\xff", timeout=20),
        ):
            status, error = failure(call)
            assert (status, error.code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
        with Receiver() as receiver:
            Stub(channel).encode("next", [padded(20_000)], embedding_port=[receiver.port]).result()


def test_a_message_that_does_not_come_is_not_waited_for(tiny):
    """The one turn to read is held by a call that sends nothing: others are refused, and it is cut, and then others are read."""
    flags = ("--max-bodies-bytes", "200000", "--max-body-bytes", "200000", "--body-grace", "1")
    flags += ("--min-body-rate", "100000")  # 3 s for a message
    with (
        EncoderProcess(tiny, *FLAGS, "--grpc-port", "0", *flags) as process,
        grpc.insecure_channel(grpc_target(process)) as channel,
        Receiver() as receiver,
    ):
        more = threading.Event()
        silent = channel.stream_unary(f"/{SERVICE}/Encode").future(iter(more.wait, True), timeout=20)
        calls = (Stub(channel).encode(f"r{n}", [padded(20_000)], embedding_port=[receiver.port]) for n in range(100))
        status, error = failure(
            next(call for call in calls if call.exception())
        )  # those before overtook the silent one
        assert (status, error.message) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "The encoder is full: too many gRPC messages on their way",
        )
        status, error = failure(silent)
        assert (status, error.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "request_timeout")
        more.set()
        Stub(channel).encode("next", [padded(20_000)], embedding_port=[receiver.port]).result()
