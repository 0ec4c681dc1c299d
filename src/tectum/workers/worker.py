"""An encoder process: `python -m tectum.workers.worker SOCKET_FD STAGING_FD`, started by `process.py`. On a cluster the
same `serve` runs in a Ray actor (`afar.py`).

The main thread works: forwards first, and between them whatever is small to prepare, since handing that to a thread
costs more than doing it. On a CPU it also reads its messages itself, between its steps, so that nothing contends with a
forward for the interpreter. Large media (and, beside a CUDA device, all media) are prepared in threads of their own and
delay no forward; beside a device a thread reads messages, too. The process ends when its socket does.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from tectum.config import Settings, ToldSettings
from tectum.delivery.staging import StagingMap
from tectum.errors import BadRequestError, InternalError, StartupError, TectumError
from tectum.media.decode import Looked
from tectum.observe import logs
from tectum.types import Modality
from tectum.workers import messages
from tectum.workers.messages import Encode, Encoded, Failed, Forget, Frames, Loading, Message, Prepare, Prepared, Ready

log = logging.getLogger("tectum.worker")

#: encoded bytes and decoded pixels up to which media are prepared between forwards
SMALL_BYTES = 1024 * 1024
SMALL_PIXELS = 2_000_000
CUDA_PREPARE_THREADS = 4
#: exit code of a process that its watchdog ended
STALLED = 70
#: seconds by which its watchdog may wake late; beyond that the process itself stood still
STOOD_STILL = 0.5
#: seconds that its watchdog takes to say why
LAST_WORDS = 1.0
#: the answer to work that was forgotten before its turn
FORGOTTEN = {"code": "request_released", "status": 410, "detail": "Nobody wants this any more"}


class Line:
    """The socket to the service. One thread receives, any may send."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._frames = Frames()
        self._bodies: deque[bytes] = deque()

    def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send a message, and the raw bytes that it announces."""
        with self._lock:
            self._link.sendall(messages.frame(message))
            if payload:
                self._link.sendall(payload)

    def receive(self) -> bytes | None:
        """The next message's bytes; None once the service is gone. Raises ValueError for what is no message."""
        while not self._bodies:
            data = self._link.recv(1 << 20)
            if not data:
                return None
            self._bodies.extend(self._frames.feed(data))
        return self._bodies.popleft()

    def waiting(self) -> bool:
        """Whether there is something to receive, or the service is gone."""
        return bool(self._bodies) or bool(select.select([self._link], [], [], 0)[0])


class Slots(Protocol):
    """Where an encoder's rows go."""

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes for the rows of one member, which the service keeps at `offset` of its staging memory."""

    def hand_over(self, batch: int, slots: Sequence[memoryview], errors: Sequence[TectumError | None]) -> None:
        """The rows are in their slots, but for members with an error; when this returns, the service has them."""


class InPlace(StagingMap):
    """`Slots` in the service's own staging memory."""

    def hand_over(self, batch: int, slots: Sequence[memoryview], errors: Sequence[TectumError | None]) -> None:
        """Nothing is left to do: the service sees what was written."""


