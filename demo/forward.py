"""The model's forward as training needs it: equal to transformers' own in what it computes, and several times faster on a CPU.

Owns no weights: it reads those of a `Qwen2_5_VLForConditionalGeneration`. `tests/demo` holds it equal to the stock path.

What makes it fast: pictures of one size are one batch (the stock tower attends to them one after the other); the two
halves of a temporal patch are the same picture, so their weights are added before the product; products are bfloat16
where autocast is on, but attention is float32, whose backward is several times faster on a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

PATCH = 14
CELL = 2 * PATCH


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scaled dot product attention in float32, whatever autocast says."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)


def _language_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention for right-padded batches: what is padded comes last, so no mask is needed."""
    output = attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


AttentionInterface.register("demo_training", _language_attention)


@cache
def _places(height: int, width: int) -> Tensor:
    """Row and column of each patch `[patches, 2]` in the processor's order: 2 × 2 blocks, row by row."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([y, x], -1).view(height // 2, 2, width // 2, 2, 2)
    return places.transpose(1, 2).reshape(-1, 2)


@cache
def _same_window(height: int, width: int, window: int) -> Tensor:
    """Which patches see each other in windowed blocks: bool `[patches, patches]`. window: side in patches."""
    number = _places(height, width) // window
    return (number[:, None] == number[None]).all(-1)


def tower_rows(visual: Any, pixels: Tensor, height: int, width: int) -> Tensor:
    """Rows `[pictures · height · width / 4, out_width]` of pictures of one size.

    visual: the vision tower. pixels: float `[pictures, height · width, 588]`, normalised, one frame in the processor's
    order. height, width: of the grid, in patches.
    """
    heads = visual.config.num_heads
    x = F.linear(pixels, visual.patch_embed.proj.weight.sum(2).flatten(1))
    cos, sin = visual.rotary_pos_emb(x, _places(height, width))
    window = _same_window(height, width, visual.window_size // PATCH)
    for index, block in enumerate(visual.blocks):
        projected = block.attn.qkv(block.norm1(x)).float()
        query, key, value = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if index in visual.fullatt_block_indexes else window
        attended = attend(_turn(query, cos, sin), _turn(key, cos, sin), value, attn_mask=mask)
        x = x + block.attn.proj(attended.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    rows: Tensor = visual.merger(x.flatten(0, 1))
    return rows


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x `[pictures, heads, patches, head]`."""
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


def answer_logits(model: Any, ids: Tensor, positions: Tensor, rows: Tensor, answers: Tensor) -> Tensor:
    """Logits `[answer tokens, vocabulary]` in float32 for the tokens that `answers` marks.

    ids: `[prompts, tokens]`, right-padded. positions: `[3, prompts, tokens]`. rows: `[placeholders, width]`, in order.
    answers: bool `[prompts, tokens]`, true where the token is to be predicted (from the one before it).
    """
    embedded = model.model.language_model.embed_tokens(ids)
    placeholders = (ids == model.config.image_token_id)[..., None]
    embedded = embedded.masked_scatter(placeholders, rows.to(embedded.dtype))
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    logits: Tensor = model.lm_head(hidden.last_hidden_state[:, :-1][answers[:, 1:]])
    return logits.float()
