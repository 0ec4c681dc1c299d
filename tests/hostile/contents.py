"""Situations of what is encoded: rows and keys, prompts, uploads of tensors, clips and recordings. See `cases.py`."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import httpx2
import numpy as np
import soundfile
import torch

from tectum.delivery import wire
from tectum.engines.transformers import language_inputs, mm_encoder_outputs
from tectum.errors import BadRequestError
from tectum.serving.gateway import GatewaySettings, create_app
from tests import zoo
from tests.gateway.peers import Engine
from tests.gateway.peers import running as listening
from tests.hostile.cases import case, conflict
from tests.hostile.lives import at_once
from tests.hostile.servers import Servers, described, said, saved, until
from tests.media.test_video import video

PAD = "<|image_pad|>"
#: two placeholders with nothing between
BESIDE = "a" + 2 * zoo.PLACEHOLDERS["qwen2_5_vl"]["image"] + "b"
PICTURES = [zoo.picture(224, 224, 1), zoo.picture(140, 90, 2)]


@contextlib.contextmanager
def gateway(servers: Servers) -> Iterator[tuple[str, Engine]]:
    """A gateway between the plain server and an engine that records what it is sent."""
    engine = Engine()
    with (
        listening(engine) as engine_url,
        listening(create_app(GatewaySettings((servers.plain.url,), engine_url))) as url,
    ):
        yield url, engine


def ask(url: str, *parts: dict[str, Any], **more: Any) -> httpx2.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


def as_url(picture: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}}


def parts_of(engine: Engine) -> list[dict[str, Any]]:
    return list(engine.chat()["messages"][0]["content"])


@case(
    "K3",
    "two picture placeholders with no text between (sglang #35799)",
    "the model's own ids and logits; two parts in the gateway, in order",
)
def _(servers: Servers) -> str:
    import transformers

    embedding = servers.plain.rows(*(saved(picture) for picture in PICTURES))
    processor = transformers.AutoProcessor.from_pretrained(servers.tiny)
    model = transformers.AutoModelForImageTextToText.from_pretrained(servers.tiny).eval()
    expected = processor(text=[BESIDE], images=PICTURES, return_tensors="pt")
    inputs = language_inputs(processor, BESIDE, embedding)
    with torch.inference_mode():
        logits = model(**inputs, mm_encoder_outputs=mm_encoder_outputs(model.config, embedding)).logits
        same = torch.equal(inputs["input_ids"], expected["input_ids"]) and torch.equal(logits, model(**expected).logits)
    with gateway(servers) as (url, engine):
        answer = ask(url, *(as_url(saved(picture)) for picture in PICTURES))
        grids = [tuple(part["image_embeds"]["image_grid_thw"]) for part in parts_of(engine)]
    kept = answer.status_code == 200 and grids == list(embedding.grid_thw)
    return (
        f"{'the model' if same else 'not the model'}'s own ids and logits; "
        f"{'two' if kept else grids} parts in the gateway, in order"
    )


@case(
    "K4",
    "a user's text holds the family's picture token (vllm #57740)",
    "400 invalid_request in a prompt; one part and the text as it was in the gateway",
)
def _(servers: Servers) -> str:
    import transformers

    picture = saved(PICTURES[0])
    text = {"type": "text", "text": f"what is {PAD}<|vision_start|>{PAD}?"}
    processor = transformers.AutoProcessor.from_pretrained(servers.tiny)
    try:
        language_inputs(processor, zoo.PROMPT + text["text"], servers.plain.rows(picture))
        prompt = "counted as a slot"
    except BadRequestError as error:
        prompt = f"{error.status} {error.code}"
    with gateway(servers) as (url, engine):
        answer = ask(url, text, as_url(picture))
        parts = parts_of(engine)
    kinds = [part["type"] for part in parts]
    kept = answer.status_code == 200 and kinds == ["text", "image_embeds"] and parts[0] == text
    where = list(engine.chat()["ec_transfer_params"]["tectum"])
    kept = kept and where == [parts[1]["uuid"]]
    return f"{prompt} in a prompt; {'one part and the text as it was' if kept else parts} in the gateway"


@case(
    "K5",
    "max_pixels on one side only (vllm #56786)",
    "4 and 16 rows under two keys; the engine is told the encoder's grid, and no option",
)
def _(servers: Servers) -> str:
    picture, found = saved(zoo.picture(112, 112)), []
    for number, options in enumerate(({"max_pixels": 56 * 56}, {})):
        answer = servers.plain.encode(
            picture, req_id=f"K5-{number}", options=options, content_keys=True, delivery={"mode": "hold"}
        ).json()
        found.append((answer["items"][0]["rows"], answer["content_keys"][0]))
        servers.plain.http.delete(f"/v1/requests/K5-{number}")
    with gateway(servers) as (url, engine):
        ask(url, as_url(picture), mm_processor_kwargs={"max_pixels": 56 * 56}).raise_for_status()
        (part,) = parts_of(engine)
        grid = part["image_embeds"]["image_grid_thw"]
        told = np.prod(grid) // 4 == found[0][0] and "mm_processor_kwargs" not in engine.chat()
    keys = "two keys" if found[0][1] != found[1][1] else "one key"
    return (
        f"{found[0][0]} and {found[1][0]} rows under {keys}; the engine is told "
        f"{'the encoder' if told else 'another'}'s grid, and no option"
    )


@case(
    "K10",
    "[a+b],[c] and [a],[b+c]: the same bytes in a row, cut at another place (sglang #25462)",
    "200 and 409 request_conflict, other keys",
)
def _(servers: Servers) -> str:
    a, b, c = (whole_base64(saved(zoo.picture(64, 64, seed))) for seed in (1, 2, 3))
    lists = ([a + b, c], [a, b + c])  # what stands behind a picture's end is not looked at
    joined = ["".join(base64.b64encode(item).decode() for item in items) for items in lists]
    if joined[0] != joined[1]:
        return "the lists differ as text: no case"
    keys = []
    for number, items in enumerate(lists):
        answer = servers.plain.encode(
            *items, req_id=f"K10-{number}", content_keys=True, delivery={"mode": "hold"}
        ).json()
        keys.append(answer["content_keys"])
        servers.plain.http.delete(f"/v1/requests/K10-{number}")
    apart = not set(keys[0]) & set(keys[1])
    return f"{conflict(servers, 'K10', *lists)}, {'other' if apart else 'equal'} keys"


def whole_base64(data: bytes) -> bytes:
    """Padded so that its base64 ends without `=`, and pieces of base64 can stand in a row."""
    return data + bytes(-len(data) % 3)


# --- tensors that a caller uploads ---


def sparse() -> torch.Tensor:
    """CVE-2025-62164: indices that lie outside, so that to_dense() writes where it must not."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(torch.tensor([[10**9], [0]]), torch.tensor([1.0]), (2, 2))


