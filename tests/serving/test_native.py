"""The native door, as a caller sees it: a real server process, over loopback."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import struct
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import torch
from PIL import Image

from tectum import AsyncClient, Client, Encoder
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import BadRequestError, LifecycleError, TectumError, UnavailableError
from tests import zoo


def jpeg(width: int = 224, height: int = 224, seed: int = 0) -> bytes:
    file = io.BytesIO()
    zoo.picture(width, height, seed).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.fixture(scope="module")
def client(server):
    with Client(server.url) as made:
        yield made


@pytest.fixture(scope="module")
def encoder(tiny):
    with Encoder(str(tiny), forward_threads=1) as made:
        yield made


def post(server, body, **how):
    return httpx2.post(f"{server.url}/v1/encode", content=body if isinstance(body, bytes) else json.dumps(body), **how)


def gauges(server) -> dict[str, float]:
    text = httpx2.get(f"{server.url}/metrics").text
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}


def nothing_is_held(server) -> bool:
    now = gauges(server)
    return now["encoder_live_requests"] == now["encoder_staged_bytes"] == now["encoder_queued_patches"] == 0


def refusals(server) -> float:
    """Requests that were refused so far, whatever for."""
    return sum(count for name, count in gauges(server).items() if name.startswith("encoder_refusals_total"))


def until(condition, seconds: float = 10.0) -> None:
    """Poll a condition of another process; there is nothing else to wait on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "body",
    [
        {"content": b"{"},
        {"content": b'{"items": []}'},
        {"data": {"request": '{"items": [{"type": "image", "file": "lost"}]}'}, "files": {"photo": b""}},
        {"content": b"", "headers": {"content-type": "multipart/form-data"}},
    ],
    ids=["no JSON", "no items", "no such part", "no boundary"],
)
def test_what_the_door_cannot_read_is_counted_once(server, body):
    before = refusals(server)
    assert httpx2.post(f"{server.url}/v1/encode", **body).status_code == 400
    assert refusals(server) == before + 1


def test_server_client_and_encoder_give_the_same_rows(server, client, encoder):
    pictures = [jpeg(224, 224, 1), jpeg(300, 140, 2), zoo.picture(80, 60, 3)]
    there, here = client.encode(pictures), encoder.encode(pictures)

    async def awaiting():
        async with AsyncClient(server.url) as asynchronous:
            return await asynchronous.encode(pictures), await encoder.aencode(pictures)

    for other in (here, *asyncio.run(awaiting())):
        assert torch.equal(there.rows, other.rows)
        assert (there.item_rows, there.grid_thw, there.dtype) == (other.item_rows, other.grid_thw, other.dtype)
    assert there.item_rows == (64, 55, 6)
    assert there.width == 64


def test_json_multipart_and_data_uri_are_one_request(server):
    raw = jpeg()
    text = base64.b64encode(raw).decode()
    forms = [
        {"items": [{"type": "image", "data": text}]},
        {"items": [{"type": "image", "url": f"data:image/jpeg;base64,{text}"}]},
    ]
    answers = [post(server, form) for form in forms]
    parts = {"request": (None, json.dumps({"items": [{"type": "image", "file": "f"}]})), "f": ("f", raw)}
    answers.append(httpx2.post(f"{server.url}/v1/encode", files=parts))
    from tectum.delivery import wire

    rows = [wire.unpack(answer.content).rows for answer in answers]
    assert all(answer.headers["content-type"] == "application/x-safetensors" for answer in answers)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_hold_metadata_pull_release(server, client):
    metadata = client.hold(jpeg(), req_id="held")
    assert (metadata["rows"], metadata["width"], metadata["bytes"]) == (64, 64, 64 * 64 * 4)
    held = client.status("held")
    assert (held["state"], held["age_s"]) == ("staged", round(held["age_s"], 3))
    assert client.metadata("held")["grid_thw"] == [[1, 16, 16]]
    assert torch.equal(client.embedding("held").rows, client.encode(jpeg()).rows)
    assert client.status("held")["reason"] == "pulled"
    with pytest.raises(LifecycleError) as again:
        client.embedding("held")
    assert (again.value.status, again.value.details["reason"]) == (410, "pulled")
    client.hold(jpeg(), req_id="dropped")
    assert client.release("dropped")["reason"] == "client_release"
    assert client.release("dropped")["reason"] == "client_release", "idempotent"
    assert nothing_is_held(server)


def test_options_reach_the_processor(client):
    assert client.encode(jpeg(), options={"max_pixels": 112 * 112}).rows.shape[0] == 16


BAD = [
    ({"items": []}, 400, "invalid_request", None),
    ({}, 400, "invalid_request", None),
    ({"items": [{"type": "image"}]}, 400, "invalid_request", 0),
    ({"items": [{"type": "image", "url": "http://a/", "data": "x"}]}, 400, "invalid_request", 0),
    ({"items": [{"type": "picture", "data": "x"}]}, 400, "invalid_request", 0),
    ({"items": [{"type": "image", "data": "AAAA"}], "surprise": 1}, 400, "invalid_request", None),
    ({"items": [{"type": "image", "data": "AAAA"}], "num_parts": 2, "part_idx": 2}, 400, "invalid_request", None),
    ({"items": [{"type": "image", "data": "AAAA"}], "deadline_ms": 0}, 400, "invalid_request", None),
    ({"items": [{"type": "image", "data": "AAAA"}], "req_id": "x" * 257}, 400, "invalid_request", None),
    ({"items": [{"type": "image", "file": "f"}]}, 400, "invalid_request", 0),
    ({"items": [{"type": "image", "data": "AAAA"}, {"type": "audio", "data": "AAAA"}]}, 400, "mixed_modalities", None),
    ({"items": [{"type": "audio", "data": "AAAA"}]}, 400, "unsupported_modality", None),
    ({"items": [{"type": "image", "data": "not!!base64"}]}, 400, "invalid_base64", 0),
    ({"items": [{"type": "image", "url": "data:image/png;base64"}]}, 400, "invalid_data_uri", 0),
    ({"items": [{"type": "image", "url": "file:///etc/passwd"}]}, 400, "url_refused", 0),
    ({"items": [{"type": "image", "url": "http://169.254.169.254/"}]}, 400, "url_refused", 0),
    ({"items": [{"type": "image", "data": "bm90aGluZyBhdCBhbGw="}]}, 415, "unsupported_media", 0),
    (b"{", 400, "invalid_request", None),
    (b"\x80\x04\x95.", 400, "invalid_request", None),
]


@pytest.mark.parametrize(("body", "status", "code", "item"), BAD, ids=[f"{i}-{case[2]}" for i, case in enumerate(BAD)])
def test_bad_input_gets_a_clear_error_and_leaves_nothing(server, client, body, status, code, item):
    answer = post(server, body)
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["code"], problem.get("item")) == (status, code, item)
    assert len(problem["detail"]) <= 200
    assert len(answer.content) <= 1024
    page = httpx2.get(server.url + problem["type"])
    assert page.status_code == 200, "the problem's type leads to its page"
    assert code in page.text
    assert nothing_is_held(server)
    assert client.encode(jpeg(64, 64)).rows.shape[0] == 4


def test_the_item_at_fault_is_named_and_its_neighbours_are_not_blamed(client):
    with pytest.raises(BadRequestError) as caught:
        client.encode([jpeg(), jpeg(seed=1)[:-200], jpeg(seed=2)])
    assert (caught.value.code, caught.value.item) == ("media_decode_failed", 1)


def test_a_bomb_is_refused_before_it_is_decoded(client):
    file = io.BytesIO()
    Image.new("1", (14000, 14000)).save(file, "PNG")
    with pytest.raises(BadRequestError) as caught:
        client.encode(file.getvalue())
    assert (caught.value.status, caught.value.code) == (413, "image_too_large")


def test_three_megabytes_of_nonsense_are_not_echoed(server):
    answer = post(server, {"items": [{"type": "image", "data": "!" * 3_000_000}]})
    assert answer.status_code == 400
    assert len(answer.content) < 1024
    assert "!!!!" not in answer.text


@pytest.mark.parametrize("kind", ["live", "ready", "progress", ""])
def test_a_probe_may_ask_for_the_head_alone(server, kind):
    """As GET answers, without the body; on a connection that goes on."""
    path = f"/health/{kind}".rstrip("/")
    with httpx2.Client(base_url=server.url) as client:
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert {**head.headers} == {**get.headers}
        assert int(head.headers["content-length"]) > 0
    assert not any("head" in methods for methods in httpx2.get(f"{server.url}/openapi.json").json()["paths"].values())


@pytest.mark.parametrize("modality", ["smell", "", None, "IMAGE"])
def test_a_modality_that_is_none_is_refused_before_anything_is_sent(modality):
    with Client("http://127.0.0.1:9") as client, pytest.raises(BadRequestError) as caught:
        client.encode(jpeg(), modality=modality)
    assert caught.value.code == "unsupported_modality"
    assert caught.value.message == f"{str(modality)!r} is no modality; there are image, video, audio"


