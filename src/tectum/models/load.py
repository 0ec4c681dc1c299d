"""Loading the encoder of a checkpoint, and only that: the language model's weights are never read.

Owns the way from a folder or hub id to a ready adapter. Weights come from safetensors alone, tensor by tensor into
the encoder's own memory, so that loading takes little more than the encoder itself. Whatever is wrong with a checkpoint
is found from its config and the headers of its weights, before anything of size is built.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from tectum.errors import StartupError, TectumError
from tectum.models import skeleton
from tectum.models.features import MODALITY_OF, FeaturesAdapter, Processors
from tectum.models.layout import lay_out_patch_embeddings
from tectum.models.registry import adapter_for
from tectum.types import DTYPE_BYTES, ClipInfo, MediaInfo, Modality, PictureInfo, RecordingInfo

if TYPE_CHECKING:
    from tectum.models.adapter import Adapter

Progress = Callable[[str, float], None]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: bytes read before a file is opened anew: what was read of the old mapping no longer counts as ours
READ_AT_ONCE = 8 * 1024 * 1024
#: safetensors' kinds that are plain floats, and what they are held as
_DTYPES = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
#: what `tectum doctor` counts the rows of
SAMPLES: dict[str, MediaInfo] = {
    "image 224x224": PictureInfo(224, 224),
    "image 1280x720": PictureInfo(1280, 720),
    "video 10 s 640x360": ClipInfo(640, 360, 240, tuple(i / 24 for i in range(240)), 24.0, 10.0),
    "audio 10 s": RecordingInfo(10.0, 16000, 1),
}


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Where the encoder's tensors lie: name in the model → (file, name in the checkpoint). Read from headers only.

    dtype: what the config says, else the type that most of the encoder's bytes have.
    """

    where: dict[str, tuple[Path, str]]
    parameters: int
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `tectum doctor` says of a model. `problem` says why it is not supported, where it is not.

    rows: what a few sample inputs come to.
    """

    model: str
    architecture: str | None = None
    family: str | None = None
    modalities: tuple[str, ...] = ()
    parameters: int | None = None
    nbytes: int | None = None
    dtype: str | None = None
    width: int | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    problem: StartupError | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that was looked at and can be loaded; nothing of it is read yet."""

    folder: Path
    cls: type[FeaturesAdapter]
    architecture: str
    config: Any
    weights: EncoderWeights
    processors: Processors


def load_adapter(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    compile: bool = False,
    progress: Progress | None = None,
) -> FeaturesAdapter:
    """Load the encoder of `model` (a local folder or a hub id) and return its adapter.

    compile: with torch.compile, which does its work in the first forward. progress: called with what is done and the
    fraction of bytes read.
    Raises StartupError: `model_not_found`, `unsupported_architecture`, `invalid_checkpoint`, `missing_dependency`,
    `invalid_settings` (no such device).
    """
    import transformers

    tell = progress or (lambda what, fraction: None)
    torch_device = resolve_device(device)
    with quiet(transformers):
        found = _look_at(model, tell)
        wanted = getattr(torch, found.weights.dtype if dtype == "auto" else dtype)
        encoder = skeleton.build(found.cls, found.architecture, found.config, wanted, "cpu")
    skeleton.leave_out(encoder, found.cls.left_out)
    _fill(encoder, found.weights, tell)
    if torch_device.type == "cpu":
        lay_out_patch_embeddings(encoder)
    adapter = _adapter(found, encoder, model_name(model), torch_device)
    if compile:
        tell("compiling", 1.0)
        adapter.compile()
    return adapter


def inspect_model(model: str) -> ModelReport:
    """What can be said of a model without loading it: from its config and the headers of its weights."""
    import transformers

    architecture = None
    try:
        folder = locate(model, lambda what, fraction: None)
        architecture = _architecture(_read_config(folder))
        with quiet(transformers):
            found = _look_at(model, lambda what, fraction: None)
            encoder = skeleton.build(found.cls, architecture, found.config, torch.float32, "meta")
    except StartupError as problem:
        return ModelReport(model, architecture, problem=problem)
    skeleton.leave_out(encoder, found.cls.left_out)
    adapter = _adapter(found, encoder, model_name(model), torch.device("meta"))
    weights, modalities = found.weights, tuple(sorted(found.cls.modalities))
    return ModelReport(
        model,
        architecture,
        found.cls.family,
        modalities,
        weights.parameters,
        weights.nbytes,
        weights.dtype,
        found.cls.row_width(found.config),
        _sample_rows(adapter),
    )


