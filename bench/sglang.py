"""`python -m bench.sglang`: this server against SGLang's own encoder on its own protocol, and delivery against bare pyzmq.

SGLang's environment is the one whose Python stands in `SGLANG_PYTHON` (`make bench-sglang` makes it). Both sides serve the
same checkpoint in float32 and take turns, round by round; ratios are taken within a round. Each side runs in one encoder
process with one and with two threads, SGLang's with batch size 1, and the better figure of each round counts. Where there
are several clients, two encoder processes of this server are measured as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import machine
from bench.sections import ENVIRONMENT
from tectum.bench.plan import Plan, Size
from tectum.bench.run import measure
from tectum.demo.encoder_process import EncoderProcess
from tectum.demo.engines.server import free_port, serving
from tectum.demo.engines.sglang import environment
from tectum.models.tiny import build_tiny_qwen2_5_vl

TARGET_RATIO, TARGET_DELIVERY = 1.5, 0.9
TWO = "two processes"
#: of two processes against SGLang's encoder, by the side of the picture
TARGET_TWO = {224: 2.0, 448: 3.0}
#: seconds of load before each measurement
WARM_UP = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sglang", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds of each side")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="concurrent clients")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 448], help="picture sides in pixels")
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the rows of one delivery")
    parser.add_argument("--delivery-only", action="store_true", help="leave the encoders out")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(arguments)}
    report["delivery"] = delivery(arguments.mebibytes, max(arguments.rounds, 3))
    if not arguments.delivery_only:
        report["encoders"] = encoders(arguments)
    path = Path(__file__).parent / "results" / f"sglang-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(report, indent=1))
    show(report, path)
    return 0


# --- delivery ---------------------------------------------------------------------------------------------------------


def delivery(mebibytes: int, rounds: int) -> dict[str, Any]:
    """GB/s of this project's backend and of a bare pair, to the same kind of receiver, in turns."""
    number = max(2048 // mebibytes, 8)
    rates: dict[str, list[float]] = {"bare": [], "tectum": []}
    for _ in range(rounds):
        for side in rates:
            rates[side].append(pair_rate(f"send-{side}", mebibytes, number))
    ratios = [ours / bare for ours, bare in zip(rates["tectum"], rates["bare"], strict=True)]
    return {**{side: spread(found) for side, found in rates.items()}, "ratio": spread(ratios)}


def pair_rate(sender: str, mebibytes: int, number: int) -> float:
    """GB/s from the moment that the first message has been read to the moment that the last one has."""
    command = [sys.executable, "-m", "bench.zmq_pair"]
    with subprocess.Popen([*command, "receive"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        arguments = [sender, port, str(mebibytes), str(number)]
        with subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, env=ENVIRONMENT) as sending:
            receiver.stdout.readline()
            started = time.perf_counter()
            for _ in range(number - 1):
                receiver.stdout.readline()
            taken = time.perf_counter() - started
            sending.wait(60)
        receiver.kill()
    return (number - 1) * (mebibytes << 20) / taken / 1e9


# --- encoders ---------------------------------------------------------------------------------------------------------


def encoders(arguments: argparse.Namespace) -> dict[str, Any]:
    """Pictures a second of both, for each side and number of clients. All servers stay up; the idle ones use no CPU."""
    results: dict[str, Any] = {}
    with ExitStack() as open_:
        temporary = open_.enter_context(tempfile.TemporaryDirectory(prefix="tectum-bench-"))
        folder = build_tiny_qwen2_5_vl(Path(temporary) / "tiny")
        flags = ("--log-level", "warning", "--transfer-backend", "zmq_to_scheduler")
        urls = {}
        for threads in (1, 2):
            ours = EncoderProcess(folder, "--forward-threads", str(threads), *flags)
            urls[f"tectum, {threads} threads"] = open_.enter_context(ours).url
            log = Path(temporary) / f"sglang-{threads}.log"
            urls[f"sglang, {threads} threads"] = open_.enter_context(sglang_encoder(folder, threads, log))
        two = EncoderProcess(folder, "--workers", "2", "--forward-threads", "1", *flags)
        urls[TWO] = open_.enter_context(two).url
        for side in arguments.sides:
            for clients in arguments.clients:
                measured = [(name, url) for name, url in urls.items() if name != TWO or clients > 1]
                rounds = [
                    {name: load(name, url, side, clients, arguments.seconds) for name, url in measured}
                    for _ in range(arguments.rounds)
                ]
                name = f"{side}×{side}, {clients} client{'s' * (clients > 1)}"
                results[name] = {**summary(rounds, "tectum"), "target": TARGET_RATIO}
                if clients > 1:
                    results[f"{name}, {TWO}"] = {**summary(rounds, TWO), "target": TARGET_TWO.get(side, TARGET_RATIO)}
    return results


@contextmanager
def sglang_encoder(folder: Path, threads: int, log: Path) -> Iterator[str]:
    """SGLang's own encoder as a process; its URL, once it is healthy."""
    port = free_port()
    command = (
        f"{os.environ['SGLANG_PYTHON']} -W ignore -m sglang.launch_server --encoder-only --device cpu --dtype float32"
    )
    command += f" --encoder-transfer-backend zmq_to_scheduler --mm-attention-backend sdpa --port {port}"
    words = [*command.split(), "--model-path", str(folder)]
    within = environment(SGLANG_ENCODER_MAX_BATCH_SIZE="1", OMP_NUM_THREADS=str(threads))
    with serving("SGLang's encoder", words, port, within, log, patience=240, grace=20) as url:
        yield url


def load(name: str, url: str, side: int, clients: int, seconds: float) -> dict[str, Any]:
    """What `tectum bench --protocol sglang` measures. Whatever did not bring its rows ends the benchmark."""
    plan = Plan(url, seconds, clients, sizes=(Size(side, side),), repeat_share=1.0, protocol="sglang", timeout=30.0)
    measure(replace(plan, seconds=WARM_UP))
    result = measure(plan)
    (kind,) = result["kinds"].values()
    if set(kind["outcomes"]) != {"ok"}:
        raise RuntimeError(f"the load on {name} failed ({side}×{side}, {clients} clients): {kind['outcomes']}")
    return {**kind, "generator_cpu_share": result["generator_cpu_share"]}


def summary(rounds: list[dict[str, Any]], mine: str) -> dict[str, Any]:
    """The better of the servers whose names begin with `mine` against the better of SGLang's, round by round."""
    ours, theirs = (
        [max(found["rate"] for name, found in one.items() if name.startswith(side)) for one in rounds]
        for side in (mine, "sglang")
    )
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return {"tectum": spread(ours), "sglang": spread(theirs), "ratio": spread(ratios), "rounds": rounds}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def show(report: dict[str, Any], path: Path) -> None:
    console = Console()
    table = Table(title="on SGLang's protocol: medians (min–max) of the rounds", title_justify="left")
    for name in ("", "Tectum", "SGLang / bare pyzmq", "ratio", "target"):
        table.add_column(name, justify="left" if not name else "right")
    found = report["delivery"]
    size = f"delivery of {report['arguments']['mebibytes']} MiB, GB/s"
    table.add_row(size, _cell(found["tectum"], ".2f"), _cell(found["bare"], ".2f"), *_ratio(found, TARGET_DELIVERY))
    for name, one in report.get("encoders", {}).items():
        cells = _cell(one["tectum"], ".1f"), _cell(one["sglang"], ".1f")
        table.add_row(f"{name}, pictures/s", *cells, *_ratio(one, one["target"]))
    console.print(table)
    console.print(f"written to {path}", highlight=False)


def _cell(found: dict[str, float], form: str) -> str:
    return f"{found['median']:{form}} ({found['min']:{form}}–{found['max']:{form}})"


def _ratio(found: dict[str, Any], target: float) -> tuple[str, str]:
    met = found["ratio"]["median"] >= target
    return _cell(found["ratio"], ".2f"), f"≥ {target} {'met' if met else 'MISSED'}"


if __name__ == "__main__":
    sys.exit(main())
