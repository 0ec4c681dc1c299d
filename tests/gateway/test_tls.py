"""The gateway before an encoder and an engine with a private authority, which ask for a certificate: both hops, and each failure."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tectum import Client
from tectum.demo.encoder_process import EncoderProcess, ServerProcess
from tectum.errors import StartupError
from tectum.serving.gateway import GatewaySettings, create_app
from tests.gateway.peers import Engine, running
from tests.gateway.test_gateway import chat, data_uri, post

NOT_BELIEVED = "its certificate is not believed (self-signed certificate in certificate chain): name its authority (verify, --ca-file)"
WANTS_ANOTHER = "as it may where it wants another certificate (cert, --cert-file and --key-file)"
TLS_FAILED = "TLS failed, the gateway's log says why"
TEXT = {"messages": [{"role": "user", "content": "no picture"}]}


@pytest.fixture(scope="module")
def guarded(tiny, papers) -> Iterator[EncoderProcess]:
    flags = ["--tls-cert", papers["server"], "--tls-key", papers["server-key"], "--tls-client-ca", papers["ca"]]
    with EncoderProcess(tiny, "--forward-threads", "1", *map(str, flags)) as process:
        yield process


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def guarded_engine(engine, papers) -> Iterator[str]:
    asked = {"ssl_ca_certs": str(papers["ca"]), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    server = {"ssl_certfile": str(papers["server"]), "ssl_keyfile": str(papers["server-key"])}
    with running(engine, **asked, **server) as url:
        yield url


def files(papers: dict[str, Path], who: str = "friend") -> dict[str, Path]:
    return {"ca_file": papers["ca"], "cert_file": papers[who], "key_file": papers[f"{who}-key"]}


def flags(files: dict[str, Path]) -> list[str]:
    return [word for name, file in files.items() for word in (f"--{name.replace('_', '-')}", str(file))]


def place(engine: Engine) -> dict[str, Any]:
    """Where the engine was told that the rows of the one picture are."""
    ((_, entry),) = engine.chat()["ec_transfer_params"]["tectum"].items()
    return entry


def told(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_both_hops_show_and_check_papers(server, guarded, guarded_engine, engine, papers):
    command = ("gateway", "--encoders", guarded.url, "--engine", guarded_engine, "--port", "0", *flags(files(papers)))
    with ServerProcess(*command) as gateway:
        assert httpx2.get(f"{gateway.url}/health/ready").json() == {"status": "ready"}
        assert post(gateway.url, chat(data_uri(3))).json()["id"] == "1"
        assert gateway.stop() == 0
    assert not [line for line in gateway.lines if "TLS" in line or "Traceback" in line]
    with Client(server.url) as client:  # another encoder of the same model, over plain HTTP
        (grid,) = client.encode(base64.b64decode(data_uri(3).split(",")[1])).grid_thw
    assert engine.chat()["messages"][0]["content"][1]["image_embeds"] == {"image_grid_thw": list(grid)}
    assert place(engine)["encoder"] == guarded.url


@pytest.mark.parametrize(
    ("names", "who", "why"),
    [
        ((), "friend", NOT_BELIEVED),
        (("ca_file",), "friend", WANTS_ANOTHER),
        (("ca_file", "cert_file", "key_file"), "stranger", WANTS_ANOTHER),
    ],
    ids=["no authority", "no certificate", "a stranger's"],
)
def test_an_encoder_without_the_right_papers_is_one_that_is_not_there(guarded, engine, papers, caplog, names, who, why):
    """The reason is in the log, and text is served."""

    def is_logged() -> bool:
        here = f"an encoder at {guarded.url.removeprefix('https://')}: "
        return any(here in message and message.endswith(why) for message in caplog.messages)

    given = {name: file for name, file in files(papers, who).items() if name in names}
    # in TLS 1.3 a refusal comes after the handshake, and may be an alert or a mere reset
    kinds = [TLS_FAILED] if why is NOT_BELIEVED else [TLS_FAILED, "ReadError", "RemoteProtocolError"]
    with running(engine) as plain, running(create_app(GatewaySettings((guarded.url,), plain, **given))) as url:
        answer = post(url, chat(data_uri()))
        assert answer.headers["retry-after"] == "1"
        assert told(answer) in [(503, "server_unreachable", f"No encoder answered ({kind})") for kind in kinds]
        assert is_logged()
        caplog.clear()
        assert told(httpx2.get(f"{url}/health/ready")) == (503, "server_unreachable", "No encoder is ready")
        assert is_logged(), "a probe says it, too"
        assert post(url, TEXT).status_code == 200


def test_the_next_encoder_takes_over(server, guarded, engine):
    """Of eight pictures some prefer the encoder that is not believed."""
    with (
        running(engine) as plain,
        running(create_app(GatewaySettings((guarded.url, server.url), plain))) as url,
    ):
        for seed in range(8):
            assert post(url, chat(data_uri(seed))).status_code == 200
            assert place(engine)["encoder"] == server.url


def test_an_engine_without_the_right_papers_is_one_that_is_not_there(server, guarded_engine, caplog):
    with running(create_app(GatewaySettings((server.url,), guarded_engine))) as url:
        for body in (TEXT, chat(data_uri())):
            message = f"The engine did not answer ({TLS_FAILED})"
            assert told(post(url, body)) == (503, "server_unreachable", message)
        said = f"no TLS with the engine at {guarded_engine.removeprefix('https://')}: {NOT_BELIEVED}"
        assert caplog.messages.count(said) == 2
        assert told(httpx2.get(f"{url}/health/ready")) == (503, "server_unreachable", "The engine is not ready")
        assert caplog.messages.count(said) == 3
        assert httpx2.get(f"{url}/health/live").status_code == 200


def test_credentials_in_an_address_stay_out_of_the_log(guarded, engine, caplog):
    secret = guarded.url.replace("https://", "https://me:s3cret@")
    with running(engine) as plain, running(create_app(GatewaySettings((secret,), plain))) as url:
        assert post(url, chat(data_uri())).status_code == 503
    assert f"no TLS with an encoder at {guarded.url.removeprefix('https://')}: {NOT_BELIEVED}" in caplog.messages
    assert "s3cret" not in caplog.text


def test_papers_that_cannot_be_used_stop_the_start(papers, tmp_path):
    missing, good = tmp_path / "missing.pem", files(papers)
    secure, plain = "https://a:1", "http://a:1"
    for encoder, engine, given, said in (
        (secure, plain, {"ca_file": missing}, f"verify: No such file or directory ({missing})"),
        (plain, secure, {"ca_file": missing}, f"verify: No such file or directory ({missing})"),
        (secure, plain, {**good, "key_file": papers["server-key"]}, "cert: [X509: KEY_VALUES_MISMATCH]"),
        (plain, plain, {"ca_file": papers["ca"]}, "Certificates are for an https:// URL"),
        (secure, plain, {"cert_file": papers["friend"]}, "cert_file and key_file go together"),
        (secure, plain, {"key_file": papers["friend-key"]}, "cert_file and key_file go together"),
    ):
        with pytest.raises(StartupError) as caught:
            create_app(GatewaySettings((encoder,), engine, **given))
        assert caught.value.code == "invalid_settings"
        assert caught.value.message.startswith(said)
    create_app(GatewaySettings((plain, secure), plain, **good))  # some of them may be plain
