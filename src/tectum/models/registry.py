"""Which adapter serves which architecture (the name in a checkpoint's `config.json`)."""

from __future__ import annotations

from tectum.errors import StartupError
from tectum.models.qwen2_5_vl import Qwen25VLAdapter
from tectum.models.qwen2_vl import Qwen2VLAdapter, QwenVLAdapter
from tectum.models.qwen3_vl import Qwen3VLAdapter

ADAPTERS: dict[str, type[QwenVLAdapter]] = {
    name: cls for cls in (Qwen2VLAdapter, Qwen25VLAdapter, Qwen3VLAdapter) for name in cls.architectures
}


def adapter_for(architecture: str) -> type[QwenVLAdapter]:
    """The adapter class of an architecture. Raises StartupError `unsupported_architecture` with those there are."""
    if architecture not in ADAPTERS:
        text = f"Architecture {architecture[:60]} is not supported; supported: {', '.join(sorted(ADAPTERS))}"
        raise StartupError("unsupported_architecture", text)
    return ADAPTERS[architecture]
