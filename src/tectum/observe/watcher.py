"""What an observer is told of a request's life, and sees of it. Observers override what they need.

This is the observers' side of `Observer` in `tectum.pipeline.work`; they import nothing from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tectum.errors import TectumError
from tectum.types import EncodeRequest, RequestMetadata


class PreparedView(Protocol):
    """What preprocessing yielded."""

    @property
    def metadata(self) -> RequestMetadata: ...
    @property
    def lane(self) -> int: ...


class JobView(Protocol):
    """One life, read only. seconds: how long each finished stage took; prepared_at: on `time.perf_counter`.

    destinations: addresses that a send was begun to.
    """

    @property
    def life(self) -> int: ...
    @property
    def request(self) -> EncodeRequest: ...
    @property
    def prepared(self) -> PreparedView | None: ...
    @property
    def prepared_at(self) -> float: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def destinations(self) -> list[str]: ...


class Watcher:
    """An observer that does nothing."""

    def accepted(self, job: JobView, seconds: float) -> None: ...

    def refused(self, error: TectumError, request: EncodeRequest | None = None) -> None: ...

    def batch(self, jobs: Sequence[JobView]) -> None: ...

    def sent(self, job: JobView, backend: str, seconds: float, error: TectumError | None) -> None: ...

    def ended(self, job: JobView, reason: str, error: TectumError | None, seconds: float) -> None: ...

    def freed(self, job: JobView) -> None: ...
