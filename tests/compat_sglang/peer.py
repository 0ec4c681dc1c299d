"""SGLang's own receiver in a process of its own, run by SGLang's environment: a line of JSON asks, a line answers.

Everything that receives is SGLang's: `create_mm_receiver`, `send_encode_request`, `process_waiting_requests`,
`recv_mm_data`, its transfer engine, its processor and its checks. Stand-ins are the scheduler object around it, a group
of one rank, and for Mooncake the host's memory where a GPU's is asked for (`stubs/sglang_on_cpu.py`).

`python peer.py MODEL BACKEND MODE URL…`; then for each line `{"requests": [{"rid", "pictures", "clips", "recordings"}]}` (lists
of URLs) one line `{"results": {rid: {"rows": FILE, "placeholders": n, "input_ids": […], "times": […]} or {"error": text,
"code": status}}}`. `times` are the first components of the prompt's positions, where the model has positions in time.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import queue
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.encoder.receiver import create_mm_receiver
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

PATIENCE = 60.0
#: places in a prompt, in the order in which SGLang hands media out
PLACES = {
    "pictures": "<|vision_start|><|image_pad|><|vision_end|>",
    "clips": "<|vision_start|><|video_pad|><|vision_end|>",
    "recordings": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


class Peer:
    def __init__(self, model: str, backend: str, mode: str, urls: list[str]) -> None:
        self.backend = backend
        arguments = ServerArgs(
            model_path=model,
            device="cpu",
            host="127.0.0.1",
            language_only=True,
            encoder_urls=urls,
            encoder_transfer_backend=backend,
            mm_attention_backend="sdpa",
        )
        publish(arguments, role="test")
        torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
        config = AutoConfig.from_pretrained(model)
        scheduler = SimpleNamespace(
            model_config=ModelConfig.from_server_args(arguments),
            disaggregation_mode=None,
            metrics_collector=None,
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            dllm_config=None,
            tokenizer=None,
        )
        get_parallel().override_permanently(tp_rank=0, pp_rank=0, tp_group=group)
        facts = {"dtype": torch.float32, "hf_config": config, "transport_mode": mode, "encode_urls": urls}
        self.tokenizer_side = create_mm_receiver(arguments, **facts)
        if backend == "zmq_to_tokenizer":
            self.tokenizer_side._init_mm_processor(arguments, config)
        else:
            self.scheduler_side = create_mm_receiver(arguments, scheduler=scheduler, **facts)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        requests = asked["requests"]
        if self.backend == "zmq_to_tokenizer":
            return {"results": asyncio.run(self._all_to_tokenizer(requests))}
        return {"results": self._all_to_scheduler(requests)}

    async def _all_to_tokenizer(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        async def one(request: dict[str, Any]) -> dict[str, Any]:
            wanted = generation(request)
            processor = self.tokenizer_side.mm_processor
            found = await self.tokenizer_side.recv_mm_data(wanted, processor, prompt(request))
            return {"error": "nothing was received", "code": None} if found is None else described(found)

        results = await asyncio.gather(*(one(request) for request in requests))
        return {request["rid"]: result for request, result in zip(requests, results, strict=True)}

    def _all_to_scheduler(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        failed: queue.Queue[Any] = queue.Queue()
        arriving, waiting, results = [], {request["rid"] for request in requests}, {}
        for request in requests:
            wanted = generation(request)
            ready = self.tokenizer_side.send_encode_request(wanted, on_dispatch_error=failed.put)
            arriving.append(tokenized(wanted))
            ready.set()
        deadline = time.monotonic() + PATIENCE
        while waiting and time.monotonic() < deadline:
            while not failed.empty():
                arriving.append(failed.get())
            complete, aborted = self.scheduler_side.process_waiting_requests(arriving)
            arriving = []
            results.update({request.rid: described(request.mm_inputs) for request in complete})
            results.update(
                {r.rid: {"error": text, "code": None if code is None else int(code)} for r, text, code in aborted}
            )
            waiting -= set(results)
            time.sleep(0.002)
        return {**results, **{rid: {"error": "nothing was received", "code": None} for rid in waiting}}


def prompt(request: dict[str, Any]) -> str:
    return "a" + "".join(place * len(request[kind]) for kind, place in PLACES.items()) + "b"


def generation(request: dict[str, Any]) -> GenerateReqInput:
    """What the end user asks for."""
    return GenerateReqInput(
        text=prompt(request),
        rid=request["rid"],
        image_data=request["pictures"] or None,
        video_data=request["clips"] or None,
        audio_data=request["recordings"] or None,
    )


def tokenized(wanted: Any) -> Any:
    """What the tokenizer manager hands to the scheduler."""
    return TokenizedGenerateReqInput(
        rid=wanted.rid,
        input_text=wanted.text,
        input_ids=array.array("q", []),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(),
        return_logprob=False,
        logprob_start_len=0,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        num_items_assigned=wanted.num_items_assigned,
        encoder_urls=wanted.encoder_urls,
        need_wait_for_mm_inputs=True,
    )


def described(mm_inputs: Any) -> dict[str, Any]:
    """The rows that SGLang would prefill with, and how many placeholders its prompt holds for them."""
    rows = torch.cat([item.precomputed_embeddings for item in mm_inputs.mm_items]).float().cpu().numpy()
    handle, path = tempfile.mkstemp(suffix=".npy")
    os.close(handle)
    numpy.save(path, rows)
    places = sum(end - start + 1 for item in mm_inputs.mm_items for start, end in item.offsets)
    positions = getattr(mm_inputs, "mrope_positions", None)
    times = None if positions is None else positions[0].tolist()
    return {"rows": path, "placeholders": places, "input_ids": list(mm_inputs.input_ids), "times": times}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SGLang prints goes to stderr, and what it says of itself, too
    logging.basicConfig(level=logging.INFO)
    peer = Peer(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
