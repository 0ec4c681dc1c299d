"""The messages, read back by an independent unpickler and taken apart by pickletools."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tectum.delivery.sglang_frames import embedding_message, error_message, names_of, part_of
from tectum.errors import CODES, BadRequestError, StartupError, error_class
from tectum.types import ItemMetadata, Modality, RequestMetadata
from tests.sglang import receiver

NAMES = names_of("0.5.23")


def metadata(dtype: str = "bfloat16", layers: int = 0, modality: Modality = Modality.IMAGE) -> RequestMetadata:
    items = (ItemMetadata(modality, 64, (1, 16, 16), 256), ItemMetadata(modality, 4, (1, 4, 4), 16))
    return RequestMetadata("rid_local_part_1", 3, 1, items, 32, layers, dtype)


def test_the_receiver_reads_what_was_meant():
    message = receiver.read(embedding_message(metadata(), NAMES))
    assert vars(message) == {
        "req_id": "rid_local_part_1",
        "num_parts": 3,
        "part_idx": 1,
        "grid_dim": [[1, 16, 16], [1, 4, 4]],
        "modality": receiver.Modality.IMAGE,
        "embedding": None,
        "send_time": None,
        "dtype": torch.bfloat16,
        "shape": [68, 32],
        "error_msg": None,
        "error_code": None,
    }


def test_deepstack_layers_are_further_columns():
    assert receiver.read(embedding_message(metadata("float32", layers=3), NAMES)).shape == [68, 128]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO])
def test_every_dtype_and_modality_that_has_a_grid(dtype, modality):
    message = receiver.read(embedding_message(metadata(dtype, modality=modality), NAMES))
    assert (message.dtype, message.modality.name.lower()) == (getattr(torch, dtype), modality)


def test_clips_say_when_their_steps_are():
    """Lengths of steps as a tensor, or times as lists: what the receivers of Qwen2.5-VL and of Qwen3-VL count with."""
    items = (
        ItemMetadata(Modality.VIDEO, 8, (2, 4, 4), 32, second_per_grid=1.0, timestamps=(0.25, 1.25)),
        ItemMetadata(Modality.VIDEO, 4, (1, 4, 4), 16, second_per_grid=0.5, timestamps=(0.125,)),
    )
    message = receiver.read(embedding_message(RequestMetadata("r", 1, 0, items, 32, 0, "float32"), NAMES))
    assert message.grid_dim == [[2, 4, 4], [1, 4, 4]]
    assert message.second_per_grid_ts.dtype is torch.float32
    assert message.second_per_grid_ts.tolist() == [1.0, 0.5]
    assert not hasattr(message, "video_timestamps")
    written = tuple(replace(item, facts={"timestamps_in_prompt": True}) for item in items)
    message = receiver.read(embedding_message(RequestMetadata("r", 1, 0, written, 32, 0, "float32"), NAMES))
    assert message.video_timestamps == [[0.25, 1.25], [0.125]]
    assert not hasattr(message, "second_per_grid_ts")


def test_clips_of_a_family_without_steps_have_no_lengths():
    items = (ItemMetadata(Modality.VIDEO, 8, (2, 4, 4), 32),)
    message = receiver.read(embedding_message(RequestMetadata("r", 1, 0, items, 32, 0, "float32"), NAMES))
    assert not hasattr(message, "second_per_grid_ts")


def test_recordings_are_counted_by_the_frames_of_their_spectrograms():
    """SGLang's receiver works the rows out of them; where a family has no such count, rows stand in."""
    items = (
        ItemMetadata(Modality.AUDIO, 25, None, 50, facts={"mel_frames": 100}),
        ItemMetadata(Modality.AUDIO, 13, None, 26),
    )
    message = receiver.read(embedding_message(RequestMetadata("r", 1, 0, items, 32, 0, "float32"), NAMES))
    assert (message.grid_dim.dtype, message.grid_dim.tolist()) == (torch.int64, [100, 13])


