"""Tectum: the encoder plane for multimodal serving.

`Encoder` runs an encoder in this process, `Client` talks to one that runs as a service; both give an `Embedding`.
Importing this package imports neither torch nor transformers: both come with the first use of `Encoder`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tectum.errors import BadRequestError, InternalError, MMError, TectumError
from tectum.types import Embedding, MediaItem, Modality

if TYPE_CHECKING:
    from tectum.config import Settings
    from tectum.engines.client import AsyncClient, Client
    from tectum.pipeline.encoder import Encoder

__version__ = "0.1.0"

_LAZY = {
    "Encoder": "tectum.pipeline.encoder",
    "Client": "tectum.engines.client",
    "AsyncClient": "tectum.engines.client",
    "Settings": "tectum.config",
}

__all__ = [
    "AsyncClient",
    "BadRequestError",
    "Client",
    "Embedding",
    "Encoder",
    "InternalError",
    "MMError",
    "MediaItem",
    "Modality",
    "Settings",
    "TectumError",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tectum' has no attribute {name!r}")
