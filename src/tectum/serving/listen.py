"""The port of a server: taken before anything that takes long, so that a mistake shows at once."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Iterator

import uvicorn

from tectum.errors import StartupError

#: connections that the kernel keeps while the event loop is busy
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartupError `port_in_use` or `invalid_settings`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        raise StartupError("invalid_settings", f"host: {host} is no address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError("port_in_use", f"Port {port} on {host} is in use; give another --port") from None
        raise StartupError("invalid_settings", f"host: cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(BACKLOG)
    return listener


def bracketed(host: str) -> str:
    """`host` as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


class ServerUntilSignal(uvicorn.Server):
    """A server that ends well on SIGTERM or SIGINT: uvicorn's own would be ended by the signal after all, raised once more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield
