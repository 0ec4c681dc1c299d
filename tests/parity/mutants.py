"""Planted errors: the suite is worth something only if it sees each of these."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from tectum.models.adapter import EncodedRows, Prepared
from tests.parity.cases import Family, Plant


def _two_items_swapped(prepared: Prepared, encoded: EncodedRows) -> EncodedRows:
    if len(prepared.items) < 2:
        return encoded
    first, second, *rest = encoded.rows.split([item.rows for item in prepared.items])
    return replace(encoded, rows=torch.cat([second, first, *rest]))


def _one_row_missing(prepared: Prepared, encoded: EncodedRows) -> EncodedRows:
    return replace(encoded, rows=encoded.rows[:-1], deepstack=tuple(layer[:-1] for layer in encoded.deepstack))


def _deepstack_dropped(prepared: Prepared, encoded: EncodedRows) -> EncodedRows:
    return replace(encoded, deepstack=())


def _deepstack_zeroed(prepared: Prepared, encoded: EncodedRows) -> EncodedRows:
    return replace(encoded, deepstack=tuple(torch.zeros_like(layer) for layer in encoded.deepstack))


def _timestamps_shifted(prepared: Prepared) -> Prepared:
    """By a fortieth of a second: one frame of a clip at 40 fps."""
    items = [replace(item, timestamps=tuple(time + 0.025 for time in item.timestamps)) for item in prepared.items]
    return replace(prepared, items=tuple(items))


#: name → what is planted, and the families (with a modality each) that must show it
MUTANTS: dict[str, tuple[Plant, tuple[tuple[str, str], ...]]] = {
    "two items swapped": (
        Plant(encoded=_two_items_swapped),
        (("qwen2_5_vl", "image"), ("llava", "image"), ("qwen2_audio", "audio"), ("internvl", "video")),
    ),
    "one row missing": (
        Plant(encoded=_one_row_missing),
        (("qwen3_vl", "image"), ("gemma3", "image"), ("voxtral", "audio"), ("smolvlm", "video")),
    ),
    "deepstack dropped": (
        Plant(encoded=_deepstack_dropped),
        (("qwen3_vl", "image"), ("qwen3_vl", "video"), ("qwen3_omni", "image")),
    ),
    "deepstack zeroed": (Plant(encoded=_deepstack_zeroed), (("qwen3_vl", "image"), ("qwen3_omni", "video"))),
    "timestamps shifted": (
        Plant(prepared=_timestamps_shifted),
        (("qwen3_vl", "video"), ("smolvlm", "video"), ("qwen2_5_omni", "video")),
    ),
    "PIL instead of the torchvision processor": (
        Plant(backend="pil"),
        (("qwen2_vl", "image"), ("qwen3_vl", "image"), ("llava", "image")),
    ),
}


def hunt(folder: Path, *, as_json: bool) -> int:
    """Run the cases with each error planted; 1 when one stays unseen."""
    found = []
    for number, (name, (plant, targets)) in enumerate(MUTANTS.items()):
        for family, modality in targets:
            planted = Family(family, folder / f"{number}-{family}-{modality}", plant=plant)
            seen = [result.case for result in planted.cases(modality) if not result.passed]
            found.append({"mutant": name, "family": family, "modality": modality, "caught": bool(seen), "by": seen})
            by = f"{len(seen)} cases, first: {seen[0]}" if seen else "NOTHING"
            print(f"{'caught' if seen else 'MISSED'} {name:40} {family:14} {modality:6} by {by}", flush=True)
    missed = [one for one in found if not one["caught"]]
    if as_json:
        print(json.dumps({"mutants": found, "total": len(found), "missed": len(missed)}))
    return 1 if missed else 0
