"""`python -m bench`: everything in alternating rounds; prints the table, and writes it with the facts of the machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench import report as reporting
from bench import sections
from tectum.models.tiny import build_tiny_qwen2_5_vl

SECTIONS = ("throughput", "slow_urls", "overload", "null", "families")
#: sections that need no checkpoint, or build their own
ALONE = ("null", "families")
DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = _arguments()
    if arguments.write_docs is not None:
        reporting.write_docs(json.loads(arguments.write_docs.read_text()), DOCS)
        return 0
    console = Console(stderr=True)
    facts = {name: value for name, value in vars(arguments).items() if name not in ("write_docs", "out")}
    found: dict[str, Any] = {"machine": reporting.machine(), "arguments": facts}
    with tempfile.TemporaryDirectory(prefix="tectum-bench-") as temporary:
        folder = build_tiny_qwen2_5_vl(Path(temporary) / "tiny", max_pixels=max(arguments.sides) ** 2)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("measuring", total=None)
            scope = sections.Scope(
                arguments.rounds,
                arguments.seconds,
                arguments.clients,
                arguments.sides,
                arguments.null_requests,
                arguments.family_calls,
                lambda: bar.advance(task),
            )
            if set(arguments.only) == set(SECTIONS):
                bar.update(task, total=scope.measurements())
            for name in arguments.only:
                bar.update(task, description=name)
                measured = getattr(sections, name)
                found[name] = measured(scope) if name in ALONE else measured(folder, scope)
    path = arguments.out or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(found, indent=1))
    reporting.show(Console(), found)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of each measurement")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients of a closed loop")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 448, 896], help="picture sides in pixels")
    parser.add_argument("--null-requests", type=int, default=100_000, help="requests over which memory is watched")
    parser.add_argument("--family-calls", type=int, default=20, help="calls of each side, for each family and round")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--out", type=Path, help="where to write the results (a new file in bench/results/)")
    parser.add_argument(
        "--write-docs",
        type=Path,
        metavar="FILE",
        help="measure nothing: put this file's table into docs/performance.md",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
