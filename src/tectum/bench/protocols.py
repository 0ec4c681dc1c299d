"""What an encode looks like on the wire, for each protocol that a load can speak.

A protocol drives one `Link`; one exchange may take several calls. A new one is a class and a line in `PROTOCOLS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from tectum.bench.link import Answer, Link
from tectum.bench.pictures import Draw
from tectum.bench.plan import Plan, Size

BOUNDARY = b"tectum-bench-boundary"


class Outcome:
    """How an exchange ended: `ok`, or a code; the problem's fields and the seconds of each stage where they are known."""

    __slots__ = ("code", "problem", "timing")

    def __init__(self, code: str, timing: bytes = b"", problem: dict[str, Any] | None = None) -> None:
        self.code = code
        self.timing = timing
        self.problem = problem


class Speaker(Protocol):
    """Speaks one protocol to one server."""

    async def encode(self, link: Link, draw: Draw) -> Outcome:
        """Have one picture encoded, and its rows brought here. Raises ConnectionError."""

    async def live(self, link: Link) -> None:
        """The cheapest probe there is."""

    async def release(self, link: Link, number: int) -> None:
        """A control call that does no work: the release of an id that nobody uses."""


class Native:
    """`POST /v1/encode` with rows inline: multipart for bytes, JSON for URLs."""

    def __init__(self, plan: Plan) -> None:
        token = "" if plan.token is None else f"Authorization: Bearer {plan.token}\r\n"
        self._common = f"Host: {urlsplit(plan.url).netloc}\r\n{token}".encode()
        self._shapes: dict[Size, bytes] = {}

    async def encode(self, link: Link, draw: Draw) -> Outcome:
        answer = await link.call(self._request(draw))
        if answer.status != 200:
            problem = _problem(answer)
            return Outcome(str(problem.get("code", answer.status)), problem=problem)
        shape = _shape(answer.body)
        if not shape or self._shapes.setdefault(draw.size, shape) != shape:
            return Outcome("wrong_rows")  # pictures of one size have rows of one shape
        return Outcome("ok", answer.header(b"server-timing"))

    async def live(self, link: Link) -> None:
        answer = await link.call(b"GET /health/live HTTP/1.1\r\n%b\r\n" % self._common)
        if answer.status != 200:
            raise ConnectionError(f"/health/live answered {answer.status}")

    async def release(self, link: Link, number: int) -> None:
        answer = await link.call(b"DELETE /v1/requests/bench-%d HTTP/1.1\r\n%b\r\n" % (number, self._common))
        if answer.status != 200:
            raise ConnectionError(f"a release was answered with {answer.status}")

    def _request(self, draw: Draw) -> bytes:
        if draw.picture is None:
            body = json.dumps({"items": [{"type": "image", "url": draw.url}]}).encode()
            kind = b"application/json"
        else:
            body = (
                b'--%(b)s\r\nContent-Disposition: form-data; name="request"\r\n\r\n'
                b'{"items":[{"type":"image","file":"f0"}]}\r\n--%(b)s\r\n'
                b'Content-Disposition: form-data; name="f0"; filename="f0"\r\n'
                b"Content-Type: image/jpeg\r\n\r\n%(p)s\r\n--%(b)s--\r\n"
            ) % {b"b": BOUNDARY, b"p": draw.picture}
            kind = b"multipart/form-data; boundary=" + BOUNDARY
        head = b"POST /v1/encode HTTP/1.1\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        return head % (self._common, kind, len(body)) + body


def _shape(body: bytes) -> bytes:
    """Shape of the rows in a safetensors header, as it stands there; nothing when there are none."""
    _, found, rest = body[: 8 + int.from_bytes(body[:8], "little")].partition(b'"rows":{')
    return rest.partition(b'"shape":[')[2].partition(b"]")[0] if found else b""


def _problem(answer: Answer) -> dict[str, Any]:
    try:
        found = json.loads(answer.body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


#: name on the command line -> what speaks it
PROTOCOLS: dict[str, Callable[[Plan], Speaker]] = {"native": Native}
