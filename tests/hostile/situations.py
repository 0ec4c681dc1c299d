"""Every known situation by its reference: a case against live servers, or where else it is shown, and why there.

`CASES` is the whole list of cases, from all modules. A test holds that no situation is missing here.
"""

from __future__ import annotations

from tests.hostile import contents, lives
from tests.hostile.cases import CASES, Case
from tests.hostile.servers import has_mooncake

__all__ = ["CASES", "ELSEWHERE", "SITUATIONS", "cases_of", "contents", "lives"]

#: lifecycle and load, rows and keys, health, errors, security, media: how many there are of each
SITUATIONS = [
    f"{kind}{number}"
    for kind, many in (("L", 14), ("K", 13), ("H", 8), ("E", 8), ("S", 9), ("P", 12))
    for number in range(1, many + 1)
]
#: situation -> the test that shows it, and why it is no case against a live server
ELSEWHERE = {
    "K1": (
        "tests/pipeline/test_situations.py::test_in_a_fused_batch_only_the_culprit_fails",
        "no checkpoint gives wrong rows of itself: they are planted in the encoder",
    ),
    "K2": (
        "tests/cache/test_reuse.py::test_a_damaged_entry_is_never_delivered",
        "no caller reaches an entry of the cache: it is damaged in memory",
    ),
    "H6": (
        "tests/workers/test_pools.py::test_garbage_from_an_encoder_is_counted_and_dropped",
        "the line to an encoder process is a pair of sockets without an address; a receiver's port is in L7",
    ),
    "H7": (
        "tests/workers/test_pools.py::test_nine_requests_over_three_idle_encoders_are_three_each",
        "which encoder served a request is not told outside",
    ),
    **(
        {}
        if has_mooncake()
        else {
            "L7": (
                "tests/hostile/lives.py",
                "the receiver needs tectum[mooncake] and the system's libibverbs1, libnuma1 and libcurl4",
            )
        }
    ),
}


def cases_of(situation: str) -> list[Case]:
    """Its cases: their names are its reference, maybe with a letter or a word behind."""
    return [
        case
        for case in CASES
        if case.name.startswith(situation) and not case.name[len(situation) : len(situation) + 1].isdigit()
    ]
