"""The demo's scenes through a real SGLang: its language-only server, with Tectum in place of its encoder.

Owns the two processes and the questions. SGLang runs unmodified, on the CPU, in an environment of its own: its versions are
not ours. It gets pictures and questions as an end user's chat requests, fetches rows from the encoder process, and has
to say what the model in one piece says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from rich.console import Console

from tectum.demo import answers
from tectum.demo.encoder_process import EncoderProcess
from tectum.demo.engines.asking import MODEL, ask_all, python_of, refuse_swap, released, report
from tectum.demo.engines.server import demo_engine, free_port
from tectum.demo.receiver import Receiver

BACKEND = "zmq_to_scheduler"
_ENCODER_FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--no-dashboard", "--transfer-backend", BACKEND)
_ENGINE_FLAGS = (
    *("--language-only", "--served-model-name", MODEL),
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--mm-attention-backend", "sdpa", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--max-total-tokens", "8192"),
    "--skip-server-warmup",
)


def run(*, json_output: bool, swap: bool, seed: int, python: Path | None = None) -> int:
    """Ask, print answers or one JSON object; returns 0 when every answer is right, from rows that Tectum delivered.

    python: of the environment with SGLang. Raises StartupError: `missing_dependency` (no SGLang is found), `invalid_settings`.
    """
    refuse_swap(swap, "SGLang")
    engine_python = python_of("sglang", python)
    model, asked = answers.checkpoint(), answers.draw_questions(seed)
    with EncoderProcess(model, *_ENCODER_FLAGS) as encoder:
        Console(highlight=False, stderr=True).print(
            "starting SGLang's language-only server on the CPU: some 40 seconds"
        )
        with engine(engine_python, model, "--encoder-urls", encoder.url) as url:
            answered = ask_all(url, asked, Receiver(model))
            version = str(httpx2.get(f"{url}/server_info", timeout=30).json()["version"])
        delivered = released(encoder.url, "delivered")
    return report(f"SGLang {version}", asked, answered, delivered, json_output=json_output)


@contextmanager
def engine(python: str, model: Path, *flags: str, backend: str = BACKEND) -> Iterator[str]:
    """SGLang's language-only server for `model`: its URL, once it is healthy. flags: where its encoders are.

    Raises UnavailableError `server_unreachable` as `demo_engine` does.
    """
    port = free_port()
    where = ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port))
    command = [python, "-W", "ignore", "-m", "sglang.launch_server", *_ENGINE_FLAGS, *where, *flags]
    with demo_engine([*command, "--encoder-transfer-backend", backend], port, environment()) as url:
        yield url


def environment(**more: str) -> dict[str, str]:
    """What a server of SGLang's runs in: on the CPU, on loopback, with one thread, and nothing of ours on its path."""
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MOONCAKE_PROTOCOL": "tcp"}
    return {**os.environ, "PYTHONPATH": "", "SGLANG_HOST_IP": "127.0.0.1", **cpu, **more}
