"""Loading the encoder of a checkpoint, and only that: the language model's weights are never read.

Owns the way from a folder or hub id to a ready adapter. Weights come from safetensors alone, tensor by tensor into
the tower's own memory, so that loading takes little more than the encoder itself.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tectum.errors import StartupError
from tectum.models.registry import adapter_for
from tectum.models.torchvision_compat import ensure_torchvision

Progress = Callable[[str, float], None]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: bytes read before a file is opened anew: what was read of the old mapping no longer counts as ours
READ_AT_ONCE = 8 * 1024 * 1024
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Where the encoder's tensors lie: name in the tower → (file, name in the checkpoint). Read from headers only."""

    where: dict[str, tuple[Path, str]]
    parameters: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `tectum doctor` says of a model. `problem` says why it is not supported, where it is not."""

    model: str
    architecture: str | None = None
    family: str | None = None
    parameters: int | None = None
    nbytes: int | None = None
    dtype: str | None = None
    width: int | None = None
    problem: StartupError | None = field(default=None)


def load_adapter(model: str, *, device: str = "auto", dtype: str = "auto", progress: Progress | None = None) -> Any:
    """Load the encoder of `model` (a local folder or a hub id) and return its adapter.

    progress: called with what is done and the fraction of bytes read.
    Raises StartupError: `model_not_found`, `unsupported_architecture`, `invalid_checkpoint`, `missing_dependency`,
    `invalid_settings` (no such device).
    """
    import transformers

    tell = progress or (lambda what, fraction: None)
    torch_device = resolve_device(device)
    folder = locate(model, tell)
    config_json = _read_config(folder)
    cls = adapter_for(_architecture(config_json))
    weights = find_encoder(folder, cls.prefixes)
    wanted = weights.dtype if dtype == "auto" else dtype
    with quiet(transformers):
        ensure_torchvision()
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        processor = _image_processor(transformers, folder)
        with _uninitialised():
            tower = cls.build_tower(config, getattr(torch, wanted))
    _fill(tower, weights, tell)
    return cls(tower, processor, config, model_name(model), torch_device)


def inspect_model(model: str) -> ModelReport:
    """What can be said of a model without loading it: from its config and the headers of its weights."""
    architecture = None
    try:
        folder = locate(model, lambda what, fraction: None)
        config_json = _read_config(folder)
        architecture = _architecture(config_json)
        cls = adapter_for(architecture)
        weights = find_encoder(folder, cls.prefixes)
        import transformers

        with quiet(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except StartupError as problem:
        return ModelReport(model, architecture, problem=problem)
    width = cls.row_width(config)
    return ModelReport(model, architecture, cls.family, weights.parameters, weights.nbytes, weights.dtype, width)


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises StartupError `invalid_settings` for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            text = f"device: {device} is not there ({torch.cuda.device_count()} CUDA devices); use --device cpu or auto"
            raise StartupError("invalid_settings", text)
    return torch.device(device)


def model_name(model: str) -> str:
    """A folder's own name, or the hub id as it is."""
    return Path(model).resolve().name if Path(model).is_dir() else model


# --- finding the files ---


