"""The real stages around the real encoder: what fails for one member of a batch fails for it alone."""

from __future__ import annotations

import asyncio
import io

import pytest
import torch

from tectum.config import Settings
from tectum.errors import BadRequestError, UnavailableError
from tectum.models.load import load_adapter
from tectum.pipeline import stages as module
from tectum.pipeline.local import LocalEncoder
from tectum.pipeline.stages import Stages
from tectum.pipeline.work import Staged
from tectum.types import EncodeRequest, MediaItem, Modality
from tests import zoo


def picture_request(req_id: str, *pictures: bytes) -> EncodeRequest:
    return EncodeRequest(req_id, tuple(MediaItem(Modality.IMAGE, data=data) for data in pictures))


def png(width: int, height: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    zoo.picture(width, height, seed).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def adapter(tiny):
    return load_adapter(str(tiny), device="cpu")


def with_stages(adapter, test, **settings):
    async def main():
        given = Settings.load(forward_threads=1, **settings)
        async with Stages(LocalEncoder(adapter, given), given) as stages:
            await test(stages)
            assert (stages.pool.leases, stages.pool.leased_bytes) == (0, 0)

    asyncio.run(main())


def test_staging_that_fails_half_way_through_a_batch_fails_only_what_did_not_fit(adapter):
    async def test(stages):
        parts = [await stages.prepare(picture_request(name, png(224, 224, i))) for i, name in enumerate("abc")]
        one = parts[0].metadata.nbytes
        stages.pool.max_bytes = 2 * one
        first, second, third = await stages.encode(parts)
        assert isinstance(first, Staged)
        assert isinstance(second, Staged)
        assert isinstance(third, UnavailableError)
        assert third.code == "overloaded"
        for staged in (first, second):
            stages.free(staged)

    with_stages(adapter, test)


def test_staged_rows_are_those_of_the_adapter_and_cost_is_timed(adapter):
    async def test(stages):
        request = picture_request("r", png(224, 224), png(100, 60))
        part = await stages.prepare(request)
        (staged,) = await stages.encode([part])
        _, inputs = stages.encoders.unit.prepare(request)
        (expected,) = adapter.encode([inputs])
        (rows,) = staged.lease.views()
        assert bytes(rows) == expected.rows.numpy().tobytes()
        assert set(part.seconds) == {"fetch", "prepare"}
        assert not stages.encoders._inputs, "inputs do not wait for the delivery"
        stages.free(staged)

    with_stages(adapter, test)


def test_a_bad_item_is_named_by_its_index(adapter):
    async def test(stages):
        with pytest.raises(BadRequestError) as caught:
            await stages.prepare(picture_request("r", png(64, 64), png(64, 64)[:80]))
        assert caught.value.item == 1

    with_stages(adapter, test)


def test_out_of_memory_is_that_batches_error_and_retryable(adapter):
    """No device here can run out on demand: the error itself is raised where the forward would raise it."""

    async def test(stages):
        part = await stages.prepare(picture_request("r", png(64, 64)))
        real = adapter.encode

        def exhausted(batch):
            raise torch.OutOfMemoryError("CUDA out of memory at 0x7f0012345678")

        adapter.encode = exhausted
        try:
            with pytest.raises(UnavailableError) as caught:
                await stages.encode([part])
        finally:
            adapter.encode = real
        assert (caught.value.status, caught.value.code, caught.value.retryable) == (503, "out_of_memory", True)
        (staged,) = await stages.encode([part])
        stages.free(staged)

    with_stages(adapter, test)


def test_what_one_request_fetches_is_bounded(adapter):
    """Two pictures behind URLs of this machine: each is within the limit of one item, together they are not."""
    data = png(64, 64)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await writer.drain()
        writer.close()

    async def test(stages):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x.png"
            both = EncodeRequest("r", tuple(MediaItem(Modality.IMAGE, url=url) for _ in range(2)))
            with pytest.raises(BadRequestError) as caught:
                await stages.prepare(both)
            assert (caught.value.code, caught.value.status) == ("media_too_large", 413)
            part = await stages.prepare(EncodeRequest("r", both.items[:1]))
            assert part.metadata.rows == 4
            stages.forget(part)

    with_stages(adapter, test, allow_private_urls=True, max_fetched_bytes=len(data) * 3 // 2)


def test_what_all_requests_fetch_is_bounded_while_they_hold_it(adapter, monkeypatch):
    """The first picture is half sent while a second request asks for another; then all of it is given back."""
    data = png(64, 64)
    booked, go_on = asyncio.Event(), asyncio.Event()
    add = module._Fetched.add

    def noted(self, more):
        add(self, more)
        booked.set()

    monkeypatch.setattr(module._Fetched, "add", noted)

    async def serve(reader, writer):
        slow = b"slow" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data[: len(data) // 2])
        await writer.drain()
        if slow:
            await go_on.wait()
        writer.write(data[len(data) // 2 :])
        await writer.drain()
        writer.close()

    async def test(stages):
        def ask(path):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{path}"
            return stages.prepare(EncodeRequest(path, (MediaItem(Modality.IMAGE, url=url),)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            first = asyncio.create_task(ask("slow"))
            await booked.wait()
            with pytest.raises(UnavailableError) as caught:
                await ask("other")
            assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("overloaded", 503, 1.0)
            go_on.set()
            stages.forget(await first)
            assert stages._all_fetched.held == 0
            stages.forget(await ask("other"))

    with_stages(adapter, test, allow_private_urls=True, max_all_fetched_bytes=max(1024, len(data) * 5 // 4))
