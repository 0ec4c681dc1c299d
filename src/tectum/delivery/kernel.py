"""What the kernel tells of the bytes of a connection, for those who count a delivery by what has arrived.

Reads a descriptor that its caller owns. It knows no protocol, and does not decide what an unread byte means.
"""

from __future__ import annotations

import fcntl
import struct
import termios


def unacknowledged(descriptor: int) -> int:
    """Bytes that were written to a TCP connection and that its peer's kernel has not acknowledged (Linux's SIOCOUTQ)."""
    count: int = struct.unpack("=i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    return count
