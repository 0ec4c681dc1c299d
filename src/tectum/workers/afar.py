"""The other end of `remote.py`: an encoder that connects to its service over TCP, and sends its rows there.

Imports no torch before the service has proved itself, and nothing of Ray: whoever starts this hands it an address, the
secret, and the lane that it is.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import time
import zlib
from collections.abc import Sequence

import tectum
from tectum.errors import TectumError
from tectum.workers import messages
from tectum.workers.messages import Hello, RowsFollow
from tectum.workers.remote import NONCE, PATIENCE, proof, watch_over
from tectum.workers.worker import Line, serve

log = logging.getLogger("tectum.worker")

#: seconds between two tries to connect, doubled up to the second number: the service may be starting, or gone
RETRY, LONGEST_RETRY = 0.5, 10.0


class Sent:
    """`Slots` in memory of this process, sent over the line behind a message that announces them."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def memory(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def hand_over(self, batch: int, slots: Sequence[memoryview], errors: Sequence[TectumError | None]) -> None:
        for member, (slot, error) in enumerate(zip(slots, errors, strict=True)):
            if error is None:
                self._line.send(RowsFollow(batch, member, slot.nbytes, zlib.crc32(slot)), slot)


def work(host: str, port: int, secret: bytes, lane: int) -> None:
    """Connect to the service and encode for it. Ends the process: whoever started it starts the next one."""
    try:
        link, line = _connect(host, port, secret, lane)
        link.settimeout(None)
        serve(line, Sent(line))
    except Exception:
        log.exception("the encoder of lane %d ends", lane)
    os._exit(1)


def _connect(host: str, port: int, secret: bytes, lane: int) -> tuple[socket.socket, Line]:
    """Try until the service answers: only whoever started this knows whether it still is there, and ends it when not."""
    delay = RETRY
    while True:
        link: socket.socket | None = None
        try:
            link = socket.create_connection((host, port), PATIENCE)
            return link, greet(link, secret, lane)
        except (OSError, ValueError) as error:
            log.warning("lane %d cannot connect to its service: %s", lane, error)
            if link is not None:
                link.close()
        time.sleep(delay)
        delay = min(2 * delay, LONGEST_RETRY)


def greet(link: socket.socket, secret: bytes, lane: int) -> Line:
    """Prove that this is the encoder of a lane. Raises ValueError when the service proves nothing in return."""
    watch_over(link)
    line = Line(link)
    challenge = messages.decode_challenge(line.receive() or b"")
    nonce = secrets.token_bytes(NONCE)
    signed = proof(secret, "encoder", lane, challenge.nonce, nonce)
    line.send(Hello(lane, tectum.__version__, os.getpid(), nonce, signed))
    welcome = messages.decode_welcome(line.receive() or b"")
    if not hmac.compare_digest(welcome.proof, proof(secret, "service", lane, nonce, challenge.nonce)):
        raise ValueError("whoever listens there is not the service")
    return line
