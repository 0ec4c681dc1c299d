"""What each room is told of the settings."""

from __future__ import annotations

from tectum.config import Settings
from tectum.lifecycle.ledger import Limits


def lifecycle_limits(settings: Settings) -> Limits:
    """Bounds of the ledger."""
    return Limits(
        max_live_requests=settings.max_live_requests,
        max_request_patches=settings.max_request_patches,
        max_queued_patches=settings.max_queued_patches,
        max_staged_bytes=settings.max_staged_bytes,
        encode_timeout=settings.encode_timeout,
        request_ttl=settings.request_ttl,
        unknown_id_wait=settings.unknown_id_wait,
        tombstone_ttl=settings.tombstone_ttl,
        max_tombstones=settings.max_tombstones,
    )


def fuses(settings: Settings, device: str) -> bool:
    """Whether requests share a forward. On CPU fusing gains nothing, and alone rows equal the colocated model's."""
    return settings.fuse == "on" or (settings.fuse == "auto" and device.startswith("cuda"))
