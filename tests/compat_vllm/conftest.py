"""A stock vLLM, an encoder and a gateway as processes. Only `make compat-vllm` runs these: they need vLLM's environment."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import transformers
from PIL.Image import Image

from tectum.demo.encoder_process import EncoderProcess
from tectum.media.policy import MediaPolicy
from tectum.media.video import decode_video
from tests.compat_vllm import models
from tests.compat_vllm.faults import FaultyEncoder

HERE = Path(__file__).parent
PYTHON = os.environ.get("COMPAT_VLLM_PYTHON")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]
TOKENS = 24
#: what each family's engine is started with, beyond the common flags: (tensor parallelism, local_encode)
VARIANTS = {"qwen2_vl": (1, True), "qwen2_5_vl": (1, False), "qwen3_vl": (2, False)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Process:
    """A server process whose output goes to a file; it is ended with the block, and so are its children."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str], health: str, patience: float):
        self.command, self.log, self._environment, self._health = command, log, environment, health
        self._patience = patience

    def __enter__(self) -> Process:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=self._environment, start_new_session=True
            )
        until = time.monotonic() + self._patience
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                if httpx2.get(self._health, timeout=2).is_success:
                    return self
            except httpx2.TransportError:
                time.sleep(0.2)
        self.__exit__()
        raise RuntimeError(f"not ready:\n{self.text()[-3000:]}")

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


@dataclass(repr=False)
class Stack:
    """One family: the whole model in transformers, and the same in three processes, vLLM's vision weights noise.

    faulty: an encoder that answers what a test plants. local: whether vLLM may encode itself.
    """

    family: str
    local: bool
    folder: Path
    encoder: EncoderProcess
    faulty: FaultyEncoder
    vllm: Process
    engine: str
    gateway: str
    processor: Any
    model: Any

    def content(self, pictures: Sequence[Image]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for number, picture in enumerate(pictures):
            parts += [{"type": "text", "text": f"{number}:"}]
            parts += [{"type": "image_url", "image_url": {"url": data_uri(picture)}}]
        return [*parts, {"type": "text", "text": "what?"}]

    @torch.inference_mode()
    def expected(self, pictures: Sequence[Image], tokens: int = TOKENS, **options: Any) -> list[int]:
        """Greedy tokens of the model in one piece, by transformers."""
        parts = [part if part["type"] == "text" else {"type": "image"} for part in self.content(pictures)]
        text = self.processor.apply_chat_template([{"role": "user", "content": parts}])
        own = self.processor.image_processor.size
        size = {"size": {"shortest_edge": own["shortest_edge"], "longest_edge": own["longest_edge"], **options}}
        inputs = self.processor(text=[text], images=list(pictures), return_tensors="pt", images_kwargs=size)
        found = self.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return list(found[0, inputs["input_ids"].shape[1] :].tolist())

    @torch.inference_mode()
    def expected_of_clip(self, data: bytes) -> list[int]:
        """Greedy tokens of the model in one piece, about all frames of a clip."""
        clip = decode_video(data, MediaPolicy(), lambda info: range(info.frames))
        text = self.processor.apply_chat_template([{"role": "user", "content": clip_content("")}])
        metadata = transformers.video_utils.VideoMetadata(
            total_num_frames=clip.info.frames, fps=clip.info.fps, frames_indices=list(clip.indices)
        )
        inputs = self.processor(
            text=[text], videos=[clip.frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
        )
        inputs.pop("video_metadata", None)
        found = self.model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        return list(found[0, inputs["input_ids"].shape[1] :].tolist())

    def ask(self, pictures: Sequence[Image], url: str | None = None, **more: Any) -> httpx2.Response:
        return self.post(self.content(pictures), url or self.gateway, **more)

    def post(self, content: list[dict[str, Any]], url: str, *, tokens: int = TOKENS, **more: Any) -> httpx2.Response:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "return_token_ids": True,
            **more,
        }
        return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120)

    def metric(self, name: str) -> float:
        lines = httpx2.get(f"{self.encoder.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and not line.startswith("#"))

    def local_encodes(self) -> int:
        return self.vllm.text().count("vLLM encoded ")


def clip_content(url: str) -> list[dict[str, Any]]:
    """A question about a clip: as a caller sends it, or with no url as the chat template wants it."""
    part = {"type": "video_url", "video_url": {"url": url}} if url else {"type": "video"}
    return [part, {"type": "text", "text": "what?"}]


def tokens(answer: httpx2.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def data_uri(picture: Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def engine_process(blind: Path, log: Path, port: int, encoders: Sequence[str], parallel: int, local: bool) -> Process:
    assert PYTHON is not None
    extra = {"urls": list(encoders), "fetch_timeout": 10, "local_encode": local, "buffer_bytes": 8 << 20}
    transfer = {
        "ec_connector": "TectumConnector",
        "ec_connector_module_path": "tectum.engines.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": extra,
    }
    flags = ["--model", str(blind), "--served-model-name", "m", "--port", str(port), "--dtype", "float32"]
    flags += ["--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"]
    flags += ["--limit-mm-per-prompt", '{"image": 4, "video": 1}', "--tensor-parallel-size", str(parallel)]
    flags += ["--ec-transfer-config", json.dumps(transfer)]
    source = HERE.parents[1] / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags]
    return Process(command, log, environment, f"http://127.0.0.1:{port}/health", 400)


@pytest.fixture(scope="session", params=models.FAMILIES)
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    family = request.param
    parallel, local = VARIANTS[family]
    base = tmp_path_factory.mktemp(family)
    folder = models.build(family, base / "whole")
    blind = models.blinded(folder, base / "blind")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    flags = ("--forward-threads", "1", "--log-level", "warning", "--cache-bytes", str(32 << 20))
    port, gateway_port = free_port(), free_port()
    gateway_url, engine_url = f"http://127.0.0.1:{gateway_port}", f"http://127.0.0.1:{port}"
    with EncoderProcess(folder, *flags) as encoder, FaultyEncoder() as faulty:
        command = [sys.executable, "-m", "tectum", "gateway", "--encoders", encoder.url, "--engine", engine_url]
        command += ["--port", str(gateway_port)]
        urls = (encoder.url, faulty.url, f"http://127.0.0.1:{free_port()}")
        with (
            engine_process(blind, base / "vllm.log", port, urls, parallel, local) as vllm,
            Process(command, base / "gateway.log", dict(os.environ), f"{gateway_url}/health/ready", 60),
        ):
            yield Stack(family, local, folder, encoder, faulty, vllm, engine_url, gateway_url, processor, model)


@pytest.fixture
def beside(stack: Stack) -> Iterator[ThreadPoolExecutor]:
    """Threads for what runs at the same time."""
    with ThreadPoolExecutor(8) as threads:
        yield threads
    assert threading.active_count() < 100
