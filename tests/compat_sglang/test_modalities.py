"""Clips and recordings through SGLang's real receiver: what it makes of the facts beside the rows.

Its receiver counts placeholders out of grids and frames, and refuses a request whose rows do not fill them.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from tectum.items import wav
from tests import zoo
from tests.parity.colocated import Colocated
from tests.serving.test_native import jpeg, nothing_is_held, until
from tests.sglang.language_server import data_uri
from tests.sglang.test_modalities import STEP, TAKEN, clip_files, columns, decoded, served, uri

__all__ = ["served"]  # a fixture

BACKENDS = ("zmq_to_scheduler", "zmq_to_tokenizer", "mooncake")
#: positions that a second takes in Qwen2.5-VL (its config's `tokens_per_second`)
TOKENS_PER_SECOND = 4


@pytest.fixture(scope="module")
def clips() -> tuple[list[bytes], list[str]]:
    files = clip_files()
    return files, [uri("video/mp4", file) for file in files]


@pytest.mark.parametrize("number_of_encoders", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_clips_beside_pictures(peers, backend, encoders, clips, colocated, tiny):
    """Parts of two kinds of one request, spread over the encoders; rows of a step of time share their position."""
    whole = Colocated("qwen2_5_vl", tiny)
    files, urls = clips
    peer = peers(backend, *(encoder.url for encoder in encoders))
    picture = jpeg(224, 224, 1)
    found = peer.receive_one(pictures=[data_uri(picture)], clips=urls)
    taken = [decoded(file, frames) for file, frames in zip(files, TAKEN["qwen2_5_vl"], strict=True)]
    expected = whole.run("video", taken)
    assert torch.equal(found["rows"], torch.cat([colocated([picture]), columns(expected)]))
    ids, times = torch.tensor(found["input_ids"]), torch.tensor(found["times"])
    begin = 0
    in_clips = times[ids == whole.model.config.video_token_id]
    for (steps, high, wide), seconds in zip(expected.inputs["video_grid_thw"].tolist(), STEP, strict=True):
        mine = in_clips[begin : begin + steps * high * wide // 4].view(steps, -1)
        assert (mine - mine[0, 0] == torch.arange(steps)[:, None] * seconds * TOKENS_PER_SECOND).all()
        begin += steps * high * wide // 4
    until(lambda: all(nothing_is_held(encoder) for encoder in encoders))


def test_the_prompt_of_qwen3_vl_says_the_times(peers, served, clips):
    process, whole, folder = served("qwen3_vl")
    files, urls = clips
    found = peers("zmq_to_scheduler", process.url, model=folder).receive_one(clips=urls)
    taken = [decoded(file, frames) for file, frames in zip(files, TAKEN["qwen3_vl"], strict=True)]
    assert torch.equal(found["rows"], columns(whole.run("video", taken)))
    text = transformers.AutoTokenizer.from_pretrained(folder).decode(found["input_ids"])
    said = [piece.rpartition("<")[2] for piece in text.split(" seconds>")[:-1]]
    assert said == ["0.3", "1.6", "0.1", "0.8"]  # 0.3125, 1.5625, 0.125 and 0.75 s


@pytest.mark.parametrize("number", [1, 2])
def test_recordings(peers, served, number):
    process, whole, folder = served("qwen2_audio")
    recordings = [zoo.tone(1.3, 1), zoo.tone(2.105, 2)][:number]
    peer = peers("zmq_to_scheduler", process.url, model=folder)
    found = peer.receive_one(recordings=[uri("audio/wav", wav(samples, 16000)) for samples in recordings])
    assert torch.equal(found["rows"], whole.run("audio", recordings).rows)
    until(lambda: nothing_is_held(process))
