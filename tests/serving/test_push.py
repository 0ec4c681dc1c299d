"""Rows pushed to receivers of one's own: a real server, real receivers, and what becomes of those that are not there."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
import zmq
import zmq.auth

from tectum import Client
from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.pushed import PushReceiver
from tectum.errors import BadRequestError, DeliveryError, LifecycleError, StartupError, TectumError
from tests import zoo
from tests.serving.test_native import gauges, jpeg, nothing_is_held, until

FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--unknown-id-wait", "0.5")


@pytest.fixture(scope="module")
def pushing(tiny) -> Iterator[EncoderProcess]:
    """SGLang's doors stay closed."""
    with EncoderProcess(tiny, *FLAGS, "--transfer-backend", "zmq", "--send-timeout", "3") as process:
        yield process


@pytest.fixture(scope="module")
def client(pushing) -> Iterator[Client]:
    with Client(pushing.url) as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[PushReceiver]:
    with PushReceiver() as made:
        yield made


def nobody() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def waits(client: Client, req_id: str) -> bool:
    try:
        return client.status(req_id)["state"] == "staged"
    except LifecycleError:
        return False


@pytest.mark.parametrize("sides", [(28, 28), (224, 224), (896, 896)], ids=["frames copied", "some lent", "large"])
def test_what_is_pushed_is_what_a_caller_would_read(client, receiver, pushing, sides):
    """Rows, facts and all: of a few bytes, which are copied, and of more, which go out of staging memory itself."""
    pictures = [jpeg(*sides, 1), jpeg(140, 84, 2)]
    inline = client.encode(pictures)
    metadata = client.push(pictures, [receiver.address], req_id=f"pushed-{sides[0]}")
    came = receiver.receive(5)
    assert (came.req_id, came.error, receiver.strays) == (f"pushed-{sides[0]}", None, 0)
    embedding = came.rows().embedding()
    assert torch.equal(embedding.rows, inline.rows)
    assert (embedding.item_rows, embedding.grid_thw) == (inline.item_rows, inline.grid_thw)
    assert embedding.items == inline.items
    assert metadata["rows"] == len(inline.rows)
    assert client.status(came.req_id)["reason"] == "delivered"
    until(lambda: nothing_is_held(pushing))


