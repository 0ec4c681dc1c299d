"""Encoded bytes → the frames of a clip that a family looks at, upright and in RGB.

A video is read twice: its packets, which give every frame's time and cost next to nothing, and then the frames that were
chosen. So limits and sampling rest on what is in the container, not on what its header claims. Damaged frames are shown
as a player would: the frame before them stays. Animated pictures and multi-page TIFFs (a list of frames) are clips, too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from PIL import Image, ImageSequence

from tectum.errors import BadRequestError
from tectum.media.damage import blamed_on
from tectum.media.policy import MediaPolicy, refuse_thin
from tectum.media.sniff import media_type
from tectum.types import Clip, ClipInfo

#: MIME type → FFmpeg's demuxer, named so that no playlist or script demuxer is ever asked
CONTAINERS = {
    "video/mp4": "mov",
    "video/x-m4v": "mov",
    "video/quicktime": "mov",
    "video/3gpp": "mov",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
    "video/x-msvideo": "avi",
    "video/x-flv": "flv",
    "video/mpeg": "mpeg",
}
#: pictures of several frames, by Pillow's name
ANIMATIONS = {"image/gif": "GIF", "image/png": "PNG", "image/apng": "PNG", "image/webp": "WEBP", "image/tiff": "TIFF"}
#: frames a second where a container holds no times at all: what the families' processors assume
NO_TIMES_FPS = 24.0
#: a container's own rate is believed when the times bear it out to this share
RATE_TOLERANCE = 0.01
#: of the frames that were chosen, at most this share may be repeats of the frame before
MAX_REPEATED = 0.5

Choose = Callable[[ClipInfo], Sequence[int]]


def probe_video(data: bytes, policy: MediaPolicy) -> ClipInfo:
    """What the clip holds, without decoding more than its first frame (which knows how it is turned).

    Raises BadRequestError: `unsupported_media` (415), `media_too_large` or `image_too_large` (413),
    `media_refused`, `media_decode_failed` (400).
    """
    with blamed_on("clip"):
        if media_type(data) in ANIMATIONS:
            return _Pages(data, policy).info
        with _open(data) as container:
            return _scan(container, policy).info


def decode_video(data: bytes, policy: MediaPolicy, choose: Choose) -> Clip:
    """Decode the frames that `choose` picks from the clip's facts.

    choose: gets a `ClipInfo`, returns ascending indices of frames (repeats allowed). Raises BadRequestError as
    `probe_video` does, `media_too_large` when the chosen frames take more memory than is allowed, and what `choose` raises.
    """
    with blamed_on("clip"):
        if media_type(data) in ANIMATIONS:
            pages = _Pages(data, policy)
            indices = _chosen(pages.info, policy, choose)
            return Clip(pages.frames(indices), indices, pages.info)
        with _open(data) as container:
            scan = _scan(container, policy)
            indices = _chosen(scan.info, policy, choose)
            frames, repeated = _decode(container, scan, indices)
            return Clip(frames, indices, scan.info, repeated)


def _chosen(info: ClipInfo, policy: MediaPolicy, choose: Choose) -> tuple[int, ...]:
    indices = tuple(choose(info))
    _check_bytes(len(indices), info.width, info.height, policy)
    return indices


# --- containers ---


@dataclass(frozen=True, slots=True)
class _Scan:
    """What the packets tell. pts: presentation times in the stream's units, in the order of display."""

    info: ClipInfo
    pts: tuple[int, ...]
    quarter_turns: int


def _open(data: bytes) -> Any:
    kind = media_type(data)
    if kind not in CONTAINERS:
        accepted = ", ".join(sorted({*CONTAINERS.values(), *ANIMATIONS.values()}))
        raise BadRequestError("unsupported_media", f"The item is {kind}; clips are taken as {accepted}", found=kind)
    return av.open(io.BytesIO(data), format=CONTAINERS[kind], metadata_errors="replace")


def _picture_stream(container: Any) -> Any:
    """The first track of moving pictures: a cover picture is none."""
    for stream in container.streams.video:
        if not stream.disposition & stream.disposition.attached_pic:
            return stream
    raise BadRequestError("unsupported_media", "The clip has no track of pictures")


