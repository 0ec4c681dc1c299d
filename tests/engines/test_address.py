"""An address is looked at where it is given: what is no server's is said at the start, by everybody who takes one."""

from __future__ import annotations

import pytest

from tectum import AsyncClient, Client
from tectum.bench.link import Links
from tectum.config import Settings
from tectum.errors import StartupError
from tectum.serving.discovery import bootstrap_urls
from tectum.serving.gateway import GatewaySettings

SGLANG = {"transfer_backend": "zmq_to_scheduler"}
GOOD = "http://encoder-0:30100"
BAD = [
    "encoder-0:30100",
    "http://",
    "http://a:30100,http://b:30100",
    "http://a:30100 http://b:30100",
    "http://a:3o100",
    "http://a:0",
    "http://[::1:30100",
    "grpc://a:30001",
    "",
]


@pytest.mark.parametrize("url", BAD)
@pytest.mark.parametrize(
    "take",
    [
        Client,
        AsyncClient,
        Links,
        lambda url: GatewaySettings((GOOD, url), GOOD),
        lambda url: GatewaySettings((GOOD,), url),
    ],
    ids=["client", "async-client", "bench", "gateway-encoders", "gateway-engine"],
)
def test_what_is_no_address_of_one_server_is_refused_at_the_start(take, url):
    with pytest.raises(StartupError, match="is not the http://host:port of one server") as caught:
        take(url)
    assert caught.value.code == "invalid_settings"


@pytest.mark.parametrize("url", ["prefill:8997", "http://a:8997 http://b:8997", "http://a:8997;http://b:8997"])
def test_bootstrap_servers_have_commas_between_them(url):
    with pytest.raises(StartupError, match="with commas between"):
        bootstrap_urls(Settings(encoder_register_urls=url, **SGLANG))
    two = Settings(encoder_register_urls="http://a:1/, http://b:2,", **SGLANG)
    assert bootstrap_urls(two) == ["http://a:1", "http://b:2"]


def test_a_password_in_an_address_is_not_repeated():
    with pytest.raises(StartupError) as caught:
        Client("https://any:s3cret@encoder 0:30100")
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize("url", [GOOD, GOOD + "/", "http://[::1]:30100", "http://any:token@10.0.0.1:30100"])
def test_addresses_of_one_server_are_taken(url):
    assert Client(url).url == url.rstrip("/")
