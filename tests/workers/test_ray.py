"""Encoders on a Ray cluster of two nodes: what only there can happen, and the whole service on it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import numpy as np
import pytest

from tectum import Client, Encoder
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import StartupError
from tests.workers.harness import FLAGS, house, picture, requests, still_runs
from tests.workers.test_pools import lost, runs

#: a cluster, a service and its encoders load one after the other
pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_a_node_that_dies_takes_along_only_its_encoders_and_ray_places_them_anew(tiny, cluster):
    with house(str(tiny), workers=cluster.address, replicas=3, replica_timeout=60.0) as made:

        async def test():
            victim = cluster.second.node_id
            lanes = {each["lane"]: each["node"] for each in made.pool.describe()}
            there = [lane for lane, node in lanes.items() if node == victim]
            assert 0 < len(there) < 3, "Ray spreads them"
            parts = await asyncio.gather(*(made.stages.prepare(each) for each in requests(3)))
            dying = [part for part in parts if part.lane in there]
            pids = [made.line(lane).pid for lane in there]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            encoding = [asyncio.ensure_future(made.stages.encode([part])) for part in dying]
            await made.until(lambda: all(made.pool._lanes[lane].pending for lane in there))
            cluster.cluster.remove_node(cluster.second, allow_graceful=False)
            for pid in pids:  # with a machine, all its processes end at once
                os.kill(pid, signal.SIGKILL)
            died = time.monotonic()
            await lost(*encoding)
            assert time.monotonic() - died < 0.5
            assert sorted(made.lost) == there
            assert all([await runs(made, part) for part in parts if part not in dying]), "the others lost nothing"
            await made.until(lambda: made.pool.up == 2)  # what is left of the cluster has two places
            cluster.second = cluster.add()
            await made.all_up()
            assert {each["node"] for each in made.pool.describe()} == {
                cluster.cluster.head_node.node_id,
                cluster.second.node_id,
            }
            parts = await asyncio.gather(*(made.stages.prepare(each) for each in requests(3)))
            assert {part.lane for part in parts} == {0, 1, 2}
            assert all([await runs(made, part) for part in parts])

        made.run(test())


def test_a_cluster_without_room_is_said_so_and_nothing_is_left_there(tiny, cluster):
    with (
        pytest.raises(StartupError) as caught,
        house(str(tiny), workers=cluster.address, replicas=5, replica_timeout=8.0),
    ):
        pass
    assert caught.value.code == "cluster_unavailable"
    assert "no place was found" in caught.value.message
    with house(str(tiny), workers=cluster.address, replicas=4) as made:
        assert made.pool.up == 4, "all four places are free again"


def test_a_model_that_no_node_has_is_said_so(tiny, cluster):
    with pytest.raises(StartupError) as caught, house(f"{tiny}-elsewhere", workers=cluster.address, replicas=2):
        pass
    assert caught.value.code == "model_not_found"


def test_no_cluster_there(tiny):
    command = [sys.executable, "-m", "tectum", "serve", str(tiny), "--port", "0", "--workers", "ray://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "[cluster_unavailable]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["client", "node"])
def test_the_service_serves_from_the_cluster_and_ends_its_actors(tiny: Path, cluster, where):
    media = [picture(224, 224, 1), picture(100, 60, 2)]
    with Encoder(str(tiny), device="cpu", forward_threads=FLAGS["forward_threads"]) as here:
        expected = here.encode(media)
    address = cluster.address if where == "client" else "ray://auto"
    flags = ("--forward-threads", "1", "--workers", address, "--replicas", "2", "--stall-timeout", "5")
    with EncoderProcess(tiny, *flags) as process, httpx2.Client(base_url=process.url, timeout=60) as http:
        with Client(process.url) as client:
            got = client.encode(media)
        assert np.array_equal(np.asarray(got.rows), np.asarray(expected.rows))
        first = _workers(http)
        os.kill(first[0]["pid"], signal.SIGSTOP)  # Ray sees nothing wrong: the service has it replaced
        assert {_status(http, seed) for seed in range(8)} == {200, 503}
        _until(lambda: http.get("/health/ready").json()["workers_up"] == 2, "it was not replaced")
        second = _workers(http)
        assert second[0]["pid"] != first[0]["pid"]
        assert {_status(http, seed) for seed in range(8)} == {200}
    _until(lambda: not any(still_runs(each["pid"]) for each in second), "an actor outlives its service")


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    """Poll other processes; there is nothing to wait on."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def _workers(http: httpx2.Client) -> list[dict]:
    return http.get("/health/progress").json()["workers"]


def _status(http: httpx2.Client, seed: int) -> int:
    files = {"f": picture(96, 96, seed)}
    body = {"request": '{"items": [{"type": "image", "file": "f"}]}'}
    return http.post("/v1/encode", data=body, files=files).status_code
