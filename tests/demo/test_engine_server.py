"""An engine's server as a process: a small HTTP server of the standard library that behaves well, or does not."""

from __future__ import annotations

import os
import select
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx2
import pytest

from tectum.demo.engines.server import NotStartedError, demo_engine, free_port, serving
from tectum.errors import UnavailableError

#: answers `/health` with the status of argument 2, and everything with its environment's GREETING
SERVER = """
import http.server, os, signal, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]) if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(os.environ["GREETING"].encode())

{first}
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PRINTS = "print(os.getpid(), flush=True)"
DIES = "print('a first line'); print(*range(40), sep='\\n'); sys.stdout.flush(); sys.exit('no such model')"
#: a child of its own that outlives any SIGTERM
CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
BEARS = f"""
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
"""
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def command(port: int, first: str = "", status: int = 200) -> list[str]:
    return [sys.executable, "-c", SERVER.format(first=first), str(port), str(status)]


def started(log: Path, first: str = "", status: int = 200, **limits: float) -> AbstractContextManager[str]:
    port = free_port()
    return serving("A server", command(port, first, status), port, {"GREETING": "good day"}, log, **limits)


def first_line(log: Path) -> list[int]:
    """The process ids that the server printed."""
    return [int(word) for word in log.read_text().splitlines()[0].split()]


def assert_reaped(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_healthy_server_is_there_inside_the_block_and_gone_after_it(tmp_path):
    with started(tmp_path / "log", PRINTS) as url:
        assert httpx2.get(f"{url}/x").text == "good day"
        (server,) = first_line(tmp_path / "log")
        assert os.getpgid(server) == server != os.getpgrp()
    assert_reaped(server)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_it_is_gone_after_a_block_that_fails(tmp_path):
    with pytest.raises(KeyError, match="in the block"), started(tmp_path / "log", PRINTS):
        raise KeyError("in the block")
    assert_reaped(*first_line(tmp_path / "log"))


def test_one_that_ends_at_its_start_says_why(tmp_path):
    with pytest.raises(NotStartedError) as caught, started(tmp_path / "log", DIES):
        pytest.fail("it was never there")
    assert caught.value.how == "ended with code 1"
    assert caught.value.tail.splitlines() == [*map(str, range(21, 40)), "no such model"], "its last 20 lines"
    assert str(caught.value) == f"A server did not start (ended with code 1): {caught.value.tail}"


def test_one_that_never_gets_healthy_is_ended(tmp_path):
    with (
        pytest.raises(NotStartedError) as caught,
        started(tmp_path / "log", PRINTS, 503, patience=5),
    ):
        pytest.fail("it was never healthy")
    assert caught.value.how == "did not get healthy in time"
    pid, *asked = caught.value.tail.splitlines()
    assert '"GET /health HTTP/1.1" 503' in asked[0]
    assert_reaped(int(pid))


@pytest.mark.parametrize(
    "first", [IGNORES + BEARS, BEARS], ids=["one that ignores SIGTERM", "one that forgets its child"]
)
def test_the_whole_group_is_ended(tmp_path, first):
    with ExitStack() as after:
        with started(tmp_path / "log", first, grace=0.3):
            server, child = first_line(tmp_path / "log")
            ended = os.pidfd_open(child)  # this very child, whoever gets its number
            after.callback(os.close, ended)
            assert os.getpgid(child) == server
        assert_reaped(server)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        assert poll.poll(20_000), "the child lives on"


def test_a_demo_prints_the_last_lines_above_its_error(capsys):
    port = free_port()
    with pytest.raises(UnavailableError) as caught, demo_engine(command(port, DIES), port, {}):
        pytest.fail("it was never there")
    assert caught.value.code == "server_unreachable"
    assert caught.value.message == "The engine's server ended with code 1; its last lines are above"
    assert capsys.readouterr().err.endswith("38\n39\nno such model\n")
