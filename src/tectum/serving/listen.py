"""What every server of ours does before and around its app: take the port, speak HTTP within limits, end on a signal.

The port is taken before anything that takes long, so that a mistake shows at once. It knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from tectum.errors import StartupError, TectumError
from tectum.serving.connection import Connection, ConnectionLimits

#: connections that the kernel keeps while the event loop is busy
BACKLOG = 2048
#: seconds that an idle connection is kept: longer than our clients keep theirs, so that they never meet a closed one
KEEP_ALIVE = 75


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


def nobody(*_: object) -> None:
    """Hears of refusals and hang-ups where nothing counts them."""


def http_within(
    limits: ConnectionLimits, app: ASGIApp, refused: Callable[[TectumError], None] = nobody, **further: Any
) -> uvicorn.Config:
    """uvicorn's settings for HTTP/1.1 within `limits`; `refused` hears of what they refuse. further: more of uvicorn's."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=cast(type[asyncio.Protocol], partial(Connection, limits=limits, refused=refused)),
        ws="none",
        loop="uvloop",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        **further,
    )


def serve_until_signal(config: uvicorn.Config, host: str, port: int, what: str) -> None:
    """Say `what` and the URL once the port is taken, then serve until SIGTERM or SIGINT. Raises as `bind`."""
    with bind(host, port) as listener:
        shown, taken = listener.getsockname()[:2]
        Console(stderr=True).print(f"{what} on http://{bracketed(shown)}:{taken}", highlight=False, soft_wrap=True)
        _ServerUntilSignal(config).run(sockets=[listener])


class _ServerUntilSignal(uvicorn.Server):
    """A server that ends well on SIGTERM or SIGINT: uvicorn's own would be ended by the signal after all, raised once more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield
