"""Clips: the frames that were asked for, at the right times, from containers that tell the truth and from those that do not."""

from __future__ import annotations

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from tectum.errors import BadRequestError
from tectum.items import as_media_items
from tectum.media.decode import open_item
from tectum.media.policy import MediaPolicy
from tectum.media.video import decode_video, probe_video
from tectum.types import Modality
from tests import zoo

POLICY = MediaPolicy()


def everything(info):
    return range(info.frames)


def video(
    frames: np.ndarray,
    *,
    fps: int = 8,
    form: str = "mp4",
    codec: str = "libx264",
    pts: list[int] | None = None,
    sound: bool = False,
    rotation: int = 0,
) -> bytes:
    """A clip of these frames; lossless but for the colour space. pts: times in 1/1000 s instead of a constant rate."""
    file = io.BytesIO()
    container = av.open(file, "w", format=form)
    stream = container.add_stream(codec, rate=fps, options={"qp": "0"} if codec == "libx264" else {})
    stream.width, stream.height, stream.pix_fmt = (
        frames.shape[2],
        frames.shape[1],
        "yuv444p" if codec == "libx264" else "yuvj420p",
    )
    if codec == "mpeg4":
        stream.pix_fmt = "yuv420p"
    if pts is not None:
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
    if rotation:
        stream.set_display_rotation(rotation)
    track = container.add_stream("aac", rate=16000) if sound else None
    for number, pixels in enumerate(frames):
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        if pts is not None:
            frame.pts, frame.time_base = pts[number], Fraction(1, 1000)
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))
    if track is not None:
        tone = av.AudioFrame.from_ndarray(zoo.tone(1.0)[None], format="fltp", layout="mono")
        tone.sample_rate = 16000
        container.mux(track.encode(tone))
        container.mux(track.encode(None))
    container.close()
    return file.getvalue()


def numbered(count: int, width: int = 64, height: int = 48) -> np.ndarray:
    """Frame k is gray of brightness 12 k: which frame it is can be read from any of its pixels."""
    return np.stack([np.full((height, width, 3), 12 * k, np.uint8) for k in range(count)])


def numbers(clip) -> list[int]:
    return [round(float(frame.mean()) / 12) for frame in clip.frames]


@pytest.mark.parametrize(("form", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("avi", "mpeg4")])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_chosen_frames_come_in_order_and_at_their_times(form, codec, count):
    clip = decode_video(video(numbered(count), form=form, codec=codec), POLICY, lambda info: range(0, info.frames, 2))
    assert numbers(clip) == list(range(0, count, 2))
    assert clip.info.frames == count
    assert clip.info.fps == pytest.approx(8.0, rel=1e-3)
    assert clip.info.times == pytest.approx([k / 8 for k in range(count)], abs=2e-3)
    assert (clip.repeated, clip.info.has_audio, clip.info.sampled) == (0, False, False)


def test_frames_equal_those_that_transformers_own_reader_decodes(tmp_path):
    from transformers.video_utils import load_video

    path = tmp_path / "clip.mp4"
    path.write_bytes(video(zoo.frames(12, 96, 64)))
    theirs, metadata = load_video(
        str(path), backend="pyav", sample_indices_fn=lambda metadata, **_: np.arange(1, 12, 3)
    )
    clip = decode_video(path.read_bytes(), POLICY, lambda info: range(1, 12, 3))
    assert np.array_equal(clip.frames, theirs)
    assert (clip.info.frames, clip.info.fps) == (metadata.total_num_frames, metadata.fps)


def test_a_variable_rate_keeps_its_own_times():
    pts = [0, 100, 150, 900, 1000]
    clip = decode_video(video(numbered(5), pts=pts, form="matroska"), POLICY, everything)
    assert clip.info.times == pytest.approx([p / 1000 for p in pts], abs=1e-3)
    assert clip.info.fps == pytest.approx(4.0, rel=1e-3)
    assert numbers(clip) == [0, 1, 2, 3, 4]


def test_a_header_that_lies_about_length_is_not_believed():
    data = bytearray(video(numbered(6)))
    box = data.index(b"mdhd") + 4  # version and flags, two dates, the time scale, the duration: four bytes each
    data[box + 16 : box + 20] = (2**31).to_bytes(4, "big")
    info = probe_video(bytes(data), POLICY)
    assert (info.frames, round(info.fps, 3), round(info.duration, 3)) == (6, 8.0, 0.75)


