"""Health, as every door tells it: whether new work is taken, and whether accepted work gets done.

Owns the verdict, so that HTTP, gRPC and the bootstrap servers are told the same; each door puts it into its own words.
"""

from __future__ import annotations

from tectum.config import Settings
from tectum.errors import TectumError, UnavailableError
from tectum.pipeline.pipeline import Pipeline
from tectum.workers.pool import WorkerPool

#: of `--stall-timeout`: an encoder that finishes nothing for so long is called unhealthy, before it is replaced
STALLED_SHARE = 0.75


class Health:
    """The state of one server. None of its answers waits for work."""

    def __init__(self, pipeline: Pipeline, pool: WorkerPool, settings: Settings) -> None:
        self._pipeline = pipeline
        self._pool = pool
        self._stall_timeout = settings.stall_timeout

    def check_ready(self) -> None:
        """Raises UnavailableError: `shutting_down`, `worker_lost`."""
        if self._pipeline.ledger.closing:
            raise UnavailableError("shutting_down", "The encoder is shutting down", retry_after=1.0)
        if not self._pool.up:
            raise UnavailableError("worker_lost", "No encoder process is up; one is being started", retry_after=1.0)

    def check_room(self) -> None:
        """Raises UnavailableError `overloaded` where a limit is reached. A full encoder is not a sick one: only who looks for
        a place for the next request asks for this.
        """
        full = self._pipeline.overload()
        if full is not None:
            raise full

    def check_progress(self) -> float:
        """Seconds that pending work has not moved for. Raises UnavailableError `encoder_stalled` when that is too long."""
        stalled = self._pool.stalled_for()
        if stalled > STALLED_SHARE * self._stall_timeout:
            text = f"An encoder has pending work and finished no step of it for {stalled:.0f} s"
            raise UnavailableError("encoder_stalled", text, retry_after=5.0)
        return stalled

    def good(self) -> bool:
        """Whether it is up, and gets its work done; it may be full."""
        try:
            self.check_ready()
            self.check_progress()
        except TectumError:
            return False
        return True
