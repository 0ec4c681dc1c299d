"""Memory layout of patch embeddings on a CPU: the one that its convolution reads fastest, where the bits stay the same.

A patch embedding is a convolution whose kernel covers a patch once. PyTorch keeps its weights channels first; some CPUs
take a third less time when they lie channels last (`torch.channels_last_3d`), others take longer, and on some the sums
are then formed in another order. So both are tried on this machine, on the very weights, and the layout is changed only
where it gives equal bits and is faster.
"""

from __future__ import annotations

import time

import torch

#: patches of the inputs that are tried: few and many, since libraries choose their kernels by size
TRIED = (1, 16, 64)
#: times that the last of them is measured; the best counts, so that a busy machine misleads little
MEASURED = 5


def lay_out_patch_embeddings(encoder: torch.nn.Module) -> int:
    """Lay the float32 weights of `encoder`'s 3-D patch embeddings out for this CPU; returns how many were changed."""
    convolutions = [module for module in encoder.modules() if isinstance(module, torch.nn.Conv3d)]
    return sum(_lay_out(convolution) for convolution in convolutions if _embeds_patches(convolution))


def _embeds_patches(convolution: torch.nn.Conv3d) -> bool:
    plain = convolution.weight.dtype is torch.float32  # bfloat16's kernels are the faster ones as they are
    return plain and convolution.kernel_size == convolution.stride


@torch.no_grad()  # inference_mode would leave weights that can be used nowhere but in it
def _lay_out(embedding: torch.nn.Conv3d) -> bool:
    """Whether channels last gave the same bits in less time, and stays."""
    usual = embedding.weight.data
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(patches, *usual.shape[1:], generator=draw) for patches in TRIED]
    expected, usual_time = [embedding(each) for each in inputs], _seconds(embedding, inputs[-1])
    embedding.weight.data = usual.to(memory_format=torch.channels_last_3d)
    equal = all(torch.equal(embedding(each), rows) for each, rows in zip(inputs, expected, strict=True))
    better = equal and _seconds(embedding, inputs[-1]) < usual_time
    if not better:
        embedding.weight.data = usual
    return better


def _seconds(embedding: torch.nn.Module, patches: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(MEASURED):
        started = time.perf_counter()
        embedding(patches)
        best = min(best, time.perf_counter() - started)
    return best
