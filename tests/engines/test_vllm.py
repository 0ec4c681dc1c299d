"""The connector in a stand-in of vLLM: right rows or a request that fails alone, whatever the engine and the encoder do."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tectum import Client
from tectum.delivery import wire
from tectum.errors import StartupError
from tests import zoo
from tests.compat_vllm import faults
from tests.compat_vllm.faults import FaultyEncoder
from tests.engines import vllm_standin
from tests.engines.vllm_standin import Engine, Item, Request, config

vllm_standin.install()
WIDTH = 16


@pytest.fixture
def encoder():
    with FaultyEncoder() as running:
        yield running


def rows_for(key: str, rows: int, layers: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Rows that only this key has: the main ones, then the layers."""
    generator = torch.Generator().manual_seed(hash(key) % (1 << 30))
    return [torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(1 + layers)]


def document(key: str, count: int, layers: int = 0, dtype: torch.dtype = torch.float32, **changed) -> bytes:
    main, *deep = rows_for(key, count, layers, dtype)
    facts = {"rows": main, "item_rows": [count], "grid_thw": [(1, 2, 2 * count)], "deepstack": deep, "req_id": "r"}
    return wire.pack(**{**facts, "dtype": str(dtype).removeprefix("torch."), **changed})


def item(encoder: FaultyEncoder, key: str, rows: int, layers: int = 0, talk=None, **more) -> Item:
    """A picture whose rows the encoder holds for one pull."""
    talk = talk or faults.whole(document(key, rows, layers, **more))
    place = encoder.plant(f"{key}-{len(encoder.asked)}-{random.random()}".replace(" ", "_"), talk)
    return Item(key, rows, place, grid=(1, 2, 2 * rows))


def settle(engine: Engine, seconds: float = 20.0) -> None:
    """Step until every request has its outcome."""
    until = time.monotonic() + seconds
    while engine.live:
        assert time.monotonic() < until, f"{len(engine.live)} requests never end"
        engine.step()
        time.sleep(0.0005)  # as vLLM does when a step ran nothing: fetching threads get their turn


def at_rest(engine: Engine) -> None:
    """Nothing is pinned, and all memory can be had again."""
    store = engine.scheduler._scheduler.store
    until = time.monotonic() + 20
    while store._fetching:  # of requests that were aborted: another process works on them, and is polled
        assert time.monotonic() < until, "a fetch never ends"
        store._collect()
        time.sleep(0.0005)
    assert all(entry.evictable for entry in store._items.values()), "something is still pinned"
    assert not store._failed
    assert not store._local
    evicted = store._lease(store.pool.max_bytes)
    assert evicted is not None
    store.pool.give_back(evicted)
    engine.scheduler.shutdown()


def right(request: Request, layers: int = 0) -> bool:
    expected = [torch.cat(rows_for(each.uuid, each.rows, layers), -1) for each in request.items]
    return set(request.gathered) == set(range(len(request.items))) and all(
        torch.equal(seen, expected[index]) for index, found in request.gathered.items() for seen in found
    )


def test_rows_of_a_real_encoder_arrive_in_every_worker(server, tiny):
    file = io.BytesIO()
    zoo.picture(140, 90, 1).save(file, "PNG")
    with Client(server.url) as client:
        expected = client.encode([file.getvalue()])
        held = client.hold([file.getvalue()])
        engine = Engine.start(config(64, url=server.url + "/"), workers=2)
        place = {"encoder": server.url, "req_id": held["req_id"]}
        request = engine.add(Request("a", Item("k", held["rows"], place, tuple(held["grid_thw"][0]))))
        engine.step()
        assert request.computed == 0, "the request waits while its rows are fetched; the engine does not"
        settle(engine)
        assert request.outcome == "done"
        assert len(request.gathered[0]) == 2
        assert all(torch.equal(rows, expected.rows) for rows in request.gathered[0])
        assert client.status(held["req_id"])["reason"] == "pulled"
    at_rest(engine)


