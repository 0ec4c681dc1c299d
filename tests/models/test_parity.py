"""Rows equal the colocated model's to the bit: the reference is transformers' own model and processor, in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tectum.errors import BadRequestError, InternalError
from tectum.models.adapter import EncodedRows, check_finite
from tectum.models.load import load_adapter
from tests import zoo

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
SIZES = [(224, 224), (300, 140), (64, 200)]


@pytest.fixture(scope="module", params=FAMILIES)
def colocated(request, tmp_path_factory):
    folder = zoo.build(request.param, tmp_path_factory.mktemp(request.param))
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return folder, model, transformers.AutoProcessor.from_pretrained(folder), load_adapter(str(folder), device="cpu")


def pictures(count: int):
    return [zoo.picture(*SIZES[i], seed=i) for i in range(count)]


@torch.no_grad()
def reference(model, processor, media, **options):
    inputs = processor(text=[zoo.PROMPT * len(media)], images=media, return_tensors="pt", **options)
    output = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    layers = [torch.cat(list(layer)) for layer in getattr(output, "deepstack_features", None) or []]
    return inputs, torch.cat(list(output.pooler_output)), layers


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_equal_the_colocated_models_to_the_bit(colocated, count):
    _, model, processor, adapter = colocated
    inputs, rows, layers = reference(model, processor, pictures(count))
    prepared = adapter.prepare(pictures(count), {})
    (encoded,) = adapter.encode([prepared])
    adapter.check(prepared, encoded)
    check_finite(encoded.sums())
    assert torch.equal(prepared.inputs["pixel_values"], inputs["pixel_values"])
    assert [list(item.grid_thw) for item in prepared.items] == inputs["image_grid_thw"].tolist()
    assert prepared.rows == int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert torch.equal(encoded.rows, rows)
    assert len(encoded.deepstack) == len(layers) == adapter.deepstack_layers
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(encoded.deepstack, layers, strict=True))
    assert encoded.rows.std() > 0.01, "the rows say nothing"


def test_a_fused_batch_gives_each_request_its_own_rows(colocated):
    _, _, _, adapter = colocated
    one, two = adapter.prepare(pictures(1), {}), adapter.prepare(pictures(3)[1:], {})
    fused = adapter.encode([one, two])
    for prepared, together in zip([one, two], fused, strict=True):
        (alone,) = adapter.encode([prepared])
        adapter.check(prepared, together)
        torch.testing.assert_close(together.rows, alone.rows, atol=1e-5, rtol=0)
        for fused_layer, own_layer in zip(together.deepstack, alone.deepstack, strict=True):
            torch.testing.assert_close(fused_layer, own_layer, atol=1e-5, rtol=0)


def test_pixel_options_do_what_the_processor_does_with_them(colocated):
    _, model, processor, adapter = colocated
    own = processor.image_processor.size
    media, bound = pictures(1), 100 * 100
    size = {"shortest_edge": own["shortest_edge"], "longest_edge": bound}
    _, rows, _ = reference(model, processor, media, images_kwargs={"size": size})
    (encoded,) = adapter.encode([adapter.prepare(media, {"max_pixels": bound})])
    assert torch.equal(encoded.rows, rows)
    assert encoded.rows.shape[0] < adapter.prepare(media, {}).rows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pixel": 1}, "takes: detail, max_pixels, min_pixels"),
        ({"max_pixels": "big"}, "whole number"),
        ({"max_pixels": True}, "whole number"),
        ({"max_pixels": 1 << 40}, "whole number"),
        ({"min_pixels": 50_000, "max_pixels": 10_000}, "above max_pixels"),
    ],
)
def test_wrong_options_are_refused(colocated, options, words):
    with pytest.raises(BadRequestError, match=words) as refusal:
        colocated[3].prepare(pictures(1), options)
    assert refusal.value.code == "invalid_option"
    assert refusal.value.status == 400


def test_a_thin_picture_is_refused_by_its_index_with_the_limit(colocated):
    adapter = colocated[3]
    assert adapter.prepare([zoo.picture(1000, 5)], {}).rows > 0
    with pytest.raises(BadRequestError, match=r"218\.6 to 1.*200 to 1") as refusal:
        adapter.prepare([zoo.picture(64, 64), zoo.picture(1093, 5)], {})
    assert refusal.value.item == 1
    with pytest.raises(BadRequestError, match=r"sides are 2000 to 1; this family takes at most 200 to 1"):
        adapter.prepare([zoo.picture(2000, 1)], {})


def test_planted_wrong_rows_are_seen(colocated):
    adapter = colocated[3]
    prepared = adapter.prepare(pictures(1), {})
    (good,) = adapter.encode([prepared])
    total = good.rows.shape[0]
    words = f"Encoder produced {total - 1} tokens, but preprocessor metadata expected {total}"
    with pytest.raises(InternalError, match=words):
        adapter.check(prepared, EncodedRows(good.rows[:-1], good.deepstack))
    with pytest.raises(InternalError, match="config promises"):
        adapter.check(prepared, EncodedRows(good.rows.half(), good.deepstack))
    spoilt = good.rows.clone()
    spoilt[3, 5] = float("nan")
    with pytest.raises(InternalError) as caught:
        check_finite(EncodedRows(spoilt, good.deepstack).sums())
    assert caught.value.code == "non_finite_rows"


def test_bfloat16_equals_the_colocated_model_in_bfloat16(colocated):
    folder, _, processor, _ = colocated
    model = transformers.AutoModelForImageTextToText.from_pretrained(Path(folder), dtype=torch.bfloat16).eval()
    _, rows, _ = reference(model, processor, pictures(2))
    adapter = load_adapter(str(folder), device="cpu", dtype="bfloat16")
    (encoded,) = adapter.encode([adapter.prepare(pictures(2), {})])
    assert encoded.rows.dtype == torch.bfloat16
    assert torch.equal(encoded.rows, rows)
