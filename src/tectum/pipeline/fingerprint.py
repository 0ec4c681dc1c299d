"""What makes two requests the same (R8): a digest over their content, and nothing about who asks or when.

Not the content key (`tectum.cache.key`): that one names the rows of an item, by the bytes that are encoded. This one compares
requests under one id as they came, before anything is fetched; what equal ones mean is the ledger's to say.
"""

from __future__ import annotations

import asyncio
import json
from hashlib import blake2b

from tectum.types import EncodeRequest

#: more bytes than this are digested in a thread, so that the event loop goes on
IN_THREAD = 256 * 1024


async def fingerprint(request: EncodeRequest) -> bytes:
    """16 bytes over items, order, options, part, tenant and whether keys are asked for, not the way of delivery.

    URLs count as themselves.
    """
    size = sum(len(item.data or item.base64 or item.url or "") for item in request.items)
    if size > IN_THREAD:
        return await asyncio.to_thread(_digest, request)
    return _digest(request)


def _digest(request: EncodeRequest) -> bytes:
    digest = blake2b(digest_size=16)
    head = [request.num_parts, request.part_idx, sorted(request.options.items()), request.tenant, request.content_keys]
    _add(digest, b"head", json.dumps(head, default=str).encode())
    for item in request.items:
        _add(digest, item.modality.encode(), b"")
        if item.data is not None:
            _add(digest, b"data", item.data)
        elif item.base64 is not None:
            _add(digest, b"base64", item.base64.encode("utf-8", "surrogatepass"))
        else:
            _add(digest, b"url", (item.url or "").encode("utf-8", "surrogatepass"))
    return digest.digest()


def _add(digest: blake2b, kind: bytes, content: bytes) -> None:
    """Length-prefixed, so that [a+b],[c] and [a],[b+c] differ."""
    digest.update(b"%s:%d:" % (kind, len(content)))
    digest.update(content)
