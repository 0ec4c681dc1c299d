"""The command line: exit codes, start-up mistakes, drain, tokens."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from safetensors import safe_open

from tectum import Client, TectumError
from tectum.config import Settings
from tectum.demo.encoder_process import EncoderProcess
from tectum.errors import StartupError
from tests import zoo


def tectum(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tectum", *arguments]
    # somebody may serve on the port of their own, and no test asks the hub
    environment = {**os.environ, "TECTUM_PORT": "0", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)


@pytest.fixture(scope="module")
def photograph(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    zoo.picture(224, 224).save(path)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "/no/such/folder"], "model_not_found"),
        (["serve", "."], "model_not_found"),
        (["serve", "org/no-such-model"], "from the hub (it is not in the cache, and the hub is not reached)"),
        (["serve", ".", "--host", "0.0.0.0"], "give --token-file"),
        (["serve", ".", "--port", "99999"], "port"),
        (["serve", ".", "--fuse", "sometimes"], "fuse"),
        (["serve", ".", "--device", "cuda:7"], "cuda:7"),
        (["serve", ".", "--device", "gpu"], "error device: auto, cpu, cuda or cuda:N. [invalid_settings]"),
        (["serve", ".", "--fuse", "maybe"], "what to do: tectum explain invalid_settings"),
        (["serve", ".", "--workers", "0"], "error workers: from 1 to 256 processes"),
        (["encode", "x.png", "--out", "x"], "--url"),
        (["encode", "x.png", "--out", "x", "--url", "http://127.0.0.1:1", "--model", "."], "Give either --url"),
        (
            ["encode", "x.png", "--out", "x", "--url", "127.0.0.1:30100"],
            "url: '127.0.0.1:30100' is not the http://host:port",
        ),
        (["encode", "x.png", "--out", "no/such/x", "--url", "http://127.0.0.1:1"], "there is no folder no/such"),
        (["explain", "zzzzzzzz qqqqqq"], "explain --list"),
    ],
)
def test_start_up_mistakes_exit_with_2_and_say_what_is_wrong(arguments, words):
    done = tectum(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_hides_a_library_is_named(tmp_path):
    (tmp_path / "multipart").mkdir()
    (tmp_path / "multipart" / "__init__.py").write_text("")  # as old versions of python-multipart have it
    done = tectum("serve", "null:4x4", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 2
    assert 'pip install --upgrade "tectum[serve]" python-multipart' in done.stderr
    assert "Traceback" not in done.stderr


def test_encoding_here_with_the_base_install_says_what_is_missing(photograph, tmp_path):
    program = """
