"""The situations in which encoder services fail first, each with the right outcome, on the real pipeline."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import pytest

from tectum.errors import BadRequestError, DeliveryError, InternalError, TectumError, UnavailableError
from tectum.lifecycle.events import Milestone
from tectum.lifecycle.ledger import Limits
from tectum.types import Destination
from tests.pipeline.harness import hold, inline, request, scenario, start

ONE, TWO = Destination("tcp://one", "fake"), Destination("tcp://two", "fake")


async def refused(awaitable, code: str, status: int) -> TectumError:
    with pytest.raises(TectumError) as caught:
        await awaitable
    assert (caught.value.code, caught.value.status) == (code, status)
    return caught.value


def test_rows_reach_the_caller_and_nothing_stays():
    async def test(pipeline, work):
        assert await inline(pipeline, request("a", b"picture a")) == b"picture a"
        assert not work.held, "released without waiting for a sweep"

    scenario(test)


def test_metadata_answers_while_the_forward_runs():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        early = start(pipeline.wait("r", Milestone.METADATA, 10))
        call = start(inline(pipeline, request()))
        await gate.reached.wait()
        assert (await early).rows == 4
        assert (await pipeline.wait("r", Milestone.METADATA, 0)).width == 8
        assert not call.done()
        gate.open.set()
        await call

    scenario(test)


def test_release_then_send_and_send_then_release():
    async def test(pipeline, work):
        await hold(pipeline, request("a"))
        pipeline.release_request("a")
        error = await refused(pipeline.pull("a").__aenter__(), "request_released", 410)
        assert error.details["reason"] == "client_release"
        await hold(pipeline, request("b"))
        async with pipeline.pull("b") as job:
            pipeline.release_request("b")
            assert "b" in work.held, "the rows stay while they are read"
            assert job.staged.lease == b"picture"
        assert "b" not in work.held

    scenario(test)


def test_release_before_the_encode_runs_no_forward():
    async def test(pipeline, work):
        gate = work.gate("prepare", "r")
        call = start(inline(pipeline, request()))
        await gate.reached.wait()
        pipeline.release_request("r")
        await refused(call, "request_released", 410)
        gate.open.set()
        pipeline.release_request("never came yet")
        await refused(inline(pipeline, request("never came yet")), "request_released", 410)
        await inline(pipeline, request("next"))
        assert work.forwards == [["next"]]

    scenario(test)


@pytest.mark.parametrize("where", ["queue", "prepare", "encode", "send"])
def test_a_cancelled_caller_leaves_nothing_behind(where):
    async def test(pipeline, work):
        if where == "queue":  # another request keeps the forward busy
            busy = work.gate("encode", "busy")
            other = start(inline(pipeline, request("busy")))
            await busy.reached.wait()
            call = start(inline(pipeline, request()))
            await pipeline.wait("r", Milestone.METADATA, 10)
        elif where == "send":
            reading = asyncio.Event()

            async def slow_reader():
                async with pipeline.execute_encode_pipeline(request()):
                    reading.set()
                    await asyncio.Event().wait()

            call = start(slow_reader())
            await reading.wait()
        else:
            gate = work.gate(where, "r")
            call = start(inline(pipeline, request()))
            await gate.reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert pipeline.status("r")["reason"] == "client_abort"
        if where in ("prepare", "encode"):
            assert len(pipeline.ledger) == 1, "the stage that runs is drained first"
            gate.open.set()
        elif where == "queue":
            busy.open.set()
            await other
            assert work.forwards == [["busy"]]
        await inline(pipeline, request("next"))
        assert pipeline.ledger.staged_bytes == 0

    scenario(test)


def test_sixty_four_cancels_in_one_burst_then_the_next_is_served():
    async def test(pipeline, work):
        busy = work.gate("encode", "busy")
        first = start(inline(pipeline, request("busy")))
        await busy.reached.wait()
        calls = [start(inline(pipeline, request(f"r{i}"))) for i in range(64)]
        await pipeline.wait("r63", Milestone.METADATA, 10)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert len(pipeline.ledger) == 1
        busy.open.set()
        await first
        await inline(pipeline, request("next"))
        assert work.forwards == [["busy"], ["next"]]

    scenario(test)


def test_equal_ids_join_and_never_get_each_others_picture():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        first = start(inline(pipeline, request("r", b"one")))
        await gate.reached.wait()
        same = start(inline(pipeline, request("r", b"one")))
        await refused(inline(pipeline, request("r", b"two")), "request_conflict", 409)
        gate.open.set()
        assert (await first, await same) == (b"one", b"one")
        assert work.forwards == [["r"]], "one forward served both"

    scenario(test)


def test_one_of_two_joined_callers_leaves_and_the_other_is_served():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        first = start(inline(pipeline, request()))
        await gate.reached.wait()
        second = start(inline(pipeline, request()))
        await asyncio.sleep(0)
        first.cancel()
        gate.open.set()
        assert await second == b"picture"
        assert not work.held

    scenario(test)


def test_a_repeated_registration_counts_once_and_both_receivers_get_a_copy():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        call = start(hold(pipeline, request()))
        await gate.reached.wait()
        for _ in range(3):
            await pipeline.register_destinations("r", [ONE], 2)
        gate.open.set()
        await call
        await pipeline.register_destinations("r", [TWO], 2)
        async with pipeline.pull("r"):
            pass
        await pipeline.wait("r", Milestone.ENDED, 60)
        assert sorted(work.sent) == ["tcp://one", "tcp://two"]

    scenario(test)


def test_a_slow_send_keeps_its_memory_after_the_release():
    async def test(pipeline, work):
        gate = work.gate("send", "tcp://one")
        early = start(pipeline.register_destinations("r", [ONE], 1))
        await hold(pipeline, request())
        await early
        await gate.reached.wait()
        pipeline.release_request("r")
        assert "r" in work.held
        gate.open.set()
        await asyncio.sleep(1)
        assert work.sent == ["tcp://one"], "the send ended well, on rows that were still there"
        assert "r" not in work.held

    scenario(test)


@pytest.mark.parametrize("failure", ["dies", "never answers"])
def test_a_dead_receiver_is_reported_and_delays_nobody(failure):
    async def test(pipeline, work):
        gate = work.gate("send", "tcp://one")
        registered = start(pipeline.register_destinations("r", [ONE, TWO], 2))
        call = start(hold(pipeline, request()))
        await gate.reached.wait()
        await call
        await registered
        ended = start(pipeline.wait("r", Milestone.ENDED, 100))
        await asyncio.sleep(0.1)
        assert work.sent == ["tcp://two"], "the healthy one has its copy"
        async with pipeline.pull("r"):  # the caller's own copy
            pass
        if failure == "dies":
            gate.outcome = DeliveryError("send_failed", "the receiver closed its socket")
            gate.open.set()
            await refused(ended, "send_failed", 502)
        else:
            loop = asyncio.get_running_loop()
            loop.call_at(31, gate.open.set)  # what still reads drains a second after its time-out
            await refused(ended, "send_timeout", 504)
            assert loop.time() == 31
        assert not work.held

    scenario(test)


def test_waits_for_a_released_and_for_an_unseen_id_do_not_hang():
    async def test(pipeline, work):
        await inline(pipeline, request())
        loop = asyncio.get_running_loop()
        at = loop.time()
        await refused(pipeline.wait("r", Milestone.METADATA, 60), "request_released", 410)
        assert loop.time() == at, "answered at once"
        await refused(pipeline.wait("never", Milestone.METADATA, 60), "request_not_found", 404)
        assert loop.time() == at + 5.0, "held for the short bound only"

    scenario(test, unknown_id_wait=5.0)


@pytest.mark.parametrize("stage", ["prepare", "encode"])
def test_a_failed_stage_tells_caller_waiter_and_receiver_its_own_status(stage):
    async def test(pipeline, work):
        error = BadRequestError("media_decode_failed", "The JPEG picture is truncated", item=0)
        gate = work.gate(stage, "r")
        gate.outcome = error
        gate.open.set()
        waiter = start(pipeline.wait("r", Milestone.STAGED, 60))
        receiver = start(pipeline.register_destinations("r", [ONE], 1))
        assert await refused(inline(pipeline, request()), "media_decode_failed", 400) is error
        assert await refused(waiter, "media_decode_failed", 400) is error
        await receiver
        await asyncio.sleep(0.1)
        assert work.notified == [("tcp://one", error)]

    scenario(test)


def test_a_failure_while_reporting_never_hides_the_first_one():
    class Broken:
        def ended(self, job, reason, error, seconds):
            raise RuntimeError("the observer is broken")

        refused = ended

    async def test(pipeline, work):
        pipeline._observers = (Broken(),)

        async def broken_notify(req_id, destination, error):
            raise ConnectionResetError("the receiver is gone too")

        work.notify = broken_notify
        gate = work.gate("prepare", "r")
        gate.outcome = BadRequestError("media_decode_failed", "The JPEG picture is truncated", item=0)
        gate.open.set()
        receiver = start(pipeline.register_destinations("r", [ONE], 1))
        await refused(inline(pipeline, request()), "media_decode_failed", 400)
        await receiver
        assert await inline(pipeline, request("next")) == b"picture"

    scenario(test)


def test_ten_thousand_requests_with_random_ends_leave_nothing_behind():
    async def test(pipeline, work):
        rng = random.Random(0)

        async def one(number):
            name = f"r{number}"
            end = rng.choice(["deliver", "cancel", "release", "fail", "expire", "pull"])
            if end == "fail":
                work.member_errors[name] = InternalError("row_mismatch", "planted")
            encode = inline(pipeline, request(name)) if end in ("deliver", "fail") else hold(pipeline, request(name))
            call = start(encode)
            if end == "cancel":
                await asyncio.sleep(0)
                call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            if end == "release":
                pipeline.release_request(name)
            elif end == "pull":
                async with pipeline.pull(name):
                    pass

        for first in range(0, 10_000, 50):
            await asyncio.gather(*(one(number) for number in range(first, first + 50)))
        await asyncio.sleep(30)
        assert (len(pipeline.ledger), pipeline.ledger.staged_bytes, pipeline.ledger.queued_patches) == (0, 0, 0)
        books = [pipeline._jobs, pipeline._futures, pipeline.ledger._waiting, pipeline.ledger._orphans, work.held]
        assert [len(book) for book in books] == [0] * 5
        assert len(pipeline.ledger._timers) < 100
        assert len(pipeline.ledger._tombstones) <= 1000

    scenario(test, request_ttl=20, max_live_requests=10_000, max_staged_bytes=1 << 30, max_tombstones=1000)


def test_in_a_fused_batch_only_the_culprit_fails():
    async def test(pipeline, work):
        busy = work.gate("encode", "busy")
        first = start(inline(pipeline, request("busy")))
        await busy.reached.wait()
        bad = work.gate("encode", "bad")
        bad.outcome = RuntimeError("0x7f00deadbeef exploded in /secret/path")
        bad.open.set()
        work.member_errors["short"] = InternalError("row_mismatch", "Encoder produced 3 tokens, but expected 4")
        calls = {name: start(inline(pipeline, request(name))) for name in ("good", "bad", "short", "fine")}
        await pipeline.wait("fine", Milestone.METADATA, 10)
        busy.open.set()
        await first
        assert await calls["good"] == await calls["fine"] == b"picture"
        error = await refused(calls["bad"], "encode_failed", 500)
        assert "0x7f" not in error.message
        assert "/secret" not in error.message
        await refused(calls["short"], "row_mismatch", 500)
        assert work.forwards[1:] == [["good", "bad", "short", "fine"], ["good"], ["bad"], ["short"], ["fine"]]

    scenario(test, fuse=True)


def test_a_request_that_does_not_fit_is_refused_and_the_next_is_served():
    async def test(pipeline, work):
        await refused(inline(pipeline, request("large")), "request_too_large", 413)
        pipeline.ledger.limits = Limits(max_staged_bytes=4 * 8 * 4)  # exactly one request's rows
        await hold(pipeline, request("kept"))
        await refused(inline(pipeline, request("one too many")), "overloaded", 503)
        pipeline.release_request("kept")
        assert await inline(pipeline, request("next")) == b"picture"
        assert work.forwards == [["kept"], ["next"]]

    scenario(test, max_staged_bytes=100)


def test_a_hold_released_in_the_tick_it_was_staged_gets_410():
    async def test(pipeline, work):
        encode = work.encode

        async def encode_then_release(batch):
            results = await encode(batch)
            asyncio.get_running_loop().call_soon(pipeline.release_request, "r")
            return results

        work.encode = encode_then_release
        error = await refused(hold(pipeline, request()), "request_released", 410)
        assert error.details["reason"] == "client_release"

    scenario(test)


def test_a_remembered_failure_holds_nothing_of_the_request():
    async def test(pipeline, work):
        class Pictures:
            pass

        async def prepare(encode):
            pictures = Pictures()
            held.append(weakref.ref(pictures))
            try:
                raise OSError("truncated")
            except OSError:
                raise BadRequestError("media_decode_failed", "truncated", item=0)  # noqa: B904 - keeps its context

        held = []
        work.prepare = prepare
        for _ in range(2):
            await refused(inline(pipeline, request()), "media_decode_failed", 400)
        await refused(pipeline.wait("r", Milestone.STAGED, 1), "media_decode_failed", 400)
        await asyncio.sleep(1)  # let the last task be reaped
        gc.collect()
        assert [reference() for reference in held] == [None, None], "the tombstone keeps the pictures alive"

    scenario(test)


def test_deadline_and_expiry_come_on_time():
    async def test(pipeline, work):
        loop = asyncio.get_running_loop()
        gate = work.gate("encode", "late")
        call = start(inline(pipeline, request("late", deadline_ms=2500)))
        await refused(call, "deadline_exceeded", 504)
        assert loop.time() == 2.5
        gate.open.set()
        await hold(pipeline, request("kept"))
        staged_at = loop.time()
        await refused(pipeline.wait("kept", Milestone.ENDED, 600), "request_released", 410)
        assert loop.time() - staged_at == 20.0

    scenario(test, request_ttl=20.0)


def test_two_hundred_at_once_are_served_or_refused():
    async def test(pipeline, work):
        calls = [start(inline(pipeline, request(f"r{i}"))) for i in range(200)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        served = [outcome for outcome in outcomes if outcome == b"picture"]
        refusals = [outcome for outcome in outcomes if isinstance(outcome, TectumError)]
        assert len(served) + len(refusals) == 200
        assert len(served) >= 64
        assert all(error.status == 503 and error.retry_after >= 1 for error in refusals)

    scenario(test, max_live_requests=64)


def test_a_drain_finishes_what_it_accepted_and_refuses_the_rest():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        call = start(inline(pipeline, request()))
        await gate.reached.wait()
        drain = start(pipeline.drain(60))
        await asyncio.sleep(0)
        await refused(inline(pipeline, request("new")), "shutting_down", 503)
        gate.open.set()
        assert await call == b"picture"
        assert await drain

    scenario(test)


def test_a_pull_leaves_the_copy_of_an_inline_caller_alone():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        holding = start(hold(pipeline, request()))
        reading = start(inline_after(pipeline, pulled := asyncio.Event()))
        await gate.reached.wait()
        gate.open.set()
        await holding
        async with pipeline.pull("r"):
            pass
        pulled.set()
        assert await reading == b"picture"
        assert not work.held

    async def inline_after(pipeline, pulled):
        async with pipeline.execute_encode_pipeline(request()) as job:
            await pulled.wait()
            return bytes(job.staged.lease)

    scenario(test)


def test_a_hold_that_is_sent_twice_is_settled_by_one_pull():
    async def test(pipeline, work):
        await asyncio.gather(hold(pipeline, request()), hold(pipeline, request()))
        async with pipeline.pull("r"):
            pass
        assert not work.held, "released at once, not at its time to live"

    scenario(test)


def test_a_push_call_returns_when_every_receiver_has_its_rows():
    async def test(pipeline, work):
        slow = work.gate("send", TWO.address)
        call = start(pipeline.deliver(request()))
        await pipeline.register_destinations("r", [ONE, TWO], 2)
        await slow.reached.wait()
        assert work.sent == [ONE.address]
        assert not call.done()
        slow.open.set()
        assert (await call).rows == 4
        assert not work.held

    scenario(test)


def test_a_push_call_that_hangs_up_while_its_rows_are_on_their_way_is_delivered():
    async def test(pipeline, work):
        gate = work.gate("send", ONE.address)
        call = start(pipeline.deliver(request(), [ONE]))
        await gate.reached.wait()
        call.cancel()
        await asyncio.wait([call])
        assert "r" in work.held
        gate.open.set()
        await pipeline.drain(10)
        assert (work.sent, work.held) == ([ONE.address], set())
        assert pipeline.ledger.tombstone("r", 0.0).reason == "delivered"

    scenario(test)


def test_a_push_call_names_its_receivers_itself_under_an_id_that_was_used_before():
    async def test(pipeline, work):
        await inline(pipeline, request())  # an earlier life of the id leaves a tombstone
        assert (await pipeline.deliver(request(), [ONE, TWO])).rows == 4
        assert sorted(work.sent) == [ONE.address, TWO.address]

    scenario(test)


def test_what_waits_for_a_lost_encoder_fails_at_once_and_staged_rows_stay():
    async def test(pipeline, work):
        await hold(pipeline, request("staged"))
        busy = work.gate("encode", "busy")
        running = start(inline(pipeline, request("busy")))
        await busy.reached.wait()
        waiting = start(inline(pipeline, request("waiting")))
        told = start(pipeline.wait("waiting", Milestone.STAGED, 60))
        await pipeline.wait("waiting", Milestone.METADATA, 10)
        work.lose_lane(0)
        for call in (waiting, told):
            error = await refused(call, "worker_lost", 503)
            assert error.retryable
        assert not running.done(), "what runs reports its own end"
        busy.outcome = UnavailableError("worker_lost", "planted")
        busy.open.set()
        await refused(running, "worker_lost", 503)
        assert pipeline.ledger.tombstone("busy", 0.0).reason == "worker_lost"
        async with pipeline.pull("staged") as job:
            assert bytes(job.staged.lease) == b"picture"
        assert await inline(pipeline, request("next")) == b"picture"

    scenario(test)


def test_receivers_are_told_at_a_shutdown_too():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        call = start(pipeline.deliver(request(), [ONE, TWO]))
        await gate.reached.wait()
        draining = start(pipeline.drain(4))
        await refused(call, "shutting_down", 503)
        gate.open.set()
        await draining
        assert {(address, error.code) for address, error in work.notified} == {
            (ONE.address, "shutting_down"),
            (TWO.address, "shutting_down"),
        }

    scenario(test)


def test_a_push_call_learns_why_a_delivery_failed():
    async def test(pipeline, work):
        work.gate("send", TWO.address).outcome = DeliveryError("send_failed", "receiver two is gone")
        work.gate("send", TWO.address).open.set()
        call = start(pipeline.deliver(request()))
        await pipeline.register_destinations("r", [ONE, TWO], 2)
        await refused(call, "send_failed", 502)
        assert work.sent == [ONE.address]

    scenario(test)


def test_a_drain_that_runs_out_of_time_fails_what_is_left():
    async def test(pipeline, work):
        gate = work.gate("encode", "r")
        call = start(inline(pipeline, request()))
        await gate.reached.wait()
        draining = start(pipeline.drain(10))
        await refused(call, "shutting_down", 503)
        gate.open.set()
        assert not await draining, "something accepted was not finished"

    scenario(test)


def test_media_are_not_held_beside_the_rows():
    async def test(pipeline, work):
        await hold(pipeline, request())
        (job,) = pipeline._jobs.values()
        assert [item.data for item in job.request.items] == [b""]

    scenario(test)


@pytest.mark.parametrize("broken", ["_may", "_encode"])
def test_a_defect_of_the_shell_ends_what_it_worked_on_and_nothing_else(broken, monkeypatch):
    """Both what was taken and had not begun its forward, and what had."""

    def defect(*arguments):
        raise RuntimeError("a secret")

    async def test(pipeline, work):
        gates = [work.gate("prepare", name) for name in "ab"]
        calls = [start(inline(pipeline, request(name))) for name in "ab"]
        for gate in gates:
            await gate.reached.wait()
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, broken, defect)
            for gate in gates:
                gate.open.set()
            for call in calls:
                error = await refused(call, "encode_failed", 500)
                assert "secret" not in error.message
        assert await inline(pipeline, request("next")) == b"picture"
        assert work.forwards == [["next"]]

    scenario(test, fuse=True)
