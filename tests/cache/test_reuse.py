"""The same content through the real pipeline and the real encoder: one forward, the same rows, no tenant's to another."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io

import pytest
import torch

from tectum.config import Settings
from tectum.errors import BadRequestError, InternalError, LifecycleError
from tectum.models.load import load_adapter
from tectum.models.revision import encoder_revision
from tectum.pipeline.encoder import embedding_of
from tectum.pipeline.local import LocalEncoder
from tectum.pipeline.service import running_pipeline
from tectum.pipeline.stages import Stages
from tectum.types import EncodeRequest, MediaItem, Modality
from tests import zoo


def png(seed: int = 0, width: int = 224) -> bytes:
    file = io.BytesIO()
    zoo.picture(width, 224, seed).save(file, "PNG")
    return file.getvalue()


def request(req_id: str, *pictures: bytes, **more) -> EncodeRequest:
    return EncodeRequest(req_id, tuple(MediaItem(Modality.IMAGE, data=data) for data in pictures), **more)


@pytest.fixture(scope="module")
def adapter(tiny):
    return load_adapter(str(tiny), device="cpu")


class Counted(LocalEncoder):
    """The local encoder, its forwards counted, and held up where a test wants to."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.forwards = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0

    async def forward(self, batch, leases):
        self.forwards += 1
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise InternalError("encode_failed", "a planted failure")
        return await super().forward(batch, leases)


