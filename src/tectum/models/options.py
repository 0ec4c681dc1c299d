"""What a request may ask of a family's processor: each option has a type, a bound and a sentence, and no other is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tectum.errors import BadRequestError
from tectum.types import Modality

#: upper bound of the pixel options: beyond it a picture would be scaled up to gigabytes
MAX_OPTION_PIXELS = 1 << 28
#: upper bound of the frame options
MAX_OPTION_FRAMES = 4096


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `kind` int or float: a number from `least` to `most` (a float above `least`); bool; str: a choice."""

    name: str
    kind: type
    meaning: str
    least: float = 1
    most: float = 1
    choices: tuple[str, ...] = ()
    unit: str = "number"

    def check(self, value: Any) -> Any:
        """The value in its type. Raises BadRequestError `invalid_option` with what would be right."""
        if self.kind is bool and type(value) is not bool:
            raise BadRequestError("invalid_option", f"Option {self.name} must be true or false")
        if self.kind is str and value not in self.choices:
            choices = ", ".join(self.choices)
            raise BadRequestError("invalid_option", f"Option {self.name} must be one of: {choices}")
        if self.kind is int and not (type(value) is int and self.least <= value <= self.most):
            text = f"Option {self.name} must be a whole {self.unit} from {self.least} to {self.most}"
            raise BadRequestError("invalid_option", text)
        if self.kind is not float:
            return value
        if type(value) not in (int, float) or not self.least < value <= self.most:
            text = f"Option {self.name} must be a number above {self.least}, at most {self.most}"
            raise BadRequestError("invalid_option", text)
        return float(value)


def pixels(name: str, meaning: str) -> Option:
    return Option(name, int, meaning, most=MAX_OPTION_PIXELS, unit="number of pixels")


def detail(low: str, high: str = "as the model's own") -> Option:
    return Option("detail", str, f"low: {low}; high and auto: {high}", choices=("auto", "low", "high"))


FPS = Option("fps", float, "frames to take of each second", least=0, most=240)
NUM_FRAMES = Option("num_frames", int, "frames to take of the whole clip", most=MAX_OPTION_FRAMES)
MAX_FRAMES = Option("max_frames", int, "at most so many frames, however long the clip", most=MAX_OPTION_FRAMES)
AUDIO_TRACK = Option(
    "audio_track",
    str,
    "of a clip with sound, for a model that hears: separate (its sound comes as an audio request) or drop",
    choices=("separate", "drop"),
)
OUTPUT = Option("output", str, "rows: the last hidden state; pooled: one row an item", choices=("rows", "pooled"))


def read_options(
    family: str, modality: Modality, accepted: tuple[Option, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The given options, each checked. Raises BadRequestError `invalid_option` for an unknown or a wrong one."""
    by_name = {option.name: option for option in accepted}
    found = {}
    for name, value in given.items():
        if name not in by_name:
            takes = ", ".join(sorted(by_name)) or "none"
            text = f"Unknown option {str(name)[:40]!r}; {family} takes: {takes} ({modality})"
            raise BadRequestError("invalid_option", text)
        found[name] = by_name[name].check(value)
    if "fps" in found and "num_frames" in found:
        raise BadRequestError("invalid_option", "Options fps and num_frames exclude each other; give one of them")
    return found
