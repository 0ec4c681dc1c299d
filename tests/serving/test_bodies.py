"""A multipart body is read alike, however the network cuts it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from tectum.config import Settings
from tectum.errors import BadRequestError
from tectum.serving.bodies import convert, decode_encode_body, read_encode_request
from tectum.serving.sglang import MetadataBody
from tectum.types import Modality

MEDIA = b"\r\n--b\r\n--bound\r\n\x00\xff--bounda\r\n"  # nearly a boundary, again and again
BODY = (
    b'--boundary\r\nContent-Disposition: form-data; name="request"\r\n\r\n'
    b'{"req_id": "r1", "items": [{"type": "image", "file": "a"}, {"type": "image", "file": "b"}]}\r\n'
    b'--boundary\r\nContent-Disposition: form-data; name="a"; filename="a.png"\r\n\r\n' + MEDIA + b"\r\n"
    b'--boundary\r\nContent-Disposition: form-data; name="b"; filename="b.png"\r\nContent-Type: image/png\r\n\r\n\r\n'
    b'--boundary\r\nContent-Disposition: form-data; name="other"\r\n\r\nnobody asks\r\n--boundary--\r\n'
)


def read(pieces: list[bytes], settings: Settings | None = None):
    left = list(pieces)

    async def receive():
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [(b"content-type", b"multipart/form-data; boundary=boundary")]
    request = Request({"type": "http", "headers": headers}, receive)
    return asyncio.run(read_encode_request(request, settings or Settings()))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, len(BODY)])
def test_cut_anywhere(size):
    request = read([BODY[start : start + size] for start in range(0, len(BODY), size)] + [b""])
    assert request.req_id == "r1"
    assert [(item.modality, item.data) for item in request.items] == [(Modality.IMAGE, MEDIA), (Modality.IMAGE, b"")]


@pytest.mark.parametrize("end", range(1, len(BODY) - 3, 29))
def test_a_body_that_ends_early_is_malformed_wherever_it_ends(end):
    with pytest.raises(BadRequestError, match="malformed") as raised:
        read([BODY[:end]])
    assert raised.value.code == "invalid_request"


def test_of_two_descriptions_the_last_counts_and_parts_are_bounded():
    field = b'--boundary\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"items": []}\r\n'
    assert (read([field + BODY])).req_id == "r1"
    with pytest.raises(BadRequestError, match="malformed"):
        read([field * 3 + BODY], Settings(max_items=2))


def test_what_is_malformed_is_not_repeated():
    with pytest.raises(BadRequestError) as raised:
        read([BODY.replace(b'filename="a.png"', b'filename="/home/\xff"')])
    assert raised.value.message == "The multipart body is malformed: Segment header failed to decode"


@pytest.mark.parametrize("called", [b"", b'; filename=""', b"; filename*=utf-8''%C3%A4.png"])
def test_a_file_is_found_by_the_name_of_its_part_whatever_it_was_called(called):
    request = read([BODY.replace(b'; filename="a.png"', called)])
    assert request.items[0].data == MEDIA


def test_the_headers_of_parts_are_bounded_folded_or_not():
    long, folded = b"X-Y: " + b"y" * 3000, b"X-Y: y" + b"\r\n y" * 1500
    for header in (long, folded):
        with pytest.raises(BadRequestError, match="malformed: Maximum segment header length exceeded"):
            read([BODY.replace(b"Content-Type: image/png", header)])
    assert len(read([BODY.replace(b"Content-Type: image/png", b"X-Y: " + b"y" * 2000)]).items) == 2


def test_the_field_that_describes_is_bounded():
    head = b'--boundary\r\nContent-Disposition: form-data; name="request"\r\n\r\n'
    with pytest.raises(BadRequestError, match="larger than 8388608 bytes"):
        read([head + b" " * (8 * 1024 * 1024 + 1) + b"\r\n--boundary--\r\n"])


@pytest.mark.parametrize("ending", ["\\n", "\\n\\n", "\\r\\n", "\\u2028", "\\u0000", " "])
def test_an_id_ends_with_its_last_character(ending):
    """It stands in headers, log lines and SGLang's messages: a line break at its end would break them."""
    with pytest.raises(BadRequestError, match="req_id"):
        decode_encode_body(f'{{"req_id": "r1{ending}", "items": [{{"type": "image", "data": ""}}]}}', Settings())
    with pytest.raises(BadRequestError, match="req_id"):
        convert(MetadataBody, {"req_id": "r1" + ending.encode().decode("unicode_escape")})
