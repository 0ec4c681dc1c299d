"""Feeding delivered rows to a transformers model: prompt, placeholders and encoder outputs, without any media.

The receiver's side, for every family that is served. Whatever the rows and the prompt disagree on is refused here, before
a language model sees it. Imports torch and transformers when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tectum.errors import BadRequestError, DeliveryError
from tectum.types import Embedding

#: `model_type` → the form in which the model takes its pictures' rows: one tensor an item (`items`), with deepstack layers
#: (`deepstack`), one tensor of all (`flat`), or one with a leading axis (`stacked`)
_PICTURES = {
    "qwen2_vl": "items",
    "qwen2_5_vl": "items",
    "qwen3_vl": "deepstack",
    "llava": "items",
    "llava_onevision": "items",
    "internvl": "flat",
    "gemma3": "flat",
    "idefics3": "items",
    "smolvlm": "items",
    "qwen2_5_omni_thinker": "items",
    "qwen3_omni_moe_thinker": "deepstack",
}
_VIDEOS = {**_PICTURES, "llava_onevision": "stacked"}
#: families that take the frames of a video as pictures
_VIDEO_AS_IMAGE = frozenset({"internvl", "smolvlm"})
#: mel frames that stand for so many rows, where positions are reckoned from them
_MEL_FRAMES = {
    "qwen2_5_omni_thinker": lambda rows: 4 * rows,
    "qwen3_omni_moe_thinker": lambda rows: rows // 13 * 100 + rows % 13 * 8,
}


def language_inputs(processor: Any, text: str, embedding: Embedding) -> dict[str, Any]:
    """What the model's forward needs for `text`, except pixels: the same tensors as its processor makes with the pictures.

    For pictures of the Qwen-VL families. text: a prompt with one image placeholder for each item, in order (as
    `apply_chat_template` gives it). Returns input_ids and attention_mask `[1, n]`, mm_token_type_ids `[1, n]`,
    image_grid_thw `[items, 3]`. Raises BadRequestError `invalid_request` when the prompt's placeholders are not as many
    as the items.
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


def splice(model: Any, inputs: Mapping[str, Any], embedding: Embedding, modality: str = "image") -> dict[str, Any]:
    """Arguments of `model.forward` (and `generate`) that put delivered rows where the prompt's placeholders are.

    inputs: the prompt as the model's processor expands it (input_ids `[1, n]`, attention_mask, grids, token types…),
    without pixels and spectrograms. Pictures and videos go in as `mm_encoder_outputs`, audio into the embeddings of
    the prompt. Raises DeliveryError `invalid_rows` when the rows cannot be that model's, BadRequestError
    `invalid_request` when the prompt has more or fewer placeholders than there are rows.
    """
    config = model.config
    token = _placeholder(config, modality)
    found = int((inputs["input_ids"] == token).sum())
    if found != embedding.rows.shape[0]:
        text = f"The prompt has {found} {modality} tokens for {embedding.rows.shape[0]} rows"
        raise BadRequestError("invalid_request", text)
    if modality != "audio":
        return {**inputs, "mm_encoder_outputs": mm_encoder_outputs(config, embedding, modality)}
    _check(config, embedding, 0)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    mask = (inputs["input_ids"] == token)[..., None].expand_as(embeds)
    spliced = {**inputs, "inputs_embeds": embeds.masked_scatter(mask, embedding.rows.to(embeds.dtype))}
    if config.model_type in _MEL_FRAMES:  # positions are reckoned from the ids, and from the length of each recording
        return {**spliced, "feature_attention_mask": _mel_mask(config.model_type, embedding)}
    del spliced["input_ids"]
    return spliced


def mm_encoder_outputs(config: Any, embedding: Embedding, modality: str = "image") -> dict[str, Any]:
    """The `mm_encoder_outputs` argument of the model's `forward` and `generate`, for pictures or videos.

    config: the model's config. Raises DeliveryError `invalid_rows` when the rows cannot be that model's: another
    family, width, grid or number of deepstack layers.
    """
    import torch
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    forms = _VIDEOS if modality == "video" else _PICTURES
    if config.model_type not in forms:
        known = ", ".join(forms)
        raise DeliveryError("invalid_rows", f"Rows cannot be fed to {config.model_type} yet; known: {known}")
    form = forms[config.model_type]
    layers = len(getattr(config.vision_config, "deepstack_visual_indexes", ()) or ())
    _check(config, embedding, layers)
    key = "image" if config.model_type in _VIDEO_AS_IMAGE else modality
    items = torch.split(embedding.rows, list(embedding.item_rows))
    if form == "deepstack":
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        deepstack = [torch.split(layer, list(embedding.item_rows)) for layer in embedding.deepstack]
        output = BaseModelOutputWithDeepstackFeatures(
            last_hidden_state=embedding.rows, pooler_output=items, deepstack_features=deepstack
        )
        return {key: output}
    pooled = {"items": items, "flat": embedding.rows, "stacked": embedding.rows[None]}[form]
    return {key: BaseModelOutputWithPooling(last_hidden_state=embedding.rows, pooler_output=pooled)}


def _placeholder(config: Any, modality: str) -> int:
    """The token of the prompt that a row takes the place of."""
    name = "image" if modality == "video" and config.model_type in _VIDEO_AS_IMAGE else modality
    token = getattr(config, f"{name}_token_id", None)
    if token is None:
        raise DeliveryError("invalid_rows", f"{config.model_type} has no placeholder for {modality}")
    return int(token)


def _mel_mask(model_type: str, embedding: Embedding) -> Any:
    """A mask as long as the recordings were: `[items, frames]`, so that each counts as many tokens as it has rows."""
    import torch

    lengths = torch.tensor([_MEL_FRAMES[model_type](rows) for rows in embedding.item_rows])
    return (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()


def _check(config: Any, embedding: Embedding, layers: int) -> None:
    width = config.get_text_config().hidden_size
    if embedding.width != width:
        raise DeliveryError("invalid_rows", f"Rows are {embedding.width} wide, the language model is {width} wide")
    if len(embedding.deepstack) != layers:
        text = f"The rows have {len(embedding.deepstack)} deepstack layers, the model expects {layers}"
        raise DeliveryError("invalid_rows", text)
    if not embedding.grid_thw:
        return
    merged = config.vision_config.spatial_merge_size**2
    from_grid = tuple(t * h * w // merged for t, h, w in embedding.grid_thw)
    if from_grid != embedding.item_rows:
        raise DeliveryError(
            "invalid_rows", f"Grids imply {from_grid[:8]} rows, but there are {embedding.item_rows[:8]}"
        )
