"""The doors themselves: TLS and mutual TLS, tokens that rotate, what is refused at start-up, and what a log line may hold."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import warnings
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.responses import PlainTextResponse

from tectum.config import Settings
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, StartupError, UnavailableError
from tectum.observe.logs import MAX_LINE, Scrubbed
from tectum.serving import tenants
from tectum.serving.bodies import decode_encode_body
from tectum.serving.guard import BodyBudget, Guard, Tokens, Upload
from tectum.serving.tls import tls_context
from tests.sglang.conftest import grpc_target


def trusting(papers: dict[str, Path], client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(papers["ca"]))
    if client is not None:
        context.load_cert_chain(papers[client], papers[f"{client}-key"])
    return context


# --- TLS ---


def test_mutual_tls_lets_in_whoever_the_authority_knows_and_nobody_else(tiny, papers):
    flags = ["--tls-cert", papers["server"], "--tls-key", papers["server-key"], "--tls-client-ca", papers["ca"]]
    with EncoderProcess(tiny, "--forward-threads", "1", *map(str, flags)) as process:
        assert process.url.startswith("https://127.0.0.1:")
        answer = httpx2.get(f"{process.url}/v1/models", verify=trusting(papers, "friend"), trust_env=False)
        assert answer.json()["data"][0]["family"] == "qwen2_5_vl"
        for client in (None, "stranger"):
            with pytest.raises((httpx2.TransportError, ssl.SSLError)):
                httpx2.get(f"{process.url}/health/live", verify=trusting(papers, client), trust_env=False)
        port = int(process.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            plain.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            plain.settimeout(10)
            try:
                assert b"live" not in plain.recv(4096)
            except ConnectionError:
                pass  # reset is an answer, too
        old = trusting(papers, "friend")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((httpx2.TransportError, ssl.SSLError)):
            httpx2.get(f"{process.url}/health/live", verify=old, trust_env=False)
        assert (
            httpx2.get(f"{process.url}/health/live", verify=trusting(papers, "friend"), trust_env=False).status_code
            == 200
        )


def test_the_grpc_door_asks_for_the_same_papers(tiny, papers):
    flags = ["--tls-cert", papers["server"], "--tls-key", papers["server-key"], "--tls-client-ca", papers["ca"]]
    doors = ("--transfer-backend", "zmq_to_scheduler", "--grpc-port", "0", "--forward-threads", "1")

    def pem(name: str) -> bytes:
        return papers[name].read_bytes()

    def answered(channel: grpc.Channel) -> bool:
        with channel:
            try:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                return False
        return True

    with EncoderProcess(tiny, *doors, *map(str, flags)) as process:
        target = grpc_target(process)
        known = [grpc.ssl_channel_credentials(pem("ca"), pem(f"{who}-key"), pem(who)) for who in ("friend", "stranger")]
        known.append(grpc.ssl_channel_credentials(pem("ca")))
        assert [answered(grpc.secure_channel(target, each)) for each in known] == [True, False, False]
        assert not answered(grpc.insecure_channel(target)), "nothing is taken without TLS"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "0.0.0.0"}, "give --token-file"),
        ({"host": "::"}, "give --token-file"),
        ({"host": "example.org"}, "give --token-file"),
        ({"tls_cert": "server"}, "tls_cert has no effect without tls_key"),
        ({"tls_key": "server-key"}, "tls_key has no effect without tls_cert"),
        ({"tls_client_ca": "ca"}, "tls_client_ca has no effect without tls_cert"),
        ({"host": "0.0.0.0", "tls_cert": "server", "tls_key": "server-key"}, "give --token-file"),
        ({"max_bodies_bytes": 1024}, "could never be taken"),
    ],
)
def test_doors_that_would_stand_open_are_refused_at_start_up(papers, given, words):
    with pytest.raises(StartupError, match=words) as caught:
        Settings.load(
            **{name: papers.get(value, value) if isinstance(value, str) else value for name, value in given.items()}
        )
    assert caught.value.code == "invalid_settings"


def test_a_token_or_mutual_tls_opens_the_door_to_other_hosts(papers):
    tls = {"tls_cert": papers["server"], "tls_key": papers["server-key"]}
    assert Settings.load(host="0.0.0.0", **tls, tls_client_ca=papers["ca"]).host == "0.0.0.0"
    assert Settings.load(host="::", token_file=papers["ca"]).host == "::"
    context = tls_context(Settings(**tls, tls_client_ca=papers["ca"]))
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert tls_context(Settings()) is None


def test_papers_that_cannot_be_used_are_named(papers, tmp_path):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    cases = [
        ({"tls_cert": nonsense, "tls_key": papers["server-key"]}, "tls_cert, tls_key"),
        ({"tls_cert": papers["server"], "tls_key": papers["friend-key"]}, "tls_cert, tls_key"),
        ({"tls_cert": papers["server"], "tls_key": tmp_path / "missing"}, "tls_cert, tls_key"),
        ({"tls_cert": papers["server"], "tls_key": papers["server-key"], "tls_client_ca": nonsense}, "tls_client_ca"),
    ]
    for given, words in cases:
        with pytest.raises(StartupError, match=words):
            tls_context(Settings(**given))


def test_a_new_certificate_is_in_force_without_a_restart(tmp_path, papers, caplog):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(pem: Path, private: Path) -> None:
        for source, target in ((pem, cert), (private, key)):
            fresh = tmp_path / "fresh"
            fresh.write_bytes(source.read_bytes())
            os.replace(fresh, target)

    def shown() -> bytes:
        """The certificate of a whole handshake, in memory."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
        client = client_context.wrap_bio(to_client, to_server)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for side in (client, server, client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
        return client.getpeercert(binary_form=True)

    def der(name: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert(papers[name].read_text().partition("-----END")[0] + "-----END CERTIFICATE-----")

    put(papers["server"], papers["server-key"])
    context = tls_context(Settings(tls_cert=cert, tls_key=key))
    assert context is not None
    assert shown() == der("server")
    put(papers["friend"], papers["friend-key"])
    assert shown() == der("friend")
    with caplog.at_level(logging.WARNING, "tectum.tls"):
        put(papers["server"], papers["friend-key"])
        assert shown() == der("friend"), "a certificate without its key is not taken"
    assert len(caplog.records) == 1
    cert.unlink()
    assert shown() == der("friend")
    put(papers["server"], papers["server-key"])
    assert shown() == der("server")


# --- who is called, and on whose behalf ---


def through(
    settings: Settings, headers: dict[str, str], tokens: Tokens | None = None, body: bytes | None = None
) -> tuple[int, str]:
    """The status that the guard gives, and the tenant of a request that came through it with the body's tenant `part`."""
    seen = ["", ""]

    async def app(scope, receive, send):
        seen[1] = tenants.effective("part")
        await PlainTextResponse("ok")(scope, receive, send)

    guard = Guard(
        app, settings=settings, tokens=tokens, budget=BodyBudget(1 << 20, lambda _: None), hung_up=lambda: None
    )
    transport = httpx2.ASGITransport(guard)

    async def get() -> int:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:30100") as http:
            method = "GET" if body is None else "POST"
            return (await http.request(method, "/v1/models", headers=headers, content=body)).status_code

    return asyncio.run(get()), seen[1]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:30100", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("127.8.9.1:1", 200),
        ("[::1]:30100", 200),
        ("app.localhost", 200),
        ("encoder.internal:8080", 200),
        ("evil.example:30100", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.7:30100", 403),
        ("[::1", 403),
    ],
)
def test_a_loopback_server_without_a_token_answers_only_to_its_own_names(host, status, tmp_path):
    settings = Settings(allowed_hosts="Encoder.internal, other")
    assert (through(settings, {"host": host}))[0] == status
    file = tmp_path / "tokens"
    file.write_text("secret")
    with_token = {"host": host, "authorization": "Bearer secret"}
    assert (through(settings, with_token, Tokens(file)))[0] == 200


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c"}, b"{}", 400),
        ({"connection": "Upgrade", "upgrade": "h2c"}, None, 200),
        ({"upgrade": "h2c"}, b"{}", 200),
    ],
)
def test_a_body_that_the_parser_would_skip_is_refused_in_plain_words(headers, body, status):
    assert (through(Settings(), headers, body=body))[0] == status


