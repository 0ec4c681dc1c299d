"""Clips and recordings at SGLang's doors: rows and counts against the model in one piece, times against hand calculation."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import av
import grpc
import numpy as np
import pytest
import torch

from tectum.demo.encoder_process import EncoderProcess
from tectum.items import wav
from tectum.types import Clip, ClipInfo
from tests import zoo
from tests.media.test_video import video
from tests.parity.colocated import Colocated, Reference
from tests.serving.test_native import jpeg, nothing_is_held, until
from tests.sglang.conftest import FLAGS, grpc_target
from tests.sglang.language_server import LanguageServer
from tests.sglang.receiver import EmbeddingData, Modality, Receiver
from tests.sglang.test_grpc import Stub

FPS = 8
#: frames of the clips
LENGTHS = (16, 8)
#: those that are taken of each, two a second but no fewer than four: every so many, or spread from the first to the last
TAKEN = {"qwen2_5_vl": ((0, 4, 8, 12), (0, 2, 4, 6)), "qwen3_vl": ((0, 5, 10, 15), (0, 2, 5, 7))}
TAKEN["qwen3_omni"] = TAKEN["qwen2_5_vl"]
#: seconds of each step's middle, of `qwen3_vl`'s: a step is two frames
STEPS = [[0.3125, 1.5625], [0.125, 0.75]]
#: seconds that a step covers: of two frames a second, and of four
STEP = [1.0, 0.5]


class Served(NamedTuple):
    """A family's encoder, and its model in one piece."""

    process: EncoderProcess
    whole: Colocated
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Serves a family, once."""
    made: dict[str, Served] = {}

    def start(family: str) -> Served:
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / family
            whole = Colocated(family, zoo.build(family, folder))
            made[family] = Served(EncoderProcess(folder, *FLAGS, "--grpc-port", "0").__enter__(), whole, folder)
        return made[family]

    yield start
    for one in made.values():
        one.process.stop()


def clip_files(sound: bool = False) -> list[bytes]:
    return [video(zoo.frames(count, 112, 84, seed), fps=FPS, sound=sound) for seed, count in enumerate(LENGTHS)]


def decoded(file: bytes, indices: Sequence[int]) -> Clip:
    """The frames of `indices`, by PyAV alone."""
    with av.open(io.BytesIO(file)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    times = tuple(i / FPS for i in range(len(frames)))
    info = ClipInfo(frames.shape[2], frames.shape[1], len(frames), times, float(FPS), len(frames) / FPS)
    return Clip(frames[list(indices)], tuple(indices), info)


def uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def columns(reference: Reference) -> torch.Tensor:
    """Rows as SGLang has them: deepstack layers are further columns."""
    return torch.cat([reference.rows, *reference.deepstack], 1)


def receive(
    process: EncoderProcess, rid: str, modality: str, items: list[str]
) -> tuple[EmbeddingData, torch.Tensor | None]:
    """What the receiver of one part gets."""
    with LanguageServer(process.url) as server, Receiver() as receiver:
        (encoded,) = server.encode(rid, items, modality=modality, embedding_port=receiver.port)
        message, rows = receiver.message()
        assert encoded.result(20).status_code == 200, encoded.result().text
    until(lambda: nothing_is_held(process))
    return message, rows


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_omni"])
def test_clips(served, family):
    process, whole, _ = served(family)
    files = clip_files()
    expected = whole.run("video", [decoded(file, taken) for file, taken in zip(files, TAKEN[family], strict=True)])
    message, rows = receive(process, f"clips-{family}", "VIDEO", [uri("video/mp4", file) for file in files])
    assert message.modality is Modality.VIDEO
    assert torch.equal(rows, columns(expected))
    assert message.grid_dim == expected.inputs["video_grid_thw"].tolist()
    if family == "qwen3_vl":  # its prompts say the times; the others place rows by the length of a step
        assert message.video_timestamps == STEPS
    else:
        assert message.second_per_grid_ts.tolist() == STEP


#: frames of the spectrograms of 1.3 s and 2.105 s: one for every 10 ms begun; Qwen3-Omni pads to the longest, and cuts it
FRAMES = {"qwen2_audio": [130, 211], "qwen3_omni": [130, 210]}


def rows_by_sglang(family: str, frames: int) -> int:
    """How many placeholders SGLang's receiver makes of a recording (`get_mm_data` of its processors, read)."""
    if family == "qwen2_audio":
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1
    return (((frames % 100 - 1) // 2 + 1 - 1) // 2 + 1 - 1) // 2 + 1 + frames // 100 * 13


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen3_omni"])
def test_recordings(served, family):
    process, whole, _ = served(family)
    recordings = [zoo.tone(1.3, 1), zoo.tone(2.105, 2)]
    items = [uri("audio/wav", wav(samples, 16000)) for samples in recordings]
    message, rows = receive(process, f"sound-{family}", "AUDIO", items)
    expected = whole.run("audio", recordings)
    assert message.modality is Modality.AUDIO
    assert torch.equal(rows, expected.rows)
    assert message.grid_dim.tolist() == FRAMES[family]
    assert message.grid_dim.tolist() == expected.inputs["feature_attention_mask"].sum(-1).tolist()
    assert sum(rows_by_sglang(family, frames) for frames in message.grid_dim.tolist()) == len(rows)


def test_a_clips_sound_is_another_part_of_a_model_that_hears(served):
    """SGLang sends a clip's sound, where it is wanted, as audio: the clip's part is its pictures."""
    process, *_ = served("qwen3_omni")
    silent, _ = receive(process, "silent", "VIDEO", [uri("video/mp4", clip_files()[0])])
    loud, rows = receive(process, "loud", "VIDEO", [uri("video/mp4", clip_files(sound=True)[0])])
    assert rows is not None
    assert loud.grid_dim == silent.grid_dim
    sound, rows = receive(process, "sound", "AUDIO", [uri("video/mp4", clip_files(sound=True)[0])])
    assert sound.modality is Modality.AUDIO
    assert len(rows) == rows_by_sglang("qwen3_omni", int(sound.grid_dim))


@pytest.mark.parametrize(
    ("modality", "kind", "status"),
    [("VIDEO", "image/jpeg", 415), ("IMAGE", "video/mp4", 415), ("AUDIO", "audio/wav", 400)],
)
def test_media_of_another_kind_are_refused_and_receivers_told(served, modality, kind, status):
    process, *_ = served("qwen2_5_vl")
    data = {"image/jpeg": jpeg(), "video/mp4": clip_files()[1], "audio/wav": wav(zoo.tone(0.5), 16000)}[kind]
    with LanguageServer(process.url) as server, Receiver() as receiver:
        (encoded,) = server.encode(
            f"kind-{modality}", [uri(kind, data)], modality=modality, embedding_port=receiver.port
        )
        assert encoded.result(20).status_code == status
        message, rows = receiver.message()
        assert (message.error_code, message.error_msg, rows) == (status, encoded.result().json()["message"], None)
    until(lambda: nothing_is_held(process))


class TestGrpc:
    """The message of `Encode` has no modality: the type in the items' `data:` URIs stands in."""

    @pytest.fixture
    def stub(self, served):
        process, *_ = served("qwen3_omni")
        with grpc.insecure_channel(grpc_target(process)) as channel:
            yield Stub(channel)

    def test_clips_and_recordings_of_one_kind(self, served, stub):
        _, whole, _ = served("qwen3_omni")
        samples, file = zoo.tone(1.3, 1), clip_files()[0]
        with Receiver() as receiver:
            stub.encode("heard", [uri("audio/wav", wav(samples, 16000))], embedding_port=[receiver.port]).result()
            message, rows = receiver.message()
            assert (message.modality, message.grid_dim.tolist()) == (Modality.AUDIO, [130])
            assert torch.equal(rows, whole.run("audio", [samples]).rows)
            stub.encode("seen", [uri("VIDEO/mp4", file)], embedding_port=[receiver.port]).result()
            message, rows = receiver.message()
            assert (message.modality, message.second_per_grid_ts.tolist()) == (Modality.VIDEO, STEP[:1])
            assert torch.equal(rows, columns(whole.run("video", [decoded(file, TAKEN["qwen3_omni"][0])])))