def test_an_engine_may_have_more_than_a_thousand_descriptors(encoder):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(4096, before[1])), before[1]))
    with open(os.devnull) as nothing, contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            held.callback(os.close, os.dup(nothing.fileno()))
        engine = Engine.start(config(WIDTH, url=encoder.url))
        request = engine.add(Request("a", item(encoder, "k", 6)))
        settle(engine)
        assert right(request)
        at_rest(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("machines", [1, 2])
def test_deepstack_layers_lie_beside_the_rows(encoder, dtype, machines):
    given = config(WIDTH, 3, dtype, url=encoder.url)
    given.parallel_config.nnodes = machines  # on two, workers get the bytes instead of a map of them
    engine = Engine.start(given)
    if machines == 2:
        engine.scheduler._scheduler._memory = "/nowhere"
    request = engine.add(Request("a", item(encoder, "k", 5, 3, dtype=dtype)))
    settle(engine)
    (found,) = request.gathered[0]
    assert torch.equal(found, torch.cat(rows_for("k", 5, 3, dtype), -1))
    at_rest(engine)


@pytest.mark.parametrize(("workers", "cores", "most"), [(1, 1, 200), (2, 3, 200), (2, 2, 15)])
def test_a_scheduler_with_nothing_to_run_waits_for_its_rows(encoder, monkeypatch, workers, cores, most):
    """It does not step as fast as it can; where its spinning workers have every core, it leaves them idle for long."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    given = config(WIDTH, url=encoder.url)
    given.parallel_config.world_size = workers
    engine, go, whole = Engine.start(given, workers=workers), threading.Event(), faults.whole(document("k", 6))

    def late(connection):
        go.wait(20)
        whole(connection)

    request = engine.add(Request("a", item(encoder, "k", 6, talk=late)))
    while not encoder.asked:
        engine.step()
    steps, timer = 0, threading.Timer(0.5, go.set)
    timer.start()
    while request.outcome is None:
        engine.step()
        steps += 1
    timer.join()
    assert right(request)
    assert steps <= most
    engine.add(Request("text"))
    started = time.monotonic()
    settle(engine)
    assert time.monotonic() - started < 1, "with nothing on its way it waits for nothing"
    at_rest(engine)


def test_known_rows_are_not_fetched_again_and_two_at_once_share_a_fetch(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url))
    first, second = (engine.add(Request(name, item(encoder, "k", 6))) for name in "ab")
    settle(engine)
    third = engine.add(Request("c", item(encoder, "k", 6), item(encoder, "l", 3)))
    settle(engine)
    assert [right(each) for each in (first, second, third)] == [True] * 3
    assert len(encoder.asked) == 2, "k once, l once"
    at_rest(engine)


WRONG = {
    "rows": {"rows": torch.ones(5, WIDTH), "item_rows": [5]},
    "width": {"rows": torch.ones(6, WIDTH - 1)},
    "dtype": {"dtype": torch.float16},
    "grid": {"grid_thw": [(1, 12, 2)]},
    "nan": {"rows": torch.tensor([[float("nan")] + [0.0] * (WIDTH - 1)] * 6)},
    "infinite": {"rows": torch.full((6, WIDTH), float("inf"))},
    "layers": {"deepstack": [torch.ones(6, WIDTH)]},
    "items": {"item_rows": [3, 3], "grid_thw": [(1, 2, 12), (1, 2, 12)]},
    "much too long": {"rows": torch.ones(4000, WIDTH), "item_rows": [4000]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rows_fail_their_request_alone(encoder, wrong):
    engine = Engine.start(config(WIDTH, url=encoder.url))
    bad = engine.add(Request("bad", item(encoder, "bad", 6, talk=faults.whole(document("bad", 6, **WRONG[wrong])))))
    good = engine.add(Request("good", item(encoder, "k", 6)))
    settle(engine)
    assert (bad.outcome, good.outcome, right(good)) == ("error", "done", True)
    again = engine.add(Request("again", item(encoder, "bad", 6)))
    settle(engine)
    assert (again.outcome, right(again)) == ("done", True), "the key is not poisoned"
    at_rest(engine)


@pytest.mark.parametrize(
    "params",
    [None, {}, [], {"tectum": None}, {"tectum": {"k": None}}, {"tectum": {"k": {}}}, {"tectum": {"k": {"encoder": 1}}}]
    + [{"tectum": {"k": {"encoder": url, "req_id": "r"}}} for url in ("http://127.0.0.1:1", "file:///etc/passwd", "")],
)
def test_a_request_that_names_no_place_of_ours_fails_alone_and_nobody_is_asked(encoder, params):
    engine = Engine.start(config(WIDTH, url=encoder.url))
    bad = engine.add(Request("bad", Item("k", 6)))
    bad.ec_transfer_params = params
    settle(engine)
    assert (bad.outcome, encoder.asked) == ("error", [])
    at_rest(engine)


def test_items_that_cannot_be_read_fail_their_request_alone(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url))
    bad = Request("bad", item(encoder, "k", 6))
    bad.mm_features[0].data = SimpleNamespace(get_data=lambda: {"image_grid_thw": torch.zeros(2, 3)})
    engine.add(bad)
    good = engine.add(Request("good", item(encoder, "l", 6)))
    settle(engine)
    assert (bad.outcome, good.outcome) == ("error", "done")
    at_rest(engine)


def test_the_same_key_with_other_rows_or_grid_is_refused_alone(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url))
    first = engine.add(Request("a", item(encoder, "k", 6)))
    settle(engine)
    for other in (Item("k", 5, None, (1, 2, 10)), Item("k", 6, None, (1, 12, 2))):
        second = engine.add(Request("b", other))
        settle(engine)
        assert second.outcome == "error"
    assert right(first)
    at_rest(engine)


@pytest.mark.parametrize("planted", ["cut", "stalled"])
def test_an_encoder_that_dies_or_hangs_fails_its_request_within_the_timeout(encoder, planted):
    whole = document("k", 6)
    talk = faults.cut(whole) if planted == "cut" else faults.stalled(whole, encoder.over)
    engine = Engine.start(config(WIDTH, url=encoder.url, fetch_timeout=0.5))
    bad = engine.add(Request("bad", item(encoder, "k", 6, talk=talk)))
    waiting = engine.add(Request("waiting", item(encoder, "k", 6)))
    settle(engine)
    assert bad.outcome == "error"
    assert (waiting.outcome, right(waiting)) == ("done", True), "it names a place of its own, and that is tried"
    at_rest(engine)


def test_local_encoding_only_where_it_is_allowed_and_media_came(encoder):
    for allowed in (False, True):
        engine = Engine.start(config(WIDTH, url=encoder.url, local_encode=allowed))
        bare = engine.add(Request("bare", Item("a", 6, None, (1, 2, 12))))
        raw = engine.add(Request("raw", Item("b", 6, None, (1, 2, 12), media=True)))
        lost = Item("c", 6, encoder.plant("lost", faults.cut(document("c", 6))), (1, 2, 12), media=True)
        broken = engine.add(Request("broken", lost))
        settle(engine)
        assert bare.outcome == "error"
        assert [raw.outcome, broken.outcome] == (["done"] * 2 if allowed else ["error"] * 2)
        assert sorted(engine.local_encodes) == (["b", "c"] if allowed else [])
        assert engine.scheduler._scheduler.store.counts["local"] == (2 if allowed else 0)
        at_rest(engine)


def test_a_request_larger_than_the_memory_fails_and_others_wait_for_room(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url, buffer_bytes=1 << 20))
    huge = engine.add(Request("huge", Item("h", 20_000, {"encoder": encoder.url, "req_id": "h"}, (1, 2, 40_000))))
    many = [engine.add(Request(f"m{i}", item(encoder, f"m{i}", 4000))) for i in range(12)]
    settle(engine)
    assert huge.outcome == "error"
    assert [right(each) for each in many] == [True] * 12
    assert engine.scheduler._scheduler.store.counts["evicted"] > 0
    at_rest(engine)


def test_a_picture_that_comes_twice_stays_until_its_last_place_was_passed(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url), budget=8)
    twice = [item(encoder, "k", 6), Item("k", 6, None, (1, 2, 12))]
    request = engine.add(Request("a", *twice))
    request.ec_transfer_params = {"tectum": {"k": twice[0].place}}
    pinned = {}
    store = engine.scheduler._scheduler.store
    until = time.monotonic() + 20
    while engine.live and time.monotonic() < until:
        engine.step()
        if "k" in store._items:
            pinned[request.computed] = not store._items["k"].evictable
    assert request.outcome == "done"
    # places 3 to 9 and 12 to 18: after 16 tokens the first is passed and the second is not
    assert pinned == {0: True, 8: True, 16: True, 21: False}
    at_rest(engine)


def test_what_a_live_request_might_need_again_is_evicted_last(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url, buffer_bytes=1 << 20))
    store = engine.scheduler._scheduler.store
    alive = engine.add(Request("alive", item(encoder, "mine", 4000)))
    alive.tokens = 100_000  # a long generation follows its picture
    until = time.monotonic() + 20
    while alive.computed < 10_000 and time.monotonic() < until:
        engine.step()
        engine.budget = 10_000
    del engine.live["alive"]  # it makes no progress meanwhile
    for number in range(6):
        other = engine.add(Request(f"r{number}", item(encoder, f"o{number}", 4000)))
        settle(engine)
        assert right(other)
    assert "mine" in store._items, "older than all the others, and kept"
    alive.tokens = 4006
    engine.preempt(alive)
    engine.add(alive)
    settle(engine)
    assert right(alive)
    at_rest(engine)


def test_rows_stay_until_the_workers_have_them_even_when_their_request_is_gone(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url, buffer_bytes=1 << 20))
    store = engine.scheduler._scheduler.store
    request = engine.add(Request("a", item(encoder, "k", 4000)))
    while not engine.scheduler.ensure_cache_available(request, 0):
        time.sleep(0.001)
    engine._schedule(request, request.tokens)
    step = SimpleNamespace(free_encoder_mm_hashes=[], total_num_scheduled_tokens=request.tokens)
    metadata = engine.scheduler.build_connector_meta(step)
    engine.abort(request)  # scheduled, not run yet
    other = Request("b", *(item(encoder, f"o{i}", 4000) for i in range(4)))
    assert not engine.scheduler.ensure_cache_available(other, 0), "all the rest of the memory is not enough"
    assert not store._items["k"].evictable
    (worker,) = engine.workers
    worker.bind_connector_metadata(metadata)
    worker.start_load_caches(engine.caches[0])
    assert torch.equal(engine.caches[0]["k"], rows_for("k", 4000)[0])
    report = SimpleNamespace(ec_connector_worker_meta=worker.build_connector_worker_meta())
    engine.scheduler.update_connector_output(report)
    engine.add(other)
    settle(engine)
    assert right(other)
    at_rest(engine)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_things_gives_right_rows_or_an_error_and_the_engine_lives(encoder, seed):
    """Random prompts, chunks, preemptions, aborts and broken fetches, with room for little in vLLM and in the connector."""
    rng = random.Random(seed)
    sizes = {f"k{i}": rng.choice((3, 40, 700, 3000)) for i in range(10)}
    given = config(WIDTH, url=encoder.url, buffer_bytes=1 << 20, fetch_timeout=5)
    engine = Engine.start(given, workers=rng.choice((1, 2)), cache=6500, budget=rng.choice((100, 2000, 100_000)))
    made: list[tuple[Request, bool]] = []
    preempted: set[str] = set()
    for number in range(40):
        good, items = True, []
        for key in rng.sample(sorted(sizes), rng.choice((1, 1, 2))) * rng.choice((1, 1, 2)):
            whole = document(key, sizes[key])
            broken = rng.random() < 0.1
            good &= not broken
            bad = [faults.cut(whole), faults.whole(whole[:-9] + b"?" * 9), faults.whole(document(key, sizes[key] + 1))]
            talk = rng.choice(bad) if broken else faults.whole(whole)
            items.append(item(encoder, key, sizes[key], talk=talk))
        made.append((engine.add(Request(f"r{number}", *items)), good))
        for _ in range(rng.randrange(4)):
            engine.step()
            disturbed = [request for request in engine.live.values() if rng.random() < 0.1]
            for request in disturbed:
                if rng.random() < 0.3:
                    engine.abort(request)
                else:
                    preempted.add(request.request_id)
                    engine.preempt(request)
    settle(engine, 60)
    for request, good in made:
        # a preempted one may need rows again that had to make room, and that its encoder gave back when they were pulled
        allowed = {"done", "aborted"} if good and request.request_id not in preempted else {"done", "aborted", "error"}
        assert request.outcome in allowed
        if request.outcome == "done":
            assert right(request), request.request_id
    assert sum(request.outcome == "done" for request, _ in made) > 10
    assert not engine.local_encodes
    at_rest(engine)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, "give url"),
        ({"url": "http://a", "urls": ["http://b"]}, "give url"),
        ({"url": "a:30100"}, "url: .* is not the http"),
        ({"urls": ["http://a", "http://b,http://c"]}, "url: .* is not the http"),
        ({"url": "http://a", "timeout": 3}, "timeout"),
        ({"url": "http://a", "fetch_timeout": 0}, "fetch_timeout"),
    ],
)
def test_wrong_settings_stop_the_start_and_say_why(extra, told):
    with pytest.raises(StartupError, match=told):
        Engine.start(config(WIDTH, **extra))
    producer = config(WIDTH, url="http://a")
    producer.ec_transfer_config.is_ec_producer = True
    with pytest.raises(StartupError, match="ec_consumer"):
        Engine.start(producer)
    with pytest.raises(StartupError, match="dtype"):
        Engine.start(config(WIDTH, dtype=torch.float64, url="http://a"))


def test_the_encoders_token_is_sent(encoder, tmp_path):
    (tmp_path / "token").write_text("s3cret tenant\nrest\n")  # as a server's own file may have it
    engine = Engine.start(config(WIDTH, url=encoder.url, token_file=str(tmp_path / "token")))
    engine.add(Request("a", item(encoder, "k", 6)))
    settle(engine)
    assert "Authorization: Bearer s3cret\r\n" in encoder.heads[-1]
    at_rest(engine)


def test_a_token_file_that_cannot_be_used_stops_the_engine(encoder, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(StartupError, match=r"token_file: .* cannot be read or is empty"):
            Engine.start(config(WIDTH, url=encoder.url, token_file=str(tmp_path / name)))


def test_a_fetching_process_that_dies_is_replaced_and_its_requests_fail_alone(encoder):
    engine = Engine.start(config(WIDTH, url=encoder.url))
    fetcher = engine.scheduler._scheduler.store._fetcher
    first = engine.add(Request("a", item(encoder, "k", 6)))
    settle(engine)
    talk = faults.stalled(document("l", 6), encoder.over)
    bad = engine.add(Request("bad", item(encoder, "l", 6, talk=talk)))
    engine.step()
    fetcher._process.kill()
    fetcher._process.wait()
    settle(engine)
    again = [engine.add(Request("again", item(encoder, key, 6))) for key in "l"]
    settle(engine)
    assert (first.outcome, bad.outcome) == ("done", "error")
    assert right(again[0])
    at_rest(engine)
