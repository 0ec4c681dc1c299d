"""Processes of SGLang's environment, which `make compat-sglang` sets up: its receiver as a peer, and its own encoder. And the
encoders of ours that deliver to it, by their backend."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy
import pytest
import torch

from tectum.demo.encoder_process import EncoderProcess
from tectum.demo.engines.sglang import environment
from tests.sglang.conftest import colocated, encoder_a, encoder_b, encoder_grpc

__all__ = ["colocated", "encoder_a", "encoder_b", "encoder_grpc"]  # fixtures

HERE = Path(__file__).parent
PYTHON = os.environ.get("SGLANG_PYTHON")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(400))
            if PYTHON is None:
                item.add_marker(pytest.mark.skip(reason="needs SGLang's environment: make compat-sglang"))


def sglang(*command: str, **popen: Any) -> subprocess.Popen[str]:
    own = environment(SGLANG_ENCODER_MAX_BATCH_SIZE="1")
    return subprocess.Popen([PYTHON or "", "-W", "ignore", *command], text=True, env=own, **popen)


class Peer:
    """SGLang's receiver, connected to `urls`. A context manager."""

    def __init__(self, model: Path, backend: str, mode: str, urls: tuple[str, ...], log: Path) -> None:
        with log.open("w") as stderr:
            self._process = sglang(
                str(HERE / "peer.py"),
                str(model),
                backend,
                mode,
                *urls,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._line(180)

    def receive(self, requests: dict[str, list[str]]) -> dict[str, Any]:
        """Run all requests about pictures at once: id -> rows `[tokens, width]` as its scheduler gets them, or (error, code)."""
        found = self._ask([{"rid": rid, "pictures": pictures} for rid, pictures in requests.items()])
        return {
            rid: (result["error"], result["code"]) if "error" in result else result["rows"]
            for rid, result in found.items()
        }

    def receive_one(self, **media: list[str]) -> dict[str, Any]:
        """One request about `pictures`, `clips`, `recordings`: its `rows`, and the prompt's `input_ids` and `times`."""
        rid = uuid.uuid4().hex
        result: dict[str, Any] = self._ask([{"rid": rid, **media}])[rid]
        assert "error" not in result, (result, self._log.read_text()[-2000:])
        return result

    def _ask(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._process.stdin is not None
        asked = [{"pictures": [], "clips": [], "recordings": [], **request} for request in requests]
        self._process.stdin.write(json.dumps({"requests": asked}) + "\n")
        self._process.stdin.flush()
        results: dict[str, Any] = self._line(120)["results"]
        for result in results.values():
            if "rows" in result:
                path = Path(result["rows"])
                result["rows"] = torch.from_numpy(numpy.load(path))
                path.unlink()
                assert len(result["rows"]) == result["placeholders"]
        return results

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _line(self, seconds: float) -> Any:
        line = self._lines.get(timeout=seconds)
        assert line, f"the peer ended: {self._log.read_text()[-2000:]}"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def peers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Peer]]:
    """Makes (and keeps) a peer for a backend, a mode, and encoders."""
    made: dict[Any, Peer] = {}
    logs = tmp_path_factory.mktemp("peers")

    def peer(backend: str, *urls: str, mode: str = "http", model: Path = tiny) -> Peer:
        key = (backend, mode, model, urls)
        if key not in made:
            made[key] = Peer(model, backend, mode, urls, logs / f"{len(made)}.log")
        return made[key]

    yield peer
    for one in made.values():
        one.close()


@pytest.fixture(scope="session")
def mooncakes(tiny: Path) -> Iterator[list[EncoderProcess]]:
    """Two encoders that deliver by Mooncake. Its messages carry no dtype: both sides are told the same one."""
    flags = ("--forward-threads", "1", "--log-level", "warning", "--transfer-backend", "mooncake", "--dtype", "float32")
    with EncoderProcess(tiny, *flags) as one, EncoderProcess(tiny, *flags) as other:
        yield [one, other]


@pytest.fixture
def encoders(request: pytest.FixtureRequest, backend: str, number_of_encoders: int) -> list[EncoderProcess]:
    """Encoders of the tiny checkpoint that deliver by `backend`."""
    if backend == "mooncake":
        return list(request.getfixturevalue("mooncakes")[:number_of_encoders])
    return [request.getfixturevalue(name) for name in ("encoder_a", "encoder_b")[:number_of_encoders]]


@pytest.fixture(scope="module")
def own_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Starts SGLang's own encoder for a model and returns its URL."""
    running: list[subprocess.Popen[str]] = []

    def start(model: Path) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path_factory.mktemp("own") / "log"
        command = "-m sglang.launch_server --encoder-only --encoder-transfer-backend zmq_to_scheduler --device cpu "
        command += "--dtype float32 "  # left to itself it would take float16
        command += f"--mm-attention-backend sdpa --host 127.0.0.1 --port {port} --model-path {model}"
        with log.open("w") as output:
            running.append(sglang(*command.split(), stdout=output, stderr=output))
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and running[-1].poll() is None:
            try:
                if httpx2.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200:
                    return f"http://127.0.0.1:{port}"
            except httpx2.TransportError:
                time.sleep(0.5)
        raise AssertionError(f"SGLang's encoder did not start: {log.read_text()[-2000:]}")

    yield start
    for process in running:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
