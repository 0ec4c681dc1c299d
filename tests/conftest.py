"""Shared fixtures: a tiny checkpoint, and a server process around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tectum.demo.encoder_process import EncoderProcess
from tectum.models.tiny import build_tiny_qwen2_5_vl

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL checkpoint."""
    return build_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "tiny-qwen2.5-vl")


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[EncoderProcess]:
    """A running encoder server, shared by the tests that only need one."""
    flags = (
        "--forward-threads",
        "1",
        "--log-level",
        "warning",
        "--max-image-pixels",
        "4000000",
        "--unknown-id-wait",
        "0.5",
    )
    with EncoderProcess(tiny, *flags) as process:
        yield process


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates: the server's, a client's of the right authority, and a client's of another."""
    import trustme  # the environments of the engines share this file, and have no use for it

    folder = tmp_path_factory.mktemp("papers")
    ours, theirs = trustme.CA(), trustme.CA()
    found = {"ca": folder / "ca.pem"}
    ours.cert_pem.write_to_path(str(found["ca"]))
    server = ours.issue_cert("127.0.0.1", "localhost")
    for name, cert in (
        ("server", server),
        ("friend", ours.issue_cert("friend@example.org")),
        ("stranger", theirs.issue_cert("s@example.org")),
    ):
        found[name], found[f"{name}-key"] = folder / f"{name}.pem", folder / f"{name}.key"
        cert.private_key_pem.write_to_path(str(found[f"{name}-key"]))
        for number, pem in enumerate(cert.cert_chain_pems):
            pem.write_to_path(str(found[name]), append=number > 0)
    return found
