"""From rounds to a table: medians with their spread, each figure beside its target; and the same table in the docs."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.sections import OVERLOAD_LIVE

BEGIN, END = "<!-- results: begin (written by `python -m bench --write-docs FILE`) -->", "<!-- results: end -->"
#: growth of memory that is no leak: of the median over the last tenth against that over the second tenth
FLAT = 1.02
#: answers within this many times the live limit's worth of work are bounded
PATIENT = 2.0


@dataclass(frozen=True)
class Row:
    """One line of the table. better: `>=` or `<=` where there is a target for it."""

    section: str
    name: str
    unit: str
    values: Sequence[float]
    better: str = ""
    target: float | None = None
    digits: int = 2

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.median >= self.target if self.better == ">=" else self.median <= self.target

    def shown(self) -> str:
        """Median, and the smallest and largest of several."""
        form = f".{self.digits}f"
        spread = f" ({min(self.values):{form}}–{max(self.values):{form}})" if len(self.values) > 1 else ""
        return f"{self.median:{form}}{spread}{' ' + self.unit if self.unit else ''}"

    def aim(self) -> str:
        return "" if self.target is None else f"{self.better} {self.target:g}"

    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.met]


def rows(report: dict[str, Any]) -> list[Row]:
    """The whole table of a run, from what its sections found."""
    found: list[Row] = []
    for side, rounds in report.get("throughput", {}).items():
        found += _throughput(side, rounds)
    found += _slow_urls(report.get("slow_urls", []))
    found += _overload(report.get("overload", []))
    if "null" in report:
        found += _null(report["null"])
    found += _families(report.get("families", {}))
    return found


def _throughput(side: str, rounds: list[dict[str, Any]]) -> list[Row]:
    section = f"{side}×{side}"
    small = int(side) < 448

    def row(name: str, unit: str, value: Callable[[dict[str, Any]], float], *aim: Any, digits: int = 2) -> Row:
        return Row(section, name, unit, [value(r) for r in rounds], *aim, digits=digits)

    return [
        row("bare loop, 2 processes", "pictures/s", lambda r: r["bare"]["rate"], digits=1),
        row("served, 1 encoder process", "pictures/s", lambda r: r["one"]["rate"], digits=1),
        row("served, 2 encoder processes", "pictures/s", lambda r: r["two"]["rate"], digits=1),
        row("served by 1 / bare", "", lambda r: r["one"]["rate"] / r["bare"]["rate"], ">=", 0.45),
        row("served by 2 / bare", "", lambda r: r["two"]["rate"] / r["bare"]["rate"], ">=", 0.8 if small else 0.9),
        row("2 processes / 1 process", "", lambda r: r["two"]["rate"] / r["one"]["rate"], ">=", 1.85),
        row("CPU a picture, bare loop", "ms", lambda r: r["bare"]["cpu_ms"]),
        row("CPU a picture, served by 2: service", "ms", lambda r: r["two"]["service_cpu_ms"]),
        row("CPU a picture, served by 2: encoders", "ms", lambda r: r["two"]["encoders_cpu_ms"]),
        row(
            "CPU a picture, served by 2 / bare",
            "",
            lambda r: r["two"]["cpu_ms"] / r["bare"]["cpu_ms"],
            "<=",
            1.2 if small else 1.07,
        ),
        row("load generator, share of a core", "", lambda r: r["two"]["generator_cpu_share"]),
        row("latency p50", "ms", lambda r: r["two"]["latency_ms"]["p50"], digits=1),
        row("latency p99", "ms", lambda r: r["two"]["latency_ms"]["p99"], digits=1),
        row("`/health/live` p99 under load", "ms", lambda r: r["probed"]["live_ms"]["p99"], "<=", 30, digits=1),
        row("release p99 under load", "ms", lambda r: r["probed"]["release_ms"]["p99"], "<=", 50, digits=1),
        *(
            row(f"mean of a request: {stage}", "ms", lambda r, stage=stage: r["two"]["stages_ms"].get(stage, 0.0))
            for stage in ("fetch", "prepare", "queue", "forward")
        ),
    ]


def _slow_urls(rounds: list[dict[str, Any]]) -> list[Row]:
    if not rounds:
        return []

    def row(name: str, unit: str, value: Callable[[dict[str, Any]], float], *aim: Any, digits: int = 2) -> Row:
        return Row("half on slow URLs", name, unit, [value(r) for r in rounds], *aim, digits=digits)

    return [
        row(
            "open loop: answered in time, with slow ones / without",
            "",
            lambda r: _in_time(r["mixed"]) / _in_time(r["alone"]),
            ">=",
            0.9,
        ),
        row("open loop: inline p99 without slow ones", "ms", lambda r: r["alone"]["latency_ms"]["p99"], digits=1),
        row("open loop: inline p99 with them", "ms", lambda r: r["mixed"]["latency_ms"]["p99"], digits=1),
        row(
            "full speed: rate beside as many slow callers / without",
            "",
            lambda r: r["beside"]["rate"] / statistics.mean((r["full"]["rate"], r["again"]["rate"])),
            ">=",
            0.9,
        ),
        row("slow ones answered well", "", lambda r: _good(r["mixed"]["kinds"]["slow"]), ">=", 1.0),
    ]


def _overload(rounds: list[dict[str, Any]]) -> list[Row]:
    if not rounds:
        return []

    def row(name: str, unit: str, value: Callable[[dict[str, Any]], float], *aim: Any, digits: int = 2) -> Row:
        return Row("twice the sustainable rate", name, unit, [value(r) for r in rounds], *aim, digits=digits)

    def accounted(found: dict[str, Any]) -> float:
        outcomes = found["flooded"]["kinds"]["inline"]["outcomes"]
        return float((outcomes.get("ok", 0) + outcomes.get("overloaded", 0)) / found["flooded"]["sent"])

    def bounded(found: dict[str, Any]) -> float:
        worth = OVERLOAD_LIVE / found["sustained"]["rate"] * 1e3
        return float(found["flooded"]["latency_ms"]["p99"] / worth)

    return [
        row("goodput / sustainable rate", "", lambda r: r["flooded"]["rate"] / r["sustained"]["rate"], ">=", 0.9),
        row("(accepted + refused) / sent", "", accounted, ">=", 1.0, digits=4),
        row("p99 of the accepted", "ms", lambda r: r["flooded"]["latency_ms"]["p99"], digits=1),
        row(f"the same / work of {OVERLOAD_LIVE} live requests", "", bounded, "<=", PATIENT),
        row("`/health/live` p99", "ms", lambda r: r["probed"]["live_ms"]["p99"], "<=", 30, digits=1),
        row("load generator, share of a core", "", lambda r: r["flooded"]["generator_cpu_share"]),
    ]


def _null(found: dict[str, Any]) -> list[Row]:
    memory, section = found["memory"], "null encoder"
    rates = [each["rate"] for each in found["rounds"]]
    grown = _growth(memory["bytes"])
    return [
        Row(section, "rate", "requests/s", rates, ">=", 1500, digits=0),
        Row(section, "CPU a request, service", "ms", [each["service_cpu_ms"] for each in found["rounds"]]),
        Row(section, "CPU a request, encoder process", "ms", [each["encoders_cpu_ms"] for each in found["rounds"]]),
        Row(section, f"memory after / before {memory['requests']} requests", "", [grown], "<=", FLAT, digits=3),
    ]


def _families(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """What Tectum's way to the rows costs, against transformers called directly."""
    return [
        Row(
            "prepare and forward / transformers",
            name,
            "",
            [each["tectum"] / each["direct"] for each in rounds],
            "<=",
            1.05,
            digits=3,
        )
        for name, rounds in found.items()
    ]


