"""The bare loop: what the same work costs without any service. Pillow, the family's processor and its tower, directly.

Run as a process (`python -m bench.bare FOLDER SIDE SECONDS`): prints the pictures done, and the wall and CPU seconds they
took. It uses transformers alone, none of Tectum's code but the shim that lets torchvision load.
"""

from __future__ import annotations

import io
import json
import sys
import time

from tectum.bench.pictures import jpegs
from tectum.bench.plan import Size


def main(folder: str, side: int, seconds: float) -> None:
    import torch
    import transformers
    from PIL import Image

    from tectum.models.torchvision_compat import ensure_torchvision

    ensure_torchvision()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pictures = jpegs(Size(side, side), 32)

    @torch.inference_mode()
    def encode(data: bytes) -> None:
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        inputs = processor(images=[picture], return_tensors="pt")
        model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])

    for data in pictures[:4]:
        encode(data)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()  # the parent starts all processes at once
    started, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - started < seconds:
        encode(pictures[done % len(pictures)])
        done += 1
    taken, cpu = time.perf_counter() - started, time.process_time() - cpu
    sys.stdout.write(json.dumps({"pictures": done, "seconds": taken, "cpu": cpu}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
