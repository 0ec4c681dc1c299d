"""What an encode looks like on the wire, for each protocol that a load can speak.

A protocol takes the links that it needs; one exchange may take several calls. A new one is a class and a line in `PROTOCOLS`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from tectum.bench.link import Answer, Links
from tectum.bench.pictures import Draw
from tectum.bench.plan import Plan, Size
from tectum.errors import StartupError

BOUNDARY = b"tectum-bench-boundary"


class Outcome:
    """How an exchange ended: `ok`, or a code; the problem's fields and the seconds of each stage where they are known."""

    __slots__ = ("code", "problem", "timing")

    def __init__(self, code: str, timing: bytes = b"", problem: dict[str, Any] | None = None) -> None:
        self.code = code
        self.timing = timing
        self.problem = problem


#: a call that does no work, with its number
Probe = Callable[[Links, int], Awaitable[None]]


class Speaker(Protocol):
    """Speaks one protocol to one server. Made on the event loop that it is used on."""

    #: what a probe asks for, in turn: the cheapest sign of life there is, and a control call where the protocol has one
    probes: Mapping[str, Probe]

    async def encode(self, links: Links, draw: Draw) -> Outcome:
        """Have one picture encoded, and its rows brought here. Raises ConnectionError."""

    def close(self) -> None:
        """Let go of what is held beside links."""


class _Http:
    """One call at a time on links to the server of a plan."""

    def __init__(self, plan: Plan) -> None:
        token = "" if plan.token is None else f"Authorization: Bearer {plan.token}\r\n"
        self._common = f"Host: {urlsplit(plan.url).netloc}\r\n{token}".encode()

    async def ask(self, links: Links, method: bytes, path: bytes) -> None:
        """Raises ConnectionError for any answer but a 200."""
        answer = await self._call(links, b"%b %b HTTP/1.1\r\n%b\r\n" % (method, path, self._common))
        if answer.status != 200:
            raise ConnectionError(f"{path.decode()} answered {answer.status}")

    async def post(self, links: Links, path: bytes, kind: bytes, body: bytes) -> Answer:
        head = b"POST %b HTTP/1.1\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        return await self._call(links, head % (path, self._common, kind, len(body)) + body)

    async def _call(self, links: Links, request: bytes) -> Answer:
        link = await links.take()
        try:
            return await link.call(request)
        finally:
            links.give_back(link)


class Native:
    """`POST /v1/encode` with rows inline: multipart for bytes, JSON for URLs."""

    def __init__(self, plan: Plan) -> None:
        self._http = _Http(plan)
        self._shapes: dict[Size, bytes] = {}
        self.probes: Mapping[str, Probe] = {"live": self._live, "release": self._release}

    async def encode(self, links: Links, draw: Draw) -> Outcome:
        answer = await self._http.post(links, b"/v1/encode", *_native_body(draw))
        if answer.status != 200:
            problem = _problem(answer)
            return Outcome(str(problem.get("code", answer.status)), problem=problem)
        shape = _shape(answer.body)
        if not shape or self._shapes.setdefault(draw.size, shape) != shape:
            return Outcome("wrong_rows")  # pictures of one size have rows of one shape
        return Outcome("ok", answer.header(b"server-timing"))

    async def _live(self, links: Links, number: int) -> None:
        await self._http.ask(links, b"GET", b"/health/live")

    async def _release(self, links: Links, number: int) -> None:
        """Of an id that nobody uses."""
        await self._http.ask(links, b"DELETE", b"/v1/requests/bench-%d" % number)

    def close(self) -> None: ...


def _native_body(draw: Draw) -> tuple[bytes, bytes]:
    """Content-Type, and the body."""
    if draw.picture is None:
        return b"application/json", json.dumps({"items": [{"type": "image", "url": draw.url}]}).encode()
    body = (
        b'--%(b)s\r\nContent-Disposition: form-data; name="request"\r\n\r\n'
        b'{"items":[{"type":"image","file":"f0"}]}\r\n--%(b)s\r\n'
        b'Content-Disposition: form-data; name="f0"; filename="f0"\r\n'
        b"Content-Type: image/jpeg\r\n\r\n%(p)s\r\n--%(b)s--\r\n"
    ) % {b"b": BOUNDARY, b"p": draw.picture}
    return b"multipart/form-data; boundary=" + BOUNDARY, body


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


# --- SGLang's -------------------------------------------------------------------------------------------------------

#: an id of ours, wherever in a message it stands
_RID = re.compile(rb"tectum-bench-[0-9a-f]{32}_local_part_0")


