"""Stands in for SGLang's GPU kernels, which have no CPU build. Its imports ask for names; none is called on a CPU."""

import torch


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments, **keywords):
        raise RuntimeError(f"sgl_kernel.{name} has no CPU build")

    return kernel


for looked_up_at_import in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    setattr(torch.ops.sgl_kernel, looked_up_at_import, __getattr__(looked_up_at_import))
