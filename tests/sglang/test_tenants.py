"""Rows are shared within a tenant, and never between two, at SGLang's doors as at the native one."""

from __future__ import annotations

import grpc
import httpx2
import pytest

from tectum.demo.encoder_process import EncoderProcess
from tests.serving.test_native import jpeg, until
from tests.sglang.conftest import FLAGS, grpc_target
from tests.sglang.language_server import data_uri
from tests.sglang.receiver import Receiver
from tests.sglang.test_grpc import Stub


@pytest.fixture(scope="module")
def shared(tiny, tmp_path_factory):
    """An encoder that keeps rows by content, for two tenants and a proxy that speaks for others."""
    tokens = tmp_path_factory.mktemp("tenants") / "tokens"
    tokens.write_text("one alice\nother alice\ntwo bob\nproxy\n")
    flags = ("--grpc-port", "0", "--cache-bytes", "1000000", "--token-file", str(tokens))
    with EncoderProcess(tiny, *FLAGS, *flags, "--tenant-header", "X-Tectum-Tenant") as process:
        yield process


def hits(process: EncoderProcess) -> float:
    answer = httpx2.get(f"{process.url}/metrics", headers={"authorization": "Bearer proxy"}, trust_env=False)
    (line,) = (line for line in answer.text.splitlines() if line.startswith("encoder_cache_hits_total "))
    return float(line.split()[1])


def over_http(process: EncoderProcess, rid: str, picture: bytes, port: int, headers: dict[str, str]) -> None:
    body = {"req_id": rid, "mm_items": [data_uri(picture)], "modality": "IMAGE", "num_parts": 1, "part_idx": 0}
    body |= {"prefill_host": "127.0.0.1", "embedding_port": port}
    answer = httpx2.post(f"{process.url}/encode", json=body, headers=headers, timeout=20, trust_env=False)
    assert answer.is_success, answer.text


def over_grpc(process: EncoderProcess, rid: str, picture: bytes, port: int, headers: dict[str, str]) -> None:
    with grpc.insecure_channel(grpc_target(process)) as channel:
        Stub(channel, **headers).encode(rid, [data_uri(picture)], embedding_port=[port]).result()


@pytest.mark.parametrize(("door", "seed"), [(over_http, 1), (over_grpc, 2)])
def test_rows_of_one_tenant_are_never_anothers(shared, door, seed):
    """The same picture by each caller in turn, and whether its rows were known."""
    callers = [
        ({"authorization": "Bearer one"}, 0),
        ({"authorization": "Bearer other"}, 1),  # of the same tenant
        ({"authorization": "Bearer two"}, 0),
        ({"authorization": "Bearer proxy"}, 0),
        ({"authorization": "Bearer proxy", "x-tectum-tenant": "bob"}, 1),
        ({"authorization": "Bearer one", "x-tectum-tenant": "bob"}, 1),  # a token's own tenant comes first
        ({"authorization": "Bearer proxy", "x-tectum-tenant": "carol"}, 0),
    ]
    picture = jpeg(224, 224, seed)
    with Receiver() as receiver:
        for number, (headers, known) in enumerate(callers):
            before = hits(shared)
            door(shared, f"tenant-{seed}-{number}", picture, receiver.port, headers)
            until(lambda before=before, known=known: hits(shared) == before + known)
            assert hits(shared) == before + known, (number, headers)