async def until(condition) -> None:
    """Let the other tasks run until something holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def run(adapter, test, **settings):
    async def main():
        given = Settings.load(forward_threads=1, **settings)
        encoder = Counted(adapter, given)
        async with Stages(encoder, given) as stages, running_pipeline(stages, given) as pipeline:

            async def rows(req_id, *pictures, **more):
                async with pipeline.execute_encode_pipeline(request(req_id, *pictures, **more)) as job:
                    return embedding_of(job)

            await test(rows, encoder, stages, pipeline)
            assert len(pipeline.ledger) == 0
            assert (stages.pool.leases, stages.pool.leased_bytes, len(stages.reuse.flights)) == (0, 0, 0)
            assert not encoder._inputs

    asyncio.run(main())


def test_a_repeated_picture_needs_no_forward_and_its_rows_are_the_same_to_the_bit(adapter):
    async def test(rows, encoder, stages, pipeline):
        first = await rows("a", png())
        again = await rows("b", png())
        assert torch.equal(first.rows, again.rows)
        assert (again.item_rows, again.grid_thw, again.req_id) == (first.item_rows, first.grid_thw, "b")
        assert (encoder.forwards, stages.reuse.hits, stages.reuse.misses) == (1, 1, 1)
        other = await rows("c", png(1))
        assert not torch.equal(first.rows, other.rows)
        assert encoder.forwards == 2

    run(adapter, test, cache_bytes=1 << 20)


def test_without_a_cache_nothing_outlives_its_request(adapter):
    async def test(rows, encoder, stages, pipeline):
        await rows("a", png())
        await rows("b", png())
        await rows("c", png(), content_keys=True)
        await rows("d", png(), content_keys=True)
        assert (encoder.forwards, stages.reuse.hits, len(stages.reuse.cache)) == (4, 0, 0)

    run(adapter, test)


def test_the_same_picture_while_the_first_is_encoded_runs_one_forward(adapter):
    """Also without a cache: content keys are enough."""

    async def test(rows, encoder, stages, pipeline):
        encoder.gate.clear()
        first = asyncio.ensure_future(rows("a", png(), content_keys=True))
        await until(lambda: encoder.forwards)
        others = [asyncio.ensure_future(rows(f"b{i}", png(), content_keys=True)) for i in range(3)]
        flight = next(iter(stages.reuse.flights._flights.values()))
        await until(lambda: flight.followers == 3)
        encoder.gate.set()
        found = await asyncio.gather(first, *others)
        assert encoder.forwards == 1
        assert all(torch.equal(each.rows, found[0].rows) for each in found)
        assert len(stages.reuse.cache) == 0

    run(adapter, test)


@pytest.mark.parametrize("end", ["cancelled", "failed", "released"])
def test_a_leader_that_ends_without_rows_lets_the_next_one_lead(adapter, end):
    async def test(rows, encoder, stages, pipeline):
        encoder.gate.clear()
        encoder.fails = int(end == "failed")
        first = asyncio.ensure_future(rows("a", png()))
        await until(lambda: encoder.forwards)
        second = asyncio.ensure_future(rows("b", png()))
        flight = next(iter(stages.reuse.flights._flights.values()))
        await until(lambda: flight.followers)
        if end == "cancelled":
            first.cancel()
        elif end == "released":
            pipeline.release_request("a")
        encoder.gate.set()
        with pytest.raises((asyncio.CancelledError, InternalError, LifecycleError)):
            await first
        assert torch.equal((await second).rows, (await rows("c", png())).rows)
        # a forward that was under way when its request ended is finished, and its rows are used all the same
        assert encoder.forwards == (2 if end == "failed" else 1)

    run(adapter, test, cache_bytes=1 << 20)


def test_tenants_options_and_company_are_apart(adapter):
    async def test(rows, encoder, stages, pipeline):
        await rows("a", png(), tenant="x")
        await rows("b", png(), tenant="y")
        await rows("c", png(), tenant="x", options={"max_pixels": 56 * 56 * 4})
        await rows("d", png(), png(1), tenant="x")
        await rows("e", png(1), png(), tenant="x")
        assert (encoder.forwards, stages.reuse.hits) == (5, 0)
        pair = await rows("f", png(), png(1), tenant="x")
        assert (encoder.forwards, stages.reuse.hits, len(pair.item_rows)) == (5, 1, 2)

    run(adapter, test, cache_bytes=1 << 20)


def test_the_form_in_which_bytes_come_does_not_count(adapter):
    async def test(rows, encoder, stages, pipeline):
        text = base64.b64encode(png()).decode()
        await rows("a", png())
        for number, item in enumerate(
            (MediaItem(Modality.IMAGE, base64=text), MediaItem(Modality.IMAGE, url=f"data:image/png;base64,{text}"))
        ):
            async with pipeline.execute_encode_pipeline(EncodeRequest(f"b{number}", (item,))) as job:
                embedding_of(job)
        assert (encoder.forwards, stages.reuse.hits) == (1, 2)

    run(adapter, test, cache_bytes=1 << 20)


def test_a_damaged_entry_is_never_delivered(adapter):
    async def test(rows, encoder, stages, pipeline):
        first = await rows("a", png())
        ((key, entry),) = stages.reuse.cache._entries.items()
        stages.reuse.cache.put(key, dataclasses.replace(entry, data=b"\xff" * len(entry.data)))
        assert torch.equal((await rows("b", png())).rows, first.rows)
        assert (encoder.forwards, stages.reuse.hits) == (2, 0)

    run(adapter, test, cache_bytes=1 << 20)


def test_a_hit_does_not_wait_behind_forwards(adapter):
    async def test(rows, encoder, stages, pipeline):
        first = await rows("a", png())
        encoder.gate.clear()
        busy = asyncio.ensure_future(rows("b", png(1)))
        await until(lambda: encoder.forwards == 2)
        async with asyncio.timeout(10):
            assert torch.equal((await rows("c", png())).rows, first.rows)
        assert not busy.done()
        encoder.gate.set()
        await busy

    run(adapter, test, cache_bytes=1 << 20)


def test_large_rows_go_through_threads_and_stay_the_same(adapter, monkeypatch):
    monkeypatch.setattr("tectum.pipeline.reuse.IN_THREAD", 100)
    test_a_repeated_picture_needs_no_forward_and_its_rows_are_the_same_to_the_bit(adapter)


def test_bad_media_is_its_callers_error_and_leaves_no_flight(adapter):
    async def test(rows, encoder, stages, pipeline):
        for bad, code in ((png()[:60], "media_decode_failed"), (b"", "empty_media")):
            with pytest.raises(BadRequestError) as caught:
                await rows("a", png(), bad)
            assert (caught.value.code, caught.value.item) == (code, 1)
        await rows("a", png())

    run(adapter, test, cache_bytes=1 << 20)


def test_the_revision_changes_with_any_weight_and_not_otherwise(adapter, tiny):
    assert encoder_revision(adapter) == encoder_revision(load_adapter(str(tiny), device="cpu"))
    other = load_adapter(str(tiny), device="cpu")
    with torch.no_grad():
        weight = next(other.model.parameters())
        weight[(0,) * weight.dim()] += 1
    assert encoder_revision(other) != encoder_revision(adapter)
    assert encoder_revision(load_adapter(str(tiny), device="cpu", dtype="bfloat16")) != encoder_revision(adapter)
    sharper = load_adapter(str(tiny), device="cpu")
    sharper.processors.image.image_mean = [0.1, 0.2, 0.3]
    assert encoder_revision(sharper) != encoder_revision(adapter), "the processor is part of it"
