"""The words of the lifecycle: states and reasons, the events that go in, the effects that come out.

Plain data, nothing is decided here. `machine.py` says what an event does to one request, `ledger.py` what it does to
all of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from typing import NamedTuple, Protocol

from tectum.errors import TectumError

#: where a receiver waits: opaque here, equal for a retry to the same place (R9)
Address = Hashable


class State(StrEnum):
    ACCEPTED = "accepted"  # admitted; its media is fetched, decoded and preprocessed
    PREPARED = "prepared"  # rows, width and bytes are known and published; waits for the forward
    ENCODING = "encoding"  # in the forward
    STAGED = "staged"  # rows are held for its receivers
    DRAINING = "draining"  # released, but a stage or a send still uses its memory
    RELEASED = "released"  # nothing is held any more


class Reason(StrEnum):
    """Why a request was released. The first one asked for wins and is kept (R2)."""

    DELIVERED = "delivered"
    PULLED = "pulled"
    CLIENT_RELEASE = "client_release"
    CLIENT_ABORT = "client_abort"
    DEADLINE = "deadline"
    EXPIRED = "expired"
    ENCODE_FAILED = "encode_failed"
    SEND_FAILED = "send_failed"
    WORKER_LOST = "worker_lost"
    SHUTDOWN = "shutdown"


#: reasons under which everybody got what they asked for
SUCCESS = frozenset({Reason.DELIVERED, Reason.PULLED})


class Milestone(StrEnum):
    """What a waiter waits for."""

    METADATA = "metadata"
    STAGED = "staged"
    ENDED = "ended"


class Delivery(StrEnum):
    """How the rows of a request reach a receiver, as its caller asked for it."""

    INLINE = "inline"  # the caller reads them itself, in the answer to its call
    HOLD = "hold"  # the caller is answered when they are staged; somebody pulls them later
    PUSH = "push"  # they go to registered receivers, and the caller is answered when all have them


class Metadata(Protocol):
    """What the core reads of the metadata; the rest of it only passes through."""

    @property
    def nbytes(self) -> int: ...
    @property
    def patches(self) -> int: ...


# --- events: what happened to one life -------------------------------------------------------------------------------


class PrepareStarted(NamedTuple):
    """The shell asks to fetch, decode and preprocess."""

    life: int


class Prepared(NamedTuple):
    """Preprocessing ended well: rows and bytes are known."""

    life: int
    metadata: Metadata


class EncodeStarted(NamedTuple):
    """The batcher asks to take the request into a forward."""

    life: int


class Encoded(NamedTuple):
    """The forward ended well, its rows were checked and lie in staging memory."""

    life: int


class Failed(NamedTuple):
    """The stage that used the request (prepare or encode) ended without a result."""

    life: int
    error: TectumError
    reason: Reason = Reason.ENCODE_FAILED


class InputsLost(NamedTuple):
    """The encoder that kept this request's prepared inputs died. A stage that ran there reports its own end."""

    life: int


class GivenUp(NamedTuple):
    """The shell met a defect in the work on this request, once it was prepared, and knows no more how far that came."""

    life: int
    error: TectumError
    reason: Reason = Reason.ENCODE_FAILED


class SendStarted(NamedTuple):
    """Somebody asks to read the staged rows for `address`."""

    life: int
    address: Address


class SendConfirmed(NamedTuple):
    """The receiver at `address` has its rows; the send reads memory no more."""

    life: int
    address: Address
    reason: Reason = Reason.DELIVERED


class SendFailed(NamedTuple):
    """The send to `address` ended without confirmation; `final` says that this receiver will not ask again."""

    life: int
    address: Address
    error: TectumError
    final: bool = True


class DestinationsAdded(NamedTuple):
    """Receivers at `addresses` want the rows pushed as soon as they are staged; `expected` of them will come in all."""

    life: int
    addresses: tuple[Address, ...]
    expected: int


class AnswerTaken(NamedTuple):
    """A caller that was woken takes its answer. Inline it reads the rows itself, as the destination `waiter`."""

    life: int
    waiter: int


