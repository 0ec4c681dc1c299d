"""The tokens of a vLLM without a working vision encoder equal those of the model in one piece."""

from __future__ import annotations

import base64
import json

import httpx2
import numpy as np

from tests import zoo
from tests.compat_vllm.conftest import TOKENS, Stack, clip_content, tokens
from tests.media.test_video import video

PICTURES = [zoo.picture(140, 90, 1), zoo.picture(224, 224, 2), zoo.picture(90, 140, 3)]


def test_greedy_tokens_are_those_of_the_model_in_one_piece(stack: Stack):
    before = stack.metric("encoder_items_total")
    for pictures in (PICTURES[:1], PICTURES[1:2], PICTURES, PICTURES[::-1]):
        assert tokens(stack.ask(pictures)) == stack.expected(pictures)
    assert stack.metric("encoder_items_total") > before, "the encoder was used"
    assert stack.local_encodes() == 0


def test_the_order_of_pictures_matters_and_is_kept(stack: Stack):
    """Two pictures of one size: only their content tells them apart."""
    pair = [zoo.picture(140, 90, 4), zoo.picture(140, 90, 5)]
    found = [tokens(stack.ask(pictures)) for pictures in (pair, pair[::-1], [pair[0], pair[0]])]
    assert found == [stack.expected(pictures) for pictures in (pair, pair[::-1], [pair[0], pair[0]])]
    assert found[0] != found[1]


def test_a_clip_is_taken_with_its_steps_in_time(stack: Stack):
    """Four frames at 2 fps, forwards and backwards.

    No more: after a clip that is longer in time than it is wide, vLLM and transformers 5.24 go on at different positions.
    """
    frames = np.random.default_rng(8).integers(0, 255, (4, 84, 140, 3), np.uint8)
    forwards, backwards = (video(some, fps=2) for some in (frames, frames[::-1]))
    found = []
    for data in (forwards, backwards):
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        found.append(tokens(stack.post(clip_content(url), stack.gateway)))
        assert found[-1] == stack.expected_of_clip(data)
    assert found[0] != found[1]
    assert stack.local_encodes() == 0


def test_a_repeated_picture_needs_no_forward(stack: Stack):
    picture = [zoo.picture(168, 112, 6)]
    first = tokens(stack.ask(picture))
    asked, hits = stack.metric("encoder_requests_received_total"), stack.metric("encoder_cache_hits_total")
    assert tokens(stack.ask(picture)) == first == stack.expected(picture)
    assert stack.metric("encoder_cache_hits_total") == hits + 1
    assert stack.metric("encoder_requests_received_total") == asked + 1, "the encoder says what it is, by its key"


def test_processor_options_reach_the_encoder(stack: Stack):
    picture = [zoo.picture(448, 448, 7)]
    small = tokens(stack.ask(picture, mm_processor_kwargs={"max_pixels": 128 * 128}))
    assert small == stack.expected(picture, longest_edge=128 * 128)
    assert tokens(stack.ask(picture)) == stack.expected(picture)
    assert small != stack.expected(picture)


def test_many_at_once_are_not_mixed_up(stack: Stack, beside):
    """More rows than vLLM's encoder cache and the connector's memory keep: loading and evicting all the time."""
    asked = [[zoo.picture(224, 224, 20 + i % 12), zoo.picture(140, 90, 40 + i % 5)] for i in range(24)]
    found = list(beside.map(lambda pictures: tokens(stack.ask(pictures)), asked))
    assert found == [stack.expected(pictures) for pictures in asked]
    assert stack.local_encodes() == 0


def test_a_stream_and_text_alone_come_through(stack: Stack):
    body = {"model": "m", "stream": True, "max_tokens": 8, "min_tokens": 8, "temperature": 0}
    body["messages"] = [{"role": "user", "content": stack.content(PICTURES[:1])}]
    with httpx2.stream("POST", f"{stack.gateway}/v1/chat/completions", json=body, timeout=120) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"] for line in lines[:-1]]
    text = "".join(choice[0]["delta"].get("content") or "" for choice in pieces if choice)
    plain = stack.ask(PICTURES[:1], tokens=8).json()["choices"][0]["message"]["content"]
    assert text == plain
    words = stack.post([{"type": "text", "text": "hello"}], stack.gateway)
    assert len(tokens(words)) == TOKENS


def test_raw_media_sent_past_the_gateway(stack: Stack):
    """Refused alone; where it is allowed vLLM encodes it itself, and says so (here with the wrong weights)."""
    before = stack.local_encodes()
    answer = stack.ask(PICTURES[:1], url=stack.engine)
    if stack.local:
        assert tokens(answer) != stack.expected(PICTURES[:1]), "vLLM's own vision weights are noise"
        assert stack.local_encodes() == before + 1
        assert "is encoded by the engine itself" in stack.vllm.text()
    else:
        assert answer.status_code == 500
        assert stack.local_encodes() == before
    assert tokens(stack.ask(PICTURES[:1])) == stack.expected(PICTURES[:1])
