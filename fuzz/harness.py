"""One target under atheris, as a process of its own: `python -m fuzz.harness TARGET [libFuzzer flags] CORPUS`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["tectum", "python_multipart"]):
    from fuzz.targets import TARGETS


def main() -> None:
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
