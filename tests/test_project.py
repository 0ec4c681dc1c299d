"""What the project promises about itself: a light base install, no unpickling, dependencies that are accounted for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tectum import doctor
from tectum.config import Settings
from tectum.lifecycle.ledger import Limits
from tectum.media.policy import MediaPolicy
from tectum.models.registry import FAMILIES
from tectum.pipeline.limits import lifecycle_limits

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize(
    "module",
    [
        "tectum",
        "tectum.engines.client",
        "tectum.engines.transformers",
        "tectum.engines.receiver",
        "tectum.delivery.wire",
        "tectum.delivery.base",
        "tectum.delivery.sglang_frames",
        "tectum.cli",
        "tectum.bench.run",
        "tectum.bench.generator",
        "tectum.engines.local",
        "tectum.engines.pull",
        "tectum.engines.row_store",
        "tectum.engines.fetcher",
    ],
)
def test_the_base_install_imports_nothing_heavy(module):
    heavy = "torch transformers torchvision fastapi PIL uvicorn zmq grpc mooncake"
    program = f"import sys, {module}; print([name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_is_unpickled_or_evaluated():
    forbidden = {"pickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not forbidden & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"), path
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
                assert keywords.get("trust_remote_code") in (None, "False"), path


def names_of(requirements) -> set[str]:
    return {re.split(r"[<>=!;\[ ]", requirement)[0] for requirement in requirements}


def test_the_doctor_looks_at_every_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert names_of(project["dependencies"]) == set(doctor.BASE)
    assert names_of(project["optional-dependencies"]["serve"]) == set(doctor.SERVE)


def test_defaults_that_stand_in_two_places_agree():
    """`Limits` and `MediaPolicy` have defaults of their own, so that their rooms stand alone."""
    assert lifecycle_limits(Settings()) == Limits()
    assert MediaPolicy.from_settings(Settings()) == MediaPolicy()


def test_every_dependency_is_explained_and_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    names = names_of(wanted)
    explained = set(re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs" / "dependencies.md").read_text(), re.MULTILINE))
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names == explained
    assert {name.lower() for name in names} <= pinned
    assert not re.search(r"\+cpu|://|/opt|find-links", (ROOT / "constraints.txt").read_text())


def test_imports_keep_their_direction():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout


def test_every_folder_of_the_house_is_on_the_map():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in sorted(p.name for p in (ROOT / "src" / "tectum").iterdir() if p.is_dir() and p.name != "__pycache__"):
        rows = [line for line in text.splitlines() if line.startswith(f"| `{folder}/` |")]
        assert len(rows) == 1, f"docs/architecture.md does not mention {folder}/"
        families = {module for module, _ in FAMILIES.values()} if folder == "models" else set()
        modules = {path.stem for path in (ROOT / "src" / "tectum" / folder).glob("[!_]*.py")} - families
        absent = [name for name in sorted(modules) if f"`{name}`" not in rows[0]]
        assert not absent, f"docs/architecture.md does not say what these of {folder}/ own: {absent}"
    for target in set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
