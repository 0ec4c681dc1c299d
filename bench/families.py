"""Prepare and forward through Tectum against transformers called directly, for every family; and a 1080p JPEG from its bytes.

Both sides run in this process on one thread, call about call, so that whatever else the machine does falls on both. The
direct side makes the very calls that the family's own processor makes for the item, and then the model's feature call.
"""

from __future__ import annotations

import inspect
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tests import zoo
from tests.parity.cases import clip
from tests.parity.colocated import ENCODERS, Colocated

from tectum.media.policy import MediaPolicy
from tectum.models.load import load_adapter
from tectum.models.registry import adapter_class
from tectum.pipeline.unit import EncoderUnit
from tectum.types import EncodeRequest, MediaItem, Modality, Recording, RecordingInfo

#: what is encoded: a picture of 448 x 448, a clip of 8 such frames, three seconds of sound
SIDE, FRAMES, SECONDS = 448, 8, 3.0
RATE = 16_000
FULL_HD = (1920, 1080)


def measure(rounds: int, calls: int, tell: Callable[[], None]) -> dict[str, list[dict[str, float]]]:
    """For each family and modality, and for the JPEG: rounds of median milliseconds, `direct` and `tectum`."""
    found = {}
    for name in zoo.FAMILIES:
        with tempfile.TemporaryDirectory(prefix="tectum-bench-") as temporary:
            folder = zoo.build(name, Path(temporary) / "model")
            for modality, direct, mine in _pairs(name, folder):
                if not torch.equal(direct(), mine()):
                    raise RuntimeError(f"{name}, {modality}: the two sides do not encode the same")
                found[f"{name}, {modality}"] = [_in_turn(direct, mine, calls) for _ in range(rounds)]
                tell()
            if name == "qwen2_5_vl":
                found["1080p JPEG, decoded and prepared"] = [
                    _in_turn(*_full_hd(folder), max(4, calls // 5)) for _ in range(rounds)
                ]
                tell()
    return found


def measurements() -> int:
    """How often `measure` tells."""
    return 1 + sum(len(adapter_class(name).modalities) for name in zoo.FAMILIES)


def _in_turn(direct: Callable[[], Any], mine: Callable[[], Any], calls: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {"direct": [], "tectum": []}
    for _ in range(calls):
        for name, call in (("direct", direct), ("tectum", mine)):
            started = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) * 1e3 for name, values in taken.items()}


def _pairs(name: str, folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]]:
    """For each modality of a family: both ways to the rows of one item."""
    colocated = Colocated(name, folder)
    adapter = load_adapter(str(folder), device="cpu")
    for modality in sorted(adapter.modalities):
        item = _item(modality)

        def mine(item: Any = item, modality: Modality = modality) -> torch.Tensor:
            given = item
            if modality is Modality.AUDIO:
                given = Recording(item, RATE, RecordingInfo(SECONDS, RATE, 1))
            return adapter.encode([adapter.prepare([given], {}, modality)])[0].rows

        yield str(modality), _direct(colocated, str(modality), item), mine


def _item(modality: Modality) -> Any:
    if modality is Modality.IMAGE:
        return zoo.picture(SIDE, SIDE)
    return clip(FRAMES, SIDE, SIDE) if modality is Modality.VIDEO else zoo.tone(SECONDS)


# --- transformers, directly ---