def _scan(container: Any, policy: MediaPolicy) -> _Scan:
    stream = _picture_stream(container)
    stream.codec_context.thread_count = 1  # many clips are prepared at once, each in its thread
    _check_picture(stream.codec_context.width, stream.codec_context.height, policy)
    pts = sorted(_pts(container.demux(stream), policy))
    if not pts:
        raise BadRequestError("media_decode_failed", "The clip holds no frames")
    times, fps = _timeline(pts, stream)
    _check_length(len(pts), len(pts) / fps, policy)
    turns, width, height = _orientation(container, stream, policy)
    heard = len(container.streams.audio) > 0
    info = ClipInfo(width, height, len(pts), times, fps, len(pts) / fps, has_audio=heard)
    return _Scan(info, tuple(pts), turns)


def _pts(packets: Any, policy: MediaPolicy) -> Iterator[int]:
    """Presentation times of the frames; where there are none, their order."""
    number = 0
    for packet in packets:
        if packet.size == 0 or packet.is_discard:
            continue
        time = packet.pts if packet.pts is not None else packet.dts
        yield number if time is None else time
        number += 1
        _check_length(number, 0.0, policy)


def _timeline(pts: Sequence[int], stream: Any) -> tuple[tuple[float, ...], float]:
    """Seconds from the first frame of each, and frames a second: the container's own rate where its times bear it out."""
    claimed = float(stream.average_rate or 0)
    unit = float(stream.time_base or 0)
    span = (pts[-1] - pts[0]) * unit
    if len(pts) < 2 or span <= 0:
        fps = claimed if len(pts) < 2 and claimed > 0 else NO_TIMES_FPS
        return tuple(i / fps for i in range(len(pts))), fps
    measured = (len(pts) - 1) / span
    believed = claimed > 0 and abs(claimed - measured) <= RATE_TOLERANCE * measured
    return tuple((time - pts[0]) * unit for time in pts), claimed if believed else measured


def _orientation(container: Any, stream: Any, policy: MediaPolicy) -> tuple[int, int, int]:
    """Quarter turns that bring the first frame upright, and its size after them."""
    container.seek(0)
    for frame in _frames(container, stream):
        turns = round(frame.rotation / 90) % 4
        width, height = (frame.height, frame.width) if turns % 2 else (frame.width, frame.height)
        _check_picture(width, height, policy)
        return turns, width, height
    raise BadRequestError("media_decode_failed", "No frame of the clip can be decoded")


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decoded frames in the order of display; packets that the decoder rejects are skipped."""
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except av.error.InvalidDataError:
            continue


def _decode(container: Any, scan: _Scan, indices: Sequence[int]) -> tuple[np.ndarray, int]:
    """uint8 `[len(indices), height, width, 3]`, and how many are repeats of the frame before."""
    stream = _picture_stream(container)
    container.seek(0)
    stream.codec_context.flush_buffers()
    info = scan.info
    found = np.empty((len(indices), info.height, info.width, 3), np.uint8)
    numbers = _numbers(scan.pts)
    done = repeated = 0
    before: Any = None
    for order, frame in enumerate(_frames(container, stream)):
        here = numbers.get(frame.pts, [order])
        number = here.pop() if len(here) > 1 else here[0]
        while done < len(indices) and indices[done] < number:
            found[done] = _upright(before if before is not None else frame, scan)
            done, repeated = done + 1, repeated + 1
        while done < len(indices) and indices[done] == number:
            found[done] = _upright(frame, scan) if done == 0 or indices[done - 1] != number else found[done - 1]
            done += 1
        if done == len(indices):
            break
        before = frame
    if done < len(indices) and before is not None:
        repeated += len(indices) - done
        found[done:] = _upright(before, scan)
    if (before is None and done == 0) or repeated > MAX_REPEATED * len(indices):
        raise BadRequestError("media_decode_failed", f"{repeated} of {len(indices)} frames cannot be decoded")
    return found, repeated


def _numbers(pts: Sequence[int]) -> dict[int, list[int]]:
    """Time → numbers of the frames shown then, last first: a container may give several, or all, the same time."""
    found: dict[int, list[int]] = {}
    for number in reversed(range(len(pts))):
        found.setdefault(pts[number], []).append(number)
    return found


def _upright(frame: Any, scan: _Scan) -> np.ndarray:
    """RGB `[height, width, 3]`, turned as its flag says; a frame of another size is scaled to the first one's."""
    width, height = scan.info.width, scan.info.height
    if scan.quarter_turns % 2:
        width, height = height, width
    if (frame.width, frame.height) != (width, height):
        frame = frame.reformat(width=width, height=height)
    return np.rot90(frame.to_ndarray(format="rgb24"), scan.quarter_turns)


