"""A document read in place: the same rows as `wire.unpack` gives, as views; whatever does not hold together is refused."""

from __future__ import annotations

import json
import random
import zlib

import pytest
import torch
from safetensors.torch import save

from tectum.delivery import document, wire
from tectum.errors import DeliveryError


def packed(dtype=torch.float32, layers: int = 2, rows=None) -> bytes:
    rows = torch.arange(24, dtype=torch.float32).reshape(6, 4).to(dtype) if rows is None else rows
    return wire.pack(
        rows=rows,
        item_rows=[2, 4],
        grid_thw=[(1, 4, 2), (1, 4, 4)],
        deepstack=[rows + 1 + i for i in range(layers)],
        dtype=str(dtype).removeprefix("torch."),
        req_id="r",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [0, 3])
def test_what_the_copying_reader_gives(dtype, layers):
    buffer = bytearray(packed(dtype, layers))
    found, expected = document.read(memoryview(buffer)), wire.unpack(bytes(buffer))
    here = found.embedding()
    assert torch.equal(here.rows, expected.rows)
    assert all(torch.equal(a, b) for a, b in zip(here.deepstack, expected.deepstack, strict=True))
    assert (here.item_rows, here.grid_thw, here.req_id) == (expected.item_rows, expected.grid_thw, "r")
    assert (found.rows, found.width, found.dtype) == (6, 4, str(dtype).removeprefix("torch."))
    at = found.offsets[0]
    assert bytes(buffer[at : at + len(found.arrays[0].data)]) == bytes(found.arrays[0].data)
    buffer[at : at + 2] = b"\x01\x02"
    assert bytes(found.arrays[0].data[:2]) == b"\x01\x02", "a view, not a copy"


def test_every_damaged_byte_of_the_tensors_is_seen():
    whole = packed()
    for position in range(8 + int.from_bytes(whole[:8], "little"), len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        with pytest.raises(DeliveryError, match="checksum"):
            document.read(memoryview(damaged))


def test_any_damage_is_refused_or_harmless():
    """Whatever single byte changes, the reader raises its own error or gives the same rows: never others, never a crash."""
    rng, whole = random.Random(3), packed()
    expected = wire.unpack(whole).rows
    for _ in range(2000):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            found = document.read(memoryview(damaged))
        except DeliveryError as error:
            assert error.code == "invalid_rows"
            assert len(error.message) <= 200
        else:
            assert torch.equal(found.embedding().rows, expected)


def with_header(change, whole: bytes | None = None) -> memoryview:
    whole = whole or packed()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + whole[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["rows"].update(data_offsets=[0, 96]),
        lambda header: header["rows"].update(shape=[-6, -4]),
        lambda header: header["rows"].update(shape=[3, 8]),
        lambda header: header["rows"].update(shape=[24]),
        lambda header: header["rows"].update(dtype="I32"),
        lambda header: header["rows"].update(data_offsets=[True, 97]),
        lambda header: header.update(other=header.pop("deepstack.1")),
        lambda header: header.pop("item_rows"),
        lambda header: header["__metadata__"].update(tectum="2"),
        lambda header: header["__metadata__"].update(dtype="float16"),
        lambda header: header.update(__metadata__=[]),
    ],
)
def test_headers_that_do_not_hold_together_are_refused(change):
    with pytest.raises(DeliveryError) as caught:
        document.read(with_header(change))
    assert caught.value.code == "invalid_rows"


def test_tensors_that_overlap_are_refused_even_with_a_right_checksum():
    whole = packed(layers=1)

    def overlap(header):
        header["deepstack.0"]["data_offsets"] = header["rows"]["data_offsets"]
        rows = torch.arange(24, dtype=torch.float32).numpy().tobytes()
        grid = b"".join(n.to_bytes(8, "little") for n in (1, 4, 2, 1, 4, 4))
        items = b"".join(n.to_bytes(8, "little") for n in (2, 4))
        header["__metadata__"]["crc32"] = f"{zlib.crc32(rows + grid + items + rows):08x}"

    with pytest.raises(DeliveryError, match="overlap"):
        document.read(with_header(overlap, whole))


def test_a_header_that_claims_gigabytes_is_not_read():
    with pytest.raises(DeliveryError):
        document.read(memoryview((1 << 40).to_bytes(8, "little") + b"{}"))
    with pytest.raises(DeliveryError, match="format"):
        document.read(memoryview(save({"rows": torch.ones(2, 2)}, {"crc32": "0"})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(dtype, value):
    rows = torch.full((6, 4), 3e4).to(dtype)  # large, and finite in all three types
    assert document.read(memoryview(bytearray(packed(dtype, 1, rows)))).finite()
    rows[5, 3] = value
    assert not document.read(memoryview(bytearray(packed(dtype, 1, rows)))).finite()
