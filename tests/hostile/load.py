"""What hostile requests cost the others: `python -m tests.hostile.load [--json]`; exits 1 when an amount is not kept.

memory: the server's resident bytes after 5,000 hostile requests, over those before (after as many to warm up as make every
kind be seen); at most 1.05. p99: of good requests at a fixed rate with as many hostile ones between them, over that of the same
good requests alone; at most 1.5. Both phases alternate, so that a change of the machine's load falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx2
from PIL import Image

from tectum.demo.encoder_process import EncoderProcess
from tectum.models.tiny import build_tiny_qwen2_5_vl
from tests import zoo
from tests.hostile.cases import CORRUPT, FORM, HEAD, MP4, PART
from tests.hostile.servers import Door, saved, unruly

GOOD = saved(zoo.picture(224, 224), "JPEG", quality=90)
MOST_MEMORY, MOST_P99 = 1.05, 1.5


def _items(*items: bytes | str, **body: object) -> bytes:
    described = [
        {"type": "image", "url": item}
        if isinstance(item, str)
        else {"type": "image", "data": base64.b64encode(item).decode()}
        for item in items
    ]
    return json.dumps({"items": described, **body}).encode()


def hostile_kinds() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Body and headers of one request of each kind."""
    bomb = saved(Image.new("1", (14000, 14000)))
    keys = b'{"items":[],' + b",".join(b'"k%d":1' % number for number in range(200_000)) + b"}"
    plain = {
        "corrupt": _items(CORRUPT),
        "corrupt among good ones": _items(GOOD, GOOD, CORRUPT),
        "bomb": _items(bomb),
        "video": _items(MP4),
        "markup": _items(b"<svg/>"),
        "nonsense": _items(random.Random(1).randbytes(100_000)),
        "bad base64": json.dumps({"items": [{"type": "image", "data": "!" * 500_000}]}).encode(),
        "bad data URI": _items("data:image/png"),
        "private address": _items("http://169.254.169.254/latest"),
        "loopback": _items("http://127.0.0.1:9/"),
        "file": _items("file:///etc/passwd"),
        "thin": _items(saved(Image.new("RGB", (1093, 5)))),
        "empty": _items(b""),
        "long id": _items(GOOD, req_id="u" * 1_000_000),
        "options": _items(GOOD, options={f"k{number}": 1 for number in range(100)}),
        "many keys": keys,
        "deep": b'{"items":' + b"[" * 200_000,
        "no JSON": b"\x80\x04\x95",
        "too many items": _items(*[b"AAAA"] * 65),
    }
    kinds = {name: (body, {}) for name, body in plain.items()}
    kinds["multipart"] = (PART + b"--b\r\n\r\n", {"content-type": FORM})
    kinds["punycode"] = (PART, {"content-type": f"{FORM}; charset=punycode"})
    kinds["compressed"] = (b"x", {"content-encoding": "gzip"})
    kinds["too large"] = (b"x", {"content-length": "99999999999"})
    return kinds


