"""The Python receiver, end to end: a server process that writes into this one's memory."""

from __future__ import annotations

import pytest
import torch

from tectum.delivery.sglang_frames import embedding_message, error_message, names_of
from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.receiver import MooncakeReceiver, Part, element_type, fields_of
from tectum.errors import BadRequestError, DeliveryError, LifecycleError, TectumError
from tectum.types import ItemMetadata, Modality, RequestMetadata
from tests import zoo
from tests.serving.test_native import jpeg, nothing_is_held, until
from tests.sglang.conftest import colocated, encoder_a
from tests.sglang.language_server import LanguageServer
from tests.sglang.receiver import MOONCAKE_MISSING

__all__ = ["colocated", "encoder_a"]  # fixtures
FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--transfer-backend", "mooncake")


def part(encoder, rid, index=0):
    return Part(encoder.url, f"{rid}_local_part_{index}", index)


class TestFields:
    def test_of_a_completion_message(self):
        item = ItemMetadata(Modality.IMAGE, 64, (1, 16, 16), 256)
        message = embedding_message(RequestMetadata("r", 2, 1, (item,), 32, 0, "bfloat16"), names_of("0.5.23"))
        found = fields_of(message)
        assert {name: found[name] for name in ("req_id", "num_parts", "part_idx", "dtype", "error_msg")} == {
            "req_id": "r",
            "num_parts": 2,
            "part_idx": 1,
            "dtype": "bfloat16",
            "error_msg": None,
        }

    def test_of_an_error(self):
        found = fields_of(error_message("r", BadRequestError("image_too_large", "no"), names_of("0.5.23")))
        assert (found["error_msg"], found["error_code"]) == ("no", 413)

    @pytest.mark.parametrize("message", [b"", b"\x80", b"nonsense", b"\x80\x02X\xff\xff\xff\x7f"])
    def test_of_nonsense(self, message):
        with pytest.raises(DeliveryError):
            fields_of(message)

    def test_nothing_in_a_message_is_run(self, tmp_path):
        target = tmp_path / "made"
        bomb = b"\x80\x02cos\nmkdir\nX" + len(str(target)).to_bytes(4, "little") + str(target).encode() + b"\x85R."
        fields_of(bomb)
        assert not target.exists()


def test_parts_are_of_one_known_type():
    assert element_type({"bfloat16"}) == "bfloat16"
    for named in ({"float32", "float16"}, {"None"}, set()):
        with pytest.raises(DeliveryError, match="not of one known type"):
            element_type(named)


@pytest.fixture(scope="module")
def server(tiny):
    pytest.importorskip("mooncake.engine", reason=MOONCAKE_MISSING, exc_type=ImportError)
    with EncoderProcess(tiny, *FLAGS, "--send-timeout", "3", "--unknown-id-wait", "0.5") as process:
        yield process


@pytest.fixture(scope="module")
def language_server(server):
    with LanguageServer(server.url) as made:
        yield made


def test_one_rank(server, language_server, colocated):
    pictures = [jpeg(224, 224, 1), jpeg(300, 140, 2)]
    with MooncakeReceiver() as receiver:
        encoded = language_server.encode("one", pictures)
        found = receiver.receive([part(server, "one")])
    assert torch.equal(torch.from_numpy(found.array()), colocated(pictures))
    assert encoded[0].result(20).status_code == 200
    until(lambda: nothing_is_held(server))


def test_two_ranks_get_a_copy_each_and_the_rows_are_kept_for_both(server, language_server, colocated):
    picture = jpeg(224, 224, 3)
    with MooncakeReceiver() as one, MooncakeReceiver() as two:
        encoded = language_server.encode("two", [picture])
        for receiver in (one, two):
            assert not encoded[0].done()
            found = receiver.receive([part(server, "two")], receive_count=2)
            assert torch.equal(torch.from_numpy(found.array()), colocated([picture]))
    assert encoded[0].result(20).status_code == 200
    until(lambda: nothing_is_held(server))
    with MooncakeReceiver() as late, pytest.raises(LifecycleError) as caught:
        late.receive([part(server, "two")])
    assert (caught.value.status, caught.value.details["reason"]) == (410, "delivered")


def test_parts_lie_one_behind_the_other(server, tiny, colocated):
    pictures = [jpeg(224, 224, 4), jpeg(140, 280, 5), jpeg(448, 224, 6)]
    with (
        EncoderProcess(tiny, *FLAGS) as other,
        LanguageServer(server.url, other.url) as both,
        MooncakeReceiver() as receiver,
    ):
        encoded = both.encode("parts", pictures)
        found = receiver.receive([part(server, "parts", 0), part(other, "parts", 1)])
        assert torch.equal(torch.from_numpy(found.array()), colocated(pictures))
        assert {answer.result(20).status_code for answer in encoded} == {200}


def test_a_bad_picture_is_the_receivers_to_know(server, language_server):
    with MooncakeReceiver() as receiver:
        language_server.encode("bad", [jpeg()[:-300]])
        with pytest.raises(TectumError) as caught:
            receiver.receive([part(server, "bad")])
    assert (caught.value.status, caught.value.code, caught.value.item) == (400, "media_decode_failed", 0)


def test_a_send_to_memory_that_is_not_there_fails_with_its_reason(server, language_server):
    with MooncakeReceiver() as receiver:
        encoded = language_server.encode("lost", [jpeg()])
        target = {"prefill_host": "127.0.0.1", "embedding_port": receiver.port, "session_id": "127.0.0.1:9"}
        answer = language_server.post("/send", {"req_id": "lost_local_part_0", **target, "buffer_address": 4096})
        assert (answer.status_code, answer.json()["code"]) == (502, "send_failed")
        assert "Mooncake" in answer.json()["message"]
        assert encoded[0].result(20).status_code == 502
        answer = language_server.post("/send", {"req_id": "lost_local_part_0", **target, "session_id": None})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    until(lambda: nothing_is_held(server))


def test_deepstack_layers_come_as_columns(tmp_path):
    pytest.importorskip("mooncake.engine", reason=MOONCAKE_MISSING, exc_type=ImportError)
    model = zoo.build("qwen3_vl", tmp_path / "qwen3")
    from tectum import Encoder

    with Encoder(str(model), forward_threads=1) as encoder:
        here = encoder.encode([jpeg(224, 224, 7)])
    with (
        EncoderProcess(model, *FLAGS) as process,
        LanguageServer(process.url) as asking,
        MooncakeReceiver() as receiver,
    ):
        asking.encode("deep", [jpeg(224, 224, 7)])
        found = receiver.receive([part(process, "deep")])
    assert torch.equal(torch.from_numpy(found.array()), torch.cat([here.rows, *here.deepstack], dim=1))
