"""Delivery over ZeroMQ against real sockets, and receivers that stall, die and never were."""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import zmq
import zmq.auth
from zmq.utils.garbage import gc as garbage

from tectum.config import Settings
from tectum.delivery.base import Deliveries, deliveries, split_address, zmq_destination
from tectum.delivery.documents import DocumentBackend
from tectum.delivery.zmq import ZmqBackend, _Acknowledged
from tectum.engines.pushed import PushReceiver
from tectum.errors import BadRequestError, DeliveryError, StartupError
from tectum.types import Destination
from tests.delivery.rows import Rows
from tests.sglang.receiver import Receiver

MIB = 1024 * 1024


def with_backend(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def main(*args: Any) -> None:
            async with ZmqBackend(Settings(transfer_backend="zmq_to_scheduler", **settings)) as backend:
                await test(backend, *args)
                assert asyncio.all_tasks() - {asyncio.current_task()} <= watchers(backend)
            await asyncio.sleep(0)

        @functools.wraps(test)
        def run() -> None:
            asyncio.run(main())

        del run.__wrapped__  # pytest would take the test's own parameters for fixtures
        return run

    return decorate


def watchers(backend: ZmqBackend) -> set[Any]:
    return {connection._watcher for connection in backend._connections.values()}


def to(receiver: Receiver) -> Destination:
    return zmq_destination(*split_address(receiver.address))


def queued(backend: ZmqBackend, destination: Destination) -> int:
    """Bytes that libzmq was given for a receiver."""
    connection = backend._connections.get(destination.address)
    return 0 if connection is None else connection._end


def held_by_libzmq() -> set[int]:
    """Addresses of the memory that pyzmq keeps for libzmq."""
    return {numpy.frombuffer(held.obj, numpy.uint8).ctypes.data for held in list(garbage.refs.values())}


def nobody() -> Destination:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return zmq_destination("127.0.0.1", free.getsockname()[1])


async def off_loop(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


@with_backend()
async def test_rows_arrive_as_they_lie(backend):
    with Receiver() as receiver:
        for rows in (4, 64, 16384):
            staged = Rows(rows=rows, width=1024)
            sending = asyncio.create_task(backend.send(staged, to(receiver)))
            message, got = await off_loop(receiver.message)
            await sending
            assert torch.equal(got, staged.expected)
            assert message.shape == [rows, 1024]
        assert backend.open_connections() == 1


@with_backend()
async def test_deepstack_layers_are_woven_in_as_columns(backend):
    with Receiver() as receiver:
        for rows in (8, 8192):  # one slice, and several
            staged = Rows(rows=rows, width=256, layers=3)
            _, (_, got) = await asyncio.gather(backend.send(staged, to(receiver)), off_loop(receiver.message))
            assert torch.equal(got, staged.expected)


@with_backend()
async def test_documents_are_counted_to_the_byte(backend):
    """Frames that are copied and frames that are lent: the kernel's count and ours agree, so that no delivery counts early."""
    documents = DocumentBackend(backend)
    with PushReceiver() as receiver:
        destination = zmq_destination(*split_address(receiver.address), "documents")
        for rows, layers in ((4, 0), (64, 2), (16384, 1)):
            staged = Rows(f"rows-{rows}", rows, 256, layers)
            _, came = await asyncio.gather(documents.send(staged, destination), off_loop(receiver.receive))
            found = came.rows().embedding()
            assert torch.equal(torch.cat([found.rows, *found.deepstack], 1), staged.expected)
            connection = backend._connections[destination.address]
            assert connection._acknowledged.now() == connection._end


@with_backend()
async def test_rows_are_read_out_of_staging_memory_itself(backend):
    """While a receiver does not read, a byte changes that has not left yet: it must arrive changed."""
    with Receiver(rcvhwm=1) as receiver:
        staged = Rows(rows=16384, width=1024)
        filler = [asyncio.create_task(backend.send(Rows(rows=16384, width=1024), to(receiver))) for _ in range(3)]
        sending = asyncio.create_task(backend.send(staged, to(receiver)))
        await until(lambda: queued(backend, to(receiver)) > 3 * 64 * MIB)
        staged.lease.views()[0][-4:] = b"\0\0\0\0"
        assert staged.arrays[0][-1, -1] == 0
        for _ in range(3):
            await off_loop(receiver.message)
        _, got = await off_loop(receiver.message)
        assert got[-1, -1] == 0
        await asyncio.gather(sending, *filler)


@with_backend()
async def test_ipv6(backend):
    with Receiver("::1") as receiver:
        assert to(receiver).address.startswith("tcp://[::1]:")
        staged = Rows()
        _, (_, got) = await asyncio.gather(backend.send(staged, to(receiver)), off_loop(receiver.message))
        assert torch.equal(got, staged.expected)


@with_backend()
async def test_many_requests_share_a_connection_and_stay_apart(backend):
    with Receiver() as receiver:
        staged = {f"r{i}_local_part_0": Rows(f"r{i}_local_part_0", rows=64 + 16 * (i % 3)) for i in range(40)}
        sending = [asyncio.create_task(backend.send(rows, to(receiver))) for rows in staged.values()]
        for _ in staged:
            message, got = await off_loop(receiver.message)
            assert torch.equal(got, staged[message.req_id].expected)
        await asyncio.gather(*sending)
        assert backend.open_connections() == 1


@with_backend()
async def test_heartbeats_that_libzmq_answers_are_not_taken_for_rows(backend):
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.setsockopt(zmq.HEARTBEAT_IVL, 5)
        destination = zmq_destination("127.0.0.1", pull.bind_to_random_port("tcp://127.0.0.1"))
        error = BadRequestError("invalid_request", "no")
        await backend.notify("r1", destination, error)
        (connection,) = backend._connections.values()
        await until(lambda: connection._acknowledged.now() > connection._end + 300)
        await backend.notify("r2", destination, error)
        assert connection._acknowledged.now() - connection._end < 100, "a message would count that many bytes too early"


@with_backend()
async def test_an_error_is_one_frame(backend):
    with Receiver() as receiver:
        error = BadRequestError("image_too_large", "Too many pixels")
        telling = asyncio.create_task(backend.notify("r_local_part_1", to(receiver), error))
        message, rows = await off_loop(receiver.message)
        await telling
        assert rows is None
        assert (message.req_id, message.error_code, message.error_msg) == ("r_local_part_1", 413, "Too many pixels")


@with_backend()
async def test_a_receiver_that_reads_everything_and_goes_was_served(backend):
    """SGLang's tokenizer closes its socket the moment its parts are there: no failure may be made of that."""
    for _ in range(40):
        with Receiver() as receiver:
            staged = Rows(rows=256, width=1024)
            sending = asyncio.create_task(backend.send(staged, to(receiver)))
            await off_loop(receiver.message)
        await sending
    await until(lambda: backend.open_connections() == 0)


@with_backend()
async def test_dead_receivers_do_not_delay_a_healthy_one(backend):
    dead = [asyncio.create_task(backend.send(Rows(), nobody())) for _ in range(30)]
    with Receiver() as receiver:
        staged = Rows(rows=4096)
        started = time.monotonic()
        await asyncio.gather(backend.send(staged, to(receiver)), off_loop(receiver.message))
        assert time.monotonic() - started < 1.0
    for sending in dead:
        assert not sending.done()
        sending.cancel()
    await asyncio.gather(*dead, return_exceptions=True)
    await until(lambda: backend.open_connections() == 0)


@with_backend()
async def test_a_send_that_is_given_up_ends_when_nothing_reads_its_rows(backend):
    """Its receiver stalls. After the send has ended the rows may be overwritten, and none of that may ever arrive."""
    with Receiver(rcvhwm=1) as receiver:
        staged = [Rows(f"r{i}_local_part_0", rows=16384, width=1024) for i in range(3)]
        sending = [asyncio.create_task(backend.send(rows, to(receiver))) for rows in staged]
        await until(lambda: queued(backend, to(receiver)) > 2 * 64 * MIB)
        before = staged[0].expected
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sending[2]
        assert staged[2].arrays[0].data_ptr() not in held_by_libzmq()
        outcomes = await asyncio.gather(*sending[:2], return_exceptions=True)
        assert all(o is None or (isinstance(o, DeliveryError) and o.code == "send_failed") for o in outcomes)
        assert isinstance(outcomes[1], DeliveryError)
        for rows in staged:
            rows.arrays[0].zero_()
        while not receiver.is_silent(300):
            message, got = receiver.message()
            assert (message.req_id, torch.equal(got, before)) == ("r0_local_part_0", True)
        assert backend.open_connections() == 0


def receiver_process() -> subprocess.Popen[str]:
    """A receiver that never reads, in a process that can be killed; it prints its port."""
    return subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


DYING = """
import sys, zmq
context = zmq.Context(); pull = context.socket(zmq.PULL); pull.setsockopt(zmq.RCVHWM, 1)
print(pull.bind_to_random_port("tcp://127.0.0.1"), flush=True)
sys.stdin.read()
"""


@with_backend()
async def test_a_receiver_killed_half_way_is_reported(backend):
    with receiver_process() as process:
        destination = zmq_destination("127.0.0.1", int(process.stdout.readline()))
        sending = [
            asyncio.create_task(backend.send(Rows(f"r{i}", rows=16384, width=1024), destination)) for i in range(4)
        ]
        await until(lambda: queued(backend, destination) > 3 * 64 * MIB)
        process.send_signal(signal.SIGKILL)
        outcomes = await asyncio.gather(*sending, return_exceptions=True)
        process.wait(10)
    assert [getattr(outcome, "code", outcome) for outcome in outcomes[-2:]] == ["send_failed", "send_failed"]
    assert backend.open_connections() == 0


@with_backend()
async def test_a_peer_that_speaks_something_else_is_never_taken_for_a_receiver(backend):
    with socket.create_server(("127.0.0.1", 0)) as other:
        sending = asyncio.create_task(backend.send(Rows(), zmq_destination("127.0.0.1", other.getsockname()[1])))
        peer, _ = await off_loop(other.accept)
        with peer:
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 200)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await sending
    assert backend.open_connections() == 0


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@with_backend()
async def test_departed_receivers_leave_no_descriptor_behind(backend):
    with Receiver() as first:
        await asyncio.gather(backend.send(Rows(), to(first)), off_loop(first.message))
        before = descriptors()
        for _ in range(40):
            with Receiver() as receiver:
                await asyncio.gather(backend.send(Rows(), to(receiver)), off_loop(receiver.message))
        await until(lambda: backend.open_connections() == 1)
        await until(lambda: descriptors() <= before)


@with_backend(receiver_idle=0.05)
async def test_an_idle_connection_is_closed_and_made_again(backend):
    with Receiver() as receiver:
        for _ in range(2):
            await asyncio.gather(backend.send(Rows(), to(receiver)), off_loop(receiver.message))
            assert backend.open_connections() == 1
            await until(lambda: backend.open_connections() == 0)


@with_backend(max_receivers=3)
async def test_connections_are_limited_in_number(backend):
    receivers = [Receiver() for _ in range(5)]
    for receiver in receivers:  # an idle one makes room
        await asyncio.gather(backend.send(Rows(), to(receiver)), off_loop(receiver.message))
        assert backend.open_connections() <= 3
    for receiver in receivers:
        receiver.close()
    await until(lambda: backend.open_connections() == 0)
    busy = [asyncio.create_task(backend.send(Rows(), nobody())) for _ in range(3)]
    await until(lambda: backend.open_connections() == 3)
    with pytest.raises(DeliveryError) as caught:
        await backend.send(Rows(), nobody())
    assert "--max-receivers" in caught.value.message
    for sending in busy:
        sending.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


@with_backend(max_receivers=2)
async def test_receivers_that_do_not_answer_make_room(backend):
    """They would keep all places until their time-out, from receivers that are there."""
    busy = [asyncio.create_task(backend.send(Rows(), nobody())) for _ in range(2)]
    await until(lambda: backend.open_connections() == 2)
    with Receiver() as receiver:
        while True:
            try:
                await backend.send(Rows(), to(receiver))
                break
            except DeliveryError:
                await asyncio.wait(busy, timeout=0.05)
        await off_loop(receiver.message)
        done, waiting = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1), "one place was enough"
        with pytest.raises(DeliveryError, match="did not answer, and its place was needed"):
            done.pop().result()
    waiting.pop().cancel()
    await asyncio.gather(*busy, return_exceptions=True)


