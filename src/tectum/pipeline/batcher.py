"""The batcher: prepared requests wait here, oldest first, and leave in batches for one forward.

Owns the order and the size of batches. It does not decide whether a request may still be encoded: the pipeline asks the
ledger for each one that it takes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tectum.pipeline.work import Job

#: a request of more than this share of a batch is large
LARGE_SHARE = 1 / 4


class Batcher:
    """A queue of prepared jobs.

    fuse: whether several requests share a forward. Without it each batch is one request, and its rows equal those of
    the colocated model to the bit; with it a batch is one modality and at most `batch_patches` input patches (a
    request larger than that runs alone).

    The oldest goes first, but between two large requests small ones have their turn, up to `batch_patches` of them: so
    a small one waits for at most one large forward and the small ones before it, and a large one is overtaken by no
    more than a batch.
    """

    def __init__(self, *, fuse: bool, batch_patches: int) -> None:
        self.fuse = fuse
        self.batch_patches = batch_patches
        self._large_from = max(1, int(batch_patches * LARGE_SHARE))
        self._queue: OrderedDict[int, Job] = OrderedDict()  # life -> job, oldest first
        self._small: OrderedDict[int, Job] = OrderedDict()  # those of them that are small
        self._turn = 0  # patches of small requests that may still go before the next large one

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, job: Job) -> None:
        self._queue[job.life] = job
        if job.patches < self._large_from:
            self._small[job.life] = job

    def discard(self, life: int) -> None:
        """Forget a job that nobody wants any more, where it still waits."""
        self._queue.pop(life, None)
        self._small.pop(life, None)

    def take(self) -> list[Job]:
        """The next batch, never waiting for a fuller one. Empty when nothing waits."""
        if not self._queue:
            return []
        first = self._first()
        if first.life in self._small:
            self._turn -= first.patches
        else:
            self._turn = self.batch_patches
        self.discard(first.life)
        batch, patches = [first], first.patches
        if self.fuse:
            for job in list(self._queue.values()):
                if job.modality is first.modality and patches + job.patches <= self.batch_patches:
                    self.discard(job.life)
                    batch.append(job)
                    patches += job.patches
        return batch

    def _first(self) -> Job:
        """The oldest; or, right after a large request and before the next large one, the oldest small one."""
        oldest = next(iter(self._queue.values()))
        if oldest.life not in self._small and self._small and self._turn > 0:
            return next(iter(self._small.values()))
        return oldest
