"""A stand-in for vLLM 0.32 around its connector: what the scheduler and the workers call, in their order, in this process.

It keeps what matters to a connector: an encoder cache of bounded size with references and eviction, chunked prefill,
preemption, aborts, several workers, and an engine that dies (`EngineDeadError`) where vLLM's would: when an item without media is
to be encoded, or is not in the encoder cache when it is gathered. The real vLLM runs in `tests/compat_vllm`.
"""

from __future__ import annotations

import pickle
import sys
import types
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import torch


class EngineDeadError(AssertionError):
    """Here vLLM's engine core would have ended, and all requests with it."""


class _Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class _Metadata:
    pass


class _Base:
    """The parts of `ECConnectorBase` that are not the connector's own."""

    def __init__(self, vllm_config: Any, role: _Role) -> None:
        self._connector_metadata: Any = None
        self.role = role
        self.is_producer = vllm_config.ec_transfer_config.is_ec_producer
        self.is_consumer = vllm_config.ec_transfer_config.is_ec_consumer

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata


def install() -> None:
    """Make `tectum.engines.vllm` importable where there is no vLLM."""
    base = "vllm.distributed.ec_transfer.ec_connector.base"
    names = base.split(".")
    for depth in range(1, len(names) + 1):
        _put(".".join(names[:depth]))
    module: Any = sys.modules[base]
    module.ECConnectorBase, module.ECConnectorRole = _Base, _Role
    module.ECConnectorMetadata = module.ECConnectorWorkerMetadata = _Metadata
    platforms: Any = _put("vllm.platforms")
    platforms.current_platform = SimpleNamespace(device_type="cpu", is_cuda_alike=lambda: False)


def _put(name: str) -> Any:
    """An empty module under `name`, with a spec: others look at it to find out what is installed."""
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    return sys.modules[name]


def config(width: int = 64, layers: int = 0, dtype: torch.dtype = torch.float32, **extra: Any) -> Any:
    """A `VllmConfig` as far as the connector reads it."""
    vision = SimpleNamespace(deepstack_visual_indexes=list(range(layers)))
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(is_ec_producer=False, is_ec_consumer=True, ec_connector_extra_config=extra),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(vision_config=vision), dtype=dtype, get_inputs_embeds_size=lambda: width
        ),
        parallel_config=SimpleNamespace(nnodes=1, distributed_executor_backend="mp", world_size=1),
    )


@dataclass
class Item:
    """One picture of a request. rows: its placeholders. media: whether the request brought it."""

    uuid: str
    rows: int
    place: Any = None
    grid: tuple[int, int, int] | None = None
    media: bool = False


class Request:
    """A prompt of items, each followed by `GAP` text tokens."""

    GAP = 3

    def __init__(self, request_id: str, *items: Item) -> None:
        self.request_id = request_id
        self.items = items
        self.mm_features, offset = [], self.GAP
        for item in items:
            self.mm_features.append(_feature(item, offset))
            offset += item.rows + self.GAP
        self.tokens = offset
        places = {item.uuid: item.place for item in items if item.place is not None}
        self.ec_transfer_params: Any = {"tectum": places} if places else None
        self.computed = 0
        self.outcome: str | None = None
        self.gathered: dict[int, list[torch.Tensor]] = {}  # index -> rows as each worker saw them


def _feature(item: Item, offset: int) -> Any:
    data: dict[str, Any] = {}
    if item.grid is not None:
        data["image_grid_thw"] = torch.tensor(item.grid)
    if item.media:
        data["pixel_values"] = torch.zeros(4, 4)
    position = SimpleNamespace(offset=offset, length=item.rows, get_num_embeds=lambda: item.rows)
    held = SimpleNamespace(get_data=lambda: data) if data else None
    return SimpleNamespace(identifier=item.uuid, mm_hash=item.uuid, modality="image", mm_position=position, data=held)


