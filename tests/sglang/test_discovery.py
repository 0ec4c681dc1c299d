"""Discovery: leases by the clock of the test, then real servers that come, go, and come back."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
import pytest

from tectum.config import Settings
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import StartupError
from tectum.serving.discovery import MISSES, Registry, bootstrap_urls
from tests.serving.test_native import until
from tests.sglang.conftest import FLAGS


def test_a_lease_ends_unless_it_is_renewed():
    registry = Registry(lease=30)
    registry.register("http://a", 0)
    registry.register("http://b", 10)
    assert registry.listed(29) == ["http://a", "http://b"]
    registry.register("http://a", 29)
    assert registry.listed(40) == ["http://a"]
    registry.probed("http://a", True, 50)
    assert registry.listed(79) == ["http://a"]
    assert registry.listed(80) == []
    assert registry.all(80) == []


def test_an_encoder_that_misses_probes_is_not_listed_until_it_is_well():
    registry = Registry(lease=1000)
    registry.register("http://a", 0)
    for number in range(MISSES):
        assert registry.listed(number) == ["http://a"]
        registry.probed("http://a", False, number)
    assert registry.listed(10) == []
    registry.register("http://a", 11)  # its own word does not make it well
    assert registry.listed(11) == []
    registry.probed("http://a", True, 12)
    assert registry.listed(12) == ["http://a"]


def test_one_that_was_taken_out_stays_out():
    registry = Registry(lease=30)
    registry.register("http://a", 0)
    registry.unregister("http://a")
    registry.unregister("http://a")
    registry.probed("http://a", True, 1)
    assert registry.all(1) == []


@contextmanager
def bootstrap(port: int = 0, *flags: str) -> Iterator[str]:
    """`tectum bootstrap` as a process; its URL."""
    command = [sys.executable, "-m", "tectum", "bootstrap", "--port", str(port), "--probe-interval", "0.2", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"})
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in process.stderr], daemon=True).start()
    try:
        line = lines.get(timeout=60)
        assert line.startswith("bootstrap on "), line
        yield line.removeprefix("bootstrap on ").strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def listed(url: str, **how) -> list[str]:
    return httpx2.get(f"{url}/list_encoder_urls", **how).json()["encoder_urls"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_an_encoder_is_found_found_again_and_gone(tiny):
    port = free_port()
    flags = (*FLAGS, "--encoder-register-urls", f"http://127.0.0.1:{port}", "--register-interval", "0.2")
    with EncoderProcess(tiny, *flags) as encoder:
        for _ in range(2):  # the server comes after the encoder, and is restarted: it forgets everything
            with bootstrap(port) as url:
                until(lambda url=url: listed(url) == [encoder.url])
        with bootstrap(port) as url:
            until(lambda: listed(url) == [encoder.url])
            started = time.monotonic()
            assert encoder.stop() == 0
            assert listed(url) == []  # taken out as it drained, not when its lease ends
            assert time.monotonic() - started < 15


def test_an_encoder_that_dies_is_not_listed_any_more(tiny):
    with bootstrap() as url:
        flags = (*FLAGS, "--encoder-register-urls", url, "--register-interval", "0.2")
        with EncoderProcess(tiny, *flags) as encoder:
            until(lambda: listed(url) == [encoder.url])
            os.kill(encoder.pid, signal.SIGKILL)
            until(lambda: listed(url) == [])


@contextmanager
def endless(pace: float) -> Iterator[str]:
    """A server whose answer to its first call begins well, and never ends: a byte each `pace` seconds. Its URL."""
    over = threading.Event()

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while not over.wait(pace):
                connection.sendall(b"1\r\nx\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()


def test_an_encoder_whose_answer_never_ends_holds_no_probe_of_another_up():
    with bootstrap() as url, endless(pace=0.1) as strange:
        dead = f"http://127.0.0.1:{free_port()}"
        for encoder in (strange, dead):
            httpx2.post(f"{url}/register_encoder_url", json={"url": encoder}).raise_for_status()
        assert dead in listed(url)
        until(lambda: dead not in listed(url))


def test_the_advertised_url_is_registered_and_its_secret_is_not_logged(tiny):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://any:boot@127.0.0.1:{server.getsockname()[1]}"
        flags = ("--encoder-register-urls", url, "--advertise-url", "http://any:sesame@encoder-0:30100")
        with EncoderProcess(tiny, *FLAGS, *flags) as encoder:
            server.settimeout(20)
            connection, _ = server.accept()
            with connection:
                asked = connection.recv(65536)
                while b"}" not in asked:
                    asked += connection.recv(65536)
                connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
            assert asked.startswith(b"POST /register_encoder_url ")
            assert b'{"url":"http://any:sesame@encoder-0:30100"}' in asked
            until(lambda: any("not registered (status 500)" in line for line in encoder.lines))
            assert not any("sesame" in line or "boot@" in line for line in encoder.lines)


def test_a_token_guards_the_list(tiny, tmp_path):
    token = tmp_path / "token"
    token.write_text("sesame\n")
    with bootstrap(0, "--token-file", str(token)) as url:
        for method, path in (
            ("POST", "/register_encoder_url"),
            ("DELETE", "/unregister_encoder_url"),
            ("GET", "/list_encoder_urls"),
        ):
            assert httpx2.request(method, url + path, json={"url": "http://a:1"}).status_code == 401
        assert httpx2.get(f"{url}/health").status_code == 200
        known = ("--encoder-register-urls", url, "--encoder-register-token-file", str(token))
        with EncoderProcess(tiny, *FLAGS, *known, "--register-interval", "0.2") as encoder:
            until(lambda: listed(url, headers={"authorization": "Bearer sesame"}) == [encoder.url])


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"url": ""}', b'{"url": 7}', b'{"url": "ftp://a"}', b'{"url": "http://"}']
)
def test_what_is_no_encoder_is_refused(body):
    with bootstrap() as url:
        for method, path in (("POST", "/register_encoder_url"), ("DELETE", "/unregister_encoder_url")):
            answer = httpx2.request(method, url + path, content=body)
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    "settings",
    [
        {"encoder_register_urls": "prefill:8997"},
        {"encoder_register_urls": "http://a:1,ftp://b"},
        {"encoder_register_urls": "http://a:1", "host": "0.0.0.0", "token_file": "/nothing"},
    ],
)
def test_wrong_settings_are_refused_at_start_up(settings):
    with pytest.raises(StartupError) as caught:
        bootstrap_urls(Settings.load(transfer_backend="zmq_to_scheduler", **settings))
    assert caught.value.code == "invalid_settings"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bootstrap_server_ends_well_and_has_no_page_of_other_hosts(number):
    command = [sys.executable, "-m", "tectum", "bootstrap", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().removeprefix("bootstrap on ").strip()
        pages = [httpx2.get(url + path).status_code for path in ("/docs", "/redoc", "/health")]
        process.send_signal(number)
    assert (pages, process.returncode) == ([404, 404, 200], 0)


def test_a_bootstrap_server_reads_no_more_of_a_head_than_a_call_needs():
    with bootstrap() as url:
        answer = httpx2.get(f"{url}/health", headers={"x-long": "x" * 20_000})
        assert (answer.status_code, answer.json()["code"]) == (431, "head_too_large")
        assert httpx2.get(f"{url}/health").status_code == 200


def test_a_page_of_another_site_registers_no_encoder():
    with bootstrap() as url:
        for headers in ({"origin": "https://elsewhere.example"}, {"host": "elsewhere.example"}):
            answer = httpx2.post(f"{url}/register_encoder_url", json={"url": "http://a:1"}, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "cross_site")
        assert listed(url) == []


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_bootstrap_server_reads_no_more_of_a_body_than_a_call_needs(method):
    path = {"POST": "/register_encoder_url", "DELETE": "/unregister_encoder_url"}[method]
    with bootstrap() as url:
        long = b'{"url": "http://a:1"}'.ljust(5000)
        for content in (long, iter([long[:2500], long[2500:]])):  # of a declared size, and in chunks
            answer = httpx2.request(method, url + path, content=content)
            assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        assert httpx2.request(method, url + path, content=iter([b'{"url": ', b'"http://a:1"}'])).status_code == 200


def test_a_bootstrap_server_for_others_needs_a_token():
    done = subprocess.run(
        [sys.executable, "-m", "tectum", "bootstrap", "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "--token-file" in done.stderr) == (2, True)
