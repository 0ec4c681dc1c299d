"""Errors are an interface: one tree, and one table that holds what every code means to a machine.

A code is stable, its status survives every hop (worker, HTTP, gRPC, metadata waiter, error frame), and its text is
short (200 characters), without media, paths outside the request, secrets or memory addresses. What a code
means to a person stands in the catalogue (`tectum explain CODE`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_TEXT = 200
_ADDRESS = re.compile(r"(?<![0-9A-Za-z])0x[0-9a-fA-F]{4,}")
#: a URL's user information and whatever follows its path: signatures and tokens stand there
_URL_SECRETS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,15}://)(?:[^\s/?#@]*@)?([^\s?#]*)[?#]\S*")
_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,15}://)[^\s/?#@]*@")
#: inline media, and any long run that could be some
_DATA_URI = re.compile(r"(?i)\bdata:[^\s,]{0,100},\S*")
_LONG_RUN = re.compile(r"[A-Za-z0-9+/=_-]{97,}")


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """What a program needs to know of a code. `status` always exists in `http.HTTPStatus` (receivers convert it)."""

    status: int
    grpc: str
    retryable: bool = False


#: every code that Tectum raises; a test holds it equal to the catalogue and to the source
CODES: dict[str, CodeSpec] = {
    # the request itself
    "invalid_request": CodeSpec(400, "INVALID_ARGUMENT"),
    "invalid_option": CodeSpec(400, "INVALID_ARGUMENT"),
    "mixed_modalities": CodeSpec(400, "INVALID_ARGUMENT"),
    "unsupported_modality": CodeSpec(400, "INVALID_ARGUMENT"),
    "unauthorized": CodeSpec(401, "UNAUTHENTICATED"),
    "cross_site": CodeSpec(403, "PERMISSION_DENIED"),
    "not_found": CodeSpec(404, "NOT_FOUND"),
    "method_not_allowed": CodeSpec(405, "UNIMPLEMENTED"),
    "request_timeout": CodeSpec(408, "DEADLINE_EXCEEDED", retryable=True),
    "head_too_large": CodeSpec(431, "RESOURCE_EXHAUSTED"),
    "body_too_large": CodeSpec(413, "RESOURCE_EXHAUSTED"),
    "request_too_large": CodeSpec(413, "RESOURCE_EXHAUSTED"),
    # its media
    "invalid_data_uri": CodeSpec(400, "INVALID_ARGUMENT"),
    "invalid_base64": CodeSpec(400, "INVALID_ARGUMENT"),
    "empty_media": CodeSpec(400, "INVALID_ARGUMENT"),
    "url_refused": CodeSpec(400, "INVALID_ARGUMENT"),
    "media_fetch_failed": CodeSpec(424, "FAILED_PRECONDITION"),
    "media_fetch_timeout": CodeSpec(424, "FAILED_PRECONDITION"),
    "media_decode_failed": CodeSpec(400, "INVALID_ARGUMENT"),
    "media_refused": CodeSpec(400, "INVALID_ARGUMENT"),
    "media_too_large": CodeSpec(413, "RESOURCE_EXHAUSTED"),
    "image_too_large": CodeSpec(413, "RESOURCE_EXHAUSTED"),
    "unsupported_media": CodeSpec(415, "INVALID_ARGUMENT"),
    # its life
    "request_not_found": CodeSpec(404, "NOT_FOUND"),
    "embedding_not_ready": CodeSpec(409, "FAILED_PRECONDITION", retryable=True),
    "request_conflict": CodeSpec(409, "ALREADY_EXISTS"),
    "request_released": CodeSpec(410, "FAILED_PRECONDITION"),
    "deadline_exceeded": CodeSpec(504, "DEADLINE_EXCEEDED", retryable=True),
    "metadata_timeout": CodeSpec(504, "DEADLINE_EXCEEDED", retryable=True),
    "send_failed": CodeSpec(502, "UNAVAILABLE", retryable=True),
    "send_timeout": CodeSpec(504, "DEADLINE_EXCEEDED", retryable=True),
    # the service
    "overloaded": CodeSpec(503, "RESOURCE_EXHAUSTED", retryable=True),
    "shutting_down": CodeSpec(503, "UNAVAILABLE", retryable=True),
    "worker_lost": CodeSpec(503, "UNAVAILABLE", retryable=True),
    "encoder_stalled": CodeSpec(503, "UNAVAILABLE", retryable=True),
    "out_of_memory": CodeSpec(503, "RESOURCE_EXHAUSTED", retryable=True),
    "encode_failed": CodeSpec(500, "INTERNAL"),
    "row_mismatch": CodeSpec(500, "INTERNAL"),
    "non_finite_rows": CodeSpec(500, "INTERNAL"),
    "internal": CodeSpec(500, "INTERNAL"),
    # start-up and the client's side
    "invalid_settings": CodeSpec(400, "INVALID_ARGUMENT"),
    "model_not_found": CodeSpec(404, "NOT_FOUND"),
    "unsupported_architecture": CodeSpec(400, "UNIMPLEMENTED"),
    "invalid_checkpoint": CodeSpec(400, "INVALID_ARGUMENT"),
    "missing_dependency": CodeSpec(500, "UNIMPLEMENTED"),
    "port_in_use": CodeSpec(503, "UNAVAILABLE"),
    "cluster_unavailable": CodeSpec(503, "UNAVAILABLE"),
    "server_unreachable": CodeSpec(503, "UNAVAILABLE", retryable=True),
    "invalid_rows": CodeSpec(502, "DATA_LOSS"),
}


class TectumError(Exception):
    """Any failure that Tectum reports.

    code: a key of `CODES`; it fixes `status`, the gRPC status and `retryable`.
    item: index of the item at fault within its request, where one is.
    retry_after: seconds after which a retry makes sense, where known.
    details: further JSON-able facts (`reason`, `age_s`, `limit`…).
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        item: int | None = None,
        retry_after: float | None = None,
        **details: Any,
    ) -> None:
        self.code = code
        self.spec = CODES[code]
        self.status = self.spec.status
        self.message = clean_text(message)
        self.item = item
        self.retry_after = retry_after
        self.details = details
        super().__init__(self.message)

    @property
    def retryable(self) -> bool:
        return self.spec.retryable

    def __str__(self) -> str:
        where = "" if self.item is None else f" (item {self.item})"
        return f"{self.message}{where} [{self.code}]"

    def bare(self) -> TectumError:
        """The same error without traceback and cause: those keep the frames they passed through alive, media and all."""
        twin = type(self)(self.code, self.message, item=self.item, retry_after=self.retry_after)
        twin.details, twin.status = self.details, self.status
        return twin

    def at_item(self, item: int) -> TectumError:
        """The same error, saying which item of its request it is about (where it did not say so already)."""
        if self.item is None:
            self.item = item
        return self

    def to_problem(self, req_id: str | None = None) -> dict[str, Any]:
        """RFC 9457 problem details. `type` is the page of the code on the same server."""
        problem: dict[str, Any] = {
            "type": f"/errors/{self.code}",
            "title": self.code.replace("_", " "),
            "status": self.status,
            "detail": self.message,
            "code": self.code,
            "retryable": self.retryable,
        }
        if req_id is not None:
            problem["req_id"] = req_id
        if self.item is not None:
            problem["item"] = self.item
        return {**self.details, **problem}

    @staticmethod
    def from_problem(problem: dict[str, Any], retry_after: float | None = None) -> TectumError:
        """The error a server reported, as the class it was raised with. Unknown codes become `internal`."""
        code = problem.get("code")
        known = code if isinstance(code, str) and code in CODES else "internal"
        skip = {"type", "title", "status", "detail", "code", "retryable", "req_id", "item", "retry_after"}
        details = {key: value for key, value in problem.items() if key not in skip and key.isidentifier()}
        detail, item, status = problem.get("detail"), problem.get("item"), problem.get("status")
        error = error_class(known)(
            known,
            detail if isinstance(detail, str) else "the server reported no detail",
            item=item if type(item) is int and item >= 0 else None,
            retry_after=retry_after,
        )
        error.details = details
        if type(status) is int and 400 <= status < 600:
            error.status = status  # a newer server may know codes that we do not
        return error

    @staticmethod
    def from_answer(status: int, body: bytes, retry_after: str, who: str = "The server") -> TectumError:
        """The error in a server's HTTP answer: its problem details, or `internal` where it gives none.

        retry_after: the answer's header of that name, or empty. who: the server, as the text of the latter calls it.
        """
        try:
            problem = json.loads(body)
        except (ValueError, RecursionError):
            problem = None
        if isinstance(problem, dict) and "code" in problem:
            return TectumError.from_problem(problem, float(retry_after) if retry_after.isdecimal() else None)
        return InternalError("internal", f"{who} answered with status {status} and no reason")


