"""The full model without its language model: the code that computes features, at the size of the encoder alone.

The language model is built with no layers and a vocabulary of one word, and then taken out, so that `get_*_features` of
the very class that the colocated model is an instance of runs on the encoder's weights. Keys of the checkpoint are brought
to the names of this version of transformers by the library's own conversions.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tectum.errors import StartupError
from tectum.models.torchvision_compat import ensure_torchvision

if TYPE_CHECKING:
    from tectum.models.features import FeaturesAdapter

#: layers beyond this are a damaged config, not a model
MAX_LAYERS = 1000
_LAYERS = ("num_hidden_layers", "depth", "encoder_layers", "decoder_layers")
#: an Omni checkpoint holds the thinker among other models; only its keys and its config are looked at
THINKER = "thinker"
#: what looks like a path in somebody else's words
_PATH = re.compile(r"\S*/\S+")


def read_config(folder: Any, cls: type[FeaturesAdapter]) -> Any:
    """The model's config, as far as the encoder is concerned: of an Omni model the thinker's.

    Raises StartupError `invalid_checkpoint` when transformers cannot make a config of it, or it is absurd;
    `unsupported_architecture` when the family cannot serve this one.
    """
    import transformers

    ensure_torchvision()  # transformers looks for it with the first class that it is asked for
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = getattr(config, f"{THINKER}_config", None) or config
        _check_layers(config)
        why = cls.refuse(config)
    except StartupError:
        raise
    except Exception as error:  # validators, parsers and properties raise whatever they like on a damaged config
        raise _damaged(error) from None
    if why is not None:
        raise StartupError("unsupported_architecture", f"This {cls.family} model cannot be served: {why}")
    return config


def build(
    cls: type[FeaturesAdapter], architecture: str, config: Any, dtype: torch.dtype, device: str
) -> torch.nn.Module:
    """The model with `left_out` taken out, its weights not yet filled, on `device` (`meta`: names and shapes only).

    Raises StartupError `invalid_checkpoint` when the config does not describe a model.
    """
    import transformers
    from transformers.initialization import no_init_weights

    name = architecture if "Omni" not in architecture else _thinker_class(architecture)
    try:
        with no_init_weights(), torch.device(device):
            model: torch.nn.Module = getattr(transformers, name)._from_config(_shrunk(config), dtype=dtype)
        width = cls.row_width(config)
    except Exception as error:  # a width below zero, no heads, a wrong type: each constructor has its own words
        raise _damaged(error) from None
    if width < 1:
        raise StartupError("invalid_checkpoint", f"config.json does not describe a model: its width is {width}")
    return model


def leave_out(model: torch.nn.Module, paths: tuple[str, ...]) -> None:
    """Take the modules and parameters at these paths out of the model, where it has them."""
    for path in paths:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = model.get_submodule(parent_path)
        except AttributeError:
            continue
        if name in parent._modules or name in parent._parameters:
            delattr(parent, name)


def renamer(model: torch.nn.Module) -> Callable[[str], str | None]:
    """Checkpoint key → name in `model` (the whole skeleton, before anything is left out), or None.

    None also for a tensor that would have to be computed from several: no family has one in its encoder.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    names = dict(model.state_dict())
    prefix = model.base_model_prefix

    def rename(key: str) -> str | None:
        key = key.removeprefix(f"{THINKER}.")
        found, converted = rename_source_key(key, renamings, converters, prefix, names)
        if found not in names:  # as transformers does: a key that needs no renaming, only the prefix
            found, converted = rename_source_key(key, [], [], prefix, names)
        return found if converted is None else None

    return rename


def _thinker_class(architecture: str) -> str:
    start = "Qwen3OmniMoe" if architecture.startswith("Qwen3") else "Qwen2_5Omni"
    return f"{start}ThinkerForConditionalGeneration"


#: what a language model is reduced to; one word, because an embedding of none is refused
_NOTHING: dict[str, Any] = {"num_hidden_layers": 0, "layer_types": [], "vocab_size": 1, "pad_token_id": None}
#: the same for a model that keeps encoder and decoder in one config, where `num_hidden_layers` means the encoder's
_NO_DECODER: dict[str, Any] = {"decoder_layers": 0, "vocab_size": 1, "pad_token_id": None}


def _shrunk(config: Any) -> Any:
    """A copy of the config whose language model has no layers and next to no vocabulary."""
    config = copy.deepcopy(config)
    text = getattr(config, "text_config", None)
    part, values = (config, _NO_DECODER) if text is None else (text, _NOTHING)
    if text is None and not hasattr(config, "decoder_layers"):
        return config  # an encoder and nothing else
    for name, value in values.items():
        if hasattr(part, name):
            setattr(part, name, value)
    return config


def _check_layers(config: Any) -> None:
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "audio_config", "text_config"))]
    for part in parts:
        for name in _LAYERS:
            value = getattr(part, name, 0)
            if not isinstance(value, int) or not 0 <= value <= MAX_LAYERS:
                raise StartupError("invalid_checkpoint", f"config.json is damaged: {name} is {str(value)[:20]}")


def _damaged(error: Exception) -> StartupError:
    words = _PATH.sub("…", (str(error).strip().splitlines() or [""])[-1].strip())
    text = f"config.json does not describe a model ({type(error).__name__}: {words[:90]})"
    return StartupError("invalid_checkpoint", text)
