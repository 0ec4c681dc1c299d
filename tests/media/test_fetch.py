"""Fetching from a real server on loopback: statuses, limits, deadlines, redirects, and what is never sent."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tectum.errors import BadRequestError
from tectum.media import fetch as fetch_module
from tectum.media.fetch import Fetcher
from tectum.media.policy import MediaPolicy, check_address

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Site:
    """An HTTP server whose answers are written out byte by byte. `heads` are the requests as they came in."""

    answers: dict[str, bytes | Answer]
    heads: list[str] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]

    def header(self, name: str, request: int = 0) -> str | None:
        for line in self.heads[request].split("\r\n")[1:]:
            key, _, value = line.partition(": ")
            if key.lower() == name:
                return value
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            answer = self.answers[head.split(" ")[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def site(answers: dict[str, bytes | Answer]) -> AsyncIterator[Site]:
    made = Site(answers)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


def response(status: int = 200, body: bytes = b"", *headers: str, length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status} Reason", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def redirect(location: str, status: int = 302, *headers: str) -> bytes:
    return response(status, b"moved", f"Location: {location}", *headers)


def policy(**changed) -> MediaPolicy:
    return MediaPolicy(**{"allow_private_urls": True, "fetch_timeout": 20.0, **changed})


async def refusal(fetcher: Fetcher, url: str, code: str, status: int) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        await fetcher.fetch(url)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert len(caught.value.message) <= 200
    return caught.value


def run(answers: dict[str, bytes | Answer], check: Callable[[Site, Fetcher], Awaitable[None]], **changed) -> Site:
    """`check` against a server with these answers; nothing may take longer than a minute."""

    async def main() -> Site:
        async with asyncio.timeout(60), site(answers) as made, Fetcher(policy(**changed)) as fetcher:
            await check(made, fetcher)
            return made

    return asyncio.run(main())


# ------------------------------------------------------------------------------------------------------- bodies, statuses


def test_a_body_is_fetched_and_the_request_is_plain():
    async def check(made: Site, fetcher: Fetcher) -> None:
        assert await fetcher.fetch(made.url("/a.png?x=1#part")) == b"picture"
        assert made.header("host") == f"127.0.0.1:{made.port}"

    made = run({"/a.png?x=1": response(200, b"picture")}, check)
    assert made.heads[0].startswith("GET /a.png?x=1 HTTP/1.1\r\n")
    assert made.header("accept-encoding") == "identity"
    assert made.header("cookie") is made.header("authorization") is None


def test_a_body_without_a_length_is_read_to_its_end():
    async def check(made: Site, fetcher: Fetcher) -> None:
        assert await fetcher.fetch(made.url("/close")) == b"picture"
        assert await fetcher.fetch(made.url("/chunked")) == b"picture"

    chunked = response(200, b"4\r\npict\r\n3\r\nure\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=False)
    run({"/close": response(200, b"picture", length=False), "/chunked": chunked}, check)


def test_a_declared_encoding_is_not_decoded():
    async def check(made: Site, fetcher: Fetcher) -> None:
        assert await fetcher.fetch(made.url("/")) == b"not gzip"

    run({"/": response(200, b"not gzip", "Content-Encoding: gzip")}, check)


@pytest.mark.parametrize("status", [201, 204, 206, 304, 400, 401, 403, 404, 410, 429, 500, 503])
def test_any_status_but_200_is_a_failed_dependency_never_an_empty_picture(status):
    async def check(made: Site, fetcher: Fetcher) -> None:
        error = await refusal(fetcher, made.url("/"), "media_fetch_failed", 424)
        assert str(status) in error.message
        assert error.details["remote_status"] == status
        assert error.to_problem()["status"] == 424
        assert "SECRET" not in str(error.to_problem())

    body = b"" if status in (204, 304) else b"SECRET page"
    run({"/": response(status, body)}, check)


def test_a_redirect_without_a_location_is_a_failure():
    async def check(made: Site, fetcher: Fetcher) -> None:
        error = await refusal(fetcher, made.url("/"), "media_fetch_failed", 424)
        assert error.details["remote_status"] == 302

    run({"/": response(302)}, check)


@pytest.mark.parametrize(
    "answer",
    [
        b"",  # hangs up
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npict\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    ],
)
def test_a_broken_answer_is_a_failed_dependency(answer):
    async def check(made: Site, fetcher: Fetcher) -> None:
        await refusal(fetcher, made.url("/"), "media_fetch_failed", 424)

    run({"/": answer}, check)


def test_a_port_where_nobody_listens_and_a_name_that_does_not_exist(monkeypatch):
    def unknown(*_: object) -> list:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def main() -> None:
        async with site({}) as made:
            closed = made.url("/")
        async with Fetcher(policy()) as fetcher:
            await refusal(fetcher, closed, "media_fetch_failed", 424)
            monkeypatch.setattr(fetch_module, "_look_up", unknown)
            error = await refusal(fetcher, "http://no-such-name.invalid/", "media_fetch_failed", 424)
            assert "resolved" in error.message

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------------------- too large


def test_a_declared_length_over_the_limit_is_refused_before_the_body():
    async def only_a_head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n")
        await writer.drain()
        await asyncio.Event().wait()  # the body never comes: waiting for it would be a timeout

    async def check(made: Site, fetcher: Fetcher) -> None:
        error = await refusal(fetcher, made.url("/"), "media_too_large", 413)
        assert error.details["limit"] == 1000

    run({"/": only_a_head}, check, max_media_bytes=1000)


def test_an_endless_body_is_cut_at_the_limit_and_its_connection_closed():
    made_gone = []

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async def check(made: Site, fetcher: Fetcher) -> None:
        await refusal(fetcher, made.url("/"), "media_too_large", 413)
        await made.gone.wait()
        made_gone.append(True)

    run({"/": endless}, check, max_media_bytes=100_000)
    assert made_gone == [True]


def test_the_limit_is_inclusive_with_and_without_a_length():
    async def check(made: Site, fetcher: Fetcher) -> None:
        for path in ("/length", "/close"):
            assert await fetcher.fetch(made.url(path + "/10")) == b"x" * 10
            await refusal(fetcher, made.url(path + "/11"), "media_too_large", 413)

    answers: dict[str, bytes | Answer] = {}
    for size in (10, 11):
        answers[f"/length/{size}"] = response(200, b"x" * size)
        answers[f"/close/{size}"] = response(200, b"x" * size, length=False)
    run(answers, check, max_media_bytes=10)


# -------------------------------------------------------------------------------------------------------------- deadlines


async def trickle(writer: asyncio.StreamWriter) -> None:
    """A byte every 20 ms: no single read ever times out."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)  # what the server does, not how the test waits


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("answer", [trickle, silent])
def test_a_slow_server_is_given_up_at_the_deadline(answer):
    async def check(made: Site, fetcher: Fetcher) -> None:
        began = time.monotonic()
        error = await refusal(fetcher, made.url("/"), "media_fetch_timeout", 424)
        assert 0.4 <= time.monotonic() - began < 5.0
        assert "0.5 s" in error.message

    run({"/": answer}, check, fetch_timeout=0.5)