def strided() -> torch.Tensor:
    return torch.zeros(4).as_strided((1000, 64), (0, 0))


def upload(servers: Servers, *tensors: torch.Tensor) -> str:
    """What both doors say to tensors: as rows by name, and where a picture is expected."""
    words = set()
    with gateway(servers) as (url, engine):
        for tensor in tensors:
            file = io.BytesIO()
            torch.save(tensor, file)
            data = base64.b64encode(file.getvalue()).decode()
            words.add(said(servers.plain.encode(file.getvalue())))
            words.add(said(servers.plain.encode(file.getvalue(), kind="image_embeds")))
            for part in (
                {"type": "image_embeds", "image_embeds": data},
                {"image_embeds": {"image_embeds": data, "image_grid_thw": data}},
            ):
                answer = ask(url, part)
                words.add(f"gateway {answer.status_code} {answer.json()['error']['code'] if engine.seen == [] else ''}")
    return ", ".join(sorted(words))


UPLOADS = "400 invalid_request item 0, 415 unsupported_media item 0, gateway 400 unsupported_modality"


@case("S2", "a sparse and a wrongly strided tensor in an upload of embeddings (CVE-2025-62164)", UPLOADS)
def _(servers: Servers) -> str:
    return upload(servers, sparse(), strided())


@case("S3", "an upload of embeddings of the wrong shape (CVE-2025-62372)", UPLOADS)
def _(servers: Servers) -> str:
    return upload(servers, torch.zeros(7), torch.zeros(1, 2, 3, 4))


