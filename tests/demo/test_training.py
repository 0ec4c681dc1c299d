"""What training computes is what transformers computes: ids, positions, pixels, rows and logits of the stock path."""

from __future__ import annotations

from random import Random

import pytest
import torch

from demo import architecture, examples, forward
from tectum.demo import scenes

QUESTION = "What is in each picture?"


@pytest.fixture(scope="module")
def tokenizer():
    return architecture.build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return architecture.build_model(tokenizer).eval()


def draw(seed: int) -> tuple[examples.Picture, object]:
    """The same scene twice: as training has it, and as a PIL picture."""
    rng = Random(seed)
    picture = scenes.draw(scenes.random_scene(rng), rng)
    return examples.draw_picture(Random(seed)), picture


@torch.inference_mode()
def test_the_training_path_equals_the_stock_path(tokenizer, model):
    processor = architecture.build_processor(tokenizer)
    pictures, stock = zip(*(draw(seed) for seed in (0, 1)), strict=True)
    assert pictures[0].grid != pictures[1].grid
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=list(stock), return_tensors="pt")
    asked = scenes.Question("each", QUESTION, "first: a red star in the middle; second: two")
    prompt = examples.PromptWriter(tokenizer).write((0, 1), pictures, [asked])

    asked_tokens = inputs["input_ids"].shape[1]
    assert prompt.ids[:asked_tokens].tolist() == inputs["input_ids"][0].tolist()
    assert tokenizer.decode(prompt.ids[prompt.answers]) == asked.answer + "<|im_end|>"
    pixels = inputs["pixel_values"].view(-1, 3, 2, 196)
    mine = torch.cat([examples.normalise([picture.patches])[0] for picture in pictures])
    for frame in (0, 1):
        assert torch.allclose(mine, pixels[:, :, frame].flatten(1), atol=1e-6)

    batch = examples.batch([prompt], tokenizer.pad_token_id)
    ids = {
        "input_ids": batch.ids,
        "attention_mask": torch.ones_like(batch.ids),
        "mm_token_type_ids": (batch.ids == model.config.image_token_id).int(),
    }
    grid = inputs["image_grid_thw"]
    positions, _ = model.model.get_rope_index(batch.ids, ids["mm_token_type_ids"], image_grid_thw=grid)
    assert torch.equal(positions, batch.positions)

    rows = torch.cat(
        [forward.tower_rows(model.model.visual, examples.normalise([p.patches]), *p.grid) for p in pictures]
    )
    stock_rows = torch.cat(list(model.get_image_features(inputs["pixel_values"], grid).pooler_output))
    assert torch.allclose(rows, stock_rows, atol=1e-5)
    stock_logits = model(**ids, pixel_values=inputs["pixel_values"], image_grid_thw=grid).logits[0]
    wanted = stock_logits[:-1][batch.answers[0, 1:]]
    model.config.text_config._attn_implementation = "demo_training"
    try:
        mine = forward.answer_logits(model, batch.ids, batch.positions, rows, batch.answers)
    finally:
        model.config.text_config._attn_implementation = "sdpa"
    assert torch.allclose(mine, wanted, atol=1e-4)


def test_cells_are_labelled_with_the_shape_that_covers_them():
    picture, _ = draw(3)
    colors = {1 + examples.COLORS.index(shape.color) for shape in picture.scene.shapes}
    places = {examples.PLACES.index(picture.scene.place(shape)) for shape in picture.scene.shapes}
    height, width = (side // 2 for side in picture.grid)
    assert picture.labels.shape == (height * width, 3)
    assert set(picture.labels[:, 0]) - {0, examples.IGNORED} == colors
    assert set(picture.labels[:, 2]) - {examples.IGNORED} == places


def test_one_word_is_one_token_and_any_text_comes_back(tokenizer):
    sentence = "an orange star in the middle and a blue square at the bottom"
    assert len(tokenizer(sentence).input_ids) - len(sentence.split()) <= 1  # "an" has no space before it
    assert tokenizer.decode(tokenizer("Zwölf 図 €").input_ids) == "Zwölf 図 €"


def test_head_sizes_fit_the_engines(model):
    text, vision = model.config.text_config, model.config.vision_config
    assert text.hidden_size // text.num_attention_heads in (32, 64)
    assert vision.hidden_size // vision.num_heads in (32, 64)
    assert sum(weight.numel() for weight in model.parameters()) <= 3_000_000
