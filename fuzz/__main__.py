"""`python -m fuzz`: every parser and the whole door, for a bounded time, and how many inputs they took.

Three engines: atheris (coverage-guided, each target in a process of its own), hypothesis (inputs that are nearly right), and
schemathesis (a live server, by its OpenAPI document); one that is not installed is named. Exits 1 when anything was found;
what atheris finds lies in `fuzz/found/TARGET` afterwards and is a seed, and a test, from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisException

from fuzz.seeds import SEEDS
from fuzz.strategies import STRATEGIES
from fuzz.targets import TARGETS

FOUND = Path(__file__).parent / "found"
#: seconds for one input: longer is a hang
HANG = 5
MEMORY_MB = 4096


def by_atheris(name: str, seconds: float) -> tuple[int, str]:
    """Inputs tried on a target, and what was found (empty: nothing)."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(SEEDS[name]):
            (Path(folder) / f"seed-{number}").write_bytes(seed)
        crash = FOUND / name
        crash.mkdir(parents=True, exist_ok=True)
        flags = [
            f"-max_total_time={seconds:g}",
            f"-timeout={HANG}",
            f"-rss_limit_mb={MEMORY_MB}",
            "-print_final_stats=1",
        ]
        flags += [f"-artifact_prefix={crash}/", "-close_fd_mask=0", "-max_len=4096"]
        done = subprocess.run(
            [sys.executable, "-m", "fuzz.harness", name, *flags, folder, str(crash)],
            capture_output=True,
            timeout=seconds + 120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        said = done.stderr.decode("utf-8", "replace")
    if not any(crash.iterdir()):
        crash.rmdir()
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", said)
    runs = int(executed[1]) if executed else 0
    return runs, "" if done.returncode == 0 and runs else said[-2000:]


def by_hypothesis(name: str, seconds: float) -> tuple[int, str]:
    """Rounds of examples until the time is over."""
    runs = 0
    deadline = time.monotonic() + seconds

    def check(data: bytes) -> None:
        nonlocal runs
        runs += 1
        TARGETS[name](data)

    while time.monotonic() < deadline:
        test = settings(
            max_examples=1000,
            deadline=1000 * HANG,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )(given(STRATEGIES[name])(check))
        try:
            test()
        except (Exception, HypothesisException) as error:
            return runs, f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return runs, ""


def by_schemathesis(seconds: float) -> tuple[int, str]:
    """Calls of a live server in all the ways that its OpenAPI document allows, and some that it does not."""
    from tectum.demo.encoder_process import EncoderProcess
    from tectum.models.tiny import build_tiny_qwen2_5_vl

    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny_qwen2_5_vl(Path(folder) / "tiny")
        limits = (
            "--forward-threads",
            "1",
            "--unknown-id-wait",
            "0",
            "--max-metadata-wait",
            "0.01",
            "--fetch-timeout",
            "1",
        )
        with EncoderProcess(tiny, *limits) as process:
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"{process.url}/openapi.json", "--no-color"]
            command += ["--checks", "not_a_server_error", "--phases", "fuzzing,coverage", "--continue-on-failure"]
            command += ["--max-time", f"{seconds:g}", "--max-examples", "2000", "--suppress-health-check", "all"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 300, cwd=folder)
            errors = [line for line in process.lines if "ERROR" in line or "Traceback" in line]
    said = done.stdout + done.stderr
    runs = sum(int(found) for found in re.findall(r"(\d+) generated", said))
    return runs, "" if done.returncode == 0 and not errors else "\n".join([said[-3000:], *errors[:20]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="for each target and engine")
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=TARGETS, help="targets")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="targets at once")
    parser.add_argument("--no-server", action="store_true", help="leave the live server out")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    wanted = parser.parse_args()
    engines: dict[str, Callable[[str, float], tuple[int, str]]] = {"hypothesis": by_hypothesis}
    if find_spec("atheris") is None:
        print("atheris is not installed here: hypothesis alone runs the targets", file=sys.stderr)
    else:
        engines["atheris"] = by_atheris
    rows: list[dict[str, object]] = []

    def run(engine: str, name: str, work: Callable[[], tuple[int, str]]) -> None:
        started = time.monotonic()
        inputs, found = work()
        taken = round(time.monotonic() - started, 1)
        rows.append({"engine": engine, "target": name, "inputs": inputs, "seconds": taken, "found": found})
        print(
            f"{engine:12} {name:14} {inputs:>9} inputs {taken:6.1f} s  {'FOUND' if found else 'nothing'}",
            file=sys.stderr,
        )
        if found:
            print(found, file=sys.stderr)

    for name in wanted.only:  # in this process: hypothesis is not made for threads
        run("hypothesis", name, lambda name=name: by_hypothesis(name, wanted.seconds / 2))
    if "atheris" in engines:
        with ThreadPoolExecutor(wanted.jobs) as pool:
            list(pool.map(lambda name: run("atheris", name, lambda: by_atheris(name, wanted.seconds)), wanted.only))
    if not wanted.no_server:
        if find_spec("schemathesis") is None:
            print("schemathesis is not installed here: the live server is left out", file=sys.stderr)
        else:
            run("schemathesis", "openapi", lambda: by_schemathesis(4 * wanted.seconds))
    total = sum(int(str(row["inputs"])) for row in rows)
    failed = [row for row in rows if row["found"]]
    if wanted.json:
        print(json.dumps({"inputs": total, "found": len(failed), "runs": rows}, indent=1))
    else:
        print(f"{total} inputs, {len(failed)} finding(s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
