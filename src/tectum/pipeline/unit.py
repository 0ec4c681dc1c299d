"""One loaded encoder and all that is done with it: decode, prepare, forward, write the rows. Plain blocking calls.

Owns the order of these steps for one part, and nothing else: no threads, no queues, no states. The same unit works inside
the caller's process (`local.py`) and inside an encoder process (`tectum.workers`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tectum.errors import BadRequestError, InternalError, StartupError, TectumError, UnavailableError
from tectum.media.decode import Decoded, Looked, Opened, check_scaled, check_together, open_item, small_item
from tectum.media.policy import MediaPolicy
from tectum.media.source import item_bytes
from tectum.models.adapter import check_finite
from tectum.models.revision import encoder_revision
from tectum.types import EncodeRequest, MediaInfo, RequestMetadata

if TYPE_CHECKING:
    from tectum.models.adapter import Adapter, EncodedRows, Prepared

log = logging.getLogger("tectum.unit")

#: bytes of a request's items up to which they stay open between the look at their headers and their decoding
KEPT_OPEN_BYTES = 1024 * 1024
#: what torch says in a plain RuntimeError when the host has no memory left: its allocator, and C++'s own beneath it
_HOST_MEMORY_IS_OUT = ("DefaultCPUAllocator: ", "std::bad_alloc")


class EncoderUnit:
    """`prepare` may be called from several threads at once, `forward` from one. max_patches: most of one request."""

    def __init__(self, adapter: Adapter, policy: MediaPolicy, max_patches: int) -> None:
        self.adapter = adapter
        self.policy = policy
        self.max_patches = max_patches
        self._stream = torch.cuda.Stream(adapter.device) if adapter.device.type == "cuda" else None

    @property
    def on_device(self) -> bool:
        """Whether rows come from a device, so that waiting for them blocks."""
        return self._stream is not None

    def revision(self) -> str:
        """What, besides media and options, rows depend on (`models/revision.py`). Reads every weight once."""
        return encoder_revision(self.adapter)

    def look(self, request: EncodeRequest) -> Looked:
        """Read the headers of a request's items (bytes, base64, data: or allowed file: URLs); decode nothing.

        Raises BadRequestError that names the item at fault, also for what no forward would take, and UnavailableError
        `out_of_memory`.
        """
        with memory_of("preparation"):
            return self._look(request)

    def _look(self, request: EncodeRequest) -> Looked:
        if request.modality not in self.adapter.modalities:
            offered = ", ".join(sorted(self.adapter.modalities))
            text = f"{self.adapter.family} does not encode {request.modality}; it encodes: {offered}"
            raise BadRequestError("unsupported_modality", text)
        infos: list[MediaInfo] = []
        opened: list[Opened | None] = []
        kept = 0

        def read(index: int) -> tuple[Opened, int]:
            data = self._bytes(request, index)
            return open_item(data, request.modality, self.policy), len(data)

        for item, nbytes in Decoded(len(request.items), read):
            infos.append(item.info)
            kept += nbytes
            opened.append(item if kept <= KEPT_OPEN_BYTES else None)
        self._refuse_too_large(infos, request.options)
        return Looked(infos, opened)

    def prepare(self, request: EncodeRequest, looked: Looked | None = None) -> tuple[RequestMetadata, Prepared]:
        """Media of `request` → the tower's inputs and what they will yield. looked: what `look` gave for it.

        Raises BadRequestError that names the item at fault, and UnavailableError `out_of_memory`.
        """
        found = self.look(request) if looked is None else looked
        with memory_of("preparation"):
            return self._prepare(request, found)

    def _prepare(self, request: EncodeRequest, found: Looked) -> tuple[RequestMetadata, Prepared]:
        reading = self.adapter.reading(request.modality, request.options)

        def decoded(index: int) -> Any:
            item = found.take(index) or open_item(self._bytes(request, index), request.modality, self.policy)
            return item.decode(reading)

        media = Decoded(len(request.items), decoded)
        prepared = self.adapter.prepare(media, request.options, request.modality)
        return self._metadata(request, prepared), prepared

    def _bytes(self, request: EncodeRequest, index: int) -> bytes:
        return item_bytes(request.items[index], self.policy)

    def _refuse_too_large(self, infos: Sequence[MediaInfo], options: Mapping[str, Any]) -> None:
        """What no forward would take is refused from its items' headers, before anything is decoded."""
        check_together(infos, self.policy)
        plans = self.adapter.plan(infos, options)
        for index, (info, plan) in enumerate(zip(infos, plans, strict=True)):
            try:
                check_scaled(info, plan.scaled, self.policy)
            except BadRequestError as error:
                raise error.at_item(index) from None
        patches = sum(plan.patches for plan in plans)
        if patches > self.max_patches:
            text = f"The request has {patches} patches, at most {self.max_patches} are taken (--max-request-patches)"
            raise BadRequestError("request_too_large", text, limit=self.max_patches)

    def forward(self, batch: Sequence[Prepared], slots: Sequence[memoryview]) -> Landing:
        """One forward for the batch; each member's rows are checked and written to its slot on their own (R15).

        Raises what fails for the batch as a whole, UnavailableError `out_of_memory` among it.
        """
        with memory_of("forward"):
            encoded = self.adapter.encode(batch)
        return Landing([self._land(*member) for member in zip(batch, encoded, slots, strict=True)])

    def warm_up(self) -> None:
        """Run one small item through every step, so that the first caller pays for no lazy start.

        Raises StartupError `missing_dependency` when the towers are to be compiled and cannot be.
        """
        request = EncodeRequest("warm-up", (small_item(self.adapter.modalities),))
        metadata, prepared = self.prepare(request)
        try:
            landing = self.forward([prepared], [memoryview(bytearray(metadata.nbytes))])
        except Exception as error:
            if not self.adapter.compiled or isinstance(error, TectumError):
                raise
            log.error("torch.compile failed: %s", str(error).partition("\n")[0])
            text = (
                f"--compile: torch.compile failed ({type(error).__name__}); on CPU it needs a C++ compiler, such as g++"
            )
            raise StartupError("missing_dependency", text) from None
        for problem in landing.wait():
            if problem is not None:
                raise problem

    def _metadata(self, request: EncodeRequest, prepared: Prepared) -> RequestMetadata:
        return RequestMetadata(
            req_id=request.req_id,
            num_parts=request.num_parts,
            part_idx=request.part_idx,
            items=tuple(prepared.items),
            width=self.adapter.width,
            deepstack_layers=self.adapter.deepstack_layers_of(request.modality),
            dtype=self.adapter.dtype,
        )

    def _land(self, prepared: Prepared, encoded: EncodedRows, slot: memoryview) -> Callable[[], None]:
        """Check one member's rows and send them towards its slot; the returned call waits for them there."""
        try:
            self.adapter.check(prepared, encoded)
            if self._stream is not None:
                return self._land_from_device(encoded, slot, self._stream)
            check_finite(encoded.sums())
            _write(encoded.arrays, slot)
            return _nothing
        except TectumError as error:
            return _raising(error)
        except Exception as error:
            log.exception("writing rows failed")
            return _raising(InternalError("internal", f"Unexpected {type(error).__name__} while staging rows"))

    def _land_from_device(
        self, encoded: EncodedRows, slot: memoryview, stream: torch.cuda.Stream
    ) -> Callable[[], None]:
        """Copy on a stream of its own into pinned memory, so that the next forward need not wait; then to the slot.

        Whether the rows are finite is seen there, too: to ask the device would be to wait for it.
        """
        arrays = (*encoded.arrays, encoded.sums())
        stream.wait_stream(torch.cuda.current_stream(self.adapter.device))
        with torch.cuda.stream(stream):
            pinned = [torch.empty(array.shape, dtype=array.dtype, pin_memory=True) for array in arrays]
            for host, array in zip(pinned, arrays, strict=True):
                host.copy_(array, non_blocking=True)
                array.record_stream(stream)
            copied = torch.cuda.Event()
            copied.record(stream)

        def finish() -> None:
            copied.synchronize()
            *rows, sums = pinned
            check_finite(sums)
            _write(rows, slot)

        return finish


