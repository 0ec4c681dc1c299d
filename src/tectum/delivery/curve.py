"""CURVE keys, read from files: for the server that pushes rows and for the receivers that they are pushed to.

Owns what a key's file may hold. Whose key is believed is decided by who reads it.
"""

from __future__ import annotations

from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils.z85 import Z85CHARS

from tectum.errors import StartupError

#: characters of a key
_KEY, _Z85 = 40, frozenset(Z85CHARS)


def need_curve(setting: str) -> None:
    """Raises StartupError `missing_dependency` for a libzmq without CURVE; `setting` is what asks for it, here and below."""
    if not zmq.has("curve"):
        raise StartupError("missing_dependency", f"{setting}: this build of libzmq has no CURVE")


def public_key(setting: str, file: Path) -> bytes:
    """The public key (Z85) of a certificate, or of a file that holds nothing else. Raises StartupError `invalid_settings`."""
    return _keys_in(setting, file)[0]


def key_pair(setting: str, file: Path) -> tuple[bytes, bytes]:
    """The public key and the secret one (Z85) of a certificate. Raises StartupError `invalid_settings`."""
    public, secret = _keys_in(setting, file)
    if secret is None or zmq.curve_public(secret) != public:
        text = f"{setting}: it needs a secret key and the public key that belongs to it"
        raise StartupError("invalid_settings", text)
    return public, secret


def _keys_in(setting: str, file: Path) -> tuple[bytes, bytes | None]:
    """The public key and, where it is there, the secret one."""
    try:
        bare = file.read_bytes().strip()
        public, secret = (bare, None) if len(bare) == _KEY else load_certificate(file)
    except OSError as error:
        raise StartupError("invalid_settings", f"{setting}: {file}: {error.strerror}") from None
    except ValueError:
        raise StartupError("invalid_settings", f"{setting}: {file} holds no public key") from None
    if not all(len(key) == _KEY and set(key) <= _Z85 for key in (public, secret) if key is not None):
        raise StartupError("invalid_settings", f"{setting}: {file} holds a key that is not 40 characters of Z85")
    return public, secret
