"""What SGLang takes for granted and a CPU lacks. Copied into the environment's site-packages, and imported at the start of
each of its processes (`sglang_on_cpu.pth`).

torchvision's compiled part does not load beside a CPU torch: the operators that its import looks up are declared. SGLang's
Mooncake receiver lands rows in a GPU's memory: it is given the host's.
"""

import sys
from importlib.abc import MetaPathFinder


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(self.library)
            _lend_memory(torch)
        return


def _lend_memory(torch):
    empty = torch.empty

    def on_the_host(*size, device=None, **options):
        return empty(*size, device="cpu" if str(device).startswith("cuda") else device, **options)

    torch.empty = on_the_host


_kept = []
sys.meta_path.insert(0, _BeforeTorchvision())
