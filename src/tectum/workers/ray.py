"""Encoders on a Ray cluster: Ray places them, starts them again, and gives each its device; all else goes beside Ray.

Owns the actors. What an actor is told through Ray is where its service listens, the secret and its lane; it connects
there (`afar.py`), and media, rows and control take that line (`remote.py`). The service therefore sees an actor's end as
soon as the kernel closes its socket, whatever Ray makes of it, and waits for the next one that Ray starts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tectum.config import RAY_SCHEME, Settings
from tectum.delivery.staging import StagingPool
from tectum.errors import StartupError
from tectum.pipeline.threads import looked_at, run_to_end
from tectum.workers.remote import RemoteLauncher
from tectum.workers.worker import forward_threads

try:
    import ray
except ModuleNotFoundError:
    text = 'ray is not installed; run: pip install "tectum[ray]"'
    raise StartupError("missing_dependency", text) from None

log = logging.getLogger("tectum.workers")

#: times that a cluster which answers is asked to take this service as a client: one that has just started may not manage
TRIES = 3
T = TypeVar("T")


class EncoderActor:
    """What Ray runs. Its constructor runs again whenever Ray starts it again, here or on another node."""

    def __init__(self, host: str, port: int, secret: bytes, lane: int) -> None:
        from tectum.workers import afar

        threading.Thread(target=afar.work, args=(host, port, secret, lane), name="tectum-encoder", daemon=True).start()

    def node(self) -> str:
        """Ray's id of the node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())


class RayActors(RemoteLauncher):
    """`Launcher` of `settings.replicas` actors, and up to `settings.max_replicas` when work queues up."""

    def __init__(self, model: str, settings: Settings) -> None:
        super().__init__(model, settings)
        self._thread = ThreadPoolExecutor(1, "tectum-ray")  # Ray's calls block
        self._connected_here = False

    async def open(self, pool: StagingPool) -> None:
        """Connect to the cluster, and listen. Raises StartupError `cluster_unavailable`."""
        await self.call(self._connect)
        await super().open(pool)

    def encoder(self, lane: int) -> RayEncoder:
        return RayEncoder(self, lane)

    async def close(self) -> None:
        await super().close()
        if self._connected_here:
            self._connected_here = False
            await self.call(ray.shutdown)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call into Ray. Raises StartupError `cluster_unavailable` for whatever it raises."""
        try:
            return await run_to_end(self._thread, function, *args)
        except Exception as error:
            raise unavailable(error) from None

    def tell(self, function: Callable[[], None]) -> None:
        """Call into Ray without awaiting its end; what it raises is logged."""

        def told(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                log.error("%s", unavailable(error))

        self._thread.submit(function).add_done_callback(told)

    def _connect(self) -> None:
        if ray.is_initialized():  # whoever connected this process ends that, too
            return
        address = self._settings.ray_address
        assert address is not None, "actors are for a cluster"
        for left in reversed(range(TRIES)):
            try:
                ray.init("auto" if address == f"{RAY_SCHEME}auto" else address, log_to_driver=False)
                break
            except ConnectionAbortedError:  # its Ray Client server is there, and failed to start ours
                if not left:
                    raise
        self._connected_here = True

    def create(self, lane: int) -> Any:
        """A new actor for a lane; Ray starts it as soon as a node has room for it."""
        self._connect()  # a cluster that went away may have come back
        device = self._settings.device
        on_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        actor = ray.remote(EncoderActor).options(
            num_cpus=forward_threads(self._settings),
            num_gpus=1 if on_gpu else 0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy="SPREAD",  # a node that dies takes along as few as possible
        )
        return actor.remote(*self.listener.address, self.listener.secret, lane)


class RayEncoder:
    """The actor of one lane."""

    def __init__(self, cluster: RayActors, lane: int) -> None:
        self._cluster = cluster
        self._lane = lane
        self._actor: Any = None

    async def place(self) -> str:
        """See `RemoteEncoder`. Waits as long as Ray does: a cluster may have to grow first."""
        if self._actor is None:
            self._actor = await self._cluster.call(self._cluster.create, self._lane)
        actor = self._actor
        answer = asyncio.wrap_future(await self._cluster.call(lambda: actor.node.remote().future()))
        answer.add_done_callback(looked_at)
        try:
            node: str = await asyncio.shield(answer)  # shielded: Ray answers even when nobody waits any more
            return node
        except Exception as error:
            raise unavailable(error) from None

    def kill(self) -> None:
        actor = self._actor
        if actor is not None:
            self._cluster.tell(lambda: ray.kill(actor, no_restart=False))

    async def retire(self) -> None:
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            await self._cluster.call(lambda: ray.kill(actor, no_restart=True))
        except StartupError as error:
            log.warning("lane %d: its actor could not be ended: %s", self._lane, error)


def unavailable(error: BaseException) -> StartupError:
    """Whatever Ray raised, in one line; where it sends a traceback along, its end says what happened."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return StartupError("cluster_unavailable", f"The Ray cluster cannot be used: {type(error).__name__}: {text}")
