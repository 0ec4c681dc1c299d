"""The nouns of the pipeline: what it has done (`Work`), what that makes, and who watches it (`Observer`).

No rule lives here: whether a job may go on is the ledger's to say, and `pipeline.py` asks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tectum.errors import TectumError
from tectum.lifecycle.events import Reason
from tectum.types import Destination, EncodeRequest, Modality, RequestMetadata

if TYPE_CHECKING:
    from tectum.cache.flights import Flight
    from tectum.delivery.staging import Lease


@dataclass(slots=True)
class PreparedPart:
    """What the prepare stage made of a request. The inputs stay with the encoder that made them.

    lane: which encoder that is. ticket: its name for them. seconds: how long each step took. flight: who waits for the
    same rows (`reuse.py`).
    """

    metadata: RequestMetadata
    ticket: Any
    lane: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    flight: Flight | None = None


@dataclass(slots=True)
class Staged:
    """A request's rows in staging memory. `lease` is the pool's; it is read by sends and given back on `Free`."""

    metadata: RequestMetadata
    lease: Lease


class Work(Protocol):
    """What the stages do. Each coroutine, when cancelled, ends only after it has stopped using the request's memory.

    lanes: how many encoders there are; each runs one forward at a time. depth: how many may be under way on a lane, so that
    an encoder finds the next one waiting when it ends one.
    """

    lanes: int
    depth: int

    def watch_lanes(self, on_lost: Callable[[int], None]) -> None:
        """Have `on_lost` called with the lane whose encoder died: what it had prepared is gone."""

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        """Fetch, decode and preprocess all items. Raises TectumError that names the item at fault."""

    def forget(self, part: PreparedPart) -> None:
        """Drop the inputs of a part that will not be encoded (again)."""

    async def encode(self, batch: Sequence[PreparedPart]) -> list[Staged | TectumError]:
        """One forward for the batch, all of one lane, its rows checked and staged: a result or an error for each member."""

    async def send(self, staged: Staged, destination: Destination) -> None:
        """Deliver to a receiver and return when it has confirmed. Raises TectumError. Never releases."""

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        """Tell a receiver that waits for `req_id` that its rows will not come."""

    def free(self, staged: Staged) -> None:
        """Give staging memory back."""


@dataclass(slots=True)
class Job:
    """One life as the shell sees it: the work done for it so far. Whether it may go on is the ledger's to say."""

    life: int
    request: EncodeRequest
    accepted_at: float
    walk: asyncio.Task[None] | None = None
    prepared: PreparedPart | None = None
    staged: Staged | None = None
    prepared_at: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    destinations: list[str] = field(default_factory=list)  # addresses that a send was begun to

    @property
    def modality(self) -> Modality:
        return self.request.modality

    @property
    def patches(self) -> int:
        assert self.prepared is not None, "only prepared jobs have patches"
        return self.prepared.metadata.patches


class Observer(Protocol):
    """Who watches requests (metrics, logs, traces). What it raises is logged and goes no further.

    Of one life: `accepted`, then `batch` for each forward and `sent` for each delivery; `ended` and `freed` once each. A
    delivery that runs while its request is released is told between these two.
    """

    def accepted(self, job: Job, seconds: float) -> None:
        """A life begins, `seconds` after its caller came. Called in the caller's own context."""

    def refused(self, error: TectumError, request: EncodeRequest | None = None) -> None:
        """A request was not accepted, and began no life; None where it could not even be read."""

    def batch(self, jobs: Sequence[Job]) -> None:
        """A forward begins with these jobs."""

    def sent(self, job: Job, backend: str, seconds: float, error: TectumError | None) -> None:
        """A delivery of the rows ended: to the caller (`inline`), to a puller (`pull`), or to a receiver by its backend."""

    def ended(self, job: Job, reason: Reason, error: TectumError | None, seconds: float) -> None:
        """A request's outcome is decided."""

    def freed(self, job: Job) -> None:
        """Nothing uses the request any more, and what it held is given back."""
