"""The connector for vLLM: an engine without a vision encoder takes its rows from Tectum. For vLLM 0.32.

Loaded by a stock vLLM:

    --ec-transfer-config '{"ec_connector": "TectumConnector", "ec_connector_module_path": "tectum.engines.vllm",
      "ec_role": "ec_consumer", "ec_connector_extra_config": {"url": "http://127.0.0.1:30100"}}'

Owns what vLLM calls and in which order (`docs/engines/vllm.md`); rows, memory and fetching are `row_store.py`'s. vLLM builds
the class twice. In the scheduler it says what each request needs, and lets it wait, run or fail alone; in each worker it
copies rows from the scheduler's memory file into vLLM's encoder cache. Nothing that a request carries or an encoder answers
may raise into the engine: it would end every other request.

A request says where its rows are held (the gateway does this): `ec_transfer_params = {"tectum": {uuid: {"encoder": url,
"req_id": id}}}`. Only encoders named in the connector's own settings are asked.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from tectum.engines.address import server_url
from tectum.engines.fetcher import Encoders, Shape, Source, Want
from tectum.engines.row_store import RowStore
from tectum.engines.tls import bearer_token, client_context
from tectum.errors import StartupError
from tectum.types import DTYPE_BYTES, Grid

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.tectum")

#: seconds that a step with nothing to run waits for rows on their way, at most: a new request may have to wait for it
REST = 0.005
#: the same where the workers can take every core. They spin for a second after each step, even an empty one: a scheduler that
#: steps on would keep the CPU from the very encoder that it waits for (seen: ten seconds, two workers on two cores)
REST_CROWDED = 1.5
#: what vLLM keeps of an item that came without its media: everything else it holds is media
METADATA_FIELDS = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "timestamps"})


class ConnectorSettings(BaseModel):
    """`ec_connector_extra_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(None, description="The encoder.")
    urls: tuple[str, ...] = Field((), description="The encoders, where there are several.")
    token_file: Path | None = Field(None, description="File whose first line is the encoders' bearer token.")
    ca_file: Path | None = Field(None, description="PEM file of the authority of the encoders' certificates (https).")
    cert_file: Path | None = Field(None, description="PEM file of our own certificate, for mutual TLS.")
    key_file: Path | None = Field(None, description="PEM file of its key.")
    fetch_timeout: float = Field(30.0, gt=0, le=600, description="Seconds that the rows of one item may take.")
    buffer_bytes: int = Field(1 << 30, ge=1 << 20, description="Most bytes of rows held for workers to load.")
    local_encode: bool = Field(
        False, description="Whether vLLM may encode what no encoder delivers, where the request brought the media."
    )

    @model_validator(mode="after")
    def _some_encoder(self) -> ConnectorSettings:
        if (self.url is None) == (not self.urls):
            raise ValueError("give url (one encoder) or urls (several)")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self

    @property
    def encoders(self) -> tuple[str, ...]:
        """Their addresses. Raises StartupError `invalid_settings` for one that is no server's."""
        return tuple(server_url(url, "url") for url in (self.urls or (self.url or "",)))

    def asked(self) -> Encoders:
        """Who is asked for rows, and how. Raises StartupError `invalid_settings` for files that cannot be used."""
        verify = True if self.ca_file is None else str(self.ca_file)
        cert = None if self.cert_file is None or self.key_file is None else (str(self.cert_file), str(self.key_file))
        for url in self.encoders:
            client_context(url, verify, cert)  # a mistake shows here, and not in the process that fetches
        return Encoders(self.encoders, bearer_token(self.token_file), self.fetch_timeout, verify, cert)

    @staticmethod
    def read(config: Mapping[str, Any]) -> ConnectorSettings:
        """Raises StartupError `invalid_settings` that names what is wrong: vLLM then does not start."""
        try:
            return ConnectorSettings(**config)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "ec_connector_extra_config"
            raise StartupError("invalid_settings", f"{where}: {first['msg']}") from None


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that workers copy into the encoder cache under `key`: where their arrays begin, and their shape.

    inline: the arrays' bytes, where workers run on other machines and cannot map the scheduler's memory.
    """

    key: str
    offsets: tuple[int, ...]
    rows: int
    width: int
    dtype: str
    inline: tuple[bytes, ...] | None = None


@dataclass
class TectumMetadata(ECConnectorMetadata):
    """What one step loads. memory: path of the scheduler's memory file."""

    memory: str
    loads: list[Load] = field(default_factory=list)


@dataclass
class TectumLoaded(ECConnectorWorkerMetadata):
    """Keys whose rows the workers have copied, once for each load."""

    keys: list[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        """Every rank loads the same in one step, and reports it in the same step's output: one report stands for all."""
        return self


class TectumConnector(ECConnectorBase):
    """One of two halves, by its role. Each method is vLLM's; see its `ECConnectorBase` for when it is called."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        if self.is_producer:
            raise StartupError("invalid_settings", "ec_role: TectumConnector is an ec_consumer; Tectum is the producer")
        if role == ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config)
        else:
            self._worker = WorkerSide()

    # --- scheduler ---

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.store.holds(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.load(request.mm_features[index].identifier)

    def update_state_after_free(self, request: Request, index: int) -> None:
        self._scheduler.store.passed(request.request_id, request.mm_features[index].identifier, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        if not scheduler_output.total_num_scheduled_tokens:
            self._scheduler.rest()
        else:
            self._scheduler.idle_since = None
        return self._scheduler.take_loads()

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        loaded = connector_output.ec_connector_worker_meta
        for key in loaded.keys if isinstance(loaded, TectumLoaded) else ():
            self._scheduler.store.loaded(key)

    def take_unavailable_requests(self) -> set[str]:
        return self._scheduler.store.take_failed()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if request.mm_features:
            self._scheduler.store.finished(request.request_id)
        return False, None

    # --- worker ---

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TectumMetadata), "both halves are of one version"
        self._worker.load(metadata, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """vLLM encoded an item itself: its rows stay with it, and it is said."""
        self._worker.count_local_encode()

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        return self._worker.take_loaded()

    def shutdown(self) -> None:
        if self.role == ECConnectorRole.SCHEDULER:
            self._scheduler.close()


class SchedulerSide:
    """Reads what a request says about its items, and keeps the rows for the workers."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.ec_transfer_config
        assert config is not None, "vLLM builds a connector when it has its config"
        self._settings = ConnectorSettings.read(config.ec_connector_extra_config)
        encoders = self._settings.asked()
        self.store = RowStore(row_shape(vllm_config.model_config), encoders, self._settings.buffer_bytes)
        self._memory = f"/proc/{os.getpid()}/fd/{self.store.pool.fd}"
        self._inline = spans_machines(vllm_config.parallel_config)
        self._longest_rest = REST_CROWDED if crowded(vllm_config.parallel_config) else REST
        self.idle_since: float | None = None  # since when there has been nothing to run
        self._loads: dict[str, Load] = {}
        log.info("Tectum encoders: %d; rows expected: %s", len(encoders.urls), self.store.shape)

    def ensure(self, request: Request, num_computed_tokens: int) -> bool:
        try:
            wants = [
                self._want(request, index, feature)
                for index, feature in enumerate(request.mm_features)
                if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
            ]
        except Exception:
            log.exception("a request's items cannot be read; it fails alone")
            self.store.refuse(request.request_id, "The request's items cannot be read")
            return False
        return self.store.admit(request.request_id, wants)

    def load(self, key: str) -> None:
        """The rows of `key` go to the workers with this step, unless vLLM encodes them itself."""
        if key in self._loads or not self.store.holds(key):
            return
        document, lease = self.store.start_load(key)
        inline = tuple(bytes(array.data) for array in document.arrays) if self._inline else None
        offsets = tuple(lease.offset + offset for offset in document.offsets)
        self._loads[key] = Load(key, offsets, document.rows, document.width, document.dtype, inline)

    def take_loads(self) -> TectumMetadata:
        loads, self._loads = self._loads, {}
        return TectumMetadata(self._memory, list(loads.values()))

    def rest(self) -> None:
        """A step has nothing to run: wait for rows that are on their way as long as has been waited already, within bounds."""
        now = time.monotonic()
        self.idle_since = self.idle_since or now
        self.store.rest(min(max(now - self.idle_since, 0.001), self._longest_rest))

    def close(self) -> None:
        self.store.close()

    def _want(self, request: Request, index: int, feature: Any) -> Want:
        data = feature.data.get_data() if feature.data is not None else {}
        return Want(
            key=feature.identifier,
            index=index,
            rows=feature.mm_position.get_num_embeds(),
            grid=_grid(data),
            source=self._source(request, feature),
            local=self._settings.local_encode and any(name not in METADATA_FIELDS for name in data),
        )

    def _source(self, request: Request, feature: Any) -> Source | None:
        """Where the request says its item is held, if that is one of our encoders."""
        params = request.ec_transfer_params
        items = params.get("tectum") if isinstance(params, dict) else None
        entry = items.get(feature.mm_hash or feature.identifier) if isinstance(items, dict) else None
        if not isinstance(entry, dict):
            return None
        encoder, req_id = entry.get("encoder"), entry.get("req_id")
        if (
            not isinstance(encoder, str)
            or not isinstance(req_id, str)
            or encoder.rstrip("/") not in self._settings.encoders
        ):
            return None
        return Source(encoder.rstrip("/"), req_id)


class WorkerSide:
    """Copies rows into vLLM's encoder cache, on the worker's device."""

    def __init__(self) -> None:
        self.local_encodes = 0
        self._maps: dict[str, mmap.mmap] = {}
        self._loaded: list[str] = []

    def load(self, metadata: TectumMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        for load in metadata.loads:
            if load.key not in encoder_cache:
                encoder_cache[load.key] = self._rows(load, metadata.memory)
            self._loaded.append(load.key)

    def count_local_encode(self) -> None:
        self.local_encodes += 1
        log.warning("vLLM encoded %d item(s) itself so far", self.local_encodes)

    def take_loaded(self) -> TectumLoaded | None:
        keys, self._loaded = self._loaded, []
        return TectumLoaded(keys) if keys else None

    def _rows(self, load: Load, memory: str) -> torch.Tensor:
        """`[rows, width × (1 + layers)]`: the rows and their deepstack layers side by side, as vLLM wants them."""
        step = load.width * DTYPE_BYTES[load.dtype]
        joined = np.empty((load.rows, step * len(load.offsets)), np.uint8)
        for number, offset in enumerate(load.offsets):
            if load.inline is not None:
                array = np.frombuffer(load.inline[number], np.uint8)
            else:
                array = np.frombuffer(self._map(memory), np.uint8, load.rows * step, offset)
            joined[:, number * step : (number + 1) * step] = array.reshape(load.rows, step)
        rows = torch.from_numpy(joined).view(getattr(torch, load.dtype))
        return rows.to(_device())

    def _map(self, memory: str) -> mmap.mmap:
        """The scheduler's memory, read-only. It has no name but in /proc, so that nothing is left when processes die."""
        found = self._maps.get(memory)
        if found is None:
            descriptor = os.open(memory, os.O_RDONLY)
            try:
                found = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
            self._maps[memory] = found
        return found


def row_shape(model_config: Any) -> Shape:
    """What the served model takes, from its config."""
    vision: Any = None
    for config in (model_config.hf_config, getattr(model_config.hf_config, "thinker_config", None)):
        vision = vision or getattr(config, "vision_config", None)
    layers = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    dtype = str(model_config.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise StartupError(
            "invalid_settings", f"dtype: rows of {dtype} cannot be taken; known: {', '.join(DTYPE_BYTES)}"
        )
    return Shape(int(model_config.get_inputs_embeds_size()), layers, dtype)


def spans_machines(parallel_config: Any) -> bool:
    """Whether workers may run on other machines than the scheduler, where its memory file cannot be mapped."""
    return parallel_config.nnodes > 1 or parallel_config.distributed_executor_backend == "ray"


def crowded(parallel_config: Any) -> bool:
    """Whether there are no more cores than workers that spin while they wait for the scheduler."""
    workers = int(parallel_config.world_size)
    return workers > 1 and len(os.sched_getaffinity(0)) <= workers


def _grid(data: Mapping[str, Any]) -> Grid | None:
    for name in ("image_grid_thw", "video_grid_thw"):
        if name in data:
            time, height, width = (int(side) for side in torch.as_tensor(data[name]).flatten().tolist())
            return (time, height, width)
    return None


def _device() -> torch.device:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if current_platform.is_cuda_alike():
        return torch.device(kind, current_platform.current_device())
    return torch.device(kind)
