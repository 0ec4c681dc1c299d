"""SGLang's real receiver against Tectum, and its own encoder beside it."""

from __future__ import annotations

import uuid

import httpx2
import pytest
import torch

from tectum.demo.encoder_process import EncoderProcess
from tests import zoo
from tests.compat_sglang.conftest import Peer
from tests.serving.test_native import gauges, jpeg, nothing_is_held, until
from tests.sglang.conftest import FLAGS, grpc_target
from tests.sglang.language_server import data_uri

BACKENDS = ("zmq_to_scheduler", "zmq_to_tokenizer", "mooncake")
#: largest difference between the rows of two implementations of the same tower in float32; rows are of order 1
TOLERANCE = 2e-5


def uris(pictures: list[bytes]) -> list[str]:
    return [data_uri(picture) for picture in pictures]


@pytest.mark.parametrize("number_of_encoders", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
class TestReceiver:
    @pytest.fixture
    def peer(self, peers, backend, encoders):
        return peers(backend, *(encoder.url for encoder in encoders))

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_pictures(self, peer, encoders, number, colocated):
        pictures = [jpeg(224, 224, 1), jpeg(300, 140, 2), jpeg(140, 420, 3)][:number]
        rid = uuid.uuid4().hex  # as SGLang makes them: an id that was served stays released for a while
        assert torch.equal(peer.receive({rid: uris(pictures)})[rid], colocated(pictures))
        until(lambda: all(nothing_is_held(encoder) for encoder in encoders))

    def test_several_requests_at_once(self, peer, colocated):
        pictures = {uuid.uuid4().hex: [jpeg(84 + 28 * i, 112, i), jpeg(224, 84, 50 + i)][: 1 + i % 2] for i in range(8)}
        found = peer.receive({rid: uris(items) for rid, items in pictures.items()})
        for rid, items in pictures.items():
            assert torch.equal(found[rid], colocated(items))

    def test_a_bad_picture(self, peer, backend, encoders, colocated):
        good = [jpeg(224, 224, 7)]
        bad, fine = uuid.uuid4().hex, uuid.uuid4().hex
        found = peer.receive({bad: uris([jpeg(224, 224, 6)[:-300]]), fine: uris(good)})
        assert torch.equal(found[fine], colocated(good))
        if backend != "zmq_to_tokenizer":  # what its scheduler answers the end user with
            text, code = found[bad]
            assert (code, "truncated or damaged" in text) == (400, True)
        else:  # its tokenizer gives up the request, and says no more
            assert found[bad] == ("nothing was received", None)
        until(lambda: all(nothing_is_held(encoder) for encoder in encoders))


def test_mooncake_into_memory_of_each_request(mooncakes, tiny, tmp_path, colocated, monkeypatch):
    """As SGLang receives without its pool: a buffer is registered, written to and given back for each request."""
    monkeypatch.setenv("SGLANG_EMBEDDING_POOL_SIZE_MB", "0")
    peer = Peer(tiny, "mooncake", "http", tuple(encoder.url for encoder in mooncakes), tmp_path / "log")
    try:
        for number in range(3):
            pictures = [jpeg(224, 224, number), jpeg(140, 420, 10 + number)]
            rid = uuid.uuid4().hex
            assert torch.equal(peer.receive({rid: uris(pictures)})[rid], colocated(pictures))
    finally:
        peer.close()
    assert (tmp_path / "log").read_text().count("(pool disabled)") == 3


@pytest.mark.parametrize("number", [1, 3])
def test_over_grpc(peers, encoder_grpc, colocated, number):
    """To the tokenizer: SGLang 0.5.23's own gRPC receiver for the scheduler fails before it calls any encoder."""
    pictures = [jpeg(224, 224, 1), jpeg(300, 140, 2), jpeg(140, 420, 3)][:number]
    peer = peers("zmq_to_tokenizer", f"grpc://{grpc_target(encoder_grpc)}", mode="grpc")
    rid = uuid.uuid4().hex
    assert torch.equal(peer.receive({rid: uris(pictures)})[rid], colocated(pictures))
    until(lambda: nothing_is_held(encoder_grpc))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_both_encoders_give_the_receiver_the_same_rows(family, peers, own_encoder, tmp_path):
    """Qwen3-VL's rows carry its deepstack layers as further columns: their order is SGLang's.

    Qwen2-VL is left out: SGLang 0.5.23's own encoder does not load it with transformers 5.
    """
    model = zoo.build(family, tmp_path / family)
    pictures = uris([jpeg(224, 224, 1), jpeg(320, 160, 2)])
    theirs = peers("zmq_to_scheduler", own_encoder(model), model=model).receive({"r": pictures})["r"]
    with EncoderProcess(model, *FLAGS) as process:
        ours = peers("zmq_to_scheduler", process.url, model=model).receive({"r": pictures})["r"]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < TOLERANCE


def test_a_receiver_that_leaves_is_no_trouble(peers, encoder_a):
    before = gauges(encoder_a).get('encoder_releases_total{reason="delivered"}', 0)
    peers("zmq_to_scheduler", encoder_a.url).receive({"last": uris([jpeg()])})
    until(lambda: gauges(encoder_a).get('encoder_releases_total{reason="delivered"}', 0) == before + 1)
    assert httpx2.get(encoder_a.url + "/health").status_code == 200