def patched(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


def within(data: bytes, tag: bytes, offset: int, value: bytes) -> bytes:
    """`data` with `value` written `offset` bytes after the first `tag`."""
    return patched(data, data.index(tag) + len(tag) + offset, value)


def ticks(delta: int) -> bytes:
    """MP4 whose one entry of `stts` gives every frame `delta` units of 1/16384 s; it is made with 2048."""
    made = video(numbered(6))
    assert within(made, b"stts", 12, struct.pack(">I", 2048)) == made
    return within(made, b"stts", 12, struct.pack(">I", delta))


def avi(scale: int, rate: int) -> bytes:
    """AVI whose stream says `rate / scale` frames a second; it is made with 8 / 1, and its main header says so, too."""
    made = video(numbered(6), form="avi", codec="mpeg4")
    assert within(made, b"strh", 24, struct.pack("<II", 1, 8)) == made
    return within(made, b"strh", 24, struct.pack("<II", scale, rate))


def matroska(tag: str, value: bytes) -> bytes:
    """Matroska of 8 frames a second with the element `tag` (hexadecimal) set to `value`, in the size that it has there."""
    made = video(numbered(6), form="matroska")
    place = made.index(bytes.fromhex(tag)) + len(tag) // 2
    assert made[place] & 0x7F == len(value)
    return patched(made, place + 1, value)


def gif(duration: int) -> bytes:
    file = io.BytesIO()
    first, *others = [Image.fromarray(frame) for frame in numbered(6)]
    first.save(file, "GIF", save_all=True, append_images=others, duration=duration)
    return file.getvalue()


RATE, SCALE, LENGTH = "23e383", "2ad7b1", "4489"  # DefaultDuration (ns), TimestampScale (ns), Duration (double)


@pytest.mark.parametrize(
    ("data", "fps"),
    [
        (ticks(0), 24.0),  # no time passes: no times at all
        (ticks(1), 16384.0),
        (avi(1, 0), 8.0),  # nonsense: FFmpeg takes the main header's rate
        (avi(0, 1), 8.0),
        (avi(0, 0), 8.0),
        (matroska(RATE, bytes(4)), 8.0),  # the frames' own times say 8
        (matroska(RATE, b"\xff" * 4), 8.0),
        (matroska(SCALE, bytes(3)), 8.0),  # the format's default, which it is made with
        (matroska(SCALE, b"\0\0\1"), 8e6),
        (matroska(LENGTH, struct.pack(">d", float("nan"))), 8.0),
        (matroska(LENGTH, struct.pack(">d", -1.0)), 8.0),
        (matroska(LENGTH, struct.pack(">d", float("inf"))), 8.0),
        (gif(0), 24.0),
    ],
)
def test_a_rate_of_nothing_or_nonsense_is_read_sensibly(data, fps):
    clip = decode_video(data, POLICY, everything)
    assert numbers(clip) == [0, 1, 2, 3, 4, 5]
    assert clip.repeated == 0
    assert clip.info.fps == pytest.approx(fps, rel=1e-6)
    assert clip.info.duration == pytest.approx(6 / fps, rel=1e-6)


@pytest.mark.parametrize("data", [ticks(2**31 - 1), ticks(2**31), avi(2**31, 1), avi(2**32 - 1, 1), gif(655_350)])
def test_a_rate_so_low_that_the_clip_lasts_for_ever_is_refused(data):
    with pytest.raises(BadRequestError) as caught:
        decode_video(data, POLICY, everything)
    assert (caught.value.code, caught.value.status) == ("media_too_large", 413)


def test_frames_that_share_a_time_are_all_shown():
    """AVI written with times of its own cannot; Matroska can: 0, 0, 0, 100, 200 and 300 ms."""
    made = video(numbered(6), pts=[0, 1, 2, 100, 200, 300], form="matroska", codec="mjpeg")
    data = bytearray(made)
    for late in (1, 2):  # a SimpleBlock is 0xA3, its size, the track, the time within the cluster (two bytes), flags
        place = data.index(b"\x81" + struct.pack(">h", late) + b"\x80")
        data[place + 1 : place + 3] = bytes(2)
    clip = decode_video(bytes(data), POLICY, everything)
    assert clip.info.times == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3], abs=1e-6)
    assert numbers(clip) == [0, 1, 2, 3, 4, 5]
    assert clip.repeated == 0


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_rotation_flag_is_honoured(degrees):
    upright = zoo.frames(2, 64, 48)
    clip = decode_video(video(upright, rotation=degrees), POLICY, everything)
    expected = np.rot90(upright, degrees // 90, axes=(1, 2))
    assert clip.frames.shape == expected.shape
    assert (clip.info.width, clip.info.height) == (expected.shape[2], expected.shape[1])
    assert np.abs(clip.frames.astype(int) - expected).mean() < 3


def damaged(count: int, broken: list[int]) -> bytes:
    """Motion JPEG of which some frames are nothing but zeros, in chunks of the right size."""
    data = bytearray(video(numbered(count), codec="mjpeg", form="avi"))
    starts = [place for place in range(len(data)) if data[place : place + 3] == b"\xff\xd8\xff"]
    assert len(starts) == count
    for start in (starts[number] for number in broken):
        size = int.from_bytes(data[start - 4 : start], "little")
        data[start : start + size] = bytes(size)
    return bytes(data)


def test_damaged_frames_in_the_middle_are_shown_as_a_player_would():
    clip = decode_video(damaged(9, [3, 4]), POLICY, everything)
    assert numbers(clip) == [0, 1, 2, 2, 2, 5, 6, 7, 8]
    assert clip.repeated == 2


def test_a_clip_that_is_mostly_damaged_is_refused():
    with pytest.raises(BadRequestError, match="8 of 9 frames") as caught:
        decode_video(damaged(9, list(range(1, 9))), POLICY, everything)
    assert caught.value.code == "media_decode_failed"


def test_sound_is_seen():
    assert probe_video(video(numbered(3), sound=True), POLICY).has_audio


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (MediaPolicy(max_video_frames=5), "media_too_large"),
        (MediaPolicy(max_video_seconds=0.5), "media_too_large"),
        (MediaPolicy(max_image_pixels=1000), "image_too_large"),
        (MediaPolicy(max_clip_bytes=10_000), "media_too_large"),
    ],
)
def test_caps_hold_before_frames_are_decoded(policy, code):
    with pytest.raises(BadRequestError) as caught:
        decode_video(video(numbered(6)), policy, everything)
    assert (caught.value.code, caught.value.status) == (code, 413)


