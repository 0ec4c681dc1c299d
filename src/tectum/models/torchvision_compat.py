"""Let a torchvision whose compiled part cannot load be imported for its Python transforms.

The wheels of PyPI carry a CUDA build, which does not load beside a CPU-only torch; the import then fails because it
registers fake kernels for two operators that nobody declared. Image processors use only the Python transforms, so
declaring those two operators is enough. On a matching install this does nothing. Call it before transformers' image
processors are first touched.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_declared: list[Any] = []  # keeps the operator library alive: its declarations go with it


def ensure_torchvision() -> None:
    """Make `import torchvision` work. Raises ModuleNotFoundError when it is not installed at all."""
    if _declared or "torchvision" in sys.modules:
        return
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("torchvision is not installed", name="torchvision")
    compiled = next(Path(spec.submodule_search_locations[0]).glob("_C*.so"), None)
    if compiled is not None:
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            pass
        else:
            return
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
