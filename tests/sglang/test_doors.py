"""SGLang's doors as its language-only server uses them: real server processes, and an independent receiver."""

from __future__ import annotations

import json

import httpx2
import pytest
import torch

from tests.serving.test_native import jpeg, nothing_is_held, refusals, until
from tests.sglang.language_server import LanguageServer, data_uri
from tests.sglang.receiver import Receiver


def done(*answers):
    for answer in answers:
        found = answer.result(30)
        assert (found.status_code, found.json()) == (200, None), found.text


def test_a_registration_that_comes_first(server, encoder_a, colocated):
    pictures = [jpeg(224, 224, 1), jpeg(300, 140, 2)]
    with Receiver() as receiver:
        registered = server.register("first", pictures, receiver)
        assert not registered[0].done()
        encoded = server.encode("first", pictures)
        rows, grid = receiver.rows("first")
        done(*registered, *encoded)
    assert torch.equal(rows, colocated(pictures))
    assert grid == [[1, 16, 16], [1, 10, 22]]
    until(lambda: nothing_is_held(encoder_a))


def test_a_registration_that_comes_last(server, colocated):
    pictures = [jpeg(224, 224, 3)]
    with Receiver() as receiver:
        encoded = server.encode("last", pictures)
        until(
            lambda: (
                server.post("/scheduler_receive_meta_data", {"req_id": "last_local_part_0", "part_idx": 0}).is_success
            )
        )
        assert not encoded[0].done()
        done(*server.register("last", pictures, receiver), *encoded)
        assert torch.equal(receiver.rows("last")[0], colocated(pictures))


def test_a_port_in_the_body_is_the_tokenizers(server, colocated):
    pictures = [jpeg(224, 224, 4)]
    with Receiver() as receiver:
        done(*server.encode("tokenizer", pictures, embedding_port=receiver.port))
        assert torch.equal(receiver.rows("tokenizer")[0], colocated(pictures))


def test_a_list_of_ports_gets_a_copy_each(server, colocated):
    pictures = [jpeg(224, 224, 5)]
    with Receiver() as one, Receiver() as two:
        done(*server.encode("ports", pictures, embedding_port=[one.port, two.port]))
        for receiver in (one, two):
            assert torch.equal(receiver.rows("ports")[0], colocated(pictures))


def test_each_rank_gets_a_copy_and_the_answer_waits_for_all(server, encoder_a, colocated):
    pictures = [jpeg(224, 224, 6)]
    with Receiver() as one, Receiver() as two:
        encoded = server.encode("ranks", pictures)
        done(*server.register("ranks", pictures, one, count=2))
        assert torch.equal(one.rows("ranks")[0], colocated(pictures))
        done(*server.register("ranks", pictures, one, count=2))  # a retry counts once
        assert one.is_silent()
        assert not encoded[0].done()
        done(*server.register("ranks", pictures, two, count=2), *encoded)
        assert torch.equal(two.rows("ranks")[0], colocated(pictures))
    until(lambda: nothing_is_held(encoder_a))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_encoders_give_what_one_gives(encoder_a, encoder_b, colocated, number):
    pictures = [jpeg(224, 224, 7), jpeg(140, 280, 8), jpeg(448, 224, 9)][:number]
    with LanguageServer(encoder_a.url, encoder_b.url) as both, Receiver() as receiver:
        rid = f"both{number}"
        registered = both.register(rid, pictures, receiver)
        encoded = both.encode(rid, pictures)
        rows, _ = receiver.rows(rid)
        done(*registered, *encoded)
    assert torch.equal(rows, colocated(pictures))


def test_many_requests_at_once_do_not_mix(server, encoder_a, colocated):
    pictures = {f"many{i}": [jpeg(56 + 28 * (i % 5), 84, i)] for i in range(24)}
    expected = {rid: colocated(items) for rid, items in pictures.items()}
    with Receiver() as receiver:
        answers = [a for rid, items in pictures.items() for a in server.encode(rid, items)]
        answers += [a for rid, items in pictures.items() for a in server.register(rid, items, receiver)]
        for _ in pictures:
            message, rows = receiver.message()
            assert torch.equal(rows, expected[message.req_id.removesuffix("_local_part_0")])
        done(*answers)
    until(lambda: nothing_is_held(encoder_a))


def test_the_forms_that_an_item_may_have(server, colocated):
    picture = jpeg(224, 224, 10)
    forms = [
        data_uri(picture),
        data_uri(picture).partition(",")[2],
        {"url": data_uri(picture), "content_hash": "sha256:" + "0" * 64, "detail": "auto"},
    ]
    with Receiver() as receiver:
        done(*server.encode("forms", forms, embedding_port=receiver.port))
        rows, _ = receiver.rows("forms")
        assert torch.equal(rows, colocated([picture] * 3))
        alone = server.part("alone", [picture], embedding_port=receiver.port)
        done(server.post_later("/encode", {**alone, "mm_items": alone["mm_items"][0], "modality": "image"}))
        assert torch.equal(receiver.rows("alone")[0], colocated([picture]))


def test_metadata_comes_before_the_rows_and_names_their_size(server):
    with Receiver() as receiver:
        asked = server.post_later("/scheduler_receive_meta_data", {"req_id": "sized_local_part_1", "part_idx": 1})
        encoded = server.post_later("/encode", server.part("sized", [jpeg()], 1, 2))
        assert asked.result(20).json() == {
            "req_id": "sized_local_part_1",
            "part_idx": 1,
            "embedding_size": 64 * 64 * 4,
            "embedding_len": 64,
            "embedding_dim": 64,
        }
        send = {"req_id": "sized_local_part_1", "prefill_host": "127.0.0.1", "embedding_port": receiver.port}
        done(server.post_later("/send", {**send, "receive_count": 1}), encoded)
        assert receiver.message()[1].shape == (64, 64)


