"""The demo model before training: configuration, tokenizer and processor, all of transformers' own Qwen2.5-VL classes.

Head sizes are 32, which vLLM's attention backends accept. One word is one token.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tectum.demo import scenes
from tectum.models.tiny import VISION_TOKENS, vision_token_ids
from tectum.models.torchvision_compat import ensure_torchvision

ensure_torchvision()

VOCABULARY = 512
WIDTH = 192
LAYERS = 4
TOWER_WIDTH = 128
TOWER_DEPTH = 4
#: one turn of the slowest pair takes about 500 positions: low frequencies that still tell neighbouring columns apart
ROPE = {"rope_type": "default", "mrope_section": [2, 5, 9], "rope_theta": 100.0}

#: several pictures are announced by the ordinals that the answer uses, which makes the order easy to learn
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- set seen = namespace(pictures=0, of=0) -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') %}{% set seen.of = seen.of + 1 %}{% endif -%}
{%- endfor -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
{%- if seen.of > 1 and seen.pictures < 3 %}{{ ['first:', ' second:', ' third:'][seen.pictures] }}{% endif -%}
{%- set seen.pictures = seen.pictures + 1 -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> Any:
    """A byte-level BPE, so that any text encodes, whose merges were learnt on the demo's own sentences."""
    rng = Random(0)
    sentences = ["user\n", "assistant\n", "system\n"] * 50
    for count in (1, 1, 2, 3) * 4000:
        asked = scenes.question([scenes.random_scene(rng) for _ in range(count)], rng)
        sentences += [asked.text, asked.answer]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS.values())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=dict(VISION_TOKENS),
        model_max_length=2048,
    )


def build_processor(tokenizer: Any) -> Any:
    """The processor; it scales pictures to between 16 and 36 rows, and leaves the demo's own as they are."""
    size = {"shortest_edge": 112 * 112, "longest_edge": 168 * 168}
    return transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(size=size),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: Any, seed: int = 0) -> Any:
    """`Qwen2_5_VLForConditionalGeneration` with random weights in float32, scaled for its small width."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 448,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": ROPE,
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
        vision_config={
            "depth": TOWER_DEPTH,
            "hidden_size": TOWER_WIDTH,
            "out_hidden_size": WIDTH,
            "num_heads": 4,
            "intermediate_size": 320,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        **vision_token_ids(tokenizer),
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.normal_(std=0.3)
            elif weight.ndim >= 2:  # the usual 0.02 is for wide models
                weight.normal_(std=0.8 * weight[0].numel() ** -0.5)
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    return model
