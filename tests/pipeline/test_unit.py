"""One encoder's steps: headers are read once and before anything is decoded, and what is decoded is let go."""

from __future__ import annotations

import io
import weakref

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from tectum.errors import BadRequestError
from tectum.media.decode import open_item
from tectum.media.policy import MediaPolicy
from tectum.models.load import load_adapter
from tectum.pipeline import unit as units
from tectum.pipeline.unit import EncoderUnit
from tectum.types import EncodeRequest, MediaItem, Modality, PictureInfo

POLICY = MediaPolicy()


def file_of(kind: str, width: int = 120, height: int = 90, **save: object) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, kind, **save)
    return file.getvalue()


def request(*files: bytes) -> EncodeRequest:
    return EncodeRequest("r", tuple(MediaItem(Modality.IMAGE, data=data) for data in files))


@pytest.fixture(scope="module")
def unit(tiny):
    return EncoderUnit(load_adapter(str(tiny), device="cpu"), POLICY, max_patches=4096)


@pytest.fixture
def opens(monkeypatch):
    """How often Pillow was asked to open something."""
    seen = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: seen.append(1) or real(*args, **kwargs))
    return seen


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF"])
def test_a_look_decodes_no_pixels(kind, monkeypatch):
    data = file_of(kind)

    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    assert open_item(data, Modality.IMAGE, POLICY).info == PictureInfo(120, 90)


def test_a_png_that_is_turned_is_seen_as_it_is_shown():
    exif = Image.Exif()
    exif[0x0112] = 6
    item = open_item(file_of("PNG", exif=exif), Modality.IMAGE, POLICY)
    assert item.info == PictureInfo(90, 120)
    assert item.decode(None).size == (90, 120)


def test_small_items_are_opened_once_and_give_the_same_inputs(unit, opens):
    given = request(file_of("JPEG"), file_of("PNG", 60, 60))
    looked = unit.look(given)
    assert looked.pixels == 120 * 90 + 60 * 60
    metadata, prepared = unit.prepare(given, looked)
    assert len(opens) == 2
    again, unlooked = unit.prepare(given)
    assert again == metadata
    assert all(torch.equal(prepared.inputs[name], unlooked.inputs[name]) for name in unlooked.inputs)


def test_items_that_are_large_together_are_opened_again_and_not_kept(unit, opens, monkeypatch):
    files = [file_of("JPEG"), file_of("PNG"), file_of("JPEG", 64, 64)]
    monkeypatch.setattr(units, "KEPT_OPEN_BYTES", len(files[0]))
    looked = unit.look(request(*files))
    assert [item is not None for item in looked.opened] == [True, False, False]
    unit.prepare(request(*files), looked)
    assert len(opens) == 5


def test_a_decoded_picture_is_gone_when_the_next_is_decoded(unit, monkeypatch):
    alive: list[weakref.ref] = []
    most = 0
    real = units.Looked.take

    def take(self, index):
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        item = real(self, index)
        alive.append(weakref.ref(item.decode.__closure__[0].cell_contents))
        return item

    monkeypatch.setattr(units.Looked, "take", take)
    unit.prepare(request(*[file_of("PNG")] * 4))
    assert (len(alive), most) == (4, 1), "at most the one before, which its caller still holds"


def test_what_no_forward_takes_is_refused_by_the_look(unit):
    with pytest.raises(BadRequestError) as caught:
        EncoderUnit(unit.adapter, POLICY, max_patches=100).look(request(*[file_of("JPEG")] * 3))
    assert caught.value.code == "request_too_large"
    with pytest.raises(BadRequestError) as caught:
        unit.look(request(file_of("JPEG"), b"GIF89a"))
    assert caught.value.item == 1