import sys
sys.modules["torch"] = None
from tectum.cli import main
main()
"""
    arguments = ("encode", str(photograph), "--model", ".", "--out", str(tmp_path / "rows"))
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert 'error torch is not installed; run: pip install "tectum[serve]" [missing_dependency]' in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_what_a_setting_is_without_its_flag_and_what_it_may_be():
    said = " ".join(tectum("serve", "--help", COLUMNS="200").stdout.replace("│", " ").split())
    for words in (
        "[default: 30100]",
        "[default: true]",
        "[auto|float32|bfloat16|float16] [default: auto]",
        "tectum[trace]",
    ):
        assert words in said
    shown = [info for info in Settings.model_fields.values() if info.default not in (None, "")]
    assert said.count("[default:") >= len(shown)


def test_unsupported_architecture_lists_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    done = tectum("serve", str(tmp_path))
    assert done.returncode == 2
    assert "LlamaForCausalLM is not supported (docs/adding-a-family.md); known: Qwen2/2.5/3-VL" in done.stderr
    report = tectum("doctor", str(tmp_path), "--json")
    assert report.returncode == 2
    assert json.loads(report.stdout)["model"]["code"] == "unsupported_architecture"


def test_a_port_in_use_is_said_before_anything_is_loaded(tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = tectum("serve", str(tiny), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_unknown_environment_variables_are_refused(tiny):
    done = tectum("serve", str(tiny), TECTUM_REQEST_TTL="1")
    assert done.returncode == 2
    assert "TECTUM_REQEST_TTL" in done.stderr


#: what a container that runs in a namespace with the Services `tectum` and `tectum-grpc` finds, as the Kubernetes
#: documentation lists it (Service, "Environment variables")
SERVICE_LINKS = {
    "TECTUM_SERVICE_HOST": "10.0.0.11",
    "TECTUM_SERVICE_PORT": "30100",
    "TECTUM_SERVICE_PORT_HTTP": "30100",
    "TECTUM_PORT": "tcp://10.0.0.11:30100",
    "TECTUM_PORT_30100_TCP": "tcp://10.0.0.11:30100",
    "TECTUM_PORT_30100_TCP_PROTO": "tcp",
    "TECTUM_PORT_30100_TCP_PORT": "30100",
    "TECTUM_PORT_30100_TCP_ADDR": "10.0.0.11",
    "TECTUM_GRPC_SERVICE_HOST": "10.0.0.12",
    "TECTUM_GRPC_PORT": "tcp://10.0.0.12:30001",
}


def test_where_kubernetes_says_that_a_service_is_is_no_setting(monkeypatch):
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    assert (Settings.load().port, Settings.load().grpc_port) == (30100, None)
    assert Settings(host="127.0.0.1").port == 30100, "as the gateway and the bootstrap server make them"
    monkeypatch.setenv("TECTUM_GRPC_PORT", "30001")
    assert Settings.load(transfer_backend="zmq_to_tokenizer").grpc_port == 30001


@pytest.mark.parametrize("name", ["TECTUM_PORTS", "TECTUM_SERVICE", "TECTUM_PORT_TCP", "TECTUM_SERVICE_HOSTS"])
def test_what_only_looks_like_it_is_still_refused(name, monkeypatch):
    monkeypatch.setenv(name, "tcp://10.0.0.11:30100")
    with pytest.raises(StartupError, match=name):
        Settings.load()


def test_settings_come_from_flags_then_environment_then_file(tmp_path, monkeypatch):
    file = tmp_path / "tectum.toml"
    file.write_text("port = 1\nrequest_ttl = 5.0\nmax_items = 3\n")
    monkeypatch.setenv("TECTUM_REQUEST_TTL", "7")
    monkeypatch.setenv("TECTUM_PORT", "2")
    settings = Settings.load(file, port=3)
    assert (settings.port, settings.request_ttl, settings.max_items) == (3, 7.0, 3)
    file.write_text("prot = 1\n")
    with pytest.raises(StartupError, match="prot"):
        Settings.load(file)


def test_doctor_knows_the_model(tiny):
    found = json.loads(tectum("doctor", str(tiny), "--json").stdout)["model"]
    assert (found["supported"], found["family"], found["width"]) == (True, "qwen2_5_vl", 64)
    assert found["encoder_bytes"] == found["encoder_parameters"] * 4


def test_encode_here_and_there_write_the_same_rows(tiny, server, photograph, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    assert (
        tectum("encode", str(photograph), "--model", str(tiny), "--out", str(here), "--forward-threads", "1").returncode
        == 0
    )
    assert tectum("encode", str(photograph), str(photograph), "--url", server.url, "--out", str(there)).returncode == 0
    with safe_open(here, "pt") as one, safe_open(there, "pt") as two:
        assert one.get_tensor("rows").shape == (64, 64)
        assert two.get_tensor("item_rows").tolist() == [64, 64]
    folder = tectum("encode", str(photograph), "--url", server.url, "--out", str(tmp_path))
    assert (folder.returncode, "Traceback" in folder.stderr) == (2, False), "a folder is no file to write to"
    assert "Is a directory [invalid_settings]" in folder.stderr
    missing = tectum("encode", "no-such.png", "--url", server.url, "--out", str(there))
    assert missing.returncode == 1
    assert "no-such.png" in missing.stderr
    assert "item 0" in missing.stderr


def test_encode_takes_clips_too(server, tmp_path):
    clip, out = tmp_path / "clip.tiff", tmp_path / "rows"
    frames = [zoo.picture(64, 64, number) for number in range(4)]
    frames[0].save(clip, save_all=True, append_images=frames[1:])
    done = tectum("encode", str(clip), "--modality", "video", "--url", server.url, "--out", str(out))
    assert done.returncode == 0, done.stderr
    with Client(server.url) as client, safe_open(out, "pt") as written:
        expected = client.encode([clip], modality="video")
        assert written.get_tensor("grid_thw").tolist() == [list(grid) for grid in expected.grid_thw]
        assert written.get_tensor("rows").equal(expected.rows)


def test_sigterm_finishes_what_was_accepted_refuses_the_rest_and_exits_0(tiny):
    with (
        EncoderProcess(tiny, "--forward-threads", "1", "--drain-timeout", "20") as process,
        Client(process.url) as client,
    ):
        client.hold(zoo.picture(64, 64), req_id="held")
        outcomes: list[object] = []

        def work():
            with Client(process.url) as own:
                outcomes.append(own.encode([zoo.picture(448, 448, i) for i in range(12)], req_id="busy").rows.shape[0])

        thread = threading.Thread(target=work)
        thread.start()
        client.metadata("busy", wait=20)
        os.kill(process.pid, signal.SIGTERM)
        while True:  # until the signal has arrived
            try:
                client.encode(zoo.picture(64, 64))
            except TectumError as error:
                assert (error.status, error.code) == (503, "shutting_down")
                break
        assert client.embedding("held").rows.shape[0] == 4, "held rows can still be pulled"
        thread.join(30)
        assert outcomes == [12 * 256]
        assert process.wait(20) == 0


def test_rows_that_nobody_pulls_are_no_unfinished_work(tiny):
    with (
        EncoderProcess(tiny, "--forward-threads", "1", "--drain-timeout", "1") as process,
        Client(process.url) as client,
    ):
        client.hold(zoo.picture(64, 64), req_id="nobody-pulls")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_token_guards_everything_but_the_probes(tiny, tmp_path):
    token = tmp_path / "token"
    token.write_text("sesame\n")
    with EncoderProcess(tiny, "--token-file", str(token)) as process:
        with Client(process.url) as stranger, pytest.raises(TectumError) as caught:
            stranger.models()
        assert (caught.value.status, caught.value.code) == (401, "unauthorized")
        with Client(process.url, token="sesame") as friend:
            assert friend.models()[0]["object"] == "model"


def test_a_reader_that_stalls_does_not_hold_its_rows_for_ever(tiny):
    """48 pictures of 256 rows make an answer that fits into no socket buffer; the reader takes none of it."""
    flags = ("--forward-threads", "1", "--send-timeout", "1", "--log-level", "warning")
    with EncoderProcess(tiny, *flags) as process, Client(process.url) as client:
        address = process.url.removeprefix("http://").split(":")
        picture = base64.b64encode(png(zoo.picture(448, 448))).decode()
        body = json.dumps({"req_id": "stalled", "items": [{"type": "image", "data": picture}] * 48}).encode()
        head = f"POST /v1/encode HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((address[0], int(address[1])))
            reader.sendall(head.encode() + body)
            client.metadata("stalled", wait=30)
            deadline = time.monotonic() + 30
            while client.status("stalled")["state"] != "released":
                assert time.monotonic() < deadline, "the stalled reader still holds its rows"
                time.sleep(0.05)  # another process: there is nothing to wait on
            assert client.status("stalled")["reason"] == "client_abort"
        assert client.encode(zoo.picture(64, 64)).rows.shape[0] == 4


def png(picture) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
