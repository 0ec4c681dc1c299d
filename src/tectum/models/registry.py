"""Which adapter serves which architecture (the name in a checkpoint's `config.json`). A family's module is imported on use.

Owns the list of families: a new one is a file beside this one, and a line here (docs/adding-a-family.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tectum.errors import MAX_TEXT, StartupError

if TYPE_CHECKING:
    from tectum.models.features import FeaturesAdapter

#: module and class of each family's adapter, under `tectum.models`
FAMILIES: dict[str, tuple[str, str]] = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLAdapter"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen25VLAdapter"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLAdapter"),
    "llava": ("llava", "LlavaAdapter"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionAdapter"),
    "internvl": ("internvl", "InternVLAdapter"),
    "gemma3": ("gemma3", "Gemma3Adapter"),
    "idefics3": ("idefics3", "Idefics3Adapter"),
    "smolvlm": ("smolvlm", "SmolVLMAdapter"),
    "qwen2_audio": ("qwen2_audio", "Qwen2AudioAdapter"),
    "voxtral": ("voxtral", "VoxtralAdapter"),
    "qwen2_5_omni": ("qwen2_5_omni", "Qwen25OmniAdapter"),
    "qwen3_omni": ("qwen3_omni", "Qwen3OmniAdapter"),
    "clip": ("encoders", "CLIPAdapter"),
    "siglip": ("encoders", "SiglipAdapter"),
    "dinov2": ("encoders", "Dinov2Adapter"),
    "whisper": ("encoders", "WhisperAdapter"),
}
#: the same for a person, short enough for an error; a test holds it equal to the families
SERVED = (
    "Qwen2/2.5/3-VL, 2.5/3-Omni, 2-Audio, LLaVA, OneVision, InternVL, Gemma3, Idefics3, SmolVLM, Voxtral, "
    "CLIP, SigLIP, DINOv2, Whisper"
)
#: letters of an unknown architecture that fit into the error beside the known ones
NAME_ROOM = MAX_TEXT - len(" is not supported (docs/adding-a-family.md); known: ") - len(SERVED)


def adapter_class(family: str) -> type[FeaturesAdapter]:
    module, name = FAMILIES[family]
    found: type[FeaturesAdapter] = getattr(import_module(f"tectum.models.{module}"), name)
    return found


def architectures() -> dict[str, str]:
    """Architecture → family, of all that is served."""
    return {name: family for family in FAMILIES for name in adapter_class(family).architectures}


def adapter_for(architecture: str) -> type[FeaturesAdapter]:
    """The adapter class of an architecture. Raises StartupError `unsupported_architecture` with the families there are."""
    family = architectures().get(architecture)
    if family is None:
        name = architecture if len(architecture) <= NAME_ROOM else f"{architecture[: NAME_ROOM - 1]}…"
        text = f"{name} is not supported (docs/adding-a-family.md); known: {SERVED}"
        raise StartupError("unsupported_architecture", text, known=sorted(architectures()))
    return adapter_class(family)
