"""Patch embeddings are laid out anew only where the bits stay and time is saved; what a checkpoint is called stays."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from tectum.models import layout, revision

PATCH = (2, 14, 14)


def channels_last(module):
    return module.weight.is_contiguous(memory_format=torch.channels_last_3d)


class Embedding(torch.nn.Conv3d):
    """A patch embedding whose two layouts differ as the test says."""

    def __init__(self, last_is_off_by=0.0, last_sleeps=0.0, first_sleeps=0.0):
        torch.manual_seed(1)
        super().__init__(3, 8, PATCH, stride=PATCH, bias=False)
        self.off, self.last, self.first = last_is_off_by, last_sleeps, first_sleeps

    def forward(self, patches):
        last = channels_last(self)
        until = time.perf_counter() + (self.last if last else self.first)
        while time.perf_counter() < until:
            pass
        rows = patches.flatten(1) @ self.weight.contiguous().flatten(1).T  # the same sums in either layout
        return rows + self.off * last


def test_a_layout_that_is_faster_and_gives_the_same_bits_stays():
    embedding = Embedding(first_sleeps=0.02)
    before = embedding.weight.detach().clone()
    assert layout.lay_out_patch_embeddings(torch.nn.Sequential(embedding)) == 1
    assert channels_last(embedding)
    assert torch.equal(embedding.weight, before), "other values in another place are another encoder"
    assert not embedding.weight.is_inference(), "such weights can be used in inference mode alone"


@pytest.mark.parametrize(
    "embedding",
    [
        pytest.param(Embedding(first_sleeps=0.02, last_is_off_by=2**-20), id="other bits"),
        pytest.param(Embedding(last_sleeps=0.02), id="slower"),
        pytest.param(Embedding(first_sleeps=0.02).bfloat16(), id="bfloat16"),
        pytest.param(torch.nn.Conv3d(3, 8, PATCH, stride=1), id="no patch embedding"),
        pytest.param(torch.nn.Conv2d(3, 8, 14, stride=14), id="flat"),
    ],
)
def test_every_other_one_is_left_as_it_was(embedding):
    strides = embedding.weight.stride()
    assert layout.lay_out_patch_embeddings(torch.nn.Sequential(embedding)) == 0
    assert embedding.weight.stride() == strides


def test_on_this_machine_the_real_convolution_keeps_its_bits_for_any_number_of_patches():
    torch.manual_seed(2)
    embedding = torch.nn.Conv3d(3, 64, PATCH, stride=PATCH, bias=False)
    inputs = [torch.randn(patches, 3, *PATCH) for patches in (1, 4, 63, 256, 300)]
    with torch.inference_mode():
        expected = [embedding(each) for each in inputs]
        layout.lay_out_patch_embeddings(torch.nn.Sequential(embedding))
        for each, rows in zip(inputs, expected, strict=True):
            assert torch.equal(embedding(each), rows)


def test_the_digest_of_the_weights_does_not_see_the_layout():
    embedding = Embedding(first_sleeps=0.02)
    before = revision._weights(embedding)
    layout.lay_out_patch_embeddings(SimpleNamespace(modules=lambda: [embedding]))
    assert channels_last(embedding)
    assert revision._weights(embedding) == before
