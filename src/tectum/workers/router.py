"""Which encoder gets a request. Pure: it is told how much each one has to do."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b


def choose(loads: Mapping[int, int], key: bytes) -> int:
    """The least loaded lane; among equals the one that the content's key prefers, so that the same content meets again.

    loads: what each lane that is up has queued (any unit). The preference is rendezvous hashing: it moves for as little
    content as possible when a lane comes or goes.
    """
    least = min(loads.values())
    return max((lane for lane, load in loads.items() if load == least), key=lambda lane: _preference(key, lane))


def _preference(key: bytes, lane: int) -> bytes:
    return blake2b(key, digest_size=8, salt=lane.to_bytes(8, "little")).digest()
