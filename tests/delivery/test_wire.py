"""The wire format: what goes in comes out, and whatever is wrong is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tectum.delivery import wire
from tectum.errors import DeliveryError


def packed(dtype=torch.float32, layers: int = 0, **changed) -> bytes:
    rows = torch.arange(24, dtype=torch.float32).reshape(6, 4).to(dtype)
    facts = {
        "rows": rows,
        "item_rows": [2, 4],
        "grid_thw": [(1, 4, 2), (1, 4, 4)],
        "deepstack": [rows + 1 + i for i in range(layers)],
        "dtype": str(dtype).removeprefix("torch."),
        "req_id": "r",
    }
    return wire.pack(**{**facts, **changed})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [0, 3])
def test_what_goes_in_comes_out(dtype, layers):
    found = wire.unpack(packed(dtype, layers))
    expected = torch.arange(24, dtype=torch.float32).reshape(6, 4).to(dtype)
    assert found.rows.dtype == dtype
    assert torch.equal(found.rows, expected)
    assert [torch.equal(layer, expected + 1 + i) for i, layer in enumerate(found.deepstack)] == [True] * layers
    assert (found.item_rows, found.grid_thw, found.req_id) == ((2, 4), ((1, 4, 2), (1, 4, 4)), "r")
    assert [len(part) for part in found.split()] == [2, 4]


def test_rows_are_a_copy_of_their_own():
    document = packed()
    wire.unpack(document).rows.zero_()
    assert torch.equal(wire.unpack(document).rows, torch.arange(24, dtype=torch.float32).reshape(6, 4))


def test_numpy_rows_give_the_same_rows():
    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    assert torch.equal(wire.unpack(packed(rows=rows)).rows, wire.unpack(packed()).rows)


def test_the_facts_of_items_come_out_as_they_went_in():
    facts = [{"timestamps": [0.5, 1.5], "sampling": {"fps": 2.0}}, {"timestamps": []}]
    assert wire.unpack(packed(items=facts)).items == tuple(facts)
    assert wire.unpack(packed()).items == ()
    for wrong in (facts[:1], [1, 2]):
        with pytest.raises(DeliveryError, match="facts of the 2 items"):
            wire.unpack(packed(items=wrong))


def test_every_flipped_bit_of_the_rows_is_seen():
    document = bytearray(packed())
    start = 8 + int.from_bytes(document[:8], "little")
    for position in range(start, len(document), 13):
        damaged = bytearray(document)
        damaged[position] ^= 1
        with pytest.raises(DeliveryError) as caught:
            wire.unpack(bytes(damaged))
        assert caught.value.code == "invalid_rows"


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 60, -1])
def test_truncated_documents_are_refused(cut):
    with pytest.raises(DeliveryError):
        wire.unpack(packed()[:cut])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"item_rows": [2, 5]}, "sum to 7"),
        ({"grid_thw": [(1, 4, 2)]}, "2 items, but 1 grids"),
        ({"deepstack": [torch.zeros(5, 4)]}, "deepstack layer"),
        ({"rows": torch.zeros(6)}, "not float32"),
        ({"item_rows": [-1, 7]}, "cannot be"),
    ],
)
def test_contradictions_are_refused(changed, words):
    with pytest.raises(DeliveryError, match=words):
        wire.unpack(packed(**changed))


def test_foreign_safetensors_are_refused():
    with pytest.raises(DeliveryError, match="not in Tectum's format"):
        wire.unpack(save({"rows": torch.zeros(2, 2)}))


def test_a_pickle_is_not_even_looked_at():
    import pickle

    with pytest.raises(DeliveryError):
        wire.unpack(pickle.dumps({"rows": 1}))


def test_without_torch_bfloat16_widens_exactly(tmp_path):
    (tmp_path / "rows").write_bytes(packed(torch.bfloat16))
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else real(name, *a)\n"
        "from tectum.delivery import wire\n"
        f"e = wire.unpack(open({str(tmp_path / 'rows')!r}, 'rb').read())\n"
        "print(e.dtype, e.rows.astype(float).tolist())"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    dtype, _, rows = out.partition(" ")
    assert dtype == "float32"
    assert json.loads(rows) == np.arange(24).reshape(6, 4).tolist()