def _growth(series: Sequence[int]) -> float:
    """Median of the last tenth over that of the second tenth; the first is warm-up."""
    tenth = max(1, len(series) // 10)
    return statistics.median(series[-tenth:]) / statistics.median(series[tenth : 2 * tenth] or series[:1])


def _in_time(found: dict[str, Any]) -> float:
    inline = found["kinds"]["inline"]
    return float(inline["rate"] / inline["sent"])


def _good(kind: dict[str, Any]) -> float:
    return float(kind["outcomes"].get("ok", 0) / kind["sent"])


def machine() -> dict[str, Any]:
    """Facts without which the figures mean nothing."""
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in cpuinfo if "model name" in line]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_average_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def show(console: Console, report: dict[str, Any]) -> None:
    table = Table(title="medians (smallest–largest) of the rounds", title_justify="left")
    for name in ("", "", "median", "target", ""):
        table.add_column(name)
    last = ""
    for row in rows(report):
        table.add_row(row.section if row.section != last else "", row.name, row.shown(), row.aim(), row.verdict())
        last = row.section
    console.print(table)
    facts = report["machine"]
    if facts["load_average_before"] > 0.5:
        text = (
            f"the machine was busy before the run (load average {facts['load_average_before']:.1f}): do not trust this"
        )
        console.print(text, style="bold red", highlight=False)


def write_docs(report: dict[str, Any], page: Path) -> None:
    """Put the table of a run between the marks in `page`. Raises ValueError when the marks are not there."""
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no marks for the results")
    page.write_text(f"{head}{BEGIN}\n\n{markdown(report)}\n{END}{tail}")


def markdown(report: dict[str, Any]) -> str:
    facts, arguments = report["machine"], report["arguments"]
    lines = [
        f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']:g} GB, Python {facts['python']}, "
        f"torch {facts['torch']}, transformers {facts['transformers']}; load average before the run "
        f"{facts['load_average_before']:.2f}; {arguments['rounds']} rounds of {arguments['seconds']:g} s, "
        f"{arguments['clients']} clients.",
        "",
        "| | | median (smallest–largest) | target | |",
        "|---|---|---|---|---|",
    ]
    last = ""
    for row in rows(report):
        section = row.section if row.section != last else ""
        verdict = f"**{row.verdict()}**" if row.met is False else row.verdict()
        lines.append(f"| {section} | {row.name} | {row.shown()} | {row.aim()} | {verdict} |")
        last = row.section
    return "\n".join(lines) + "\n"