def test_deepstack_layers_come_too(tmp_path, receiver):
    model = zoo.build("qwen3_vl", tmp_path / "model")
    with (
        EncoderProcess(model, *FLAGS, "--transfer-backend", "zmq_to_scheduler") as process,
        Client(process.url) as asked,
    ):
        inline = asked.encode(jpeg())
        asked.push(jpeg(), [receiver.address])
    found = receiver.receive(5).rows().embedding()
    assert len(found.deepstack) == len(inline.deepstack) > 0
    for ours, theirs in zip((found.rows, *found.deepstack), (inline.rows, *inline.deepstack), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_land_in_memory_of_the_receivers_choice(client, receiver):
    chosen = bytearray(1 << 20)
    client.push(jpeg(), [receiver.address])
    document = receiver.receive(5, lambda nbytes: memoryview(chosen)[:nbytes]).rows()
    start = document.offsets[0]
    assert bytes(chosen[start : start + 64 * 64 * 4]) == bytes(document.arrays[0].data)
    assert torch.equal(document.embedding().rows, client.encode(jpeg()).rows)


@pytest.mark.parametrize("before", [True, False], ids=["before the encode", "once it is staged"])
def test_receivers_register_by_themselves(client, pushing, before):
    """Two of them for one request, announced as such: the first is not the last."""
    name = f"by-themselves-{before}"
    with PushReceiver() as one, PushReceiver() as other, ThreadPoolExecutor(3) as threads:
        if before:
            first = threads.submit(client.register, name, [one.address], receivers=2)
        encoded = threads.submit(client.push, jpeg(seed=5), receivers=2, req_id=name)
        if not before:
            until(lambda: waits(client, name))
            first = threads.submit(client.register, name, [one.address], receivers=2)
        rows = one.receive(5).rows().embedding().rows
        assert first.result(5)["state"] == "staged", "one more is to come"
        assert not encoded.done()
        assert client.register(name, [other.address])["req_id"] == name
        assert torch.equal(other.receive(5).rows().embedding().rows, rows)
        assert encoded.result(5)["rows"] == 64
    assert torch.equal(rows, client.encode(jpeg(seed=5)).rows)
    assert client.status(name)["reason"] == "delivered"
    until(lambda: nothing_is_held(pushing))


def test_the_caller_says_how_many_receivers_there_will_be(client, receiver, pushing):
    """One is known and one is to come, who does not know of the other."""
    with PushReceiver() as late, ThreadPoolExecutor(2) as threads:
        encoded = threads.submit(client.push, jpeg(), [receiver.address], receivers=2, req_id="two")
        rows = receiver.receive(5).rows().embedding().rows
        again = threads.submit(client.register, "two", [receiver.address])  # a retry is no second receiver
        assert waits(client, "two")
        client.register("two", [late.address])
        assert torch.equal(late.receive(5).rows().embedding().rows, rows)
        assert encoded.result(5)["rows"] == 64
        assert again.result(5)["req_id"] == "two"
        with pytest.raises(DeliveryError):
            receiver.receive(0.1)
    until(lambda: nothing_is_held(pushing))


def test_a_receiver_that_is_not_there_delays_no_other_and_is_reported(client, receiver, pushing):
    started = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(client.push, jpeg(), [nobody(), receiver.address])
        receiver.receive(2).rows()
        assert time.monotonic() - started < 2, "before the other's time-out of 3 s"
        with pytest.raises(DeliveryError) as caught:
            pushed.result(10)
    assert (caught.value.code, caught.value.status) == ("send_timeout", 504)
    until(lambda: nothing_is_held(pushing))


def test_receivers_hear_why_no_rows_come(client, receiver, pushing):
    with pytest.raises(BadRequestError) as caught:
        client.push([jpeg(), jpeg()[:-300]], [receiver.address], req_id="bad")
    came = receiver.receive(5)
    assert (came.req_id, came.document) == ("bad", None)
    with pytest.raises(BadRequestError) as reported:
        came.rows()
    told, raised = reported.value, caught.value
    assert (told.code, told.item, told.status) == (raised.code, 1, 400)
    with pytest.raises(BadRequestError) as late:
        client.register("bad", [receiver.address])
    assert (late.value.code, late.value.item) == (raised.code, 1)
    until(lambda: nothing_is_held(pushing))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"mode": "push", "destinations": ["nowhere"]}, "The receiver's address is not host:port"),
        ({"mode": "push", "destinations": ["127.0.0.1:0"]}, "The receiver's address is not host:port"),
        ({"mode": "hold", "destinations": ["127.0.0.1:9"]}, "delivery: destinations and receivers are for mode push"),
        ({"mode": "inline", "receivers": 2}, "delivery: destinations and receivers are for mode push"),
        ({"mode": "push", "destinations": ["127.0.0.1:9"] * 257}, "delivery.destinations"),
        ({"mode": "shove"}, "delivery.mode: not one of inline, hold, push"),
    ],
)
def test_what_no_receiver_can_be_is_said(pushing, body, words):
    item = {"type": "image", "data": ""}
    answer = httpx2.post(f"{pushing.url}/v1/encode", json={"items": [item], "delivery": body})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert words in answer.json()["detail"]
    assert nothing_is_held(pushing)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"destinations": []}', b'{"destinations": "127.0.0.1:9"}'])
def test_a_registration_that_cannot_be_read(pushing, body):
    answer = httpx2.post(f"{pushing.url}/v1/requests/r/destinations", content=body)
    assert (answer.status_code, answer.json()["code"], answer.json()["req_id"]) == (400, "invalid_request", "r")


def test_nobody_is_pushed_rows_of_a_request_that_never_comes(client, receiver):
    with pytest.raises(LifecycleError) as caught:
        client.register("never", [receiver.address])
    assert (caught.value.code, caught.value.status) == ("request_not_found", 404)


def test_a_server_without_a_backend_says_so(server, receiver):
    with Client(server.url) as client:
        for call in (lambda: client.push(jpeg(), [receiver.address]), lambda: client.register("r", [receiver.address])):
            with pytest.raises(BadRequestError, match="was started without --transfer-backend"):
                call()


def test_sglangs_doors_are_closed(pushing):
    assert httpx2.post(f"{pushing.url}/encode", json={}).status_code == 404
    assert httpx2.get(f"{pushing.url}/health").json() == {"status": "ready"}


