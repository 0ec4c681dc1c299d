"""An encoder that encodes nothing: `tectum serve null:ROWSxWIDTH`. It shows what everything around a forward costs.

For the benchmark only. Media is not decoded; each item gets ROWS rows of WIDTH float32 zeros.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

from tectum.errors import StartupError, TectumError
from tectum.media.decode import Looked
from tectum.types import EncodeRequest, ItemMetadata, Modality, RequestMetadata


class NullUnit:
    """Offers what an `EncoderUnit` offers."""

    on_device = False

    def __init__(self, name: str) -> None:
        """Raises StartupError `model_not_found` when `name` is not `null:ROWSxWIDTH`."""
        found = re.fullmatch(r"null:([1-9]\d{0,5})x([1-9]\d{0,4})", name)
        if found is None:
            raise StartupError("model_not_found", "A null encoder is null:ROWSxWIDTH, such as null:64x64")
        self._rows, self._width = int(found[1]), int(found[2])
        self.adapter = SimpleNamespace(
            model_id=name,
            family="null",
            architecture="none",
            modalities={Modality.IMAGE},
            width=self._width,
            deepstack_layers=0,
            dtype="float32",
            device="cpu",
            encoder_bytes=0,
        )

    def revision(self) -> str:
        return self.adapter.model_id

    def look(self, request: EncodeRequest) -> Looked:
        return Looked((), [])

    def prepare(self, request: EncodeRequest, looked: Looked | None = None) -> tuple[RequestMetadata, None]:
        items = tuple(ItemMetadata(item.modality, self._rows, None, self._rows) for item in request.items)
        shape = (items, self._width, 0, "float32")
        return RequestMetadata(request.req_id, request.num_parts, request.part_idx, *shape), None

    def forward(self, batch: Sequence[None], slots: Sequence[memoryview]) -> NullUnit:
        for slot in slots:
            slot[:] = bytes(len(slot))
        self._members = len(slots)
        return self

    def wait(self) -> list[TectumError | None]:
        return [None] * self._members