def test_an_error_carries_its_text_and_its_status():
    error = BadRequestError("media_decode_failed", "The picture is damaged – ünïcode", item=1)
    message = receiver.read(error_message("rid_local_part_2", error, NAMES))
    assert (message.req_id, message.error_msg, message.error_code) == ("rid_local_part_2", error.message, 400)
    assert (message.part_idx, message.num_parts) == (2, 3)
    assert (message.grid_dim, message.dtype, message.shape) == (None, None, None)


def test_every_code_has_a_status_that_the_receiver_can_convert():
    for code in CODES:
        receiver.read(error_message("r", error_class(code)(code, "text"), NAMES))  # HTTPStatus() is in there


def test_only_the_protocols_names_and_opcodes_stand_in_a_message():
    for data in (
        embedding_message(metadata(), NAMES),
        error_message("r", BadRequestError("invalid_base64", "x"), NAMES),
    ):
        seen = list(pickletools.genops(data))
        names = {argument for opcode, argument, _ in seen if opcode.name == "GLOBAL"}
        assert names <= {
            "sglang.srt.disaggregation.encoder.receiver EmbeddingData",
            "sglang.srt.multimodal.modality Modality",
            "torch bfloat16",
        }
        assert max(opcode.proto for opcode, _, _ in seen) <= 2
        assert [opcode.name for opcode, _, _ in seen].count("REDUCE") == 1  # the modality


def test_hostile_text_stays_text():
    name = "rid\n.cos\nsystem\n(S'true'\ntR."
    message = receiver.read(error_message(name, BadRequestError("invalid_request", name), NAMES))
    assert message.req_id == name


@pytest.mark.parametrize(
    ("version", "module", "modality"),
    [
        ("0.5.12", "sglang.srt.disaggregation.encode_receiver", "sglang.srt.managers.schedule_batch"),
        ("0.5.18", "sglang.srt.disaggregation.encode_receiver", "sglang.srt.managers.schedule_batch"),
        ("0.5.19", "sglang.srt.disaggregation.encoder.receiver", "sglang.srt.managers.schedule_batch"),
        ("0.5.22", "sglang.srt.disaggregation.encoder.receiver", "sglang.srt.managers.schedule_batch"),
        ("0.5.23", "sglang.srt.disaggregation.encoder.receiver", "sglang.srt.multimodal.modality"),
        ("0.6.0", "sglang.srt.disaggregation.encoder.receiver", "sglang.srt.multimodal.modality"),
    ],
)
def test_the_names_follow_the_release(version, module, modality):
    names = ((module, "EmbeddingData"), (modality, "Modality"))
    assert receiver.read(embedding_message(metadata(), names_of(version)), names).shape == [68, 32]
    with pytest.raises(KeyError):
        receiver.read(embedding_message(metadata(), names_of(version)), (("other", "EmbeddingData"), names[1]))


@pytest.mark.parametrize("version", ["0.5.11", "0.4.10", "newest", "0.5", ""])
def test_a_release_that_is_not_served_is_refused(version):
    with pytest.raises(StartupError) as caught:
        names_of(version)
    assert caught.value.code == "invalid_settings"


@pytest.mark.parametrize(
    ("req_id", "part"),
    [("r_local_part_7", 7), ("r", 0), ("r_local_part_", 0), ("r_local_part_x", 0), ("a_local_part_1_local_part_2", 2)],
)
def test_parts_of_ids(req_id, part):
    assert part_of(req_id) == part


def test_neither_sglang_nor_torch_is_needed_to_write_them():
    program = (
        "import sys\nfrom tectum.delivery.sglang_frames import *\nfrom tectum.delivery import base\n"
        "error_message('r', TectumError('internal', 'x'), names_of('0.5.23'))\n"
        "print([name for name in ('torch', 'numpy', 'sglang', 'pickle', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_stand_in_refuses_what_sglang_refuses():
    with pytest.raises(KeyError):
        receiver.read(pickle.dumps(print))
