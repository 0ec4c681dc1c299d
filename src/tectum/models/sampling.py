"""Which frames of a clip a family looks at, and when they are: its own video processor's rule, made safe for any clip.

The rule of the family is `sample_frames` of its processor. Around it: short clips (a single frame, fewer frames than are
asked for) give what they have instead of an error, and a bound on the number holds for every family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tectum.errors import BadRequestError
from tectum.types import Clip, ClipInfo


@dataclass(frozen=True, slots=True)
class Sampling:
    """A family's way of taking frames.

    processor: its video processor. default: options that hold where the request and the processor say nothing.
    group: frames that form one step of the time axis; the last step is filled up by repeating the last frame.
    rate_and_number: the rule takes both at once; every other family's takes one of them.
    """

    processor: Any
    default: Mapping[str, float]
    group: int = 1
    rate_and_number: bool = False

    def wish(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`{"fps": …}` or `{"num_frames": …}`: the request's, else the processor's own, else the family's."""
        asked = {name: options[name] for name in ("fps", "num_frames") if name in options}
        own = {name: value for name in ("num_frames", "fps") if (value := getattr(self.processor, name, None))}
        if asked or not own:
            return asked or dict(self.default)
        return own if self.rate_and_number else dict([next(iter(own.items()))])

    def choose(self, info: ClipInfo, options: Mapping[str, Any]) -> list[int]:
        """Indices of the frames to decode, ascending; at least one step of the time axis."""
        wish = self.wish(options)
        most = options.get("max_frames", info.frames)
        indices = list(range(info.frames)) if info.sampled else self._by_the_family(info, wish)
        if len(indices) > most:
            if info.sampled:
                text = f"The list holds {info.frames} frames, more than max_frames ({most})"
                raise BadRequestError("media_refused", text, limit=most)
            indices = self._by_the_family(info, {"num_frames": most})[:most]
        if len(indices) < self.group:  # a single frame: the step it starts is filled up with it
            indices += indices[-1:] * (self.group - len(indices))
        return indices

    def _by_the_family(self, info: ClipInfo, wish: Mapping[str, Any]) -> list[int]:
        from transformers.video_utils import VideoMetadata

        asked = dict(wish)
        if "fps" in asked and not self.rate_and_number and getattr(self.processor, "num_frames", None):
            # the checkpoint's own number would win over the rate that was asked for
            asked = {"num_frames": max(1, int(info.frames / info.fps * asked["fps"]))}
        if "num_frames" in asked:
            asked["num_frames"] = min(asked["num_frames"], info.frames)
        metadata = VideoMetadata(total_num_frames=info.frames, fps=info.fps, duration=info.duration)
        try:
            indices = [int(index) for index in self.processor.sample_frames(metadata, **asked)]
        except (ValueError, ZeroDivisionError, RuntimeError, TypeError):
            indices = []  # the families' rules fail on clips that are shorter than what they want to take
        if not indices or max(indices) >= info.frames:
            return list(range(info.frames))[: max(1, asked.get("num_frames", self.group))]
        return indices

    def describe(self, clip: Clip, options: Mapping[str, Any]) -> dict[str, Any]:
        """The facts of a clip for its metadata: how many frames there were, which were taken, and by which rule."""
        info = clip.info
        rule = {"all": True} if info.sampled else self.wish(options)
        facts: dict[str, Any] = {
            "duration": info.duration,
            "fps": info.fps,
            "total_frames": info.frames,
            "frame_indices": list(clip.indices),
            "sampling": {**rule, **({"max_frames": options["max_frames"]} if "max_frames" in options else {})},
        }
        if clip.repeated:
            facts["repeated_frames"] = clip.repeated
        return facts


def retimed(info: ClipInfo, options: Mapping[str, Any]) -> ClipInfo:
    """A list of frames at the rate that the request says they were taken at; any other clip as it is."""
    if not info.sampled or "fps" not in options:
        return info
    fps = float(options["fps"])
    return replace(info, fps=fps, times=tuple(i / fps for i in range(info.frames)), duration=info.frames / fps)


def sampled_fps(clip: Clip) -> float:
    """Frames taken of each second of the clip: the share of all frames, at their rate."""
    return len(clip.indices) / clip.info.frames * clip.info.fps


def frame_times(clip: Clip) -> list[float]:
    """Seconds from the start of each frame taken.

    At a constant rate index over rate, as the families write it into their prompts; else the container's own times.
    """
    info = clip.info
    steady = all(abs(time - index / info.fps) <= 0.5 / info.fps for index, time in enumerate(info.times))
    return [index / info.fps if steady else info.times[index] for index in clip.indices]


def step_times(times: Sequence[float], group: int) -> tuple[float, ...]:
    """One time for each step of `group` frames: midway between its first and its last, the last frame repeated."""
    padded = list(times) + [times[-1]] * (-len(times) % group)
    return tuple((padded[i] + padded[i + group - 1]) / 2 for i in range(0, len(padded), group))