def _sample_rows(adapter: Adapter) -> dict[str, int]:
    samples = {name: info for name, info in SAMPLES.items() if MODALITY_OF[type(info)] in adapter.modalities}
    return {name: adapter.plan([info], {})[0].rows for name, info in samples.items()}


def _look_at(model: str, tell: Progress) -> _Found:
    """Everything that can be wrong is found here. Raises StartupError as `load_adapter` does."""
    folder = locate(model, tell)
    config_json = _read_config(folder)
    architecture = _architecture(config_json)
    cls = adapter_for(architecture)
    config = skeleton.read_config(folder, cls)
    shapes, rename = _expected(cls, architecture, config)
    weights = find_encoder(folder, shapes, rename, _configured_dtype(config_json))
    return _Found(folder, cls, architecture, config, weights, _processors(folder, cls))


def _expected(
    cls: type[FeaturesAdapter], architecture: str, config: Any
) -> tuple[dict[str, torch.Size], Callable[[str], str | None]]:
    """Name → shape of the encoder's parameters, and how keys of the checkpoint become names."""
    model = skeleton.build(cls, architecture, config, torch.float32, "meta")
    rename = skeleton.renamer(model)
    skeleton.leave_out(model, cls.left_out)
    return {name: parameter.shape for name, parameter in model.named_parameters()}, rename


def _configured_dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype", config.get("torch_dtype"))
    return name if name in DTYPE_BYTES else None


def _adapter(found: _Found, encoder: torch.nn.Module, name: str, device: torch.device) -> FeaturesAdapter:
    try:
        adapter = found.cls(encoder, found.processors, found.config, name, device)
        _sample_rows(adapter)
    except TectumError:
        raise
    except Exception as error:  # a processor whose numbers are of the wrong type shows when it is first asked
        text = f"{name}: the processor's config cannot be used ({type(error).__name__})"
        raise StartupError("invalid_checkpoint", text) from None
    adapter.architecture = found.architecture
    return adapter


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


#: why the hub gives out nothing, by the name of its exception
_HUB_SAYS = {
    "LocalEntryNotFoundError": "it is not in the cache, and the hub is not reached",
    "RepositoryNotFoundError": "it has no such model, or a private one",
    "GatedRepoError": "accept its licence there and set HF_TOKEN",
}


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
        names = _encoder_shards(folder) if (folder / INDEX).exists() else [SINGLE]
        for number, name in enumerate(names):
            tell(f"fetching {name}", number / len(names))
            hub.hf_hub_download(model, name)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = _HUB_SAYS.get(type(error).__name__, type(error).__name__)
        text = f"Model {model} is neither a folder here nor to be had from the hub ({why})"
        raise StartupError("model_not_found", text) from None
    return folder


def _encoder_shards(folder: Path) -> list[str]:
    """The shards that hold weights of the encoder, by the index alone."""
    architecture = _architecture(_read_config(folder))
    cls = adapter_for(architecture)
    shapes, rename = _expected(cls, architecture, skeleton.read_config(folder, cls))
    return _shards_with(folder, shapes, rename)


def _shards_with(folder: Path, shapes: Mapping[str, Any], rename: Callable[[str], str | None]) -> list[str]:
    patterns = _patterns(shapes)
    return sorted({file for key, file in _weight_map(folder).items() if _pattern(rename(key) or "") in patterns})


def _weight_map(folder: Path) -> dict[str, str]:
    """Checkpoint key → shard, from the index. A shard must be a plain name in the same folder."""
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        items = {str(key): str(file) for key, file in weight_map.items()}
    except (OSError, ValueError, KeyError, AttributeError):
        raise StartupError("invalid_checkpoint", f"{INDEX} cannot be read as a safetensors index") from None
    for file in items.values():
        if Path(file).name != file or file in ("", ".", ".."):
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


