"""Settings: every knob of the service, each with a unit, a bound and a sentence.

One frozen model. The same names are command-line flags (`--request-ttl`), environment variables
(`TECTUM_REQUEST_TTL`) and keys of a TOML file (`--config`); unknown ones are refused at start-up. `--help` and
`GET /v1/limits` are made from the fields below. Times are seconds, sizes are bytes, unless the sentence says otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tectum.errors import StartupError

MIB = 1024 * 1024
RAY_SCHEME = "ray://"
#: Kubernetes sets these in every pod for a Service whose name begins with `tectum`; of the first, only where it is an address
_LINK_PORT = re.compile(r"TECTUM_(\w+_)?PORT")
_LINK = re.compile(
    r"TECTUM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)


class Settings(BaseSettings):
    """What the service is run with. `Settings.load` reads flags, environment and file; each field below says what it is.

    Raises pydantic's ValidationError where a value is out of its bounds or two do not go together; `load` raises StartupError.
    """

    model_config = SettingsConfigDict(env_prefix="TECTUM_", frozen=True, extra="forbid")

    # the door
    host: str = Field("127.0.0.1", description="Address to listen on. Anything but loopback needs --token-file.")
    port: int = Field(30100, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one and prints it.")
    token_file: Path | None = Field(
        None,
        description="File of bearer tokens, one a line; callers must send one. A line may end in the name of the tenant that "
        "the token belongs to. Read again when it changes.",
    )
    tenant_header: str = Field(
        "",
        pattern=r"^[A-Za-z0-9-]*$",
        description="Header in which a trusted proxy names the tenant, such as X-Tectum-Tenant; empty: none is read. A "
        "token's own tenant comes first.",
    )
    allowed_hosts: str = Field(
        "",
        description="Further names, comma-separated, by which one may call a loopback server that has no token (Host header).",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the server's certificate chain; turns TLS on. Read again when it changes."
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authority that callers' certificates must come from (mutual TLS)."
    )
    max_connections: int = Field(
        512, ge=1, le=100_000, description="Most open connections; further ones are answered 503 and closed."
    )
    max_head_bytes: int = Field(
        32 * 1024, ge=1024, le=MIB, description="Largest request line and headers (bytes); more is refused with 431."
    )
    head_timeout: float = Field(
        10.0, gt=0, le=600, description="Seconds that a request line and headers may take to arrive."
    )
    local_socket: Path | None = Field(
        None,
        description="Unix socket at which receivers on this host, of this user, read staged rows in place; none without.",
    )
    max_body_bytes: int = Field(
        64 * MIB, ge=1024, le=4096 * MIB, description="Largest request body (bytes); more is refused with 413."
    )
    max_bodies_bytes: int = Field(
        512 * MIB,
        ge=1024,
        le=1 << 50,
        description="Most bytes of request bodies held at once, over all connections; more are refused with 503.",
    )
    body_grace: float = Field(
        10.0, gt=0, le=600, description="Seconds that a body may take beside those that --min-body-rate gives it."
    )
    min_body_rate: int = Field(
        64 * 1024, ge=1, le=1024 * MIB, description="Least bytes a second of a body on its way; slower is cut with 408."
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=3600, description="Seconds that accepted work may take to finish after SIGTERM."
    )
    dashboard: bool = Field(
        True, description="Whether GET / shows the live page (under the token, where there is one)."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of a log line: for people, or one JSON object."
    )
    trace_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="OTLP/HTTP collector that gets a trace of each request, such as http://localhost:4318; else that of "
        "OTEL_EXPORTER_OTLP_ENDPOINT, else none. Needs tectum[trace].",
    )

    # the encoder
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Element type of weights and rows; auto takes the checkpoint's own."
    )
    compile: bool = Field(
        False,
        description="Compile the towers with torch.compile: a slow start, faster forwards, and rows near those of the model in "
        "one piece, no longer equal to the bit. On CPU it needs a C++ compiler.",
    )
    workers: int | str = Field(
        1,
        description="Encoder processes, each with the encoder's weights (1 to 256): on CUDA they take the devices in turn, or "
        "that of --device cuda:N, all of them; or the Ray cluster that runs them: "
        "ray://HOST:PORT (its Ray Client server), or ray://auto (on one of its nodes).",
    )
    replicas: int = Field(1, ge=1, le=256, description="Encoders that Ray keeps up; only with --workers ray://….")
    max_replicas: int = Field(
        0, ge=0, le=256, description="Most encoders on Ray, when work queues up; 0: never more than --replicas."
    )
    replica_patches: int = Field(
        65_536,
        ge=1,
        le=1_000_000_000,
        description="Queued input patches for each of which one encoder on Ray is wanted.",
    )
    replica_timeout: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Seconds that Ray may take to place an encoder until it connects here; loading comes after that.",
    )
    workers_host: str = Field(
        "127.0.0.1",
        description="Address of this machine that encoders on Ray connect to, and that is listened on for them.",
    )
    workers_port: int = Field(0, ge=0, le=65535, description="TCP port of --workers-host; 0 takes a free one.")
    prepare_threads: int = Field(
        0,
        ge=0,
        le=256,
        description="Threads of an encoder process that decode and preprocess media beside the forward; "
        "0: four on CUDA, on CPU one for large media (small ones are prepared between forwards).",
    )
    forward_threads: int = Field(
        0, ge=0, le=256, description="torch intra-op threads of a CPU forward; 0 shares the cores among the workers."
    )
    stall_timeout: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds without a finished step, while work is pending, after which an encoder process is replaced.",
    )
    fuse: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether requests share a forward. off: rows equal the colocated model's to the bit; "
        "auto: on for CUDA, off for CPU, where fusing gains nothing.",
    )
    batch_patches: int = Field(
        32_768,
        ge=1,
        le=10_000_000,
        description="Most input patches in one fused forward; larger requests run alone. Between two large requests, fused or "
        "not, small ones of so many patches have their turn.",
    )

    # the life of a request
    encode_timeout: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Seconds from acceptance to staged rows, unless the request sets deadline_ms.",
    )
    request_ttl: float = Field(
        120.0, gt=0, le=86_400, description="Seconds that staged rows wait for a receiver after the last activity."
    )
    send_timeout: float = Field(
        30.0, gt=0, le=3600, description="Seconds that one delivery to one destination may take."
    )
    max_metadata_wait: float = Field(
        30.0, gt=0, le=600, description="Longest time (seconds) that a metadata request may wait."
    )
    unknown_id_wait: float = Field(
        5.0, ge=0, le=600, description="Seconds that a wait for an id never seen is held before it gets 404."
    )
    tombstone_ttl: float = Field(
        300.0, gt=0, le=86_400, description="Seconds that a released id answers with its reason."
    )
    max_tombstones: int = Field(10_000, ge=1, le=10_000_000, description="Most released ids remembered at once.")

    # limits at the door
    max_live_requests: int = Field(
        256, ge=1, le=1_000_000, description="Most live requests; more are refused with 503."
    )
    max_request_patches: int = Field(
        131_072,
        ge=1,
        le=1_000_000_000,
        description="Most input patches of one request (its forward holds up others); more are refused with 413.",
    )
    max_queued_patches: int = Field(
        524_288, ge=1, le=1_000_000_000, description="Most input patches waiting for a forward; more are refused."
    )
    max_staged_bytes: int = Field(
        1024 * MIB,
        ge=1024,
        le=1 << 44,
        description="Most bytes of rows held for receivers; more are refused with 503.",
    )
    cache_bytes: int = Field(
        0,
        ge=0,
        le=1 << 44,
        description="Most bytes of rows kept by content after delivery, so that the same media need no forward again; "
        "0 keeps none: rows of people's pictures then outlive no request.",
    )
    max_items: int = Field(64, ge=1, le=10_000, description="Most items in one request.")

    # receivers
    transfer_backend: Literal["none", "zmq", "zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"] = Field(
        "none",
        description="How rows are pushed: zmq to receivers of your own (tectum.engines.pushed); the others to SGLang's "
        "as well, and they open its doors (/encode, /send, …) beside the native ones.",
    )
    grpc_port: int | None = Field(
        None, ge=0, le=65535, description="TCP port of SGLang's gRPC door; 0 takes a free one; none without it."
    )
    sglang_version: str = Field("0.5.23", description="Release of the SGLang that receives; its classes moved.")
    mooncake_protocol: Literal["tcp", "rdma"] = Field("tcp", description="How Mooncake's transfer engine moves rows.")
    mooncake_device: str = Field("", max_length=200, description="RDMA devices for it, comma-separated; none for tcp.")
    mooncake_host: str | None = Field(
        None, max_length=256, description="Address at which receivers' engines reach this one; --host without it."
    )
    encoder_register_urls: str = Field(
        "", description="Bootstrap servers to register at, comma-separated (http://prefill:8997)."
    )
    encoder_register_token_file: Path | None = Field(
        None, description="File whose first line is the bearer token of those servers, where they ask for one."
    )
    advertise_url: str | None = Field(
        None, max_length=300, description="URL at which receivers reach this encoder; its own address without it."
    )
    register_interval: float = Field(
        5.0, gt=0, le=3600, description="Seconds between two registrations: a restarted server knows it again by then."
    )
    receiver_networks: str = Field(
        "",
        description="Networks that rows may be pushed to, comma-separated (10.0.0.0/8,::1); without it all.",
    )
    zmq_curve_server_key_file: Path | None = Field(
        None,
        description="File with the receivers' public CURVE key (40 characters of Z85, or their certificate): rows then go over "
        "ZeroMQ encrypted, and to nobody else. Not for SGLang's own receivers.",
    )
    zmq_curve_secret_key_file: Path | None = Field(
        None, description="This server's own CURVE certificate (NAME.key_secret of zmq.auth.create_certificates)."
    )
    max_receivers: int = Field(
        128, ge=1, le=65_536, description="Most connections to receivers at once; each takes four descriptors."
    )
    receiver_idle: float = Field(
        60.0, gt=0, le=86_400, description="Seconds that an idle connection to a receiver is kept."
    )

    # media
    max_media_bytes: int = Field(
        32 * MIB, ge=1024, le=4096 * MIB, description="Largest encoded picture or clip (bytes), fetched or sent."
    )
    max_image_pixels: int = Field(
        64_000_000,
        ge=1,
        le=1_000_000_000,
        description="Most pixels of a picture, read from its header before decoding.",
    )
    max_request_pixels: int = Field(
        256_000_000,
        ge=1,
        le=100_000_000_000,
        description="Most pixels of all pictures of one request, read from their headers before decoding.",
    )
    max_aspect_ratio: int = Field(
        200,
        ge=1,
        le=100_000,
        description="Longest that the longer side of a picture or clip may be, in shorter sides, read from its header; a "
        "family's own bound, where it is stricter, holds beside it.",
    )
    max_video_frames: int = Field(
        100_000, ge=1, le=100_000_000, description="Most frames of a clip, whether they are looked at or not."
    )
    max_video_seconds: float = Field(3600.0, gt=0, le=1_000_000, description="Longest clip (seconds).")
    max_clip_bytes: int = Field(
        1024 * MIB, ge=1024, le=1 << 44, description="Most bytes of the decoded frames of a clip that are looked at."
    )
    max_audio_seconds: float = Field(3600.0, gt=0, le=1_000_000, description="Longest recording (seconds).")
    max_fetched_bytes: int = Field(
        256 * MIB, ge=1024, le=1 << 44, description="Most bytes that one request may have fetched from URLs."
    )
    max_all_fetched_bytes: int = Field(
        2048 * MIB,
        ge=1024,
        le=1 << 50,
        description="Most bytes fetched from URLs that are held at once, over all requests; more are refused with 503.",
    )
    fetch_timeout: float = Field(10.0, gt=0, le=600, description="Seconds that fetching one URL may take in total.")
    allow_http: bool = Field(True, description="Whether plain http: URLs are fetched; https: always is.")
    allow_private_urls: bool = Field(
        False, description="Whether URLs may lead to private, loopback and link-local addresses."
    )
    allowed_media_hosts: str | None = Field(
        None,
        description="Hosts that URLs may name, with commas between (.example.org: any below it); any without it.",
    )
    allowed_media_dir: Path | None = Field(
        None, description="Folder under which file: URLs may be read; none without it."
    )

    @field_validator("workers", mode="after")
    @classmethod
    def _number_or_cluster(cls, given: int | str) -> int | str:
        if isinstance(given, str) and given.isascii() and given.isdigit():
            given = int(given)  # from a flag or the environment
        if isinstance(given, str):
            if not given.startswith(RAY_SCHEME) or not is_cluster(given.removeprefix(RAY_SCHEME)):
                raise ValueError("a number of processes, ray://HOST:PORT or ray://auto")
        elif not 1 <= given <= 256:
            raise ValueError("from 1 to 256 processes")
        return given

    @model_validator(mode="after")
    def _takes_effect(self) -> Settings:
        """What was given, wherever it came from, has what it needs; what is empty asks for nothing."""
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        for name in given:
            for need in _needs(name) if getattr(self, name) not in (None, "") else ():
                if not need.met(self):
                    raise ValueError(f"{name} has no effect without {need.words}")
        return self

    @model_validator(mode="after")
    def _fits_the_workers(self) -> Settings:
        if self.ray_address is None:
            return self
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, yet {self.replicas} replicas are kept up")
        if self.device.startswith("cuda:"):
            raise ValueError("device: Ray chooses which one an encoder gets; give cuda, cpu or auto")
        if self.workers_host in ("", "0.0.0.0", "::", "[::]"):  # noqa: S104
            raise ValueError("workers_host is what encoders connect to: give this machine's own address")
        return self

    @property
    def ray_address(self) -> str | None:
        """The Ray cluster that runs the encoders (`ray://…`), or None where they are processes of this machine."""
        return self.workers if isinstance(self.workers, str) else None

    @property
    def serves_sglang(self) -> bool:
        """Whether SGLang's doors are open."""
        return self.transfer_backend not in ("none", "zmq")

    @property
    def lanes(self) -> int:
        """How many encoders there are at most."""
        return self.workers if isinstance(self.workers, int) else max(self.replicas, self.max_replicas)

    @property
    def allowed_host_names(self) -> frozenset[str]:
        """The names of `allowed_hosts`, and the name to listen on."""
        names = (*self.allowed_hosts.split(","), self.host)
        return frozenset(name.strip().lower() for name in names if name.strip())

    @model_validator(mode="after")
    def _closed_to_strangers(self) -> Settings:
        if not is_loopback(self.host) and self.token_file is None and self.tls_client_ca is None:
            text = "is reachable from outside: give --token-file (or --tls-client-ca), or listen on 127.0.0.1"
            raise ValueError(f"host {self.host} {text}")
        return self

    @model_validator(mode="after")
    def _one_body_fits(self) -> Settings:
        if self.max_body_bytes > self.max_bodies_bytes:
            raise ValueError("max_body_bytes is above max_bodies_bytes, so that the largest body could never be taken")
        return self

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> Settings:
        """Settings from flags (those not None), then `TECTUM_*`, then the TOML file, then defaults.

        Raises StartupError(`invalid_settings`) that names the field and what is wrong with it.
        """
        known = set(cls.model_fields)
        given = {name: value for name, value in flags.items() if value is not None}
        from_file = _read_toml(config) if config is not None else {}
        for name in from_file:
            if name not in known:
                raise StartupError("invalid_settings", f"{config}: unknown setting {name!r}")
        _refuse_unknown_environment(known)
        try:
            from_env = cls._environment()
            return cls(**{**from_file, **from_env, **given})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "settings"
            said = first["msg"].removeprefix("Value error, ")  # of the library, before our own words
            if first["type"] == "string_pattern_mismatch":  # a pattern is no answer; the setting's own sentence says it
                said = cls.model_fields[where].description or said
            raise StartupError("invalid_settings", f"{where}: {said}") from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is given, then the environment as `load` reads it."""
        return init_settings, InitSettingsSource(settings_cls, cls._environment())

    @classmethod
    def _environment(cls) -> dict[str, Any]:
        names = {f"TECTUM_{name.upper()}": name for name in cls.model_fields}
        return {
            names[key]: value for key, value in os.environ.items() if key in names and not _is_service_link(key, value)
        }

    def limits(self) -> dict[str, Any]:
        """The bounds in force, for `GET /v1/limits`."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if isinstance(getattr(self, name), (int, float))
            and not isinstance(getattr(self, name), bool)
            and name not in ("port", "grpc_port")
        }


