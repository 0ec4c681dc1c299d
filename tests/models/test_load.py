"""Only the encoder is loaded: from one file or from shards, with little more memory than its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tectum.errors import StartupError
from tectum.models.load import inspect_model, load_adapter
from tests import zoo

MIB = 1024 * 1024


def shard(source: Path, target: Path) -> None:
    """Copy a checkpoint as three shards with an index; the encoder's keys are spread over two of them."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for number, (key, tensor) in enumerate(sorted(weights.items())):
        groups.setdefault(f"model-{number % 3 if 'visual' not in key else number % 2}.safetensors", {})[key] = tensor
    for name, group in groups.items():
        save_file(group, target / name)
    weight_map = {key: name for name, group in groups.items() for key in group}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_shards_load_as_one_file_does(family, tmp_path):
    whole = zoo.build(family, tmp_path / "whole")
    shard(whole, tmp_path / "sharded")
    one, three = (load_adapter(str(tmp_path / name), device="cpu") for name in ("whole", "sharded"))
    prepared = one.prepare([zoo.picture(100, 100)], {})
    (a,), (b,) = one.encode([prepared]), three.encode([prepared])
    assert torch.equal(a.rows, b.rows)
    assert inspect_model(str(tmp_path / "sharded")).nbytes == one.encoder_bytes


def test_broken_checkpoints_are_refused_by_name(tiny, tmp_path):
    def broken(name: str) -> Path:
        return Path(shutil.copytree(tiny, tmp_path / name))

    cases = {}
    folder = broken("pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    cases[folder] = ("invalid_checkpoint", "only safetensors")
    folder = broken("damaged")
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    cases[folder] = ("invalid_checkpoint", "not a readable safetensors")
    folder = broken("partial")
    weights = load_file(folder / "model.safetensors")
    del weights["visual.merger.mlp.0.weight"]
    save_file(weights, folder / "model.safetensors")
    cases[folder] = ("invalid_checkpoint", "lacks 1 encoder weights, first model.visual.merger.mlp.0.weight")
    folder = broken("no-processor")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    cases[folder] = ("invalid_checkpoint", "image processor")
    folder = broken("not-json")
    (folder / "config.json").write_text("{")
    cases[folder] = ("invalid_checkpoint", "not valid JSON")
    for folder, (code, words) in cases.items():
        with pytest.raises(StartupError, match=words) as caught:
            load_adapter(str(folder), device="cpu")
        assert caught.value.code == code


MEASURE = """
import sys, resource
import torch
from PIL import Image
from tectum.models.load import load_adapter
torch.set_num_threads(1)
adapter = load_adapter(sys.argv[1], device="cpu")
peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
print(peak, adapter.encoder_bytes)
"""


def peak_memory(folder: Path) -> tuple[int, int]:
    command = [sys.executable, "-c", MEASURE, str(folder)]
    peak, encoder = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout.split()
    return int(peak), int(encoder)


def test_loading_takes_little_more_than_the_encoder(tiny, tmp_path):
    """An encoder of 50 MB beside a language model of 1 GB: peak below 1.3 x the encoder, over the floor of the imports."""
    floor, small = peak_memory(tiny)
    folder = tmp_path / "large"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"].update(depth=8, hidden_size=512, intermediate_size=1792, num_heads=8)
    (folder / "config.json").write_text(json.dumps(config))
    _write_large_weights(folder, config)
    peak, encoder = peak_memory(folder)
    assert encoder > 50 * 1000 * 1000
    assert (folder / "lm.safetensors").stat().st_size >= 20 * encoder
    assert peak - (floor - small) < 1.3 * encoder, f"peak {(peak - floor + small) / encoder:.2f} x the encoder"


def _write_large_weights(folder: Path, config: dict) -> None:
    import transformers

    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

    tower = Tower._from_config(transformers.AutoConfig.from_pretrained(folder).vision_config, dtype=torch.float32)
    weights = {f"visual.{name}": tensor.detach().clone() for name, tensor in tower.named_parameters()}
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "encoder.safetensors")
    encoder_bytes = sum(tensor.nbytes for tensor in weights.values())
    language = torch.zeros(encoder_bytes * 20 // 2 + 1, dtype=torch.bfloat16)
    save_file({"model.embed_tokens.weight": language}, folder / "lm.safetensors")
    weight_map = {**dict.fromkeys(weights, "encoder.safetensors"), "model.embed_tokens.weight": "lm.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