@case("K8", "precomputed rows with the wrong width or type, or NaN (vllm-omni #3176)", UPLOADS)
def _(servers: Servers) -> str:
    wrong = (torch.zeros(4, 3), torch.zeros(4, 64, dtype=torch.int64), torch.full((4, 64), float("nan")))
    return upload(servers, *wrong)


# --- many pictures, clips, recordings ---


@case(
    "L13",
    "8 requests of 8 large pictures each, on an encoder that fuses (sglang #38368)",
    "all served with the rows that each alone has, no forward above the bound",
)
def _(servers: Servers) -> str:
    # as many patches as a picture may have here, but quickly decoded, and beside forwards: so requests wait for those of others
    pictures = [saved(zoo.picture(448, 448, seed), "JPEG") for seed in range(8)]
    meant = servers.plain.rows(*pictures).rows
    bound = 8 * 1024  # the patches of one request, so that no two share a forward
    flags = ("--fuse", "on", "--batch-patches", str(bound), "--prepare-threads", "1")
    with servers.one(*flags) as door, ThreadPoolExecutor(1) as thread:
        burst = thread.submit(at_once, door, [described(*pictures, req_id=f"L13-{number}") for number in range(8)])
        met = until(lambda: burst.done() or door.gauges()["encoder_queued_patches"] >= 2 * bound, 60)
        if not met or burst.done():
            return "no two of them waited at the same time: no case"
        answers = burst.result()
        now = door.gauges()
    wrong = [said(answer) for answer in answers if answer.status_code != 200]
    if wrong or not all(torch.equal(wire.unpack(answer.content).rows, meant) for answer in answers):
        return f"refused: {wrong}, or other rows"
    forwards, patches = (int(now[f'encoder_batch_patches_{what}{{modality="image"}}']) for what in ("count", "sum"))
    if patches != 8 * bound or forwards != 8:
        return f"{patches} patches in {forwards} forwards"
    return "all served with the rows that each alone has, no forward above the bound"


@case(
    "P10",
    "clips of 1 and of 17 frames, at 2 frames a step (transformers #42083, vllm #33746)",
    "1 and 8 steps of 4 rows; the processor's own grid",
)
def _(servers: Servers) -> str:
    import transformers

    processor = transformers.AutoVideoProcessor.from_pretrained(servers.tiny)
    words = []
    for count in (1, 17):
        frames = zoo.frames(count, 64, 64)
        got = servers.plain.rows(video(frames, fps=2), kind="video", options={"fps": 2})
        facts = [{"total_num_frames": count, "fps": 2.0, "frames_indices": list(range(count))}]
        theirs = processor(
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
            video_metadata=facts,
            do_sample_frames=count > 1,  # of a single frame there is nothing to choose
            fps=2,
            return_tensors="pt",
        )
        if got.grid_thw != (tuple(theirs["video_grid_thw"][0].tolist()),):
            return f"{count} frames: {got.grid_thw}, the processor's {theirs['video_grid_thw'].tolist()}"
        words.append(str(got.grid_thw[0][0]))
    return f"{' and '.join(words)} steps of {len(got.rows) // got.grid_thw[0][0]} rows; the processor's own grid"


@case(
    "P11",
    "clips of a variable rate, of 0 frames a second by the header, and of one time for all frames (vllm #53844)",
    "200, 200 and 200 for 6 frames each",
)
def _(servers: Servers) -> str:
    frames = zoo.frames(6, 64, 64)
    # 3.6 s, of which 2 frames a second are all 6; by the 8 a second that its header names it would be 0.75 s, and 4 of them
    uneven = video(frames, form="matroska", pts=[0, 100, 150, 900, 1000, 3000])
    still = bytearray(video(frames, form="avi", codec="mpeg4"))
    for field in (still.index(b"avih") + 8, still.index(b"strh") + 8 + 24):  # dwMicroSecPerFrame, dwRate
        still[field : field + 4] = bytes(4)
    frozen = bytearray(video(frames))
    delta = frozen.index(b"stts") + 16  # sample_delta of its only entry (ISO/IEC 14496-12, 8.6.1.2)
    frozen[delta : delta + 4] = bytes(4)
    clips = ((uneven, 2), (bytes(still), 100), (bytes(frozen), 100))
    answers = [servers.plain.encode(clip, kind="video", options={"fps": fps}) for clip, fps in clips]
    wrong = [answer for answer in answers if answer.status_code != 200]
    steps = set() if wrong else {wire.unpack(answer.content).grid_thw[0][0] for answer in answers}
    one, two, three = map(said, answers)
    return f"{one}, {two} and {three} for {'6' if steps == {3} else steps} frames each"


