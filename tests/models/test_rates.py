"""Clips at rates that no camera has: every family chooses frames of them, and what it says of their times are numbers."""

from __future__ import annotations

import json
import struct

import pytest

from tectum.media.policy import MediaPolicy
from tectum.models.load import load_adapter
from tectum.pipeline.unit import EncoderUnit
from tectum.types import EncodeRequest, MediaItem, Modality
from tests import zoo
from tests.media.test_video import SCALE, matroska, numbered, ticks, video, within


def of_seconds(seconds: int) -> bytes:
    """One frame that lasts so long: MP4 in which one unit of time is a second, without its list of edits."""
    made = video(numbered(1)).replace(b"elst", b"skip")
    return within(within(made, b"mdhd", 12, struct.pack(">I", 1)), b"stts", 12, struct.pack(">I", seconds))


@pytest.mark.parametrize("family", [name for name in zoo.PLACEHOLDERS if "video" in zoo.PLACEHOLDERS[name]])
def test_every_family_takes_clips_of_absurd_rates(family, tmp_path):
    unit = EncoderUnit(load_adapter(str(zoo.build(family, tmp_path / family)), device="cpu"), MediaPolicy(), 1 << 17)
    clips = {"none": ticks(0), "16384": ticks(1), "8e6": matroska(SCALE, b"\0\0\1"), "1/3000": of_seconds(3000)}
    for rate, data in clips.items():
        request = EncodeRequest("r", (MediaItem(Modality.VIDEO, data=data),))
        looked = unit.look(request)
        (plan,) = unit.adapter.plan(looked.infos, {})
        metadata, _ = unit.prepare(request, looked)
        assert metadata.rows == plan.rows > 0, rate
        (item,) = metadata.items
        assert json.dumps(item.to_json(), allow_nan=False)
        assert all(0 <= time <= 3600 for time in item.timestamps), rate
        assert 0 < item.second_per_grid <= 3600 * unit.adapter.frame_group, rate
