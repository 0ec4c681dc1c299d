"""`Encoder`: the encoder in this process, through the very pipeline that the server runs.

Owns the event loop that the pipeline runs on, and the thread that runs it: callers may be threads, or loops of their own.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from tectum.config import Settings
from tectum.errors import BadRequestError, UnavailableError
from tectum.items import MediaLike, as_media_items
from tectum.pipeline.pipeline import Pipeline
from tectum.pipeline.service import running_pipeline
from tectum.pipeline.stages import Stages
from tectum.pipeline.work import Job
from tectum.types import Embedding, EncodeRequest, Modality

if TYPE_CHECKING:
    from tectum.pipeline.local import LocalEncoder


class Encoder:
    """Runs the encoder of a checkpoint here, without a server and without its language model.

    model: a local folder or a hub id. Settings are keyword arguments by the names of `tectum.Settings`
    (`device`, `dtype`, `forward_threads`, …). `encode` blocks, `aencode` awaits; both may be called from several
    threads and loops at once. Close it, or use it as a context manager.

    Raises StartupError when the model cannot be loaded or a setting is wrong.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        from tectum.models.load import load_adapter
        from tectum.pipeline.local import LocalEncoder

        self.settings = Settings.load(**settings)
        given = self.settings
        self.adapter = load_adapter(model, device=given.device, dtype=given.dtype, compile=given.compile)
        self._stack = AsyncExitStack()
        self._closing = threading.Lock()
        self._closed = False
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tectum-encoder", daemon=True)
        self._thread.start()
        try:
            local = LocalEncoder(self.adapter, self.settings)
            self._pipeline = asyncio.run_coroutine_threadsafe(self._start(local), self._loop).result()
        except BaseException:
            self._stop_loop()
            raise

    def encode(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        modality: str = "image",
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
    ) -> Embedding:
        """Encode one item or a list of them (paths, bytes, URLs, PIL pictures, MediaItems) in one forward.

        Returns their rows `[tokens, width]` in order, in the model's dtype. Raises MMError, naming the item at fault.
        """
        return self._submit(self._request(items, modality, options, deadline_ms)).result()

    async def aencode(
        self,
        items: MediaLike | Sequence[MediaLike],
        *,
        modality: str = "image",
        options: Mapping[str, Any] | None = None,
        deadline_ms: int | None = None,
    ) -> Embedding:
        """As `encode`, for a running event loop."""
        return await asyncio.wrap_future(self._submit(self._request(items, modality, options, deadline_ms)))

    def close(self) -> None:
        """Finish what runs and give everything back. Idempotent; may be called from several threads at once."""
        with self._closing:  # held for no longer: whoever submits on an event loop of its own must not wait for the end
            first, self._closed = not self._closed, True
        if not first:
            self._ended.wait()
            return
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._stop_loop()
        finally:
            self._ended.set()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _start(self, local: LocalEncoder) -> Pipeline:
        stages = await self._stack.enter_async_context(Stages(local, self.settings))
        return await self._stack.enter_async_context(running_pipeline(stages, self.settings))

    def _request(
        self,
        items: MediaLike | Sequence[MediaLike],
        modality: str,
        options: Mapping[str, Any] | None,
        deadline_ms: int | None,
    ) -> EncodeRequest:
        if modality not in list(Modality):
            offered = ", ".join(sorted(self.adapter.modalities))
            raise BadRequestError("unsupported_modality", f"{str(modality)[:40]!r} is no modality; here: {offered}")
        if options is not None and not isinstance(options, Mapping):
            raise BadRequestError("invalid_option", f"Options are a mapping of names, not {type(options).__name__}")
        if deadline_ms is not None and (not isinstance(deadline_ms, int) or deadline_ms < 1):
            raise BadRequestError("invalid_request", "deadline_ms is a whole number of milliseconds above 0")
        media = as_media_items(items, Modality(modality))
        return EncodeRequest(uuid.uuid4().hex, media, deadline_ms=deadline_ms, options=dict(options or {}))

    def _submit(self, request: EncodeRequest) -> Future[Embedding]:
        with self._closing:
            if self._closed:
                raise UnavailableError("shutting_down", "This encoder was closed")
            return asyncio.run_coroutine_threadsafe(self._encode(request), self._loop)

    async def _end(self) -> None:
        """Close, and leave no call behind that was submitted and not accepted yet: it hears that it came too late."""
        await self._stack.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=10)

    async def _encode(self, request: EncodeRequest) -> Embedding:
        async with self._pipeline.execute_encode_pipeline(request) as job:
            return embedding_of(job)


def embedding_of(job: Job) -> Embedding:
    """A copy of a job's staged rows that outlives their lease."""
    import torch

    assert job.staged is not None, "rows are read while they are staged"
    metadata = job.staged.metadata
    dtype = getattr(torch, metadata.dtype)
    rows, *deepstack = (
        torch.frombuffer(bytearray(view), dtype=dtype).view(metadata.rows, metadata.width)
        for view in job.staged.lease.views()
    )
    items = tuple(item.to_json() for item in metadata.items)
    grid = metadata.grid_thw
    return Embedding(rows, metadata.item_rows, grid, tuple(deepstack), metadata.dtype, metadata.req_id, items)
