"""Which requests share a forward, and in which order: worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

from tectum.pipeline.batcher import Batcher
from tectum.types import Modality


def filled(sizes: str, *, fuse: bool, batch_patches: int = 100) -> Batcher:
    """A batcher with jobs `name:patches`; a capital name is audio."""
    batcher = Batcher(fuse=fuse, batch_patches=batch_patches)
    for life, each in enumerate(sizes.split(), start=1):
        name, patches = each.split(":")
        modality = Modality.AUDIO if name.isupper() else Modality.IMAGE
        batcher.put(SimpleNamespace(life=life, name=name, patches=int(patches), modality=modality))
    return batcher


def order(batcher: Batcher) -> str:
    """All batches in the order they leave."""
    batches = []
    while len(batcher):
        batches.append("+".join(job.name for job in batcher.take()))
    return " ".join(batches)


def test_alone_and_oldest_first():
    assert order(filled("a:10 b:5 c:20", fuse=False)) == "a b c"


def test_a_batch_is_one_modality_within_the_budget_and_holds_the_oldest():
    assert order(filled("a:60 A:10 b:30 c:20 B:10 d:10", fuse=True)) == "a+b+d A+B c"


def test_a_request_larger_than_a_batch_runs_alone():
    assert order(filled("a:250 b:10 c:10", fuse=True)) == "a b+c"


def test_small_work_has_its_turn_between_two_large_ones():
    assert order(filled("l:80 m:80 n:80 a:10 b:10 c:10", fuse=False)) == "l a b c m n"


def test_a_large_one_is_overtaken_by_no_more_than_a_batch():
    small = " ".join(f"{name}:20" for name in "abcdefgh")
    assert order(filled(f"l:80 m:80 {small}", fuse=False)) == "l a b c d e m f g h"


def test_without_large_ones_nobody_overtakes():
    assert order(filled("a:10 b:10 l:30 c:10", fuse=False)) == "a b l c"


def test_what_is_discarded_never_leaves():
    batcher = filled("a:10 b:10", fuse=False)
    batcher.discard(1)
    batcher.discard(1)
    assert order(batcher) == "b"
