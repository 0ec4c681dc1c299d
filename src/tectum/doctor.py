"""`tectum doctor`: what is installed, what would be used, and whether a model can be served. Loads no weights."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata, util
from typing import Any

from rich.console import Console
from rich.table import Table

import tectum
from tectum.errors import TectumError

#: what the base install brings, and what `tectum[serve]` adds; a test holds both equal to pyproject.toml
BASE = ("httpx2", "numpy", "pydantic", "pydantic-settings", "rich", "typer", "xxhash")
SERVE = (
    *("torch", "torchvision", "transformers", "safetensors", "pillow", "filetype", "av", "soundfile"),
    *("fastapi", "httptools", "msgspec", "multipart", "prometheus-client", "uvicorn", "uvloop"),
)


def examine(model: str | None, as_json: bool) -> int:
    """Print the findings. Returns the exit code: 0 when all is well, 2 when the model cannot be served."""
    findings: dict[str, Any] = {
        "tectum": tectum.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in (*BASE, *SERVE)},
    }
    missing = [name for name in SERVE if findings["packages"][name] is None]
    findings["can_serve"] = not missing
    if not missing:
        findings.update(_hardware())
    if model is not None:
        findings["model"] = _model(model, missing)
    if as_json:
        sys.stdout.write(json.dumps(findings) + "\n")
    else:
        _show(findings, missing)
    return 2 if model is not None and not findings["model"]["supported"] else 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    import torch

    from tectum.models.load import resolve_device

    device = resolve_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": str(device), "device_name": name, "torch_threads": torch.get_num_threads()}


def _model(model: str, missing: list[str]) -> dict[str, Any]:
    if missing or util.find_spec("torch") is None:
        return {
            "model": model,
            "supported": False,
            "problem": 'tectum[serve] is not installed: pip install "tectum[serve]"',
        }
    from tectum.models.load import inspect_model

    report = inspect_model(model)
    found: dict[str, Any] = {"model": report.model, "architecture": report.architecture}
    if report.problem is not None:
        problem = report.problem
        return {**found, "supported": False, "code": problem.code, "problem": problem.message, **_known(problem)}
    return {
        **found,
        "supported": True,
        "family": report.family,
        "modalities": list(report.modalities),
        "encoder_parameters": report.parameters,
        "encoder_bytes": report.nbytes,
        "dtype": report.dtype,
        "width": report.width,
        "rows": dict(report.rows),
    }


def _known(problem: TectumError) -> dict[str, Any]:
    """The architectures there are, where the problem is that this one is none of them."""
    return {"known": problem.details["known"]} if "known" in problem.details else {}


def _show(findings: dict[str, Any], missing: list[str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("tectum", f"{findings['tectum']} on Python {findings['python']}")
    for name, version in findings["packages"].items():
        table.add_row(name, version or "[yellow]not installed[/]")
    if missing:
        table.add_row("serving", '[yellow]not possible[/]: pip install "tectum\\[serve]"')
    else:
        table.add_row("device", f"{findings['device']} ({findings['device_name']})")
    for key, value in findings.get("model", {}).items():
        if key == "rows":
            for sample, rows in value.items():
                table.add_row(f"rows of {sample}", f"{rows:,}")
            continue
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        table.add_row(key.replace("_", " "), f"{value:,}" if type(value) is int else shown)
    Console().print(table)
