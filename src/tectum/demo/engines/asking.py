"""What both engines' demos do alike: find the engine, ask it as an end user, and say what it answered.

Owns no process; `sglang.py` and `vllm.py` start their own, as `server.py` runs one.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx2
from rich.console import Console
from rich.text import Text

from tectum.demo import answers
from tectum.demo.answers import Asked
from tectum.demo.preview import can_show
from tectum.demo.receiver import LONGEST_ANSWER, Receiver
from tectum.errors import StartupError, UnavailableError

#: the name under which the engines serve the demo's model
MODEL = "demo"


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One question, as the engine answered it. seconds: the end user's, over HTTP."""

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


def refuse_swap(swap: bool, engine: str) -> None:
    """Raises StartupError `invalid_settings` where rows were to be swapped."""
    if swap:
        text = f"--swap changes rows on their way, and {engine} fetches its rows itself: leave out --swap or --engine"
        raise StartupError("invalid_settings", text)


def python_of(engine: str, given: Path | None) -> str:
    """The Python that has the engine (`vllm`, `sglang`): the one given, the one that `make compat-…` built, or this one.

    Raises StartupError: `invalid_settings` (the one given cannot be run), `missing_dependency` (none has it).
    """
    if given is not None:
        if not os.access(given, os.X_OK):
            raise StartupError("invalid_settings", f"engine_python: {str(given)[:80]} is not a program that can be run")
        return str(given)
    built = Path(f".venv-{engine}/bin/python")
    if os.access(built, os.X_OK):
        return str(built.absolute())
    if find_spec(engine) is not None:
        return sys.executable
    text = f"--engine {engine} needs its environment: `make compat-{engine}` builds one, --engine-python PATH names another"
    raise StartupError("missing_dependency", text)


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
        raise UnavailableError("server_unreachable", f"The engine answered {answer.status_code} to a chat request")
    return str(answer.json()["choices"][0]["message"]["content"])


def chat(url: str, pictures: Sequence[bytes], question: str) -> httpx2.Response:
    """What an end user gets who asks about PNG files."""
    uris = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
    content = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": question}]}],
        "temperature": 0,
        "max_tokens": LONGEST_ANSWER,
    }
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=120)


def released(encoder: str, reason: str) -> int:
    """Requests that the encoder at this URL released for `reason`."""
    lines = httpx2.get(f"{encoder}/metrics", timeout=30).text.splitlines()
    start = f'encoder_releases_total{{reason="{reason}"}}'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(start))


def report(
    engine: str, asked: Sequence[Asked], answered: Sequence[EngineAnswer], from_tectum: int, *, json_output: bool
) -> int:
    """Say what came of it, in words or as one JSON object; 0 when every answer is right and from rows that Tectum made.

    from_tectum: requests whose rows the engine had from the encoder.
    """
    good = all(one.right for one in answered) and from_tectum > 0
    if json_output:
        summary = {"engine": engine, "answers_right": good, "from_tectum": from_tectum}
        sys.stdout.write(json.dumps({**summary, "answers": [asdict(one) for one in answered]}) + "\n")
        return 0 if good else 1
    console = Console(highlight=False)
    shown = can_show(console)
    for one, found in zip(asked, answered, strict=True):
        console.print(answers.beside(one.pictures, _lines(found)) if shown else _lines(found))
        console.print()
    right = sum(one.right for one in answered)
    kept = f"{right} of {len(answered)} answers are as expected"
    console.print(f"{engine}: {kept}; Tectum made the rows of {from_tectum} requests")
    return 0 if good else 1


def _lines(found: EngineAnswer) -> Text:
    text = Text()
    text.append(f"{found.question}\n", "bold")
    text.append("answer    ").append(f"{found.answer}\n", "green" if found.answer == found.expected else "bold red")
    text.append(f"expected  {found.expected}\n")
    equal = found.answer == found.one_piece
    text.append(f"{'equal' if equal else 'NOT equal'} to the one-process model's\n", "" if equal else "bold red")
    text.append(f"{found.seconds:.2f} s", "dim")
    return text
