"""Recordings: one channel at the family's rate, as long as they last."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
import soundfile

from tectum.errors import BadRequestError
from tectum.items import as_media_items, wav
from tectum.media.audio import decode_audio, probe_audio
from tectum.media.policy import MediaPolicy
from tectum.types import Modality
from tests import zoo
from tests.media.test_video import numbered, video

POLICY = MediaPolicy()


def sine(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate).astype(np.float32)


def written(samples: np.ndarray, rate: int, form: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def test_samples_at_the_right_rate_come_back_to_the_bit():
    samples = zoo.tone(1.3)
    recording = decode_audio(wav(samples, 16000), POLICY, 16000)
    assert np.array_equal(recording.samples, samples)
    assert (recording.rate, recording.info.seconds, recording.seconds) == (16000, 1.3, 1.3)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_another_rate_is_changed_on_the_time_axis(rate):
    """A sine stays the sine of the same frequency and phase, compared with the one computed at the new rate."""
    recording = decode_audio(wav(sine(1.0, rate), rate), POLICY, 16000)
    assert len(recording.samples) == 16000
    off = np.abs(recording.samples - sine(1.0, 16000))
    assert off[400:-400].max() < 2e-3


def test_channels_are_averaged():
    left, right = sine(0.5, 16000, 300.0), sine(0.5, 16000, 500.0)
    recording = decode_audio(wav(np.stack([left, right], 1), 16000), POLICY, 16000)
    np.testing.assert_allclose(recording.samples, (left + right) / 2, atol=1e-6)
    assert recording.info.channels == 2


@pytest.mark.parametrize(
    ("form", "subtype"), [("FLAC", None), ("OGG", "VORBIS"), ("AIFF", None), ("MP3", None), ("WAV", "PCM_16")]
)
def test_compressed_forms_decode_to_much_the_same(form, subtype):
    samples = sine(1.0, 16000)
    recording = decode_audio(written(samples, 16000, form, subtype), POLICY, 16000)
    assert len(recording.samples) == pytest.approx(16000, abs=1200)  # MP3 pads with whole frames
    spectrum = np.abs(np.fft.rfft(recording.samples * np.hanning(len(recording.samples))))
    assert np.argmax(spectrum) * 16000 / len(recording.samples) == pytest.approx(440, abs=2)


def test_the_sound_of_a_video_is_a_recording():
    recording = decode_audio(video(numbered(3), sound=True), POLICY, 16000)
    assert recording.seconds == pytest.approx(1.0, abs=0.2)
    assert np.abs(recording.samples).max() > 0.2
    with pytest.raises(BadRequestError, match="no sound"):
        decode_audio(video(numbered(3)), POLICY, 16000)


def test_long_recordings_are_refused_by_their_header_and_by_their_length():
    policy = MediaPolicy(max_audio_seconds=2.0)
    with pytest.raises(BadRequestError, match="more than 2 s") as caught:
        probe_audio(wav(sine(2.1, 8000), 8000), policy)
    assert caught.value.status == 413
    file = io.BytesIO()
    container = av.open(file, "w", format="adts")
    track = container.add_stream("aac", rate=16000)
    frame = av.AudioFrame.from_ndarray(sine(3.0, 16000)[None], format="fltp", layout="mono")
    frame.sample_rate = 16000
    container.mux(track.encode(frame))
    container.mux(track.encode(None))
    container.close()
    with pytest.raises(BadRequestError, match="more than 2 s"):
        decode_audio(file.getvalue(), policy, 16000)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "media_decode_failed"),
        (wav(np.zeros(0, np.float32), 16000), "empty_media"),
        (wav(np.array([0.1, np.nan], np.float32), 16000), "media_refused"),
        (wav(np.zeros(100, np.float32), 10), "media_refused"),
        (b"<html><body>", "unsupported_media"),
    ],
)
def test_what_is_no_recording_is_refused(data, code):
    with pytest.raises(BadRequestError) as caught:
        decode_audio(data, POLICY, 16000)
    assert caught.value.code == code


def test_samples_in_memory_travel_without_loss():
    (item,) = as_media_items((zoo.tone(0.2), 16000), Modality.AUDIO)
    assert np.array_equal(decode_audio(item.data or b"", POLICY, 16000).samples, zoo.tone(0.2))
