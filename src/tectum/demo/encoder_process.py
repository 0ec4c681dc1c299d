"""A server of ours as a process of its own, from start to end: for the demo, the benchmark and the tests."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from tectum.errors import UnavailableError

#: in a line for people, or in a JSON one
_READY = re.compile(r"\bready on (?P<url>https?://[^\s\"]+)")


class ServerProcess:
    """`tectum COMMAND…` as a server. A context manager: the process is always ended.

    command: the words after `tectum`. `url` and `pid` are there inside the block; `lines` holds what it printed.
    Raises UnavailableError `server_unreachable` when it ends, or stays silent for `patience` seconds.
    """

    def __init__(self, *command: str, patience: float = 120.0) -> None:
        self._command = [sys.executable, "-m", "tectum", *command]
        self._patience = patience
        self.lines: list[str] = []
        self.url = ""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "NO_COLOR": "1"}
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=environment)
        self.pid = self._process.pid
        self._printed: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, patience: float = 15.0) -> int:
        """SIGTERM, and SIGKILL when it does not end by then; returns its exit code."""
        self._process.terminate()
        try:
            code = self._process.wait(patience)
            self._reader.join(2.0)  # what it said last is in `lines`, unless a child that lives on holds the pipe
            return code
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def wait(self, seconds: float) -> int:
        """Its exit code, once it has ended by itself. Raises subprocess.TimeoutExpired when it does not."""
        return self._process.wait(seconds)

    def _read(self) -> None:
        assert self._process.stderr is not None, "its error output is a pipe"
        for line in self._process.stderr:
            self.lines.append(line.rstrip())
            self._printed.put(line)
        self._printed.put(None)

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                line = self._printed.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise UnavailableError("server_unreachable", "The server did not get ready in time") from None
            if line is None:
                last = self.lines[-1] if self.lines else "it printed nothing"
                raise UnavailableError("server_unreachable", f"The server ended while starting: {last}")
            if ready := _READY.search(line):
                return ready["url"]


class EncoderProcess(ServerProcess):
    """`tectum serve FOLDER` on a free loopback port. flags: further command-line flags."""

    def __init__(self, folder: Path, *flags: str, patience: float = 120.0) -> None:
        super().__init__("serve", str(folder), "--port", "0", *flags, patience=patience)
