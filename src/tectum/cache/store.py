"""Rows kept by content key, the least recently used dropped first, within a budget of bytes.

Owns copies: an entry outlives the request that made it and never points into staging memory. One owner (the event loop).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass

from tectum.types import RequestMetadata


@dataclass(frozen=True, slots=True)
class Entry:
    """One part's rows. data: all staged bytes (rows, then deepstack layers), of `metadata.nbytes`."""

    metadata: RequestMetadata
    data: bytes
    crc32: int

    @staticmethod
    def of(metadata: RequestMetadata, staged: memoryview) -> Entry:
        """A copy of staged rows. Blocking for large ones."""
        data = bytes(staged)
        return Entry(metadata, data, zlib.crc32(data))

    def sound(self) -> bool:
        """Whether the rows are those that were put in. Blocking for large ones."""
        return len(self.data) == self.metadata.nbytes and zlib.crc32(self.data) == self.crc32


class EmbeddingCache:
    """max_bytes: budget for rows; 0 keeps nothing. `nbytes` is what it holds."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # used last, last

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        """The entry under `key`, which is now the most recently used. Whoever uses it checks that it is `sound`."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def fits(self, nbytes: int) -> bool:
        """Whether an entry of so many bytes can be kept at all."""
        return nbytes <= self.max_bytes

    def put(self, key: str, entry: Entry) -> None:
        """Keep `entry`, dropping what was not used for longest; one above the budget is not kept."""
        self.drop(key)
        if not self.fits(len(entry.data)):
            return
        while self.nbytes + len(entry.data) > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.nbytes -= len(oldest.data)
        self._entries[key] = entry
        self.nbytes += len(entry.data)

    def drop(self, key: str) -> None:
        """Forget `key`. Idempotent."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= len(entry.data)