@case(
    "P12",
    "a stereo WAV at 48 kHz: channels averaged, then resampled along time (vllm #47693)",
    "the rows of the mean, the rows of the mean as taken at 16 kHz; other rows without a channel",
)
def _(servers: Servers) -> str:
    left, right = chirps(48000)
    heard = [
        servers.hearing.rows(recording(samples, rate), kind="audio").rows
        for samples, rate in (
            (np.stack([left, right], 1), 48000),
            ((left + right) / 2, 48000),
            (sum(chirps(16000)) / 2, 16000),
            (left, 48000),
        )
    ]
    # far more than a filter leaves (0.0006), and far less than a channel, or the wrong rate, makes (0.5, 0.9)
    alike = [len(rows) == len(heard[0]) and float((rows - heard[0]).norm() / heard[0].norm()) < 0.02 for rows in heard]
    mean, taken, one = ("the" if same else "other" for same in alike[1:])
    return f"{mean} rows of the mean, {taken} rows of the mean as taken at 16 kHz; {one} rows without a channel"


def chirps(rate: int) -> list[np.ndarray]:
    """Two seconds of a low and of a higher rising tone, without anything that a rate of 16 kHz could not hold."""
    at = np.arange(2 * rate) / rate
    return [(0.3 * np.sin(2 * np.pi * (start + 300 * at) * at)).astype(np.float32) for start in (240, 1280)]


def recording(samples: np.ndarray, rate: int, form: str = "WAV", subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


@case(
    "S7",
    "long silence in kilobytes: FLAC that says so, FLAC that does not, Opus, AAC (CVE-2026-54233)",
    "413 media_too_large item 0, 100 MB at most",
)
def _(servers: Servers) -> str:
    door = servers.hearing
    bombs = [flac(), flac(0), recording(np.zeros(7200 * 8000, np.float32), 8000, "OGG", "OPUS"), aac(600)]
    before, found = door.resident(), set()
    for bomb in bombs:
        found.add(said(door.encode(bomb, kind="audio")))
    grown = (door.resident() - before) / 1e6
    return f"{', '.join(sorted(found))}, {'100 MB at most' if grown < 100 else f'{grown:.0f} MB'}"


@case("S7-lie", "FLAC of two hours that claims to be of one second (CVE-2026-54233)", "the rows of one second")
def _(servers: Servers) -> str:
    got = servers.hearing.rows(flac(8000), kind="audio").rows
    meant = servers.hearing.rows(recording(np.zeros(8000, np.float32), 8000), kind="audio").rows
    return "the rows of one second" if torch.equal(got, meant) else f"{len(got)} rows, not {len(meant)}"


def flac(claimed: int | None = None) -> bytes:
    """Two hours of silence at 8 kHz in 180 KB. claimed: samples that its STREAMINFO names instead (RFC 9639, 8.2); 0: unknown."""
    honest = recording(np.zeros(7200 * 8000, np.float32), 8000, "FLAC", "PCM_16")
    return honest if claimed is None else honest[:22] + claimed.to_bytes(4, "big") + honest[26:]


def aac(seconds: int) -> bytes:
    """Silence as bare frames: no header says how long it is."""
    file = io.BytesIO()
    container = av.open(file, "w", format="adts")
    track = container.add_stream("aac", rate=8000)
    frame = av.AudioFrame.from_ndarray(np.zeros((1, seconds * 8000), np.float32), format="fltp", layout="mono")
    frame.sample_rate = 8000
    container.mux(track.encode(frame))
    container.mux(track.encode(None))
    container.close()
    return file.getvalue()
