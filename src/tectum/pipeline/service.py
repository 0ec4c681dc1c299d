"""Encoders ready to serve: encoders, stages and pipeline, put together from the settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tectum.config import Settings
from tectum.pipeline.batcher import Batcher
from tectum.pipeline.limits import lifecycle_limits
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.stages import Stages
from tectum.pipeline.work import Observer


@asynccontextmanager
async def running_pipeline(
    stages: Stages, settings: Settings, observers: Sequence[Observer] = ()
) -> AsyncIterator[Pipeline]:
    """A started pipeline on running stages; on leaving, what still lives is failed and all memory given back."""
    pipeline = Pipeline(
        stages,
        lifecycle_limits(settings),
        [Batcher(fuse=stages.encoders.fuses, batch_patches=settings.batch_patches) for _ in range(stages.lanes)],
        send_timeout=settings.send_timeout,
        observers=observers,
    )
    await pipeline.start()
    try:
        yield pipeline
    finally:
        await pipeline.drain(0.0 if pipeline.ledger.closing else settings.drain_timeout)
