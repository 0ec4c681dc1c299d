"""Health, as every door tells it: whether new work is taken, and whether accepted work gets done.

Owns the verdict, so that HTTP, gRPC and the bootstrap servers are told the same; each door puts it into its own words.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from tectum.config import Settings
from tectum.errors import TectumError, UnavailableError
from tectum.pipeline.pipeline import Pipeline
from tectum.types import EncodeRequest, Modality
from tectum.workers.pool import WorkerPool

#: of `--stall-timeout`: an encoder that finishes nothing for so long is called unhealthy, before it is replaced
STALLED_SHARE = 0.75
#: seconds that the encode of an idle server may take
SELF_TEST = 10.0


class Health:
    """The state of one server. None of its answers waits for anybody's work; `check_encode` does some of its own."""

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

    async def check_encode(self) -> dict[str, Any]:
        """Encode a small item, the whole way, and say how long it took; of a server that has work, say how that goes.

        Raises as `check_ready` and `check_progress`, or whatever the encode failed with: MMError.
        """
        from tectum.media.decode import small_item  # with decoders that the service has no other use for

        self.check_ready()
        if self._pipeline.ledger.unfinished():
            return {"status": "busy", "stalled_s": round(self.check_progress(), 3)}
        item = small_item({Modality(name) for name in self._pool.card["modalities"]})
        deadline = int(SELF_TEST * 1e3)
        test = EncodeRequest(f"self-test-{uuid.uuid4().hex}", (item,), deadline_ms=deadline, fresh=True)
        started = time.perf_counter()
        async with self._pipeline.execute_encode_pipeline(test) as job:
            assert job.staged is not None, "an inline request is answered when it is staged"
            return {
                "status": "encoded",
                "rows": job.staged.metadata.rows,
                "seconds": round(time.perf_counter() - started, 4),
            }

    def good(self) -> bool:
        """Whether it is up, and gets its work done; it may be full."""
        try:
            self.check_ready()
            self.check_progress()
        except TectumError:
            return False
        return True
