"""The demo's scenes through a real vLLM: a stock server with Tectum's connector, behind Tectum's gateway.

Owns the three processes and the questions. vLLM runs unmodified, on the CPU, in an environment of its own: its versions are not
ours. The gateway gets pictures and questions as an end user's chat requests; vLLM is sent no picture, only a grid and a key, so
that its answers can only come from rows that the encoder process made. They have to be what the model in one piece says.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.text import Text

import tectum
from tectum.demo import answers
from tectum.demo.answers import Asked
from tectum.demo.encoder_process import EncoderProcess, ServerProcess
from tectum.demo.preview import can_show
from tectum.demo.receiver import LONGEST_ANSWER, Receiver
from tectum.errors import StartupError, UnavailableError

#: where `make compat-vllm` builds an environment with vLLM
ENVIRONMENT = Path(".venv-vllm")
#: seconds that vLLM may take to start: most of it goes into its imports
PATIENCE = 400.0
_ENCODER_FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--no-dashboard")
_ENGINE_FLAGS = (
    *("--served-model-name", "demo", "--host", "127.0.0.1", "--enforce-eager"),
    *("--max-model-len", "2048", "--max-num-seqs", "4", "--limit-mm-per-prompt", '{"image": 3}'),
)
_ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One question, as vLLM answered it. seconds: the end user's, over HTTP."""

    pictures: int
    question: str
    answer: str
    expected: str
    one_piece: str
    seconds: float

    @property
    def right(self) -> bool:
        """As the scene was drawn, and as the model in one piece says."""
        return self.answer == self.expected == self.one_piece


def run(*, json_output: bool, swap: bool, seed: int, python: Path | None = None) -> int:
    """Ask, print answers or one JSON object; returns 0 when every answer is right, from rows that vLLM pulled.

    python: of the environment with vLLM. Raises StartupError: `missing_dependency` (no vLLM is found), `invalid_settings`.
    """
    if swap:
        text = "--swap changes rows on their way, and vLLM fetches its rows itself: leave out --swap or --engine"
        raise StartupError("invalid_settings", text)
    engine_python = vllm_python(python)
    model, asked = answers.checkpoint(), answers.draw_questions(seed)
    with EncoderProcess(model, *_ENCODER_FLAGS) as encoder:
        Console(highlight=False, stderr=True).print("starting a stock vLLM on the CPU: some 40 seconds")
        with (
            engine(engine_python, model, encoder.url) as (url, version),
            ServerProcess("gateway", "--encoders", encoder.url, "--engine", url, "--port", "0") as gateway,
        ):
            answered = ask_all(gateway.url, asked, Receiver(model))
        pulled = _pulled(encoder.url)
    good = all(one.right for one in answered) and pulled > 0
    if json_output:
        summary = {"engine": f"vLLM {version}", "answers_right": good, "pulled": pulled}
        sys.stdout.write(json.dumps({**summary, "answers": [asdict(one) for one in answered]}) + "\n")
    else:
        _show(Console(highlight=False), version, asked, answered, pulled)
    return 0 if good else 1


def vllm_python(given: Path | None) -> str:
    """The Python that has vLLM: the one given, that of `.venv-vllm`, or this one. Raises StartupError `missing_dependency`."""
    if given is not None:
        if not os.access(given, os.X_OK):
            raise StartupError("invalid_settings", f"engine_python: {str(given)[:80]} is not a program that can be run")
        return str(given)
    built = ENVIRONMENT / "bin" / "python"
    if os.access(built, os.X_OK):
        return str(built.absolute())
    if find_spec("vllm") is not None:
        return sys.executable
    text = "--engine vllm needs an environment with vLLM: --engine-python PATH names its Python; `make compat-vllm` builds one"
    raise StartupError("missing_dependency", text)


