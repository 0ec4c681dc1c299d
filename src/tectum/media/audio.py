"""Encoded bytes → one channel of samples at the rate that a family wants.

Channels are averaged; the rate is changed by FFmpeg's resampler on a stream of blocks, so that memory follows the result
and not the source. WAV, FLAC, Ogg, AIFF and MP3 are read by libsndfile; AAC, MP4, WebM and the sound of a video by FFmpeg.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import av
import numpy as np
import soundfile

from tectum.errors import BadRequestError
from tectum.media.damage import blamed_on
from tectum.media.policy import MediaPolicy
from tectum.media.sniff import media_type
from tectum.media.video import CONTAINERS
from tectum.types import Recording, RecordingInfo

#: what libsndfile reads
SOUND_FILES = {"audio/x-wav", "audio/x-flac", "audio/ogg", "audio/x-aiff", "audio/mpeg"}
#: MIME type → FFmpeg's demuxer
SOUND_CONTAINERS = {"audio/mp4": "mov", "audio/aac": "aac", "audio/amr": "amr", **CONTAINERS}
#: samples a second that a recording may claim
RATES = (1000, 768_000)
MAX_CHANNELS = 64
_BLOCK = 1 << 16


def probe_audio(data: bytes, policy: MediaPolicy) -> RecordingInfo:
    """Length, rate and channels, without decoding. `seconds` is None where not even the packets say it.

    Raises BadRequestError: `unsupported_media` (415), `media_too_large` (413), `media_refused`, `media_decode_failed` (400).
    """
    with blamed_on("recording"):
        if media_type(data) in SOUND_FILES:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                return _file_info(file, policy)
        return _container_info(data, policy)


def decode_audio(data: bytes, policy: MediaPolicy, rate: int) -> Recording:
    """Decode to mono at `rate` samples a second. Raises BadRequestError as `probe_audio` does.

    The result holds ceil(source samples x rate / source rate) samples.
    """
    with blamed_on("recording"):
        if media_type(data) in SOUND_FILES:
            with soundfile.SoundFile(io.BytesIO(data)) as file:
                info = _file_info(file, policy)
                blocks = file.blocks(_BLOCK, dtype="float32", always_2d=True)
                samples = _at_rate((block.mean(axis=1) for block in blocks), info.rate, rate, policy)
                return _recording(samples, rate, info)
        info = _container_info(data, policy)
        with _open(data) as container:
            samples = _at_rate(_mono(container), info.rate, rate, policy)
            return _recording(samples, rate, info)


def _recording(samples: np.ndarray, rate: int, info: RecordingInfo) -> Recording:
    if not len(samples):
        raise BadRequestError("empty_media", "The recording holds no samples")
    if not np.isfinite(samples).all():
        raise BadRequestError("media_refused", "The recording holds values that are no numbers")
    return Recording(samples, rate, info)


def _info(seconds: float | None, rate: int, channels: int, policy: MediaPolicy) -> RecordingInfo:
    if not RATES[0] <= rate <= RATES[1] or not 1 <= channels <= MAX_CHANNELS:
        text = f"The recording has {channels} channels at {rate} Hz; taken are {RATES[0]} to {RATES[1]} Hz"
        raise BadRequestError("media_refused", text)
    _check_length(seconds or 0.0, policy)
    return RecordingInfo(seconds, rate, channels)


def _check_length(seconds: float, policy: MediaPolicy) -> None:
    if seconds > policy.max_audio_seconds:
        text = f"The recording lasts more than {policy.max_audio_seconds:.0f} s (--max-audio-seconds)"
        raise BadRequestError("media_too_large", text, limit=policy.max_audio_seconds)


def _file_info(file: soundfile.SoundFile, policy: MediaPolicy) -> RecordingInfo:
    return _info(file.frames / max(1, file.samplerate), file.samplerate, file.channels, policy)


# --- containers ---


def _open(data: bytes) -> Any:
    kind = media_type(data)
    if kind not in SOUND_CONTAINERS:
        accepted = ", ".join(sorted({name.split("/")[1] for name in {*SOUND_FILES, *SOUND_CONTAINERS}}))
        raise BadRequestError(
            "unsupported_media", f"The item is {kind}; recordings are taken as {accepted}", found=kind
        )
    return av.open(io.BytesIO(data), format=SOUND_CONTAINERS[kind], metadata_errors="replace")


def _container_info(data: bytes, policy: MediaPolicy) -> RecordingInfo:
    """Length by the packets, which cost next to nothing to walk: a header may claim anything."""
    with _open(data) as container:
        if not container.streams.audio:
            raise BadRequestError("unsupported_media", "The item has no sound")
        stream = container.streams.audio[0]
        length = sum(packet.duration or 0 for packet in container.demux(stream))
        seconds = float(length * stream.time_base) if length and stream.time_base else None
        return _info(seconds, stream.codec_context.sample_rate, stream.codec_context.channels, policy)


def _mono(container: Any) -> Iterator[np.ndarray]:
    """Blocks of the sound, all channels averaged. A damaged packet ends it: what comes after would be out of time."""
    convert = av.AudioResampler(format="fltp")
    for frame in container.decode(container.streams.audio[0]):
        for part in convert.resample(frame):
            yield part.to_ndarray().mean(axis=0)


# --- the rate ---


def _at_rate(blocks: Iterable[np.ndarray], source: int, rate: int, policy: MediaPolicy) -> np.ndarray:
    """float32 `[samples]` at `rate` from mono blocks at `source`, as long as the source lasts."""
    resample = None if source == rate else av.AudioResampler(format="flt", layout="mono", rate=rate)
    parts, taken = [], 0
    for block in blocks:
        taken += len(block)
        _check_length(taken / source, policy)
        if resample is None:
            parts.append(block)
            continue
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(block[None], np.float32), format="flt", layout="mono")
        frame.sample_rate = source
        parts += [part.to_ndarray()[0] for part in resample.resample(frame)]
    if resample is not None and taken:
        parts += [part.to_ndarray()[0] for part in resample.resample(None)]
    samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
    length = math.ceil(taken * rate / source)
    return np.pad(samples[:length], (0, max(0, length - len(samples)))).astype(np.float32, copy=False)
