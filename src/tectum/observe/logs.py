"""Logs: one line an event, `key=value` facts after the message; one line for each request that ended."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tectum.errors import TectumError

log = logging.getLogger("tectum.request")


def configure(level: str) -> None:
    """Send Tectum's and the HTTP server's lines to standard error, from `level` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tectum").setLevel(level.upper())


class RequestLog:
    """Writes a line for each request that ended, or was refused."""

    def refused(self, error: TectumError) -> None:
        log.info("request refused code=%s status=%d", error.code, error.status)

    def ended(self, job: Any, reason: str, error: TectumError | None, seconds: float) -> None:
        level = logging.WARNING if error is not None and error.status >= 500 else logging.INFO
        if not log.isEnabledFor(level):
            return
        facts = {
            "req_id": job.request.req_id[:64],
            "reason": reason,
            "status": "ok" if error is None else error.status,
            "code": None if error is None else error.code,
            "items": len(job.request.items),
            "rows": None if job.prepared is None else job.prepared.metadata.rows,
            "total_ms": f"{seconds * 1e3:.1f}",
            **{f"{stage}_ms": f"{taken * 1e3:.1f}" for stage, taken in job.seconds.items()},
        }
        line = " ".join(f"{key}={value}" for key, value in facts.items() if value is not None)
        log.log(level, "request ended %s", line)
