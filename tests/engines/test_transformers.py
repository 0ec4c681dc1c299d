"""Delivered rows in the language model: bitwise the logits of the model in one piece, without a tower."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from tectum.engines.transformers import language_inputs, mm_encoder_outputs
from tectum.errors import BadRequestError, DeliveryError
from tectum.models.load import load_adapter
from tectum.types import Embedding
from tests import zoo

PICTURES = [zoo.picture(224, 224, 1), zoo.picture(140, 90, 2)]
PROMPT = zoo.PROMPT * 2 + " what?"


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def both(request, tmp_path_factory):
    folder = zoo.build(request.param, tmp_path_factory.mktemp(request.param))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    receiver = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    del receiver.model.visual
    adapter = load_adapter(str(folder), device="cpu")
    prepared = adapter.prepare(PICTURES, {})
    (encoded,) = adapter.encode([prepared])
    items = prepared.items
    embedding = Embedding(
        encoded.rows, tuple(i.rows for i in items), tuple(i.grid_thw for i in items), encoded.deepstack, "float32"
    )
    return processor, model, receiver, embedding


@torch.inference_mode()
def test_inputs_and_logits_equal_the_model_in_one_piece(both):
    processor, model, receiver, embedding = both
    expected = processor(text=[PROMPT], images=PICTURES, return_tensors="pt")
    inputs = language_inputs(processor, PROMPT, embedding)
    for name, tensor in inputs.items():
        assert torch.equal(tensor, expected[name]), name
    outputs = mm_encoder_outputs(receiver.config, embedding)
    logits = receiver(**inputs, mm_encoder_outputs=outputs).logits
    assert torch.equal(logits, model(**expected).logits)
    swapped = dataclasses.replace(embedding, rows=embedding.rows.flip(0))
    other = receiver(**inputs, mm_encoder_outputs=mm_encoder_outputs(receiver.config, swapped)).logits
    assert not torch.equal(other, logits), "the rows do not matter?"


def test_what_does_not_fit_is_refused(both):
    processor, _, receiver, embedding = both
    with pytest.raises(BadRequestError, match="1 image placeholders for 2 items"):
        language_inputs(processor, zoo.PROMPT, embedding)
    narrow = dataclasses.replace(
        embedding, rows=embedding.rows[:, :32], deepstack=tuple(d[:, :32] for d in embedding.deepstack)
    )
    with pytest.raises(DeliveryError, match="32 wide"):
        mm_encoder_outputs(receiver.config, narrow)
    with pytest.raises(DeliveryError, match="deepstack"):
        mm_encoder_outputs(receiver.config, dataclasses.replace(embedding, deepstack=(embedding.rows,) * 7))
    with pytest.raises(DeliveryError, match="Grids imply"):
        mm_encoder_outputs(receiver.config, dataclasses.replace(embedding, grid_thw=embedding.grid_thw[::-1]))
    with pytest.raises(DeliveryError, match="cannot be fed to llama"):
        mm_encoder_outputs(transformers.LlamaConfig(), embedding)