def test_only_networks_that_are_allowed_are_pushed_to(tiny, receiver):
    flags = (*FLAGS, "--transfer-backend", "zmq", "--receiver-networks", "10.0.0.0/8")
    with EncoderProcess(tiny, *flags) as process, Client(process.url) as client:
        with pytest.raises(BadRequestError, match="lies in none of --receiver-networks"):
            client.push(jpeg(), [receiver.address])
        assert gauges(process)['encoder_refusals_total{code="invalid_request"}'] == 1


def test_with_curve_rows_come_from_known_encoders_and_from_nobody_else(tiny, tmp_path):
    names = ("receiver", "encoder", "stranger")
    public, secret = {}, {}
    for name in names:
        public[name], secret[name] = zmq.auth.create_certificates(tmp_path, name)

    def keys(name: str) -> tuple[str, ...]:
        curve = ("--zmq-curve-server-key-file", public["receiver"], "--zmq-curve-secret-key-file", secret[name])
        return (*FLAGS, "--transfer-backend", "zmq", "--send-timeout", "2", *curve)

    with (
        PushReceiver(secret_key_file=secret["receiver"], encoder_key_files=[public["encoder"]]) as receiver,
        EncoderProcess(tiny, *keys("encoder")) as known,
        EncoderProcess(tiny, *keys("stranger")) as unknown,
        Client(known.url) as client,
        Client(unknown.url) as stranger,
    ):
        with pytest.raises(DeliveryError, match="not confirmed within 2 s"):
            stranger.push(jpeg(), [receiver.address])
        client.push(jpeg(), [receiver.address], req_id="sealed")
        came = receiver.receive(5)
        assert came.req_id == "sealed", "nothing of the stranger's"
        assert torch.equal(came.rows().embedding().rows, client.encode(jpeg()).rows)


# --- the receiver alone ---


def test_garbage_is_dropped_and_counted(receiver):
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"tcp://{receiver.address}")
        for frames in ([b""], [b"garbage"], [b"[]"], [b'{"req_id": 3}'], [b"\x80\x04."], [b"a", b"b"], [b"", b"", b""]):
            stranger.send_multipart(frames)
        stranger.send(b'{"req_id": "r", "code": "media_decode_failed", "detail": "no", "status": 400, "item": 0}')
        came = receiver.receive(5)
    assert (came.req_id, receiver.strays) == ("r", 7)
    assert isinstance(came.error, TectumError)
    assert (came.error.code, came.error.status, came.error.item) == ("media_decode_failed", 400, 0)


def test_rows_that_were_changed_on_the_way_are_dropped(client, receiver):
    """What an encoder pushes, with one bit turned by a relay."""
    with zmq.Context() as context, context.socket(zmq.PULL) as between, context.socket(zmq.PUSH) as onward:
        port = between.bind_to_random_port("tcp://127.0.0.1")
        onward.connect(f"tcp://{receiver.address}")
        client.push(jpeg(), [f"127.0.0.1:{port}"], req_id="relayed")
        frames = between.recv_multipart()
        for number in range(len(frames)):
            turned = bytearray(frames[number])
            turned[-1] ^= 1
            onward.send_multipart([*frames[:number], bytes(turned), *frames[number + 1 :]])
        onward.send_multipart(frames)
        assert receiver.receive(5).req_id == "relayed"
    assert receiver.strays == len(frames)


def test_nothing_comes(receiver):
    with pytest.raises(DeliveryError, match=r"No rows came within 0\.05 s") as caught:
        receiver.receive(0.05)
    assert caught.value.code == "send_timeout"


def test_receivers_that_cannot_be(tmp_path, receiver):
    with pytest.raises(StartupError, match="cannot listen"):
        PushReceiver(port=int(receiver.address.rpartition(":")[2]))
    with pytest.raises(StartupError, match="holds no CURVE key"):
        PushReceiver(secret_key_file=tmp_path / "missing")
    public, _ = zmq.auth.create_certificates(tmp_path, "receiver")
    with pytest.raises(StartupError, match="holds no secret key"):
        PushReceiver(secret_key_file=public)


def test_over_ipv6(pushing, client):
    with PushReceiver("::1") as receiver:
        client.push(jpeg(), [receiver.address])
        assert receiver.address.startswith("[::1]:")
        assert receiver.receive(5).rows().rows == 64
