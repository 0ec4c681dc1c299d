"""What the cases are run against: live `tectum serve` processes around a tiny checkpoint, and a web site for them to fetch from."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from PIL import Image

from tectum.delivery import wire
from tectum.demo.encoder_process import EncoderProcess
from tectum.models.tiny import build_tiny_qwen2_5_vl
from tests import zoo

TOKEN = "open-sesame"
#: the strict server's limits, small so that a case reaches them at once
STRICT = {
    "--host": "::1",
    "--max-connections": "24",
    "--max-head-bytes": "8192",
    "--head-timeout": "1",
    "--max-body-bytes": str(4 << 20),
    "--max-bodies-bytes": str(8 << 20),
    "--body-grace": "1",
    "--min-body-rate": str(4 << 20),
    "--send-timeout": "1",
    "--log-level": "debug",
}
#: flags of all servers here
LIGHT = ("--forward-threads", "1", "--unknown-id-wait", "0")
#: live requests that `Servers.sending` takes
LIVE = 32
ERROR_BYTES = 1024


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


GOOD = saved(zoo.picture(64, 64))


@dataclass
class Door:
    """One server as a caller sees it. `said(answer)` is how cases word what they got."""

    url: str
    process: EncoderProcess
    token: str | None = None
    http: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        self.http = httpx2.Client(base_url=self.url, timeout=60, headers=headers, trust_env=False)

    @property
    def address(self) -> tuple[str, int]:
        split = urlsplit(self.url)
        return split.hostname or "", split.port or 0

    def encode(self, *items: bytes | str, **body: Any) -> httpx2.Response:
        """POST /v1/encode with `described` items."""
        return self.post(json.dumps(described(*items, **body)))

    def post(self, content: Any, **headers: str) -> httpx2.Response:
        return self.http.post(
            "/v1/encode", content=content, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def rows(self, *items: bytes, **body: Any) -> Any:
        answer = self.encode(*items, **body)
        assert answer.status_code == 200, answer.text[:200]
        return wire.unpack(answer.content)

    def raw(self, *sent: bytes, seconds: float = 10.0) -> bytes:
        """What comes back for these very bytes, until the server closes or `seconds` are over."""
        with socket.create_connection(self.address, seconds) as connection:
            with contextlib.suppress(ConnectionError):
                for piece in sent:
                    connection.sendall(piece)
            return read_all(connection, seconds)

    def gauges(self) -> dict[str, float]:
        text = self.http.get("/metrics").text
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[:1] != "#"}

    def refusals(self, code: str) -> float:
        return self.gauges().get(f'encoder_refusals_total{{code="{code}"}}', 0.0)

    def resident(self) -> int:
        """Bytes of memory that the service and its encoder processes hold."""
        lines = [line for pid in self.pids() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def pids(self) -> list[int]:
        """The service's process and its children."""
        pid = self.process.pid
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [pid, *(int(child) for task in tasks for child in (task / "children").read_text().split())]


def described(*items: bytes | str, kind: str = "image", **body: Any) -> dict[str, Any]:
    """The body of a request: bytes travel as base64, text as a URL."""
    where = [{"url": item} if isinstance(item, str) else {"data": base64.b64encode(item).decode()} for item in items]
    return {"items": [{"type": kind, **each} for each in where], **body}


def read_all(connection: socket.socket, seconds: float) -> bytes:
    deadline = time.monotonic() + seconds
    got = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(65536)
            if not piece:
                break
            got += piece
    return got


def said(answer: httpx2.Response) -> str:
    """`200`, or `<status> <code> [item <n>]`; what breaks the rules of errors is said, too."""
    if answer.status_code == 200:
        return "200"
    problem = answer.json()
    item = f" item {problem['item']}" if "item" in problem else ""
    return f"{answer.status_code} {problem['code']}{item}{unruly(answer.content)}"


def unruly(body: bytes) -> str:
    """What is wrong with an error's body by the rules that all errors keep; empty when nothing is."""
    text = body.decode("utf-8", "replace")
    detail = json.loads(text).get("detail", "")
    wrong = []
    if len(body) > ERROR_BYTES or len(detail) > 200:
        wrong.append("too long")
    if any(
        word in text for word in ("Traceback", "/site-packages", "/tmp/", "/root", "/home/", "base64,", "Signature=")
    ):
        wrong.append("says too much")
    if "0x7f" in text.lower():
        wrong.append("holds an address")
    return f" ({', '.join(wrong)})" if wrong else ""


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll a condition of another process; there is nothing else to wait on."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Site:
    """A web site on loopback, in a thread of its own: `answers` by path are bytes, or coroutines that write them."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]] = {}
        self.asked: list[str] = []
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Site:
        started = threading.Event()

        async def main() -> None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()

        def run() -> None:
            self._loop.run_until_complete(main())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        started.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode("latin-1")
            self.asked.append(path)
            answer = self.answers.get(path.partition("?")[0], page(404))
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        writer.close()


def page(status: int = 200, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def has_mooncake() -> bool:
    """Whether its wheel is installed, and loads: it needs libraries of the system."""
    try:
        import mooncake.engine  # noqa: F401
    except ImportError:
        return False
    return True


class Servers:
    """plain: as it comes. fetching: may fetch from `site` and read files under `files`. strict: a token, small limits, ::1.

    Those below are started by the first case that asks for them.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.files = folder / "media"
        self.files.mkdir()
        self.tiny = build_tiny_qwen2_5_vl(folder / "tiny")
        self._stack = stack
        (folder / "token").write_text(f"{TOKEN}\n")
        strict = [word for flag in STRICT.items() for word in flag]
        self.plain = self._door("--log-level", "info")
        self.fetching = self._door(
            "--allow-private-urls", "--fetch-timeout", "1", "--allowed-media-dir", str(self.files)
        )
        self.strict = self._door(*strict, "--token-file", str(folder / "token"), token=TOKEN)
        self.site = stack.enter_context(Site())

    @cached_property
    def sending(self) -> Door:
        """Every door that needs no further library: SGLang's over HTTP and gRPC, and the Unix socket; 32 live requests."""
        doors = ("--transfer-backend", "zmq_to_scheduler", "--grpc-port", "0", "--local-socket", str(self.socket))
        return self._door(*doors, "--send-timeout", "2", "--max-live-requests", str(LIVE))

    @cached_property
    def mooncake(self) -> Door:
        return self._door("--transfer-backend", "mooncake", "--send-timeout", "5")

    @cached_property
    def hearing(self) -> Door:
        """A model of sound; recordings of at most a minute."""
        return self._door("--max-audio-seconds", "60", model=zoo.build("qwen2_audio", self.folder / "hearing"))

    @property
    def socket(self) -> Path:
        return self.folder / "local.sock"

    def _door(self, *flags: str, model: Path | None = None, token: str | None = None) -> Door:
        return self._stack.enter_context(self.one(*flags, model=model, token=token))

    @contextlib.contextmanager
    def one(self, *flags: str, model: Path | None = None, token: str | None = None) -> Iterator[Door]:
        """A server of `model` (the tiny one without it) inside the block."""
        with EncoderProcess(model or self.tiny, *LIGHT, *flags) as process:
            made = Door(process.url, process, token)
            try:
                yield made
            finally:
                made.http.close()


@contextlib.contextmanager
def running() -> Iterator[Servers]:
    """All of them, on a checkpoint made for them; ended on leaving."""
    with contextlib.ExitStack() as stack:
        yield Servers(Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
