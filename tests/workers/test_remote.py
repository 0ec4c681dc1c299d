"""The TCP line of encoders on other machines, from the wrong end: strangers, impostors, damaged and unasked-for rows."""

from __future__ import annotations

import asyncio
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tectum
from tectum.delivery.staging import Lease, StagingPool
from tectum.errors import StartupError
from tectum.workers import afar, messages, remote
from tectum.workers.messages import (
    LENGTH,
    Challenge,
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Hello,
    Message,
    Ready,
    RowsFollow,
    Start,
    Welcome,
    frame,
)
from tectum.workers.remote import Listener, RemoteLine, proof

ROWS = bytes(range(256)) * 4096  # 1 MiB: several reads
START = Start("model", 0, {})


class Peer:
    """Whoever is at the other end of a connection to the listener."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: Listener) -> None:
        self.reader = reader
        self.writer = writer
        self.listener = listener

    @classmethod
    async def connect(cls, listener: Listener) -> Peer:
        reader, writer = await asyncio.open_connection(*listener.address)
        return cls(reader, writer, listener)

    async def read(self) -> bytes:
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        return await self.reader.readexactly(length)

    async def challenge(self) -> bytes:
        return messages.decode_challenge(await self.read()).nonce

    def hello(self, asked: bytes, lane: int = 0, **other: Any) -> Hello:
        nonce = b"n" * 32
        signed = proof(self.listener.secret, "encoder", lane, asked, nonce)
        right = {"lane": lane, "version": tectum.__version__, "pid": 77, "nonce": nonce, "proof": signed}
        return Hello(**{**right, **other})

    async def prove(self, lane: int = 0) -> None:
        asked = await self.challenge()
        await self.say(self.hello(asked, lane))
        welcome = messages.decode_welcome(await self.read())
        assert welcome.proof == proof(self.listener.secret, "service", lane, b"n" * 32, asked)

    async def say(self, *said: Message | bytes) -> None:
        self.writer.writelines([each if isinstance(each, bytes) else frame(each) for each in said])
        await self.writer.drain()

    async def is_cut(self) -> None:
        try:
            assert await self.reader.read() == b""
        except ConnectionError:
            return


class Runner:
    """Stands in for who starts encoders: counts what it is told."""

    def __init__(self) -> None:
        self.kills = 0

    async def place(self) -> str:
        return "a node"

    def kill(self) -> None:
        self.kills += 1

    async def retire(self) -> None: ...


def listening(test: Callable[[Listener], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            listener = Listener("127.0.0.1", 0)
            await listener.open(StagingPool(8 * len(ROWS)))
            try:
                await test(listener)
            finally:
                await listener.close()

    asyncio.run(main())


async def begun(listener: Listener) -> tuple[Peer, RemoteLine, list[FromEncoder]]:
    """An encoder that is ready, its line, and what the pool hears of it."""
    peer = await Peer.connect(listener)
    await peer.prove()
    line = await listener.line(0)
    line.encoder = Runner()
    said: list[FromEncoder] = []
    beginning = asyncio.ensure_future(line.begin(START, said.append, lambda what, fraction: None))
    assert isinstance(messages.decode_for_encoder(await peer.read()), Start)
    await peer.say(Ready({"device": "cpu"}))
    await beginning
    assert (line.card, line.pid) == ({"device": "cpu"}, 77)
    return peer, line, said


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (bounded by `listening`)
        await asyncio.sleep(0.001)


# --- who may connect ---

WRONG: dict[str, Callable[[Peer, bytes], Message | bytes]] = {
    "secret": lambda peer, asked: peer.hello(asked, proof=proof(b"guessed", "encoder", 0, asked, b"n" * 32)),
    "lane": lambda peer, asked: peer.hello(asked, lane=0, proof=peer.hello(asked, lane=1).proof),
    "challenge": lambda peer, asked: peer.hello(b"an earlier challenge, replayed..."),
    "side": lambda peer, asked: peer.hello(asked, proof=proof(peer.listener.secret, "service", 0, asked, b"n" * 32)),
    "short nonce": lambda peer, asked: peer.hello(
        asked, nonce=b"", proof=proof(peer.listener.secret, "encoder", 0, asked, b"")
    ),
    "version": lambda peer, asked: peer.hello(asked, version="0.0.0"),
    "no proof": lambda peer, asked: Ready({}),
    "garbage": lambda peer, asked: LENGTH.pack(4) + b"\xc1\xff\x00\x00",
    "length": lambda peer, asked: LENGTH.pack(remote.MAX_HELLO + 1) + b"x" * 8,
    "empty": lambda peer, asked: LENGTH.pack(0),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_only_who_knows_the_secret_gets_a_lane(wrong: str) -> None:
    async def test(listener: Listener) -> None:
        stranger = await Peer.connect(listener)
        await stranger.say(WRONG[wrong](stranger, await stranger.challenge()))
        await stranger.is_cut()
        assert listener.refused == 1
        friend = await Peer.connect(listener)
        await friend.prove()
        assert (await listener.line(0)).pid == 77
        assert listener.refused == 1

    listening(test)


def test_who_says_nothing_is_sent_away_and_so_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_STRANGERS", 2)

    async def test(listener: Listener) -> None:
        monkeypatch.setattr(remote, "PATIENCE", 0.2)
        silent = [await Peer.connect(listener) for _ in range(2)]
        for each in silent:
            await each.challenge()
        one_more = await Peer.connect(listener)
        await one_more.is_cut()
        for each in silent:
            await each.is_cut()
        assert listener.refused == 3
        await (await Peer.connect(listener)).prove()

    listening(test)


def test_an_encoder_obeys_no_service_that_does_not_know_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            link, _ = impostor.accept()
            with link:
                link.sendall(frame(Challenge(b"c" * 32)) + frame(Welcome(b"w" * 32)) + frame(START))
                link.recv(1024)

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with (
            socket.create_connection(impostor.getsockname()) as link,
            pytest.raises(ValueError, match="not the service"),
        ):
            afar.greet(link, b"secret", 0)
        pretending.join(10)


def test_a_newer_line_of_a_lane_takes_the_place_of_one_that_leads_nowhere() -> None:
    async def test(listener: Listener) -> None:
        old_peer, old, _ = await begun(listener)
        peer = await Peer.connect(listener)
        await peer.prove()
        await old_peer.is_cut()
        await old.gone
        assert await listener.line(0) is not old

    listening(test)


# --- starting ---


def test_why_an_encoder_could_not_load_travels() -> None:
    async def test(listener: Listener) -> None:
        for said, code in [
            (Failed(0, messages.problem(StartupError("model_not_found", "no"))), "model_not_found"),
            (None, ""),
        ]:
            peer = await Peer.connect(listener)
            await peer.prove()
            line = await listener.line(0)
            beginning = asyncio.ensure_future(line.begin(START, lambda message: None, lambda what, fraction: None))
            await peer.read()
            if said is None:
                peer.writer.close()
            else:
                await peer.say(said)
            with pytest.raises(StartupError) as caught:
                await beginning
            assert caught.value.code == (code or "invalid_checkpoint")
            line.cut()

    listening(test)


# --- rows ---


def staged(listener: Listener, many: int) -> list[Lease]:
    return [listener.pool.lease(len(ROWS)) for _ in range(many)]


def asks(line: RemoteLine, batch: int, leases: list[Lease]) -> None:
    line.send(Encode(batch, [(index, lease.offset, lease.nbytes) for index, lease in enumerate(leases)]))


def rows(batch: int, member: int, data: bytes = ROWS, crc32: int | None = None) -> tuple[RowsFollow, bytes]:
    return RowsFollow(batch, member, len(data), zlib.crc32(data) if crc32 is None else crc32), data


def test_rows_arrive_whole_or_their_member_fails_alone() -> None:
    async def test(listener: Listener) -> None:
        peer, line, said = await begun(listener)
        leases = staged(listener, 4)
        asks(line, 5, leases)
        own = messages.problem(StartupError("invalid_checkpoint", "its own"))
        await peer.say(*rows(5, 2), *rows(5, 0), *rows(5, 1, crc32=1), Encoded(5, [None, None, None, own], 0.1))
        await until(lambda: bool(said))
        (answer,) = said
        assert isinstance(answer, Encoded)
        assert [None if each is None else each["code"] for each in answer.errors] == [
            None,
            "invalid_rows",
            None,
            "invalid_checkpoint",
        ]
        assert bytes(leases[0].view()) == bytes(leases[2].view()) == ROWS
        asks(line, 6, leases[:1])
        await peer.say(Encoded(6, [None], 0.1))
        await until(lambda: len(said) == 2)
        assert said[1].errors[0]["code"] == "invalid_rows", "they never came"

    listening(test)


@pytest.mark.parametrize(
    "unasked",
    [rows(4, 0), rows(5, 1), rows(5, -1), rows(5, 0, ROWS[:-1])],
    ids=["batch", "member", "negative", "size"],
)
def test_rows_that_nobody_asked_for_are_read_past(unasked: tuple[RowsFollow, bytes]) -> None:
    async def test(listener: Listener) -> None:
        peer, line, said = await begun(listener)
        lease, neighbour = staged(listener, 2)
        asks(line, 5, [lease])
        await peer.say(*unasked, *rows(5, 0), *rows(5, 0, bytes(len(ROWS))), Encoded(5, [None], 0.1))
        await until(lambda: bool(said))
        assert said == [Encoded(5, [None], 0.1)]
        assert bytes(lease.view()) == ROWS, "the second time, nobody asked"
        assert not any(neighbour.view())
        assert line.garbage == 2

    listening(test)


def test_answers_that_fit_no_batch_are_dropped() -> None:
    async def test(listener: Listener) -> None:
        peer, line, said = await begun(listener)
        leases = staged(listener, 1)
        asks(line, 5, leases)
        await peer.say(Encoded(4, [None], 0.1), Encoded(5, [], 0.1), Encoded(5, [None, None], 0.1))
        await peer.say(*rows(5, 0), Encoded(5, [None], 0.1))
        await until(lambda: bool(said))
        assert said == [Encoded(5, [None], 0.1)]
        assert line.garbage == 3

    listening(test)


@pytest.mark.parametrize("nbytes", [-1, 0, 1 << 40])
def test_rows_of_an_impossible_size_end_the_line(nbytes: int) -> None:
    async def test(listener: Listener) -> None:
        peer, line, _ = await begun(listener)
        await peer.say(RowsFollow(5, 0, nbytes, 0))
        await line.gone
        assert isinstance(line.encoder, Runner)
        assert line.encoder.kills == 1

    listening(test)


def test_after_a_line_broke_in_the_middle_of_rows_nobody_writes_them() -> None:
    async def test(listener: Listener) -> None:
        peer, line, said = await begun(listener)
        leases = staged(listener, 1)
        asks(line, 5, leases)
        announced, data = rows(5, 0)
        await peer.say(announced, data[:300_000])
        await until(lambda: bytes(leases[0].view()[299_999:300_000]) == data[299_999:300_000])
        peer.writer.close()
        await line.gone
        assert line._arriving is None
        assert not said
        assert not any(leases[0].view()[300_000:])

    listening(test)
