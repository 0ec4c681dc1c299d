"""`python -m tests.sim`: run seeds, replay one, or hunt the planted bugs. See `--help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.sim import mutants, pure, shell
from tests.sim.program import random_program

CHUNK = {"pure": 200, "shell": 10}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=None, help="how many programs to run (with --mutants: at most, each)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--level", choices=("pure", "shell"), default="pure", help="the core alone, or the async shell")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print its shortest failing trace")
    parser.add_argument("--mutants", action="store_true", help="hunt every planted bug")
    parser.add_argument(
        "--bench", action="store_true", help="measure the ledger: events a second, bytes a live request"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    if arguments.seeds is None:
        arguments.seeds = 10_000 if arguments.mutants else 2000
    if arguments.bench:
        return report({"ledger": bench()}, arguments.json, True)
    if arguments.mutants:
        found = hunt_all(arguments.seeds, arguments.jobs)
        return report({"mutants": found}, arguments.json, all(each["caught"] for each in found))
    if arguments.replay is not None:
        return replay(arguments.replay, arguments.level)
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    chunk = CHUNK[arguments.level]
    last = arguments.first + arguments.seeds
    jobs = [(arguments.level, start, min(start + chunk, last)) for start in range(arguments.first, last, chunk)]
    total: dict[str, Any] = {"level": arguments.level, "seeds": 0, "steps": 0, "violations": 0}
    coverage: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    started = time.perf_counter()
    with ProcessPoolExecutor(arguments.jobs) as pool, Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{arguments.level} seeds", total=arguments.seeds)
        for seeds, steps, counts, failed in pool.map(run_chunk, jobs):
            total["seeds"] += seeds
            total["steps"] += steps
            coverage.update(counts)
            failures += failed
            bar.advance(task, seeds)
    total["violations"] = len(failures)
    total["coverage"] = dict(
        sorted(coverage.items(), key=lambda entry: int(entry[0][1:]) if entry[0][1:].isdigit() else 99)
    )
    total["seconds"] = round(time.perf_counter() - started, 1)
    for seed, failure in failures[:5]:
        Console(stderr=True).print(f"seed {seed}: {failure}  (--replay {seed} --level {arguments.level})", markup=False)
    return report(total, arguments.json, not failures)


def run_chunk(job: tuple[str, int, int]) -> tuple[int, int, Counter[str], list[tuple[int, str]]]:
    level, first, last = job
    run_seed = pure.run_seed if level == "pure" else shell.run_seed
    steps, coverage, failed = 0, Counter[str](), []
    for seed in range(first, last):
        result = run_seed(seed)
        steps += result.steps
        coverage.update(result.coverage)
        if result.failure:
            failed.append((seed, result.failure))
    return last - first, steps, coverage, failed


def replay(seed: int, level: str) -> int:
    if level == "shell":
        result = shell.run_seed(seed)
    else:
        program = random_program(seed)
        result = pure.run_program(program)
        if result.failure:
            program = pure.shrink(program, result.rule)
            result = pure.run_program(program)
            sys.stdout.write(f"shortest program: {program}\n")
    sys.stdout.write("".join(result.trace))
    sys.stdout.write(f"{result.failure or 'no violation'} after {result.steps} steps\n")
    return 1 if result.failure else 0


def hunt_all(seeds: int, jobs: int) -> list[dict[str, Any]]:
    found = []
    with ProcessPoolExecutor(jobs) as pool, Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planted bugs", total=len(mutants.MUTANTS))
        for each in pool.map(hunt_one, [(index, seeds) for index in range(len(mutants.MUTANTS))]):
            found.append(each)
            bar.advance(task)
    return found


def hunt_one(job: tuple[int, int]) -> dict[str, Any]:
    return mutants.hunt(mutants.MUTANTS[job[0]], job[1])


def bench() -> dict[str, float]:
    """The ledger on one core: whole requests (accept to delivered), and what an idle live request costs."""
    import tracemalloc

    from tectum.lifecycle import events as E
    from tectum.lifecycle.ledger import Ledger, Limits
    from tests.sim.world import Size

    size, rates = Size(1000, 10), []
    for _ in range(5):
        ledger, events, started = Ledger(Limits()), 0, time.perf_counter()
        for number in range(20_000):
            now = number * 1e-3
            life = ledger.handle(E.Accept(f"r{number}", b"", number + 1, E.Delivery.INLINE), now)[0].life
            ledger.handle(E.PrepareStarted(life), now)
            ledger.handle(E.Prepared(life, size), now)
            ledger.handle(E.EncodeStarted(life), now)
            ledger.handle(E.Encoded(life), now)
            ledger.handle(E.TakeAnswer(f"r{number}", life, number + 1), now)
            ledger.handle(E.SendConfirmed(life, number + 1), now)
            events += 7
        rates.append(events / (time.perf_counter() - started))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ledger = Ledger(Limits(max_live_requests=10_000))
    for number in range(10_000):
        ledger.handle(E.Accept(f"request-{number}", b"x" * 16, number + 1, E.Delivery.INLINE), 0.0)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    rates.sort()
    return {
        "events_per_second": round(rates[2]),
        "events_per_second_min": round(rates[0]),
        "events_per_second_max": round(rates[-1]),
        "bytes_per_live_request": round(held / 10_000),
    }


def report(summary: dict[str, Any], as_json: bool, good: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        Console().print(summary)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
