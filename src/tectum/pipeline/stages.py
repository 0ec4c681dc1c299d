"""What the stages of a request really do: fetch, prepare, forward into staging, deliver. Here the rooms meet.

Owns the staging memory, the fetcher and the deliveries; the encoders are handed in (`Encoders`: threads of this process,
or processes of their own). It knows no request's state; `pipeline.py` calls it when the ledger admits a stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from tectum.config import Settings
from tectum.delivery.base import Deliveries
from tectum.delivery.staging import Lease, StagingPool
from tectum.errors import BadRequestError, TectumError, UnavailableError
from tectum.media.fetch import Fetcher
from tectum.media.policy import MediaPolicy
from tectum.pipeline.reuse import Reuse
from tectum.pipeline.work import PreparedPart, Staged
from tectum.types import Destination, EncodeRequest, MediaItem


class Encoders(Protocol):
    """One or more loaded encoders, each a lane: it prepares requests, keeps their inputs, and runs one forward at a time.

    lanes: how many. depth: forwards that may be given to a lane at once; it runs them one by one. fuses: whether
    requests share a forward. on_lane_lost: called with the lane whose encoder died; what it had prepared is gone. revision:
    what, besides media and options, rows depend on (`models/revision.py`).
    """

    lanes: int
    depth: int
    fuses: bool
    on_lane_lost: Callable[[int], None]

    @property
    def revision(self) -> str: ...

    async def start(self, pool: StagingPool) -> None:
        """Load and warm up; rows will be written into leases of `pool`. Raises StartupError."""

    async def stop(self) -> None:
        """End what `start` began. Idempotent."""

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        """Decode and preprocess on some lane. Raises TectumError that names the item at fault."""

    def forget(self, part: PreparedPart) -> None:
        """The inputs of `part` are not needed any more. Idempotent."""

    async def forward(self, batch: Sequence[PreparedPart], leases: Sequence[Lease]) -> list[TectumError | None]:
        """One forward over parts of one lane, rows written to their leases; for each None, or its error.

        When it ends, however it ends, nobody writes to the leases any more. Raises what fails for all of them.
        """


class Stages:
    """The real `Work` of a pipeline. An async context manager: inside it the encoders run.

    deliveries: how rows are pushed; entered by the caller, who leaves it after this.
    """

    def __init__(self, encoders: Encoders, settings: Settings, deliveries: Deliveries | None = None) -> None:
        self.encoders = encoders
        self.deliveries = deliveries or Deliveries({})
        policy = MediaPolicy.from_settings(settings)
        self.reuse = Reuse(encoders.lanes, settings.cache_bytes, policy)
        self.depth = encoders.depth
        self.lanes = encoders.lanes + 1  # the last one copies known rows
        self.pool = StagingPool(settings.max_staged_bytes)
        self._max_fetched = settings.max_fetched_bytes
        self._all_fetched = _AllFetched(settings.max_all_fetched_bytes)
        self._fetcher = Fetcher(policy)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Stages:
        self._open.callback(self.pool.close)
        self._open.push_async_callback(self.encoders.stop)
        try:
            await self._open.enter_async_context(self._fetcher)
            await self.encoders.start(self.pool)
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    def watch_lanes(self, on_lost: Callable[[int], None]) -> None:
        self.encoders.on_lane_lost = on_lost

    # --- prepare ---

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        started = time.perf_counter()
        with _Fetched(self._max_fetched, self._all_fetched) as budget:
            fetched = await self._fetch(request, budget)
            fetch_ended = time.perf_counter()
            if self.reuse.wanted(fetched):
                part = await self.reuse.prepare(fetched, self.encoders.revision, self.encoders.prepare)
            else:
                part = await self.encoders.prepare(fetched)
        part.seconds = {"fetch": fetch_ended - started, "prepare": time.perf_counter() - fetch_ended}
        return part

    def forget(self, part: PreparedPart) -> None:
        self.reuse.forget(part)
        if part.lane != self.reuse.lane:
            self.encoders.forget(part)

    async def _fetch(self, request: EncodeRequest, budget: _Fetched) -> EncodeRequest:
        """The request with bytes in place of http(s) URLs; all fetched at once, and all given up when one fails."""
        tasks = {
            index: asyncio.ensure_future(self._fetch_item(index, item.url or "", budget))
            for index, item in enumerate(request.items)
            if item.remote
        }
        if not tasks:
            return request
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        items = list(request.items)
        for index, task in tasks.items():
            items[index] = MediaItem(items[index].modality, data=task.result())
        return replace(request, items=tuple(items))

    async def _fetch_item(self, index: int, url: str, budget: _Fetched) -> bytes:
        try:
            return await self._fetcher.fetch(url, budget.add)
        except TectumError as error:
            raise error.at_item(index) from None

    # --- forward ---

    async def encode(self, batch: Sequence[PreparedPart]) -> list[Staged | TectumError]:
        """Memory for each member first; a member that gets none fails alone, before the forward."""
        results: list[Staged | TectumError] = [self._staged(part) for part in batch]
        admitted = [(part, got) for part, got in zip(batch, results, strict=True) if isinstance(got, Staged)]
        if not admitted:
            return results
        try:
            parts, staged = zip(*admitted, strict=True)
            forward = self.reuse.copy if parts[0].lane == self.reuse.lane else self.encoders.forward
            errors = await forward(parts, [each.lease for each in staged])
            for part, each, error in zip(parts, staged, errors, strict=True):
                if error is None:
                    await self.reuse.keep(part, each.lease)
        except BaseException:
            for _, each in admitted:
                self.free(each)
            raise
        for part, error in zip(parts, errors, strict=True):
            if error is None:
                self.forget(part)  # its rows are there: the inputs need not wait for the delivery
        failed = {id(each): error for each, error in zip(staged, errors, strict=True) if error is not None}
        for index, got in enumerate(results):
            error = failed.get(id(got))
            if error is not None and isinstance(got, Staged):
                self.free(got)
                results[index] = error
        return results

    def _staged(self, part: PreparedPart) -> Staged | TectumError:
        metadata = part.metadata
        try:
            return Staged(metadata, self.pool.lease(metadata.nbytes, 1 + metadata.deepstack_layers))
        except TectumError as error:
            return error

    # --- deliver ---

    async def send(self, staged: Staged, destination: Destination) -> None:
        await self.deliveries.send(staged, destination)

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        await self.deliveries.notify(req_id, destination, error)

    def free(self, staged: Staged) -> None:
        self.pool.give_back(staged.lease)


@dataclass(slots=True)
class _AllFetched:
    """Bytes fetched for all requests that are held now, and the most there may be."""

    limit: int
    held: int = 0


class _Fetched:
    """Bytes fetched for one request. A context manager: when it is left, they are no longer held."""

    def __init__(self, limit: int, everybody: _AllFetched) -> None:
        self._limit = limit
        self._everybody = everybody
        self._held = 0

    def __enter__(self) -> _Fetched:
        return self

    def __exit__(self, *exc: object) -> None:
        self._everybody.held -= self._held

    def add(self, more: int) -> None:
        """Book `more` bytes. Raises BadRequestError `media_too_large` (413) or UnavailableError `overloaded` (503)."""
        if self._held + more > self._limit:
            text = f"The request's URLs lead to more than {self._limit} bytes together (--max-fetched-bytes)"
            raise BadRequestError("media_too_large", text, limit=self._limit)
        if self._everybody.held + more > self._everybody.limit:
            text = f"The encoder is full: {self._everybody.held} fetched bytes (limit {self._everybody.limit})"
            raise UnavailableError("overloaded", text, retry_after=1.0)
        self._held += more
        self._everybody.held += more
