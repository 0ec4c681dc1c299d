"""A whole SGLang on the CPU: chat requests to its language-only server, which asks Tectum for rows and answers in words.

The demo's model names what it sees. Two encoders share the pictures of a request, so parts in a wrong order, or rows in
a wrong place, are a wrong sentence.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
import transformers

from tectum.demo import answers
from tectum.demo.encoder_process import EncoderProcess
from tectum.demo.engines import asking, sglang
from tests.serving.test_native import gauges, jpeg, nothing_is_held, until
from tests.sglang.language_server import data_uri

PYTHON = os.environ.get("SGLANG_PYTHON", "")
SEEDS = range(2, 5)
#: Mooncake's messages carry no dtype: the engine's is float32, too
FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--dtype", "float32")


class Engine:
    """SGLang at `url`, and the encoders that it asks."""

    def __init__(self, url: str, backend: str, encoders: list[EncoderProcess]) -> None:
        self.url = url
        self.backend = backend
        self.encoders = encoders

    def delivered(self) -> list[float]:
        """Requests that ended delivered: also those whose `/encode` SGLang hangs up on, once it has its rows."""
        return [gauges(one).get('encoder_releases_total{reason="delivered"}', 0) for one in self.encoders]

    def is_idle(self) -> bool:
        return all(nothing_is_held(one) for one in self.encoders)


@pytest.fixture(scope="module", params=["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"])
def engine(request) -> Iterator[Engine]:
    model = answers.checkpoint()
    with ExitStack() as open_:
        deliver = (*FLAGS, "--transfer-backend", request.param)
        encoders = [open_.enter_context(EncoderProcess(model, *deliver)) for _ in range(2)]
        flags = ("--encoder-urls", *(one.url for one in encoders))
        url = open_.enter_context(sglang.engine(PYTHON, model, *flags, backend=request.param))
        yield Engine(url, request.param, encoders)


def test_answers_are_what_was_drawn(engine):
    before = sum(engine.delivered())
    for asked in answers.draw_questions(SEEDS[0]):
        assert asking.ask(engine.url, asked) == asked.question.answer
    until(lambda: sum(engine.delivered()) == before + 5)  # three pictures alone, and two at two encoders
    until(engine.is_idle)


def test_many_at_once_do_not_mix(engine):
    asked = [one for seed in SEEDS for one in answers.draw_questions(seed)]
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda one: asking.ask(engine.url, one), asked))
    alone = [asking.ask(engine.url, one) for one in asked]
    assert found == alone
    assert all(engine.delivered())
    until(engine.is_idle)


def test_a_bad_picture_is_the_end_users_error_and_nobody_elses(engine):
    """By ids and not by text: of a text, SGLang 0.5.23's scheduler ends itself over any encode that fails."""
    model, good = answers.checkpoint(), answers.draw_questions(SEEDS[0])[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    content = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)["input_ids"]
    body = {"input_ids": ids, "image_data": [data_uri(jpeg()[:-300])], "sampling_params": {"max_new_tokens": 8}}
    with ThreadPoolExecutor(2) as threads:
        bad = threads.submit(httpx2.post, f"{engine.url}/generate", json=body, timeout=60)
        assert threads.submit(asking.ask, engine.url, good).result() == good.question.answer
    answer = bad.result()
    if engine.backend != "zmq_to_tokenizer":
        assert (answer.status_code, "truncated or damaged" in answer.text) == (400, True)
    else:  # the tokenizer of 0.5.23 makes this of every encode that fails, and drops its reason
        assert (answer.status_code, "did not return multimodal embeddings" in answer.text) == (503, True)
    assert asking.ask(engine.url, good) == good.question.answer
    until(engine.is_idle)


def test_an_encoder_that_registers_itself_is_found():
    """No encoder is named to SGLang: its own bootstrap server learns of it."""
    model = answers.checkpoint()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    register = ("--encoder-register-urls", f"http://127.0.0.1:{port}", "--register-interval", "0.5")
    with (
        EncoderProcess(model, *FLAGS, "--transfer-backend", sglang.BACKEND, *register) as encoder,
        sglang.engine(PYTHON, model, "--encoder-bootstrap-port", str(port)) as url,
    ):
        asked = answers.draw_questions(SEEDS[0])[0]
        found = []

        def answered() -> bool:
            answer = asking.chat(url, [answers.png(picture) for picture in asked.pictures], asked.question.text)
            found.append(answer.text)
            return answer.status_code == 200 and asked.question.answer in answer.text

        until(answered, 20)
        assert gauges(encoder)['encoder_releases_total{reason="delivered"}'] >= 1


def test_the_demo_drives_sglang_and_says_so():
    command = [sys.executable, "-m", "tectum", "demo", "--engine", "sglang", "--engine-python", PYTHON, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert (said["engine"], said["answers_right"], len(said["answers"])) == ("SGLang 0.5.23", True, 4)
    assert said["from_tectum"] == 4, "three pictures alone, and two in one request"
    assert all(one["answer"] == one["expected"] == one["one_piece"] for one in said["answers"])