class Watchdog:
    """Ends the process when one step of it takes longer than `limit` seconds.

    The service sees a process that finishes nothing; only here is it seen that one step hangs while others go on.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._began: dict[object, tuple[float, Callable[[], None]]] = {}
        self._busy = threading.Condition()
        threading.Thread(target=self._watch, name="tectum-watchdog", daemon=True).start()

    @contextmanager
    def step(self, blame: Callable[[], None]) -> Iterator[None]:
        """One step of the work, however it ends. blame: tells whoever waits for it that it is why the process ends."""
        key = object()
        with self._busy:
            self._began[key] = time.monotonic(), blame
            if len(self._began) == 1:
                self._busy.notify()
        try:
            yield
        finally:
            with self._busy:
                del self._began[key]

    def _watch(self) -> None:
        due = math.inf
        while True:
            with self._busy:
                while not self._began:
                    self._busy.wait()
                    due = math.inf
                now = time.monotonic()
                late = [blame for began, blame in self._began.values() if began + self._limit <= now]
                left = min(began for began, _ in self._began.values()) + self._limit - now
            if late and now - due > STOOD_STILL:
                late = []  # this process stood still, and no step of it hung
            if left <= 0:
                log.error("a step took longer than --stall-timeout %g s; this encoder process ends", self._limit)
                telling = threading.Thread(target=_call_all, args=(late,), daemon=True)
                telling.start()
                telling.join(LAST_WORDS)  # the line may be what hangs
                os._exit(STALLED)
            due = now + left
            time.sleep(left)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class Worker:
    """The work of one encoder process."""

    def __init__(
        self, line: Line, slots: Slots, unit: Any, prepare_threads: int, all_beside: bool, watchdog: Watchdog
    ) -> None:
        self._watchdog = watchdog
        self._line = line
        self._slots = slots
        self._unit = unit
        self._beside = ThreadPoolExecutor(prepare_threads, "tectum-prepare", initializer=_one_thread)
        self._all_beside = all_beside
        self._landings = ThreadPoolExecutor(1, "tectum-landing")
        self._encodes: deque[Encode] = deque()
        self._prepares: deque[Prepare] = deque()
        self._wanted: set[int] = set()  # tickets that somebody still wants
        self._inputs: dict[int, Any] = {}
        self._changed = threading.Condition()

    def take(self, body: bytes) -> None:
        """One message, in the reading thread."""
        try:
            message = messages.decode_for_encoder(body)
        except ValueError as error:
            log.warning("dropped a message that does not decode: %s", type(error).__name__)
            return
        with self._changed:
            if isinstance(message, Encode):
                self._encodes.append(message)
            elif isinstance(message, Prepare):
                self._wanted.add(message.ticket)
                self._prepares.append(message)
            elif isinstance(message, Forget):
                self._wanted.discard(message.ticket)
                self._inputs.pop(message.ticket, None)
            self._changed.notify()

    def run(self, *, reads: bool) -> None:
        """Work for ever, in the main thread. reads: it receives between its steps; else another thread calls `take`."""
        while True:
            if reads:
                self._read()
            with self._changed:
                while not self._encodes and not self._prepares:
                    self._changed.wait()
                work: Encode | Prepare = self._encodes.popleft() if self._encodes else self._prepares.popleft()
            if isinstance(work, Encode):
                self._encode(work)
            else:
                self._take_up(work)

    def _read(self) -> None:
        """Take in what has come; wait only while there is nothing to do."""
        while not (self._encodes or self._prepares) or self._line.waiting():
            body = self._line.receive()
            if body is None:
                os._exit(0)
            self.take(body)

    def _take_up(self, work: Prepare) -> None:
        """Prepare at once what takes no longer than a forward, by its bytes and by what its headers say."""
        if self._all_beside or not may_be_small(work):
            self._beside.submit(self._prepare, work)
            return
        started = time.perf_counter()
        try:
            with self._watchdog.step(partial(self._took_too_long, work.ticket)):
                looked = self._unit.look(messages.from_prepare(work))
        except Exception as error:
            self._fail(work.ticket, error, "preparing")
            return
        spent = time.perf_counter() - started
        if looked.pixels <= SMALL_PIXELS:
            self._prepare(work, looked, spent)
        else:
            self._beside.submit(self._prepare, work, looked, spent)

    def _prepare(self, work: Prepare, looked: Looked | None = None, spent: float = 0.0) -> None:
        """looked: the look at its headers, which took `spent` seconds, where there was one."""
        if work.ticket not in self._wanted:
            self._line.send(Failed(work.ticket, FORGOTTEN))  # every prepare is answered: what is not counts as hanging
            return
        started = time.perf_counter()
        try:
            with self._watchdog.step(partial(self._took_too_long, work.ticket)):
                metadata, inputs = self._unit.prepare(messages.from_prepare(work), looked)
        except Exception as error:
            self._fail(work.ticket, error, "preparing")
            return
        with self._changed:
            if work.ticket in self._wanted:
                self._inputs[work.ticket] = inputs
        self._line.send(Prepared(work.ticket, metadata, spent + time.perf_counter() - started))

    def _encode(self, work: Encode) -> None:
        started = time.perf_counter()
        try:
            with self._changed:
                inputs = [self._inputs[ticket] for ticket, _, _ in work.members]
            slots = [self._slots.memory(offset, nbytes) for _, offset, nbytes in work.members]
            with self._watchdog.step(_nobody):
                landing = self._unit.forward(inputs, slots)
        except Exception as error:
            self._fail(work.batch, error, "encoding")
            return
        if self._unit.on_device:
            self._landings.submit(self._land, work, slots, landing, started)
        else:
            self._land(work, slots, landing, started)

    def _land(self, work: Encode, slots: list[memoryview], landing: Any, started: float) -> None:
        try:
            with self._watchdog.step(_nobody):
                errors = landing.wait()
            self._slots.hand_over(work.batch, slots, errors)
        except Exception as error:
            self._fail(work.batch, error, "encoding")
            return
        with self._changed:
            for (ticket, _, _), failure in zip(work.members, errors, strict=True):
                if failure is None:
                    self._wanted.discard(ticket)
                    self._inputs.pop(ticket, None)
        problems = [None if failure is None else messages.problem(failure) for failure in errors]
        self._line.send(Encoded(work.batch, problems, time.perf_counter() - started))

    def _took_too_long(self, ticket: int) -> None:
        """A hang is its own media's fault: others that this process worked on may be tried again, this may not."""
        text = "The media took longer to decode and preprocess than --stall-timeout allows"
        self._line.send(Failed(ticket, messages.problem(BadRequestError("media_decode_failed", text))))

    def _fail(self, number: int, error: Exception, doing: str) -> None:
        if not isinstance(error, TectumError):
            log.error("unexpected failure while %s", doing, exc_info=error)
            text = f"Unexpected {type(error).__name__} while {doing}; the server's log has more"
            error = InternalError("encode_failed", text)
        self._line.send(Failed(number, messages.problem(error)))


