"""A chat request in OpenAI's form, taken apart to find its media, and put together again with metadata in their place.

Large strings of the JSON are cut out and passed on as they are, never decoded and encoded again. No media is decoded here,
and nothing is sent: that is `gateway.py`'s.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from tectum.errors import BadRequestError

#: parts of a message that hold media, and what they are
_MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio"}
#: parts that hold media in a form that only the engine's own process could read, or rows that nobody here has checked:
#: the engine would unpickle them as tensors
_REFUSED = frozenset({"image_pil", "image_embeds", "video_embeds", "audio_embeds"})
#: pictures, clips and recordings of one request: each is a request to an encoder, which holds as many by default
MAX_MEDIA = 256
_parts = msgspec.json.Decoder(list[Raw]).decode
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_string = msgspec.json.Decoder(str).decode


@dataclass(slots=True)
class Medium:
    """One picture, clip or recording of a chat request. message, part: where it stands.

    source: `url` or `data` (base64), as the encoder's items name it; text: the JSON string as it came.
    """

    message: int
    part: int
    modality: str
    source: str
    text: Raw


@dataclass(slots=True)
class Chat:
    """A chat request with its large strings still encoded."""

    body: dict[str, Raw]
    messages: list[dict[str, Raw]]
    contents: dict[int, list[Raw]] = field(default_factory=dict)  # message -> its parts
    media: list[Medium] = field(default_factory=list)

    @staticmethod
    def read(data: bytes) -> Chat | None:
        """The request, or None when it is not one with media: then it is the engine's to read.

        Raises BadRequestError for media that the encoders cannot take, or too many, and for what an engine might read though
        it is no JSON (NaN, for one) or nested too deeply.
        """
        try:
            body = _object(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _not_json() from None
        except RecursionError:
            raise BadRequestError("invalid_request", "The request's JSON is nested too deeply") from None
        try:
            messages = [_object(message) for message in _parts(body["messages"])]
            chat = Chat(body, messages)
            for index, message in enumerate(messages):
                chat._look_at(index, message.get("content", Raw(b"null")))
        except (msgspec.ValidationError, KeyError):
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):
            # of a string that was skipped until now: a lenient engine would read on
            raise _not_json() from None
        return chat if chat.media else None

    def _look_at(self, index: int, whole: Raw) -> None:
        if _first(whole) != b"[":
            return
        self.contents[index] = _parts(whole)
        for number, raw in enumerate(self.contents[index]):
            if _first(raw) != b"{":
                continue
            part = _object(raw)
            named = part.get("type", Raw(b"null"))
            kind = _string(named) if _first(named) == b'"' else ""
            if not kind:  # vLLM takes parts that do not say what they are
                kind = next((name for name in (*_MEDIA, *_REFUSED) if name in part), "")
            if kind in _REFUSED:
                text = f"The encoders behind this gateway take {', '.join(_MEDIA)} parts, not {kind}"
                raise BadRequestError("unsupported_modality", text, item=len(self.media))
            if kind in _MEDIA:
                if len(self.media) == MAX_MEDIA:
                    text = f"A request may have at most {MAX_MEDIA} pictures, clips and recordings"
                    raise BadRequestError("request_too_large", text)
                source, content = self._content_of(kind, part.get(kind, Raw(b"null")))
                self.media.append(Medium(index, number, _MEDIA[kind], source, content))

    def _content_of(self, kind: str, content: Raw) -> tuple[str, Raw]:
        """Where the medium of a part is: the name of the field that says it to an encoder, and its JSON string."""
        source = "data" if kind == "input_audio" else "url"
        if _first(content) == b"{":
            content = _object(content).get(source, Raw(b"null"))
        if _first(content) != b'"':
            wanted = "data in base64" if source == "data" else "a url: http(s) or data"
            raise BadRequestError("invalid_request", f"Each {kind} part needs {wanted}", item=len(self.media))
        return source, content

    def options(self) -> dict[str, Any]:
        """Processor options of the request: they go to the encoder, and into the key."""
        if "media_io_kwargs" in self.body:
            raise BadRequestError("invalid_option", "media_io_kwargs is not known to the encoders")
        try:
            given = msgspec.json.decode(self.body.get("mm_processor_kwargs", Raw(b"null")))
        except (msgspec.DecodeError, RecursionError):
            given = 0
        if given is not None and not isinstance(given, dict):
            raise BadRequestError("invalid_option", "mm_processor_kwargs must be an object")
        return given or {}

    def rewritten(self, held: Sequence[Held]) -> bytes:
        """The request for the engine: each medium is its metadata now."""
        for medium, rows in zip(self.media, held, strict=True):
            self.contents[medium.message][medium.part] = Raw(msgspec.json.encode(rows.part()))
        for index, parts in self.contents.items():
            self.messages[index]["content"] = Raw(msgspec.json.encode(parts))
        body: dict[str, Any] = {**self.body, "messages": self.messages}
        body.pop("mm_processor_kwargs", None)
        where = {rows.key: {"encoder": rows.encoder, "req_id": rows.req_id} for rows in reversed(held)}
        body["ec_transfer_params"] = {"tectum": where}
        return msgspec.json.encode(body)


def _not_json() -> BadRequestError:
    return BadRequestError("invalid_request", "The request is not a JSON object in UTF-8")


def is_in_utf8(data: bytes) -> bool:
    """Whether JSON is in UTF-8 without a mark, as it must be (RFC 8259, 8.1). Some engines take it in other forms, too."""
    return b"\0" not in data[:4] and not data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def _first(raw: Raw) -> bytes:
    """What kind of JSON value it is, by its first character."""
    return bytes(memoryview(raw)[:1])


@dataclass(frozen=True, slots=True)
class Held:
    """Rows of one medium that an encoder holds. fields: what the engine counts its placeholders by."""

    encoder: str
    req_id: str
    key: str
    modality: str
    fields: Mapping[str, Any]

    def part(self) -> dict[str, Any]:
        kind = f"{self.modality}_embeds"
        return {"type": kind, kind: self.fields, "uuid": self.key}


# What vLLM 0.32 counts an item's placeholders by when the item comes without its media: the fields that its parsers declare as
# `metadata` (`embedding_fields`), from the encoder's facts of the item.


def _picture(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"image_grid_thw": item["grid_thw"]}


def _clip(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"video_grid_thw": item["grid_thw"]}


def _clip_at_pace(item: Mapping[str, Any]) -> dict[str, Any]:
    """These models place rows in time, but this form has no field for it: vLLM takes each step for a second."""
    if abs(item["second_per_grid"] - 1.0) > SAME_PACE:
        found = f"{item['second_per_grid']:.3g} s"
        text = (
            f"vLLM cannot be told that a step of this clip takes {found}, not 1 s; a clip sampled at 2 fps it can take"
        )
        raise BadRequestError("unsupported_modality", text)
    return _clip(item)


def _clip_with_times(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**_clip(item), "timestamps": item["timestamps"]}


def _recording(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"audio_num_tokens": [item["rows"]]}


_FORMS: dict[tuple[str, str], Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **{(family, "image"): _picture for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen3_omni")},
    ("qwen2_vl", "video"): _clip,
    ("qwen2_5_vl", "video"): _clip_at_pace,
    ("qwen3_vl", "video"): _clip_with_times,
    ("qwen2_audio", "audio"): _recording,
}
#: how far a step of a clip may be from the second that vLLM takes it for (seconds)
SAME_PACE = 1e-3


def form_of(family: str, modality: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """How an item's facts become its metadata-only form. Raises BadRequestError `unsupported_modality` where vLLM has none."""
    form = _FORMS.get((family, modality))
    if form is None:
        text = f"This gateway knows no form in which vLLM takes {modality} rows of {family[:40]} without the media themselves"
        raise BadRequestError("unsupported_modality", text)
    return form