class ToldSettings(Settings):
    """The settings of a service, in another process that it told them to: `model_dump(mode="json", exclude_unset=True)`.

    They were checked where they were given, and nothing of this process's own environment is added.
    """

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is told, alone."""
        return (init_settings,)


@lru_cache(maxsize=256)  # asked of every request's Host
def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an IPv4/IPv6 address) can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_cluster(address: str) -> bool:
    """Whether `address` is `auto`, or a host and a port."""
    host, _, port = address.rpartition(":")
    return address == "auto" or bool(host and port.isascii() and port.isdigit() and 0 < int(port) < 65536)


class _Need(NamedTuple):
    """Without what a setting has no effect. words: as the error says it, after `without`."""

    words: str
    met: Callable[[Settings], bool]


def _other(name: str) -> _Need:
    return _Need(name, lambda settings: getattr(settings, name) not in (None, ""))


def _room(name: str, outer: str) -> _Need:
    """A bound that another one reaches first is none."""
    return _Need(f"{outer} at or above it", lambda settings: bool(getattr(settings, name) <= getattr(settings, outer)))


_RAY = _Need("workers ray://…; a number of workers starts processes here", lambda s: s.ray_address is not None)
_SCALES = _Need("max_replicas above replicas", lambda s: s.max_replicas > s.replicas)
_BACKEND = _Need("a transfer_backend: zmq_to_scheduler, …", lambda s: s.transfer_backend != "none")
_SGLANG = _Need("a transfer_backend of SGLang's: zmq_to_scheduler, …", lambda s: s.serves_sglang)
_MOONCAKE = _Need("transfer_backend mooncake", lambda s: s.transfer_backend == "mooncake")
_ZMQ = _Need(
    "a transfer_backend of ZeroMQ (zmq, zmq_to_scheduler, zmq_to_tokenizer); mooncake sends rows in the clear",
    lambda s: s.transfer_backend.startswith("zmq"),
)
#: the settings that have no effect without something else
_NEEDS: tuple[tuple[tuple[str, ...], _Need], ...] = (
    (("replicas", "max_replicas", "replica_patches", "replica_timeout", "workers_host", "workers_port"), _RAY),
    (("replica_patches",), _SCALES),
    (("tls_cert",), _other("tls_key")),
    (("tls_key", "tls_client_ca"), _other("tls_cert")),
    (
        ("allowed_hosts",),
        _Need("a loopback host and no token_file", lambda s: is_loopback(s.host) and s.token_file is None),
    ),
    (("receiver_networks", "max_receivers", "receiver_idle"), _BACKEND),
    (("grpc_port", "sglang_version", "encoder_register_urls"), _SGLANG),
    (("encoder_register_token_file", "advertise_url", "register_interval"), _other("encoder_register_urls")),
    (("mooncake_protocol", "mooncake_device", "mooncake_host"), _MOONCAKE),
    (("mooncake_device",), _Need("mooncake_protocol rdma", lambda s: s.mooncake_protocol == "rdma")),
    (("zmq_curve_server_key_file",), _other("zmq_curve_secret_key_file")),
    (("zmq_curve_secret_key_file",), _other("zmq_curve_server_key_file")),
    (("zmq_curve_server_key_file",), _ZMQ),
    (("max_request_patches",), _room("max_request_patches", "max_queued_patches")),
    (("max_image_pixels",), _room("max_image_pixels", "max_request_pixels")),
    (("max_fetched_bytes",), _room("max_fetched_bytes", "max_all_fetched_bytes")),
)


def _needs(name: str) -> list[_Need]:
    return [need for names, need in _NEEDS if name in names]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError("invalid_settings", f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError("invalid_settings", f"{path}: {error}") from None


def _refuse_unknown_environment(known: set[str]) -> None:
    for key, value in os.environ.items():
        if not key.startswith("TECTUM_") or _is_service_link(key, value):
            continue
        if key.removeprefix("TECTUM_").lower() not in known:
            raise StartupError("invalid_settings", f"unknown environment variable {key}")


def _is_service_link(key: str, value: str) -> bool:
    """Whether a variable is where Kubernetes says that a Service is (`TECTUM_PORT=tcp://10.0.0.1:30100`), and no setting."""
    if value.startswith(("tcp://", "udp://", "sctp://")) and _LINK_PORT.fullmatch(key):
        return True
    return _LINK.fullmatch(key) is not None
