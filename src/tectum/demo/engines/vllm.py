"""The demo's scenes through a real vLLM: a stock server with Tectum's connector, behind Tectum's gateway.

Owns the three processes and the questions. vLLM runs unmodified, on the CPU, in an environment of its own: its versions are not
ours. The gateway gets pictures and questions as an end user's chat requests; vLLM is sent no picture, only a grid and a key, so
that its answers can only come from rows that the encoder process made. They have to be what the model in one piece says.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from rich.console import Console

import tectum
from tectum.demo import answers
from tectum.demo.encoder_process import EncoderProcess, ServerProcess
from tectum.demo.engines.asking import MODEL, ask_all, python_of, refuse_swap, released, report
from tectum.demo.engines.server import demo_engine, free_port
from tectum.demo.receiver import Receiver

_ENCODER_FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--no-dashboard")
_ENGINE_FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--enforce-eager"),
    *("--max-model-len", "2048", "--max-num-seqs", "4", "--limit-mm-per-prompt", '{"image": 3}'),
)
_ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}


def run(*, json_output: bool, swap: bool, seed: int, python: Path | None = None) -> int:
    """Ask, print answers or one JSON object; returns 0 when every answer is right, from rows that vLLM pulled.

    python: of the environment with vLLM. Raises StartupError: `missing_dependency` (no vLLM is found), `invalid_settings`.
    """
    refuse_swap(swap, "vLLM")
    engine_python = python_of("vllm", python)
    model, asked = answers.checkpoint(), answers.draw_questions(seed)
    with EncoderProcess(model, *_ENCODER_FLAGS) as encoder:
        Console(highlight=False, stderr=True).print("starting a stock vLLM on the CPU: some 40 seconds")
        with (
            engine(engine_python, model, encoder.url) as (url, version),
            ServerProcess("gateway", "--encoders", encoder.url, "--engine", url, "--port", "0") as gateway,
        ):
            answered = ask_all(gateway.url, asked, Receiver(model))
        pulled = released(encoder.url, "pulled")
    return report(f"vLLM {version}", asked, answered, pulled, json_output=json_output)


@contextmanager
def engine(python: str, model: Path, encoder: str) -> Iterator[tuple[str, str]]:
    """vLLM's server for `model`, whose connector takes rows from `encoder`: its URL once it is healthy, and its version.

    Raises UnavailableError `server_unreachable` as `demo_engine` does.
    """
    port = free_port()
    transfer = {
        "ec_connector": "TectumConnector",
        "ec_connector_module_path": "tectum.engines.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"url": encoder, "buffer_bytes": 64 << 20},
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += [*_ENGINE_FLAGS, "--ec-transfer-config", json.dumps(transfer)]
    with tempfile.TemporaryDirectory(prefix="tectum-demo-") as folder:
        # this very Tectum in the engine's environment, and nothing else of ours
        (Path(folder) / "tectum").symlink_to(Path(tectum.__file__).parent)
        environment = {**os.environ, **_ENGINE_ENVIRONMENT, "PYTHONPATH": folder}
        with demo_engine(command, port, environment) as url:
            yield url, str(httpx2.get(f"{url}/version", timeout=30).json()["version"])
