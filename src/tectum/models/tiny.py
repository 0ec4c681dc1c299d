"""Small random checkpoints of real architectures, language model included: for the demo, the tests and the benchmark.

They load with transformers' own Auto classes. The weights are random but not small, so that a mistake in their use
shows in the numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": 256,  # the first token after the 256 bytes
    "pad_token_id": 256,
}


def build_tiny_qwen2_5_vl(folder: str | Path, *, seed: int = 0, max_pixels: int = 448 * 448) -> Path:
    """Write a Qwen2.5-VL checkpoint of about 0.4 million parameters to `folder` and return it.

    max_pixels: the processor's bound; pictures above it are scaled down.
    """
    import transformers

    from tectum.models.torchvision_compat import ensure_torchvision

    ensure_torchvision()
    tokenizer = byte_tokenizer(VISION_TOKENS)
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "out_hidden_size": 64,
            "num_heads": 4,
            "intermediate_size": 96,
            "fullatt_block_indexes": [1, 3],
            "window_size": 112,
        },
        **vision_token_ids(tokenizer),
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": max_pixels}
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(size=size), tokenizer, transformers.Qwen2VLVideoProcessor(size=size)
    )
    return save_random(transformers.Qwen2_5_VLForConditionalGeneration, config, processor, folder, seed)


def byte_tokenizer(special: dict[str, str]) -> Any:
    """A byte-level tokenizer without merges: any text encodes, 256 symbols and the special tokens (name → token)."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (end, *special.values())]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=end,
        eos_token=end,
        extra_special_tokens=dict(special),
        model_max_length=32768,
    )


def vision_token_ids(tokenizer: Any) -> dict[str, int]:
    """The config's token ids (`image_token_id`, …) for the tokenizer's special tokens."""
    return {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}


def save_random(model_class: Any, config: Any, processor: Any, folder: str | Path, seed: int) -> Path:
    """Initialise `model_class` from `seed`, scale its weights up, and save it with its processor."""
    import torch
    import transformers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not weight.any():
                weight.normal_(std=0.1)  # a projection that starts at zero would make all rows zero
            elif weight.ndim >= 2:
                weight.mul_(4.0)  # the usual 0.02 makes features nearly constant, and errors invisible
            elif "bias" in name:
                weight.normal_(std=0.1)
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
