"""Single flight: while content is being encoded for one request, others that want the same wait for its rows.

Owns who leads and who follows; it knows no request and no state of one. A leader that ends without rows, however it ends,
lets the next one lead, so that nobody waits for work that nobody does.
"""

from __future__ import annotations

import asyncio

from tectum.cache.store import Entry


class Flight:
    """One encode under way. followers: how many wait for its rows."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.followers = 0
        self._landed: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Entry | None:
        """The rows, or None when the leader ended without any. Cancelling a follower touches nobody else."""
        self.followers += 1
        try:
            return await asyncio.shield(self._landed)
        finally:
            self.followers -= 1

    def land(self, entry: Entry | None) -> None:
        if not self._landed.done():
            self._landed.set_result(entry)


class Flights:
    """The flights under way, by content key."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def lead(self, key: str) -> Flight:
        """Begin a flight: whoever calls this ends it with `end`, in every case."""
        assert key not in self._flights, "one leader a key"
        flight = self._flights[key] = Flight(key)
        return flight

    def end(self, flight: Flight, entry: Entry | None) -> None:
        """The leader has rows, or will never have any. Idempotent: the first end counts."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        flight.land(entry)
