"""An encoder on its device: what a forward leaves in the slots, and what it waits for. On the CPU, and on CUDA where there is one."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers

from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.client import Client
from tectum.media.policy import MediaPolicy
from tectum.models.load import load_adapter
from tectum.pipeline.encoder import Encoder
from tectum.pipeline.unit import EncoderUnit
from tectum.types import EncodeRequest, MediaItem, Modality
from tests import zoo

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def unit(request, tiny) -> EncoderUnit:
    made = EncoderUnit(load_adapter(str(tiny), device=request.param), MediaPolicy(), max_patches=4096)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def reference(unit, tiny):
    """From a picture to the bytes of its rows, by transformers' own model on the same device."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32).eval()
    model = model.to(unit.adapter.device)
    processor = transformers.AutoProcessor.from_pretrained(tiny)

    @torch.no_grad()
    def rows(picture) -> bytes:
        inputs = processor(text=[zoo.PROMPT], images=[picture], return_tensors="pt").to(model.device)
        output = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return torch.cat(list(output.pooler_output)).cpu().numpy().tobytes()

    return rows


def pictures(count: int) -> list:
    return [zoo.picture(112 + 28 * number, 140, seed=number) for number in range(count)]


def png(picture) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as recording:
        recording.setparams((1, 2, 16000, 0, "NONE", ""))
        recording.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def prepared(unit: EncoderUnit, modality: Modality, *files: bytes):
    """One request, ready for its forward, and a slot for its rows."""
    request = EncodeRequest("r", tuple(MediaItem(modality, data=data) for data in files))
    metadata, inputs = unit.prepare(request)
    return inputs, bytearray(metadata.nbytes)


def of_picture(unit: EncoderUnit, picture):
    return prepared(unit, Modality.IMAGE, png(picture))


def test_rows_in_their_slots_equal_the_model_in_one_piece(unit, reference):
    for picture in pictures(3):
        inputs, slot = of_picture(unit, picture)
        assert unit.forward([inputs], [memoryview(slot)]).wait() == [None]
        assert slot == reference(picture)


def test_forwards_follow_one_another_before_their_rows_have_landed(unit, reference):
    """On a device the copies run beside later forwards: none may see memory that another has taken over."""
    shown = pictures(4)
    work = [of_picture(unit, picture) for picture in shown * 8]
    landings = [unit.forward([inputs], [memoryview(slot)]) for inputs, slot in work]
    assert [landing.wait() for landing in reversed(landings)] == [[None]] * len(work)
    expected = [reference(picture) for picture in shown]
    assert [slot == rows for (_, slot), rows in zip(work, expected * 8, strict=True)] == [True] * len(work)


def test_rows_that_are_not_finite_fail_alone(unit, reference, monkeypatch):
    encode = unit.adapter.encode

    @torch.inference_mode()
    def spoilt(batch):
        found = encode(batch)
        found[1].rows[2, 3] = float("inf")
        return found

    monkeypatch.setattr(unit.adapter, "encode", spoilt)
    shown = pictures(3)
    (one, first), (two, second), (three, third) = (of_picture(unit, picture) for picture in shown)
    landing = unit.forward([one, two, three], [memoryview(slot) for slot in (first, second, third)])
    assert [error and error.code for error in landing.wait()] == [None, "non_finite_rows", None]
    assert second == bytearray(len(second)), "nothing of it was written"
    for slot, picture in ((first, shown[0]), (third, shown[2])):
        rows, alone = (np.frombuffer(data, np.float32) for data in (bytes(slot), reference(picture)))
        np.testing.assert_allclose(rows, alone, atol=1e-5, rtol=0)


# --- on CUDA alone ---


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(zoo.FAMILIES))
def test_a_forward_waits_for_nothing(family, tmp_path):
    unit = EncoderUnit(load_adapter(str(zoo.build(family, tmp_path)), device="cuda"), MediaPolicy(), 1 << 20)
    unit.warm_up()
    if Modality.IMAGE in unit.adapter.modalities:
        work = of_picture(unit, zoo.picture(112, 112))
    else:
        work = prepared(unit, Modality.AUDIO, wav(zoo.tone(1.0)))
    inputs, slot = work
    with waiting_is_an_error():
        landing = unit.forward([inputs], [memoryview(slot)])
    assert landing.wait() == [None]
    assert any(slot)


@pytest.mark.gpu
def test_a_server_on_a_device_gives_the_rows_of_an_encoder_on_it(tiny):
    shown = pictures(3)
    with EncoderProcess(tiny, "--device", "cuda") as server, Client(server.url) as client:
        served = [client.encode([picture]).rows for picture in shown]
        assert client._http.get("/v1/models").json()["data"][0]["device"].startswith("cuda")
    with Encoder(str(tiny), device="cuda") as encoder:
        assert all(np.array_equal(rows, encoder.encode([one]).rows) for rows, one in zip(served, shown, strict=True))
