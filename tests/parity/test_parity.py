"""The bounded slice of `python -m tests.parity` that runs with every change, and what the suite does not look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tectum.errors import BadRequestError, InternalError
from tectum.models.registry import FAMILIES, SERVED, adapter_class, adapter_for
from tectum.types import ClipInfo, Modality, PictureInfo, Recording, RecordingInfo
from tests import zoo
from tests.parity.cases import Family, clip
from tests.parity.mutants import MUTANTS


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Families built when they are first asked for."""
    built: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in built:
            built[name] = Family(name, tmp_path_factory.mktemp(name))
        return built[name]

    return get


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_rows_counts_metadata_and_logits_equal_the_model_in_one_piece(name, families):
    family = families(name)
    failed = [
        result for modality in family.modalities() for result in family.cases(modality, (1, 2)) if not result.passed
    ]
    assert failed == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3_vl", "llava_onevision", "qwen2_audio"])
def test_half_precision_equals_the_model_in_half_precision(name, dtype, tmp_path):
    family = Family(name, tmp_path, dtype=dtype)
    failed = [
        result for modality in family.modalities() for result in family.cases(modality, (1,)) if not result.passed
    ]
    assert failed == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_errors_are_seen(mutant, tmp_path):
    plant, targets = MUTANTS[mutant]
    name, modality = targets[0]
    assert any(not result.passed for result in Family(name, tmp_path, plant=plant).cases(modality, (1, 2)))


# --- what depends on the request ---

#: family, our options, the same in the words of the family's processor
OPTIONS = [
    ("qwen2_5_vl", {"max_pixels": 9000}, {"images_kwargs": {"size": {"shortest_edge": 3136, "longest_edge": 9000}}}),
    (
        "qwen3_vl",
        {"min_pixels": 50_000},
        {"images_kwargs": {"size": {"shortest_edge": 50_000, "longest_edge": 65_536}}},
    ),
    ("internvl", {"min_patches": 4}, {"min_patches": 4}),
    ("internvl", {"detail": "low"}, {"crop_to_patches": False}),
    (
        "gemma3",
        {"detail": "high", "pan_and_scan_min_crop_size": 40},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40},
    ),
    ("idefics3", {"do_image_splitting": False}, {"do_image_splitting": False}),
    ("smolvlm", {"longest_edge": 128}, {"size": {"longest_edge": 128}}),
    ("smolvlm", {"detail": "low"}, {"do_image_splitting": False}),
]


@pytest.mark.parametrize(("name", "mine", "theirs"), OPTIONS)
def test_an_option_does_what_the_familys_processor_does_with_it(name, mine, theirs, families):
    family, picture = families(name), zoo.picture(200, 90)
    plain = family.adapter.prepare([picture], {})
    prepared = family.adapter.prepare([picture], mine)
    reference = family.colocated.run("image", [picture], **theirs)
    (encoded,) = family.adapter.encode([prepared])
    assert torch.equal(encoded.rows, reference.rows)
    assert prepared.rows == reference.placeholders
    assert prepared.rows != plain.rows
    assert family.adapter.plan([PictureInfo(200, 90)], mine)[0].rows == prepared.rows


def test_onevisions_rows_depend_on_the_pictures_in_the_prompt(families):
    """Three pictures, each at its own encoder: with the count of the prompt the rows are those of the prompt of three."""
    family = families("llava_onevision")
    pictures = [zoo.picture(200, 120, 1), zoo.picture(90, 90, 2), zoo.picture(300, 140, 3)]
    whole = family.colocated.run("image", pictures)
    parts = [family.adapter.prepare([picture], {"images_in_prompt": 3}) for picture in pictures]
    apart = [family.adapter.encode([part])[0].rows for part in parts]
    assert torch.equal(torch.cat(apart), whole.rows)
    assert sum(part.rows for part in parts) == whole.placeholders
    alone = family.adapter.prepare(pictures[:1], {})
    assert alone.rows > parts[0].rows
    keys = [family.adapter.content_options(Modality.IMAGE, {}, count) for count in (1, 3)]
    assert keys == [{"images_in_prompt": 1}, {"images_in_prompt": 3}]
    mixed = family.adapter.encode([alone, parts[0], parts[1]])
    assert torch.equal(mixed[0].rows, family.colocated.run("image", pictures[:1]).rows)
    assert torch.equal(mixed[1].rows, apart[0])
    assert torch.equal(mixed[2].rows, apart[1])