_LOADERS = {
    Modality.IMAGE: ("AutoImageProcessor", "image processor", "preprocessor_config.json"),
    Modality.VIDEO: ("AutoVideoProcessor", "video processor", "video_preprocessor_config.json"),
    Modality.AUDIO: ("AutoFeatureExtractor", "audio feature extractor", "preprocessor_config.json"),
}


def _processors(folder: Path, cls: type[FeaturesAdapter]) -> Processors:
    import transformers

    found = {}
    for modality in sorted(cls.modalities):
        loader, what, file = _LOADERS[modality]
        try:
            found[str(modality)] = getattr(transformers, loader).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # what a damaged processor config raises is not ours to foresee
            text = f"{folder.name} holds no {what} that loads ({type(error).__name__}): is {file} there?"
            raise StartupError("invalid_checkpoint", text) from None
    return Processors(**found)


# --- reading the encoder's weights ---


def find_encoder(
    folder: Path,
    shapes: Mapping[str, torch.Size],
    rename: Callable[[str], str | None],
    dtype: str | None = None,
) -> EncoderWeights:
    """Find the encoder's tensors by their names. dtype: what the config says, where it does.

    Raises StartupError `invalid_checkpoint` when one is missing, misshapen, or not of plain floats.
    """
    where: dict[str, tuple[Path, str]] = {}
    bytes_by_kind: Counter[str] = Counter()
    patterns = _patterns(shapes)
    for file in _files(folder, shapes, rename):
        for key, shape, kind in _headers(file):
            name = rename(key)
            if name is None or name not in shapes:
                _refuse_left_over(name, patterns)
                continue
            if kind not in _DTYPES:
                text = f"Encoder weight {name} is stored as {kind}; quantised encoders are not read, only plain floats"
                raise StartupError("invalid_checkpoint", text)
            if tuple(shape) != tuple(shapes[name]):
                text = f"Encoder weight {name} is {tuple(shape)}, the config says {tuple(shapes[name])}"
                raise StartupError("invalid_checkpoint", text)
            where[name] = (file, key)
            bytes_by_kind[_DTYPES[kind]] += math.prod(shape) * DTYPE_BYTES[_DTYPES[kind]]
    if not where:
        raise StartupError("invalid_checkpoint", f"{folder.name} holds no encoder weights")
    missing = sorted(set(shapes) - set(where))
    if missing:
        text = f"The checkpoint lacks {len(missing)} encoder weights, first {missing[0]}"
        raise StartupError("invalid_checkpoint", text)
    held = dtype or max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind])
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return EncoderWeights(where, parameters, parameters * DTYPE_BYTES[held], held)


def _pattern(name: str) -> str:
    """A name with its layer numbers taken out: the same for all layers of a stack."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _patterns(names: Iterable[str]) -> set[str]:
    """The patterns of the encoder's names, with and without the base model's prefix: a checkpoint may leave it out."""
    return {_pattern(form) for name in names for form in (name, name.removeprefix("model."))}


def _refuse_left_over(name: str | None, patterns: set[str]) -> None:
    """An encoder weight beyond the layers that the config counts: the rows would be those of another encoder."""
    if name is not None and _pattern(name) in patterns:
        raise StartupError("invalid_checkpoint", f"The checkpoint holds {name}, a layer more than the config says")


def _files(folder: Path, shapes: Mapping[str, Any], rename: Callable[[str], str | None]) -> list[Path]:
    if not (folder / INDEX).exists():
        return [folder / SINGLE]
    return [folder / name for name in _shards_with(folder, shapes, rename)]


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


def _fill(encoder: torch.nn.Module, weights: EncoderWeights, tell: Progress) -> None:
    """Copy each tensor into the encoder's own memory; none stays random, which `find_encoder` saw to."""
    parameters = dict(encoder.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    done = 0
    for file, names in _portions(parameters, weights):
        with safe_open(file, "pt") as opened:
            for name in names:
                tensor = opened.get_tensor(weights.where[name][1])
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
            assert current is not None, "names are of a file"
            yield current, names
            names, size = [], 0
        current = file
        names.append(name)
        size += parameters[name].nbytes
    if names and current is not None:
        yield current, names


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Transformers' own bars and warnings are off while we load; ours say what matters."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)
