"""Same host: rows are read where the encoder wrote them; a lease that ended is refused, a receiver that dies holds nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from tectum import Client
from tectum.config import Settings
from tectum.delivery import local as protocol
from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.local import HostReceiver, LocalReceiver
from tectum.errors import DeliveryError, LifecycleError, StartupError, TectumError, UnavailableError
from tectum.models.load import load_adapter
from tectum.pipeline.local import LocalEncoder
from tectum.pipeline.service import running_pipeline
from tectum.pipeline.stages import Stages
from tectum.serving.local import local_door
from tectum.types import EncodeRequest, MediaItem, Modality
from tests import zoo


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    zoo.picture(140, 90, seed).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def adapter(tiny):
    return load_adapter(str(tiny), device="cpu")


@pytest.fixture
def serving(adapter, tmp_path):
    """Run a test's coroutine beside the door of a real pipeline; whatever it does, nothing is held in the end."""

    def run(test, patience: float = 20.0) -> None:
        async def main() -> None:
            given = Settings.load(forward_threads=1)
            path = tmp_path / "socket"
            async with Stages(LocalEncoder(adapter, given), given) as stages:
                async with running_pipeline(stages, given) as pipeline:

                    async def hold(req_id: str, seed: int = 0) -> torch.Tensor:
                        item = MediaItem(Modality.IMAGE, data=png(seed))
                        async with pipeline.hold(EncodeRequest(req_id, (item,), delivery="hold")) as job:
                            view = job.staged.lease.view()
                            return torch.frombuffer(bytearray(view), dtype=torch.float32).view(-1, 64)

                    async with local_door(pipeline, stages.pool.fd, path, patience):
                        await test(path, hold, pipeline, stages)
                    assert not path.exists()
                    for req_id in [live.req_id for live in pipeline.ledger._lives.values()]:
                        pipeline.release_request(req_id)
                assert (stages.pool.leases, stages.pool.leased_bytes) == (0, 0)

        asyncio.run(main())

    return run


def read(document) -> torch.Tensor:
    return torch.frombuffer(bytearray(document.arrays[0].data), dtype=torch.float32).view(document.rows, document.width)


def test_rows_are_read_in_place_and_released_when_they_were_read(serving):
    async def test(path, hold, pipeline, stages):
        expected = [await hold("a"), await hold("b", 1)]

        def receive():
            with LocalReceiver(path) as receiver:
                with receiver.pull("a") as first, receiver.pull("b") as second:  # two leases at once
                    assert pipeline_states() == ["staged", "staged"]
                    assert (first.req_id, first.item_rows, first.grid_thw[0]) == ("a", (first.rows,), first.grid_thw[0])
                    found = [read(first), read(second)]
                    with pytest.raises(TypeError, match="read-only"):
                        first.arrays[0].data[0] = 1
                return found

        def pipeline_states():
            return [pipeline.status(req_id)["state"] for req_id in "ab"]

        found = await asyncio.to_thread(receive)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [pipeline.status(req_id)["reason"] for req_id in "ab"] == ["pulled", "pulled"]

    serving(test)


def test_the_memory_itself_is_handed_over_and_nobody_can_write_to_it(serving):
    async def test(path, hold, pipeline, stages):
        await hold("a")

        def receive():
            with LocalReceiver(path) as receiver, receiver.pull("a") as document:
                before = bytes(document.arrays[0].data[:4])
                stages.pool.memory(document.offsets[0], 4)[:] = b"\x01\x02\x03\x04"
                assert bytes(document.arrays[0].data[:4]) == b"\x01\x02\x03\x04", "a copy, not the memory"
                stages.pool.memory(document.offsets[0], 4)[:] = before
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(path))
            _, (descriptor,), _, _ = socket.recv_fds(connection, 100, 1)
            with pytest.raises(OSError):
                os.write(descriptor, b"x")
            assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o400
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            os.close(descriptor)
            connection.close()

        await asyncio.to_thread(receive)

    serving(test)


def test_a_lease_that_did_not_last_is_refused_at_its_end_and_the_rows_can_be_pulled_again(serving):
    async def test(path, hold, pipeline, stages):
        expected = await hold("a")

        def too_slow():
            with LocalReceiver(path) as receiver:
                with pytest.raises(LifecycleError, match="may be others"), receiver.pull("a"):
                    ended.wait()
                with receiver.pull("a") as again:
                    return read(again)

        import threading

        ended = threading.Event()
        pulling = asyncio.ensure_future(asyncio.to_thread(too_slow))
        while not uses(pipeline):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        while uses(pipeline):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        ended.set()
        assert torch.equal(await pulling, expected)

    serving(test, patience=0.3)


def uses(pipeline) -> int:
    """How many sends read the memory of request `a` now."""
    found = pipeline.ledger.find("a")
    return 0 if found is None else len(found.active_sends)