def test_who_wants_content_keys_is_not_joined_to_who_does_not(server):
    body = {"req_id": "keys", "items": [{"type": "image", "data": base64.b64encode(jpeg()).decode()}]}
    body["delivery"] = {"mode": "hold"}
    assert "content_keys" not in post(server, body).json()
    conflict = post(server, {**body, "content_keys": True})
    assert (conflict.status_code, conflict.json()["code"]) == (409, "request_conflict")
    httpx2.delete(f"{server.url}/v1/requests/keys").raise_for_status()
    assert post(server, {**body, "req_id": "keys-too", "content_keys": True}).json()["content_keys"]
    httpx2.delete(f"{server.url}/v1/requests/keys-too").raise_for_status()


def test_unknown_and_never_seen(server, client):
    assert httpx2.get(f"{server.url}/nothing").json()["code"] == "not_found"
    assert httpx2.put(f"{server.url}/v1/encode").json()["code"] == "method_not_allowed"
    for ask in (client.status, client.embedding, client.metadata):
        with pytest.raises(LifecycleError) as caught:
            ask("never-seen")
        assert caught.value.status == 404


def test_metadata_waits_for_a_request_that_is_yet_to_come(server, client):
    answers = []
    with Client(server.url) as other:
        waiting = threading.Thread(target=lambda: answers.append(other.metadata("to-come", wait=10)))
        waiting.start()
        client.hold(jpeg(), req_id="to-come")
        waiting.join(20)
    assert answers[0]["rows"] == 64
    client.release("to-come")


@pytest.mark.parametrize("req_id", ["a/b", "..", "x" * 257, "ünïcode", "a b"])
def test_ids_that_cannot_stand_in_a_url_are_refused_everywhere(server, req_id):
    answer = post(server, {"items": [{"type": "image", "data": "AAAA"}], "req_id": req_id})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    for method in ("GET", "DELETE"):
        answer = httpx2.request(method, f"{server.url}/v1/requests/{req_id}")
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1024


