"""Settings: every knob of the service, each with a unit, a bound and a sentence.

One frozen model. The same names are command-line flags (`--request-ttl`), environment variables
(`TECTUM_REQUEST_TTL`) and keys of a TOML file (`--config`); unknown ones are refused at start-up. `--help` and
`GET /v1/limits` are made from the fields below. Times are seconds, sizes are bytes, unless the sentence says otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tectum.errors import StartupError

MIB = 1024 * 1024


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TECTUM_", frozen=True, extra="forbid")

    # the door
    host: str = Field("127.0.0.1", description="Address to listen on. Anything but loopback needs --token-file.")
    port: int = Field(30100, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one and prints it.")
    token_file: Path | None = Field(None, description="File whose first line is the bearer token callers must send.")
    local_socket: Path | None = Field(
        None,
        description="Unix socket at which receivers on this host, of this user, read staged rows in place; none without.",
    )
    max_body_bytes: int = Field(
        64 * MIB, ge=1024, le=4096 * MIB, description="Largest request body (bytes); more is refused with 413."
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=3600, description="Seconds that accepted work may take to finish after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")

    # the encoder
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Element type of weights and rows; auto takes the checkpoint's own."
    )
    workers: int = Field(
        1, ge=1, le=256, description="Encoder processes, each with the encoder's weights; one a device on CUDA."
    )
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
        description="Most input patches in one fused forward; larger requests run alone.",
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
    fetch_timeout: float = Field(10.0, gt=0, le=600, description="Seconds that fetching one URL may take in total.")
    allow_http: bool = Field(True, description="Whether plain http: URLs are fetched; https: always is.")
    allow_private_urls: bool = Field(
        False, description="Whether URLs may lead to private, loopback and link-local addresses."
    )
    allowed_media_dir: Path | None = Field(
        None, description="Folder under which file: URLs may be read; none without it."
    )

    @model_validator(mode="after")
    def _loopback_or_token(self) -> Settings:
        if not is_loopback(self.host) and self.token_file is None:
            raise ValueError(f"host {self.host} is reachable from outside: give --token-file, or listen on 127.0.0.1")
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
            raise StartupError("invalid_settings", f"{where}: {first['msg']}") from None

    @classmethod
    def _environment(cls) -> dict[str, Any]:
        names = {f"TECTUM_{name.upper()}": name for name in cls.model_fields}
        return {names[key]: value for key, value in os.environ.items() if key in names}

    def limits(self) -> dict[str, Any]:
        """The bounds in force, for `GET /v1/limits`."""
        return {
            name: getattr(self, name)
            for name, info in type(self).model_fields.items()
            if isinstance(getattr(self, name), (int, float))
            and not isinstance(getattr(self, name), bool)
            and name != "port"
        }


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an IPv4/IPv6 address) can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise StartupError("invalid_settings", f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError("invalid_settings", f"{path}: {error}") from None


def _refuse_unknown_environment(known: set[str]) -> None:
    for key in os.environ:
        if key.startswith("TECTUM_") and key.removeprefix("TECTUM_").lower() not in known:
            raise StartupError("invalid_settings", f"unknown environment variable {key}")
