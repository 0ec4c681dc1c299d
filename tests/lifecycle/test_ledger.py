"""Situations worked out by hand, at the level of the core: events in, effects out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from hypothesis.strategies import floats, integers, sampled_from

from tectum.errors import BadRequestError, DeliveryError
from tectum.lifecycle import events as M
from tectum.lifecycle import table
from tectum.lifecycle.events import Accept, Close, Delivery, Pull, Register, Release, TakeAnswer, Tick, Wait
from tectum.lifecycle.ledger import Ledger, Limits
from tests.sim.world import Size

METADATA = M.Milestone.METADATA
INLINE, HOLD, PUSH = Delivery
SIZE = Size(100, 10)


def staged(ledger: Ledger, req_id: str = "r", delivery: Delivery = INLINE, now: float = 0.0) -> int:
    life = ledger.handle(Accept(req_id, b"c", 1, delivery), now)[0].life
    ledger.handle(M.PrepareStarted(life), now)
    ledger.handle(M.Prepared(life, SIZE), now)
    ledger.handle(M.EncodeStarted(life), now)
    ledger.handle(M.Encoded(life), now)
    return life


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def test_the_walk_of_one_request():
    ledger = Ledger()
    accepted = ledger.handle(Accept("r", b"c", 1, INLINE), 0.0)
    assert accepted == [M.Admit(1)]
    assert ledger.handle(M.PrepareStarted(1), 0.1) == [M.Admit(1)]
    assert ledger.handle(Wait("r", 2, METADATA, 9.0), 0.1) == []
    assert ledger.handle(M.Prepared(1, SIZE), 0.2) == [M.Wake(2, SIZE, None)]
    assert (ledger.queued_patches, ledger.staged_bytes) == (10, 100)
    assert ledger.handle(M.EncodeStarted(1), 0.3) == [M.Admit(1)]
    assert ledger.queued_patches == 0
    assert ledger.handle(M.Encoded(1), 0.4) == [M.Wake(1, SIZE, None)]
    assert ledger.handle(TakeAnswer("r", 1, 1), 0.5) == [M.Admit(1)]
    assert ledger.handle(M.SendConfirmed(1, 1), 0.6) == [M.Ended(1, M.Reason.DELIVERED, None), M.Free(1)]
    assert (len(ledger), ledger.staged_bytes) == (0, 0)


def test_a_release_while_a_send_is_in_flight_frees_only_after_it():
    ledger = Ledger()
    life = staged(ledger)
    ledger.handle(Pull("r", "slow"), 0.0)
    assert kinds(ledger.handle(Release("r"), 1.0)) == ["Ended"]
    assert ledger.staged_bytes == 100
    refusal = ledger.handle(Pull("r", "late"), 3.5)[0].error
    assert refusal.status == 410
    assert refusal.details == {"reason": "client_release", "age_s": 2.5}
    assert "no staged embedding for req_id=r (already released): client_release, 2.5 s ago" in refusal.message
    assert ledger.handle(M.SendConfirmed(life, "slow"), 9.0) == [M.Free(life)]
    assert ledger.staged_bytes == 0


def test_two_owners_release_and_the_first_reason_is_kept():
    ledger = Ledger()
    life = staged(ledger)
    assert ledger.handle(M.ReleaseAsked(life, M.Reason.CLIENT_ABORT), 1.0)[0].reason is M.Reason.CLIENT_ABORT
    assert ledger.handle(Release("r"), 1.0) == []
    assert ledger.tombstone("r", 2.0).reason is M.Reason.CLIENT_ABORT


def test_a_release_before_the_encode_came_is_remembered():
    ledger = Ledger()
    assert ledger.handle(Release("r"), 0.0) == []
    refusal = ledger.handle(Accept("r", b"c", 1, INLINE), 1.0)
    assert kinds(refusal) == ["Refuse"]
    assert refusal[0].error.message.startswith("Encoder request was released: r (client_release, 1.0 s ago)")
    assert kinds(ledger.handle(Accept("r", b"c", 1, INLINE), 301.0)) == ["Admit"]


def test_the_same_content_joins_and_other_content_is_refused():
    ledger = Ledger()
    ledger.handle(Accept("r", b"one", 1, INLINE), 0.0)
    assert ledger.handle(Accept("r", b"one", 2, INLINE), 0.0) == [M.Admit(1, joined=True)]
    refusal = ledger.handle(Accept("r", b"two", 3, INLINE), 0.0)
    assert [effect.error.status for effect in refusal] == [409]
    ledger.handle(M.PrepareStarted(1), 0.0)
    ledger.handle(M.Prepared(1, SIZE), 0.0)
    ledger.handle(M.EncodeStarted(1), 0.0)
    assert ledger.handle(M.Encoded(1), 0.0) == [M.Wake(1, SIZE, None), M.Wake(2, SIZE, None)]
    ledger.handle(TakeAnswer("r", 1, 1), 0.0)
    assert ledger.handle(M.SendConfirmed(1, 1), 0.0) == [], "the second caller has no copy yet"
    ledger.handle(TakeAnswer("r", 1, 2), 0.0)
    assert kinds(ledger.handle(M.SendConfirmed(1, 2), 0.0)) == ["Ended", "Free"]


def pull(ledger: Ledger, life: int, address: str) -> list[M.Effect]:
    """A whole pull; what its end leads to."""
    assert ledger.handle(Pull("r", address), 1.0) == [M.Admit(life)]
    return ledger.handle(M.SendConfirmed(life, address, M.Reason.PULLED), 1.0)


def test_a_pull_does_not_use_up_the_copy_of_a_caller_that_reads_inline():
    ledger = Ledger()
    life = staged(ledger, delivery=HOLD)
    ledger.handle(Accept("r", b"c", 2, INLINE), 0.0)
    assert pull(ledger, life, "p") == [], "the inline caller has no copy yet"
    assert ledger.handle(TakeAnswer("r", life, 2), 1.0) == [M.Admit(life)]
    assert kinds(ledger.handle(M.SendConfirmed(life, 2), 1.0)) == ["Ended", "Free"]


def test_an_inline_answer_does_not_use_up_the_copy_that_is_held():
    ledger = Ledger()
    life = staged(ledger, delivery=INLINE)
    ledger.handle(Accept("r", b"c", 2, HOLD), 0.0)
    ledger.handle(TakeAnswer("r", life, 1), 1.0)
    assert ledger.handle(M.SendConfirmed(life, 1), 1.0) == []
    assert pull(ledger, life, "p") == [M.Ended(life, M.Reason.PULLED, None), M.Free(life)]


def test_a_stranger_cannot_settle_what_waits_for_its_receiver():
    ledger = Ledger()
    life = staged(ledger, delivery=PUSH)
    assert pull(ledger, life, "stranger") == []
    assert M.StartSend(life, "one") in ledger.handle(Register("r", ("one",), 1, 5), 2.0)
    assert kinds(ledger.handle(M.SendConfirmed(life, "one"), 3.0)) == ["Wake", "Ended", "Free"]


def test_a_repeated_hold_is_settled_by_one_pull():
    ledger = Ledger()
    life = staged(ledger, delivery=HOLD)
    ledger.handle(Accept("r", b"c", 2, HOLD), 0.0)
    assert pull(ledger, life, "p") == [M.Ended(life, M.Reason.PULLED, None), M.Free(life)]


def test_a_hold_that_comes_after_a_pull_is_promised_another():
    ledger = Ledger()
    life = staged(ledger, delivery=INLINE)
    assert pull(ledger, life, "first") == []
    ledger.handle(Accept("r", b"c", 2, HOLD), 1.0)
    ledger.handle(TakeAnswer("r", life, 1), 1.0)
    assert ledger.handle(M.SendConfirmed(life, 1), 1.0) == [], "the one who holds was promised rows"
    assert kinds(pull(ledger, life, "second")) == ["Ended", "Free"]


def test_an_answer_taken_too_late_names_its_own_end():
    ledger = Ledger()
    life = staged(ledger, delivery=HOLD)
    ledger.handle(Release("r"), 1.0)
    (refusal,) = ledger.handle(TakeAnswer("r", life, 1), 3.0)
    assert refusal.error.details == {"reason": "client_release", "age_s": 2.0}
    ledger.handle(Accept("r", b"c", 2, HOLD), 4.0)
    ledger.handle(Release("r"), 5.0)
    (refusal,) = ledger.handle(TakeAnswer("r", life, 1), 6.0)
    assert refusal.error.code == "request_not_found", "never the end of another life"


def test_a_deadline_between_the_wake_and_the_answer_is_told_as_a_deadline():
    ledger = Ledger()
    (admitted,) = ledger.handle(Accept("r", b"c", 1, INLINE, 1.0), 0.0)
    for event in (M.PrepareStarted(1), M.Prepared(1, SIZE), M.EncodeStarted(1)):
        ledger.handle(event, 0.5)
    assert ledger.handle(M.Encoded(admitted.life), 0.9) == [M.Wake(1, SIZE, None)]
    assert M.Ended(1, M.Reason.DEADLINE, None) in [
        effect._replace(error=None) if isinstance(effect, M.Ended) else effect for effect in ledger.handle(Tick(), 1.0)
    ]
    (refusal,) = ledger.handle(TakeAnswer("r", 1, 1), 1.0)
    assert (refusal.error.status, refusal.error.code) == (504, "deadline_exceeded")
    assert ledger.handle(Pull("r", "late"), 1.0)[0].error.status == 410, "whoever comes later hears of the release"


def test_a_receiver_that_repeats_its_registration_counts_once():
    ledger = Ledger()
    life = staged(ledger, delivery=PUSH)
    assert M.StartSend(life, "one") in ledger.handle(Register("r", ("one",), 2, 5), 0.0)
    assert not [e for e in ledger.handle(Register("r", ("one",), 2, 6), 0.0) if isinstance(e, M.StartSend)]
    assert ledger.handle(M.SendConfirmed(life, "one"), 1.0) == [], "receiver two still waits for its copy"
    assert M.StartSend(life, "two") in ledger.handle(Register("r", ("two",), 2, 7), 2.0)
    told = [M.Wake(1, SIZE, None), M.Ended(life, M.Reason.DELIVERED, None), M.Free(life)]
    assert ledger.handle(M.SendConfirmed(life, "two"), 3.0) == told


def test_the_failure_of_the_second_of_two_deliveries_leaves_the_first_alone():
    ledger = Ledger()
    life = staged(ledger, delivery=PUSH)
    ledger.handle(Register("r", ("one", "two"), 2, 5), 0.0)
    failure = DeliveryError("send_failed", "receiver two is gone")
    assert ledger.handle(M.SendFailed(life, "two", failure), 1.0) == []
    ended = ledger.handle(M.SendConfirmed(life, "one"), 2.0)
    assert ended == [M.Wake(1, None, failure), M.Ended(life, M.Reason.SEND_FAILED, failure), M.Free(life)]


def test_a_caller_that_leaves_while_its_rows_are_on_their_way_aborts_nothing():
    ledger = Ledger()
    life = staged(ledger, delivery=PUSH)
    ledger.handle(Register("r", ("one", "two"), 2, 5), 0.0)
    assert ledger.handle(M.SendConfirmed(life, "one"), 1.0) == []
    assert ledger.handle(M.CallerLeft(life, 1), 1.5) == []
    ended = [M.Ended(life, M.Reason.DELIVERED, None), M.Free(life)]
    assert ledger.handle(M.SendConfirmed(life, "two"), 2.0) == ended


@pytest.mark.parametrize("registered", [(), ("one",)], ids=["none", "one of two"])
def test_a_caller_that_leaves_before_its_receivers_are_there_ends_its_request(registered):
    ledger = Ledger()
    life = staged(ledger, delivery=PUSH)
    if registered:
        ledger.handle(Register("r", registered, 2, 5), 0.0)
    assert ledger.handle(M.CallerLeft(life, 1), 1.5)[0].reason is M.Reason.CLIENT_ABORT


def test_what_was_on_its_way_and_failed_is_a_failed_delivery_with_nobody_to_tell():
    ledger = Ledger()
    life = staged(ledger, delivery=PUSH)
    ledger.handle(Register("r", ("one",), 1, 5), 0.0)
    assert ledger.handle(M.CallerLeft(life, 1), 1.0) == []
    failure = DeliveryError("send_failed", "receiver one is gone")
    assert ledger.handle(M.SendFailed(life, "one", failure), 2.0) == [
        M.Ended(life, M.Reason.SEND_FAILED, failure),
        M.Free(life),
    ]


def test_early_registrations_and_waits_are_held_and_bounded():
    ledger = Ledger(Limits(unknown_id_wait=5.0))
    assert ledger.handle(Register("r", ("one",), 1, 5), 0.0) == [M.Admit(0)]
    assert ledger.handle(Wait("never", 6, METADATA, 60.0), 0.0) == []
    assert ledger.handle(Accept("r", b"c", 1, PUSH), 1.0) == [M.Admit(1), M.Wake(5, None, None)]
    assert ledger.next_due() == 5.0
    (unknown,) = ledger.handle(Tick(), 5.0)
    assert (unknown.waiter, unknown.error.status) == (6, 404)


def test_a_failure_reaches_everybody_with_its_own_status():
    ledger = Ledger()
    ledger.handle(Register("r", ("one",), 1, 5), 0.0)
    ledger.handle(Accept("r", b"c", 1, INLINE), 0.0)
    ledger.handle(Wait("r", 2, METADATA, 60.0), 0.0)
    ledger.handle(M.PrepareStarted(1), 0.0)
    error = BadRequestError("media_decode_failed", "The JPEG picture is truncated", item=3)
    effects = ledger.handle(M.Failed(1, error), 0.1)
    assert M.Wake(1, None, error) in effects
    assert M.Wake(2, None, error) in effects
    assert M.Notify("r", "one", error) in effects
    (late,) = ledger.handle(Wait("r", 9, METADATA, 60.0), 5.0)
    assert late.error.to_problem() == error.to_problem(), "a late waiter learns the same"


def test_time_to_live_runs_from_the_last_activity_and_a_send_holds_it_off():
    ledger = Ledger(Limits(request_ttl=100.0))
    life = staged(ledger)
    ledger.handle(Pull("r", "a"), 50.0)
    assert ledger.handle(Tick(), 149.0) == []
    ledger.handle(M.SendFailed(life, "a", DeliveryError("send_failed", "gone"), final=False), 149.0)
    assert ledger.next_due() <= 249.0
    assert ledger.handle(Tick(), 248.9) == []
    assert ledger.handle(Tick(), 249.0)[0].reason is M.Reason.EXPIRED


def test_a_stuck_request_does_not_delay_anothers_expiry():
    ledger = Ledger(Limits(request_ttl=10.0))
    staged(ledger, "stuck")
    ledger.handle(Pull("stuck", "never ends"), 0.0)
    other = staged(ledger, "other")
    assert [e.life for e in ledger.handle(Tick(), 10.0) if isinstance(e, M.Ended)] == [other]


def test_a_deadline_is_honoured_while_encoding():
    ledger = Ledger()
    ledger.handle(Accept("r", b"c", 1, INLINE, deadline=3.0), 0.0)
    ledger.handle(M.PrepareStarted(1), 0.0)
    ledger.handle(M.Prepared(1, SIZE), 0.0)
    ledger.handle(M.EncodeStarted(1), 0.0)
    wake, ended = ledger.handle(Tick(), 3.0)
    assert (wake.error.status, ended.reason) == (504, M.Reason.DEADLINE)
    assert ledger.handle(M.Encoded(1), 8.0) == [M.Free(1)]


def test_limits_at_the_door_say_when_to_come_back():
    ledger = Ledger(Limits(max_live_requests=2))
    outcomes = [ledger.handle(Accept(f"r{i}", b"c", i + 1, INLINE), 0.0)[0] for i in range(5)]
    refused = [outcome.error for outcome in outcomes if isinstance(outcome, M.Refuse)]
    assert len(refused) == 3
    assert all(error.status == 503 and error.retry_after >= 1 for error in refused)


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ({"max_live_requests": 1}, "1 live requests (limit 1)"),
        ({"max_queued_patches": SIZE.patches}, f"{SIZE.patches} queued patches (limit {SIZE.patches})"),
        ({"max_staged_bytes": SIZE.nbytes}, f"{SIZE.nbytes} staged bytes (limit {SIZE.nbytes})"),
    ],
)
def test_it_says_that_it_is_full_exactly_while_it_refuses(limit, what):
    ledger = Ledger(Limits(**limit))
    assert ledger.overload(0.0) is None
    ledger.handle(Accept("r", b"c", 1, INLINE), 0.0)
    ledger.handle(M.PrepareStarted(1), 0.0)
    ledger.handle(M.Prepared(1, SIZE), 0.0)
    full, (refused,) = ledger.overload(0.0), ledger.handle(Accept("s", b"c", 2, INLINE), 0.0)
    assert full.message == refused.error.message == f"The encoder is full: {what}"
    assert (full.code, full.status, full.retry_after) == ("overloaded", 503, refused.error.retry_after)
    ledger.handle(Release("r"), 0.0)
    assert ledger.overload(0.0) is None
    assert isinstance(ledger.handle(Accept("s", b"c", 3, INLINE), 0.0)[0], M.Admit)


def test_a_request_whose_forward_would_hold_up_others_is_refused_with_the_limit():
    ledger = Ledger(Limits(max_request_patches=9))
    ledger.handle(Accept("r", b"c", 1, INLINE), 0.0)
    ledger.handle(M.PrepareStarted(1), 0.0)
    wake, ended, free = ledger.handle(M.Prepared(1, SIZE), 0.0)
    assert (wake.error.status, wake.error.code, wake.error.details) == (413, "request_too_large", {"limit": 9})
    assert (ended.reason, free) == (M.Reason.ENCODE_FAILED, M.Free(1))


def test_closing_refuses_new_work_and_tells_when_it_is_drained():
    ledger = Ledger()
    life = staged(ledger)
    assert ledger.handle(Close(fail_live=False), 0.0) == []
    assert ledger.handle(Accept("new", b"c", 9, INLINE), 0.0)[0].error.code == "shutting_down"
    ledger.handle(TakeAnswer("r", life, 1), 0.0)
    assert kinds(ledger.handle(M.SendConfirmed(life, 1), 1.0)) == ["Ended", "Free", "Drained"]


def test_impossible_events_name_state_and_event():
    ledger = Ledger()
    life = staged(ledger)
    with pytest.raises(M.LifecycleViolationError, match="Encoded in state staged"):
        ledger.handle(M.Encoded(life), 0.0)


def test_ten_thousand_requests_leave_nothing_behind():
    ledger = Ledger(Limits(max_tombstones=100))
    for number in range(10_000):
        life = staged(ledger, f"r{number}", now=number * 0.01)
        ledger.handle(TakeAnswer(f"r{number}", life, 1), number * 0.01)
        ledger.handle(M.SendConfirmed(life, 1), number * 0.01)
    assert (len(ledger), ledger.staged_bytes, ledger.queued_patches) == (0, 0, 0)
    assert len(ledger._timers) < 100
    assert len(ledger._tombstones) == 100


def test_the_documented_table_is_the_codes_own():
    text = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text()
    assert text.split(table.BEGIN)[1].split(table.END)[0].strip() == table.markdown()


class LedgerMachine(RuleBasedStateMachine):
    """Hypothesis picks the events; the books must balance after each, and everything must be able to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Limits(max_live_requests=3, max_staged_bytes=300, request_ttl=5, encode_timeout=5))
        self.now = 0.0
        self.waiter = 0
        self.stages: dict[int, str] = {}
        self.sends: list[tuple[int, str]] = []

    def lives(self):
        return list(self.ledger.lives())

    @rule(number=integers(0, 3), content=sampled_from([b"a", b"b"]))
    def accept(self, number, content):
        self.waiter += 1
        self.ledger.handle(Accept(f"r{number}", content, self.waiter, INLINE), self.now)

    @precondition(
        lambda self: any(r.state in (M.State.ACCEPTED, M.State.PREPARED) and not r.stage_open for r in self.lives())
    )
    @rule()
    def begin_stage(self):
        request = next(r for r in self.lives() if r.state in (M.State.ACCEPTED, M.State.PREPARED) and not r.stage_open)
        prepare = request.state is M.State.ACCEPTED
        self.ledger.handle((M.PrepareStarted if prepare else M.EncodeStarted)(request.life), self.now)
        self.stages[request.life] = "prepare" if prepare else "encode"

    @precondition(lambda self: self.stages)
    @rule(nbytes=integers(1, 200), good=sampled_from([True, True, False]))
    def end_stage(self, nbytes, good):
        life, stage = self.stages.popitem()
        done = M.Prepared(life, Size(nbytes, 1)) if stage == "prepare" else M.Encoded(life)
        self.ledger.handle(done if good else M.Failed(life, BadRequestError("media_decode_failed", "x")), self.now)

    @rule(number=integers(0, 3))
    def pull(self, number):
        address = f"pull{len(self.sends)}-{self.waiter}"
        answer = self.ledger.handle(Pull(f"r{number}", address), self.now)[0]
        if isinstance(answer, M.Admit):
            self.sends.append((answer.life, address))

    @precondition(lambda self: self.sends)
    @rule()
    def end_send(self):
        self.ledger.handle(M.SendConfirmed(*self.sends.pop()), self.now)

    @rule(number=integers(0, 3))
    def release(self, number):
        self.ledger.handle(Release(f"r{number}"), self.now)

    @rule(seconds=floats(0, 4))
    def wait(self, seconds):
        self.now += seconds
        self.ledger.handle(Tick(), self.now)

    @invariant()
    def books_balance(self):
        live = self.lives()
        assert self.ledger.staged_bytes == sum(r.metadata.nbytes for r in live if r.metadata is not None) <= 300
        assert self.ledger.queued_patches == sum(r.metadata.patches for r in live if r.state is M.State.PREPARED)
        assert len(live) <= 3

    def teardown(self):
        while self.stages:
            self.end_stage(1, False)
        while self.sends:
            self.end_send()
        self.now += 100
        self.ledger.handle(Tick(), self.now)
        assert len(self.ledger) == 0
        assert self.ledger.staged_bytes == 0


def test_hypothesis_finds_no_way_to_unbalance_the_books():
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
