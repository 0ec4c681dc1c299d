"""Encoder servers with SGLang's doors open, and the rows that the model in one piece gives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from tectum.demo.encoder_process import EncoderProcess
from tectum.models.torchvision_compat import ensure_torchvision
from tests.sglang.language_server import LanguageServer

FLAGS = ("--forward-threads", "1", "--log-level", "warning", "--transfer-backend", "zmq_to_scheduler")


@pytest.fixture(scope="session")
def encoder_a(tiny: Path) -> Iterator[EncoderProcess]:
    flags = (
        *FLAGS,
        "--unknown-id-wait",
        "0.5",
        "--send-timeout",
        "6",
        "--allow-private-urls",
        "--max-media-bytes",
        "2000000",
    )
    with EncoderProcess(tiny, *flags) as process:
        yield process


@pytest.fixture(scope="session")
def encoder_b(tiny: Path) -> Iterator[EncoderProcess]:
    with EncoderProcess(tiny, *FLAGS) as process:
        yield process


@pytest.fixture(scope="session")
def encoder_grpc(tiny: Path) -> Iterator[EncoderProcess]:
    flags = (*FLAGS, "--unknown-id-wait", "0.5", "--send-timeout", "2", "--grpc-port", "0")
    with EncoderProcess(tiny, *flags) as process:
        yield process


def grpc_target(encoder: EncoderProcess) -> str:
    """Where a server's gRPC door is: the line it printed."""
    (line,) = (line for line in encoder.lines if line.startswith("grpc on "))
    return line.removeprefix("grpc on ").strip()


@pytest.fixture(scope="module")
def server(encoder_a: EncoderProcess) -> Iterator[LanguageServer]:
    with LanguageServer(encoder_a.url) as made:
        yield made


@pytest.fixture(scope="module")
def colocated(tiny: Path) -> Callable[[list[bytes]], torch.Tensor]:
    """The rows of pictures by transformers' own model and processor."""
    ensure_torchvision()
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tiny)

    @torch.inference_mode()
    def rows(pictures: list[bytes]) -> torch.Tensor:
        opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        inputs = processor(images=opened, return_tensors="pt")
        found = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        return getattr(found, "pooler_output", found)

    return rows
