"""Tiny random checkpoints of every family that is served: real architectures, language model included, built offline.

A family is a function `(folder, seed) -> folder`; `FAMILIES` lists them. `PLACEHOLDERS` says what stands in a prompt for one
item, and `TOKEN` which token of the expanded prompt a row takes the place of.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers as tf
from PIL import Image

from tectum.models.tiny import (
    MROPE,
    TEXT,
    VISION_TOKENS,
    build_tiny_qwen2_5_vl,
    byte_tokenizer,
    save_random,
    vision_token_ids,
)
from tectum.models.torchvision_compat import ensure_torchvision

ensure_torchvision()
PROMPT = "a<|vision_start|><|image_pad|><|vision_end|>b"
OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TILES = {f"tile_{i}_{j}_token": f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)}
HALF = [0.5, 0.5, 0.5]
LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SIGLIP = {
    "model_type": "siglip_vision_model",
    **LAYERS,
    "patch_size": 14,
    "image_size": 56,
    "vision_use_head": False,
}
#: the Whisper shape: 200 positions after the convolutions, so a window of 4 seconds
WHISPER_LAYERS = {
    "num_mel_bins": 16,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "max_source_positions": 200,
}
WINDOWED = {
    "depth": 4,
    "hidden_size": 64,
    "out_hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "fullatt_block_indexes": [1, 3],
    "window_size": 112,
}
DEEPSTACK = {
    "depth": 4,
    "hidden_size": 64,
    "out_hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}
QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
QWEN3_SIZE = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}
QWEN3_TEXT = {"num_hidden_layers": 4, "head_dim": 16, "rope_parameters": {**MROPE, "mrope_interleaved": True}}


def build(family: str, folder: Path, *, seed: int = 0) -> Path:
    return FAMILIES[family](folder, seed)


def build_large_clip(folder: Path) -> Path:
    """CLIP as above, but for pictures of 336 x 336, as LLaVA's towers take them."""
    return _clip(folder, 0, 336)


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _extractor() -> Any:
    return tf.WhisperFeatureExtractor(feature_size=16, chunk_length=4)


# --- Qwen-VL ---


def _qwen2_5_vl(folder: Path, seed: int) -> Path:
    return build_tiny_qwen2_5_vl(folder, seed=seed)


def _qwen2_vl(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer(VISION_TOKENS)
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    config = tf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE}, vision_config=vision, **vision_token_ids(tokenizer)
    )
    processor = tf.Qwen2VLProcessor(
        tf.Qwen2VLImageProcessor(size=QWEN_SIZE), tokenizer, tf.Qwen2VLVideoProcessor(size=QWEN_SIZE)
    )
    return save_random(tf.Qwen2VLForConditionalGeneration, config, processor, folder, seed)


def _qwen3_vl(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer(VISION_TOKENS)
    config = tf.Qwen3VLConfig(
        text_config={**TEXT, **QWEN3_TEXT}, vision_config=DEEPSTACK, **vision_token_ids(tokenizer)
    )
    processor = tf.Qwen3VLProcessor(
        tf.Qwen2VLImageProcessor(size=QWEN3_SIZE, patch_size=16, image_mean=HALF, image_std=HALF),
        tokenizer,
        tf.Qwen3VLVideoProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 256}),
    )
    return save_random(tf.Qwen3VLForConditionalGeneration, config, processor, folder, seed)


# --- pictures of fixed size, or in tiles ---


