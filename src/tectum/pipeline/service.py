"""One encoder ready to serve: adapter, stages and pipeline, put together from the settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tectum.config import Settings
from tectum.delivery.base import Deliveries
from tectum.lifecycle.ledger import Limits
from tectum.pipeline.batcher import Batcher
from tectum.pipeline.pipeline import Observer, Pipeline
from tectum.pipeline.stages import Stages

if TYPE_CHECKING:
    from tectum.models.adapter import Adapter


@asynccontextmanager
async def running_pipeline(
    adapter: Adapter,
    settings: Settings,
    observers: Sequence[Observer] = (),
    deliveries: Deliveries | None = None,
) -> AsyncIterator[Pipeline]:
    """A started and warm pipeline around `adapter`; on leaving, what still lives is failed and all memory given back.

    deliveries: how rows are pushed; entered by the caller, who leaves it later than this.
    """
    fuse = settings.fuse == "on" or (settings.fuse == "auto" and adapter.device.type == "cuda")
    async with Stages(adapter, settings, deliveries) as stages:
        await stages.warm_up()
        batcher = Batcher(fuse=fuse, batch_patches=settings.batch_patches)
        pipeline = Pipeline(
            stages, lifecycle_limits(settings), batcher, send_timeout=settings.send_timeout, observers=observers
        )
        await pipeline.start()
        try:
            yield pipeline
        finally:
            await pipeline.drain(0.0 if pipeline.ledger.closing else settings.drain_timeout)


def lifecycle_limits(settings: Settings) -> Limits:
    return Limits(
        max_live_requests=settings.max_live_requests,
        max_queued_patches=settings.max_queued_patches,
        max_staged_bytes=settings.max_staged_bytes,
        encode_timeout=settings.encode_timeout,
        request_ttl=settings.request_ttl,
        unknown_id_wait=settings.unknown_id_wait,
        tombstone_ttl=settings.tombstone_ttl,
        max_tombstones=settings.max_tombstones,
    )
