"""Settings that need one another: what would have no effect is refused at start-up, wherever it was given."""

from __future__ import annotations

import re

import pytest

from tectum.config import _NEEDS, Settings
from tectum.errors import StartupError

RAY = {"workers": "ray://auto"}
ZMQ = {"transfer_backend": "zmq_to_scheduler"}
MOONCAKE = {"transfer_backend": "mooncake"}
REGISTER = {**ZMQ, "encoder_register_urls": "http://prefill:8997"}
TLS = {"tls_cert": "c.pem", "tls_key": "k.pem"}
CURVE = {"zmq_curve_server_key_file": "r.key", "zmq_curve_secret_key_file": "e.key_secret"}

#: (setting, its value, what is missing, what the error says it needs, and what gives it its effect)
CASES = [
    ("replicas", 2, {}, "workers ray://", RAY),
    ("replicas", 1, {"workers": 2}, "workers ray://", RAY),  # its default, and as much without effect
    ("max_replicas", 2, {}, "workers ray://", RAY),
    ("replica_patches", 9, {}, "workers ray://", {**RAY, "max_replicas": 2}),
    ("replica_patches", 9, {**RAY, "replicas": 2}, "max_replicas above", {**RAY, "replicas": 2, "max_replicas": 3}),
    ("replica_timeout", 9, {}, "workers ray://", RAY),
    ("workers_host", "10.0.0.5", {}, "workers ray://", RAY),
    ("workers_port", 9, {}, "workers ray://", RAY),
    ("tls_cert", "c.pem", {}, "tls_key", {"tls_key": "k.pem"}),
    ("tls_key", "k.pem", {}, "tls_cert", {"tls_cert": "c.pem"}),
    ("tls_client_ca", "ca.pem", {}, "tls_cert", TLS),
    ("allowed_hosts", "encoder", {"token_file": "t"}, "a loopback host and no token_file", {}),
    ("allowed_hosts", "encoder", {**TLS, "host": "::", "tls_client_ca": "ca.pem"}, "a loopback host", {"host": "::1"}),
    ("grpc_port", 0, {}, "a transfer_backend", ZMQ),
    ("sglang_version", "0.5.20", {}, "a transfer_backend", MOONCAKE),
    ("receiver_networks", "10.0.0.0/8", {"transfer_backend": "none"}, "a transfer_backend", ZMQ),
    ("max_receivers", 9, {}, "a transfer_backend", MOONCAKE),
    ("receiver_idle", 9, {}, "a transfer_backend", ZMQ),
    ("encoder_register_urls", "http://prefill:8997", {}, "a transfer_backend", ZMQ),
    ("encoder_register_token_file", "t", ZMQ, "encoder_register_urls", REGISTER),
    ("advertise_url", "http://encoder:1", ZMQ, "encoder_register_urls", REGISTER),
    ("register_interval", 5.0, ZMQ, "encoder_register_urls", REGISTER),
    ("mooncake_protocol", "rdma", {}, "transfer_backend mooncake", MOONCAKE),
    ("mooncake_protocol", "tcp", ZMQ, "transfer_backend mooncake", MOONCAKE),
    ("mooncake_host", "10.0.0.5", ZMQ, "transfer_backend mooncake", MOONCAKE),
    ("mooncake_device", "mlx5_0", {}, "transfer_backend mooncake", {**MOONCAKE, "mooncake_protocol": "rdma"}),
    ("mooncake_device", "mlx5_0", MOONCAKE, "mooncake_protocol rdma", {**MOONCAKE, "mooncake_protocol": "rdma"}),
    ("max_request_patches", 99, {"max_queued_patches": 98}, "max_queued_patches at", {"max_queued_patches": 99}),
    ("max_image_pixels", 99, {"max_request_pixels": 98}, "max_request_pixels at", {"max_request_pixels": 99}),
    ("max_fetched_bytes", 1 << 40, {}, "max_all_fetched_bytes at", {"max_all_fetched_bytes": 1 << 40}),
    ("zmq_curve_server_key_file", "r.key", ZMQ, "zmq_curve_secret_key_file", {**ZMQ, **CURVE}),
    ("zmq_curve_secret_key_file", "e.key_secret", ZMQ, "zmq_curve_server_key_file", {**ZMQ, **CURVE}),
    ("zmq_curve_server_key_file", "r.key", CURVE, "a transfer_backend of ZeroMQ", {**ZMQ, **CURVE}),
    ("zmq_curve_server_key_file", "r.key", {**MOONCAKE, **CURVE}, "mooncake sends rows in the clear", {**ZMQ, **CURVE}),
]


def refusal(**given: object) -> str:
    with pytest.raises(StartupError) as caught:
        Settings.load(**given)
    assert caught.value.code == "invalid_settings"
    assert len(caught.value.message) <= 200
    return caught.value.message


@pytest.mark.parametrize(("name", "value", "beside", "words", "enough"), CASES)
def test_a_setting_that_would_have_no_effect_is_refused_with_what_it_needs(name, value, beside, words, enough):
    said = refusal(**{**beside, name: value})
    assert re.fullmatch(rf"settings: {name} has no effect without .*{re.escape(words)}.*", said)
    assert getattr(Settings.load(**{**enough, name: value}), name) is not None


def test_every_need_has_a_case():
    told = {(name, need.words) for names, need in _NEEDS for name in names}
    shown = [(name, words) for name, _, _, words, _ in CASES]
    assert {each for each in told if not any(each[0] == name and words in each[1] for name, words in shown)} == set()


@pytest.mark.parametrize("where", ["flag", "environment", "file"])
def test_it_does_not_matter_where_a_setting_was_given(where, monkeypatch, tmp_path):
    """Its default is no exception: whoever wrote it expects something of it."""
    default, file, flags = Settings.model_fields["register_interval"].default, None, {}
    if where == "flag":
        flags = {"register_interval": default}
    elif where == "environment":
        monkeypatch.setenv("TECTUM_REGISTER_INTERVAL", str(default))
    else:
        file = tmp_path / "tectum.toml"
        file.write_text(f"register_interval = {default}\n")
    with pytest.raises(StartupError, match="register_interval has no effect without encoder_register_urls"):
        Settings.load(file, **flags)
    monkeypatch.setenv("TECTUM_ENCODER_REGISTER_URLS", "http://prefill:8997")
    assert Settings.load(file, **flags, **ZMQ).register_interval == default


def test_what_is_empty_asks_for_nothing(monkeypatch):
    for name in ("ALLOWED_HOSTS", "RECEIVER_NETWORKS", "ENCODER_REGISTER_URLS", "MOONCAKE_DEVICE"):
        monkeypatch.setenv(f"TECTUM_{name}", "")
    assert Settings.load(token_file="t").receiver_networks == ""


def test_settings_that_tune_what_is_always_there_need_nothing():
    """`batch_patches` bounds the turn of small requests without `fuse`, too; one device may run several encoders."""
    settings = Settings.load(
        batch_patches=64, fuse="off", device="cuda:1", workers=2, max_queued_patches=64, host="::1"
    )
    assert (settings.batch_patches, settings.device, settings.lanes) == (64, "cuda:1", 2)
