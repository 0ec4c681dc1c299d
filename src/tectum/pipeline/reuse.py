"""Rows that need no forward: content that was encoded before, or is being encoded for somebody else right now.

Owns the cache and the flights, and a lane of its own whose "forward" only copies rows into the lease, so that a hit never
waits behind forwards. It knows no request's state: a hit walks the lifecycle like any other request.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from tectum.cache.flights import Flights
from tectum.cache.key import content_key, joint_key
from tectum.cache.store import EmbeddingCache, Entry
from tectum.delivery.staging import Lease
from tectum.errors import TectumError
from tectum.media.policy import MediaPolicy
from tectum.media.source import item_bytes
from tectum.pipeline.threads import run_to_end
from tectum.pipeline.work import PreparedPart
from tectum.types import EncodeRequest, MediaItem, RequestMetadata

T = TypeVar("T")
log = logging.getLogger("tectum.reuse")

#: more bytes than this are hashed, summed and copied in a thread, so that the event loop goes on
IN_THREAD = 512 * 1024


class Reuse:
    """lane: the number of the lane that copies. hits: requests served without a forward. misses: those that led one."""

    def __init__(self, lane: int, max_bytes: int, policy: MediaPolicy) -> None:
        self.lane = lane
        self.cache = EmbeddingCache(max_bytes)
        self.flights = Flights()
        self.hits = 0
        self.misses = 0
        self._policy = policy
        self._thread = ThreadPoolExecutor(1, "tectum-reuse")

    def wanted(self, request: EncodeRequest) -> bool:
        """Whether content keys are worked out at all: the caller asks for them, or something is kept under them."""
        return not request.fresh and (request.content_keys or self.cache.max_bytes > 0)

    async def prepare(
        self, request: EncodeRequest, revision: str, prepare: Callable[[EncodeRequest], Awaitable[PreparedPart]]
    ) -> PreparedPart:
        """The part with known rows, or made by `prepare` when nobody has them. Raises as `prepare`, and for bad media."""
        size = sum(_weight(item) for item in request.items)
        request, keys = await self._apart(size, _keyed, request, revision, self._policy)
        key = joint_key(keys)
        entry = await self._find(key)
        if entry is not None:
            self.hits += 1
            return PreparedPart(_metadata_for(request, entry.metadata, keys), entry, self.lane)
        flight = self.flights.lead(key)
        self.misses += 1
        try:
            part = await prepare(request)
        except BaseException:
            self.flights.end(flight, None)
            raise
        part.metadata = replace(part.metadata, content_keys=keys)
        part.flight = flight
        return part

    async def _find(self, key: str) -> Entry | None:
        """Sound rows of this content, waited for where somebody encodes it now. None: nobody does, as of this moment."""
        while True:
            entry = self.cache.get(key)
            if entry is not None:
                if await self._apart(len(entry.data), entry.sound):
                    return entry
                log.error("a cached embedding was damaged in memory and is encoded again")
                if self.cache.get(key) is entry:
                    self.cache.drop(key)
                continue
            flight = self.flights.find(key)
            if flight is None:
                return None
            landed = await flight.wait()
            if landed is not None:
                return landed

    async def copy(self, batch: Sequence[PreparedPart], leases: Sequence[Lease]) -> list[TectumError | None]:
        """The forward of this lane. When it ends, however it ends, nobody writes to the leases any more."""
        for part, lease in zip(batch, leases, strict=True):
            await self._apart(lease.nbytes, _copy, part.ticket, lease.view())
        return [None] * len(batch)

    async def keep(self, part: PreparedPart, lease: Lease) -> None:
        """Fresh rows: for those who wait for them, and for later. When it ends nobody reads the lease any more."""
        flight = part.flight
        if flight is None or not (flight.followers or self.cache.fits(lease.nbytes)):
            return
        try:
            entry = await self._apart(lease.nbytes, Entry.of, part.metadata, lease.view())
        except MemoryError:
            log.warning("no memory to keep an embedding of %d bytes", lease.nbytes)
            return
        self.cache.put(flight.key, entry)
        self.flights.end(flight, entry)

    def forget(self, part: PreparedPart) -> None:
        """The part will bring no rows any more: who waits for them looks elsewhere. Idempotent."""
        if part.flight is not None:
            self.flights.end(part.flight, None)

    async def _apart(self, nbytes: int, function: Callable[..., T], *args: object) -> T:
        if nbytes <= IN_THREAD:
            return function(*args)
        return await run_to_end(self._thread, function, *args)


def _keyed(request: EncodeRequest, revision: str, policy: MediaPolicy) -> tuple[EncodeRequest, tuple[str, ...]]:
    """The request with its media as bytes, and the content key of each item."""
    items, keys = [], []
    for index, item in enumerate(request.items):
        try:
            media = item_bytes(item, policy)
        except TectumError as error:
            raise error.at_item(index) from None
        items.append(MediaItem(item.modality, data=media))
        keys.append(
            content_key(item.modality, media, revision=revision, options=request.options, tenant=request.tenant)
        )
    return replace(request, items=tuple(items)), tuple(keys)


def _weight(item: MediaItem) -> int:
    """Bytes that reading this item goes through; what lies in a file counts as large."""
    if item.url is not None and item.url[:5].lower() == "file:":
        return IN_THREAD + 1
    return len(item.data or item.base64 or item.url or "")


def _metadata_for(request: EncodeRequest, found: RequestMetadata, keys: tuple[str, ...]) -> RequestMetadata:
    return replace(
        found, req_id=request.req_id, num_parts=request.num_parts, part_idx=request.part_idx, content_keys=keys
    )


def _copy(entry: Entry, slot: memoryview) -> None:
    slot[:] = entry.data
