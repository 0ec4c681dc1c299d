"""`python -m tests.parity [--json] [--families a,b] [--dtype bfloat16] [--mutants]`: exit code 1 when a case does not hold."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--families", default="", help="only these, separated by commas")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--mutants", action="store_true", help="plant errors, and see each of them caught")
    arguments = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.mutants:
            from tests.parity.mutants import hunt

            return hunt(Path(folder), as_json=arguments.json)
        return compare(Path(folder), arguments.families, arguments.dtype, arguments.json)


def compare(folder: Path, only: str, dtype: str, as_json: bool) -> int:
    from tests import zoo
    from tests.parity.cases import Family

    started, results = time.monotonic(), []
    for name in only.split(",") if only else zoo.FAMILIES:
        family = Family(name, folder / name, dtype=dtype)
        for modality in family.modalities():
            for result in family.cases(modality):
                results.append(result)
                verdict = "equal" if result.equal else f"max |d| {result.max_abs:.1e}, allowed {result.bound:.0e}"
                print(
                    f"{'ok  ' if result.passed else 'FAIL'} {name:16} {modality:6} {result.case:34} {verdict}",
                    flush=True,
                )
    failed = [result for result in results if not result.passed]
    print(f"{len(results)} cases, {len(failed)} failed, {time.monotonic() - started:.1f} s")
    if as_json:
        print(
            json.dumps({"cases": [result.json() for result in results], "total": len(results), "failed": len(failed)})
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
