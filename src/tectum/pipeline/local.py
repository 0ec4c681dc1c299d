"""The encoder in this process: one unit, a few threads to prepare, one thread for the forward.

Owns the threads. `tectum.workers` offers the same (`Encoders`) with each encoder in a process of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tectum.config import Settings
from tectum.delivery.staging import Lease, StagingPool
from tectum.errors import TectumError
from tectum.media.policy import MediaPolicy
from tectum.pipeline.limits import fuses
from tectum.pipeline.threads import run_to_end
from tectum.pipeline.unit import EncoderUnit
from tectum.pipeline.work import PreparedPart
from tectum.types import EncodeRequest

if TYPE_CHECKING:
    from tectum.models.adapter import Adapter


class LocalEncoder:
    """`Encoders` with one lane: this process."""

    lanes = 1
    depth = 1

    def __init__(self, adapter: Adapter, settings: Settings) -> None:
        self.unit = EncoderUnit(adapter, MediaPolicy.from_settings(settings), settings.max_request_patches)
        self.fuses = fuses(settings, adapter.device.type)
        self.on_lane_lost: Callable[[int], None] = _nothing  # this process is the lane: it cannot outlive it
        threads = settings.forward_threads or max(1, (os.cpu_count() or 1) - 1)
        self._prepare_threads = ThreadPoolExecutor(
            settings.prepare_threads or 2, "tectum-prepare", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._forward_thread = ThreadPoolExecutor(
            1, "tectum-forward", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self._inputs: dict[int, Any] = {}
        self._tickets = itertools.count(1)

    @cached_property
    def revision(self) -> str:
        return self.unit.revision()

    async def start(self, pool: StagingPool) -> None:
        await run_to_end(self._forward_thread, self.unit.warm_up)

    async def stop(self) -> None:
        for executor in (self._prepare_threads, self._forward_thread):
            executor.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        metadata, inputs = await run_to_end(self._prepare_threads, self.unit.prepare, request)
        ticket = next(self._tickets)
        self._inputs[ticket] = inputs
        return PreparedPart(metadata, ticket)

    def forget(self, part: PreparedPart) -> None:
        self._inputs.pop(part.ticket, None)

    async def forward(self, batch: Sequence[PreparedPart], leases: Sequence[Lease]) -> list[TectumError | None]:
        inputs = [self._inputs[part.ticket] for part in batch]
        landing = await run_to_end(self._forward_thread, self.unit.forward, inputs, [lease.view() for lease in leases])
        return await run_to_end(self._prepare_threads, landing.wait) if self.unit.on_device else landing.wait()


def _nothing(lane: int) -> None: ...
