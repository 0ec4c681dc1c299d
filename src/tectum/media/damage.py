"""Who is at fault when a decoder fails: whatever it raises on an input is the input's fault, and said so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tectum.errors import BadRequestError, TectumError


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Inside, every exception but our own becomes BadRequestError `media_decode_failed`. what: `PNG picture`, `clip`…

    So wide because decoders raise whatever they like on damaged input. That memory is out is nobody's damage: MemoryError
    passes, but for FFmpeg's, which says so (with an error number) of any size that it finds absurd.
    """
    try:
        yield
    except TectumError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) and getattr(error, "errno", None) is None:
            raise
        text = f"The {what} is truncated or damaged and cannot be decoded"
        raise BadRequestError("media_decode_failed", text) from None