def test_a_backend_that_does_not_run_is_an_error_of_the_delivery():
    async def main() -> None:
        async with Deliveries({}) as none:
            for call in (
                none.send(Rows(), Destination("x", "zmq")),
                none.notify("r", Destination("x", "zmq"), BadRequestError("invalid_request", "x")),
            ):
                with pytest.raises(DeliveryError):
                    await call

    asyncio.run(main())


def test_a_missing_library_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(StartupError) as caught:
        deliveries(Settings(transfer_backend="zmq_to_scheduler"))
    assert caught.value.code == "missing_dependency"
    assert 'pip install "tectum[sglang]"' in caught.value.message


def test_an_unknown_backend_is_refused():
    with pytest.raises(StartupError) as caught:
        Settings.load(transfer_backend="carrier_pigeon")
    assert "zmq_to_scheduler" in caught.value.message


@pytest.mark.parametrize(
    ("address", "split"),
    [
        ("127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("[::1]:5000", ("::1", 5000)),
        ("::1:5000", ("::1", 5000)),
        ("prefill-0.local:65535", ("prefill-0.local", 65535)),
    ],
)
def test_addresses(address, split):
    assert split_address(address) == split


@pytest.mark.parametrize(
    "address",
    ["", ":5000", "host", "host:", "host:0", "host:65536", "host:1e3", "ho st:1", "a/b:1", "tcp://a:1", "a;b:1"],
)
def test_addresses_that_are_none(address):
    with pytest.raises(BadRequestError):
        split_address(address)


# --- CURVE ---

OURS, THEIRS, OTHERS = zmq.curve_keypair(), zmq.curve_keypair(), zmq.curve_keypair()


def curve(folder: Path, receivers: bytes = THEIRS[0], ours: tuple[bytes, bytes] = OURS) -> dict[str, Any]:
    """The settings, and the files they name."""
    server, secret = folder / "receivers.key", folder / "encoder.key_secret"
    server.write_bytes(receivers + b"\n")
    secret.write_text(f'curve\n    public-key = "{ours[0].decode()}"\n    secret-key = "{ours[1].decode()}"\n')
    return {"zmq_curve_server_key_file": server, "zmq_curve_secret_key_file": secret}


def test_rows_go_encrypted_to_whoever_has_the_right_key_and_to_nobody_else(tmp_path):
    """The kernel's count and ours agree to the byte; a wrong key is given up in time, and the right one is not kept waiting."""

    async def main() -> None:
        settings = Settings(transfer_backend="zmq_to_scheduler", **curve(tmp_path))
        async with ZmqBackend(settings) as backend:
            with Receiver(keys=THEIRS) as right, Receiver(keys=OTHERS) as wrong, Receiver() as plain:

                async def refused(receiver: Receiver) -> None:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(2):
                            await backend.send(Rows(), to(receiver))

                refusals = [asyncio.create_task(refused(each)) for each in (wrong, plain)]
                for rows in (1, 64, 16384):  # frames with a short head, and with a long one
                    staged = Rows(rows=rows, width=32)
                    _, (_, got) = await asyncio.gather(backend.send(staged, to(right)), off_loop(right.message))
                    assert torch.equal(got, staged.expected)
                    connection = backend._connections[to(right).address]
                    assert connection._acknowledged.now() == connection._end
                assert not any(each.done() for each in refusals)
                await asyncio.gather(*refusals)
                assert wrong.is_silent()
                assert plain.is_silent()
                assert backend.open_connections() == 1

    asyncio.run(main())


def test_no_byte_of_the_rows_is_on_the_wire(tmp_path):
    """Through a relay that keeps what it passes on: with CURVE a marked row is not among it, without it is."""
    mark = b"sixteen bytes..."

    async def seen(settings: Settings, receiver: Receiver) -> bytes:
        kept = bytearray()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", receiver.port)

            async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    kept.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(pass_on(reader, to_writer), pass_on(to_reader, writer))

        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server, ZmqBackend(settings) as backend:
            staged = Rows(rows=64, width=32)
            staged.lease.views()[0][:16] = mark
            between = zmq_destination("127.0.0.1", server.sockets[0].getsockname()[1])
            _, (_, got) = await asyncio.gather(backend.send(staged, between), off_loop(receiver.message))
            assert got.numpy().tobytes()[:16] == mark
        return bytes(kept)

    with Receiver(keys=THEIRS) as sealed, Receiver() as plain:
        asked = {"transfer_backend": "zmq_to_scheduler"}
        assert mark not in asyncio.run(seen(Settings(**asked, **curve(tmp_path)), sealed))
        assert mark in asyncio.run(seen(Settings(**asked), plain))


def test_curve_keys_that_cannot_be_used_are_named_at_start_up(tmp_path, monkeypatch):
    def refused(**given: Any) -> str:
        with pytest.raises(StartupError) as caught:
            deliveries(Settings.load(transfer_backend="zmq_to_scheduler", **given))
        return caught.value.message

    good = curve(tmp_path)
    for name in good:
        (other,) = good.keys() - {name}
        assert refused(**{name: good[name]}) == f"settings: {name} has no effect without {other}"
        missing = tmp_path / "missing"
        assert refused(**{**good, name: missing}) == f"{name}: {missing}: No such file or directory"
    with pytest.raises(StartupError, match="has no effect without a transfer_backend"):
        Settings.load(**good)
    (tmp_path / "nonsense").write_bytes(b"\xff" * 50)
    said = refused(**{**good, "zmq_curve_server_key_file": tmp_path / "nonsense"})
    assert said == f"zmq_curve_server_key_file: {tmp_path / 'nonsense'} holds no public key"
    assert "not 40 characters of Z85" in refused(**curve(tmp_path, receivers=b'"' * 40))
    assert "the public key that belongs to it" in refused(**curve(tmp_path, ours=(OTHERS[0], OURS[1])))
    good = curve(tmp_path)
    assert "the public key that belongs to it" in refused(
        **{**good, "zmq_curve_secret_key_file": tmp_path / "receivers.key"}
    )
    assert isinstance(deliveries(Settings(transfer_backend="zmq_to_scheduler", **good)), Deliveries)
    monkeypatch.setattr(zmq, "has", lambda name: False)
    assert refused(**good) == "zmq_curve_server_key_file: this build of libzmq has no CURVE"


def test_the_certificates_of_pyzmq_are_taken(tmp_path):
    theirs, _ = zmq.auth.create_certificates(tmp_path, "receivers")
    _, ours = zmq.auth.create_certificates(tmp_path, "encoder")
    files = {"zmq_curve_server_key_file": theirs, "zmq_curve_secret_key_file": ours}

    async def main() -> None:
        async with ZmqBackend(Settings(transfer_backend="zmq_to_scheduler", **files)) as backend:
            with Receiver(keys=zmq.auth.load_certificate(f"{theirs}_secret")) as receiver:
                staged = Rows()
                _, (_, got) = await asyncio.gather(backend.send(staged, to(receiver)), off_loop(receiver.message))
                assert torch.equal(got, staged.expected)

    asyncio.run(main())


def test_bytes_that_were_on_their_way_before_the_count_began_are_not_of_it():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(listening.getsockname()) as sender, listening.accept()[0] as reader:
            acknowledged = _Acknowledged(sender.fileno())
            sender.setblocking(False)
            sent = sender.send(bytes(4 * MIB))  # more than the peer's kernel takes: the rest waits here
            acknowledged.start(7)
            while sent:
                sent -= len(reader.recv(MIB))
            sender.setblocking(True)
            sender.sendall(b"rows")
            assert reader.recv(4) == b"rows"
            deadline = time.monotonic() + 10
            while acknowledged.now() < 11:
                assert time.monotonic() < deadline
            assert acknowledged.now() == 11
            acknowledged.stop()
