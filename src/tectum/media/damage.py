"""Who is at fault when a decoder fails: whatever it raises on an input is the input's fault, and said so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tectum.errors import BadRequestError, TectumError


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Inside, every exception but our own becomes BadRequestError `media_decode_failed`. what: `PNG picture`, `clip`…

    So wide because decoders raise whatever they like on damaged input.
    """
    try:
        yield
    except TectumError:
        raise
    except Exception:
        text = f"The {what} is truncated or damaged and cannot be decoded"
        raise BadRequestError("media_decode_failed", text) from None
