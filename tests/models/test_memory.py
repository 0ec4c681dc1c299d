"""Preprocessing is bounded: what could never be encoded is refused from headers, and items are decoded one at a time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tectum.models.load import load_adapter
from tectum.types import PictureInfo

MIB = 1024 * 1024

PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from tectum.pipeline.encoder import Encoder
from tectum.errors import TectumError
folder, picture, count, options = sys.argv[1], open(sys.argv[2], "rb").read(), int(sys.argv[3]), json.loads(sys.argv[4])

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

with Encoder(folder, device="cpu", prepare_threads=1) as encoder:
    before, code = peak(), None
    try:
        encoder.encode([picture] * count, options=options)
    except TectumError as error:
        code = error.code
    print(json.dumps({"code": code, "grown": peak() - before}))
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
    assert held <= plan.nbytes <= 4 * held + size[0] * size[1] * 3


def written_bytes(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    return file.getvalue()