class _Listening:
    """A processor's part that remembers how it was called."""

    def __init__(self, part: Any) -> None:
        self.__dict__.update(part=part, call=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["call"] = (args, kwargs)
        return self.part(*args, **kwargs)


def _direct(colocated: Colocated, modality: str, item: Any) -> Callable[[], torch.Tensor]:
    """Preprocessing as the family's processor has it done, and the model's own features."""
    preprocess = _preprocessing(colocated, modality, item)
    features = _features(colocated, modality)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        return features(preprocess())

    return run


def _preprocessing(colocated: Colocated, modality: str, item: Any) -> Callable[[], dict[str, Any]]:
    if colocated.family in ENCODERS or colocated.family == "voxtral":
        listening = colocated.processor = _Listening(colocated.processor)
        colocated.run(modality, [item])
        colocated.processor = listening.part
    else:
        part = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}[modality]
        listening = _Listening(getattr(colocated.processor, part))
        setattr(colocated.processor, part, listening)
        colocated.run(modality, [item])
        setattr(colocated.processor, part, listening.part)
    args, kwargs = listening.call
    call: Callable[[], dict[str, Any]] = lambda: listening.part(*args, **kwargs)  # noqa: E731
    return (
        _SHAPED[colocated.family, modality](listening.part, call) if (colocated.family, modality) in _SHAPED else call
    )


def _windows(part: Any, call: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """A recording window by window."""

    def shaped() -> dict[str, Any]:
        mel = call()["input_features"]
        return {"input_features": mel.reshape(part.feature_size, -1, part.nb_max_frames).transpose(0, 1)}

    return shaped


def _frame_by_frame(part: Any, call: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": call()["pixel_values_videos"].flatten(0, 1)}


#: where the family's whole processor gives its model another shape than the part does
_SHAPED = {("voxtral", "audio"): _windows, ("internvl", "video"): _frame_by_frame}


def _features(colocated: Colocated, modality: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """From the processor's output to rows, by the model's own parts."""
    model, family = colocated.model, colocated.family
    base = getattr(model, "model", model)
    if family == "whisper":
        return lambda found: _flat(base.encoder(found["input_features"]).last_hidden_state)
    if family in ENCODERS:
        tower = getattr(model, "vision_model", model)
        return lambda found: _flat(tower(found["pixel_values"]).last_hidden_state)
    if family == "qwen2_audio":
        return lambda found: _qwen2_audio(base, found)
    call = getattr(base, f"get_{modality}_features", None) or base.get_image_features
    names = inspect.signature(call).parameters

    def features(found: dict[str, Any]) -> torch.Tensor:
        named = {
            "feature_attention_mask": found.get("attention_mask"),
            "pixel_values": found.get("pixel_values_videos"),
            **found,
        }
        output = call(**{name: named[name] for name in names if named.get(name) is not None})
        pooled = getattr(output, "pooler_output", None)
        return _flat(output.last_hidden_state if pooled is None else pooled)

    return features


def _qwen2_audio(base: Any, found: dict[str, Any]) -> torch.Tensor:
    """The lines of the model's forward that make rows; it has no call for them."""
    from transformers.masking_utils import create_bidirectional_mask

    mel, tower = found["input_features"], base.audio_tower
    convolved, pooled = tower._get_feat_extract_output_lengths(found["attention_mask"].sum(-1))
    positions = torch.arange((mel.shape[-1] - 2) // 2 + 1)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=mel.new_zeros((len(mel), len(positions), 1)),
        attention_mask=(positions[None] < convolved[:, None]).long(),
    )
    rows = base.multi_modal_projector(tower(mel, attention_mask=mask).last_hidden_state)
    return rows[torch.arange(rows.shape[1])[None] < pooled[:, None]]


def _flat(rows: Any) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows.reshape(-1, rows.shape[-1])
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in rows])


# --- from the bytes ---


def _full_hd(folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A 1080p JPEG to the tower's inputs: Pillow and the family's processor, and the encoder's own way."""
    file = io.BytesIO()
    zoo.picture(*FULL_HD).save(file, "JPEG", quality=90)
    data = file.getvalue()
    processor = Colocated("qwen2_5_vl", folder).processor.image_processor
    unit = EncoderUnit(load_adapter(str(folder), device="cpu"), MediaPolicy(), 1 << 20)
    request = EncodeRequest("full-hd", (MediaItem(Modality.IMAGE, data=data),))

    def direct() -> Any:
        return processor(images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt")

    return direct, lambda: unit.prepare(request)