@contextmanager
def engine(python: str, model: Path, encoder: str) -> Iterator[tuple[str, str]]:
    """vLLM's server for `model`, whose connector takes rows from `encoder`: its URL once it is healthy, and its version.

    Raises UnavailableError `server_unreachable` when it ends, or is not healthy within `PATIENCE`; its last lines are
    printed then.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    transfer = {
        "ec_connector": "TectumConnector",
        "ec_connector_module_path": "tectum.engines.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"url": encoder, "buffer_bytes": 64 << 20},
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += [*_ENGINE_FLAGS, "--ec-transfer-config", json.dumps(transfer)]
    with tempfile.TemporaryDirectory(prefix="tectum-demo-") as folder, tempfile.TemporaryFile("w+b") as log:
        # this very Tectum in the engine's environment, and nothing else of ours
        (Path(folder) / "tectum").symlink_to(Path(tectum.__file__).parent)
        environment = {**os.environ, **_ENGINE_ENVIRONMENT, "PYTHONPATH": folder}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                _wait_until_healthy(process, url)
            except UnavailableError:
                log.seek(0)
                sys.stderr.write(b"".join(log.readlines()[-20:]).decode(errors="replace"))
                raise
            yield url, str(httpx2.get(f"{url}/version", timeout=30).json()["version"])
        finally:
            _end(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{url}/health", timeout=30).is_success:
                return
        except httpx2.TransportError:
            time.sleep(0.5)
    how = "did not get healthy in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise UnavailableError("server_unreachable", f"vLLM's server {how}; its last lines are above")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, on which vLLM ends its own processes; SIGKILL for all of them when it does not."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask_all(url: str, asked: Sequence[Asked], receiver: Receiver) -> list[EngineAnswer]:
    """Each question as a chat request with its pictures; `receiver` has the model in one piece."""
    found = []
    for one in asked:
        started = time.perf_counter()
        text = ask(url, one)
        seconds = round(time.perf_counter() - started, 3)
        prompt = receiver.prompt(len(one.pictures), one.question.text)
        whole = receiver.answer_in_one_piece(prompt, one.pictures)
        found.append(EngineAnswer(len(one.pictures), one.question.text, text, one.question.answer, whole, seconds))
    return found


def ask(url: str, asked: Asked) -> str:
    """The most likely answer, over OpenAI's chat API. Raises UnavailableError `server_unreachable` for any other status."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _data_uri(picture)}} for picture in asked.pictures
    ]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": asked.question.text}]}],
        "temperature": 0,
        "max_tokens": LONGEST_ANSWER,
    }
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    if answer.status_code != 200:
        raise UnavailableError("server_unreachable", f"The gateway answered {answer.status_code} to a chat request")
    return str(answer.json()["choices"][0]["message"]["content"])


def _data_uri(picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _pulled(encoder: str) -> int:
    """Requests whose rows were pulled from this encoder."""
    lines = httpx2.get(f"{encoder}/metrics", timeout=30).text.splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith('encoder_releases_total{reason="pulled"}')
    )


def _show(
    console: Console, version: str, asked: Sequence[Asked], answered: Sequence[EngineAnswer], pulled: int
) -> None:
    shown = can_show(console)
    for one, found in zip(asked, answered, strict=True):
        console.print(answers.beside(one.pictures, _lines(found)) if shown else _lines(found))
        console.print()
    right = sum(one.right for one in answered)
    console.print(
        f"vLLM {version}: {right} of {len(answered)} answers are as expected; it was sent no picture, "
        f"and pulled the rows of {pulled} from Tectum"
    )


def _lines(found: EngineAnswer) -> Text:
    text = Text()
    text.append(f"{found.question}\n", "bold")
    text.append("answer    ").append(f"{found.answer}\n", "green" if found.answer == found.expected else "bold red")
    text.append(f"expected  {found.expected}\n")
    equal = found.answer == found.one_piece
    text.append(f"{'equal' if equal else 'NOT equal'} to the one-process model's\n", "" if equal else "bold red")
    text.append(f"{found.seconds:.2f} s", "dim")
    return text
