"""A process that sends: `python -m tectum.bench.generator`, started by `run.py`.

It reads a plan from its input, makes its pictures, says `ready`, waits for `go`, sends, says how far it is, and ends with
its books: for each kind and outcome the latencies. Latency counts from when a request was due, not from when it was sent: a
server that slows the load down does not look faster for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from tectum.bench.link import Links
from tectum.bench.pictures import Deck, Draw
from tectum.bench.plan import Plan
from tectum.bench.protocols import PROTOCOLS, Outcome, Speaker

#: of so many answers, one has its Server-Timing read
SAMPLED = 8
#: seconds between two words on progress
SAY = 0.25
#: seconds that a client of a closed loop waits after it met no server: one that ended would be asked at full speed
AWAY = 0.1
#: most requests of an open loop that wait for their answers at once: beyond, the load itself is what breaks
MAX_OPEN = 10_000


class Books:
    """What became of the requests. until: end of the window, on `time.perf_counter`."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.done = 0
        self.groups: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"latency_us": [], "in_window": 0})
        self.stages: dict[str, list[float]] = defaultdict(list)
        self.lag_us: list[int] = []

    def add(self, kind: str, outcome: str, due: float) -> None:
        now = time.perf_counter()
        group = self.groups[kind, outcome]
        group["latency_us"].append(int((now - due) * 1e6))
        group["in_window"] += now <= self.until
        self.done += 1

    def add_timing(self, header: bytes) -> None:
        """`fetch;dur=0.01, prepare;dur=1.2` in milliseconds."""
        if self.done % SAMPLED:
            return
        for part in header.split(b","):
            name, _, value = part.strip().partition(b";dur=")
            with contextlib.suppress(ValueError):
                self.stages[name.decode()].append(float(value))

    def to_json(self, cpu: float, seconds: float) -> dict[str, Any]:
        groups = [{"kind": kind, "outcome": outcome, **group} for (kind, outcome), group in self.groups.items()]
        return {"groups": groups, "stages": self.stages, "lag_us": self.lag_us, "cpu": cpu, "seconds": seconds}


class Sender:
    """Sends one request at a time, and books what became of it."""

    def __init__(self, plan: Plan, links: Links, speaker: Speaker, books: Books) -> None:
        self._plan = plan
        self._links = links
        self._speaker = speaker
        self._books = books

    async def send(self, draw: Draw, due: float) -> str:
        """The outcome's code."""
        patience = self._plan.timeout if draw.cancel_after is None else draw.cancel_after
        try:
            async with asyncio.timeout(patience):
                outcome = await self._speaker.encode(self._links, draw)
        except TimeoutError:
            outcome = Outcome("no_answer" if draw.cancel_after is None else "cancelled")
        except ConnectionError:
            outcome = Outcome("connection_lost")
        self._books.add(draw.kind, outcome.code, due)
        if outcome.timing:
            self._books.add_timing(outcome.timing)
        return outcome.code


async def closed_loop(plan: Plan, deck: Deck, sender: Sender, books: Books) -> None:
    """Each client sends its next request when it has its answer."""

    async def client() -> None:
        while (now := time.perf_counter()) < books.until:
            if await sender.send(deck.draw(), now) == "connection_lost":
                await asyncio.sleep(AWAY)

    await asyncio.gather(*(client() for _ in range(plan.clients)))


async def open_loop(plan: Plan, deck: Deck, sender: Sender, books: Books) -> None:
    """Requests arrive as they do from many callers that know nothing of each other, whatever the server does."""
    assert plan.rate is not None, "an open loop has a rate"
    due = time.perf_counter()
    running: set[asyncio.Task[str]] = set()
    while (due := due + deck.interval(plan.rate)) < books.until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        books.lag_us.append(int(max(0.0, time.perf_counter() - due) * 1e6))
        if len(running) >= MAX_OPEN:
            books.add("inline", "not_sent", due)
            continue
        task = asyncio.ensure_future(sender.send(deck.draw(), due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


async def probe(plan: Plan, links: Links, speaker: Speaker, books: Books) -> None:
    """Ask for what the protocol has, in turn."""
    assert plan.probe is not None, "a probe has an interval"
    probes, number = list(speaker.probes.items()), 0
    while (due := time.perf_counter()) < books.until:
        kind, ask = probes[number % len(probes)]
        outcome = "ok"
        try:
            async with asyncio.timeout(plan.timeout):
                await ask(links, number)
        except TimeoutError:
            outcome = "no_answer"
        except ConnectionError:
            outcome = "connection_lost"
        books.add(kind, outcome, due)
        number += 1
        await asyncio.sleep(plan.probe)


def _say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def _saying(books: Books) -> None:
    while True:
        await asyncio.sleep(SAY)
        _say({"done": books.done})


async def run(plan: Plan) -> None:
    deck = Deck(plan) if plan.probe is None else None
    links = Links(plan.url)
    speaker = PROTOCOLS[plan.protocol](plan)
    _say({"ready": True})
    await asyncio.to_thread(sys.stdin.readline)
    started, cpu = time.perf_counter(), time.process_time()
    books = Books(started + plan.seconds)
    if deck is None:
        work: Coroutine[Any, Any, None] = probe(plan, links, speaker, books)
    else:
        loop: Callable[..., Coroutine[Any, Any, None]] = closed_loop if plan.rate is None else open_loop
        work = loop(plan, deck, Sender(plan, links, speaker, books), books)
    saying = asyncio.ensure_future(_saying(books))
    try:
        await work
    finally:
        saying.cancel()
        speaker.close()
        links.close()
    _say(books.to_json(time.process_time() - cpu, time.perf_counter() - started))


def main() -> None:
    plan = Plan.loads(sys.stdin.readline())
    try:
        import uvloop
    except ModuleNotFoundError:  # it is not in the base install; without it sending costs more
        asyncio.run(run(plan))
    else:
        uvloop.run(run(plan))


if __name__ == "__main__":
    main()
