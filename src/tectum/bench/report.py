"""A load's result on a terminal: a progress bar while it runs, a short table when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@contextmanager
def progress(console: Console, seconds: float) -> Iterator[Callable[[float, int], None]]:
    """A bar on a terminal, nothing elsewhere; the yielded call moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("0 answers", total=seconds)

        def tell(gone: float, done: int) -> None:
            rate = done / gone if gone > 0 else 0.0
            bar.update(task, completed=min(gone, seconds), description=f"{done} answers, {rate:.0f}/s")

        yield tell


def show(console: Console, result: dict[str, Any]) -> None:
    """A line for each kind of request."""
    table = Table(title=_title(result["plan"]), title_justify="left")
    for name in ("", "sent", "ok", "other", "ok/s", "p50 ms", "p90 ms", "p99 ms", "max ms"):
        table.add_column(name, justify="right" if name else "left")
    for kind, found in (result["kinds"] | result.get("probes", {})).items():
        good = found["outcomes"].get("ok", 0)
        other = ", ".join(f"{n} {code}" for code, n in found["outcomes"].items() if code != "ok") or "0"
        latencies = (
            f"{found['latency_ms'][q]:.1f}" if found["latency_ms"] else "-" for q in ("p50", "p90", "p99", "max")
        )
        table.add_row(kind, str(found["sent"]), str(good), other, f"{found['rate']:.1f}", *latencies)
    console.print(table)
    stages = ", ".join(f"{stage} {value:.1f}" for stage, value in result["stages_ms"].items())
    if stages:
        console.print(f"mean ms on the server: {stages}", highlight=False)
    lag = f"; sent late by (p99): {result['send_lag_ms']['p99']:.1f} ms" if "send_lag_ms" in result else ""
    console.print(f"the load itself took {result['generator_cpu_share']:.2f} of a core{lag}", highlight=False)


def _title(plan: dict[str, Any]) -> str:
    how = (
        f"{plan['clients']} clients, closed loop" if plan["rate"] is None else f"{plan['rate']:g} requests/s, open loop"
    )
    return f"{how}, {plan['seconds']:g} s, {', '.join(plan['sizes'])}"
