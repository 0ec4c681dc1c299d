"""The documentation is true: every command in it runs here, or says what it needs; the site builds without a warning.

A block is run unless the line before it is `<!-- needs: … -->` (hardware, a cluster, an index) or
`<!-- run by: FILE -->` (a test of its own). A block titled "terminal 1" is started first and kept running.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
import yaml

from tectum.config import Settings
from tectum.demo.answers import checkpoint
from tectum.demo.encoder_process import EncoderProcess

ROOT = Path(__file__).parents[1]
PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "errors" and "```" in page.read_text()
]
_BLOCK = re.compile(
    r"(?:<!-- (needs|run by): ([^\n]+?) -->\n)?```(bash|python)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
SERVE = "tectum serve \"$(python -c 'from tectum.demo.answers import checkpoint; print(checkpoint())')\"\n"


class Block(NamedTuple):
    mark: str  # "needs", "run by" or ""
    why: str
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _BLOCK.finditer(page.read_text())]


@pytest.fixture(scope="module")
def documented_server():
    """What the blocks titled "terminal 1" start, at the address that the pages name."""
    with EncoderProcess(checkpoint(), "--forward-threads", "1", "--log-level", "warning") as server:
        yield server


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_runs(page, documented_server, tmp_path):
    found = blocks(page)
    (tmp_path / "src").symlink_to(ROOT / "src")  # pages name the photographs as they lie in a clone
    assert len(found) == page.read_text().count("```bash") + page.read_text().count("```python")
    for block in found:
        if block.mark == "run by":
            assert (ROOT / block.why).exists(), block.why
        elif "terminal 1" in block.title:
            assert block.text == SERVE
        elif block.mark == "":
            _run(block, documented_server.url, tmp_path)


def _run(block: Block, url: str, folder: Path) -> None:
    text = block.text.replace("http://127.0.0.1:30100", url)
    programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "bash" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, env=_environment(programs))
    assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}"


def _environment(programs: str) -> dict[str, str]:
    return {**os.environ, "PATH": programs, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")  # a warning would be printed
    site = tmp_path / "site"
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"--{name.replace('_', '-')}" in settings for name in Settings.model_fields)
    assert "/v1/encode" in (site / "reference" / "http.html").read_text()
    for page in site.rglob("*.html"):
        assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', page.read_text()), page


# --- Kubernetes ---


def manifest() -> dict:
    return yaml.safe_load((ROOT / "examples" / "kubernetes" / "deployment.yaml").read_text())


def test_the_manifest_gives_arguments_that_the_command_takes(tmp_path):
    template = manifest()["spec"]["template"]["spec"]
    container = template["containers"][0]
    verb, model, *flags = container["args"]
    assert (container["command"], verb) == (["tectum"], "serve")
    token = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "token")
    assert f"--token-file={token}/token" in flags
    given = dict(flag.removeprefix("--").split("=") for flag in flags)
    settings = Settings.load(**{name.replace("-", "_"): value for name, value in given.items()})
    waits, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert waits == "sleep"
    assert template["terminationGracePeriodSeconds"] > int(seconds) + settings.drain_timeout
    assert container["ports"][0]["containerPort"] == settings.port
    assert any(model.startswith(mount["mountPath"]) for mount in container["volumeMounts"])


def test_the_probes_ask_pages_that_need_no_token(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    container = manifest()["spec"]["template"]["spec"]["containers"][0]
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    flags = ("--token-file", str(token), "--forward-threads", "1", "--log-level", "warning")
    with EncoderProcess(checkpoint(), *flags) as server:
        assert [httpx2.get(server.url + path).status_code for path in probes] == [200, 200, 200]
        assert httpx2.get(f"{server.url}/v1/limits").status_code == 401


def test_the_manifest_renders():
    kubectl = Path("/usr/bin/kubectl")
    if not kubectl.exists():
        pytest.skip("needs kubectl")
    command = [str(kubectl), "kustomize", str(ROOT / "examples" / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    assert set(kinds) == {"Deployment", "Service"}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert kinds["Service"]["spec"]["selector"].items() <= labels