@contextmanager
def memory_of(step: str) -> Iterator[None]:
    """Inside, memory that runs out, a device's or the host's, becomes UnavailableError `out_of_memory` (503, retryable)."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(text in str(error) for text in _HOST_MEMORY_IS_OUT):
            raise
        text = f"The {step} ran out of memory; retry, or send smaller media"
        raise UnavailableError("out_of_memory", text, retry_after=1.0) from None


class Landing:
    """Rows on their way to their slots."""

    def __init__(self, members: list[Callable[[], None]]) -> None:
        self._members = members

    def wait(self) -> list[TectumError | None]:
        """Block until all rows are in their slots: for each member None, or the error it failed with."""
        return [_outcome(member) for member in self._members]


def _outcome(finish: Callable[[], None]) -> TectumError | None:
    try:
        finish()
    except TectumError as error:
        return error
    return None


def _write(arrays: Sequence[torch.Tensor], slot: memoryview) -> None:
    """The arrays' bytes, one after the other."""
    start = 0
    for array in arrays:
        target = torch.frombuffer(slot, dtype=array.dtype, count=array.numel(), offset=start)
        target.view(array.shape).copy_(array)
        start += array.nbytes
    assert start == len(slot), "a slot is as large as its rows"


def _raising(error: TectumError) -> Callable[[], None]:
    def finish() -> None:
        raise error

    return finish


def _nothing() -> None: ...
