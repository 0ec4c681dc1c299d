"""A server under measurement: the process that serves and its encoder processes, with their CPU seconds and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tectum.demo.encoder_process import EncoderProcess

_TICKS = os.sysconf("SC_CLK_TCK")


class Cpu(NamedTuple):
    """CPU seconds so far (user and system): of the process that serves, and of all its encoder processes."""

    service: float
    encoders: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(self.service - before.service, self.encoders - before.encoders)


class Server:
    """`tectum serve MODEL` with one torch thread an encoder process. A context manager."""

    def __init__(self, model: str | Path, workers: int, *flags: str) -> None:
        common = ("--workers", str(workers), "--forward-threads", "1", "--log-level", "warning", "--allow-private-urls")
        self._process = EncoderProcess(Path(model), *common, *flags)

    def __enter__(self) -> Server:
        self._process.__enter__()
        self.url = self._process.url
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.stop()

    def cpu(self) -> Cpu:
        pid = self._process.pid
        return Cpu(_cpu_seconds(pid), sum(_cpu_seconds(child) for child in _children(pid)))

    def memory(self) -> int:
        """Bytes of resident memory of all processes, staging included (once for each that maps it)."""
        return sum(_resident(pid) for pid in (self._process.pid, *_children(self._process.pid)))

    @contextmanager
    def watched(self, interval: float = 0.5) -> Iterator[list[int]]:
        """The list of `memory()` at the start of the block, every `interval` seconds of it, and at its end."""
        seen = [self.memory()]
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(interval):
                seen.append(self.memory())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join()
            seen.append(self.memory())


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (its third)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(_stat(int(entry.name))[1]) == pid:
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return found


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
