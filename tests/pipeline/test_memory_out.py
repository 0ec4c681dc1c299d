"""Memory that runs out on the host: a 503 that a retry may mend, for that request alone; the encoder lives on."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tectum import Client, Encoder
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, TectumError, UnavailableError
from tectum.media.damage import blamed_on
from tectum.pipeline.unit import memory_of
from tests import zoo

#: bytes that no machine has: address spaces end before
ABSURD = 1 << 55


@pytest.mark.parametrize(
    "exhaust",
    [lambda: torch.empty(ABSURD, dtype=torch.uint8), lambda: np.empty(ABSURD, np.uint8), lambda: bytearray(ABSURD)],
)
def test_what_the_hosts_allocators_really_raise_is_out_of_memory(exhaust):
    with pytest.raises(UnavailableError) as caught, memory_of("forward"):
        exhaust()
    assert (caught.value.code, caught.value.status, caught.value.retryable) == ("out_of_memory", 503, True)
    assert str(ABSURD) not in caught.value.message


def test_other_failures_stay_what_they_are():
    with pytest.raises(RuntimeError, match="must match"), memory_of("forward"):
        torch.zeros(2) + torch.zeros(3)


def test_no_memory_is_not_blamed_on_the_media_but_a_decoders_absurd_size_is():
    import av

    with pytest.raises(MemoryError), blamed_on("picture"):
        bytearray(ABSURD)
    with pytest.raises(BadRequestError) as caught, blamed_on("clip"):
        av.error.err_check(-12)  # ENOMEM, as FFmpeg says it
    assert caught.value.code == "media_decode_failed"


def test_a_fused_batch_that_finds_no_memory_is_tried_again_one_by_one(tiny):
    """The allocator's own failure in whatever forward holds two requests or more, and in that of one marked picture."""
    with Encoder(str(tiny), forward_threads=1, fuse="on") as encoder:
        real = encoder.adapter.encode
        first, go_on = threading.Event(), threading.Event()
        batches: list[int] = []

        def encode(batch):
            batches.append(len(batch))
            if len(batches) == 1:
                first.set()
                assert go_on.wait(60)
            elif len(batch) > 1 or batch[0].rows == 16:
                torch.empty(ABSURD, dtype=torch.uint8)
            return real(batch)

        encoder.adapter.encode = encode
        with ThreadPoolExecutor(5) as threads:
            ahead = threads.submit(encoder.encode, zoo.picture(64, 64))
            assert first.wait(60)
            others = [threads.submit(encoder.encode, zoo.picture(64, 64, seed)) for seed in range(3)]
            large = threads.submit(encoder.encode, zoo.picture(112, 112))
            _until(encoder, lambda: _queued(encoder) == 4)
            go_on.set()
            assert ahead.result(60).rows.shape[0] == 4
            assert [each.result(60).rows.shape[0] for each in others] == [4, 4, 4]
            with pytest.raises(UnavailableError) as caught:
                large.result(60)
        assert (caught.value.code, caught.value.status) == ("out_of_memory", 503)
        assert sorted(batches) == [1, 1, 1, 1, 1, 4]
        assert encoder.encode(zoo.picture(64, 64)).rows.shape[0] == 4


def _queued(encoder: Encoder) -> int:
    return sum(len(lane.batcher) for lane in encoder._pipeline._lanes)


def _until(encoder: Encoder, condition) -> None:
    """Wait, on the encoder's own loop, until something holds."""

    async def poll() -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run_coroutine_threadsafe(poll(), encoder._loop).result()


def test_a_live_encoder_at_its_limit_answers_503_and_serves_the_next(tiny: Path):
    """The kernel's own limit on the address space of a real encoder process; pictures that it has no room for."""
    file = io.BytesIO()
    Image.new("RGB", (7900, 8000), (9, 9, 9)).save(file, "PNG")
    with (
        EncoderProcess(tiny, "--forward-threads", "1", "--log-level", "warning") as server,
        Client(server.url) as client,
    ):
        assert client.encode(zoo.picture(64, 64)).rows.shape[0] == 4
        encoder = _encoder_of(server.pid)
        limit = _address_space(encoder) + 64 * 1024 * 1024  # the picture takes 190 MB when it is decoded
        resource.prlimit(encoder, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        with pytest.raises(TectumError) as caught:
            client.encode(file.getvalue())
        assert (caught.value.code, caught.value.status, caught.value.retryable) == ("out_of_memory", 503, True)
        assert client.encode(zoo.picture(64, 64)).rows.shape[0] == 4
        assert _encoder_of(server.pid) == encoder, "it is the same process"
        resource.prlimit(encoder, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert client.encode(file.getvalue()).rows.shape[0] > 0, "and the retry is served once there is memory"


def _encoder_of(server: int) -> int:
    """The one encoder process of a server."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    (found,) = (int(child) for child in children if b"tectum.workers" in Path(f"/proc/{child}/cmdline").read_bytes())
    return found


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