def _nobody() -> None:
    """A forward that hangs is nobody's fault: whoever waits for it learns that its encoder is lost."""


def may_be_small(work: Prepare) -> bool:
    """Whether it is worth a look: pictures of few bytes, whose headers are read in no time."""
    return work.modality == Modality.IMAGE and sum(_size(item) for item in work.items) <= SMALL_BYTES


def _size(item: messages.Item) -> float:
    """Bytes of the item as it came; infinite for what lies in a file."""
    if item.url is not None and item.url[:5].lower() != "data:":
        return math.inf
    return len(item.data or item.base64 or item.url or "")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _load(line: Line, start: messages.Start, settings: Settings) -> Any:
    """The encoder, loaded and warm; the service hears of the progress."""
    if start.model.startswith("null:"):
        from tectum.bench.null import NullUnit

        return NullUnit(start.model)
    import torch

    from tectum.media.policy import MediaPolicy
    from tectum.models.load import load_adapter
    from tectum.pipeline.unit import EncoderUnit

    torch.set_num_threads(forward_threads(settings))
    device = settings.device
    if device in ("auto", "cuda") and torch.cuda.is_available():
        device = f"cuda:{start.lane % torch.cuda.device_count()}"
    adapter = load_adapter(
        start.model,
        device=device,
        dtype=settings.dtype,
        compile=settings.compile,
        progress=lambda what, fraction: _tell(line, Loading(what, fraction)),
    )
    unit = EncoderUnit(adapter, MediaPolicy.from_settings(settings), settings.max_request_patches)
    unit.warm_up()
    return unit


def forward_threads(settings: Settings) -> int:
    """Threads of a CPU forward. On Ray that is also what an encoder asks of its node."""
    if settings.ray_address is not None:
        return settings.forward_threads or 1
    return settings.forward_threads or max(1, ((os.cpu_count() or 1) - 1) // settings.lanes)


def card(unit: Any) -> dict[str, Any]:
    """The entry of `/v1/models`, in OpenAI's form, with what a receiver has to know."""
    adapter = unit.adapter
    return {
        "id": adapter.model_id,
        "object": "model",
        "owned_by": "tectum",
        "family": adapter.family,
        "architecture": adapter.architecture,
        "modalities": sorted(adapter.modalities),
        "width": adapter.width,
        "deepstack_layers": adapter.deepstack_layers,
        "dtype": adapter.dtype,
        "device": str(adapter.device),
        "encoder_bytes": adapter.encoder_bytes,
        "revision": unit.revision(),
    }


def main(link_fd: int, staging_fd: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service drains, and closes the socket when it is done
    serve(Line(socket.socket(fileno=link_fd)), InPlace(staging_fd))


def serve(line: Line, slots: Slots) -> None:
    """Load what the service names and work for it. Returns when it wants nothing, or when loading failed (it is told)."""
    body = line.receive()
    if body is None:
        return
    start = messages.decode_for_encoder(body)
    assert isinstance(start, messages.Start), "the first message starts the encoder"
    settings = ToldSettings(**start.settings)
    logs.configure(settings.log_level, settings.log_format)
    try:
        unit = _load(line, start, settings)
    except TectumError as error:
        _tell(line, Failed(0, messages.problem(error)))
        return
    except Exception as error:
        log.exception("loading failed")
        failure = StartupError("invalid_checkpoint", f"Unexpected {type(error).__name__} while loading the encoder")
        _tell(line, Failed(0, messages.problem(failure)))
        return
    on_device = unit.on_device
    threads = settings.prepare_threads or (CUDA_PREPARE_THREADS if on_device else 1)
    beside = on_device or settings.prepare_threads > 0
    worker = Worker(line, slots, unit, threads, all_beside=beside, watchdog=Watchdog(settings.stall_timeout))
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection has to walk it again
    _tell(line, Ready(card(unit)))
    if beside:
        threading.Thread(target=_read_until_gone, args=(line, worker), name="tectum-reader", daemon=True).start()
    try:
        worker.run(reads=not beside)
    except (OSError, ValueError) as error:
        _line_broke(error)


def _read_until_gone(line: Line, worker: Worker) -> None:
    try:
        while (body := line.receive()) is not None:
            worker.take(body)
    except (OSError, ValueError) as error:
        _line_broke(error)
    os._exit(0)  # also out of a forward that runs: nobody waits for it any more


def _tell(line: Line, message: Message) -> None:
    """Say how the start goes. When nobody listens any more the process ends: the service stopped while it was loading."""
    try:
        line.send(message)
    except OSError as error:
        log.info("nobody waits for this encoder any more: %s", type(error).__name__)
        os._exit(0)


def _line_broke(error: Exception) -> None:
    log.warning("the line to the service broke: %s", type(error).__name__)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
