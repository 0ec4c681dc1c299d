"""The demo's scenes through a real SGLang: its language-only server, with Tectum in place of its encoder.

Owns the two processes and the questions. SGLang runs unmodified, on the CPU, in an environment of its own: its versions are
not ours. It gets pictures and questions as an end user's chat requests, fetches rows from the encoder process, and has
to say what the model in one piece says.
"""

from __future__ import annotations

import base64
import json
import os
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

import httpx2
from rich.console import Console
from rich.text import Text

from tectum.demo import answers
from tectum.demo.answers import Asked
from tectum.demo.encoder_process import EncoderProcess
from tectum.demo.receiver import LONGEST_ANSWER, Receiver
from tectum.errors import StartupError, UnavailableError

BACKEND = "zmq_to_scheduler"
#: seconds that SGLang may take to start: most of it goes into its imports
PATIENCE = 300.0
_ENCODER_FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--no-dashboard", "--transfer-backend", BACKEND)
_ENGINE_FLAGS = (
    "--language-only",
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--mm-attention-backend", "sdpa", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--max-total-tokens", "8192"),
    "--skip-server-warmup",
)


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One question, as SGLang answered it. seconds: the end user's, over HTTP."""

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


def run(*, json_output: bool, swap: bool, seed: int) -> int:
    """Ask, print answers or one JSON object; returns 0 when every answer is right, from rows that Tectum delivered.

    Raises StartupError: `missing_dependency` (no SGLang is found), `invalid_settings`.
    """
    if swap:
        text = "--swap changes rows on their way, and SGLang fetches its rows itself: leave out --swap or --engine"
        raise StartupError("invalid_settings", text)
    python = sglang_python()
    model, asked = answers.checkpoint(), answers.draw_questions(seed)
    console = Console(highlight=False, stderr=True)
    with EncoderProcess(model, *_ENCODER_FLAGS) as encoder:
        console.print("starting SGLang's language-only server on the CPU: some 40 seconds")
        with engine(python, model, "--encoder-urls", encoder.url) as url:
            answered = ask_all(url, asked, Receiver(model))
            version = str(httpx2.get(f"{url}/server_info", timeout=30).json()["version"])
        delivered = _delivered(encoder.url)
    right = all(one.right for one in answered)
    if json_output:
        summary = {"engine": f"SGLang {version}", "answers_right": right, "delivered": delivered}
        sys.stdout.write(json.dumps({**summary, "answers": [asdict(one) for one in answered]}) + "\n")
    else:
        _show(Console(highlight=False), version, asked, answered, delivered)
    return 0 if right and delivered >= len(answered) else 1


def sglang_python() -> str:
    """The Python that has SGLang: `SGLANG_PYTHON`, or this one. Raises StartupError `missing_dependency`."""
    named = os.environ.get("SGLANG_PYTHON")
    if named is not None and os.access(named, os.X_OK):
        return named
    if named is None and find_spec("sglang") is not None:
        return sys.executable
    text = "--engine sglang needs the Python of an environment with SGLang in SGLANG_PYTHON; `make compat-sglang` builds one"
    raise StartupError("missing_dependency", text)


@contextmanager
def engine(python: str, model: Path, *flags: str, backend: str = BACKEND) -> Iterator[str]:
    """SGLang's language-only server for `model`: its URL, once it is healthy. flags: where its encoders are.

    Raises UnavailableError `server_unreachable` when it ends, or is not healthy within `PATIENCE`; its last lines are
    printed then.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": "",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    where = ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port))
    command = [python, "-W", "ignore", "-m", "sglang.launch_server", *_ENGINE_FLAGS, *where, *flags]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--encoder-transfer-backend", backend], env=environment, stdout=log, stderr=log, text=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            try:
                _wait_until_healthy(process, url)
            except UnavailableError:
                log.seek(0)
                sys.stderr.writelines(log.readlines()[-20:])
                raise
            yield url
        finally:
            _end(process)


def _wait_until_healthy(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(f"{url}/health", timeout=30).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)
    how = "did not get healthy in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise UnavailableError("server_unreachable", f"SGLang's server {how}; its last lines are above")


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM, on which SGLang ends its own processes; SIGKILL when it does not."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
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
    answer = chat(url, [answers.png(picture) for picture in asked.pictures], asked.question.text)
    if answer.status_code != 200:
        raise UnavailableError("server_unreachable", f"SGLang answered {answer.status_code} to a chat request")
    return str(answer.json()["choices"][0]["message"]["content"])


def chat(url: str, pictures: Sequence[bytes], question: str) -> httpx2.Response:
    """What an end user gets who asks about PNG files."""
    uris = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
    content = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": question}]}],
        "temperature": 0,
        "max_tokens": LONGEST_ANSWER,
    }
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def _delivered(encoder: str) -> int:
    """Parts whose rows SGLang had from this encoder."""
    lines = httpx2.get(f"{encoder}/metrics", timeout=30).text.splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith('encoder_releases_total{reason="delivered"}')
    )


def _show(
    console: Console, version: str, asked: Sequence[Asked], answered: Sequence[EngineAnswer], delivered: int
) -> None:
    for found in answered:
        text = Text()
        text.append(f"{found.question}\n", "bold")
        text.append("answer    ").append(f"{found.answer}\n", "green" if found.right else "bold red")
        text.append(f"expected  {found.expected}\n")
        text.append(f"{found.pictures} picture{'s' * (found.pictures > 1)}, {found.seconds:.2f} s\n", "dim")
        console.print(text)
    right = sum(one.right for one in answered)
    console.print(
        f"SGLang {version}: {right} of {len(answered)} answers are as expected, and the model's in one piece; "
        f"{delivered} requests had their rows from Tectum"
    )