class CallerLeft(NamedTuple):
    """A caller hung up before it had its answer."""

    life: int
    waiter: int


class ReleaseAsked(NamedTuple):
    """Somebody asks to give back everything this request holds."""

    life: int
    reason: Reason


Event = (
    PrepareStarted
    | Prepared
    | EncodeStarted
    | Encoded
    | Failed
    | InputsLost
    | GivenUp
    | SendStarted
    | SendConfirmed
    | SendFailed
    | DestinationsAdded
    | AnswerTaken
    | CallerLeft
    | ReleaseAsked
)

# --- events by id, from those who know no life -----------------------------------------------------------------------


class Accept(NamedTuple):
    """A request comes in at the door.

    fingerprint: digest of its content; equal means "the same request again" (R8).
    waiter: its caller, woken when its answer is there (`PUSH`: when all receivers have the rows) or with the error.
    deadline: absolute time after which nobody wants the result any more, or None.
    """

    req_id: str
    fingerprint: bytes
    waiter: int
    delivery: Delivery
    deadline: float | None = None


class Wait(NamedTuple):
    """Somebody waits for `req_id` to reach `milestone`, until `until` at the latest."""

    req_id: str
    waiter: int
    milestone: Milestone
    until: float


class WaitCancelled(NamedTuple):
    """A waiter (not a caller) went away."""

    waiter: int


class Register(NamedTuple):
    """Receivers at `addresses` want the rows of `req_id`; `expected` of them will register in all (0: not said).

    It may come before its request: then it is held, and `waiter` is woken when the request comes or the hold ends.
    """

    req_id: str
    addresses: tuple[Address, ...]
    expected: int
    waiter: int


class TakeAnswer(NamedTuple):
    """A woken caller of life `life` under `req_id` takes its answer (`AnswerTaken`, or why there is none any more)."""

    req_id: str
    life: int
    waiter: int


class Pull(NamedTuple):
    """Somebody asks to read the staged rows of `req_id` as destination `address`."""

    req_id: str
    address: Address


class Release(NamedTuple):
    """Give back all of `req_id`. For an id never seen it is remembered, so that a late encode does not start (R5)."""

    req_id: str
    reason: Reason = Reason.CLIENT_RELEASE


class Close(NamedTuple):
    """Shut down: nothing new is accepted. `now` fails what lives; otherwise it may finish."""

    fail_live: bool


class Tick(NamedTuple):
    """Time passed."""


LedgerEvent = Accept | Wait | WaitCancelled | Register | TakeAnswer | Pull | Release | Close | Tick | Event

# --- effects: what the shell must do now -----------------------------------------------------------------------------


class Admit(NamedTuple):
    """Yes: go on. `joined` says that the id was live with the same content, and no new work starts (R8)."""

    life: int
    joined: bool = False


class Refuse(NamedTuple):
    """No: the asking party gets this error, and nothing was changed."""

    error: TectumError


class Wake(NamedTuple):
    """A waiter's wait is over: with the metadata (or None where it asked for none), or with the error."""

    waiter: int
    metadata: Metadata | None
    error: TectumError | None


class StartSend(NamedTuple):
    """Push the staged rows to `address`; the use is already counted."""

    life: int
    address: Address


class Notify(NamedTuple):
    """The receiver at `address` waits for rows of `req_id` that will not come: tell it why."""

    req_id: str
    address: Address
    error: TectumError


class Ended(NamedTuple):
    """The outcome is decided (once a life): count it, close its trace, and stop whatever stage still works for it."""

    life: int
    reason: Reason
    error: TectumError | None


class Free(NamedTuple):
    """Nobody uses the memory any more: give it back (once a life)."""

    life: int


class Drained(NamedTuple):
    """Closing, and nothing lives any more."""


Effect = Admit | Refuse | Wake | StartSend | Notify | Ended | Free | Drained


class LifecycleViolationError(AssertionError):
    """The shell reported something that cannot happen in this state: a defect in the shell, never a user's fault."""
