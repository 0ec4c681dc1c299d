"""Clusters for the tests of encoders on Ray, which run only where they are asked for (`make test-ray`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "ray" in config.option.markexpr:
        return
    kept = [item for item in items if not item.get_closest_marker("ray")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


#: as few and as small processes a node as Ray allows
SIZE = {"object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}


class TwoNodes:
    """A Ray cluster of two nodes on this machine. address: of its Ray Client server."""

    def __init__(self, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._cpus = cpus
        self.address = f"ray://127.0.0.1:{port}"
        self.cluster = Cluster(True, head_node_args={"num_cpus": cpus, "ray_client_server_port": port, **SIZE})
        self.second = self.add()

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=self._cpus, **SIZE)


@pytest.fixture(scope="session")
def cluster() -> Iterator[TwoNodes]:
    made = TwoNodes(cpus=2)
    yield made
    made.cluster.shutdown()