def test_a_failure_reaches_whoever_waits_with_its_status(server, encoder_a):
    broken = jpeg()[:-300]
    with Receiver() as early, Receiver() as late:
        registered = server.register("broken", [broken], early, count=2)
        waiting = server.post_later("/scheduler_receive_meta_data", {"req_id": "broken_local_part_0", "part_idx": 0})
        (encoded,) = server.encode("broken", [broken])
        answer = encoded.result(20)
        assert (answer.status_code, answer.json()["status"]) == (400, "error")
        assert (answer.json()["req_id"], answer.json()["item"]) == ("broken_local_part_0", 0)
        message, rows = early.message()
        assert rows is None
        assert (message.error_code, message.error_msg) == (400, answer.json()["message"])
        assert waiting.result(20).status_code == 400
        done(*registered)
        # a rank that registers after the failure hears of it too: the end user must see a 400, not a 502
        done(*server.register("broken", [broken], late, count=2))
        message, rows = late.message()
        assert (message.error_code, rows) == (400, None)
    until(lambda: nothing_is_held(encoder_a))


def test_the_tokenizer_hears_of_a_failure_too(server):
    with Receiver() as receiver:
        (encoded,) = server.encode("broken2", [b"no picture"], embedding_port=receiver.port)
        assert encoded.result(20).status_code == 415
        message, _ = receiver.message()
        assert (message.error_code, message.req_id) == (415, "broken2_local_part_0")


def test_a_dead_receiver_fails_the_request_and_a_healthy_one_is_served(server, encoder_a, colocated):
    pictures = [jpeg(224, 224, 11)]
    with Receiver() as healthy, Receiver() as gone:
        gone.close()
        encoded = server.encode("half", pictures)
        done(*server.register("half", pictures, gone, count=2), *server.register("half", pictures, healthy, count=2))
        assert torch.equal(healthy.rows("half")[0], colocated(pictures))
        answer = encoded[0].result(20)
        assert (answer.status_code, answer.json()["code"]) == (504, "send_timeout")
    until(lambda: nothing_is_held(encoder_a))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"req_id": ""}, "req_id"),
        ({"req_id": "../etc"}, "req_id"),
        ({"req_id": None}, "req_id"),
        ({"mm_items": []}, "mm_items"),
        ({"mm_items": [7]}, "mm_items"),
        ({"mm_items": None}, "mm_items"),
        ({"modality": "SMELL"}, "modality"),
        ({"num_parts": 0}, "num_parts"),
        ({"num_parts": True}, "num_parts"),
        ({"part_idx": 1}, "part_idx"),
        ({"part_idx": -1}, "part_idx"),
        ({"embedding_port": 70000}, "embedding_port"),
        ({"embedding_port": "80"}, "embedding_port"),
        ({"embedding_port": 80, "prefill_host": None}, "prefill_host"),
        ({"embedding_port": 80, "prefill_host": "a b"}, "host"),
        ({"modality": "AUDIO"}, "audio"),
        ({"mm_items": ["AAAA"] * 65}, "max-items"),
    ],
)
def test_wrong_bodies_are_refused_in_sglangs_form(server, encoder_a, change, said):
    before = refusals(encoder_a)
    answer = server.post("/encode", {**server.part("wrong", [jpeg()]), **change})
    body = answer.json()
    assert (answer.status_code in (400, 413), body["status"]) == (True, "error")
    assert said in body["message"]
    assert len(answer.content) < 1024
    assert body["req_id"] == {**server.part("wrong", []), **change}["req_id"]
    begun = change.get("modality") == "AUDIO"  # what the model does not take is found out as it is prepared
    assert refusals(encoder_a) == before + (not begun)


@pytest.mark.parametrize("path", ["/encode", "/send", "/scheduler_receive_url", "/scheduler_receive_meta_data"])
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"req_id": 7}', b"[" * 100_000])
def test_no_body_gets_past_any_door(server, encoder_a, path, raw):
    before = refusals(encoder_a)
    answer = server._http.post(encoder_a.url + path, content=raw)
    assert (answer.status_code, answer.json()["status"]) == (400, "error")
    assert refusals(encoder_a) == before + 1
    assert len(answer.content) < 1024


@pytest.mark.parametrize("url", ["", "127.0.0.1", "127.0.0.1:0", "tcp://127.0.0.1:80", "no.such.host.invalid:80"])
def test_receivers_that_cannot_be(server, url):
    answer = server.post("/scheduler_receive_url", server.registration("nowhere", url))
    assert (answer.status_code, answer.json()["status"]) == (400, "error")


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health(server, encoder_a, path):
    assert server._http.get(encoder_a.url + path).status_code == 200


def test_the_doors_are_closed_without_a_backend(tiny):
    from tectum.demo.encoder_process import EncoderProcess

    with EncoderProcess(tiny, "--forward-threads", "1") as process, LanguageServer(process.url) as server:
        assert server.post("/encode", server.part("r", [jpeg()])).json()["code"] == "not_found"


def test_the_answer_is_json_that_sglangs_client_reads(server):
    answer = server.post("/encode", server.part("form", [b"x"]))
    assert answer.headers["content-type"].startswith("application/json")
    assert {"status", "message", "req_id"} <= set(json.loads(answer.content))


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_a_probe_may_ask_for_the_head_alone(server, encoder_a, path):
    answer = httpx2.head(encoder_a.url + path, trust_env=False)
    assert (answer.status_code, answer.content) == (200, b"")
