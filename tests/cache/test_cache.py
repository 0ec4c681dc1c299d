"""Content keys and the cache behind them, on their own."""

from __future__ import annotations

import asyncio
import itertools
from hashlib import blake2b

from tectum.cache.flights import Flights
from tectum.cache.key import content_key, joint_key
from tectum.cache.store import EmbeddingCache, Entry
from tectum.types import ItemMetadata, Modality, RequestMetadata

GIVEN = {"modality": "image", "media": b"bytes", "revision": "r1", "options": {"max_pixels": 100}, "tenant": ""}


def key(**changed) -> str:
    facts = {**GIVEN, **changed}
    return content_key(facts.pop("modality"), facts.pop("media"), **facts)


def entry(rows: int = 4, fill: int = 1) -> Entry:
    metadata = RequestMetadata("r", 1, 0, (ItemMetadata(Modality.IMAGE, rows, (1, 4, 4), 16),), 8, 0, "float32")
    return Entry.of(metadata, memoryview(bytearray([fill]) * metadata.nbytes))


def test_everything_that_changes_rows_changes_the_key():
    keys = [
        key(),
        key(media=b"bytes "),
        key(modality="video"),
        key(revision="r2"),
        key(options={}),
        key(options={"max_pixels": 101}),
        key(options={"min_pixels": 100}),
        key(tenant="a"),
        key(tenant="b"),
        # the borders between the fields cannot be moved
        key(tenant="ab", media=b"c"),
        key(tenant="a", media=b"bc"),
        key(revision="r1x", tenant=""),
        key(revision="r1", tenant="x"),
    ]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert all(len(found) == 40 for found in keys), "160 bits"
    assert key(options={"a": 1, "b": 2}) == key(options={"b": 2, "a": 1})


def test_a_key_is_what_the_page_says_it_is():
    """Worked out by hand: length-prefixed fields, then the media."""
    fields = [b"tectum-key-1", b"image", b"r1", b'[["max_pixels",100]]', b""]
    by_hand = blake2b(b"".join(b"%d:%b" % (len(f), f) for f in fields) + b"bytes", digest_size=20).hexdigest()
    assert key() == by_hand


def test_items_encoded_together_have_a_key_of_their_own_and_order_counts():
    assert joint_key(["a"]) == "a"
    assert len({joint_key(["a", "b"]), joint_key(["b", "a"]), joint_key(["a", "b", "c"]), "a", "b"}) == 5


def test_the_least_recently_used_goes_first_and_the_budget_is_kept():
    one = len(entry().data)
    cache = EmbeddingCache(3 * one)
    for name in "abc":
        cache.put(name, entry())
    assert cache.get("a") is not None
    cache.put("d", entry())
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]
    cache.put("big", entry(rows=12))
    assert (cache.get("big") is not None, len(cache), cache.nbytes) == (True, 1, 3 * one)
    cache.put("bigger", entry(rows=13))
    assert cache.get("bigger") is None
    assert cache.get("big") is not None, "what does not fit pushes nothing out"
    cache.put("big", entry(rows=1))
    assert cache.nbytes == one // 4
    cache.drop("big")
    cache.drop("big")
    assert (len(cache), cache.nbytes) == (0, 0)


def test_damage_in_memory_shows():
    sound = entry()
    assert sound.sound()
    damaged = Entry(sound.metadata, sound.data[:-1] + b"\x00", sound.crc32)
    short = Entry(sound.metadata, sound.data[:-1], sound.crc32)
    assert not damaged.sound()
    assert not short.sound()


def test_followers_get_the_leaders_rows_and_a_leader_without_rows_frees_them():
    async def main() -> None:
        flights, rows = Flights(), entry()
        flight = flights.lead("k")
        first, second = (asyncio.ensure_future(flights.find("k").wait()) for _ in range(2))
        await asyncio.sleep(0)
        assert flight.followers == 2
        first.cancel()
        await asyncio.wait([first])
        assert (first.cancelled(), flight.followers, second.done()) == (True, 1, False)
        flights.end(flight, rows)
        flights.end(flight, None)
        assert await second is rows
        assert flights.find("k") is None
        again = flights.lead("k")
        waiting = asyncio.ensure_future(again.wait())
        flights.end(flight, rows)  # the old flight's end says nothing about the new one
        assert flights.find("k") is again
        flights.end(again, None)
        assert await waiting is None
        assert len(flights) == 0

    asyncio.run(main())