def _llava(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer({"image_token": "<image>"})
    vision = {"model_type": "clip_vision_model", **LAYERS, "image_size": 56, "patch_size": 14, "projection_dim": 64}
    config = tf.LlavaConfig(
        vision_config=vision,
        text_config={**TEXT, "model_type": "llama"},
        **_ids(tokenizer, image_token_index="<image>"),
    )
    pictures = tf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = tf.LlavaProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return save_random(tf.LlavaForConditionalGeneration, config, processor, folder, seed)


def _llava_onevision(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer({"image_token": "<image>", "video_token": "<video>"})
    pins = [[56 * a, 56 * b] for a in (1, 2, 3) for b in (1, 2, 3)]
    config = tf.LlavaOnevisionConfig(
        vision_config=SIGLIP,
        text_config={**TEXT, "model_type": "qwen2"},
        image_grid_pinpoints=pins,
        **_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
    )
    size = {"height": 56, "width": 56}
    processor = tf.LlavaOnevisionProcessor(
        tf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pins),
        tokenizer,
        tf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    return save_random(tf.LlavaOnevisionForConditionalGeneration, config, processor, folder, seed)


def _internvl(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer(
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    )
    config = tf.InternVLConfig(
        vision_config={**LAYERS, "image_size": [56, 56]},
        text_config={**TEXT, "model_type": "qwen2"},
        image_seq_length=4,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    )
    size = {"height": 56, "width": 56}
    processor = tf.InternVLProcessor(
        tf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=6),
        tokenizer,
        tf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
    )
    return save_random(tf.InternVLForConditionalGeneration, config, processor, folder, seed)


def _gemma3(folder: Path, seed: int) -> Path:
    tokens = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = byte_tokenizer(tokens)
    text = {
        **TEXT,
        "head_dim": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    }
    ids = {name.replace("token", "token_index"): token for name, token in tokens.items()}
    config = tf.Gemma3Config(text_config=text, vision_config=SIGLIP, mm_tokens_per_image=4, **_ids(tokenizer, **ids))
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(size={"height": 56, "width": 56}), tokenizer, image_seq_length=4
    )
    return save_random(tf.Gemma3ForConditionalGeneration, config, processor, folder, seed)


def _idefics_parts(video: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    tokenizer = byte_tokenizer(
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
            **video,
            **TILES,
        }
    )
    parts = {
        "vision_config": {**LAYERS, "image_size": 64, "patch_size": 16},
        "text_config": {**TEXT, "model_type": "llama"},
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
        **_ids(tokenizer, image_token_id="<image>"),
    }
    return tokenizer, parts


def _idefics3(folder: Path, seed: int) -> Path:
    tokenizer, parts = _idefics_parts({})
    pictures = tf.Idefics3ImageProcessor(size={"longest_edge": 192}, max_image_size={"longest_edge": 64})
    processor = tf.Idefics3Processor(pictures, tokenizer, image_seq_len=4)
    return save_random(tf.Idefics3ForConditionalGeneration, tf.Idefics3Config(**parts), processor, folder, seed)


def _smolvlm(folder: Path, seed: int) -> Path:
    tokenizer, parts = _idefics_parts({"video_token": "<video>"})
    edge = {"longest_edge": 64}
    processor = tf.SmolVLMProcessor(
        tf.SmolVLMImageProcessor(size={"longest_edge": 192}, max_image_size=edge),
        tokenizer,
        tf.SmolVLMVideoProcessor(size=edge, max_image_size=edge, num_frames=8, fps=1),
        image_seq_len=4,
    )
    return save_random(tf.SmolVLMForConditionalGeneration, tf.SmolVLMConfig(**parts), processor, folder, seed)


# --- audio ---


def _qwen2_audio(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer({name: token for name, token in OMNI_TOKENS.items() if "audio" in name})
    config = tf.Qwen2AudioConfig(
        audio_config=WHISPER_LAYERS,
        text_config={**TEXT, "model_type": "qwen2"},
        **_ids(tokenizer, audio_token_index="<|AUDIO|>"),
    )
    processor = tf.Qwen2AudioProcessor(_extractor(), tokenizer)
    return save_random(tf.Qwen2AudioForConditionalGeneration, config, processor, folder, seed)


def _voxtral(folder: Path, seed: int) -> Path:
    """Its own processor wants mistral-common's tokenizer; the adapter needs only the feature extractor."""
    tokenizer = byte_tokenizer({"audio_token": "[AUDIO]"})
    audio = {
        **LAYERS,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "num_mel_bins": 16,
        "max_source_positions": 200,
    }
    config = tf.VoxtralConfig(
        audio_config=audio,
        text_config={**TEXT, "model_type": "llama"},
        **_ids(tokenizer, audio_token_id="[AUDIO]"),
    )
    save_random(tf.VoxtralForConditionalGeneration, config, tokenizer, folder, seed)
    _extractor().save_pretrained(folder)
    return folder


def _qwen2_5_omni(folder: Path, seed: int) -> Path:
    tokenizer = byte_tokenizer(OMNI_TOKENS)
    config = tf.Qwen2_5OmniThinkerConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config=WINDOWED,
        audio_config={**WHISPER_LAYERS, "n_window": 20, "output_dim": 64},
        **_ids(
            tokenizer,
            image_token_index="<|IMAGE|>",
            video_token_index="<|VIDEO|>",
            audio_token_index="<|AUDIO|>",
            audio_start_token_id="<|audio_bos|>",
            audio_end_token_id="<|audio_eos|>",
            vision_start_token_id="<|vision_bos|>",
            vision_end_token_id="<|vision_eos|>",
        ),
    )
    processor = tf.Qwen2_5OmniProcessor(
        tf.Qwen2VLImageProcessor(size=QWEN_SIZE), tf.Qwen2VLVideoProcessor(size=QWEN_SIZE), _extractor(), tokenizer
    )
    return save_random(tf.Qwen2_5OmniThinkerForConditionalGeneration, config, processor, folder, seed)


def _qwen3_omni(folder: Path, seed: int) -> Path:
    """n_window must be 50: the family's count of rows has 13 for every 100 frames of mel written into it."""
    tokenizer = byte_tokenizer(OMNI_TOKENS)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    windows = {"n_window": 50, "n_window_infer": 200, "output_dim": 64, "downsample_hidden_size": 8}
    config = tf.Qwen3OmniMoeThinkerConfig(
        text_config={**TEXT, **QWEN3_TEXT, **experts},
        vision_config=DEEPSTACK,
        audio_config={**WHISPER_LAYERS, **windows},
        **_ids(
            tokenizer,
            image_token_id="<|IMAGE|>",
            video_token_id="<|VIDEO|>",
            audio_token_id="<|AUDIO|>",
            audio_start_token_id="<|audio_bos|>",
            audio_end_token_id="<|audio_eos|>",
            vision_start_token_id="<|vision_bos|>",
            vision_end_token_id="<|vision_eos|>",
        ),
    )
    processor = tf.Qwen3OmniMoeProcessor(
        tf.Qwen2VLImageProcessor(size=QWEN3_SIZE, patch_size=16, image_mean=HALF, image_std=HALF),
        tf.Qwen2VLVideoProcessor(size=QWEN3_SIZE, patch_size=16),
        _extractor(),
        tokenizer,
    )
    return save_random(tf.Qwen3OmniMoeThinkerForConditionalGeneration, config, processor, folder, seed)


# --- plain encoders ---


def _clip(folder: Path, seed: int, side: int = 56) -> Path:
    vision = {**LAYERS, "image_size": side, "patch_size": 14}
    config = tf.CLIPConfig(text_config={**LAYERS, "vocab_size": 99}, vision_config=vision, projection_dim=32)
    pictures = tf.CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return save_random(tf.CLIPModel, config, pictures, folder, seed)


def _siglip(folder: Path, seed: int) -> Path:
    vision = {**LAYERS, "image_size": 56, "patch_size": 14}
    config = tf.SiglipConfig(text_config={**LAYERS, "vocab_size": 99}, vision_config=vision)
    return save_random(tf.SiglipModel, config, tf.SiglipImageProcessor(size={"height": 56, "width": 56}), folder, seed)


def _dinov2(folder: Path, seed: int) -> Path:
    config = tf.Dinov2Config(**LAYERS, image_size=56, patch_size=14)
    pictures = tf.BitImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56})
    return save_random(tf.Dinov2Model, config, pictures, folder, seed)


