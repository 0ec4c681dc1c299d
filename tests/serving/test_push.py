"""Rows pushed to receivers of one's own: a real server, real receivers, and what becomes of those that are not there."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
import zmq
import zmq.auth
from xxhash import xxh3_64

from tectum import Client
from tectum.config import Settings
from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.pushed import PushReceiver
from tectum.errors import BadRequestError, DeliveryError, LifecycleError, StartupError, TectumError
from tectum.serving import push
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


def test_a_receiver_counts_once_whatever_it_is_called(client, receiver, pushing):
    """An IPv4 address in IPv6's clothes is the same receiver (R9): nothing is sent twice."""
    port = receiver.address.rpartition(":")[2]
    client.push(jpeg(), [receiver.address, f"[::ffff:127.0.0.1]:{port}", receiver.address])
    assert receiver.receive(5).rows().rows == 64
    with pytest.raises(DeliveryError):
        receiver.receive(0.3)
    until(lambda: nothing_is_held(pushing))


def test_a_receiver_waits_as_long_as_its_request_lives(client, receiver):
    """Longer than one delivery may take: what the request ended with is the answer, and not that it still lives."""
    with ThreadPoolExecutor(2) as threads, PushReceiver() as late:
        encoded = threads.submit(client.push, jpeg(), receivers=2, req_id="long")
        until(lambda: waits(client, "long"))
        assert client.register("long", [receiver.address])["state"] == "staged"
        again = threads.submit(client.register, "long", [receiver.address])
        with pytest.raises(TimeoutError):
            again.result(3.3)  # of a --send-timeout of 3
        client.register("long", [late.address])
        assert (again.result(5)["reason"], encoded.result(5)["rows"]) == ("delivered", 64)


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


def test_names_that_do_not_resolve_are_given_up(monkeypatch):
    """By a resolver that does not answer: one call is not held by 256 names, each with a time-out of its own."""

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", _never)
        monkeypatch.setattr(push, "RESOLVING", 0.05)
        pushes = push.Pushes(None, None, Settings(transfer_backend="zmq"))
        with pytest.raises(BadRequestError, match=r"cannot be resolved within 0\.05 s"):
            await asyncio.wait_for(pushes.documents_to(["slow:1", "slower:1"]), 5)

    asyncio.run(main())


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


def message(metadata: object = None, **tensors: tuple[str, list[int], bytes]) -> list[bytes]:
    """A document as its peer may write it, its checksum right, in two frames."""
    known = {"item_rows": ("I64", [1], struct.pack("<q", 2)), "rows": ("F32", [2, 4], bytes(32)), **tensors}
    header: dict[str, object] = {"__metadata__": {"tectum": "2", "req_id": "r", "dtype": "float32"} | (metadata or {})}
    end = 0
    for name, (dtype, shape, data) in (*known.items(), ("xxh3", ("U8", [8], bytes(8)))):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in known.values())
    return [whole, xxh3_64(whole).digest()]


EMPTY = {"item_rows": ("I64", [0], b"")}


@pytest.mark.parametrize(
    "frames",
    [
        message({"req_id": ["r"]}),
        message({"req_id": ""}),
        message({"req_id": "a\x1b[31m"}),
        message({"req_id": "\ud800"}),
        message({"req_id": "r" * 257}),
        message(**EMPTY, rows=("F32", [0, 10**4000], b"")),
        message(item_rows=("I64", [10_001], struct.pack("<q", 2) + bytes(80_000))),
        message(items=("U8", [2**24 + 4], b"[{}" + b" " * 2**24 + b"]")),
        [b'{"req_id": "r\\n", "code": "internal"}'],
        ['{"req_id": "r", "code": "internal"}'.encode("utf-16")],
        [b'{"req_id": "r", "code": "internal", "detail": "' + b"x" * 65536 + b'"}'],
    ],
    ids=[
        "a list",
        "no id",
        "a terminal's",
        "no text",
        "a long id",
        "width",
        "items",
        "facts",
        "error's id",
        "utf-16",
        "large error",
    ],
)
def test_what_no_encoder_sends_is_dropped(receiver, frames):
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"tcp://{receiver.address}")
        stranger.send_multipart(frames)
        stranger.send_multipart(message())
        came = receiver.receive(5)
    assert (came.req_id, came.rows().item_rows, receiver.strays) == ("r", (2,), 1)


def test_a_message_of_any_number_of_frames_holds_nobody_beyond_the_timeout(receiver):
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"tcp://{receiver.address}")
        for _ in range(1_000_000):
            stranger.send(b"", zmq.SNDMORE, copy=True)
        stranger.send(b"")
        assert receiver._socket.poll(20_000)
        started = time.monotonic()
        with pytest.raises(DeliveryError, match="No rows came"):
            receiver.receive(0)
        assert time.monotonic() - started < 0.1
        stranger.send_multipart(message())
        assert receiver.receive(20).req_id == "r"


@pytest.mark.parametrize("wrong", [{"status": True}, {"status": 99999}, {"status": "400"}, {"item": [1]}, {"item": -1}])
def test_fields_of_an_error_that_cannot_be_are_left_out(receiver, wrong):
    problem = {"req_id": "r", "code": "media_decode_failed", "detail": {"no": "text"}, "spec": 1, **wrong}
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"tcp://{receiver.address}")
        stranger.send(json.dumps(problem).encode())
        error = receiver.receive(5).error
    assert isinstance(error, BadRequestError)
    assert (error.status, error.item, error.message) == (400, None, "the server reported no detail")
    assert error.retryable is False


def test_what_allocate_raises_is_the_callers_and_no_stray(receiver):
    def full(_: int) -> bytearray:
        raise DeliveryError("invalid_rows", "no room")

    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"tcp://{receiver.address}")
        stranger.send_multipart(message())
        with pytest.raises(DeliveryError, match="no room"):
            receiver.receive(5, full)
        stranger.send_multipart(message())
        assert receiver.receive(math.inf).req_id == "r", "for ever is a time, too"
    assert receiver.strays == 0


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
    with pytest.raises(StartupError, match="port: 70000 is not between"):
        PushReceiver(port=70000)  # libzmq listens at 4464
    with pytest.raises(StartupError, match=r"secret_key_file: .*No such file"):
        PushReceiver(secret_key_file=tmp_path / "missing")
    public, secret = zmq.auth.create_certificates(tmp_path, "receiver")
    with pytest.raises(StartupError, match="secret_key_file: it needs a secret key and the public key that belongs"):
        PushReceiver(secret_key_file=public)
    with pytest.raises(StartupError, match="encoder_key_files: they need a secret_key_file"):
        PushReceiver(encoder_key_files=[public])  # anybody could push, in the clear
    short = tmp_path / "short.key"
    short.write_text('curve\n    public-key = "abc"\n')
    with pytest.raises(StartupError, match=r"encoder_key_files: .* is not 40 characters of Z85"):
        PushReceiver(secret_key_file=secret, encoder_key_files=[short])  # nobody has that one


def test_over_ipv6(pushing, client):
    with PushReceiver("::1") as receiver:
        client.push(jpeg(), [receiver.address])
        assert receiver.address.startswith("[::1]:")
        assert receiver.receive(5).rows().rows == 64