def test_the_deadline_is_one_for_all_redirects():
    hops = 200

    async def hop(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)  # a slow server; each hop alone is well within the deadline
        writer.write(redirect("/"))
        await writer.drain()

    async def check(made: Site, fetcher: Fetcher) -> None:
        await refusal(fetcher, made.url("/"), "media_fetch_timeout", 424)
        assert 1 <= len(made.heads) < hops

    run({"/": hop}, check, fetch_timeout=0.5, max_redirects=hops)


def test_a_slow_server_does_not_hold_up_another_fetch():
    async def check(made: Site, fetcher: Fetcher) -> None:
        slow = asyncio.create_task(fetcher.fetch(made.url("/slow")))
        assert await fetcher.fetch(made.url("/fast")) == b"picture"
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    run({"/slow": silent, "/fast": response(200, b"picture")}, check)


def test_cancelling_a_fetch_closes_its_connection():
    async def check(made: Site, fetcher: Fetcher) -> None:
        started = asyncio.Event()

        async def trickle_once_started(writer: asyncio.StreamWriter) -> None:
            started.set()
            await trickle(writer)

        made.answers["/"] = trickle_once_started
        task = asyncio.create_task(fetcher.fetch(made.url("/")))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.gone.wait()  # the server's next write fails

    run({}, check)


# -------------------------------------------------------------------------------------------------------------- redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_relative_and_absolute(status):
    async def check(made: Site, fetcher: Fetcher) -> None:
        made.answers["/b"] = redirect(made.url("/c"), status)
        assert await fetcher.fetch(made.url("/a/a")) == b"picture"
        assert made.paths == ["/a/a", "/b", "/c"]

    run({"/a/a": redirect("../b", status), "/c": response(200, b"picture")}, check)


def test_redirects_are_counted():
    answers: dict[str, bytes | Answer] = {f"/{n}": redirect(f"/{n - 1}") for n in range(1, 5)}
    answers["/0"] = response(200, b"picture")

    async def check(made: Site, fetcher: Fetcher) -> None:
        assert await fetcher.fetch(made.url("/3")) == b"picture"
        error = await refusal(fetcher, made.url("/4"), "media_fetch_failed", 424)
        assert "more than 3 times" in error.message
        assert made.paths == ["/3", "/2", "/1", "/0", "/4", "/3", "/2", "/1"]

    run(answers, check, max_redirects=3)