def locate(model: str, tell: Progress) -> Path:
    """The folder that holds `model`; from the hub only configs and the shards with encoder weights are fetched."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise StartupError("model_not_found", f"There is no model folder {model} (and it is no hub id like org/name)")
    return _from_hub(model, tell)


def _from_hub(model: str, tell: Progress) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    tell(f"fetching {model}", 0.0)
    try:
        folder = Path(hub.snapshot_download(model, allow_patterns=["*.json"]))
        cls = adapter_for(_architecture(_read_config(folder)))
        names = _encoder_shards(folder, cls.prefixes) if (folder / INDEX).exists() else [SINGLE]
        for number, name in enumerate(names):
            tell(f"fetching {name}", number / len(names))
            hub.hf_hub_download(model, name)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        text = f"Model {model} is neither a folder here nor to be had from the hub ({type(error).__name__})"
        raise StartupError("model_not_found", text) from None
    return folder


def _encoder_shards(folder: Path, prefixes: tuple[str, ...]) -> list[str]:
    return sorted({file for key, file in _weight_map(folder).items() if key.startswith(prefixes)})


def _weight_map(folder: Path) -> dict[str, str]:
    """Checkpoint key → shard, from the index. A shard must be a plain name in the same folder."""
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        items = {str(key): str(file) for key, file in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError):
        raise StartupError("invalid_checkpoint", f"{INDEX} cannot be read as a safetensors index") from None
    for file in items.values():
        if Path(file).name != file:
            raise StartupError("invalid_checkpoint", f"{INDEX} names a shard outside the model's folder")
    return items


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError:
        raise StartupError("model_not_found", f"{folder.name} holds no config.json, so it is no model folder") from None
    except ValueError:
        raise StartupError("invalid_checkpoint", f"{folder.name}: config.json is not valid JSON") from None
    if not isinstance(config, dict):
        raise StartupError("invalid_checkpoint", f"{folder.name}: config.json is not an object")
    return config


def _architecture(config: dict[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise StartupError("unsupported_architecture", "config.json names no architecture")
    return str(architectures[0])


def _image_processor(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        text = f"{folder.name} holds no image processor that loads ({type(error).__name__}): is preprocessor_config.json there?"
        raise StartupError("invalid_checkpoint", text) from None


# --- reading the encoder's weights ---


def find_encoder(folder: Path, prefixes: tuple[str, ...]) -> EncoderWeights:
    """Find the encoder's tensors by the prefix of their keys. Raises StartupError `invalid_checkpoint` without any."""
    if (folder / INDEX).exists():
        files = [folder / name for name in _encoder_shards(folder, prefixes)]
    else:
        files = [folder / SINGLE]
    where: dict[str, tuple[Path, str]] = {}
    parameters = nbytes = 0
    dtype = "float32"
    for file in files:
        for key, shape, kind in _headers(file):
            prefix = next((p for p in prefixes if key.startswith(p)), None)
            if prefix is None:
                continue
            where[key.removeprefix(prefix)] = (file, key)
            count = 1
            for side in shape:
                count *= side
            dtype = _DTYPES.get(kind, dtype)
            parameters += count
            nbytes += count * (4 if kind == "F32" else 2)
    if not where:
        raise StartupError("invalid_checkpoint", f"{folder.name} holds no encoder weights ({' or '.join(prefixes)})")
    return EncoderWeights(where, parameters, nbytes, dtype)


def _headers(file: Path) -> Iterator[tuple[str, list[int], str]]:
    """(key, shape, dtype) of each tensor in a safetensors file, without reading any."""
    try:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                piece = opened.get_slice(key)
                yield key, piece.get_shape(), piece.get_dtype()
    except FileNotFoundError:
        hint = "; only safetensors weights are read, convert them first" if any(file.parent.glob("*.bin")) else ""
        raise StartupError("invalid_checkpoint", f"{file.parent.name} holds no {file.name}{hint}") from None
    except SafetensorError:
        raise StartupError("invalid_checkpoint", f"{file.name} is not a readable safetensors file") from None


def _fill(tower: torch.nn.Module, weights: EncoderWeights, tell: Progress) -> None:
    """Copy each tensor into the tower's own memory. A missing or misshapen one is refused, none stays random."""
    parameters = dict(tower.named_parameters())
    missing = sorted(set(parameters) - set(weights.where))
    if missing:
        raise StartupError(
            "invalid_checkpoint", f"The checkpoint lacks {len(missing)} encoder weights, first {missing[0]}"
        )
    total = sum(parameter.numel() for parameter in parameters.values())
    done = 0
    for file, names in _portions(parameters, weights):
        with safe_open(file, "pt") as opened:
            for name in names:
                tensor = opened.get_tensor(weights.where[name][1])
                if tensor.shape != parameters[name].shape:
                    text = f"Encoder weight {name} is {tuple(tensor.shape)}, the config says {tuple(parameters[name].shape)}"
                    raise StartupError("invalid_checkpoint", text)
                parameters[name].data.copy_(tensor)
                done += tensor.numel()
        tell("reading encoder weights", done / total)


def _portions(parameters: dict[str, torch.nn.Parameter], weights: EncoderWeights) -> Iterator[tuple[Path, list[str]]]:
    """Names to read from one file in one go, about `READ_AT_ONCE` bytes each."""
    names: list[str] = []
    size, current = 0, None
    for name in sorted(parameters, key=lambda n: (str(weights.where[n][0]), n)):
        file = weights.where[name][0]
        if names and (file != current or size >= READ_AT_ONCE):
            assert current is not None
            yield current, names
            names, size = [], 0
        current = file
        names.append(name)
        size += parameters[name].nbytes
    if names and current is not None:
        yield current, names


# --- quiet and lazy building ---


class _uninitialised:  # noqa: N801 - used like a function
    """Build modules without filling their weights: every one of them is read from the checkpoint right after."""

    def __enter__(self) -> None:
        from transformers.initialization import no_init_weights

        self._inner = no_init_weights()
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)


class quiet:  # noqa: N801 - used like a function
    """Transformers' own bars and warnings are off while we load; ours say what matters."""

    def __init__(self, transformers: Any) -> None:
        self._logging = transformers.utils.logging

    def __enter__(self) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        self._level = self._logging.get_verbosity()
        self._logging.set_verbosity(logging.ERROR)
        self._logging.disable_progress_bar()

    def __exit__(self, *exc: Any) -> None:
        self._logging.set_verbosity(self._level)
