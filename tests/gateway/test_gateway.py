"""The gateway between a real encoder server and an engine that records what it is sent."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from tectum import Client
from tectum.demo.encoder_process import EncoderProcess, ServerProcess
from tectum.engines.pull import Receiver
from tectum.errors import BadRequestError, StartupError, TectumError
from tectum.serving.chat import MAX_MEDIA, Chat, form_of
from tectum.serving.gateway import PROBE_TIMEOUT, GatewaySettings, create_app
from tests import zoo
from tests.gateway.peers import Engine, running
from tests.media.test_video import numbered, video


def data_uri(seed: int = 0, size: tuple[int, int] = (140, 90)) -> str:
    file = io.BytesIO()
    zoo.picture(*size, seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(*urls: str, **more) -> dict:
    content = [{"type": "text", "text": "what?"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def asking(*parts: dict, **more) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}


def image(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def clip(fps: int) -> dict:
    """Twelve frames, each of its own brightness."""
    data = base64.b64encode(video(numbered(12, 112, 84), fps=fps)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def gateway(server: EncoderProcess, engine: Engine) -> Iterator[str]:
    with running(engine) as engine_url, running(create_app(GatewaySettings((server.url,), engine_url))) as url:
        yield url


def post(url: str, body: object, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(f"{url}/v1/chat/completions", content=content, headers=headers, timeout=30)


def settled(url: str, seconds: float = 10.0) -> None:
    """Wait until the encoder holds nothing: what a request held is given back after its answer."""
    until = time.monotonic() + seconds
    while httpx2.get(f"{url}/health/ready").json()["live_requests"]:
        assert time.monotonic() < until, "something is still held"
        time.sleep(0.02)


def test_pictures_become_metadata_in_their_order_and_the_rows_are_held_meanwhile(server, engine, gateway):
    held: list[tuple[int, ...]] = []
    real = engine.__class__.__call__

    async def pulling(self, scope, receive, send):
        """The engine's connector pulls while the engine works on the request."""

        async def looking():
            message = await receive()
            where = json.loads(message["body"])["ec_transfer_params"]["tectum"]
            for entry in where.values():
                import asyncio

                held.append((await asyncio.to_thread(Receiver(entry["encoder"]).pull, entry["req_id"])).item_rows)
            return message

        await real(self, scope, looking, send)

    engine.__class__ = type("Pulling", (Engine,), {"__call__": pulling})
    pictures = [data_uri(1), data_uri(2, (224, 224)), data_uri(3, (90, 140))]
    body = chat(*pictures, temperature=0.5, mm_processor_kwargs={"max_pixels": 100352})
    assert post(gateway, body).json()["id"] == "1"
    sent = engine.chat()
    assert sent["temperature"] == 0.5
    assert "mm_processor_kwargs" not in sent, "applied already, and part of the key"
    text, *parts = sent["messages"][0]["content"]
    assert text == {"type": "text", "text": "what?"}
    with Client(server.url) as client:
        grids = client.encode([base64.b64decode(url.split(",")[1]) for url in pictures]).grid_thw
    assert [tuple(part["image_embeds"]["image_grid_thw"]) for part in parts] == list(grids)
    assert len({part["uuid"] for part in parts}) == 3
    assert set(sent["ec_transfer_params"]["tectum"]) == {part["uuid"] for part in parts}
    assert held == [(t * h * w // 4,) for t, h, w in grids]
    settled(server.url)


def test_clips_and_pictures_stand_in_one_prompt_each_as_its_own_kind(server, engine, gateway):
    """Six steps of two frames at 2 fps: a second each, as vLLM takes them for; the numbers are those of transformers' grid."""
    parts = [clip(2), {"type": "text", "text": "and"}, image(data_uri(1)), {"video_url": clip(2)["video_url"]}]
    post(gateway, asking(*parts)).raise_for_status()
    first, text, picture, second = engine.chat()["messages"][0]["content"]
    assert first == {"type": "video_embeds", "video_embeds": {"video_grid_thw": [6, 6, 8]}, "uuid": first["uuid"]}
    assert second == first, "the same clip, named by its key of itself"
    assert text == parts[1]
    assert (picture["type"], list(picture["image_embeds"])) == ("image_embeds", ["image_grid_thw"])
    assert set(engine.chat()["ec_transfer_params"]["tectum"]) == {first["uuid"], picture["uuid"]}
    settled(server.url)


@pytest.mark.parametrize(
    ("family", "modality", "item", "fields"),
    [
        ("qwen2_vl", "video", {"grid_thw": [2, 4, 6], "second_per_grid": 0.3}, {"video_grid_thw": [2, 4, 6]}),
        ("qwen2_5_vl", "video", {"grid_thw": [2, 4, 6], "second_per_grid": 1.0}, {"video_grid_thw": [2, 4, 6]}),
        ("qwen2_5_vl", "video", {"grid_thw": [2, 4, 6], "second_per_grid": 0.5}, None),
        (
            "qwen3_vl",
            "video",
            {"grid_thw": [2, 4, 6], "second_per_grid": 0.5, "timestamps": [0.2, 0.7]},
            {"video_grid_thw": [2, 4, 6], "timestamps": [0.2, 0.7]},
        ),
        ("qwen2_audio", "audio", {"rows": 25}, {"audio_num_tokens": [25]}),
        ("llava", "image", {"rows": 576}, None),
        ("voxtral", "audio", {"rows": 375}, None),
    ],
)
def test_what_vllm_counts_placeholders_by(family, modality, item, fields):
    """As its parsers' `embedding_fields` name it, or a refusal that says what is missing."""
    if fields is not None:
        assert form_of(family, modality)(item) == fields
        return
    with pytest.raises(BadRequestError) as caught:
        form_of(family, modality)(item)
    assert (caught.value.code, caught.value.status) == ("unsupported_modality", 400)


def test_the_uuid_names_bytes_options_and_caller_never_the_url_or_what_a_client_says(engine, gateway):
    def uuids(*urls, headers=None, **more):
        post(gateway, chat(*urls, **more), **(headers or {})).raise_for_status()
        return [part["uuid"] for part in engine.chat()["messages"][0]["content"][1:]]

    raw = data_uri(1)
    other_form = raw.replace("data:image/png;base64,", "data:;BASE64,")
    same, again, other = uuids(raw, other_form, data_uri(2))
    assert same == again != other
    assert uuids(raw) == [same]
    assert uuids(raw, mm_processor_kwargs={"max_pixels": 56 * 56}) != [same]
    assert uuids(raw, headers={"authorization": "Bearer a"}) != uuids(raw, headers={"authorization": "Bearer b"})
    claiming = chat(raw)
    claiming["messages"][0]["content"][1]["uuid"] = other
    post(gateway, claiming).raise_for_status()
    assert engine.chat()["messages"][0]["content"][1]["uuid"] == same


def test_what_has_no_media_passes_untouched(engine, gateway):
    bodies = [
        b'{ "messages" : [ {"role":"user","content":"an image, please: \\u00e4"} ] ,\n "x" : 1e400 }',
        b'{"messages":"image"}',
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": '"image_url"'}]}]}).encode(),
    ]
    for body in bodies:
        answer = post(gateway, body, authorization="Bearer mine")
        assert (answer.status_code, answer.headers["x-engine"]) == (200, "yes")
        assert engine.seen[-1][3] == body
        assert engine.seen[-1][2]["authorization"] == "Bearer mine"
    engine.status = 418
    answer = httpx2.get(f"{gateway}/v1/models?a=b%20c", headers={"x-mine": "1"})
    assert answer.status_code == 418
    method, path, headers, body = engine.seen[-1]
    assert (method, path, headers["x-mine"], body) == ("GET", "/v1/models?a=b%20c", "1", b"")


def test_streams_come_through_piece_by_piece(engine, gateway):
    with httpx2.stream("POST", f"{gateway}/v1/chat/completions", json=chat(data_uri(), stream=True)) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert b"".join(answer.iter_raw()) == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "status", "code", "item"),
    [
        (chat(data_uri(), "data:image/png;base64,QUJD"), 415, "unsupported_media", 1),
        (chat("data:image/png;base64,!"), 400, "invalid_base64", 0),
        (chat("http://127.0.0.1:9/x.png"), 400, "url_refused", 0),
        (chat(data_uri(), mm_processor_kwargs={"fps": 2}), 400, "invalid_option", 0),
        (chat(data_uri(), mm_processor_kwargs=[1]), 400, "invalid_option", None),
        (chat(data_uri(), media_io_kwargs={}), 400, "invalid_option", None),
        ({"messages": [{"content": [{"type": "image_url", "image_url": None}]}]}, 400, "invalid_request", 0),
        (asking({"type": "image_pil", "image_pil": "x"}), 400, "unsupported_modality", 0),
        (asking({"type": "image_embeds", "image_embeds": "gAJ9cQAu"}), 400, "unsupported_modality", 0),
        (asking(image(data_uri()), {"audio_embeds": "gAJ9cQAu"}), 400, "unsupported_modality", 1),
        (asking({"type": "video_url", "video_url": {"url": 3}}), 400, "invalid_request", 0),
        (asking({"type": "input_audio", "input_audio": {"format": "wav"}}), 400, "invalid_request", 0),
        (
            asking({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
            400,
            "unsupported_modality",
            0,
        ),
        (asking({"audio_url": {"url": "data:,x"}}), 400, "unsupported_modality", 0),
        (asking(image(data_uri()), clip(1)), 400, "unsupported_modality", 1),
    ],
)
def test_a_bad_picture_is_its_callers_error_with_status_and_index(server, engine, gateway, body, status, code, item):
    answer = post(gateway, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error.get("item")) == (status, code, item)
    assert len(error["message"]) <= 200
    assert not engine.seen, "the engine is not bothered"
    assert post(gateway, chat(data_uri())).status_code == 200
    settled(server.url)


def test_encoder_and_engine_down_are_503_that_say_so(server, engine):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with running(engine) as engine_url, running(create_app(GatewaySettings((nobody,), engine_url))) as url:
        answer = post(url, chat(data_uri()))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["message"] == "No encoder answered (ConnectError)"
        assert post(url, {"messages": []}).status_code == 200, "text does not need it"
        assert httpx2.get(f"{url}/health/ready").json()["error"]["message"] == "No encoder is ready"
    with running(create_app(GatewaySettings((server.url,), nobody))) as url:
        answer = post(url, chat(data_uri()))
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            503,
            "The engine did not answer (ConnectError)",
        )
        settled(server.url)
        assert httpx2.get(f"{url}/health/ready").status_code == 503
        assert httpx2.get(f"{url}/health/live").status_code == 200


def test_a_gateway_whose_encoders_are_full_is_ready(tiny, engine):
    """Pictures are refused for a moment, with what the encoder says; text is not."""
    flags = ("--forward-threads", "1", "--log-level", "warning", "--max-live-requests", "1")
    with (
        EncoderProcess(tiny, *flags) as full,
        Client(full.url) as client,
        running(engine) as engine_url,
        running(create_app(GatewaySettings((full.url,), engine_url))) as url,
    ):
        client.hold(zoo.picture(112, 112), req_id="held")
        assert httpx2.get(f"{full.url}/health/ready").status_code == 503
        assert httpx2.get(f"{url}/health/ready").json() == {"status": "ready"}
        answer = post(url, chat(data_uri()))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert post(url, {"messages": []}).status_code == 200
        client.release("held")  # or the server would wait for its pull when it ends


def test_the_same_content_goes_to_the_same_encoder_and_to_the_next_when_that_is_down(server, tiny, engine):
    with EncoderProcess(tiny, "--forward-threads", "1", "--log-level", "warning") as second:
        settings = GatewaySettings((server.url, second.url), "http://127.0.0.1:9")
        with running(engine) as engine_url:
            settings = GatewaySettings((server.url, second.url), engine_url)
            with running(create_app(settings)) as url:

                def where(seed):
                    post(url, chat(data_uri(seed))).raise_for_status()
                    ((_, entry),) = engine.chat()["ec_transfer_params"]["tectum"].items()
                    return entry["encoder"]

                first = {seed: where(seed) for seed in range(8)}
                assert set(first.values()) == {server.url, second.url}
                assert {seed: where(seed) for seed in range(8)} == first
                assert second.stop() == 0
                assert {where(seed) for seed in range(8)} == {server.url}


def test_a_caller_that_hangs_up_is_gone_on_both_sides(server, engine, gateway):
    engine.silent = True
    host = urlsplit(gateway)
    connection = http.client.HTTPConnection(host.hostname, host.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(chat(data_uri())))
    assert engine.began.acquire(timeout=20)
    connection.close()
    assert engine.left.acquire(timeout=20), "the engine was not told"
    settled(server.url)


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    "body",
    [
        f'{{"x": {DEEP}, "messages": [{{"content": [{{"type": "image_url", "image_url": {{"url": "!"}}}}]}}]}}',
        f'{{"messages": [{{"content": [{{"type": "image_url", "image_url": {DEEP}}}]}}]}}',
    ],
    ids=["beside", "within"],
)
def test_json_that_is_nested_without_end_is_refused(engine, gateway, body):
    answer = post(gateway, body.encode())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert not engine.seen
    assert post(gateway, chat(data_uri())).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(chat("data:,")).encode("utf-16"),
        json.dumps(chat("data:,")).encode("utf-16-le"),
        json.dumps(chat("data:,")).encode("utf-32"),
        json.dumps(chat("data:,")).encode("utf-8-sig"),
        json.dumps(chat("data:,", temperature=float("nan"))).encode(),
        b"no JSON, but with an image in it",
    ],
    ids=["UTF-16 with a mark", "UTF-16", "UTF-32", "UTF-8 with a mark", "NaN", "no JSON"],
)
def test_what_an_engine_might_read_though_it_is_no_json_does_not_pass(engine, gateway, body):
    """Python's reader takes all but the last of them: the media would reach the engine past the encoders."""
    answer = post(gateway, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert not engine.seen


@pytest.mark.parametrize(
    "path", ["/x/../v1/chat/completions", "/v1/%2e%2e/v1/chat/completions", "//v1/models", "/v1/.."]
)
def test_a_path_that_would_lead_elsewhere_does_not_pass(engine, gateway, path):
    host = urlsplit(gateway)
    with socket.create_connection((host.hostname, host.port), 30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")
    assert not engine.seen


@pytest.mark.parametrize("kind", [None, 7, []])
def test_a_part_whose_type_is_no_word_is_what_it_holds(engine, gateway, kind):
    part = {**image(data_uri()), "type": kind}
    assert post(gateway, asking(part)).status_code == 200
    assert engine.chat()["messages"][0]["content"][0]["type"] == "image_embeds"


def test_media_by_the_thousand_are_refused_before_any_encoder_hears_of_them(engine, gateway):
    answer = post(gateway, chat(*["!"] * 3000))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert not engine.seen
    assert len(Chat.read(json.dumps(chat(*["!"] * MAX_MEDIA)).encode()).media) == MAX_MEDIA


def test_a_probe_that_hangs_up_leaves_no_call_at_a_silent_engine(engine, gateway):
    """Anybody may ask this without a token, again and again."""
    engine.silent = True
    host = urlsplit(gateway)
    with socket.create_connection((host.hostname, host.port), 30) as connection:
        connection.sendall(b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert engine.began.acquire(timeout=20)
    assert engine.left.acquire(timeout=PROBE_TIMEOUT / 2), "the call went on"


def test_a_silent_engine_is_not_ready(engine, gateway):
    engine.silent = True
    answer = httpx2.get(f"{gateway}/health/ready", timeout=2 * PROBE_TIMEOUT)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "The engine is not ready")
    assert engine.left.acquire(timeout=20)


def test_a_token_is_asked_for_where_one_is_set(server, engine, tmp_path):
    secret, other = tmp_path / "token", tmp_path / "engine"
    secret.write_text("s3cret\n")
    other.write_text("theirs\n")
    with running(engine) as engine_url:
        settings = GatewaySettings((server.url,), engine_url, token_file=secret, engine_token_file=other)
        with running(create_app(settings)) as url:
            assert post(url, chat(data_uri())).status_code == 401
            assert post(url, chat(data_uri()), authorization="Bearer s3cret").status_code == 200
            assert engine.seen[-1][2]["authorization"] == "Bearer theirs"
    with pytest.raises(StartupError, match="token-file"):
        GatewaySettings((server.url,), "http://e", host="0.0.0.0")
    with pytest.raises(
        StartupError, match=r"^encoders \(one each time\): .* is not the http://host:port of one server"
    ):
        GatewaySettings(("encoder:1",), "http://e")


def test_an_encoders_environment_is_not_the_gateways(monkeypatch):
    monkeypatch.setenv("TECTUM_REPLICAS", "2")  # which needs another setting beside it
    monkeypatch.setenv("TECTUM_MAX_BODY_BYTES", "1024")
    create_app(GatewaySettings(("http://e",), "http://e"))


def test_bodies_are_taken_apart_without_decoding_their_large_strings():
    """The very characters of the URL go on, escapes and all."""
    body = rb'{"messages":[{"content":[{"type":"image_url","image_url":"data:\u0041\/\u00e9"}]},{"content":"\u00e9"}],"k":1.50}'
    found = Chat.read(body)
    assert [bytes(medium.text) for medium in found.media] == [rb'"data:\u0041\/\u00e9"']
    assert b'"k":1.50' in found.rewritten([held()])
    assert rb'"\u00e9"' in found.rewritten([held()])


def held():
    from tectum.serving.chat import Held

    return Held("http://e", "r", "k", "image", {"image_grid_thw": [1, 2, 2]})


@pytest.mark.parametrize("seed", range(40))
def test_broken_bodies_raise_nothing_but_their_own_errors(seed):
    import random

    rng = random.Random(seed)
    body = bytearray(json.dumps(chat("data:,x", "data:,y", mm_processor_kwargs={"max_pixels": 3})).encode())
    for _ in range(200):
        damaged = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            found = Chat.read(bytes(damaged))
            if found is not None:
                found.options()
                found.rewritten([held()] * len(found.media))
        except BadRequestError:
            pass
        except TectumError as error:
            raise AssertionError(error) from error


def test_the_command_serves_until_sigterm_and_ends_well(server, engine):
    with running(engine) as engine_url:
        command = ("gateway", "--encoders", server.url, "--engine", engine_url, "--port", "0")
        with ServerProcess(*command) as process:
            post(process.url, chat(data_uri(7))).raise_for_status()
            assert process.stop() == 0
    assert not [line for line in process.lines if "Traceback" in line]
    settled(server.url)
