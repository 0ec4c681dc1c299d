"""A document read in place: the rows that were packed, as views; whatever does not hold together is refused."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load, save
from xxhash import xxh3_64_digest

from tectum.delivery import document, wire
from tectum.errors import DeliveryError
from tectum.types import ItemMetadata, Modality, RequestMetadata


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
def test_what_was_packed_is_read_in_place(dtype, layers):
    buffer = bytearray(packed(dtype, layers))
    found = document.read(memoryview(buffer))
    here, expected = found.embedding(), torch.arange(24, dtype=torch.float32).reshape(6, 4).to(dtype)
    assert torch.equal(here.rows, expected)
    assert all(torch.equal(layer, expected + 1 + i) for i, layer in enumerate(here.deepstack))
    assert len(here.deepstack) == layers
    assert (here.item_rows, here.grid_thw, here.req_id) == ((2, 4), ((1, 4, 2), (1, 4, 4)), "r")
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


def test_any_damage_is_refused():
    """Whatever single byte changes, header and checksum included: the reader's own error, never other rows, never a crash."""
    rng, whole = random.Random(3), packed()
    for _ in range(2000):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= rng.randrange(1, 256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        with pytest.raises(DeliveryError) as caught:
            document.read(memoryview(damaged))
        assert caught.value.code == "invalid_rows"
        assert len(caught.value.message) <= 200


def test_another_reader_of_safetensors_finds_the_same():
    """The library's own reader, which knows nothing of ours; and the checksum, worked out beside."""
    whole = packed(torch.bfloat16, 1)
    found = load(whole)
    assert torch.equal(found["rows"], torch.arange(24.0).reshape(6, 4).bfloat16())
    assert torch.equal(found["deepstack.0"], found["rows"] + 1)
    assert found["item_rows"].tolist() == [2, 4]
    assert found["grid_thw"].tolist() == [[1, 4, 2], [1, 4, 4]]
    assert bytes(found["xxh3"].tolist()) == whole[-8:] == xxh3_64_digest(whole[:-8])


@pytest.mark.parametrize("size", [1, 7, 8, 100, 5000])
def test_a_document_may_be_summed_in_portions_as_it_comes(size):
    whole = memoryview(bytearray(packed()))

    def summed() -> wire.Sum:
        checksum = wire.Sum(len(whole))
        for filled in (*range(size, len(whole), size), len(whole)):
            checksum.add(whole, filled)
        return checksum

    assert document.read(whole, summed()).req_id == "r"
    whole[-20] ^= 1
    with pytest.raises(DeliveryError, match="checksum"):
        document.read(whole, summed())


@pytest.mark.parametrize("size", [1, 7, 96, 4096])
def test_pieces_of_any_size_are_the_document_and_lie_in_staging(size):
    staging = memoryview(bytearray(range(192)))
    items = (ItemMetadata(Modality.IMAGE, 2, (1, 4, 2), 8), ItemMetadata(Modality.IMAGE, 4, (1, 4, 4), 16))
    metadata = RequestMetadata("r", 1, 0, items, 4, 1, "float32")
    unsent = wire.staged(metadata, [staging[:96], staging[96:]])
    pieces = list(unsent.pieces(size))
    whole = b"".join(pieces)
    assert (len(whole), whole) == (unsent.nbytes, unsent.whole())
    assert all(len(piece) <= max(size, 8) for piece in pieces)
    assert sum(len(piece) for piece in pieces if piece.obj is staging.obj) == 192, "rows are not copied"
    found = document.read(memoryview(whole))
    assert (bytes(found.arrays[0].data), bytes(found.arrays[1].data)) == (bytes(range(96)), bytes(range(96, 192)))
    assert (found.item_rows, found.grid_thw, found.req_id) == ((2, 4), ((1, 4, 2), (1, 4, 4)), "r")
    assert list(found.items) == [item.to_json() for item in items]


def with_header(change, whole: bytes | None = None) -> memoryview:
    """Changed in its header, with a checksum that is right."""
    whole = whole or packed()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    changed = len(text).to_bytes(8, "little") + text + whole[8 + length : -8]
    return memoryview(changed + xxh3_64_digest(changed))


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
        lambda header: header["__metadata__"].update(tectum="1"),
        lambda header: header["__metadata__"].update(dtype="float16"),
        lambda header: header.update(__metadata__=[]),
    ],
)
def test_headers_that_do_not_hold_together_are_refused(change):
    with pytest.raises(DeliveryError) as caught:
        document.read(with_header(change))
    assert caught.value.code == "invalid_rows"


def test_rows_that_are_no_floats_are_refused_even_where_all_agree_on_it():
    def as_bytes(header):
        header["__metadata__"]["dtype"] = "uint8"
        for name in ("rows", "deepstack.0", "deepstack.1"):
            header[name].update(dtype="U8", shape=[6, 16])

    with pytest.raises(DeliveryError, match="not uint8"):
        document.read(with_header(as_bytes))


def test_facts_that_are_nested_without_end_are_refused():
    def nested(header):
        end = header["xxh3"]["data_offsets"][0]
        header["items"] = {"dtype": "U8", "shape": [len(deep)], "data_offsets": [end, end + len(deep)]}
        header["xxh3"]["data_offsets"] = [end + len(deep), end + len(deep) + 8]

    deep = b"[" * 200_000
    with pytest.raises(DeliveryError, match="facts of the 2 items"):
        wire.unpack(bytes(with_header(nested, packed()[:-8] + deep + bytes(8))))


def test_tensors_that_overlap_are_refused_even_with_a_right_checksum():
    whole = packed(layers=1)

    def overlap(header):
        header["deepstack.0"]["data_offsets"] = header["rows"]["data_offsets"]

    with pytest.raises(DeliveryError, match="overlap"):
        document.read(with_header(overlap, whole))


def test_a_header_that_claims_gigabytes_is_not_read():
    with pytest.raises(DeliveryError):
        document.read(memoryview((1 << 40).to_bytes(8, "little") + b"{}"))
    with pytest.raises(DeliveryError, match="format"):
        document.read(memoryview(save({"rows": torch.ones(2, 2)}, {"tectum": "0"})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(dtype, value):
    rows = torch.full((6, 4), 3e4).to(dtype)  # large, and finite in all three types
    assert document.read(memoryview(bytearray(packed(dtype, 1, rows)))).finite()
    rows[5, 3] = value
    assert not document.read(memoryview(bytearray(packed(dtype, 1, rows)))).finite()