def test_the_tenant_is_the_tokens_own_and_else_what_a_trusted_proxy_or_the_body_says(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("proxy\nmine alice\n")
    tokens = Tokens(file)

    def tenant(token: str, header: str = "", trusted: str = "") -> str:
        headers = {"authorization": f"Bearer {token}", "x-tectum-tenant": header}
        return (through(Settings(tenant_header=trusted), headers, tokens))[1]

    assert tenant("proxy") == "part"
    assert tenant("proxy", "bob") == "part", "no header is read by default"
    assert tenant("proxy", "bob", "X-Tectum-Tenant") == "bob/part"
    assert tenant("mine", "bob", "X-Tectum-Tenant") == "alice/part"
    assert tenant("wrong") == "", "refused"


# --- tokens ---


def test_tokens_rotate_by_changing_their_file(tmp_path, caplog):
    file = tmp_path / "tokens"
    file.write_text("old\n")
    tokens = Tokens(file)

    def replace(text: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        os.replace(fresh, file)  # another inode: seen however coarse the clock of the file system is

    def valid() -> list[str]:
        return [name for name in ("old", "new", "", "other") if tokens.accept(f"Bearer {name}".encode())]

    assert valid() == ["old"]
    replace("old\n\n  new \n")
    assert valid() == ["old", "new"], "both, while callers change over"
    replace("new\n")
    assert valid() == ["new"]
    file.unlink()
    assert valid() == ["new"], "a file that is gone takes nobody's token away"
    with caplog.at_level(logging.WARNING, "tectum.http"):
        replace("\n")
        assert valid() == ["new"]
        file.write_bytes(b"\xff\xfe")
        assert valid() == ["new"]
    assert len(caplog.records) == 2
    assert not any("new" in record.getMessage() for record in caplog.records)


def test_a_token_may_belong_to_a_tenant(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("free\nmine   alice \n\tyours\tbob & sons\n")
    tokens = Tokens(file)
    assert [tokens.tenant_of(f"Bearer {name}".encode()) for name in ("free", "mine", "yours", "alice")] == [
        "", "alice", "bob & sons", None,
    ]  # fmt: skip


def test_the_name_of_the_scheme_has_no_case(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("one\n")
    tokens = Tokens(file)
    assert [tokens.accept(given) for given in (b"bearer one", b"BEARER one", b"basic YW55Om9uZQ==")] == [True] * 3
    assert [tokens.accept(given) for given in (b"Bearer ONE", b"one", b"Bearer", b"")] == [False] * 4


def test_a_token_file_without_a_token_is_refused_at_start_up(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    for path in (empty, tmp_path / "missing", tmp_path):
        with pytest.raises(StartupError, match="token_file"):
            Tokens(path)


def test_a_live_server_takes_the_new_token_and_then_refuses_the_old_one(tiny, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("one\n")
    with EncoderProcess(tiny, "--forward-threads", "1", "--host", "::1", "--token-file", str(file)) as process:
        assert process.url.startswith("http://[::1]:")

        def ask(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"}
            return httpx2.get(f"{process.url}/v1/models", headers=headers, trust_env=False).status_code

        assert (ask("one"), ask("two")) == (200, 401)
        linked = httpx2.get(f"{process.url}/errors/internal", headers={"sec-fetch-site": "cross-site"}, trust_env=False)
        assert linked.status_code == 200, "a page that is open to all is open to those who follow a link"
        file.write_text("two\nthree\n")
        assert (ask("one"), ask("two"), ask("three")) == (401, 200, 200)


# --- bodies ---


def upload(messages, settings: Settings, budget: BodyBudget):
    """An upload of these messages; after the last one nothing comes."""
    left = list(messages)
    sent = []

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    async def send(message):
        sent.append(message)

    return Upload(True, receive, send, budget, settings), sent


def piece(size: int, more: bool = True) -> dict[str, object]:
    return {"type": "http.request", "body": bytes(size), "more_body": more}


def test_every_byte_of_a_body_is_booked_and_given_back():
    budget = BodyBudget(5000, lambda error: None)
    settings = Settings(max_body_bytes=4000, max_bodies_bytes=5000)

    async def main() -> None:
        first, _ = upload([piece(2000), piece(1500, False)], settings, budget)
        with first:
            await first.receive()
            assert budget.held == 2000
            await first.receive()
            assert budget.held == 3500
            second, _ = upload([piece(1000), piece(1000)], settings, budget)
            with second:
                await second.receive()
                with pytest.raises(UnavailableError) as full:
                    await second.receive()
                assert (full.value.code, full.value.retry_after) == ("overloaded", 1.0)
            assert budget.held == 3500
        third, _ = upload([piece(4001)], settings, budget)
        with third:
            with pytest.raises(BadRequestError) as large:
                await third.receive()
            assert large.value.code == "body_too_large"

    asyncio.run(main())
    assert budget.held == 0


def test_a_body_must_keep_up_its_rate_and_what_it_sent_earns_it_time():
    budget = BodyBudget(1 << 20, lambda error: None)
    settings = Settings(body_grace=0.05, min_body_rate=10_000)

    async def main() -> float:
        made, _ = upload([piece(2000)], settings, budget)
        loop = asyncio.get_running_loop()
        with made:
            await made.receive()
            started = loop.time()
            with pytest.raises(BadRequestError) as late:
                await made.receive()
            assert (late.value.status, late.value.code) == (408, "request_timeout")
            return loop.time() - started

    assert 0.15 < asyncio.run(main()) < 2  # 0.05 s, and 0.2 s for the 2000 bytes


def test_an_answer_before_the_end_of_the_body_closes_the_connection_after_reading_on_for_a_while():
    async def main() -> list[dict[str, object]]:
        made, sent = upload([piece(10), piece(10, False)], Settings(), BodyBudget(1 << 20, lambda error: None))
        await made.send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await made.send({"type": "http.response.body", "body": b"no"})
        return sent

    start, body, last = asyncio.run(main())
    assert (b"connection", b"close") in start["headers"]
    assert (body["body"], body["more_body"]) == (b"no", True)
    assert (last["body"], last["more_body"]) == (b"", False)


# --- JSON ---

ITEM = '{"type":"image","data":"AAAA"}'


@pytest.mark.parametrize(
    ("text", "said", "item"),
    [
        ('{"items":[ITEM,{"type":"image"}]}', "items.1: exactly one of url, data and file must be given", 1),
        ('{"items":[{"type":"image","data":3}]}', "items.0.data: Expected `str | null`, got `int`", 0),
        ('{"items":[{"type":"<media>","data":"A"}]}', "items.0.type: not one of image, video, audio", 0),
        ('{"items":[ITEM],"KEY":1}', f"body: there is no field `{'k' * 40}`", None),
        ('{"items":[ITEM],"delivery":{"mode":"x"}}', "delivery.mode: not one of inline, hold, push", None),
        ('{"items":[ITEM],"part_idx":1}', "body: part_idx must be below num_parts", None),
        ('{"items":[ITEM],"num_parts":0}', "num_parts: Expected `int` >= 1", None),
        (
            '{"items":[ITEM],"options":{"a":[]}}',
            "options: Expected `bool | int | float | str | null`, got `array`",
            None,
        ),
        ('{"items":[ITEM],"options":{"a":9007199254740993}}', "options: Expected `int` <= 9007199254740992", None),
        ('{"items":[ITEM]', "The body is not valid JSON in UTF-8", None),
    ],
)
def test_what_is_wrong_with_a_body_is_said_without_its_values(text, said, item):
    with pytest.raises(BadRequestError) as caught:
        decode_encode_body(text.replace("ITEM", ITEM).replace("KEY", "k" * 90), Settings())
    assert (caught.value.message, caught.value.item) == (said, item)


def test_json_that_could_not_be_an_encode_request_is_not_decoded():
    settings = Settings(max_items=1)
    dense = '{"items":[' + ",".join([ITEM] * 300) + "]}"
    with pytest.raises(BadRequestError) as caught:
        decode_encode_body(dense, settings)
    assert caught.value.code == "request_too_large"
    assert len(decode_encode_body(dense, Settings(max_items=64)).items) == 300  # `to_request` counts them


# --- logs ---


def logged(message: str, *arguments: object, error: Exception | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    return Scrubbed("%(levelname)s %(message)s").format(
        logging.LogRecord("x", logging.ERROR, __file__, 1, message, arguments, info)
    )


def test_a_log_line_holds_no_media_no_secrets_and_no_second_line():
    line = logged("fetching %s\nERROR forged %s", "https://u:p@h/a?sig=abc", "data:image/png;base64," + "QUJD" * 1000)
    assert line == "ERROR fetching https://h/a?… ERROR forged data:…"
    assert len(logged("%s", "a b " * 10_000)) < MAX_LINE + 20


def test_a_traceback_keeps_where_and_loses_what():
    def fail() -> None:
        raise ValueError("cannot read " + "QUJD" * 100 + " at <object at 0x7f00deadbeef>")

    try:
        fail()
    except ValueError as error:
        text = logged("a defect", error=error)
    assert "test_doors.fail:" in text
    assert text.endswith("ValueError: cannot read QUJDQUJDQUJDQUJD… at <object at 0x…>")
    assert str(Path(__file__).parent) not in text


def test_a_tls_handshake_that_never_ends_is_cut(tiny, papers):
    flags = ["--tls-cert", papers["server"], "--tls-key", papers["server-key"], "--head-timeout", "1"]
    with EncoderProcess(tiny, "--forward-threads", "1", *map(str, flags)) as process:
        with socket.create_connection(("127.0.0.1", int(process.url.rsplit(":", 1)[1])), 10) as silent:
            silent.settimeout(10)  # uvicorn's own limit is a minute
            assert silent.recv(1) == b""
        assert httpx2.get(f"{process.url}/health/live", verify=trusting(papers), trust_env=False).status_code == 200


def test_a_connection_that_was_never_used_is_no_refusal(tiny):
    """One is opened and left, one sends half a head: both are closed in time, and the second alone counts."""
    with EncoderProcess(tiny, "--forward-threads", "1", "--head-timeout", "1") as process:
        address = ("127.0.0.1", int(process.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, 10) as unused, socket.create_connection(address, 10) as slow:
            slow.sendall(b"GET /health/live HTTP/1.1\r\n")
            assert unused.recv(1) == b""
            assert slow.recv(12) == b"HTTP/1.1 408"
        metrics = httpx2.get(f"{process.url}/metrics", trust_env=False).text
        assert 'encoder_refusals_total{code="request_timeout"} 1.0' in metrics
