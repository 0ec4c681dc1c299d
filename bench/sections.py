"""What is measured, section by section. Each returns rounds: plain numbers, judged in `report`.

Every load comes from `tectum.bench`, from processes of its own; every ratio is taken within one round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.server import Server
from tectum.bench.plan import Plan, Size
from tectum.bench.run import measure

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
#: seconds between two probes
PROBE = 0.02
#: share of the sustainable rate that inline requests have in the slow-URL run; the slow ones add as much again
MODERATE = 0.4
SLOW_SECONDS = 2.0
#: limit on live requests in the overload run
OVERLOAD_LIVE = 64
#: tombstones in the memory run: their bound is reached early, so that what grows later is a leak
FEW_TOMBSTONES = 1000
NULL = "null:64x64"
NULL_CLIENTS = 16


@dataclass(frozen=True)
class Scope:
    """How long, how often, how many. tell: called when a measurement is done."""

    rounds: int
    seconds: float
    clients: int
    sides: Sequence[int]
    null_requests: int
    family_calls: int
    tell: Callable[[], None]

    def measurements(self) -> int:
        """How often `tell` will be called."""
        from bench import families

        return self.rounds * (4 * len(self.sides) + 5 + 3 + 1) + 1 + families.measurements()


def bare(folder: Path, side: int, seconds: float) -> dict[str, float]:
    """Two bare processes that start together: pictures a second of both, CPU milliseconds a picture."""
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
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [json.loads(process.communicate(timeout=seconds + 60)[0]) for process in processes]
    pictures = sum(output["pictures"] for output in outputs)
    return {
        "rate": sum(output["pictures"] / output["seconds"] for output in outputs),
        "cpu_ms": sum(output["cpu"] for output in outputs) / pictures * 1e3,
    }


def served(server: Server, plan: Plan) -> dict[str, Any]:
    """One load on a server: rate, latencies, CPU milliseconds a picture by process."""
    before = server.cpu()
    result = measure(plan, slow_seconds=SLOW_SECONDS)
    used = server.cpu().since(before)
    inline = result["kinds"]["inline"]
    pictures = sum(kind["outcomes"].get("ok", 0) for kind in result["kinds"].values())
    return {
        "rate": inline["rate"],
        "sent": result["sent"],
        "kinds": result["kinds"],
        "latency_ms": inline["latency_ms"],
        "stages_ms": result["stages_ms"],
        "service_cpu_ms": used.service / pictures * 1e3,
        "encoders_cpu_ms": used.encoders / pictures * 1e3,
        "cpu_ms": sum(used) / pictures * 1e3,
        "generator_cpu_share": result["generator_cpu_share"],
    }


def probed(plan: Plan) -> dict[str, Any]:
    """The same load with a probe beside it: what `/health/live` and a release wait. Its calls cost CPU of their own."""
    result = measure(plan, slow_seconds=SLOW_SECONDS, probe=PROBE)
    return {f"{name}_ms": result["probes"][name]["latency_ms"] for name in ("live", "release")}


def throughput(folder: Path, scope: Scope) -> dict[str, list[dict[str, Any]]]:
    """For each side: bare loop, one encoder process, two of them, and these once more with a probe, in turn."""
    rounds: dict[str, list[dict[str, Any]]] = {str(side): [] for side in scope.sides}
    with Server(folder, 1) as one, Server(folder, 2) as two:
        for side in scope.sides:
            for _ in range(scope.rounds):
                found: dict[str, Any] = {"bare": bare(folder, side, scope.seconds)}
                scope.tell()
                for name, server in (("one", one), ("two", two)):
                    found[name] = served(server, _closed(server, scope, side))
                    scope.tell()
                found["probed"] = probed(_closed(two, scope, side))
                scope.tell()
                rounds[str(side)].append(found)
    return rounds


def slow_urls(folder: Path, scope: Scope) -> list[dict[str, Any]]:
    """Do slow URLs slow down those that need none? As an open loop at a moderate rate, and beside callers at full speed."""
    rounds = []
    with Server(folder, 2, "--max-live-requests", "2048") as server:
        for _ in range(scope.rounds):
            full = served(server, _closed(server, scope, scope.sides[0]))
            scope.tell()
            rate = MODERATE * full["rate"]
            size = (_size(scope.sides[0]),)
            alone = served(server, Plan(server.url, scope.seconds, rate=rate, sizes=size))
            scope.tell()
            mixed = served(server, Plan(server.url, scope.seconds, rate=2 * rate, sizes=size, slow_share=0.5))
            scope.tell()
            beside = _beside(server, scope)
            scope.tell()
            again = served(server, _closed(server, scope, scope.sides[0]))
            scope.tell()
            rounds.append({"full": full, "alone": alone, "mixed": mixed, "beside": beside, "again": again})
    return rounds


def _beside(server: Server, scope: Scope) -> dict[str, Any]:
    """The full closed loop, while as many callers again wait for slow URLs."""
    slow = Plan(
        server.url, scope.seconds, clients=scope.clients, sizes=(_size(scope.sides[0]),), slow_share=1.0, seed=1000
    )
    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(measure, slow, slow_seconds=SLOW_SECONDS)
        found = served(server, _closed(server, scope, scope.sides[0]))
        return {**found, "slow": other.result()["kinds"]["slow"]}


def overload(folder: Path, scope: Scope) -> list[dict[str, Any]]:
    """What the server can sustain, then twice as much from callers that do not wait."""
    rounds = []
    with Server(folder, 2, "--max-live-requests", str(OVERLOAD_LIVE)) as server:
        for _ in range(scope.rounds):
            sustained = served(server, _closed(server, scope, scope.sides[0]))
            scope.tell()
            flood = Plan(server.url, scope.seconds, rate=2 * sustained["rate"], sizes=(_size(scope.sides[0]),))
            flooded = served(server, flood)
            scope.tell()
            rounds.append({"sustained": sustained, "flooded": flooded, "probed": probed(flood)})
            scope.tell()
    return rounds


def null(scope: Scope) -> dict[str, Any]:
    """Rows without a forward: what everything else costs, and whether memory stays where it is."""
    rounds = []
    with Server(NULL, 1, "--max-tombstones", str(FEW_TOMBSTONES)) as server:
        for number in range(scope.rounds):
            plan = Plan(server.url, scope.seconds, clients=NULL_CLIENTS, seed=number)
            rounds.append(served(server, plan))
            scope.tell()
        seconds = scope.null_requests / rounds[-1]["rate"]
        with server.watched() as memory:
            sent = served(server, Plan(server.url, seconds, clients=NULL_CLIENTS))["sent"]
        scope.tell()
    return {"rounds": rounds, "memory": {"requests": sent, "bytes": memory}}


def families(scope: Scope) -> dict[str, list[dict[str, float]]]:
    """For each family and modality: prepare and forward, against transformers called directly."""
    import torch

    from bench import families as pairs

    torch.set_num_threads(1)
    return pairs.measure(scope.rounds, scope.family_calls, scope.tell)


def _closed(server: Server, scope: Scope, side: int) -> Plan:
    return Plan(server.url, scope.seconds, clients=scope.clients, sizes=(_size(side),))


def _size(side: int) -> Size:
    return Size(side, side)