def test_qwen3_omnis_rows_depend_on_the_longest_recording(families):
    family = families("qwen3_omni")
    short, long = zoo.tone(1.0, 1)[:15_905], zoo.tone(2.0, 2)
    whole = family.colocated.run("audio", [short, long])
    part = family.adapter.prepare([recording(short)], {"padded_samples": len(long)}, Modality.AUDIO)
    (encoded,) = family.adapter.encode([part])
    torch.testing.assert_close(encoded.rows, whole.rows[: part.rows], atol=2e-5, rtol=0)
    assert part.rows + family.adapter.prepare([recording(long)], {}, Modality.AUDIO).rows == whole.placeholders
    infos = [RecordingInfo(len(samples) / 16000, 16000, 1) for samples in (short, long)]
    together = family.adapter.prepare([recording(short), recording(long)], {}, Modality.AUDIO)
    planned = [plan.rows for plan in family.adapter.plan(infos, {})]
    assert planned == [item.rows for item in together.items]
    (encoded,) = family.adapter.encode([together])
    assert torch.equal(encoded.rows, whole.rows)


def recording(samples) -> Recording:
    return Recording(samples, 16000, RecordingInfo(len(samples) / 16000, 16000, 1))


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen3_vl", "llava_onevision", "internvl", "gemma3", "idefics3", "smolvlm"]
)
def test_rows_of_many_sizes_are_those_of_the_familys_processor(name, families):
    """Counts from sizes alone, against the placeholders that the processor makes with the pixels."""
    family = families(name)
    sizes = np.random.default_rng(0).integers(20, 500, (40, 2)).tolist()
    for width, height in sizes:
        picture = zoo.picture(width, height)
        ids = family.colocated._inputs("image", [picture])["input_ids"]
        placeholders = int((ids == family.colocated._token("image")).sum())
        assert family.adapter.plan([PictureInfo(width, height)], {})[0].rows == placeholders, (width, height)


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni", "qwen3_omni"])
def test_rows_of_many_lengths_are_those_of_the_familys_processor(name, families):
    family = families(name)
    for samples in np.random.default_rng(0).integers(700, 80_000, 30).tolist():
        sound = np.zeros(samples, np.float32)
        ids = family.colocated._inputs("audio", [sound])["input_ids"]
        placeholders = int((ids == family.colocated._token("audio")).sum())
        info = RecordingInfo(samples / 16000, 16000, 1)
        assert family.adapter.plan([info], {})[0].rows == placeholders, samples


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llava_onevision", "qwen2_5_omni"])
@pytest.mark.parametrize("frames", [1, 2, 3, 5, 37])
def test_clips_of_any_length_are_sampled_and_counted(name, frames, families):
    adapter = families(name).adapter
    info = ClipInfo(64, 48, frames, tuple(i / 24 for i in range(frames)), 24.0, frames / 24)
    for options in ({}, {"fps": 3}, {"num_frames": 4}, {"num_frames": 500}, {"max_frames": 2}):
        indices = adapter.reading(Modality.VIDEO, options).choose(info)
        assert indices == sorted(indices)
        assert 1 <= len(indices) <= max(frames, 2)
        assert set(indices) <= set(range(frames))
        (plan,) = adapter.plan([info], options)
        taken = clip(len(indices), 64, 48)
        assert adapter.prepare([taken], options, Modality.VIDEO).rows == plan.rows


def test_a_short_recording_is_refused_and_a_long_one_says_what_was_used(families):
    adapter = families("qwen2_audio").adapter
    with pytest.raises(BadRequestError, match="too short for one row") as caught:
        adapter.prepare([recording(zoo.tone(1.0)), recording(zoo.tone(1.0)[:200])], {}, Modality.AUDIO)
    assert caught.value.item == 1
    (item,) = adapter.prepare([recording(zoo.tone(6.0))], {}, Modality.AUDIO).items
    assert (item.facts["seconds"], item.facts["seconds_used"]) == (6.0, 4.0)


def test_sound_is_not_dropped_by_a_model_that_hears_nor_in_silence_by_one_that_does_not(families):
    loud = clip(4, 64, 48)
    loud = replace(loud, info=replace(loud.info, has_audio=True))
    with pytest.raises(BadRequestError, match="model hears"):
        families("qwen2_5_omni").adapter.prepare([loud], {}, Modality.VIDEO)
    (dropped,) = families("qwen2_5_omni").adapter.prepare([loud], {"audio_track": "drop"}, Modality.VIDEO).items
    (deaf,) = families("qwen2_5_vl").adapter.prepare([loud], {}, Modality.VIDEO).items
    assert dropped.facts["audio_track"] == "drop"
    assert "not heard" in deaf.facts["audio_track"]


def test_a_list_of_frames_is_taken_whole_at_the_rate_that_it_says(families):
    adapter = families("qwen3_vl").adapter
    info = ClipInfo(64, 48, 6, tuple(i / 24 for i in range(6)), 24.0, 0.25, sampled=True)
    listed = replace(clip(6, 64, 48), info=info, indices=tuple(range(6)))
    assert adapter.reading(Modality.VIDEO, {"fps": 2}).choose(info) == list(range(6))
    (item,) = adapter.prepare([listed], {"fps": 2}, Modality.VIDEO).items
    assert item.timestamps == (0.25, 1.25, 2.25)
    assert item.second_per_grid == 1.0
    with pytest.raises(BadRequestError, match="more than max_frames"):
        adapter.reading(Modality.VIDEO, {"max_frames": 4}).choose(info)