@dataclass
class Engine:
    """A scheduler and its workers. cache: rows that the encoder cache takes. budget: tokens of one step."""

    scheduler: Any
    workers: list[Any]
    cache: int = 10_000
    budget: int = 10_000
    live: dict[str, Request] = field(default_factory=dict)
    local_encodes: list[str] = field(default_factory=list)
    _refs: dict[str, set[str]] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)
    _freed: list[str] = field(default_factory=list)

    @staticmethod
    def start(vllm_config: Any, workers: int = 1, **more: Any) -> Engine:
        from tectum.engines.vllm import TectumConnector

        built = [TectumConnector(vllm_config, _Role.WORKER) for _ in range(workers)]
        engine = Engine(TectumConnector(vllm_config, _Role.SCHEDULER), built, **more)
        engine.caches = [{} for _ in built]
        return engine

    caches: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, request: Request) -> Request:
        self.live[request.request_id] = request
        return request

    def abort(self, request: Request) -> None:
        self._finish(request, "aborted")

    def preempt(self, request: Request) -> None:
        """Its KV blocks are taken: it computes everything again, and refers to no encoder output meanwhile."""
        request.computed = 0
        self._unref(request)

    def step(self) -> None:
        """Schedule, run the workers, take in what they say."""
        plan: dict[str, tuple[int, int]] = {}
        left = self.budget
        for request in list(self.live.values()):
            if not self.scheduler.ensure_cache_available(request, request.computed):
                continue
            count = self._schedule(request, min(left, request.tokens - request.computed))
            if count:
                plan[request.request_id] = (request.computed, request.computed + count)
                left -= count
        metadata = self.scheduler.build_connector_meta(
            SimpleNamespace(
                free_encoder_mm_hashes=list(self._freed),
                preempted_req_ids=None,
                total_num_scheduled_tokens=sum(end - start for start, end in plan.values()),
            )
        )
        self._work(pickle.dumps(metadata), plan)
        for request_id in self.scheduler.take_unavailable_requests():
            if request_id in self.live:
                self._finish(self.live[request_id], "error")
        for request_id, (_, end) in plan.items():
            if request_id in self.live:
                self._computed(self.live[request_id], end)

    def _schedule(self, request: Request, count: int) -> int:
        """How many tokens can run; every item in them is in the encoder cache, or will be when the workers have loaded."""
        for index, feature in enumerate(request.mm_features):
            start, rows, key = feature.mm_position.offset, feature.mm_position.length, feature.identifier
            if start + rows <= request.computed:
                continue
            if start >= request.computed + count:
                break
            if key in self._refs:
                assert self._rows[key] == rows, "vLLM would reject this request"
                self._refs[key].add(request.request_id)
                continue
            if not self._make_room(rows):
                return max(0, start - request.computed)
            if not self.scheduler.has_cache_item(key):
                if not request.items[index].media:
                    raise EngineDeadError(f"{key} is to be encoded, but came without its media")
                self.local_encodes.append(key)
            self._refs[key], self._rows[key] = {request.request_id}, rows
            if key in self._freed:
                self._freed.remove(key)
            self.scheduler.update_state_after_alloc(request, index)
        return count

    def _make_room(self, rows: int) -> bool:
        for key in [key for key, refs in self._refs.items() if not refs]:
            if sum(self._rows.values()) + rows <= self.cache:
                break
            del self._refs[key], self._rows[key]
            self._freed.append(key)
        return sum(self._rows.values()) + rows <= self.cache

    def _work(self, metadata: bytes, plan: dict[str, tuple[int, int]]) -> None:
        freed, self._freed = self._freed, []
        reports = []
        for worker, cache in zip(self.workers, self.caches, strict=True):
            for key in freed:
                cache.pop(key, None)
            worker.bind_connector_metadata(pickle.loads(metadata))
            worker.start_load_caches(cache)
            for key in self.local_encodes:
                if key not in cache:
                    cache[key] = torch.full((self._rows[key], 1), -1.0)
                    worker.save_caches(cache, key)
            for request_id, (start, end) in plan.items():
                self._gather(self.live[request_id], start, end, cache)
            reports.append(worker.build_connector_worker_meta())
            worker.clear_connector_metadata()
        reports = [pickle.loads(pickle.dumps(report)) for report in reports if report]
        if reports:
            merged = reports[0]
            for report in reports[1:]:
                merged = merged.aggregate(report)
            self.scheduler.update_connector_output(SimpleNamespace(ec_connector_worker_meta=merged))

    def _gather(self, request: Request, start: int, end: int, cache: dict[str, torch.Tensor]) -> None:
        for index, feature in enumerate(request.mm_features):
            offset, rows = feature.mm_position.offset, feature.mm_position.length
            if offset < end and offset + rows > start:
                if feature.identifier not in cache:
                    raise EngineDeadError(f"{feature.identifier} is not in the encoder cache")
                request.gathered.setdefault(index, []).append(cache[feature.identifier])

    def _computed(self, request: Request, end: int) -> None:
        request.computed = end
        for index, feature in enumerate(request.mm_features):
            over = feature.mm_position.offset + feature.mm_position.length <= end
            if over and request.request_id in self._refs.get(feature.identifier, ()):
                self._refs[feature.identifier].discard(request.request_id)
                self.scheduler.update_state_after_free(request, index)
        if end == request.tokens:
            self._finish(request, "done")

    def _finish(self, request: Request, outcome: str) -> None:
        request.outcome = outcome
        self.scheduler.request_finished(request)
        self._unref(request)
        del self.live[request.request_id]

    def _unref(self, request: Request) -> None:
        for refs in self._refs.values():
            refs.discard(request.request_id)