def _check_picture(width: int, height: int, policy: MediaPolicy) -> None:
    if width * height > policy.max_image_pixels:
        text = f"The clip is {width}x{height}, more than {policy.max_image_pixels} pixels (--max-image-pixels)"
        raise BadRequestError("image_too_large", text, limit=policy.max_image_pixels)
    refuse_thin("clip", width, height, policy)


def _check_length(frames: int, seconds: float, policy: MediaPolicy) -> None:
    if frames > policy.max_video_frames:
        text = f"The clip holds more than {policy.max_video_frames} frames (--max-video-frames)"
        raise BadRequestError("media_too_large", text, limit=policy.max_video_frames)
    if seconds > policy.max_video_seconds:
        text = f"The clip lasts {seconds:.0f} s, longer than --max-video-seconds {policy.max_video_seconds:.0f}"
        raise BadRequestError("media_too_large", text, limit=policy.max_video_seconds)


def _check_bytes(frames: int, width: int, height: int, policy: MediaPolicy) -> None:
    size = frames * width * height * 3
    if size > policy.max_clip_bytes:
        text = f"{frames} frames of {width}x{height} are {size} bytes (--max-clip-bytes {policy.max_clip_bytes})"
        raise BadRequestError("media_too_large", text, limit=policy.max_clip_bytes)


# --- animated pictures, and lists of frames ---


class _Pages:
    """An animated picture. A TIFF is a list of frames, chosen by whoever made it: it has no times of its own."""

    def __init__(self, data: bytes, policy: MediaPolicy) -> None:
        name = ANIMATIONS[media_type(data)]
        self._picture = Image.open(io.BytesIO(data), formats=[name])
        width, height = self._picture.size
        _check_picture(width, height, policy)
        count = int(getattr(self._picture, "n_frames", 1))
        _check_length(count, 0.0, policy)
        _check_bytes(count, width, height, policy)  # to know their times, all of them are decoded
        listed = name == "TIFF" or count == 1
        times = tuple(i / NO_TIMES_FPS for i in range(count)) if listed else self._times(count)
        fps = NO_TIMES_FPS if listed or times[-1] <= 0 else (count - 1) / times[-1]
        _check_length(count, count / fps, policy)
        self.info = ClipInfo(width, height, count, times, fps, count / fps, sampled=listed)

    def _times(self, count: int) -> tuple[float, ...]:
        """Seconds until each frame is shown: the sum of the durations before it."""
        times, at = [], 0.0
        for number in range(count):
            self._picture.seek(number)
            times.append(at)
            at += float(self._picture.info.get("duration") or 0.0) / 1000
        return tuple(times)

    def frames(self, indices: Sequence[int]) -> np.ndarray:
        found = np.empty((len(indices), self.info.height, self.info.width, 3), np.uint8)
        wanted: dict[int, list[int]] = {}
        for place, number in enumerate(indices):
            wanted.setdefault(number, []).append(place)
        for number, page in enumerate(ImageSequence.Iterator(self._picture)):
            for place in wanted.get(number, ()):
                found[place] = self._shown(page)
        return found

    def _shown(self, page: Image.Image) -> np.ndarray:
        if page.size != (self.info.width, self.info.height):
            raise BadRequestError("media_decode_failed", "The frames of the list differ in size")
        if page.has_transparency_data:
            rgba = page.convert("RGBA")
            page = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
        return np.asarray(page.convert("RGB"))
