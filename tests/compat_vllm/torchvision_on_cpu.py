"""Imported at the start of every process of vLLM's environment: makes `import torchvision` work beside a CPU-only torch."""

import sys
from importlib.machinery import ModuleSpec


class _BeforeTorchvision:
    """Notices the first import of torchvision, and costs nothing until then."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            try:
                from tectum.models.torchvision_compat import ensure_torchvision
            except ModuleNotFoundError:  # a process that has nothing to do with Tectum
                return None
            ensure_torchvision()
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