def test_no_redirects_at_all_may_be_followed():
    async def check(made: Site, fetcher: Fetcher) -> None:
        await refusal(fetcher, made.url("/a"), "media_fetch_failed", 424)
        assert made.paths == ["/a"]

    run({"/a": redirect("/b"), "/b": response(200, b"picture")}, check, max_redirects=0)


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "ftp://127.0.0.1/a",
        "http://0x7f000001/",
        "http://allowed.com\\@evil/",
        "//user@evil/",
        "http://0.0.0.0/",
        "http://224.0.0.1/",
        "http://[::]/",
    ],
)
def test_where_a_redirect_leads_is_checked_like_the_url_itself(location):
    async def check(made: Site, fetcher: Fetcher) -> None:
        await refusal(fetcher, made.url("/"), "url_refused", 400)
        assert made.paths == ["/"]

    run({"/": redirect(location)}, check)


@pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", "[::1]", "localhost"])
def test_a_redirect_from_a_public_to_a_private_address_is_refused(host, monkeypatch):
    """The first server stands in for a public one: its address alone passes, every other is checked as it is."""
    checked = []

    def pretend(address: str, policy: MediaPolicy) -> None:
        checked.append(address)
        if len(checked) > 1:
            check_address(address, policy)

    monkeypatch.setattr(fetch_module, "check_address", pretend)

    async def check(made: Site, fetcher: Fetcher) -> None:
        made.answers["/"] = redirect(made.url("/inside", host))
        await refusal(fetcher, made.url("/"), "url_refused", 400)
        assert made.paths == ["/"]

    run({"/inside": response(200, b"secret")}, check, allow_private_urls=False)
    assert checked[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "\uff11\uff12\uff17.0.0.1"])
def test_private_addresses_and_names_of_them_are_refused_without_a_connection(host):
    async def check(made: Site, fetcher: Fetcher) -> None:
        await refusal(fetcher, made.url("/", host), "url_refused", 400)
        assert made.heads == []

    run({"/": response(200, b"secret")}, check, allow_private_urls=False)


@pytest.mark.parametrize("mixed", [["93.184.216.34", "10.0.0.1"], ["10.0.0.1", "93.184.216.34"], ["8.8.8.8", "::1"]])
def test_a_name_with_public_and_private_addresses_is_refused(mixed, monkeypatch):
    async def main() -> None:
        def resolved(host: str, port: int) -> list:
            assert (host, port) == ("rebind.example", 80)
            return [(0, 0, 0, "", (address, port)) for address in mixed]

        monkeypatch.setattr(fetch_module, "_look_up", resolved)
        async with Fetcher(MediaPolicy()) as fetcher:
            await refusal(fetcher, "http://rebind.example/", "url_refused", 400)

    asyncio.run(main())


def test_a_name_is_resolved_once_and_the_checked_address_is_connected_to(monkeypatch):
    asked = []

    async def check(made: Site, fetcher: Fetcher) -> None:
        def resolved(host: str, port: int) -> list:
            asked.append(host)
            return socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)

        monkeypatch.setattr(fetch_module, "_look_up", resolved)
        assert await fetcher.fetch(made.url("/", "rebind.example")) == b"picture"
        assert made.header("host") == f"rebind.example:{made.port}"

    run({"/": response(200, b"picture")}, check)
    assert asked == ["rebind.example"]


# ---------------------------------------------------------------------------------------------------- what is never carried


def test_cookies_are_neither_kept_nor_sent():
    async def check(made: Site, fetcher: Fetcher) -> None:
        for _ in range(2):
            assert await fetcher.fetch(made.url("/a")) == b"picture"
        assert made.paths == ["/a", "/b", "/a", "/b"]
        assert [made.header("cookie", request) for request in range(4)] == [None] * 4

    cookie = "Set-Cookie: session=1; Path=/"
    run({"/a": redirect("/b", 302, cookie), "/b": response(200, b"picture", cookie)}, check)


def test_a_proxy_from_the_environment_is_not_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")

    async def check(made: Site, fetcher: Fetcher) -> None:
        assert await fetcher.fetch(made.url("/")) == b"picture"

    run({"/": response(200, b"picture")}, check)


def test_every_fetch_asks_anew():
    """One URL serves v1, then v2: the second answer is v2's."""

    async def check(made: Site, fetcher: Fetcher) -> None:
        made.answers["/"] = response(200, b"v1", "Cache-Control: max-age=3600", 'ETag: "1"')
        assert await fetcher.fetch(made.url("/")) == b"v1"
        made.answers["/"] = response(200, b"v2")
        assert await fetcher.fetch(made.url("/")) == b"v2"

    run({}, check)


def test_many_fetches_at_once_each_get_their_own_body():
    async def check(made: Site, fetcher: Fetcher) -> None:
        bodies = await asyncio.gather(*(fetcher.fetch(made.url(f"/{n}")) for n in range(50)))
        assert bodies == [f"body {n}".encode() for n in range(50)]

    run({f"/{n}": response(200, f"body {n}".encode()) for n in range(50)}, check)
