"""`python -m bench`: bare loop and server in alternating rounds; prints rates, their ratio, and what a probe waited."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tectum.demo.encoder_process import EncoderProcess
from tectum.models.tiny import build_tiny_qwen2_5_vl

TARGET_RATIO = 0.45
TARGET_HEALTH_MS = 50.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of each side")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients of the server")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 448], help="picture sides in pixels")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(arguments), "sizes": {}}
    with tempfile.TemporaryDirectory(prefix="tectum-bench-") as temporary:
        folder = build_tiny_qwen2_5_vl(Path(temporary) / "tiny")
        flags = ("--forward-threads", "1", "--log-level", "warning")
        total = len(arguments.sides) * arguments.rounds * 2
        with EncoderProcess(folder, *flags) as server, Progress(console=console, transient=True) as bar:
            task = bar.add_task("measuring", total=total)
            for side in arguments.sides:
                rounds = []
                for _ in range(arguments.rounds):
                    bare = bare_rate(folder, side, arguments.seconds)
                    bar.advance(task)
                    rounds.append({"bare": bare, **served(server, side, arguments.clients, arguments.seconds)})
                    bar.advance(task)
                report["sizes"][side] = summary(rounds)
    path = Path(__file__).parent / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(report, indent=1))
    show(report, path)
    return 0


def bare_rate(folder: Path, side: int, seconds: float) -> float:
    """Pictures a second of two bare processes that start together."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.bare", str(folder), str(side), str(seconds)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            if process.poll() is not None:
                raise RuntimeError("a bare process ended early")
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(json.loads(process.communicate(timeout=seconds + 60)[0]))
    return sum(output["pictures"] / output["seconds"] for output in outputs)


def served(server: EncoderProcess, side: int, clients: int, seconds: float) -> dict[str, Any]:
    """One measurement of the server under load from a process of its own."""
    command = [sys.executable, "-m", "bench.load", server.url, str(side), str(clients), str(seconds)]
    before = cpu_seconds(server.pid)
    output = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=seconds + 60)
    if output.returncode:
        raise RuntimeError(f"the load failed: {output.stderr[-300:]}")
    result = json.loads(output.stdout)
    result["rate"] = result["pictures"] / result["seconds"]
    result["server_cpu_ms"] = (cpu_seconds(server.pid) - before) / result["pictures"] * 1e3
    return dict(result)


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians with their spread; the ratio is taken within each round."""
    ratios = [each["rate"] / each["bare"] for each in rounds]
    health = statistics.median(each["health_ms"]["p99"] for each in rounds)
    return {
        "bare_rate": spread([each["bare"] for each in rounds]),
        "served_rate": spread([each["rate"] for each in rounds]),
        "ratio": spread(ratios),
        "latency_p50_ms": spread([each["latency_ms"]["p50"] for each in rounds]),
        "latency_p99_ms": spread([each["latency_ms"]["p99"] for each in rounds]),
        "health_p99_ms": spread([each["health_ms"]["p99"] for each in rounds]),
        "server_cpu_ms_per_picture": spread([each["server_cpu_ms"] for each in rounds]),
        "generator_cpu_share": spread([each["generator_cpu_share"] for each in rounds]),
        "ratio_met": statistics.median(ratios) >= TARGET_RATIO,
        "health_met": health < TARGET_HEALTH_MS,
        "rounds": rounds,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def machine() -> dict[str, Any]:
    import torch
    import transformers

    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(report: dict[str, Any], path: Path) -> None:
    console = Console()
    table = Table(title="one encoder process against the bare loop in two processes", title_justify="left")
    for name in ("", *(f"{side}×{side}" for side in report["sizes"])):
        table.add_column(name, justify="left" if not name else "right")
    rows = (
        ("bare loop, pictures/s", "bare_rate", ".1f"),
        ("served, pictures/s", "served_rate", ".1f"),
        (f"served / bare (target {TARGET_RATIO})", "ratio", ".2f"),
        ("latency p50, ms", "latency_p50_ms", ".1f"),
        ("latency p99, ms", "latency_p99_ms", ".1f"),
        (f"/health/live p99, ms (target < {TARGET_HEALTH_MS:g})", "health_p99_ms", ".1f"),
        ("server CPU a picture, ms", "server_cpu_ms_per_picture", ".2f"),
        ("load generator, share of a core", "generator_cpu_share", ".2f"),
    )
    for label, key, form in rows:
        cells = [size[key] for size in report["sizes"].values()]
        table.add_row(label, *(f"{c['median']:{form}} ({c['min']:{form}}–{c['max']:{form}})" for c in cells))
    console.print(table)
    for side, size in report["sizes"].items():
        ratio, health = ("met" if size[key] else "MISSED" for key in ("ratio_met", "health_met"))
        console.print(f"{side}: ratio target {ratio}, health target {health}", highlight=False)
    console.print(f"medians (min–max) of the rounds; written to {path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
