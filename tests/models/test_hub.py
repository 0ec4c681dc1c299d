"""A model by its hub id: the hub's own client, against a hub on loopback that counts what is fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers

from tectum.delivery import wire
from tectum.models.load import INDEX
from tests import zoo

REPO, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """A hub with one model, as far as its client asks. sent: the names of the files whose bytes were sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.folder = folder
        self.sent: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def facts(self, kind: str) -> object:
        files = [(file.name, file.stat().st_size) for file in self.folder.iterdir()]
        if kind == "tree":
            return [{"type": "file", "path": name, "size": size, "oid": name} for name, size in files]
        return {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name, _ in files]}


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = self.server.folder / path.rpartition("/")[2]
        if path.startswith(f"/api/models/{REPO}"):
            kind = "tree" if "/tree/" in path else "model"
            self._send(200, json.dumps(self.server.facts(kind)).encode(), "facts")
        elif path.startswith(f"/{REPO}/resolve/") and file.is_file():
            if self.command == "GET":
                self.server.sent.append(file.name)
            self._send(200, file.read_bytes(), file.name)
        else:
            self._send(404, b"", "")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: int, data: bytes, etag: str) -> None:
        self.send_response(status)
        for key, value in (("Content-Length", str(len(data))), ("X-Repo-Commit", COMMIT), ("ETag", f'"{etag}"')):
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A checkpoint in many shards, some of which hold the language model alone."""
    whole = zoo.build("qwen2_5_vl", tmp_path_factory.mktemp("whole"))
    folder = tmp_path_factory.mktemp("sharded")
    transformers.AutoProcessor.from_pretrained(whole).save_pretrained(folder)
    transformers.AutoModelForImageTextToText.from_pretrained(whole).save_pretrained(folder, max_shard_size="50KB")
    return folder


def encoded(model: str, folder: Path, **environment: str) -> torch.Tensor:
    """The rows of one picture by `tectum encode --model`."""
    picture, out = folder / "picture.png", folder / "rows.safetensors"
    zoo.picture(140, 112).save(picture)
    command = [sys.executable, "-m", "tectum", "encode", str(picture), "--model", model, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return wire.unpack(out.read_bytes()).rows


def test_a_hub_id_fetches_the_shards_of_the_encoder_and_encodes_as_the_folder_does(sharded, tmp_path):
    shards = json.loads((sharded / INDEX).read_text())["weight_map"]
    of_encoder = {file for key, file in shards.items() if ".visual." in f".{key}"}
    assert of_encoder < set(shards.values()), "some shards hold nothing of the encoder"
    with serving(sharded) as hub:
        there = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        rows = encoded(REPO, tmp_path, **there)
        fetched = set(hub.sent)
        again = encoded(REPO, tmp_path, **{**there, "HF_HUB_OFFLINE": "1"})
        assert set(hub.sent) == fetched, "the second time all is in the cache"
    assert {name for name in fetched if name.endswith(".safetensors")} == of_encoder
    assert torch.equal(rows, encoded(str(sharded), tmp_path))
    assert torch.equal(rows, again)
