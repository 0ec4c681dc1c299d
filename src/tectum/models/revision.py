"""The revision of a loaded encoder: what, besides the media and the options, its rows depend on."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import torch


def encoder_revision(adapter: Any) -> str:
    """32 hexadecimal digits over the weights, the processor and its libraries, and the backend (device, dtype, torch).

    Reads every weight once (about a second a gigabyte). Equal in every process that loads the same checkpoint in the
    same environment, and on no other device type or dtype: there the last bits of rows differ.
    """
    digest = blake2b(digest_size=16)
    about = [adapter.family, adapter.dtype, adapter.device.type, torch.__version__]
    about += ["compiled"] * adapter.compiled
    about += [f"{name} {version(name)}" for name in ("transformers", "torchvision", "pillow", "tectum")]
    digest.update(json.dumps(about).encode())
    digest.update(_weights(adapter.model))
    for name, part in (("config", adapter.config), *_processors(adapter.processors)):
        digest.update(f"{name}:{part.to_json_string()}".encode())
    return digest.hexdigest()


def _weights(model: torch.nn.Module) -> bytes:
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.digest()


def _processors(processors: Any) -> list[tuple[str, Any]]:
    """The processors of transformers that the model has, by name."""
    found = [(field.name, getattr(processors, field.name)) for field in dataclasses.fields(processors)]
    return [(name, part) for name, part in found if hasattr(part, "to_json_string")]