class MMError(TectumError):
    """A multimodal encode that failed (the field's classic name). 500 unless a subclass says otherwise."""


class BadRequestError(MMError):
    """The caller's request or media is at fault: any 4xx."""


class InternalError(MMError):
    """Ours is the fault: any 5xx that a retry will not mend."""


class LifecycleError(MMError):
    """The request is not in a state that allows this: unknown, not ready, conflicting, released, too late."""


class UnavailableError(MMError):
    """The service cannot take this now; a retry (after `retry_after` seconds) makes sense."""


class StartupError(TectumError):
    """The command cannot start: settings, model, port, missing library. The CLI exits with code 2."""


class DeliveryError(MMError):
    """Rows could not be handed to a receiver, or what was received is not what was sent."""


_LIFECYCLE = {"request_not_found", "embedding_not_ready", "request_conflict", "request_released"}
_LIFECYCLE |= {"deadline_exceeded", "metadata_timeout"}
_UNAVAILABLE = {"overloaded", "shutting_down", "worker_lost", "encoder_stalled", "out_of_memory", "server_unreachable"}
_STARTUP = {"invalid_settings", "model_not_found", "unsupported_architecture", "invalid_checkpoint"}
_STARTUP |= {"missing_dependency", "port_in_use", "cluster_unavailable"}
_DELIVERY = {"send_failed", "send_timeout", "invalid_rows"}


def error_class(code: str) -> type[TectumError]:
    """The class that a code is raised with."""
    for codes, cls in (
        (_LIFECYCLE, LifecycleError),
        (_UNAVAILABLE, UnavailableError),
        (_STARTUP, StartupError),
        (_DELIVERY, DeliveryError),
    ):
        if code in codes:
            return cls
    return BadRequestError if CODES[code].status < 500 else InternalError


def clean_text(text: str) -> str:
    """One line, at most 200 characters: no memory addresses, media or secrets of URLs, nothing unprintable."""
    return _cleaned(text[: 16 * MAX_TEXT])


@lru_cache(maxsize=256)  # a full server says the same to everybody, and saying it should cost it little
def _cleaned(text: str) -> str:
    text = " ".join(text.split())
    text = scrub("".join(c if c.isprintable() else "?" for c in text))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def scrub(text: str) -> str:
    """The text without memory addresses, queries and passwords of URLs, `data:` URIs, and runs that could be media."""
    text = _DATA_URI.sub("data:…", _ADDRESS.sub("0x…", text))
    text = _URL_USER.sub(r"\1", _URL_SECRETS.sub(r"\1\2?…", text))
    return _LONG_RUN.sub(lambda run: run[0][:16] + "…", text)
