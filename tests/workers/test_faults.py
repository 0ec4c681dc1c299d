"""What an encoder process may do to its service, and callers to both: real processes, real signals."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import time
from pathlib import Path

import httpx2
import pytest

from tectum.demo.encoder_process import EncoderProcess
from tests import zoo

FLAGS = ("--forward-threads", "1", "--log-level", "warning")


def jpeg(side: int, seed: int = 0) -> bytes:
    file = io.BytesIO()
    zoo.picture(side, side, seed).save(file, "JPEG")
    return file.getvalue()


SMALL, LARGE = jpeg(56), jpeg(448)


class Caller:
    """Calls one server from one event loop."""

    def __init__(self, process: EncoderProcess) -> None:
        self.url = process.url
        self.http = httpx2.AsyncClient(
            base_url=process.url, timeout=60, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        )

    async def encode(self, picture: bytes = SMALL, times: int = 1, **facts: object) -> httpx2.Response:
        import json

        body = {"items": [{"type": "image", "file": "f"}] * times, **facts}
        return await self.http.post("/v1/encode", data={"request": json.dumps(body)}, files={"f": picture})

    async def progress(self) -> httpx2.Response:
        return await self.http.get("/health/progress")

    async def pids(self) -> list[int]:
        return [each["pid"] for each in (await self.progress()).json()["workers"]]

    async def gauges(self) -> dict[str, float]:
        text = (await self.http.get("/metrics")).text
        return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}

    async def nothing_is_held(self) -> bool:
        now = await self.gauges()
        return now["encoder_live_requests"] == now["encoder_staged_bytes"] == now["encoder_queued_patches"] == 0

    async def until(self, condition, seconds: float = 60.0) -> None:
        """Poll another process; there is nothing to wait on."""
        deadline = time.monotonic() + seconds
        while not await condition():
            assert time.monotonic() < deadline, "it never came true"
            await asyncio.sleep(0.02)

    async def serves(self) -> bool:
        return (await self.encode()).status_code == 200


def against(process: EncoderProcess, test) -> None:
    async def main() -> None:
        caller = Caller(process)
        async with caller.http:
            await test(caller)

    asyncio.run(main())


def test_a_killed_encoder_takes_along_only_what_it_worked_on_and_comes_back(tiny):
    async def test(caller: Caller):
        held = [await caller.encode(req_id=f"held-{i}", delivery={"mode": "hold"}) for i in range(5)]
        assert {answer.status_code for answer in held} == {200}
        ended: list[tuple[float, httpx2.Response]] = []

        async def call(number: int) -> None:
            answer = await caller.encode(LARGE, times=1 + number % 8)
            ended.append((time.monotonic(), answer))

        calls = [asyncio.create_task(call(number)) for number in range(45)]

        async def busy() -> bool:
            if len(calls) - len(ended) < 45:  # the work never runs out while it is looked at, and no limit is reached
                calls.append(asyncio.create_task(call(len(calls))))
            return len(ended) >= 3 and (await caller.gauges())["encoder_queued_patches"] > 0

        await caller.until(busy)
        (pid,) = await caller.pids()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*calls)
        lost = [(when, answer) for when, answer in ended if answer.status_code != 200]
        assert len(lost) >= 20
        for when, answer in lost:
            assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "worker_lost", True)
            assert when - killed < 1.0, "it waited for something"
        pulled = [await caller.http.get(f"/v1/requests/held-{i}/embedding") for i in range(5)]
        assert {answer.status_code for answer in pulled} == {200}, "rows that were staged outlive their encoder"
        refused = await caller.encode()
        assert refused.json()["detail"].startswith("No encoder process is up"), "all are dead: 503 at once"
        assert (await caller.http.get("/health/ready")).status_code == 503
        await caller.until(caller.serves)
        assert (await caller.http.get("/health/ready")).status_code == 200
        assert (await caller.pids()) != [pid]
        assert await caller.nothing_is_held()
        assert (await caller.gauges())["encoder_worker_restarts_total"] == 1

    with EncoderProcess(tiny, *FLAGS) as process:
        against(process, test)


def test_with_two_encoders_the_other_goes_on(tiny):
    async def test(caller: Caller):
        first, _ = await caller.pids()
        os.kill(first, signal.SIGKILL)

        async def noticed() -> bool:
            return (await caller.http.get("/health/ready")).json()["workers_up"] == 1

        await caller.until(noticed)
        answers = await asyncio.gather(*(caller.encode() for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}

        async def logged() -> bool:
            return any(f"{first} (lane 0) ended by signal 9; it is replaced" in line for line in process.lines)

        await caller.until(logged, 10)

    with EncoderProcess(tiny, *FLAGS, "--workers", "2") as process:
        against(process, test)


def test_a_stopped_encoder_turns_progress_unhealthy_and_is_replaced(tiny):
    async def test(caller: Caller):
        assert await caller.serves()
        (pid,) = await caller.pids()
        os.kill(pid, signal.SIGSTOP)
        late, waiting = await asyncio.gather(caller.encode(deadline_ms=500), caller.encode(deadline_ms=600_000))
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        assert (waiting.status_code, waiting.json()["code"]) == (503, "worker_lost")
        await caller.until(caller.serves)
        assert (await caller.pids()) != [pid]
        assert await caller.nothing_is_held()

    async def watched(caller: Caller):
        seen: set[int] = set()

        async def watch() -> None:
            while True:
                seen.add((await caller.progress()).status_code)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await test(caller)
        watching.cancel()
        assert seen == {200, 503}, "progress did not tell the truth"

    with EncoderProcess(tiny, *FLAGS, "--stall-timeout", "3") as process:
        against(process, watched)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Servers that start inside have `plant.py` in their encoder processes."""
    (tmp_path / "sitecustomize.py").write_text((Path(__file__).parent / "plant.py").read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    zoo.picture(width, height).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("picture", "said"), [(png(31, 17), "--stall-timeout"), (png(33, 17), "crashed")], ids=["hangs", "crashes"]
)
@pytest.mark.parametrize("beside", [False, True], ids=["between forwards", "in a thread"])
def test_what_a_decoder_hangs_or_crashes_over_is_its_callers_error(planted, tiny, picture, said, beside):
    """Tried again, it would take the next encoder along: it is the caller's fault, and not the encoder's loss."""

    async def test(caller: Caller):
        assert await caller.serves()
        (pid,) = await caller.pids()
        large = 4_000_000 if beside else 0  # bytes behind the picture: what is large is prepared in a thread
        answer = await caller.encode(picture + bytes(large))
        problem = answer.json()
        assert (answer.status_code, problem["code"], problem["retryable"]) == (400, "media_decode_failed", False)
        assert said in problem["detail"]
        await caller.until(caller.serves)
        assert (await caller.pids()) != [pid]
        assert await caller.nothing_is_held()

    with EncoderProcess(tiny, *FLAGS, "--stall-timeout", "2") as process:
        against(process, test)


