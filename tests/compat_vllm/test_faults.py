"""Whatever goes wrong with the rows of one request fails that request; the engine lives, and its neighbours do not notice."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import httpx2
import pytest
import torch

from tectum import Client
from tectum.delivery import wire
from tectum.demo.encoder_process import EncoderProcess
from tests import zoo
from tests.compat_vllm import faults
from tests.compat_vllm.conftest import Stack, tokens

PICTURE = zoo.picture(140, 90, 11)
GOOD = [zoo.picture(224, 224, 12)]


def rows_of(stack: Stack, picture=PICTURE):
    """The right rows of a picture, as its encoder makes them."""
    with Client(stack.encoder.url) as client:
        return client.encode([picture])


def document(embedding, **changed) -> bytes:
    facts = {
        "rows": embedding.rows,
        "item_rows": embedding.item_rows,
        "grid_thw": embedding.grid_thw,
        "deepstack": embedding.deepstack,
        "dtype": "float32",
        "req_id": "r",
    }
    return wire.pack(**{**facts, **changed})


def asking(stack: Stack, embedding, place: dict[str, str], uuid: str) -> httpx2.Response:
    """A request as the gateway makes it, for rows at a place of the test's choosing."""
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": embedding.grid_thw[0]}, "uuid": uuid}
    content = [{"type": "text", "text": "0:"}, part, {"type": "text", "text": "what?"}]
    return stack.post(content, stack.engine, ec_transfer_params={"tectum": {uuid: place}})


@contextlib.contextmanager
def undisturbed(stack: Stack, beside):
    """A good request runs beside the fault, and another after it; both have the right tokens."""
    neighbour = beside.submit(stack.ask, GOOD, tokens=96)
    yield
    assert tokens(neighbour.result()) == stack.expected(GOOD, tokens=96)
    assert tokens(stack.ask([PICTURE])) == stack.expected([PICTURE])
    assert stack.vllm.alive
    assert httpx2.get(f"{stack.engine}/health").is_success
    assert "EngineDeadError" not in stack.vllm.text()


def nan(embedding):
    rows = embedding.rows.clone()
    rows[-1, -1] = float("nan")
    return {"rows": rows}


def cut_rows(embedding, count):
    rows = embedding.rows[:count]
    return {"rows": rows, "item_rows": [count], "deepstack": [layer[:count] for layer in embedding.deepstack]}


