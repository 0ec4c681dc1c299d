"""An engine's server as a process of another environment, from start to end: for the engines' demos and the benchmark.

Owns the process: it leads a group of its own, writes into a log file, is waited for until it is healthy, and its whole group is
ended, however the block ends. How it is started is its engine's file's, what it is asked is `asking.py`'s. Servers of ours are
`encoder_process.py`'s.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tectum.errors import UnavailableError

#: seconds that an engine may take to start: most of it goes into its imports
PATIENCE = 400.0
#: seconds that an engine may take to end its own processes after SIGTERM
GRACE = 30.0
#: seconds of one health probe: SGLang's encoder encodes something for its first
_PROBE = 60.0
_LAST_LINES = 20


class NotStartedError(RuntimeError):
    """how: what it did instead, in words. tail: the last lines of its output."""

    def __init__(self, name: str, how: str, tail: str) -> None:
        super().__init__(f"{name} did not start ({how}): {tail}")
        self.how = how
        self.tail = tail


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def serving(
    name: str,
    command: Sequence[str],
    port: int,
    environment: Mapping[str, str],
    log: Path,
    *,
    patience: float = PATIENCE,
    grace: float = GRACE,
) -> Iterator[str]:
    """`command` as a server on a loopback port: its URL, once `/health` answers. The block's end is the process group's.

    name: for the error. log: the file that gets its output. patience: seconds to get healthy. grace: seconds from SIGTERM to
    SIGKILL. Raises NotStartedError when the process ends, or is not healthy in time.
    """
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    ended = os.pidfd_open(process.pid)
    try:
        healthy = _gets_healthy(url, ended, patience)
        lives = not _is_over(ended, 0)
        if healthy:
            yield url
    finally:
        _end(process, ended, grace)
    if not healthy:
        how = "did not get healthy in time" if lives else f"ended with code {process.returncode}"
        raise NotStartedError(name, how, _tail(log))


@contextmanager
def demo_engine(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
    """`serving` for a demo: its URL. Raises UnavailableError `server_unreachable` where `serving` raises NotStartedError; the
    server's last lines are printed then."""
    with tempfile.TemporaryDirectory(prefix="tectum-demo-") as folder:
        try:
            with serving("The engine's server", command, port, environment, Path(folder) / "log") as url:
                yield url
        except NotStartedError as error:
            sys.stderr.write(error.tail)
            text = f"The engine's server {error.how}; its last lines are above"
            raise UnavailableError("server_unreachable", text) from None


def _gets_healthy(url: str, ended: int, patience: float) -> bool:
    """Probe until it is healthy (True), or is over or out of time (False)."""
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        try:
            if httpx2.get(f"{url}/health", timeout=min(_PROBE, left)).is_success:
                return True
        except httpx2.TransportError:
            pass  # nobody listens yet
        if _is_over(ended, min(0.5, left)):
            return False
    return False


def _is_over(ended: int, seconds: float) -> bool:
    """Whether the process of this pidfd ends within so many seconds. It is not reaped."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _end(process: subprocess.Popen[bytes], ended: int, grace: float) -> None:
    """SIGTERM to the server, on which engines end their own processes; then SIGKILL to all that is left of its group.

    It is reaped last: until then its number, and with it the group's, can be nobody else's.
    """
    try:
        signal.pidfd_send_signal(ended, signal.SIGTERM)
        _is_over(ended, grace)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(GRACE)
    finally:
        os.close(ended)


def _tail(log: Path) -> str:
    return "".join(log.read_text(errors="replace").splitlines(keepends=True)[-_LAST_LINES:])
