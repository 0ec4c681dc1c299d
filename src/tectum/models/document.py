"""`docs/models.md`, written from the adapters: `python -m tectum.models.document --write docs/models.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from tectum.models.features import FeaturesAdapter
from tectum.models.options import Option
from tectum.models.registry import FAMILIES, adapter_class
from tectum.types import Modality

_HEAD = """# Models

Written from the adapters by `python -m tectum.models.document --write docs/models.md`; edit those, not this page.

Every family is checked against transformers' own model in one piece (`make parity`): rows of the same request are equal to the
bit, in float32, bfloat16 and float16, and so are the language model's logits. Rows are counted from sizes alone, before
anything is decoded; they equal the placeholders that the family's processor puts into the prompt (wrapper tokens such as
`<|vision_start|>` are not counted, for they are not encoder rows). `tectum doctor MODEL` counts them for sample inputs.

## Families

| family | architectures | modalities | rows of an item |
|---|---|---|---|
"""
_BATCHING = """
## What batching changes

Requests that share a forward (`--fuse`) see matrices of other shapes, and floating-point sums may be ordered differently.
The bound is what the parity suite allows for a request beside another one, against the same request alone, in float32. In
bfloat16 and float16 it allows four units in the last place of the largest value of the rows. On a CPU nothing is fused by
default, and every request's rows are those of the model in one piece, to the bit. `--compile` (off unless asked for) gives
that up for faster forwards: torch.compile orders sums its own way, and content keys tell such rows from the others.

| family | modality | float32, beside another request |
|---|---|---|
"""
_OPTIONS = """
## Options

Options are part of what makes two requests the same. An unknown one, or one of another modality, is refused
(`invalid_option`): none is ignored silently.

| family | modality | option | value | meaning |
|---|---|---|---|---|
"""
_VIDEO = """
## Videos

A clip's packets are read first: they give the number of frames and the time of each, whatever the header claims. Then
the family's own rule chooses frames (its processor's `sample_frames`, by `fps` or `num_frames`), and only those are
kept. The metadata of an item say which rule held (`sampling`), which frames were taken (`frame_indices`, of
`total_frames` at `fps`), when each step of the time axis is (`timestamps`, seconds), how long one step lasts
(`second_per_grid`), and where it is so that the family writes the times into its prompts (`timestamps_in_prompt`). Times are
frame number over rate, as the families write them into their prompts, as long as the clip's own times are within half a
frame of that; a clip of variable rate keeps its own.

| where neither request nor checkpoint says otherwise | |
|---|---|
"""
_MORE = """
- A rotation flag is honoured. A frame that cannot be decoded repeats the one before it (`repeated_frames` says how many);
  a clip of which more than half would be repeats is refused.
- An animated GIF, PNG or WebP is a clip with the times of its frames. A TIFF of several pages is a list of frames that
  the caller chose: all of them are taken, and `fps` says at which rate they were (24 where it does not). In Python,
  a list of pictures or an array `[frames, height, width, 3]` becomes such a TIFF.
- A clip with sound, sent to a model that hears, must say what becomes of the sound: `audio_track: separate` (the same clip is
  also sent as an audio item) or `drop`. For a model that does not hear, the metadata say that the sound was not heard.
- Containers: MP4/MOV, Matroska/WebM, AVI, FLV, MPEG. No playlist is ever opened.

## Audio

Channels are averaged and the rate is changed to the extractor's. WAV, FLAC, Ogg (Vorbis, Opus), AIFF, MP3, AAC, and the sound
of a video are read; in Python also `(samples, rate)`. The metadata say how long the recording is (`seconds`) and how much of it
the family uses (`seconds_used`): a Whisper window is cut at its end, as the family's own processor does it. Where receivers count
rows by it, they also say how many frames the spectrogram has that hold sound (`mel_frames`).

## Limits

- The encoder must be stored as plain floats in safetensors. A quantised language model beside it does not matter.
- Processors are the torchvision ones of transformers. The PIL ones give other pixels (by up to 0.03), so the rows would differ.
- LLaVA: CLIP and SigLIP towers. Omni models: the thinker; sound and pictures of one clip come as two requests.
- `output: pooled` gives the tower's own pooled vector, before any projection into a space shared with text.

A family that is not here: [adding-a-family.md](adding-a-family.md).
"""


def render() -> str:
    classes = [adapter_class(family) for family in FAMILIES]
    text = _HEAD + "".join(_family_rows(cls) for cls in classes)
    prompts = [f"- `{cls.family}`: {cls.depends_on_prompt}.\n" for cls in classes if cls.depends_on_prompt]
    text += "\nRows that depend on more than the item itself:\n\n" + "".join(prompts)
    text += _BATCHING + "".join(_batch_rows(cls) for cls in classes)
    text += _OPTIONS + "".join(_option_rows(cls) for cls in classes)
    watching = [cls for cls in classes if Modality.VIDEO in cls.modalities]
    text += _VIDEO + "".join(f"| `{cls.family}` | {_sampling(cls)} |\n" for cls in watching)
    return text + _MORE


def _family_rows(cls: type[FeaturesAdapter]) -> str:
    lines, head = [], f"`{cls.family}` | {', '.join(f'`{name}`' for name in cls.architectures)}"
    for modality in _modalities(cls):
        lines.append(f"| {head} | {modality} | {cls.row_rule[modality]} |\n")
        head = " | "
    return "".join(lines)


def _batch_rows(cls: type[FeaturesAdapter]) -> str:
    bounds = {modality: cls.batch_bound[modality] for modality in _modalities(cls)}
    words = {modality: f"at most {bound:.0e}" if bound else "equal to the bit" for modality, bound in bounds.items()}
    return "".join(f"| `{cls.family}` | {modality} | {word} |\n" for modality, word in words.items())


def _option_rows(cls: type[FeaturesAdapter]) -> str:
    return "".join(
        f"| `{cls.family}` | {modality} | `{option.name}` | {_value(option)} | {option.meaning} |\n"
        for modality in _modalities(cls)
        for option in cls.options.get(modality, ())
    )


def _value(option: Option) -> str:
    if option.kind is bool:
        return "true, false"
    if option.kind is str:
        return ", ".join(option.choices)
    if option.kind is int:
        return f"{option.unit}, {option.least} to {option.most}"
    return f"above {option.least}, at most {option.most}"


def _sampling(cls: type[FeaturesAdapter]) -> str:
    ((name, value),) = cls.default_sampling.items()
    return f"{value:g} frames a second" if name == "fps" else f"{value:g} frames, evenly over the clip"


def _modalities(cls: type[FeaturesAdapter]) -> list[Modality]:
    return [modality for modality in Modality if modality in cls.modalities]


if __name__ == "__main__":
    Path(sys.argv[sys.argv.index("--write") + 1]).write_text(render())