WRONG = {
    "nan": nan,
    "infinite layer or rows": lambda e: (
        {"deepstack": [*e.deepstack[:-1], e.deepstack[-1] * float("inf")]}
        if e.deepstack
        else {"rows": e.rows * float("inf")}
    ),
    "a row less": lambda e: cut_rows(e, e.rows.shape[0] - 1),
    "narrow": lambda e: {"rows": e.rows[:, :-2], "deepstack": [layer[:, :-2] for layer in e.deepstack]},
    "bfloat16": lambda e: {
        "rows": e.rows.bfloat16(),
        "deepstack": [layer.bfloat16() for layer in e.deepstack],
        "dtype": "bfloat16",
    },
    "another grid of as many rows": lambda e: {"grid_thw": [(e.grid_thw[0][0], e.grid_thw[0][2], e.grid_thw[0][1])]},
    "a layer more": lambda e: {"deepstack": [*e.deepstack, e.rows]},
    "two items": lambda e: {
        "item_rows": [1, e.rows.shape[0] - 1],
        "grid_thw": [e.grid_thw[0], e.grid_thw[0]],
    },
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rows_fail_their_request_alone(stack: Stack, beside, wrong):
    embedding = rows_of(stack)
    place = stack.faulty.plant(
        f"w-{len(stack.faulty.asked)}", faults.whole(document(embedding, **WRONG[wrong](embedding)))
    )
    with undisturbed(stack, beside):
        assert asking(stack, embedding, place, f"wrong-{wrong}").status_code == 500


def test_the_right_rows_from_the_same_place_are_taken(stack: Stack, beside):
    """So that the refusals above are about the rows, and not about the place."""
    embedding = rows_of(stack)
    place = stack.faulty.plant("right", faults.whole(document(embedding)))
    with undisturbed(stack, beside):
        assert tokens(asking(stack, embedding, place, "right")) == stack.expected([PICTURE])


@pytest.mark.parametrize("fault", ["cut", "stalled", "not http", "nobody there", "elsewhere", "no place", "garbage"])
def test_a_fetch_that_fails_fails_its_request_alone(stack: Stack, beside, fault):
    embedding = rows_of(stack)
    right = document(embedding)
    planted = {
        "cut": faults.cut(right),
        "stalled": faults.stalled(right, stack.faulty.over),
        "not http": lambda connection: connection.sendall(b"220 smtp ready\r\n\r\n"),
    }
    place: dict = stack.faulty.plant(f"f-{fault}".replace(" ", "-"), planted.get(fault, faults.whole(right)))
    if fault == "nobody there":
        place = {"encoder": nobody(stack), "req_id": "r"}
    elif fault == "elsewhere":
        place = {"encoder": "http://127.0.0.1:1", "req_id": "r"}  # not among the connector's encoders: never asked
    elif fault == "no place":
        place = {}
    elif fault == "garbage":
        place = {"encoder": [1], "req_id": {"a": None}}
    with undisturbed(stack, beside):
        assert asking(stack, embedding, place, f"fetch-{fault}").status_code == 500


def nobody(stack: Stack) -> str:
    """The connector's third encoder: a port where nobody listens."""
    transfer = json.loads(stack.vllm.command[-1])
    return transfer["ec_connector_extra_config"]["urls"][2]


def test_rows_that_were_given_back_fail_their_request_alone(stack: Stack, beside):
    embedding = rows_of(stack)
    with Client(stack.encoder.url) as client:
        req_id = client.hold([PICTURE])["req_id"]
        client.release(req_id)
    with undisturbed(stack, beside):
        place = {"encoder": stack.encoder.url, "req_id": req_id}
        assert asking(stack, embedding, place, "released").status_code == 500


def test_the_same_uuid_with_another_grid_is_refused_alone(stack: Stack, beside):
    embedding, other = rows_of(stack), rows_of(stack, GOOD[0])
    with undisturbed(stack, beside):
        place = stack.faulty.plant("uuid-1", faults.whole(document(embedding)))
        assert asking(stack, embedding, place, "same-uuid").status_code == 200
        place = stack.faulty.plant("uuid-2", faults.whole(document(other)))
        assert asking(stack, other, place, "same-uuid").status_code == 500


def test_an_encoder_killed_before_and_after_the_fetch(stack: Stack, beside):
    """A real encoder process, killed outright, in the place that the connector knows as its third."""
    port = nobody(stack).rsplit(":", 1)[1]
    flags = ("--forward-threads", "1", "--log-level", "warning", "--port", port)
    with EncoderProcess(stack.folder, *flags) as encoder, Client(encoder.url) as client:
        embedding = client.encode([PICTURE])
        held = [client.hold([PICTURE])["req_id"] for _ in range(2)]
        with undisturbed(stack, beside):
            body = {"encoder": encoder.url, "req_id": held[0]}
            running = beside.submit(asking_long, stack, embedding, body)
            first, rest = running.result()
            os.kill(encoder.pid, signal.SIGKILL)  # after the fetch: the first token is here
            encoder.wait(10)
            assert first + rest() == stack.expected([PICTURE], tokens=200)
            after = asking(stack, embedding, {"encoder": encoder.url, "req_id": held[1]}, "killed-before")
            assert after.status_code == 500
    assert torch.isfinite(embedding.rows).all()


def asking_long(stack: Stack, embedding, place):
    """A streaming request: its first token, and a call that reads the others."""
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": embedding.grid_thw[0]}, "uuid": "killed-after"}
    content = [{"type": "text", "text": "0:"}, part, {"type": "text", "text": "what?"}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 200,
        "min_tokens": 200,
        "return_token_ids": True,
        "stream": True,
        "ec_transfer_params": {"tectum": {"killed-after": place}},
    }
    client = httpx2.Client(timeout=120)
    answer = client.send(client.build_request("POST", f"{stack.engine}/v1/chat/completions", json=body), stream=True)
    pieces = (
        choice.get("token_ids") or []
        for line in answer.iter_lines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    )
    first: list[int] = []
    for piece in pieces:
        first += piece
        if first:
            break
    assert first, answer.status_code

    def rest() -> list[int]:
        found = [token for piece in pieces for token in piece]
        client.close()
        return found

    return first, rest
