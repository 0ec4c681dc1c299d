"""torchvision's compiled part does not load beside a CPU torch: declare the operators that its import looks up.

Copied into the environment's site-packages, and imported at the start of each of its processes (`sglang_on_cpu.pth`).
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
        return


_kept = []
sys.meta_path.insert(0, _BeforeTorchvision())
