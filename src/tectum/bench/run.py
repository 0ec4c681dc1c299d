"""Start the processes of a load, and add up what they booked."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from tectum.bench.link import Links
from tectum.bench.pictures import Deck
from tectum.bench.plan import Plan
from tectum.bench.protocols import PROTOCOLS
from tectum.bench.slow import SlowServer
from tectum.errors import TectumError, UnavailableError

QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
#: seconds beyond a plan's own that a process may take
PATIENCE = 60.0


def measure(
    plan: Plan,
    *,
    processes: int = 1,
    slow_seconds: float = 2.0,
    probe: float | None = None,
    tell: Callable[[float, int], None] | None = None,
) -> dict[str, Any]:
    """Put a load on a server and say what came of it.

    probe: seconds between two calls of a process that asks for health and releases, beside the load. tell: called with the
    seconds gone and the answers so far. Raises UnavailableError `server_unreachable`, or whatever the server answers to the
    first request of each kind.
    """
    with ExitStack() as open_:
        if plan.slow_share:
            plan = replace(plan, slow_url=open_.enter_context(SlowServer(plan, slow_seconds)).url)
        asyncio.run(try_once(plan))
        plans = plan.shares(processes)
        if probe is not None:
            plans.append(replace(plan, probe=probe))
        reports = _run(plans, tell)
    books = [report for report, part in zip(reports, plans, strict=True) if part.probe is None]
    result = {"plan": plan.describe(), **add_up(books, plan.seconds)}
    if probe is not None:
        result["probes"] = add_up(reports[-1:], plan.seconds)["kinds"]
    return result


async def try_once(plan: Plan) -> None:
    """One request of each kind that the plan has. Raises what the server answers, or that it does not."""
    links, speaker = Links(plan.url), PROTOCOLS[plan.protocol](plan)
    for share, wanted in ((0.0, plan.slow_share < 1), (1.0, plan.slow_share > 0)):
        if not wanted:
            continue
        draw = Deck(replace(plan, slow_share=share, cancel_share=0.0, pictures=1)).draw()
        try:
            async with asyncio.timeout(plan.timeout):
                outcome = await speaker.encode(links, draw)
        except (ConnectionError, TimeoutError):
            text = f"No encoder server answers at {links.host}:{links.port}"
            raise UnavailableError("server_unreachable", text) from None
        if outcome.problem is not None:
            raise _explained(TectumError.from_problem(outcome.problem))
        if outcome.code != "ok":
            raise UnavailableError(
                "server_unreachable", f"The server's first answer is not understood ({outcome.code})"
            )
    speaker.close()
    links.close()


def _explained(error: TectumError) -> TectumError:
    if error.code == "url_refused":
        return type(error)(error.code, "The server fetches nothing from loopback; start it with --allow-private-urls")
    return error


def _run(plans: Sequence[Plan], tell: Callable[[float, int], None] | None) -> list[dict[str, Any]]:
    """Run a process for each plan, all started at once; returns their books in order."""
    generators = [_Generator(plan) for plan in plans]
    try:
        for generator in generators:
            generator.wait_for("ready", PATIENCE)
        for generator in generators:
            generator.go()
        started = time.monotonic()
        for generator, plan in zip(generators, plans, strict=True):
            limit = plan.seconds + plan.timeout + PATIENCE
            while "groups" not in generator.words:
                generator.hear(limit - (time.monotonic() - started))
                if tell is not None:
                    done = sum(each.words.get("done", 0) for each in generators if each.plan.probe is None)
                    tell(time.monotonic() - started, done)
        return [generator.words for generator in generators]
    finally:
        for generator in generators:
            generator.end()


class _Generator:
    """One sending process. words: the last thing that it said."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.words: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tectum.bench.generator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._write(plan.dumps())

    def go(self) -> None:
        self._write("go")

    def wait_for(self, word: str, seconds: float) -> None:
        while word not in self.words:
            self.hear(seconds)

    def hear(self, seconds: float) -> None:
        """The next thing that it says. Raises UnavailableError when it ends, or says nothing for so long."""
        try:
            line = self._said.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            line = ""
        if not line:
            raise UnavailableError("server_unreachable", "A process of the load ended early; its own output says why")
        self.words = json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None, "its input is a pipe"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None, "its output is a pipe"
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put("")


def add_up(books: Iterable[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The books of several processes as one: for each kind what was sent, what came of it, rate and latency of the good.

    A rate counts what was answered well within the window; the counts are of all.
    """
    books = list(books)
    kinds: dict[str, dict[str, Any]] = {}
    for group in (group for book in books for group in book["groups"]):
        found = kinds.setdefault(group["kind"], {"sent": 0, "outcomes": defaultdict(int), "good": 0, "ok_us": []})
        found["sent"] += len(group["latency_us"])
        found["outcomes"][group["outcome"]] += len(group["latency_us"])
        if group["outcome"] == "ok":
            found["good"] += group["in_window"]
            found["ok_us"] += group["latency_us"]
    lags = [lag for book in books for lag in book["lag_us"]]
    stages: dict[str, list[float]] = defaultdict(list)
    for book in books:
        for stage, values in book["stages"].items():
            stages[stage] += values
    shown = {kind: _summary(found, seconds) for kind, found in sorted(kinds.items())}
    return {
        "sent": sum(kind["sent"] for kind in shown.values()),
        "rate": round(sum(kind["rate"] for kind in shown.values()), 3),
        "kinds": shown,
        "stages_ms": {stage: round(sum(values) / len(values), 3) for stage, values in stages.items()},
        "generator_cpu_share": round(sum(book["cpu"] / book["seconds"] for book in books), 3),
        **({"send_lag_ms": quantiles(lags)} if lags else {}),
    }


def _summary(found: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "sent": found["sent"],
        "outcomes": dict(found["outcomes"]),
        "rate": round(found["good"] / seconds, 3),
        "latency_ms": quantiles(found["ok_us"]),
    }


def quantiles(microseconds: Sequence[int]) -> dict[str, float]:
    """Quantiles by nearest rank, in milliseconds; empty for no values."""
    if not microseconds:
        return {}
    ordered = sorted(microseconds)
    last = len(ordered) - 1
    return {name: ordered[min(int(len(ordered) * q), last)] / 1e3 for name, q in QUANTILES}