def _whisper(folder: Path, seed: int) -> Path:
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "vocab_size": 99}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = tf.WhisperConfig(**WHISPER_LAYERS, **decoder, **special, begin_suppress_tokens=None)
    return save_random(tf.WhisperForConditionalGeneration, config, _extractor(), folder, seed)


FAMILIES: dict[str, Callable[[Path, int], Path]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni": _qwen3_omni,
    "clip": _clip,
    "siglip": _siglip,
    "dinov2": _dinov2,
    "whisper": _whisper,
}

_QWEN_VL = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_OMNI = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
#: what a prompt holds for one item, before the family's processor expands it
PLACEHOLDERS: dict[str, dict[str, str]] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": {"image": _QWEN_VL["image"], "video": "<|video_pad|>"},
    "llava": {"image": "<image>"},
    "llava_onevision": {"image": "<image>", "video": "<video>"},
    "internvl": {"image": "<IMG_CONTEXT>", "video": "<video>"},
    "gemma3": {"image": "<start_of_image>"},
    "idefics3": {"image": "<image>"},
    "smolvlm": {"image": "<image>", "video": "<video>"},
    "qwen2_audio": {"audio": _OMNI["audio"]},
    "voxtral": {"audio": "[AUDIO]"},
    "qwen2_5_omni": _OMNI,
    "qwen3_omni": _OMNI,
}


# --- media ---


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth random picture: not noise, so that resizing behaves as it does on photographs."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def frames(count: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """uint8 `[count, height, width, 3]`: one picture fading into another, so that every frame differs."""
    first, last = (np.asarray(picture(width, height, seed + i), np.float32) for i in (0, 1))
    shares = np.linspace(0.0, 1.0, count, dtype=np.float32)[:, None, None, None]
    return np.rint(first * (1 - shares) + last * shares).astype(np.uint8)


def tone(seconds: float, seed: int = 0, rate: int = 16000) -> np.ndarray:
    """float32 `[samples]`: a rising tone with a little noise, within [-1, 1]."""
    at = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(at.size)
    return (0.3 * np.sin(2 * np.pi * (200 + 40 * seed + 300 * at) * at) + 0.05 * noise).astype(np.float32)
