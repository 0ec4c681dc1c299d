"""What follows from grids is worked out on the host, once, and it is what the tower goes by."""

from __future__ import annotations

import pytest
import torch

from tectum.models import grids
from tectum.models.load import load_adapter
from tests import zoo

CPU = torch.device("cpu")
#: family -> what its tower takes beside the grids
TAKEN = {
    "qwen2_vl": {"position_ids", "cu_seqlens"},
    "qwen2_5_vl": {"position_ids", "cu_seqlens", "window_index", "cu_window_seqlens"},
    "qwen3_vl": {"position_ids", "cu_seqlens", "interp_indices", "interp_weights"},
    "qwen2_5_omni": {"position_ids", "cu_seqlens", "window_index", "cu_window_seqlens"},
    "qwen3_omni": {"position_ids", "cu_seqlens", "interp_indices", "interp_weights"},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return {
        name: load_adapter(str(zoo.build(name, tmp_path_factory.mktemp(name) / "m")), device="cpu") for name in TAKEN
    }


def wrong(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As well formed, but not what follows from the grid."""
    if name.startswith("cu_"):
        return torch.tensor([0, int(tensor[-1]) // 2, int(tensor[-1])], dtype=tensor.dtype)
    return tensor.flip(0)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in TAKEN.items() for name in names])
def test_the_tower_goes_by_what_it_is_given(family, name, adapters, monkeypatch):
    adapter = adapters[family]
    prepared = adapter.prepare([zoo.picture(150, 100)], {})
    (right,) = adapter.encode([prepared])

    derived = adapter._grid_arguments.of(prepared.inputs["image_grid_thw"])
    assert set(derived) == TAKEN[family]
    planted = {**derived, name: wrong(name, derived[name])}
    monkeypatch.setattr(adapter._grid_arguments, "of", lambda _: planted)

    (other,) = adapter.encode([prepared])
    assert other.rows.shape == right.rows.shape
    assert not torch.equal(other.rows, right.rows)


def test_sets_of_grids_are_remembered_apart_and_large_ones_not_at_all(adapters):
    calls = []

    def rule(tower, found):
        calls.append(found.tolist())
        return grids.segments(tower, found)

    arguments = grids.GridArguments(adapters["qwen2_vl"].model.model.visual, (rule,), CPU)
    small, two, large = [[1, 4, 6]], [[1, 4, 6], [2, 2, 2]], [[1, 64, 66]]
    found = [
        arguments.of(torch.tensor(given))["cu_seqlens"].tolist() for given in (small, two, small, two, large, large)
    ]
    assert calls == [small, two, large, large]
    assert found == [[0, 24], [0, 24, 28, 32], [0, 24], [0, 24, 28, 32], [0, 4224], [0, 4224]]
