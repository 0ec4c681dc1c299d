"""Delivery by Mooncake over TCP: real engines, and peers that refuse, stall and come back."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy
import pytest
import torch

from tectum.config import Settings
from tectum.delivery import mooncake
from tectum.delivery.base import MooncakeDestination, split_address
from tectum.delivery.zmq import ZmqBackend
from tectum.errors import DeliveryError
from tests.delivery.rows import Rows
from tests.delivery.test_zmq import until
from tests.sglang.receiver import MOONCAKE_MISSING, Receiver

engine_module = pytest.importorskip("mooncake.engine", reason=MOONCAKE_MISSING, exc_type=ImportError)


class Memory:
    """Registered memory of a receiving engine in this process."""

    def __init__(self, nbytes: int) -> None:
        self.engine = engine_module.TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self.bytes = numpy.zeros(nbytes, numpy.uint8)
        assert self.engine.register_memory(self.bytes.ctypes.data, nbytes) == 0

    def destination(self, receiver: Receiver, offset: int = 0) -> MooncakeDestination:
        session = f"127.0.0.1:{self.engine.get_rpc_port()}"
        return destination(receiver, session, self.bytes.ctypes.data + offset)

    def rows(self, width: int) -> torch.Tensor:
        return torch.from_numpy(self.bytes.view(numpy.float32).reshape(-1, width))


def destination(receiver: Receiver, session: str, address: int) -> MooncakeDestination:
    host, port = split_address(receiver.address)
    return MooncakeDestination(f"tcp://{host}:{port}", "mooncake", session, address)


def run(test: Any, **settings: Any) -> None:
    async def main() -> None:
        chosen = Settings(transfer_backend="mooncake", **settings)
        async with ZmqBackend(chosen) as messages, mooncake.MooncakeBackend(chosen, messages) as backend:
            await test(backend)
            assert not backend._copies

    asyncio.run(main())


@pytest.mark.parametrize("layers", [0, 3])
def test_rows_land_in_the_receivers_memory_and_then_it_is_told(layers):
    staged = Rows(rows=4096, width=256, layers=layers)
    memory = Memory(staged.metadata.nbytes)

    async def test(backend):
        with Receiver() as receiver:
            await backend.send(staged, memory.destination(receiver))
            assert torch.equal(memory.rows(256 * (1 + layers)), staged.expected)
            message, rows = await asyncio.to_thread(receiver.message)
            assert (message.shape, message.error_msg, rows) == ([4096, 256 * (1 + layers)], None, None)

    run(test)


def test_ranks_share_one_registered_copy():
    staged = Rows(rows=16384, width=1024)
    memory = [Memory(staged.metadata.nbytes) for _ in range(3)]

    async def test(backend):
        seen = []
        register = backend._engine.register_memory
        backend._engine = _Watched(backend._engine, register_memory=lambda *a: seen.append(a) or register(*a))
        with Receiver() as receiver:
            first = asyncio.create_task(backend.send(staged, memory[0].destination(receiver)))
            await until(lambda: bool(backend._copies))
            await asyncio.gather(first, *(backend.send(staged, one.destination(receiver)) for one in memory[1:]))
        assert len(seen) == 1
        for one in memory:
            assert torch.equal(one.rows(1024), staged.expected)

    run(test)


class _Watched:
    """The real engine, with some calls seen or answered by the test."""

    def __init__(self, engine: Any, **calls: Any) -> None:
        self._engine, self._calls = engine, calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(self._engine, name)


def test_memory_that_cannot_be_registered_is_an_error_of_its_request_alone():
    staged = Rows()
    memory = Memory(staged.metadata.nbytes)

    async def test(backend):
        engine = backend._engine
        with Receiver() as receiver:
            backend._engine = _Watched(engine, register_memory=lambda *a: -7)
            with pytest.raises(DeliveryError) as caught:
                await backend.send(staged, memory.destination(receiver))
            assert (caught.value.code, "register" in caught.value.message) == ("send_failed", True)
            backend._engine = engine
            await backend.send(staged, memory.destination(receiver))
            assert torch.equal(memory.rows(64), staged.expected)

    run(test)


@pytest.mark.parametrize("case", ["no such engine", "memory that is not registered"])
def test_a_receiver_that_cannot_be_written_to_is_reported(case):
    staged = Rows()
    memory = Memory(staged.metadata.nbytes)

    async def test(backend):
        with Receiver() as receiver:
            where = memory.destination(receiver, offset=1 << 40)
            if case == "no such engine":
                where = destination(receiver, "127.0.0.1:9", memory.bytes.ctypes.data)
            with pytest.raises(DeliveryError) as caught:
                await backend.send(staged, where)
            assert caught.value.code == "send_failed"
            assert receiver.is_silent()
            await backend.send(staged, memory.destination(receiver))
            assert torch.equal(memory.rows(64), staged.expected)

    run(test)


def test_the_memory_of_a_write_that_failed_is_kept_aside_for_a_while(monkeypatch):
    monkeypatch.setattr(mooncake, "QUARANTINE", 0.2)
    staged = Rows()
    memory = Memory(staged.metadata.nbytes)

    async def test(backend):
        with Receiver() as receiver:
            await backend.send(staged, memory.destination(receiver))
            with pytest.raises(DeliveryError) as caught:
                await backend.send(staged, memory.destination(receiver, offset=1 << 40))
            assert "write" in caught.value.message
            assert len(backend._quarantined) == 1
            await until(lambda: not backend._quarantined)

    run(test)


def test_a_peer_that_never_answers_is_given_up_and_holds_nobody_up():
    staged, other = Rows(), Rows()
    memory = Memory(other.metadata.nbytes)

    async def test(backend):
        with Receiver() as receiver, socket.create_server(("127.0.0.1", 0)) as silent:
            where = destination(receiver, f"127.0.0.1:{silent.getsockname()[1]}", memory.bytes.ctypes.data)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await backend.send(staged, where)
            await asyncio.wait_for(backend.send(other, memory.destination(receiver)), 5)  # it would wait for a minute
            assert torch.equal(memory.rows(64), other.expected)

    run(test, send_timeout=2)


def test_a_write_that_is_given_up_leaves_its_copy_untouched(monkeypatch):
    """The engine's thread goes on. The send has ended, its rows may be overwritten, and its copy is nobody else's."""
    staged = Rows(rows=65536, width=1024)
    memory = Memory(staged.metadata.nbytes)

    async def test(backend):
        with Receiver() as receiver:
            await backend._meet(memory.destination(receiver).session_id, memory.bytes.ctypes.data)
            expected = staged.expected.clone()
            sending = asyncio.create_task(backend.send(staged, memory.destination(receiver)))
            await until(lambda: backend._threads > 0 and bool(backend._copies))
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            (kept,) = backend._quarantined
            staged.arrays[0].zero_()
            await until(lambda: backend._threads == 0)
            assert torch.equal(memory.rows(1024), expected)
            assert bytes(kept.rows[:4096]) == expected.numpy().tobytes()[:4096]

    run(test, max_staged_bytes=1 << 30)


def test_quarantine_is_bounded():
    memory = Memory(64)

    async def test(backend):
        with Receiver() as receiver:
            where = memory.destination(receiver, offset=1 << 40)
            for _ in range(4):
                backend._met.add(where.session_id)
                with pytest.raises(DeliveryError) as caught:
                    await backend.send(Rows(), where)
            assert "quarantine" in caught.value.message

    run(test, max_staged_bytes=3 * 64 * 64 * 4)
