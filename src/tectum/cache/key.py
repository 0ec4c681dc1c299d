"""The content key: a name for the rows of one item, equal exactly when the rows must be equal.

160 bits (BLAKE2b) over the media's bytes, their modality, the encoder's revision (weights, processor and backend), the
processor options and the tenant. It is worked out here, from the bytes that are encoded; what a caller calls its content is
not looked at. Tenants never share a key, so that nobody learns from an answer's speed what others have sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

#: changes when the meaning of a key does
VERSION = b"tectum-key-1"
KEY_BYTES = 20


def content_key(modality: str, media: bytes, *, revision: str, options: Mapping[str, Any], tenant: str) -> str:
    """The key of one item, 40 hexadecimal digits. revision: of the encoder, as `Encoders.revision` gives it."""
    digest = blake2b(digest_size=KEY_BYTES)
    settled = json.dumps(sorted(options.items()), default=str, separators=(",", ":"))
    for field in (VERSION, modality.encode(), revision.encode(), settled.encode(), _text(tenant)):
        digest.update(b"%d:" % len(field))
        digest.update(field)
    digest.update(media)
    return digest.hexdigest()


def joint_key(keys: Sequence[str]) -> str:
    """The key of several items encoded together, in order. The last bits of rows depend on what shares their forward."""
    if len(keys) == 1:
        return keys[0]
    return blake2b("+".join(keys).encode(), digest_size=KEY_BYTES).hexdigest()


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
