"""Verified rows in the memory of an engine's scheduler: pinned while a request needs them, then evictable.

Owns the memory (one memory file, which the fetching process and the workers map) and which request pins what. It knows no
engine: `vllm.py` says what a request wants and when it is through; `fetcher.py` brings rows and checks them. One thread
calls it, the scheduler's. Rows are admitted when everything about them was checked, and not before: an engine does not survive
wrong ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tectum.delivery.document import Document
from tectum.delivery.staging import Lease, StagingPool
from tectum.engines.fetcher import Encoders, Fetcher, Shape, Want, check
from tectum.errors import DeliveryError, InternalError, TectumError

log = logging.getLogger("tectum.engines")

#: room in a lease for the document's header and its small tensors (bytes); ours take a few hundred
OVERHEAD = 4096


@dataclass(slots=True)
class _Item:
    """Rows in memory, or on their way there. request, want: who asked for the fetch, and for what."""

    lease: Lease
    fetch: Future[Document]
    request: str
    want: Want
    document: Document | None = None
    users: set[tuple[str, int]] = field(default_factory=set)  # (request, index) that need it still
    past: set[str] = field(default_factory=set)  # requests that would need it again, were they preempted
    loads: int = 0  # steps on their way to the workers that will read it

    @property
    def evictable(self) -> bool:
        return self.document is not None and not self.users and not self.loads


class RowStore:
    """Rows by content key. `counts` says what happened so far: fetched, reused, failed, local, evicted."""

    def __init__(self, shape: Shape, encoders: Encoders, max_bytes: int) -> None:
        self.shape = shape
        self.pool = StagingPool(max_bytes)
        self.counts: Counter[str] = Counter()
        self._fetcher = Fetcher(encoders, shape, self.pool.fd)
        self._items: dict[str, _Item] = {}  # used last, last
        self._fetching: set[str] = set()
        self._pinned: dict[str, set[str]] = {}  # request -> keys that it pins, or did
        self._failed: set[str] = set()  # requests that cannot be served, until they are finished
        self._untold: set[str] = set()  # those of them that the engine does not know of yet
        self._local: dict[str, set[str]] = {}  # request -> keys that the engine encodes itself

    # --- what a request needs ---

    def admit(self, request: str, wants: Sequence[Want]) -> bool:
        """Whether everything that `request` wants is here, checked and pinned for it. Starts what has to be fetched.

        False while something is on its way or has no room yet, and for ever once the request failed.
        """
        self._collect()
        if request in self._failed:
            return False
        if not wants:
            return True
        try:
            return self._admit(request, wants)
        except TectumError as error:
            self._fail(request, error)
        except Exception as error:
            log.exception("a defect while admitting a request")
            self._fail(request, InternalError("internal", f"Unexpected {type(error).__name__} while admitting rows"))
        return False

    def _admit(self, request: str, wants: Sequence[Want]) -> bool:
        missing: dict[str, Want] = {}
        ready = True
        for want in wants:
            if want.key in self._local.get(request, ()):
                continue
            item = self._items.get(want.key)
            if item is None:
                missing.setdefault(want.key, want)
                continue
            self._pin(want.key, item, request, want.index)
            if item.document is None:
                ready = False
            else:
                check(item.document, want, self.shape)
        return self._start(request, list(missing.values())) and ready and not missing

    def _pin(self, key: str, item: _Item, request: str, index: int) -> None:
        if (request, index) not in item.users:
            self.counts["reused"] += item.request != request
            item.users.add((request, index))
            self._pinned.setdefault(request, set()).add(key)
            self._items[key] = self._items.pop(key)

    def _start(self, request: str, missing: Sequence[Want]) -> bool:
        """Fetch all that is missing, or nothing: requests that hold half of what they need could wait for each other."""
        wanted = []
        for want in missing:
            if want.source is not None:
                wanted.append(want)
            elif want.local:
                self._encode_locally(request, want, "no encoder holds it")
            else:
                raise DeliveryError("send_failed", "An item names no encoder that holds its rows")
        needed = [self.shape.nbytes(want.rows) + OVERHEAD for want in wanted]
        if sum(needed) > self.pool.max_bytes:
            text = f"The request needs {sum(needed)} bytes of rows, the connector holds {self.pool.max_bytes} at most"
            raise DeliveryError("send_failed", text)
        leases = self._leases(needed)
        if leases is None:
            return False
        for want, lease in zip(wanted, leases, strict=True):
            future = self._fetcher.submit(want, lease)
            item = self._items[want.key] = _Item(lease, future, request, want)
            self._fetching.add(want.key)
            self._pin(want.key, item, request, want.index)
        return True

    def _leases(self, needed: Sequence[int]) -> list[Lease] | None:
        """Memory for all of `needed`, the least recently used rows evicted for it; None when there is not enough now."""
        leases: list[Lease] = []
        for nbytes in needed:
            lease = self._lease(nbytes)
            if lease is None:
                for taken in leases:
                    self.pool.give_back(taken)
                return None
            leases.append(lease)
        return leases

    def _lease(self, nbytes: int) -> Lease | None:
        while True:
            try:
                return self.pool.lease(nbytes)
            except TectumError:
                evicted = self._least_wanted()
                if evicted is None:
                    return None
                self.counts["evicted"] += 1
                self.pool.give_back(self._items.pop(evicted).lease)

    def _least_wanted(self) -> str | None:
        """What to evict: rows that no live request has used before those that one would need again if it were preempted."""
        evictable = [(bool(item.past), key) for key, item in self._items.items() if item.evictable]
        return min(evictable, key=lambda each: each[0], default=(False, None))[1]

    # --- fetching ---

    def rest(self, seconds: float) -> None:
        """Wait for rows that are on their way until something is said of them, at most `seconds`; without any, not at all."""
        self._fetcher.wait(seconds)

    def _collect(self) -> None:
        """Take in what was fetched."""
        self._fetcher.poll()
        for key in [key for key in self._fetching if self._items[key].fetch.done()]:
            self._fetching.discard(key)
            item = self._items[key]
            error = item.fetch.exception()
            if error is None:
                item.document = item.fetch.result()
                self.counts["fetched"] += 1
                continue
            # whoever else waits for it names a source of its own, and tries that next
            del self._items[key]
            self.pool.give_back(item.lease)
            if any(request == item.request for request, _ in item.users):
                self._fetch_failed(item, error)

    def _fetch_failed(self, item: _Item, error: BaseException) -> None:
        if not isinstance(error, TectumError):
            log.error("unexpected failure while fetching rows", exc_info=error)
            error = InternalError("internal", f"Unexpected {type(error).__name__} while fetching rows")
        if item.want.local:
            self._encode_locally(item.request, item.want, str(error))
        else:
            self._fail(item.request, error)

    def _encode_locally(self, request: str, want: Want, why: str) -> None:
        self.counts["local"] += 1
        self._local.setdefault(request, set()).add(want.key)
        log.warning("item %d of request %s is encoded by the engine itself: %s", want.index, request, why)

    def _fail(self, request: str, error: TectumError) -> None:
        if request in self._failed:
            return
        self.counts["failed"] += 1
        self._failed.add(request)
        self._untold.add(request)
        log.warning("request %s fails alone: %s", request, error)

    # --- what the engine says ---

    def refuse(self, request: str, why: str) -> None:
        """`request` cannot be served, whatever its items."""
        self._fail(request, InternalError("internal", why))

    def take_failed(self) -> set[str]:
        """Requests that failed since the last call: the engine ends them."""
        untold, self._untold = self._untold, set()
        return untold

    def holds(self, key: str) -> bool:
        """Whether the rows of `key` are here and checked."""
        item = self._items.get(key)
        return item is not None and item.document is not None

    def start_load(self, key: str) -> tuple[Document, Lease]:
        """The rows of `key`, which stay as they are until `loaded` was called as often."""
        item = self._items[key]
        assert item.document is not None, "only rows that are here are loaded"
        item.loads += 1
        return item.document, item.lease

    def loaded(self, key: str) -> None:
        """The workers have their copy of one load."""
        self._items[key].loads -= 1

    def passed(self, request: str, key: str, index: int) -> None:
        """`request` is through with its item `index`: in the language model's own cache it outlives these rows."""
        item = self._items.get(key)
        if item is not None:
            item.users.discard((request, index))
            item.past.add(request)

    def finished(self, request: str) -> None:
        """`request` ended, however: it pins nothing any more."""
        for key in self._pinned.pop(request, ()):
            item = self._items.get(key)
            if item is not None:
                item.users = {user for user in item.users if user[0] != request}
                item.past.discard(request)
        self._failed.discard(request)
        self._untold.discard(request)
        self._local.pop(request, None)

    def close(self) -> None:
        """End the fetching process, and with it whatever it still does."""
        self._fetcher.close()
        self.pool.close()