@pytest.mark.parametrize("data", [b"#EXTM3U\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", bytes(1000)])
def test_playlists_and_scripts_are_no_clips(data):
    with pytest.raises(BadRequestError) as caught:
        decode_video(data, POLICY, everything)
    assert caught.value.code == "unsupported_media"


def test_truncated_and_damaged_clips_are_refused_or_shown_in_part():
    whole = video(zoo.frames(6, 64, 48), form="matroska")
    for cut in range(50, len(whole), 97):
        try:
            clip = decode_video(whole[:cut], POLICY, everything)
        except BadRequestError as error:
            assert error.code in ("media_decode_failed", "unsupported_media")
            continue
        assert 1 <= len(clip.frames) <= 6


def test_a_list_of_frames_is_one_lossless_clip_and_none_is_left_out():
    frames = np.concatenate([zoo.frames(2, 40, 30), zoo.frames(2, 40, 30)[1:]])  # the last two are alike
    for one in (list(map(Image.fromarray, frames)), frames):
        (item,) = as_media_items([one], Modality.VIDEO)
        clip = decode_video(item.data or b"", POLICY, everything)
        assert np.array_equal(clip.frames, frames)
        assert clip.info.sampled


def test_an_animation_has_the_times_of_its_frames():
    file = io.BytesIO()
    pages = [Image.fromarray(frame) for frame in numbered(4)]
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:], duration=[100, 300, 100, 500])
    clip = decode_video(file.getvalue(), POLICY, everything)
    assert numbers(clip) == [0, 1, 2, 3]
    assert clip.info.times == pytest.approx((0.0, 0.1, 0.4, 0.5))
    assert not clip.info.sampled


def test_the_header_of_a_picture_counts_its_orientation():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(file, "JPEG", exif=exif)
    info = open_item(file.getvalue(), Modality.IMAGE, POLICY).info
    assert (info.width, info.height) == (20, 30)