def test_a_million_wrong_items_are_refused_at_once(server):
    body = b'{"items":[' + b"1," * 1_000_000 + b"1]}"
    started = time.monotonic()
    answer = post(server, body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert time.monotonic() - started < 2.0  # it took seven seconds and two gigabytes to list every error


def test_a_gateways_own_error_form_is_still_a_tectum_error():
    error = TectumError.from_problem({"code": 503, "message": "upstream", "self": 1, "status": 503})
    assert (error.code, error.status) == ("internal", 503)


def test_equal_ids_at_once_join_or_conflict(server, client):
    big = jpeg(448, 448, 5)
    before = gauges(server).get('encoder_refusals_total{code="request_conflict"}', 0)
    outcomes: list[object] = []

    def call(picture):
        with Client(server.url) as own:
            try:
                outcomes.append(own.encode(picture, req_id="twice").rows)
            except LifecycleError as error:
                outcomes.append(error.status)

    threads = [threading.Thread(target=call, args=(picture,)) for picture in (big, big, jpeg(448, 448, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = {True: client.encode(big).rows, False: client.encode(jpeg(448, 448, 6)).rows}
    conflicts = sum(isinstance(outcome, int) for outcome in outcomes)
    assert gauges(server).get('encoder_refusals_total{code="request_conflict"}', 0) - before == conflicts
    for outcome in outcomes:
        assert isinstance(outcome, int) or any(torch.equal(outcome, rows) for rows in expected.values())
    assert nothing_is_held(server)


def test_a_caller_that_hangs_up_is_noticed(server, client):
    before = gauges(server).get('encoder_releases_total{reason="client_abort"}', 0)
    address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
    body = json.dumps(
        {"items": [{"type": "image", "data": base64.b64encode(jpeg(448, 448, i)).decode()} for i in range(8)]}
    )
    head = f"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(address) as connection:
            connection.sendall(head.encode() + body.encode())
    until(lambda: gauges(server).get('encoder_releases_total{reason="client_abort"}', 0) == before + 5)
    until(lambda: nothing_is_held(server))
    assert client.encode(jpeg()).rows.shape[0] == 64


@pytest.mark.parametrize("read", [0, 100, 20_000])
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_rows_that_did_not_arrive_can_be_pulled_again(server, client, read, reset):
    """Half a megabyte fits our kernel's buffers and not the puller's: what we got rid of has not arrived."""
    pictures = [jpeg(448, 448, seed) for seed in range(8)]
    client.hold(pictures, req_id="again")
    with socket.socket() as puller:
        puller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        puller.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
        puller.sendall(b"GET /v1/requests/again/embedding HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = len(puller.recv(1))
        while got < read:
            got += len(puller.recv(read - got))
        if reset:
            puller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert torch.equal(client.embedding("again").rows, client.encode(pictures).rows)
    until(lambda: nothing_is_held(server))


def test_a_puller_that_reads_all_and_closes_at_once_has_its_rows(server, client):
    """Also one that the kernel hands them out to bit by bit."""
    pictures = [jpeg(448, 448, seed) for seed in range(8)]
    for number in range(20):
        client.hold(pictures, req_id=f"quick-{number}")
        with socket.socket() as puller:
            if number % 2:
                puller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            puller.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
            path = f"/v1/requests/quick-{number}/embedding"
            puller.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head, _, body = puller.recv(65536).partition(b"\r\n\r\n")
            left = int(re.search(rb"content-length: (\d+)", head)[1]) - len(body)
            while left:
                left -= len(puller.recv(65536))
    until(lambda: nothing_is_held(server))
    assert [client.status(f"quick-{number}")["reason"] for number in range(20)] == ["pulled"] * 20


def test_an_idle_server_uses_no_cpu(server, client):
    client.encode(jpeg())

    def ticks() -> int:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(3)  # the measured time itself
    assert ticks() - before <= 1, "something polls"


def test_pages_about_the_service(server, client):
    assert httpx2.get(f"{server.url}/health/live").json() == {"status": "live"}
    assert httpx2.get(f"{server.url}/health/ready").status_code == 200
    (model,) = client.models()
    assert (model["family"], model["width"], model["dtype"], model["modalities"]) == (
        "qwen2_5_vl",
        64,
        "float32",
        ["image", "video"],
    )
    assert httpx2.get(f"{server.url}/v1/limits").json()["max_live_requests"] == 256
    document = httpx2.get(f"{server.url}/openapi.json").json()
    assert {"/v1/encode", "/v1/requests/{req_id}", "/v1/requests/{req_id}/embedding"} <= set(document["paths"])
    assert "items" in document["components"]["schemas"]["EncodeBody"]["properties"]
    assert "422" not in json.dumps(document), "a wrong parameter is answered 400"
    assert "ValidationError" not in json.dumps(document)
    series = httpx2.get(f"{server.url}/metrics").text
    assert "\nencoder_hang_ups_total " in series
    assert "_created" not in series
    assert httpx2.get(f"{server.url}/api/errors/request_released").json()["code"] == "request_released"


def test_a_link_of_another_site_leads_to_the_pages_that_are_the_same_for_all(server):
    """A browser says where a click came from; a wiki's link to an error's meaning, or to the live page, has to work."""
    clicked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    paths = ("/", "/errors/overloaded", "/health", "/v1/models", "/metrics", "/v1/requests/r/embedding")
    answers = [httpx2.get(server.url + path, headers=clicked).status_code for path in paths]
    assert answers == [200, 200, 200, 403, 403, 403]


@pytest.mark.parametrize("path", ["/v1/encode/", "/health/", "/errors/internal/"])
def test_no_path_leads_to_the_name_in_the_host_header(server, path):
    answer = httpx2.get(server.url + path, headers={"host": "localhost:1"})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_health_is_where_engines_have_it(server):
    answer = httpx2.get(f"{server.url}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


def test_an_idle_server_encodes_when_it_is_asked_whether_it_can(server):
    before = gauges(server)
    answer = httpx2.get(f"{server.url}/health/encode").json()
    assert (answer["status"], answer["rows"]) == ("encoded", 64)
    assert 0 < answer["seconds"] < 10
    made = 'encoder_rows_total{modality="image"}'
    assert gauges(server)[made] == before.get(made, 0) + 64
    assert nothing_is_held(server)


def test_a_busy_server_is_asked_how_its_work_goes(server, client):
    """A request that waits for its turn: the probe neither joins the queue nor waits for it."""
    pictures = [jpeg(1400, 1400, seed) for seed in range(6)]
    running = threading.Thread(target=client.encode, args=(pictures,))
    running.start()
    until(lambda: gauges(server)["encoder_live_requests"] == 1)
    answer = httpx2.get(f"{server.url}/health/encode").json()
    running.join(60)
    assert answer["status"] == "busy"
    assert answer["stalled_s"] < 10


def test_a_self_test_is_encoded_anew_and_kept_nowhere(tiny):
    with EncoderProcess(
        tiny, "--forward-threads", "1", "--log-level", "warning", "--cache-bytes", "1000000"
    ) as process:
        for _ in range(2):
            assert httpx2.get(f"{process.url}/health/encode").json()["status"] == "encoded"
        seen = gauges(process)
        assert seen['encoder_rows_total{modality="image"}'] == 128
        assert (seen["encoder_cache_queries_total"], seen["encoder_cache_bytes"]) == (0, 0)


def test_a_server_that_is_not_there(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as lost, pytest.raises(UnavailableError) as caught:
        lost.encode(b"x")
    assert caught.value.code == "server_unreachable"