class Load:
    def __init__(self, door: Door) -> None:
        self.door = door
        self.kinds = list(hostile_kinds().items())
        self.random = random.Random(0)
        self.wrong: list[str] = []
        self.good = _items(GOOD)

    async def hostile(self, http: httpx2.AsyncClient) -> None:
        name, (body, headers) = self.random.choice(self.kinds)
        if self.random.random() < 0.1:
            return await self.hang_up()
        if headers.get("content-length"):
            return await self.raw(HEAD + b"Content-Length: 99999999999\r\nConnection: close\r\n\r\n")
        answer = await http.post("/v1/encode", content=body, headers=headers)
        if not 400 <= answer.status_code < 500 or unruly(answer.content):
            self.wrong.append(f"{name}: {answer.status_code} {answer.text[:100]}")
        return None

    async def hang_up(self) -> None:
        """Leave in the middle of the body, or right after it."""
        cut = self.random.choice([len(self.good) // 2, len(self.good)])
        await self.raw(HEAD + b"Content-Length: %d\r\n\r\n" % len(self.good) + self.good[:cut], read=False)

    async def raw(self, sent: bytes, read: bool = True) -> None:
        reader, writer = await asyncio.open_connection(*self.door.address)
        writer.write(sent)
        if read:
            await reader.read(100)
        writer.close()

    async def good_one(self, http: httpx2.AsyncClient) -> float:
        started = time.perf_counter()
        answer = await http.post("/v1/encode", content=self.good)
        if answer.status_code != 200:
            self.wrong.append(f"good: {answer.status_code} {answer.text[:100]}")
        return time.perf_counter() - started

    async def many_hostile(self, count: int, at_once: int = 8) -> None:
        turn = asyncio.Semaphore(at_once)

        async def one(http: httpx2.AsyncClient) -> None:
            async with turn:
                await self.hostile(http)

        async with httpx2.AsyncClient(base_url=self.door.url, timeout=60, trust_env=False) as http:
            await asyncio.gather(*(one(http) for _ in range(count)))

    async def at_a_rate(self, rate: float, count: int, mixed: bool) -> list[float]:
        """Seconds of `count` good requests, begun `rate` times a second; mixed: a hostile one half-way between two."""
        async with httpx2.AsyncClient(base_url=self.door.url, timeout=60, trust_env=False) as http:
            await self.good_one(http)
            loop = asyncio.get_running_loop()
            start, tasks, others = loop.time(), [], []
            for number in range(count):
                await asyncio.sleep(max(0.0, start + number / rate - loop.time()))
                tasks.append(asyncio.create_task(self.good_one(http)))
                if mixed:
                    await asyncio.sleep(max(0.0, start + (number + 0.5) / rate - loop.time()))
                    others.append(asyncio.create_task(self.hostile(http)))
            await asyncio.gather(*others)
            return [await task for task in tasks]


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hostile", type=int, default=5000, help="hostile requests between the two looks at the memory"
    )
    parser.add_argument("--rate", type=float, default=8.0, help="good requests a second")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of phase")
    parser.add_argument("--each", type=int, default=200, help="good requests a phase")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny_qwen2_5_vl(Path(folder) / "tiny")
        with EncoderProcess(tiny, "--forward-threads", "1", "--log-level", "warning") as process:
            load = Load(Door(process.url, process))
            asyncio.run(load.many_hostile(2000))
            before = load.door.resident()
            asyncio.run(load.many_hostile(given.hostile))
            after = load.door.resident()
            alone: list[float] = []
            mixed: list[float] = []
            for _ in range(given.rounds):
                alone += asyncio.run(load.at_a_rate(given.rate, given.each, mixed=False))
                mixed += asyncio.run(load.at_a_rate(given.rate, given.each, mixed=True))
            held = {
                name: load.door.gauges()[f"encoder_{name}"] for name in ("live_requests", "staged_bytes", "body_bytes")
            }
            loud = [line for line in process.lines if "ERROR" in line or "Traceback" in line]
    found = {
        "hostile_requests": given.hostile,
        "memory_before_mb": round(before / 1e6, 1),
        "memory_after_mb": round(after / 1e6, 1),
        "memory_ratio": round(after / before, 4),
        "good_p50_ms": [round(statistics.median(part) * 1e3, 2) for part in (alone, mixed)],
        "good_p99_ms": [round(p99(part) * 1e3, 2) for part in (alone, mixed)],
        "p99_ratio": round(p99(mixed) / p99(alone), 3),
        "held_at_the_end": held,
        "wrong_answers": load.wrong[:10],
        "errors_in_the_log": loud[:10],
    }
    kept = after <= MOST_MEMORY * before and p99(mixed) <= MOST_P99 * p99(alone)
    kept = kept and not load.wrong and not loud and not any(held.values())
    print(
        json.dumps(found, indent=1) if given.json else "\n".join(f"{name:18} {value}" for name, value in found.items())
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
