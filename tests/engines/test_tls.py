"""Our own clients at a server with a private authority that asks for certificates: who gets in, and what the others are told."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import torch
import trustme
from safetensors import safe_open

from tectum import AsyncClient, Client
from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.pull import AsyncReceiver, Receiver
from tectum.errors import StartupError, UnavailableError
from tests import zoo
from tests.engines import vllm_standin
from tests.engines.vllm_standin import Engine, Item, Request, config

vllm_standin.install()


@pytest.fixture(scope="module")
def guarded(tiny, papers):
    flags = ["--tls-cert", papers["server"], "--tls-key", papers["server-key"], "--tls-client-ca", papers["ca"]]
    with EncoderProcess(tiny, "--forward-threads", "1", *map(str, flags)) as process:
        yield process


@pytest.fixture(scope="module")
def picture() -> bytes:
    file = io.BytesIO()
    zoo.picture(140, 90, 1).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def expected(server, picture) -> torch.Tensor:
    """The rows over plain HTTP."""
    with Client(server.url) as client:
        return client.encode(picture).rows


def friend(papers) -> dict[str, object]:
    return {"verify": str(papers["ca"]), "cert": (papers["friend"], papers["friend-key"])}


async def over_async_client(url: str, picture: bytes, options: dict[str, object]) -> torch.Tensor:
    async with AsyncClient(url, **options) as client:
        return (await client.encode(picture)).rows


def test_every_client_gets_in_with_the_right_papers(guarded, papers, picture, expected):
    options = friend(papers)
    with Client(guarded.url, **options) as client:
        assert torch.equal(client.encode(picture).rows, expected)
        for pull in (
            Receiver(guarded.url, **options).pull,
            lambda req_id: asyncio.run(AsyncReceiver(guarded.url, **options).pull(req_id)),
        ):
            held = client.hold(picture)
            assert torch.equal(pull(held["req_id"]).embedding().rows, expected)
    assert torch.equal(asyncio.run(over_async_client(guarded.url, picture, options)), expected)


def test_a_context_is_taken_as_it_is(guarded, papers, picture, expected):
    context = ssl.create_default_context(cafile=papers["ca"])
    context.load_cert_chain(papers["friend"], papers["friend-key"])
    with Client(guarded.url, verify=context) as client:
        assert torch.equal(client.encode(picture).rows, expected)


def test_nothing_is_checked_where_that_is_asked_for(guarded, papers, picture, expected):
    with Client(guarded.url, verify=False, cert=friend(papers)["cert"]) as client:
        assert torch.equal(client.encode(picture).rows, expected)


ASKING = {
    "client": lambda url, picture, options: Client(url, **options).encode(picture),
    "async client": lambda url, picture, options: asyncio.run(over_async_client(url, picture, options)),
    "receiver": lambda url, picture, options: Receiver(url, **options).pull("r"),
    "async receiver": lambda url, picture, options: asyncio.run(AsyncReceiver(url, **options).pull("r")),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_those_without_are_told_what_is_missing(guarded, papers, picture, ask):
    believed = {"verify": papers["ca"]}
    stranger = {**believed, "cert": (papers["stranger"], papers["stranger-key"])}
    by_another_name = guarded.url.replace("127.0.0.1", "127.1")  # the same address, under a name it has no papers for
    for url, options, told in (
        (
            guarded.url,
            {},
            "not believed (self-signed certificate in certificate chain): name its authority (verify, --ca-file)",
        ),
        (guarded.url, believed, "wants another certificate (cert, --cert-file and --key-file)"),
        (guarded.url, stranger, "wants another certificate (cert, --cert-file and --key-file)"),
        (by_another_name, {**friend(papers)}, "127.1'): call it by a name that its certificate holds"),
    ):
        with pytest.raises(UnavailableError) as caught:
            ask(url, picture, options)
        assert caught.value.code == "server_unreachable"
        assert caught.value.message.startswith("No ")
        assert caught.value.message.endswith(told)


def told_by(server: ssl.SSLContext, **options: object) -> str:
    """What a pull is told by a listener that has these papers, and no encoder behind them."""

    async def main() -> str:
        async with await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=server
        ) as listening:
            url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            with pytest.raises(UnavailableError) as caught:
                await AsyncReceiver(url, **options).pull("r")
        return caught.value.message

    return asyncio.run(main())


def test_an_expired_certificate_is_called_that(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) - timedelta(hours=1)).configure_cert(context)
    told = told_by(context, verify=tmp_path / "ca.pem")
    assert told == (
        "No TLS with the encoder: its certificate is not believed (certificate has expired): it has to be renewed"
    )


@pytest.mark.parametrize(("who", "alert"), [("stranger", "unknown ca"), (None, "handshake failure")])
def test_a_server_that_says_why_it_refuses_is_quoted(papers, who, alert):
    """In TLS 1.2 a refusal comes before anything else, and is always heard."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(papers["server"], papers["server-key"])
    context.load_verify_locations(papers["ca"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as beside:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection, pytest.raises(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)

        refusing = beside.submit(refuse)
        cert = None if who is None else (papers[who], papers[f"{who}-key"])
        with pytest.raises(UnavailableError) as caught:
            Receiver(f"https://127.0.0.1:{listener.getsockname()[1]}", verify=papers["ca"], cert=cert).pull("r")
        refusing.result(20)
    assert caught.value.message.startswith("No TLS with the encoder: it refused us (")
    assert caught.value.message.endswith(
        f"alert {alert}), as it may where it wants another certificate (cert, --cert-file and --key-file)"
    )


@pytest.mark.parametrize("kind", [Client, AsyncClient, Receiver, AsyncReceiver])
def test_papers_that_cannot_be_used_are_named(kind, papers, tmp_path):
    missing = tmp_path / "missing.pem"
    (tmp_path / "nonsense.pem").write_text("nonsense")
    wrong_pair = (papers["friend"], papers["server-key"])
    for url, options, told in (
        ("https://a:1", {"verify": missing}, f"verify: No such file or directory ({missing})"),
        ("https://a:1", {"verify": tmp_path / "nonsense.pem"}, "verify: "),
        ("https://a:1", {"cert": (missing, papers["friend-key"])}, "cert: No such file or directory"),
        ("https://a:1", {"cert": wrong_pair}, "cert: [X509: KEY_VALUES_MISMATCH]"),
        ("http://a:1", {"verify": papers["ca"]}, "Certificates are for an https:// URL"),
        ("http://a:1", {"cert": wrong_pair}, "Certificates are for an https:// URL"),
    ):
        with pytest.raises(StartupError) as caught:
            kind(url, **options)
        assert caught.value.code == "invalid_settings"
        assert caught.value.message.startswith(told)


def tectum(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tectum", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_line_takes_the_papers(guarded, papers, picture, expected, tmp_path):
    (tmp_path / "picture.png").write_bytes(picture)
    asked = ("encode", tmp_path / "picture.png", "--url", guarded.url, "--out", tmp_path / "rows")
    mine = ("--cert-file", papers["friend"], "--key-file", papers["friend-key"])
    done = tectum(*asked, "--ca-file", papers["ca"], *mine)
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "rows", "pt") as rows:
        assert torch.equal(rows.get_tensor("rows"), expected)
    unknown = tectum(*asked, *mine)
    assert unknown.returncode == 1
    assert "name its authority (verify, --ca-file) [server_unreachable]" in unknown.stderr
    half = tectum(*asked, "--ca-file", papers["ca"], *mine[:2])
    assert (half.returncode, "cert_file and key_file go together" in half.stderr) == (2, True)
    load = tectum("bench", guarded.url, "--json")
    assert load.returncode == 2
    assert "speaks no TLS" in json.loads(load.stdout)["error"]["detail"]


def test_vllms_connector_takes_the_papers(guarded, papers, picture, expected):
    names = {"ca_file": "ca", "cert_file": "friend", "key_file": "friend-key"}
    files = {name: str(papers[paper]) for name, paper in names.items()}
    with Client(guarded.url, **friend(papers)) as client:
        held = client.hold([picture])
    engine = Engine.start(config(64, url=guarded.url, **files))
    place = {"encoder": guarded.url, "req_id": held["req_id"]}
    request = engine.add(Request("a", Item("k", held["rows"], place, tuple(held["grid_thw"][0]))))
    while engine.live:
        engine.step()
    assert request.outcome == "done"
    assert all(torch.equal(rows, expected) for rows in request.gathered[0])
    engine.scheduler.shutdown()
    with pytest.raises(StartupError, match="cert_file and key_file go together"):
        Engine.start(config(64, url=guarded.url, cert_file=files["cert_file"]))
    with pytest.raises(StartupError, match="verify: No such file"):
        Engine.start(config(64, url=guarded.url, ca_file="missing.pem"))
