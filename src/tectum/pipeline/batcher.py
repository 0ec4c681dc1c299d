"""The batcher: prepared requests wait here, oldest first, and leave in batches for one forward.

Owns the order and the size of batches. It does not decide whether a request may still be encoded: the pipeline asks the
ledger for each one that it takes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tectum.pipeline.pipeline import Job


class Batcher:
    """A queue of prepared jobs.

    fuse: whether several requests share a forward. Without it each batch is one request, and its rows equal those of
    the colocated model to the bit; with it a batch is one modality and at most `batch_patches` input patches (a
    request larger than that runs alone). The oldest request is in every batch, so nothing waits behind younger work.
    """

    def __init__(self, *, fuse: bool, batch_patches: int) -> None:
        self.fuse = fuse
        self.batch_patches = batch_patches
        self._queue: OrderedDict[int, Job] = OrderedDict()  # life -> job, oldest first

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, job: Job) -> None:
        self._queue[job.life] = job

    def discard(self, life: int) -> None:
        """Forget a job that nobody wants any more, where it still waits."""
        self._queue.pop(life, None)

    def take(self) -> list[Job]:
        """The next batch, never waiting for a fuller one. Empty when nothing waits."""
        if not self._queue:
            return []
        _, oldest = self._queue.popitem(last=False)
        batch, patches = [oldest], oldest.patches
        if self.fuse:
            for life, job in list(self._queue.items()):
                if job.modality is oldest.modality and patches + job.patches <= self.batch_patches:
                    batch.append(self._queue.pop(life))
                    patches += job.patches
        return batch
