"""TLS at the door: the server's certificate, callers' certificates where asked for, and new ones without a restart.

Owns the server's context. What a client believes is `engines/tls.py`'s; gRPC brings its own TLS, from the same files.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

from tectum.config import Settings
from tectum.errors import StartupError

log = logging.getLogger("tectum.tls")


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the settings' certificate, asking callers for theirs where an authority is given.

    The files are looked at again with every handshake, and read when one of them changed; while they cannot be read or do
    not belong together, what was read last stays in force. Raises StartupError `invalid_settings` when that is so at once.
    """
    if settings.tls_cert is None:
        return None
    return _Renewing(settings).context


class _Renewing:
    """The listener's context, which gives each handshake the one that was read last."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        given = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._files = [path for path in given if path is not None]
        self._stamp = self._look()
        self._current = self.context = _read(settings)
        self.context.sni_callback = self._on_handshake

    def _on_handshake(self, handshake: ssl.SSLObject, name: str | None, context: Any) -> None:
        stamp = self._look()
        if None not in stamp and stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = _read(self._settings)
                log.info("the TLS files changed: the new certificate is in force")
            except StartupError as error:
                log.warning("the TLS files changed and cannot be used, the last ones stay in force: %s", error)
        handshake.context = self._current

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._files]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(settings: Settings) -> ssl.SSLContext:
    """Raises StartupError `invalid_settings` for files that cannot be read, are not PEM, or do not belong together."""
    assert settings.tls_cert is not None, "asked only where there is a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise StartupError("invalid_settings", f"tls_cert, tls_key: {error.strerror or error}") from None
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise StartupError("invalid_settings", f"tls_client_ca: {error.strerror or error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
