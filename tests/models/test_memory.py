"""Preprocessing is bounded: what could never be encoded is refused from headers, and items are decoded one at a time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tectum.errors import BadRequestError
from tectum.media.decode import check_scaled
from tectum.media.policy import MediaPolicy
from tectum.models.load import load_adapter
from tectum.pipeline.unit import EncoderUnit
from tectum.types import ClipInfo, EncodeRequest, MediaItem, Modality, PictureInfo
from tests import zoo

MIB = 1024 * 1024

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from tectum.pipeline.encoder import Encoder
from PIL import Image
from tectum.errors import TectumError
from tectum.types import PictureInfo
folder, picture, count, options = sys.argv[1], open(sys.argv[2], "rb").read(), int(sys.argv[3]), json.loads(sys.argv[4])

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

with Encoder(folder, device="cpu", prepare_threads=1) as encoder:
    before, code, planned = peak(), None, 0
    try:
        encoder.encode([picture] * count, options=options)
    except TectumError as error:
        code = error.code
    grown = peak() - before
    if code is None:
        info = PictureInfo(*Image.open(sys.argv[2]).size)
        planned = encoder.adapter.plan([info] * count, options)[0].nbytes
    print(json.dumps({"code": code, "grown": grown, "planned": planned}))
"""


def run(folder: Path, picture: Path, count: int, options: dict) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(picture), str(count), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    return json.loads(done.stdout)


def written(folder: Path, size: tuple[int, int]) -> Path:
    file = folder / "picture.png"
    Image.new("RGB", size, (90, 120, 30)).save(file)
    return file


def test_a_picture_blown_up_by_its_options_is_refused_before_it_is_decoded(tiny, tmp_path):
    options = {"min_pixels": 2**28, "max_pixels": 2**28}
    found = run(tiny, written(tmp_path, (64, 64)), 1, options)
    assert found["code"] == "request_too_large"
    assert found["grown"] < 32 * MIB


def test_large_pictures_of_one_request_are_held_one_at_a_time(tiny, tmp_path):
    """Sixteen of 16 megapixels: 48 MB each when decoded, 768 MB together."""
    found = run(tiny, written(tmp_path, (5000, 3200)), 16, {})
    assert found["code"] is None
    assert found["grown"] < 400 * MIB, f"{found['grown'] / MIB:.0f} MiB"


@pytest.mark.parametrize("size", [(64, 64), (700, 300)])
def test_the_plan_bounds_what_preparing_holds(tiny, size):
    adapter = load_adapter(str(tiny), device="cpu")
    picture = Image.open(io.BytesIO(written_bytes(size)))
    (plan,) = adapter.plan([PictureInfo(*size)], {})
    prepared = adapter.prepare([picture.convert("RGB")], {})
    held = sum(tensor.nbytes for tensor in prepared.inputs.values())
    assert (plan.rows, plan.patches) == (prepared.rows, prepared.patches)
    assert held <= plan.nbytes <= 4 * held + 4 * size[0] * size[1] * 3


# --- what a processor makes of a picture before it crops ---


@pytest.mark.parametrize("size", [(200, 1), (1, 200), (20_000, 100)])
def test_the_thinnest_picture_that_is_taken_costs_what_its_plan_says(tmp_path, size):
    """CLIP scales the shorter side to 336: 336 x 67,200 pixels, 68 MB, of which it keeps a square."""
    found = run(zoo.build_large_clip(tmp_path / "clip"), written(tmp_path, size), 1, {})
    assert found["code"] is None
    assert 100 * MIB < found["planned"] < 400 * MIB
    assert found["planned"] / 2 < found["grown"] < found["planned"] + 16 * MIB, found


def test_a_thinner_one_costs_nothing(tmp_path):
    found = run(zoo.build_large_clip(tmp_path / "clip"), written(tmp_path, (5000, 1)), 1, {})
    assert found["code"] == "media_refused"
    assert found["grown"] < 16 * MIB


def test_a_strip_among_others_is_padded_to_a_square_within_its_plan_or_refused(tmp_path):
    """LLaVA-OneVision pads a picture among others to a square: 4000 x 4000, 48 MB; or 40,000 x 40,000, 4.8 GB."""
    folder = zoo.build("llava_onevision", tmp_path / "llava_onevision")
    found = run(folder, written(tmp_path, (4000, 20)), 1, {"images_in_prompt": 2})
    assert found["code"] is None
    assert found["planned"] / 2 < found["grown"] < found["planned"] + 16 * MIB, found
    found = run(folder, written(tmp_path, (40_000, 200)), 2, {})
    assert found["code"] == "image_too_large"
    assert found["grown"] < 16 * MIB


@pytest.mark.parametrize(
    ("family", "size", "options", "scaled"),
    [
        ("llava", (100, 10), {}, 56 * 560),
        ("clip", (10, 100), {}, 56 * 560),
        ("dinov2", (100, 30), {}, 64 * 213),
        ("siglip", (100, 10), {}, 0),
        ("gemma3", (100, 10), {}, 0),
        ("internvl", (100, 10), {}, 0),
        ("qwen2_5_vl", (100, 10), {}, 0),
        ("idefics3", (100, 10), {}, 192 * 20),
        ("idefics3", (100, 10), {"longest_edge": 640}, 640 * 64),
        ("llava_onevision", (100, 10), {}, 0),
        ("llava_onevision", (100, 10), {"images_in_prompt": 2}, 100 * 100),
    ],
)
def test_the_plan_counts_what_is_made_before_the_crop(family, size, options, scaled, tmp_path):
    """Worked out by hand from each processor's rule: sides in proportion to the shortest or longest edge, or a square."""
    adapter = load_adapter(str(zoo.build(family, tmp_path / family)), device="cpu")
    (plan,) = adapter.plan([PictureInfo(*size)], options)
    assert plan.scaled == scaled
    picture = zoo.picture(*size)
    seen = Seen()
    with seen:
        adapter.prepare([picture], options)
    assert not scaled or scaled in seen.pixels
    assert max(seen.pixels) * 3 <= plan.nbytes


class Seen:
    """Pixels of every picture that torchvision scales or pads to, inside the block."""

    def __init__(self) -> None:
        self.pixels: list[int] = []

    def __enter__(self) -> None:
        from torchvision.transforms.v2 import functional  # importable only once the zoo has seen to it

        self._patch = pytest.MonkeyPatch()
        for name in ("resize", "pad"):
            self._patch.setattr(functional, name, self._noting(getattr(functional, name)))

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()

    def _noting(self, real):
        def noted(*args, **kwargs):
            made = real(*args, **kwargs)
            self.pixels.append(made.shape[-1] * made.shape[-2])
            return made

        return noted


def test_frames_are_counted_like_pictures(tmp_path):
    """SmolVLM's frames go by way of their longest edge, here 1456: ten of 100 x 50 by way of 1456 x 728."""
    adapter = load_adapter(str(zoo.build("smolvlm", tmp_path / "smolvlm")), device="cpu")
    adapter.processors.video.size = {"longest_edge": 1456}
    info = ClipInfo(100, 50, 10, tuple(i / 8 for i in range(10)), 8.0, 1.25, sampled=True)
    (plan,) = adapter.plan([info], {})
    assert plan.scaled == 10 * 1456 * 728
    assert plan.nbytes >= 3 * plan.scaled
    check_scaled(info, plan.scaled, MediaPolicy(max_clip_bytes=3 * plan.scaled))
    with pytest.raises(BadRequestError, match="max-clip-bytes") as caught:
        check_scaled(info, plan.scaled, MediaPolicy(max_clip_bytes=3 * plan.scaled - 1))
    assert caught.value.code == "media_too_large"


@pytest.mark.parametrize("family", sorted(set(zoo.FAMILIES) - {"qwen2_audio", "voxtral", "whisper"}))
def test_no_family_takes_a_picture_that_is_thinner(family, tmp_path):
    unit = EncoderUnit(load_adapter(str(zoo.build(family, tmp_path / family)), device="cpu"), MediaPolicy(), 1 << 17)
    pictures = tuple(MediaItem(Modality.IMAGE, data=written_bytes(size)) for size in ((200, 1), (5000, 1)))
    with pytest.raises(BadRequestError) as caught:
        unit.look(EncodeRequest("r", pictures))
    assert (caught.value.code, caught.value.item, caught.value.details["limit"]) == ("media_refused", 1, 200)
    assert unit.prepare(EncodeRequest("r", pictures[:1]))[0].rows > 0


def written_bytes(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()
