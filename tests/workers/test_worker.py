"""What an encoder process does itself between forwards, and what it leaves to a thread."""

from __future__ import annotations

import base64
import io
import os
import socket
import subprocess
import sys
import threading

import pytest
from PIL import Image

from tectum.bench.null import NullUnit
from tectum.media.decode import Looked, open_item
from tectum.media.policy import MediaPolicy
from tectum.types import EncodeRequest, Modality
from tectum.workers import messages, worker
from tectum.workers.messages import Frames, Item, Prepare

POLICY = MediaPolicy()


def png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


class Recording(NullUnit):
    """A null encoder that reads headers and remembers in which thread it prepared."""

    def __init__(self) -> None:
        super().__init__("null:4x4")
        self.threads: list[str] = []

    def look(self, request: EncodeRequest) -> Looked:
        opened = [open_item(item.data, Modality.IMAGE, POLICY) for item in request.items]
        return Looked([item.info for item in opened], opened)

    def prepare(self, request, looked=None):
        self.threads.append(threading.current_thread().name.rstrip("_0"))
        return super().prepare(request, looked)


@pytest.fixture
def at_work():
    """A worker, its unit, and what it answers to one message."""
    near, far = socket.socketpair()
    far.settimeout(20)
    unit, frames = Recording(), Frames()
    made = worker.Worker(worker.Line(near), None, unit, 1, all_beside=False, watchdog=worker.Watchdog(60))

    def ask(*items: Item):
        body = messages.frame(Prepare(1, "r", "image", 1, 0, {}, list(items)))[messages.LENGTH.size :]
        made.take(body)
        made._take_up(made._prepares.popleft())
        bodies = []
        while not bodies:
            bodies = frames.feed(far.recv(1 << 16))
        return messages.decode_from_encoder(bodies[0])

    yield unit, ask
    near.close()
    far.close()


def test_small_pictures_are_prepared_at_once_and_large_ones_in_a_thread(at_work):
    unit, ask = at_work
    here = threading.current_thread().name
    for data in (png(64), png(1500), png(64) + bytes(worker.SMALL_BYTES)):
        assert isinstance(ask(Item(data=data)), messages.Prepared)
    assert unit.threads == [here, "tectum-prepare", "tectum-prepare"]


def test_what_the_look_refuses_is_answered_and_nothing_is_kept(at_work):
    unit, ask = at_work
    answer = ask(Item(data=b"<html>"))
    assert isinstance(answer, messages.Failed)
    assert (answer.number, answer.problem["code"], unit.threads) == (1, "unsupported_media", [])


@pytest.mark.parametrize(
    ("modality", "item", "small"),
    [
        ("image", Item(data=png(8)), True),
        ("image", Item(base64=base64.b64encode(png(8)).decode()), True),
        ("image", Item(url="data:image/png;base64,AA"), True),
        ("image", Item(url="file:///a.png"), False),
        ("video", Item(data=png(8)), False),
        ("image", Item(url="data:," + "a" * worker.SMALL_BYTES), False),
    ],
)
def test_only_pictures_of_few_bytes_are_looked_at(modality, item, small):
    assert worker.may_be_small(Prepare(1, "r", modality, 1, 0, {}, [item])) is small


@pytest.mark.parametrize("model", ["tiny", "missing"])
def test_a_service_that_stops_while_its_encoder_loads_is_no_error(tiny, tmp_path, model):
    """The process has its order, and then nobody listens to how that goes, or that it failed."""
    ours, theirs = socket.socketpair()
    staging = os.memfd_create("staging")
    os.ftruncate(staging, 4096)
    try:
        with theirs:
            command = [sys.executable, "-m", "tectum.workers.worker", str(theirs.fileno()), str(staging)]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), staging),
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        folder = {"tiny": tiny, "missing": tmp_path / "missing"}[model]
        with ours:
            settings = {"forward_threads": 1}
            ours.sendall(messages.frame(messages.Start(str(folder), 0, settings)))
        _, said = process.communicate(timeout=60)
    finally:
        os.close(staging)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1, said
    assert "nobody waits for this encoder any more: BrokenPipeError" in said
