"""Where SGLang's own encoder (0.5.23) falls short: eleven points, each a test that it would fail."""

from __future__ import annotations

import functools
import http.server
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import torch

from tectum.demo.encoder_process import EncoderProcess
from tests.serving.test_native import jpeg, nothing_is_held, until
from tests.sglang.conftest import FLAGS
from tests.sglang.language_server import LanguageServer
from tests.sglang.receiver import Receiver


@contextmanager
def running(
    tiny: Path, *flags: str, headers: dict[str, str] | None = None
) -> Iterator[tuple[EncoderProcess, LanguageServer]]:
    with EncoderProcess(tiny, *FLAGS, *flags) as process, LanguageServer(process.url, headers=headers) as server:
        yield process, server


def free_addresses(number: int) -> list[str]:
    """Addresses where nobody listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def test_1_a_second_request_under_the_same_id_gets_its_embedding_too(server, encoder_a, colocated):
    picture = jpeg(448, 448, 1)
    with Receiver() as one, Receiver() as two:
        first = server.post_later("/encode", server.part("same", [picture], embedding_port=one.port))
        second = server.post_later("/encode", server.part("same", [picture], embedding_port=two.port))
        for receiver in (one, two):
            assert torch.equal(receiver.rows("same")[0], colocated([picture]))
        assert (first.result(20).status_code, second.result(20).status_code) == (200, 200)
    until(lambda: nothing_is_held(encoder_a))


def test_1_other_content_under_a_live_id_is_refused_and_harms_nobody(server, colocated):
    picture = jpeg(448, 448, 2)
    with Receiver() as receiver:
        first = server.encode("other", [picture])
        until(
            lambda: (
                server.post("/scheduler_receive_meta_data", {"req_id": "other_local_part_0", "part_idx": 0}).is_success
            )
        )
        (second,) = server.encode("other", [jpeg(448, 448, 3)])
        assert (second.result(20).status_code, second.result().json()["code"]) == (409, "request_conflict")
        server.register("other", [picture], receiver)
        assert torch.equal(receiver.rows("other")[0], colocated([picture]))
        assert first[0].result(20).status_code == 200


def test_2_forty_dead_receivers_do_not_delay_a_healthy_one(server, encoder_a):
    dead = [
        server.post_later("/encode", server.part(f"dead{i}", [jpeg()], embedding_port=int(address.rsplit(":")[-1])))
        for i, address in enumerate(free_addresses(40))
    ]
    until(lambda: _staged(encoder_a) >= 40)  # all of them wait for somebody who is not there
    with Receiver() as receiver:
        (answer,) = server.encode("alive", [jpeg()], embedding_port=receiver.port)
        receiver.rows("alive")
        assert answer.result(20).status_code == 200
        assert not any(answer.done() for answer in dead)  # each of them still waits for its own time-out
    assert {answer.result(20).status_code for answer in dead} == {504}
    until(lambda: nothing_is_held(encoder_a))


def _staged(encoder: EncoderProcess) -> float:
    text = httpx2.get(f"{encoder.url}/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("encoder_live_requests "))


def test_3_a_busy_encoder_answers_its_health_probe(server, encoder_a):
    """The language server gives a probe 2 s, and evicts an encoder that misses three."""
    with Receiver() as receiver:
        pictures = [jpeg(448, 448, i) for i in range(16)]
        load = [server.encode(f"load{i}", pictures, embedding_port=receiver.port)[0] for i in range(6)]
        waits = []
        while not all(answer.done() for answer in load):
            started = time.monotonic()
            assert httpx2.get(encoder_a.url + "/health", timeout=2).status_code == 200
            waits.append(time.monotonic() - started)
    assert len(waits) >= 10
    assert max(waits) < 1.0
    assert statistics.median(waits) < 0.2


class _Slow(http.server.BaseHTTPRequestHandler):
    release = threading.Event()
    asked = threading.Event()

    def do_GET(self) -> None:
        type(self).asked.set()
        type(self).release.wait(20)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(jpeg())

    def log_message(self, *arguments: object) -> None:
        pass


def test_4_an_inline_picture_does_not_wait_behind_a_slow_url(server):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as other, Receiver() as receiver:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}/slow.jpg"
        (slow,) = server.encode("slow", [url], embedding_port=receiver.port)
        assert _Slow.asked.wait(10)
        (quick,) = server.encode("quick", [jpeg()], embedding_port=receiver.port)
        assert quick.result(10).status_code == 200
        assert not slow.done()
        _Slow.release.set()
        assert slow.result(20).status_code == 200
        other.shutdown()


def test_5_one_bad_item_does_not_fail_its_neighbours_nor_show_them_its_text(tiny, colocated):
    with running(tiny, "--fuse", "on") as (_, server), Receiver() as receiver:
        good = {f"good{i}": [jpeg(224, 224, i)] for i in range(6)}
        secret = "/home/somebody/private.jpg"
        with ThreadPoolExecutor(8) as threads:
            bad = threads.submit(server.post, "/encode", server.part("bad", [secret], embedding_port=receiver.port))
            answers = [server.encode(rid, items, embedding_port=receiver.port)[0] for rid, items in good.items()]
        for _ in range(len(good) + 1):
            message, rows = receiver.message()
            if rows is None:
                assert (message.req_id, message.error_code) == ("bad_local_part_0", 400)
                assert "private" not in message.error_msg
            else:
                torch.testing.assert_close(rows, colocated(good[message.req_id.removesuffix("_local_part_0")]))
        assert {answer.result(20).status_code for answer in answers} == {200}
        assert bad.result(20).status_code == 400
        assert "private" not in bad.result().text


def test_6_three_megabytes_of_nonsense_come_back_nowhere(server):
    nonsense = "data:image/png;base64," + "%%%!" * 750_000
    with Receiver() as receiver:
        (answer,) = server.encode("nonsense", [nonsense], embedding_port=receiver.port)
        assert answer.result(20).status_code in (400, 413)
        assert len(answer.result().content) < 1024
        assert "%%!" not in answer.result().text
        assert receiver.socket.poll(10_000)
        (frame,) = receiver.socket.recv_multipart()
        assert len(frame) < 1024
        assert b"%%!" not in frame


@pytest.fixture(scope="module")
def guarded(tiny, tmp_path_factory):
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("sesame\n")
    with EncoderProcess(tiny, *FLAGS, "--token-file", str(token), "--receiver-networks", "127.0.0.0/8") as process:
        yield process


def test_7_nobody_without_the_token_gets_anything(guarded):
    with LanguageServer(guarded.url) as nobody, Receiver() as receiver:
        for path, body in (
            ("/encode", nobody.part("r", [jpeg()], embedding_port=receiver.port)),
            ("/scheduler_receive_url", nobody.registration("r", receiver)),
            ("/scheduler_receive_meta_data", {"req_id": "r_local_part_0", "part_idx": 0}),
            ("/send", {"req_id": "r_local_part_0", "prefill_host": "127.0.0.1", "embedding_port": receiver.port}),
        ):
            answer = nobody.post(path, body)
            assert (answer.status_code, answer.json()["status"], answer.json()["code"]) == (
                401,
                "error",
                "unauthorized",
            )
        assert httpx2.get(guarded.url + "/health").status_code == 200  # a probe needs no secret
        assert receiver.is_silent()


@pytest.mark.parametrize("form", ["header", "url"])
def test_7_the_token_goes_in_a_header_or_in_the_url_that_sglang_is_given(guarded, form):
    url = guarded.url if form == "header" else guarded.url.replace("http://", "http://any:sesame@")
    headers = {"authorization": "Bearer sesame"} if form == "header" else None
    with LanguageServer(url, headers=headers) as server, Receiver() as receiver:
        (answer,) = server.encode(f"token-{form}", [jpeg()], embedding_port=receiver.port)
        assert answer.result(20).status_code == 200
        receiver.rows(f"token-{form}")


def test_7_rows_leave_for_allowed_networks_only(guarded):
    with LanguageServer(guarded.url, headers={"authorization": "Bearer sesame"}) as server:
        for address in ("192.0.2.1:5000", "[2001:db8::1]:5000"):
            answer = server.post("/scheduler_receive_url", server.registration("away", address))
            assert (answer.status_code, "--receiver-networks" in answer.json()["message"]) == (400, True)
        answer = server.post("/encode", server.part("away", [jpeg()], prefill_host="192.0.2.1", embedding_port=5000))
        assert answer.status_code == 400


@pytest.mark.parametrize("source", ["file:///etc/hostname", "/etc/hostname.png", "file:///proc/self/environ"])
def test_7_files_of_the_server_are_not_read(server, source):
    answer = server.post("/encode", server.part("file", [source], embedding_port=9))
    assert (answer.status_code, answer.json()["code"]) == (400, "url_refused")


def test_8_departed_receivers_leave_no_descriptor_behind(server, encoder_a):
    def descriptors() -> int:
        return len(list(Path(f"/proc/{encoder_a.pid}/fd").iterdir()))

    with Receiver() as receiver:
        server.encode("warm", [jpeg()], embedding_port=receiver.port)[0].result(20)
    until(lambda: nothing_is_held(encoder_a))
    before = descriptors()
    for number in range(40):
        with Receiver() as receiver:
            (answer,) = server.encode(f"gone{number}", [jpeg(56, 56)], embedding_port=receiver.port)
            receiver.rows(f"gone{number}")
        assert answer.result(20).status_code == 200
    until(lambda: descriptors() <= before + 2)


def test_9_nothing_listens_for_pickles(encoder_a):
    """SGLang's receiver allocates 2 GiB for 32 bytes. Tectum takes bytes from strangers at its HTTP port, and no other."""
    inodes = {link.readlink().name for link in Path(f"/proc/{encoder_a.pid}/fd").iterdir() if link.is_symlink()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{encoder_a.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    assert ports == {int(encoder_a.url.rsplit(":", 1)[1])}


def test_9_thirty_two_bytes_cost_nothing(server, encoder_a):
    before = _resident(encoder_a.pid)
    bomb = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x80\x00\x85R."
    for path in ("/encode", "/send", "/scheduler_receive_url", "/scheduler_receive_meta_data"):
        assert server._http.post(encoder_a.url + path, content=bomb).status_code == 400
    assert _resident(encoder_a.pid) - before < 64 * 1024 * 1024


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_10_an_unknown_id_is_not_held_for_long(server):
    with Receiver() as receiver:
        for path, body in (
            ("/scheduler_receive_url", server.registration("never", receiver)),
            ("/scheduler_receive_meta_data", {"req_id": "never_local_part_0", "part_idx": 0}),
            ("/send", {"req_id": "never_local_part_0", "prefill_host": "127.0.0.1", "embedding_port": receiver.port}),
        ):
            started = time.monotonic()
            answer = server.post(path, body)
            assert (answer.status_code, answer.json()["code"]) == (404, "request_not_found")
            assert time.monotonic() - started < 2.0  # --unknown-id-wait is 0.5 here, 5 by default


def test_11_more_than_there_is_room_for_is_refused_at_once(tiny):
    with running(tiny, "--max-live-requests", "2") as (_, server):
        for rid in ("live0", "live1"):
            server.encode(rid, [jpeg()])
            until(functools.partial(_metadata, server, rid))
        answer = server.post("/encode", server.part("more", [jpeg()]))
        assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        for rid in ("live0", "live1"):
            httpx2.delete(f"{server._urls[0]}/v1/requests/{rid}_local_part_0")


def _metadata(server: LanguageServer, rid: str) -> bool:
    return server.post("/scheduler_receive_meta_data", {"req_id": f"{rid}_local_part_0", "part_idx": 0}).is_success


def test_11_a_request_may_carry_a_deadline(server):
    answer = server.post("/encode", server.part("late", [jpeg()], deadline_ms=300))  # nobody registers for it
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")


def test_11_a_send_after_the_release_says_why(server, encoder_a):
    with Receiver() as receiver:
        send = {"prefill_host": "127.0.0.1", "embedding_port": receiver.port}
        (answer,) = server.encode("served", [jpeg()], embedding_port=receiver.port)
        assert answer.result(20).status_code == 200
        late = server.post("/send", {"req_id": "served_local_part_0", **send})
        assert (late.status_code, late.json()["code"], late.json()["reason"]) == (410, "request_released", "delivered")
        assert "encode again" in late.json()["message"]
        assert late.json()["req_id"] == "served_local_part_0"
        server.encode("dropped", [jpeg()])
        until(lambda: _metadata(server, "dropped"))
        httpx2.delete(f"{encoder_a.url}/v1/requests/dropped_local_part_0")
        late = server.post("/send", {"req_id": "dropped_local_part_0", **send})
        assert (late.status_code, late.json()["reason"]) == (410, "client_release")
