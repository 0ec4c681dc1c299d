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
    language = ("language_model", "lm_head", "model.layers", "model.embed")
    for number, (key, tensor) in enumerate(sorted(weights.items())):
        groups.setdefault(f"model-{2 if any(name in key for name in language) else number % 2}.safetensors", {})[
            key
        ] = tensor
    for name, group in groups.items():
        save_file(group, target / name)
    weight_map = {key: name for name, group in groups.items() for key in group}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
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


def edited(tiny: Path, folder: Path, edit) -> Path:
    """A copy of the tiny checkpoint whose config went through `edit`."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(edit(config) or config))
    return folder


def _without_model_type(config):
    del config["model_type"]


BROKEN = {
    "no model_type": _without_model_type,
    "unknown model_type": lambda config: config.update(model_type="qwen9_vl"),
    "vision_config is a list": lambda config: config.update(vision_config=[1, 2]),
    "vision_config is a word": lambda config: config.update(vision_config="large"),
    "width below zero": lambda config: config["vision_config"].update(hidden_size=-4),
    "no heads": lambda config: config["vision_config"].update(num_heads=0),
    "depth is a word": lambda config: config["vision_config"].update(depth="four"),
    "depth is absurd": lambda config: config["vision_config"].update(depth=10**9),
    "fewer layers than the weights": lambda config: config["vision_config"].update(depth=2),
    "another width than the weights": lambda config: config["vision_config"].update(intermediate_size=100),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_configs_are_refused_without_a_traceback(name, tiny, tmp_path):
    folder = edited(tiny, tmp_path / "broken", BROKEN[name])
    report = inspect_model(str(folder))
    with pytest.raises(StartupError) as caught:
        load_adapter(str(folder), device="cpu")
    for problem in (caught.value, report.problem):
        assert problem is not None
        assert problem.code == "invalid_checkpoint"
        assert len(problem.message) <= 200
        assert str(tmp_path) not in problem.message


@pytest.mark.parametrize("name", ["..", ".", "", "a/../../b.safetensors"])
def test_an_index_names_files_of_its_own_folder_only(name, tiny, tmp_path):
    shard(tiny, tmp_path / "sharded")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["visual.merger.mlp.0.weight"] = name
    index.write_text(json.dumps(found))
    with pytest.raises(StartupError, match="outside the model's folder"):
        load_adapter(str(tmp_path / "sharded"), device="cpu")
    assert inspect_model(str(tmp_path / "sharded")).problem is not None


def rewritten(tiny: Path, folder: Path, change) -> Path:
    """A copy whose weights went through `change(name, tensor)`."""
    shutil.copytree(tiny, folder)
    weights = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_encoder_is_refused_and_a_quantised_language_model_is_none_of_our_business(kind, tiny, tmp_path):
    def quantise(part):
        return lambda name, tensor: tensor.to(kind) if part in name and tensor.ndim == 2 else tensor

    with pytest.raises(StartupError, match="quantised encoders are not read") as caught:
        load_adapter(str(rewritten(tiny, tmp_path / "encoder", quantise("visual"))), device="cpu")
    assert caught.value.code == "invalid_checkpoint"
    whole = load_adapter(str(tiny), device="cpu")
    other = load_adapter(str(rewritten(tiny, tmp_path / "language", quantise("model.layers"))), device="cpu")
    prepared = whole.prepare([zoo.picture(64, 64)], {})
    assert torch.equal(whole.encode([prepared])[0].rows, other.encode([prepared])[0].rows)


def test_the_type_is_the_configs_or_that_of_most_bytes_never_the_last_tensors(tiny, tmp_path):
    def half_but_the_last(name, tensor):
        return tensor if "merger" in name else tensor.bfloat16()

    folder = rewritten(tiny, tmp_path / "mixed", half_but_the_last)
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert load_adapter(str(folder), device="cpu").dtype == "bfloat16"
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert load_adapter(str(folder), device="cpu").dtype == "float16"


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


@pytest.mark.parametrize(
    ("family", "whole", "model_type"),
    [
        ("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni"),
        ("qwen3_omni", "Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"),
    ],
)
def test_of_a_whole_omni_model_the_thinker_is_loaded(family, whole, model_type, tmp_path):
    thinker = zoo.build(family, tmp_path / "thinker")
    folder = Path(shutil.copytree(thinker, tmp_path / "whole"))
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": [whole], "model_type": model_type, "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "talker.model.norm.weight": torch.zeros(4)}, folder / "model.safetensors")
    one, other = load_adapter(str(thinker), device="cpu"), load_adapter(str(folder), device="cpu")
    prepared = one.prepare([zoo.picture(100, 80)], {})
    assert torch.equal(one.encode([prepared])[0].rows, other.encode([prepared])[0].rows)
    assert (other.architecture, other.encoder_bytes) == (whole, one.encoder_bytes)


def test_a_llava_of_the_time_before_transformers_5_loads(tmp_path):
    """Keys as the published checkpoints have them: towers at the top, and the tower's own model one level deeper."""
    folder = zoo.build("llava", tmp_path / "new")
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        weights[plain.replace("vision_tower.", "vision_tower.vision_model.")] = tensor
    assert any(name.startswith("vision_tower.vision_model.embeddings") for name in weights)
    save_file(weights, old / "model.safetensors")
    new_adapter, old_adapter = (load_adapter(str(path), device="cpu") for path in (folder, old))
    prepared = new_adapter.prepare([zoo.picture(100, 80)], {})
    assert torch.equal(new_adapter.encode([prepared])[0].rows, old_adapter.encode([prepared])[0].rows)