def test_a_neighbour_of_a_hanging_decoder_may_try_again(planted, tiny):
    async def test(caller: Caller):
        assert await caller.serves()
        behind = bytes(4_000_000)
        hanging = asyncio.create_task(caller.encode(png(31, 17) + behind))
        neighbours = [asyncio.create_task(caller.encode(png(31, 17) + behind + bytes(n))) for n in (1, 2)]
        answers = [answer.json() for answer in await asyncio.gather(hanging, *neighbours)]
        assert {answer["code"] for answer in answers} <= {"media_decode_failed", "worker_lost"}
        assert any(answer["code"] == "media_decode_failed" for answer in answers)
        assert all(answer["retryable"] == (answer["code"] == "worker_lost") for answer in answers)
        await caller.until(caller.serves)
        assert await caller.nothing_is_held()

    with EncoderProcess(tiny, *FLAGS, "--stall-timeout", "2") as process:
        against(process, test)


def test_a_service_that_stood_still_blames_no_encoder(tiny):
    """A machine that is suspended, a container that is paused: afterwards the loop's timers are due before anything is read."""

    async def test(caller: Caller):
        assert await caller.serves()
        (pid,) = await caller.pids()
        calls = [asyncio.create_task(caller.encode(LARGE, times=8)) for _ in range(12)]

        async def busy() -> bool:
            return (await caller.gauges())["encoder_live_requests"] >= 6

        await caller.until(busy)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(3)  # longer than it may hear nothing of an encoder
        os.kill(process.pid, signal.SIGCONT)
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert (await caller.pids()) == [pid]

    with EncoderProcess(tiny, *FLAGS, "--stall-timeout", "2") as process:
        against(process, test)


def test_beyond_the_limit_callers_are_refused_at_once_and_told_when_to_come_back(tiny):
    async def test(caller: Caller):
        answers = await asyncio.gather(*(caller.encode(LARGE) for _ in range(200)))
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(served) + len(refused) == 200
        assert len(served) >= 64
        assert refused
        assert {answer.json()["code"] for answer in refused} == {"overloaded"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert await caller.nothing_is_held()

    with EncoderProcess(tiny, *FLAGS, "--max-live-requests", "64") as process:
        against(process, test)


def test_a_storm_of_cancels_leaves_nothing(tiny):
    async def test(caller: Caller):
        rng = random.Random(1)

        async def call(number: int) -> int:
            leaves = rng.random() * 3 if number % 2 else 60
            try:
                async with asyncio.timeout(leaves):
                    return (await caller.encode()).status_code
            except (TimeoutError, httpx2.HTTPError):
                return 0

        outcomes = await asyncio.gather(*(call(number) for number in range(500)))
        assert {outcomes[number] for number in range(0, 500, 2)} == {200}, "those who stayed were served"
        await caller.until(caller.nothing_is_held)
        assert await caller.serves()

    with EncoderProcess(tiny, *FLAGS, "--max-live-requests", "1000", "--workers", "2") as process:
        against(process, test)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_under_load_finishes_what_was_accepted(tiny, workers):
    async def test(caller: Caller):
        calls = [asyncio.create_task(caller.encode(LARGE, req_id=f"r{number}")) for number in range(20)]

        async def accepted() -> bool:
            return (await caller.gauges())["encoder_live_requests"] == 20 or any(call.done() for call in calls)

        await caller.until(accepted)
        live = {n for n in range(20) if calls[n].done() or (await caller.http.get(f"/v1/requests/r{n}")).is_success}
        os.kill(process.pid, signal.SIGTERM)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for number in live:
            assert answers[number].status_code == 200, "accepted, yet not served"

    with EncoderProcess(tiny, *FLAGS, "--workers", workers) as process:
        against(process, test)
        assert process.wait(20) == 0
