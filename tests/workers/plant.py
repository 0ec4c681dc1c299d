"""Faults for an encoder process, planted in its Pillow: imported as `sitecustomize` by every Python that starts.

Pictures of 31×17 pixels hang while they are decoded, those of 33×17 end the process as a fault in a decoder does.
"""

from __future__ import annotations

import ctypes
import sys
import time

if "tectum.workers.worker" in sys.orig_argv:
    from PIL import ImageFile

    _load = ImageFile.ImageFile.load

    def load(self):
        if self.size == (31, 17):
            time.sleep(1e6)
        if self.size == (33, 17):
            ctypes.string_at(0)
        return _load(self)

    ImageFile.ImageFile.load = load
