"""Logs: one line an event, `key=value` facts after the message; one line for each request that ended."""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from typing import Any

from tectum.errors import TectumError, clean_text, scrub

log = logging.getLogger("tectum.request")


#: characters of one line, and of a traceback's exception text
MAX_LINE = 1000


class Scrubbed(logging.Formatter):
    """Lines without media, secrets of URLs or memory addresses, whoever logs them; a message is one line.

    A traceback keeps its frames, without folders and source; of the exceptions it keeps the type and a cleaned text, since
    libraries put into it what they could not read.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = scrub(" ".join(record.message[: 4 * MAX_LINE].split()))[:MAX_LINE]
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        error = ei[1]
        frames = [
            f"  at {Path(frame.filename).stem}.{frame.name}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__, limit=-12)
        ]
        return "\n".join([*frames, f"  {type(error).__name__}: {clean_text(str(error))}"])


def configure(level: str) -> None:
    """Send Tectum's and the HTTP server's lines to standard error, from `level` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Scrubbed("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tectum").setLevel(level.upper())
    for library in ("python_multipart", "PIL"):  # what they find wrong with an input is its caller's, who is told
        logging.getLogger(library).setLevel(logging.CRITICAL)


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