class SGLang:
    """What SGLang's language server does with `--encoder-transfer-backend zmq_to_scheduler`, to whatever encoder it is.

    It posts `/encode` and, beside it, a registration of where the rows shall go, and goes on when they have come over ZeroMQ.
    It waits for an answer only where that says why there are none.
    """

    def __init__(self, plan: Plan) -> None:
        """Raises StartupError `missing_dependency` without pyzmq."""
        self._http = _Http(plan)
        self._receiver = _RowsReceiver(plan.url)
        self._sizes: dict[Size, int] = {}
        self._late: set[asyncio.Task[Answer]] = set()  # answers to requests whose rows have come
        self.probes: Mapping[str, Probe] = {"live": self._live}

    async def encode(self, links: Links, draw: Draw) -> Outcome:
        rid = f"tectum-bench-{uuid.uuid4().hex}_local_part_0"
        with self._receiver.expecting(rid) as rows:
            encode, register = (
                asyncio.create_task(self._http.post(links, path, b"application/json", json.dumps(body).encode()))
                for path, body in zip((b"/encode", b"/scheduler_receive_url"), self._bodies(rid, draw), strict=True)
            )
            try:
                refused = await _first_refusal(rows, encode, register)
                if refused is None and rows.result() is None:  # the rows will not come: the answer says why
                    refused = await encode
            except BaseException:
                encode.cancel()
                register.cancel()
                raise
        for task in (encode, register):
            self._late.add(task)
            task.add_done_callback(self._forget)
        if refused is not None:
            problem = _problem(refused)
            status = "failed" if refused.status == 200 else refused.status
            return Outcome(str(problem.get("code", status)), problem=problem)
        nbytes = rows.result()
        right = nbytes is not None and self._sizes.setdefault(draw.size, nbytes) == nbytes
        return Outcome("ok" if right else "wrong_rows")  # pictures of one size have rows of one size

    def _bodies(self, rid: str, draw: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
        picture = draw.url if draw.picture is None else _data_uri(draw.picture)
        part = {"num_parts": 1, "part_idx": 0, "prefill_host": self._receiver.host, "embedding_port": None}
        place = {"receive_count": 1, "receive_url": self._receiver.address}
        common = {"req_id": rid, "modality": "IMAGE"}
        return {**common, **part, "mm_items": [picture]}, {**common, **place}

    async def _live(self, links: Links, number: int) -> None:
        await self._http.ask(links, b"GET", b"/health")

    def _forget(self, task: asyncio.Task[Answer]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()

    def close(self) -> None:
        for task in self._late:
            task.cancel()
        self._receiver.close()


@lru_cache(maxsize=256)
def _data_uri(picture: bytes) -> str:
    """Kept for pictures that are sent again."""
    return "data:image/jpeg;base64," + base64.b64encode(picture).decode()


async def _first_refusal(
    rows: asyncio.Future[int | None], encode: asyncio.Task[Answer], register: asyncio.Task[Answer]
) -> Answer | None:
    """Wait until something has come for the rows, or an answer that is no 200, which is returned. Raises ConnectionError."""
    waiting: set[asyncio.Future[Any]] = {rows, encode, register}
    while not rows.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for answer in done - {rows}:
            if answer.result().status != 200:
                return encode.result() if encode.done() else answer.result()
    return None


class _RowsReceiver:
    """A PULL socket for all requests: whose rows came is read off the id in their metadata."""

    def __init__(self, url: str) -> None:
        """url: of the server that will connect here."""
        try:
            import zmq.asyncio
        except ModuleNotFoundError:
            raise StartupError(
                "missing_dependency", 'pyzmq is not installed; run: pip install "tectum[sglang]"'
            ) from None
        self.host = _own_address(urlsplit(url).hostname or "")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.ipv6 = True
        self.address = f"{self.host}:{self._socket.bind_to_random_port(f'tcp://{self.host}')}"
        self._expected: dict[bytes, asyncio.Future[int | None]] = {}
        self._receiving = asyncio.create_task(self._receive())

    @contextlib.contextmanager
    def expecting(self, rid: str) -> Iterator[asyncio.Future[int | None]]:
        """Done with the bytes of the rows, or None where a failure came in their place."""
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._expected[rid.encode()] = future
        try:
            yield future
        finally:
            del self._expected[rid.encode()]

    async def _receive(self) -> None:
        while True:
            head, *body = await self._socket.recv_multipart(copy=False)
            found = _RID.search(head.bytes)
            future = None if found is None else self._expected.get(found[0])
            if future is not None and not future.done():
                future.set_result(len(body[0]) if body else None)

    def close(self) -> None:
        self._receiving.cancel()
        self._socket.close(linger=0)
        self._context.term()


def _own_address(host: str) -> str:
    """The address of this machine that `host` can reach it by, as it stands in a URL."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:  # connecting sends nothing: the kernel picks the way
        route.connect(address)
        own: str = route.getsockname()[0]
    return f"[{own}]" if ":" in own else own


#: name on the command line -> what speaks it
PROTOCOLS: dict[str, Callable[[Plan], Speaker]] = {"native": Native, "sglang": SGLang}