def test_an_uneven_rate_keeps_the_clips_own_times(families):
    info = ClipInfo(64, 48, 4, (0.0, 0.1, 2.0, 2.1), 4 / 2.8, 2.8)
    uneven = replace(clip(4, 64, 48), info=info, indices=(0, 1, 2, 3))
    (item,) = families("qwen3_vl").adapter.prepare([uneven], {}, Modality.VIDEO).items
    assert item.timestamps == pytest.approx((0.05, 2.05))


@pytest.mark.parametrize(
    ("name", "modality", "options", "words"),
    [
        ("qwen3_vl", "video", {"fps": 0}, "above 0, at most 240"),
        ("qwen3_vl", "video", {"fps": 2, "num_frames": 8}, "exclude each other"),
        ("qwen3_vl", "video", {"num_frames": 10**6}, "whole number from 1 to 4096"),
        ("qwen3_vl", "image", {"fps": 2}, "Unknown option 'fps'"),
        ("gemma3", "image", {"detail": "medium"}, "one of: auto, low, high"),
        ("gemma3", "image", {"do_pan_and_scan": 1}, "true or false"),
        ("llava", "image", {"max_pixels": 9}, "takes: none"),
        ("llava_onevision", "image", {"images_in_prompt": 1}, "at least 2"),
        ("idefics3", "image", {"longest_edge": 10}, "at least 64 pixels"),
        ("internvl", "image", {"min_patches": 9}, "above max_patches"),
        ("whisper", "audio", {"language": "en"}, "Unknown option 'language'"),
    ],
)
def test_wrong_options_are_refused(name, modality, options, words, families):
    adapter = families(name).adapter
    infos = {"image": PictureInfo(64, 64), "audio": RecordingInfo(1.0, 16000, 1)}
    infos["video"] = ClipInfo(64, 48, 8, tuple(i / 8 for i in range(8)), 8.0, 1.0)
    with pytest.raises(BadRequestError, match=words) as caught:
        adapter.plan([infos[modality]] * 2, options)
    assert (caught.value.code, caught.value.status) == ("invalid_option", 400)


@pytest.mark.parametrize("name", ["clip", "siglip", "dinov2"])
def test_pooled_rows_are_the_towers_own(name, families):
    family = families(name)
    picture, other = zoo.picture(80, 60, 1), zoo.picture(60, 80, 2)
    pooled = family.adapter.prepare([picture], {"output": "pooled"})
    whole = family.adapter.prepare([other], {})
    first, second = family.adapter.encode([pooled, whole])
    pixels = family.colocated.processor(images=[picture, other], return_tensors="pt")["pixel_values"]
    tower = family.colocated.model if name == "dinov2" else family.colocated.model.vision_model
    with torch.no_grad():
        expected = tower(pixels)
    assert torch.equal(first.rows, expected.pooler_output[:1])
    assert torch.equal(second.rows, expected.last_hidden_state[1])


def test_a_batch_whose_forward_loses_a_row_is_refused_whole(families, monkeypatch):
    adapter = families("llava").adapter
    batch = [adapter.prepare([zoo.picture(60, 60, i)], {}) for i in (1, 2)]
    whole = adapter.features
    monkeypatch.setattr(adapter, "features", lambda *given: [rows[:-1] for rows in whole(*given)])
    with pytest.raises(InternalError, match="Encoder produced 31 tokens"):
        adapter.encode(batch)


def test_the_error_names_every_family():
    titles = {
        "qwen2_vl": "Qwen2/",
        "qwen2_5_vl": "/2.5/",
        "qwen3_vl": "/3-VL",
        "qwen2_5_omni": "2.5/3-Omni",
        "qwen3_omni": "2.5/3-Omni",
        "qwen2_audio": "2-Audio",
        "llava_onevision": "OneVision",
    }
    for name in FAMILIES:
        assert titles.get(name, name).lower() in SERVED.lower()
        for architecture in adapter_class(name).architectures:
            assert adapter_for(architecture) is adapter_class(name)


def test_the_encoder_is_loaded_without_the_language_model(families):
    for name in ("llava", "whisper", "qwen3_omni", "clip"):
        adapter = families(name).adapter
        names = [key for key, _ in adapter.model.named_parameters()]
        assert not [key for key in names if "language_model" in key or "decoder" in key or "text_model" in key]
        whole = sum(p.numel() for p in families(name).colocated.model.parameters())
        assert sum(p.numel() for p in adapter.model.parameters()) < whole
