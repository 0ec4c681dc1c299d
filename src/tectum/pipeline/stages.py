"""What the stages really do: fetch, decode and prepare, forward, stage. Here the rooms meet.

Owns the executors: one pool of threads for decoding and preparing, one thread for the forward, so that neither holds up
the other and the event loop runs none of them. It knows no request's state; `pipeline.py` calls it when the ledger
admits the stage.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from PIL import Image

from tectum.config import Settings
from tectum.delivery.base import Deliveries
from tectum.delivery.staging import StagingPool
from tectum.errors import BadRequestError, InternalError, TectumError, UnavailableError
from tectum.media.fetch import Fetcher
from tectum.media.image import decode_image
from tectum.media.policy import MediaPolicy
from tectum.media.source import item_bytes, needs_fetch
from tectum.pipeline.pipeline import PreparedPart, Staged
from tectum.pipeline.threads import run_to_end
from tectum.types import Destination, EncodeRequest, MediaItem, Modality, RequestMetadata

if TYPE_CHECKING:
    from tectum.models.adapter import Adapter

log = logging.getLogger("tectum.stages")


class Stages:
    """The real `Work` of a pipeline, around one loaded encoder. An async context manager."""

    def __init__(self, adapter: Adapter, settings: Settings, deliveries: Deliveries | None = None) -> None:
        import torch

        self.adapter = adapter
        self.deliveries = deliveries or Deliveries({})
        self._settings = settings
        self.policy = media_policy(settings)
        cuda = adapter.device.type == "cuda"
        self.pool = StagingPool(settings.max_staged_bytes, cuda=cuda)
        self._fetcher = Fetcher(self.policy)
        cores = os.cpu_count() or 1
        forward_threads = settings.forward_threads or max(1, cores - 1)
        self._prepare_threads = ThreadPoolExecutor(
            settings.prepare_threads, "tectum-prepare", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._forward_thread = ThreadPoolExecutor(
            1, "tectum-forward", initializer=torch.set_num_threads, initargs=(forward_threads,)
        )

    async def __aenter__(self) -> Stages:
        await self._fetcher.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.pool.close()
        await self._fetcher.__aexit__(None, None, None)
        for executor in (self._prepare_threads, self._forward_thread):
            executor.shutdown(wait=False, cancel_futures=True)

    async def warm_up(self) -> None:
        """Run one small picture through every thread, so that the first caller pays for no lazy start."""
        file = io.BytesIO()
        Image.new("RGB", (224, 224), (128, 128, 128)).save(file, "JPEG")
        item = MediaItem(Modality.IMAGE, data=file.getvalue())
        request = EncodeRequest("warm-up", (item,))
        threads = self._settings.prepare_threads
        all_running = threading.Barrier(threads)

        def prepare() -> PreparedPart:
            all_running.wait(timeout=60)
            return self._decode_and_prepare(request, {})

        parts = await asyncio.gather(*(run_to_end(self._prepare_threads, prepare) for _ in range(threads)))
        for result in await self.encode(parts[:1]):
            if isinstance(result, TectumError):
                raise result
            self.free(result)

    # --- prepare ---

    async def prepare(self, request: EncodeRequest) -> PreparedPart:
        if request.modality not in self.adapter.modalities:
            offered = ", ".join(sorted(self.adapter.modalities))
            text = f"{self.adapter.family} does not encode {request.modality}; it encodes: {offered}"
            raise BadRequestError("unsupported_modality", text)
        started = time.perf_counter()
        fetched = await self._fetch(request)
        fetch_ended = time.perf_counter()
        part = await run_to_end(self._prepare_threads, self._decode_and_prepare, request, fetched)
        part.seconds = {"fetch": fetch_ended - started, "prepare": time.perf_counter() - fetch_ended}
        return part

    async def _fetch(self, request: EncodeRequest) -> dict[int, bytes]:
        """Bytes of the items that lie behind a URL, by index; all at once, and all given up when one fails."""
        tasks = {
            index: asyncio.ensure_future(self._fetch_item(index, item.url or ""))
            for index, item in enumerate(request.items)
            if needs_fetch(item)
        }
        if not tasks:
            return {}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {index: task.result() for index, task in tasks.items()}

    async def _fetch_item(self, index: int, url: str) -> bytes:
        try:
            return await self._fetcher.fetch(url)
        except TectumError as error:
            raise error.at_item(index) from None

    def _decode_and_prepare(self, request: EncodeRequest, fetched: dict[int, bytes]) -> PreparedPart:
        """In a prepare thread: bytes → pictures → the adapter's inputs, with the metadata they imply."""
        pictures = []
        for index, item in enumerate(request.items):
            try:
                pictures.append(decode_image(item_bytes(item, self.policy, fetched.get(index)), self.policy))
            except TectumError as error:
                raise error.at_item(index) from None
        prepared = self.adapter.prepare(pictures, request.options)
        return PreparedPart(self._metadata(request, prepared.items), prepared)

    def _metadata(self, request: EncodeRequest, items: Sequence[Any]) -> RequestMetadata:
        return RequestMetadata(
            req_id=request.req_id,
            num_parts=request.num_parts,
            part_idx=request.part_idx,
            items=tuple(items),
            width=self.adapter.width,
            deepstack_layers=self.adapter.deepstack_layers,
            dtype=self.adapter.dtype,
        )

    # --- forward ---

    async def encode(self, batch: Sequence[PreparedPart]) -> list[Staged | TectumError]:
        return await run_to_end(self._forward_thread, self._forward, batch)

    def _forward(self, batch: Sequence[PreparedPart]) -> list[Staged | TectumError]:
        """In the forward thread: one forward, then each member's rows are checked and staged on their own (R15)."""
        import torch

        try:
            encoded = self.adapter.encode([part.inputs for part in batch])
        except torch.OutOfMemoryError:
            text = "The forward ran out of memory; retry, or send smaller pictures"
            raise UnavailableError("out_of_memory", text, retry_after=1.0) from None
        results: list[Staged | TectumError] = []
        for part, rows in zip(batch, encoded, strict=True):
            try:
                self.adapter.check(part.inputs, rows)
                results.append(Staged(part.metadata, self.pool.stage((rows.rows, *rows.deepstack))))
            except TectumError as error:
                results.append(error)
            except Exception as error:
                log.exception("staging failed")
                results.append(InternalError("internal", f"Unexpected {type(error).__name__} while staging rows"))
        return results

    # --- deliver ---

    async def send(self, staged: Staged, destination: Destination) -> None:
        await self.deliveries.send(staged, destination)

    async def notify(self, req_id: str, destination: Destination, error: TectumError) -> None:
        await self.deliveries.notify(req_id, destination, error)

    def free(self, staged: Staged) -> None:
        self.pool.give_back(staged.lease)


def media_policy(settings: Settings) -> MediaPolicy:
    return MediaPolicy(
        max_media_bytes=settings.max_media_bytes,
        max_image_pixels=settings.max_image_pixels,
        fetch_timeout=settings.fetch_timeout,
        allow_http=settings.allow_http,
        allow_private_urls=settings.allow_private_urls,
        allowed_media_dir=settings.allowed_media_dir,
    )
