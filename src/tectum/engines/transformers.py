"""Feeding delivered rows to a transformers model: prompt, placeholders and encoder outputs, without any picture.

The receiver's side of the Qwen-VL families. Whatever the rows and the prompt disagree on is refused here, before a
language model sees it. Imports torch and transformers when it is called.
"""

from __future__ import annotations

from typing import Any

from tectum.errors import BadRequestError, DeliveryError
from tectum.types import Embedding

#: `model_type` in the model's config → whether deepstack layers belong to its rows
FAMILIES = {"qwen2_vl": False, "qwen2_5_vl": False, "qwen3_vl": True}


def language_inputs(processor: Any, text: str, embedding: Embedding) -> dict[str, Any]:
    """What the model's forward needs for `text`, except pixels: the same tensors as its processor makes with the pictures.

    text: a prompt with one image placeholder for each item, in order (as `apply_chat_template` gives it).
    Returns input_ids and attention_mask `[1, n]`, mm_token_type_ids `[1, n]`, image_grid_thw `[items, 3]`.
    Raises BadRequestError `invalid_request` when the prompt's placeholders are not as many as the items.
    """
    import torch

    token = processor.image_token
    pieces = text.split(token)
    if len(pieces) - 1 != len(embedding.item_rows):
        found, expected = len(pieces) - 1, len(embedding.item_rows)
        raise BadRequestError("invalid_request", f"The prompt has {found} image placeholders for {expected} items")
    spans = [token * rows for rows in embedding.item_rows]
    expanded = pieces[0] + "".join(span + piece for span, piece in zip(spans, pieces[1:], strict=True))
    encoded = processor.tokenizer([expanded], return_tensors="pt")
    ids = encoded["input_ids"]
    placeholders = ids == processor.image_token_id
    if int(placeholders.sum()) != sum(embedding.item_rows):
        text = f"The prompt has {int(placeholders.sum())} image tokens for {sum(embedding.item_rows)} rows"
        raise BadRequestError("invalid_request", text)
    return {
        "input_ids": ids,
        "attention_mask": encoded["attention_mask"],
        "mm_token_type_ids": placeholders.to(torch.int32).to(ids.dtype),
        "image_grid_thw": torch.tensor(embedding.grid_thw, dtype=torch.long),
    }


def mm_encoder_outputs(config: Any, embedding: Embedding) -> dict[str, Any]:
    """The `mm_encoder_outputs` argument of the model's `forward` and `generate`.

    config: the model's config. Raises DeliveryError `invalid_rows` when the rows cannot be that model's: another
    family, width, grid or number of deepstack layers.
    """
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise DeliveryError("invalid_rows", f"Rows cannot be fed to {config.model_type} yet; known: {known}")
    _check(config, embedding)
    items = torch.split(embedding.rows, list(embedding.item_rows))
    if not FAMILIES[config.model_type]:
        return {"image": BaseModelOutputWithPooling(last_hidden_state=embedding.rows, pooler_output=items)}
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    layers = [torch.split(layer, list(embedding.item_rows)) for layer in embedding.deepstack]
    output = BaseModelOutputWithDeepstackFeatures(
        last_hidden_state=embedding.rows, pooler_output=items, deepstack_features=layers
    )
    return {"image": output}


def _check(config: Any, embedding: Embedding) -> None:
    width = config.get_text_config().hidden_size
    if embedding.width != width:
        raise DeliveryError("invalid_rows", f"Rows are {embedding.width} wide, the language model is {width} wide")
    layers = len(getattr(config.vision_config, "deepstack_visual_indexes", ()) or ())
    if len(embedding.deepstack) != layers:
        text = f"The rows have {len(embedding.deepstack)} deepstack layers, the model expects {layers}"
        raise DeliveryError("invalid_rows", text)
    merged = config.vision_config.spatial_merge_size**2
    from_grid = tuple(t * h * w // merged for t, h, w in embedding.grid_thw)
    if from_grid != embedding.item_rows:
        raise DeliveryError(
            "invalid_rows", f"Grids imply {from_grid[:8]} rows, but there are {embedding.item_rows[:8]}"
        )
