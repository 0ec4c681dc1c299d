"""`--compile`: off unless asked for; then rows are near those of the model in one piece, and no cache mistakes them."""

from __future__ import annotations

import shutil

import pytest
import torch

from tectum.errors import StartupError
from tectum.media.policy import MediaPolicy
from tectum.models.features import towers
from tectum.models.load import load_adapter
from tectum.models.revision import encoder_revision
from tectum.pipeline.unit import EncoderUnit
from tests import zoo


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(zoo.build("llava", tmp_path_factory.mktemp("llava") / "model"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.timeout(240)
def test_compiled_towers_give_nearly_the_same_rows_under_another_revision(checkpoint):
    plain, compiled = load_adapter(checkpoint, device="cpu"), load_adapter(checkpoint, device="cpu", compile=True)
    EncoderUnit(compiled, MediaPolicy(), 1 << 20).warm_up()
    for size in ((80, 60), (120, 200)):
        prepared = plain.prepare([zoo.picture(*size)], {})
        (expected,), (found,) = plain.encode([prepared]), compiled.encode([prepared])
        torch.testing.assert_close(found.rows, expected.rows, rtol=0, atol=1e-4)
    assert (plain.compiled, compiled.compiled) == (False, True)
    assert encoder_revision(plain) != encoder_revision(compiled)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen3_vl", ["Qwen3VLVisionModel"]),
        ("llava", ["CLIPVisionModel", "LlavaMultiModalProjector"]),
        ("qwen2_5_omni", ["Qwen2_5OmniAudioEncoder", "Qwen2_5OmniVisionEncoder"]),
        ("whisper", ["WhisperEncoder"]),
    ],
)
def test_the_towers_are_what_holds_the_weights(family, parts, tmp_path):
    adapter = load_adapter(str(zoo.build(family, tmp_path / "model")), device="cpu")
    found = towers(adapter.model)
    assert sorted(type(part).__name__ for part in found) == parts
    held = sum(parameter.numel() for part in found for parameter in part.parameters())
    assert held == sum(parameter.numel() for parameter in adapter.model.parameters())


def test_where_nothing_can_be_compiled_the_start_says_what_is_missing(checkpoint, monkeypatch):
    adapter = load_adapter(checkpoint, device="cpu", compile=True)

    def no_compiler(batch):
        raise RuntimeError("No working C++ compiler found in /usr/lib")

    monkeypatch.setattr(adapter, "encode", no_compiler)
    with pytest.raises(StartupError) as caught:
        EncoderUnit(adapter, MediaPolicy(), 1 << 20).warm_up()
    assert (caught.value.code, "C++ compiler" in str(caught.value)) == ("missing_dependency", True)
    assert "/usr/lib" not in str(caught.value)