def test_a_receiver_that_is_killed_holds_nothing(serving):
    """A real process, killed while it has the lease."""
    program = """
        import sys
        from tectum.engines.local import LocalReceiver
        with LocalReceiver(sys.argv[1]) as receiver, receiver.pull("a") as document:
            print(len(document.arrays[0].data), flush=True)
            sys.stdin.read()
    """

    async def test(path, hold, pipeline, stages):
        expected = await hold("a")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(program), str(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert int(await process.stdout.readline()) == expected.nbytes
        assert uses(pipeline) == 1
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        async with asyncio.timeout(10):
            while uses(pipeline):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert pipeline.status("a")["state"] == "staged", "its rows wait for the next one"

        def receive():
            with LocalReceiver(path) as receiver, receiver.pull("a") as document:
                return read(document)

        assert torch.equal(await asyncio.to_thread(receive), expected)

    serving(test)


def test_errors_are_the_encoders_own_and_the_connection_lives_on(serving):
    async def test(path, hold, pipeline, stages):
        await hold("a")

        def receive():
            with LocalReceiver(path) as receiver:
                with pytest.raises(LifecycleError) as caught, receiver.pull("never"):
                    pass
                assert (caught.value.code, caught.value.status) == ("request_not_found", 404)
                with pytest.raises(LifecycleError, match="ended before"):
                    receiver._ask({"done": 12345})
                for nonsense in ({"pull": 1}, {}, {"done": "x"}):
                    with pytest.raises(TectumError) as caught:
                        receiver._ask(nonsense)
                    assert caught.value.code == "invalid_request"
                with receiver.pull("a") as document:
                    assert document.rows
                receiver._connection.sendall(b"\xff\n[]\n" * 3)
                assert [b"problem" in receiver._line() for _ in range(6)] == [True] * 6

        await asyncio.to_thread(receive)

    serving(test)


def test_a_block_left_by_an_exception_gives_up_its_lease_alone(serving):
    async def test(path, hold, pipeline, stages):
        expected = [await hold("a"), await hold("b", 1)]

        def receive():
            with LocalReceiver(path) as receiver, receiver.pull("b") as other:
                with pytest.raises(ZeroDivisionError), receiver.pull("a"):
                    raise ZeroDivisionError
                assert uses(pipeline) == 0
                with receiver.pull("a") as again:
                    return [read(again), read(other)]

        found = await asyncio.to_thread(receive)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    serving(test)


def test_an_endless_line_is_hung_up_on(serving, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_LINE", 1000)

    async def test(path, hold, pipeline, stages):
        def send():
            with LocalReceiver(path) as receiver:
                with contextlib.suppress(OSError):
                    receiver._connection.sendall(b"x" * 200_000)
                with pytest.raises(UnavailableError):
                    receiver._ask({"pull": "a"})

        await asyncio.to_thread(send)

    serving(test)


@pytest.mark.parametrize("text", [b"", b"[]", b"not JSON", b"[" * 200_000])
def test_a_line_that_is_no_message_is_refused(text):
    with pytest.raises(DeliveryError, match="makes no sense"):
        protocol.parse(text)


def test_a_grant_that_does_not_hold_together_is_refused():
    good = {"req_id": "r", "offset": 8, "nbytes": 48, "generation": 1, "dtype": "float32", "width": 2, "layers": 1}
    good |= {"item_rows": [1, 2], "grid_thw": []}
    memory = memoryview(bytes(range(64)))
    found = protocol.granted(good, memory)
    assert [bytes(array.data) for array in found.arrays] == [bytes(range(8, 32)), bytes(range(32, 56))]
    for change in ({"offset": 20}, {"offset": -1}, {"nbytes": 44}, {"dtype": "int8"}, {"width": None}, {"layers": -1}):
        with pytest.raises(DeliveryError):
            protocol.granted({**good, **change}, memory)


def test_the_path_must_be_ours_to_take(adapter, tmp_path):
    async def main(path) -> None:
        async with local_door(None, os.memfd_create("x"), path, 1.0):
            pass

    (tmp_path / "file").write_text("precious")
    with pytest.raises(StartupError, match="local_socket"):
        asyncio.run(main(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "precious"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(tmp_path / "live"))
        live.listen()
        with pytest.raises(StartupError, match="in use"):
            asyncio.run(main(tmp_path / "live"))
    asyncio.run(main(tmp_path / "live"))  # its owner is gone: taken over
    assert not (tmp_path / "live").exists()


def test_a_server_of_its_own_with_and_without_the_socket(tiny, server, tmp_path):
    """From here to another process, and back to HTTP where there is no socket."""
    path = tmp_path / "socket"
    with EncoderProcess(tiny, "--forward-threads", "1", "--local-socket", str(path)) as encoder:
        receiver = HostReceiver(encoder.url, path)
        with Client(encoder.url) as client:
            expected = client.encode(png(3)).rows
            began = time.monotonic()
            for _ in range(3):
                req_id = client.hold(png(3))["req_id"]
                with receiver.pull(req_id) as document:
                    assert client.status(req_id)["state"] == "staged", "over HTTP it would be released by now"
                    assert torch.equal(read(document), expected)
                assert client.status(req_id)["reason"] == "pulled"
            assert time.monotonic() - began < 10, "a connection that is idle is not waited for"
        assert encoder.stop() == 0
    assert not path.exists()
    for elsewhere in (None, path):
        receiver = HostReceiver(server.url, elsewhere)
        with Client(server.url) as client:
            req_id = client.hold(png(3))["req_id"]
            with receiver.pull(req_id) as document:
                assert torch.equal(read(document), expected)
        receiver.close()
