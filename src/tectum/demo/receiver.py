"""The receiver of the demo: a language model whose vision tower was removed, beside the ordinary model in one piece.

No row can come from a local encode on the one side; the other side is what the rows, the logits and the answers must equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tectum.engines.transformers import language_inputs, mm_encoder_outputs
from tectum.models.load import quiet
from tectum.models.torchvision_compat import ensure_torchvision
from tectum.types import Embedding

#: tokens; the longest answer about three pictures has about 80
LONGEST_ANSWER = 100


class Receiver:
    """The language model's process. folder: a checkpoint of a whole model, processor included."""

    def __init__(self, folder: Path) -> None:
        import transformers

        ensure_torchvision()
        torch.set_num_threads(1)
        with quiet(transformers):
            self.processor = transformers.AutoProcessor.from_pretrained(folder)
            self.reference = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
            self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
        del self.model.model.visual

    def prompt(self, pictures: int, question: str) -> str:
        """The checkpoint's own chat template around `question`, with a place for each picture."""
        content = [{"type": "image"}] * pictures + [{"type": "text", "text": question}]
        text: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        return text

    # --- from delivered rows ---

    @torch.inference_mode()
    def logits(self, prompt: str, embedding: Embedding) -> torch.Tensor:
        """Logits `[1, tokens, vocabulary]` for `prompt`."""
        result: torch.Tensor = self.model(**self._inputs(prompt, embedding)).logits
        return result

    @torch.inference_mode()
    def answer(self, prompt: str, embedding: Embedding) -> tuple[str, float]:
        """The most likely answer to `prompt`, and the seconds it took."""
        started = time.perf_counter()
        text = self._generate(self.model, self._inputs(prompt, embedding))[0]
        return text, time.perf_counter() - started

    def _inputs(self, prompt: str, embedding: Embedding) -> dict[str, Any]:
        inputs = language_inputs(self.processor, prompt, embedding)
        return {**inputs, "mm_encoder_outputs": mm_encoder_outputs(self.model.config, embedding)}

    # --- in one piece ---

    @torch.inference_mode()
    def rows_and_logits_in_one_piece(self, prompt: str, pictures: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[tokens, width]` and logits, as the ordinary model computes them from PIL pictures."""
        inputs = self._in_one_piece([prompt], pictures)
        features = self.reference.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return torch.cat(list(features.pooler_output)), self.reference(**inputs).logits

    def answer_in_one_piece(self, prompt: str, pictures: Sequence[Any]) -> str:
        return self.answers_in_one_piece([prompt], [pictures])[0]

    @torch.inference_mode()
    def answers_in_one_piece(self, prompts: Sequence[str], pictures: Sequence[Sequence[Any]]) -> list[str]:
        """Answers to prompts of the same length, each about its own PIL pictures."""
        every = [picture for some in pictures for picture in some]
        return self._generate(self.reference, self._in_one_piece(prompts, every))

    def _in_one_piece(self, prompts: Sequence[str], pictures: Sequence[Any]) -> Any:
        inputs = self.processor(text=list(prompts), images=list(pictures), return_tensors="pt")
        return inputs.to(self.reference.dtype)

    def _generate(self, model: Any, inputs: Any) -> list[str]:
        made = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        new = made[:, inputs["input_ids"].shape[1] :]
        return [self.processor.decode(tokens, skip_special_tokens=True) for tokens in new]
