"""The example of docs/adding-a-family.md is a real adapter: registered, loaded, and equal to the model in one piece."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import torch
import transformers

from tectum.models import registry
from tectum.models.document import render
from tectum.models.load import load_adapter
from tectum.models.tiny import TEXT, byte_tokenizer, save_random
from tectum.types import PictureInfo
from tests import zoo

ROOT = Path(__file__).parents[2]


def example() -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / "docs" / "adding-a-family.md").read_text(), re.DOTALL)[1]


def paligemma(folder: Path) -> Path:
    tokenizer = byte_tokenizer({"image_token": "<image>"})
    config = transformers.PaliGemmaConfig(
        vision_config={**zoo.SIGLIP, "projection_dim": 64},
        text_config={**TEXT, "model_type": "gemma", "head_dim": 16},
        projection_dim=64,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    pictures = transformers.SiglipImageProcessor(size={"height": 56, "width": 56})
    return save_random(transformers.PaliGemmaForConditionalGeneration, config, pictures, folder, 0)


def test_the_example_is_short_and_equal_to_the_model_in_one_piece(tmp_path, monkeypatch):
    source = example()
    assert len(source.splitlines()) < 60
    module = types.ModuleType("tectum.models.paligemma")
    exec(compile(source, "docs/adding-a-family.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.FAMILIES, "paligemma", ("paligemma", "PaliGemmaAdapter"))
    folder = paligemma(tmp_path)
    adapter = load_adapter(str(folder), device="cpu")
    media = [zoo.picture(90, 60, 1), zoo.picture(40, 80, 2)]
    prepared = adapter.prepare(media, {})
    (encoded,) = adapter.encode([prepared])
    adapter.check(prepared, encoded)
    whole = transformers.PaliGemmaForConditionalGeneration.from_pretrained(folder).eval()
    pixels = transformers.AutoImageProcessor.from_pretrained(folder)(images=media, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = whole.model.get_image_features(pixels).pooler_output
    assert torch.equal(encoded.rows, torch.cat([part.reshape(-1, 64) for part in expected]))
    assert adapter.plan([PictureInfo(90, 60)], {})[0].rows == prepared.items[0].rows == 16


def test_the_page_of_models_is_that_of_the_adapters():
    assert (ROOT / "docs" / "models.md").read_text() == render()
