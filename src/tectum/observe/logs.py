"""Logs: one line an event, for people (`message key=value …`) or for machines (one JSON object); one line a request.

Facts go beside the message, in `extra={"facts": {…}}`, so that both forms are made from the same call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tectum.errors import TectumError, clean_text, scrub
from tectum.observe.watcher import JobView, Watcher
from tectum.types import EncodeRequest

log = logging.getLogger("tectum.request")

#: characters of a request's id in a line
MAX_ID = 64
#: characters of a message, and of a traceback's exception text
MAX_LINE = 1000


def configure(level: str, form: str = "text") -> None:
    """Send Tectum's and the HTTP server's lines to standard error, from `level` up. form: `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if form == "json" else TextLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tectum").setLevel(level.upper())
    # what Pillow finds wrong with an input is its caller's, who is told
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def above_the_bar() -> Iterator[None]:
    """Inside, lines go to `sys.stderr` as it is now: who draws a bar on a terminal stands in for it, and keeps them apart."""
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    before = [(handler, handler.stream) for handler in handlers]
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler, stream in before:
            handler.setStream(stream)


class Scrubbed(logging.Formatter):
    """Lines without media, secrets of URLs or memory addresses, whoever logs them; a message is one line.

    A traceback keeps its frames, without folders and source; of the exceptions it keeps the type and a cleaned text, since
    libraries put into it what they could not read.
    """

    def said(self, record: logging.LogRecord) -> str:
        """The message, cleaned."""
        return scrub(" ".join(record.getMessage()[: 4 * MAX_LINE].split()))[:MAX_LINE]

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = self.said(record)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        error = ei[1]
        frames = [
            f"  at {Path(frame.filename).stem}.{frame.name}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__, limit=-12)
        ]
        return "\n".join([*frames, f"  {type(error).__name__}: {clean_text(str(error))}"])


class TextLine(Scrubbed):
    """Time, level, logger, message, and the facts as `key=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return " ".join([line, *(f"{key}={value}" for key, value in _facts(record).items())])


class JsonLine(Scrubbed):
    """One JSON object: `time` (UTC, ISO 8601), `level`, `logger`, `message`, the facts, and `exception` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self.said(record),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RequestLog(Watcher):
    """Writes one line for each request, when it ended or was refused."""

    def refused(self, error: TectumError, request: EncodeRequest | None = None) -> None:
        # while the service drains, every caller is refused: that it does is said once, by the drain itself
        level = logging.DEBUG if error.code == "shutting_down" else logging.INFO
        if not log.isEnabledFor(level):
            return
        facts = {} if request is None else {"req_id": request.req_id[:MAX_ID]}
        _write(level, "request refused", {**facts, "status": error.status, "code": error.code})

    def ended(self, job: JobView, reason: str, error: TectumError | None, seconds: float) -> None:
        level = logging.WARNING if error is not None and error.status >= 500 else logging.INFO
        if not log.isEnabledFor(level):
            return
        facts = {
            "req_id": job.request.req_id[:MAX_ID],
            "modality": str(job.request.modality),
            "reason": str(reason),
            "status": "ok" if error is None else error.status,
            "code": None if error is None else error.code,
            "items": len(job.request.items),
            "rows": None if job.prepared is None else job.prepared.metadata.rows,
            "lane": None if job.prepared is None else job.prepared.lane,
            "total_ms": round(seconds * 1e3, 1),
            **{f"{stage}_ms": round(taken * 1e3, 1) for stage, taken in job.seconds.items()},
        }
        _write(level, "request ended", {key: value for key, value in facts.items() if value is not None})


def _write(level: int, message: str, facts: dict[str, Any]) -> None:
    log.log(level, message, extra={"facts": facts})


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    return facts
