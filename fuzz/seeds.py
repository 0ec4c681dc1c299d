"""Where the fuzzer starts from: for each target a few well-formed inputs, what attacks look like, and what was found before."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from PIL import Image

from tectum.delivery import wire


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def _pictures() -> list[bytes]:
    colours = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    rgb = Image.fromarray(colours)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = [_saved(rgb, kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF")]
    made += [_saved(rgb.convert(mode), "PNG") for mode in ("L", "LA", "P", "1", "RGBA", "I;16")]
    made += [_saved(rgb.convert("CMYK"), "JPEG"), _saved(rgb, "JPEG", exif=exif, progressive=True)]
    made += [_saved(rgb.convert("F"), "TIFF"), _saved(rgb, "TIFF", compression="tiff_lzw")]
    return [*made, b"<svg/>", b"<!doctype html>", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"]


def _documents() -> list[bytes]:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    plain = {"rows": rows, "item_rows": (1, 2), "dtype": "float32", "req_id": "r"}
    return [
        wire.pack(**plain, grid_thw=((1, 2, 2), (1, 2, 4)), deepstack=()),
        wire.pack(**plain, grid_thw=(), deepstack=(rows, rows)),
        b"\x02\0\0\0\0\0\0\0{}",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
    ]


_ITEM = {"type": "image", "data": "AAAA"}
_BODIES = [
    json.dumps(body).encode()
    for body in (
        {"items": [_ITEM]},
        {"items": [_ITEM], "req_id": "r-1", "num_parts": 2, "part_idx": 1, "deadline_ms": 5},
        {"items": [{"type": "video", "url": "https://a/b"}], "options": {"max_pixels": 1, "x": None, "y": 1.5}},
        {"items": [_ITEM, {"type": "image", "file": "f"}], "delivery": {"mode": "hold"}},
        {"items": [_ITEM], "zzz": {"a": [[[[]]]]}},
    )
]
_FORM = (
    b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"items":[{"type":"image","file":"f"}]}\r\n'
    b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\nContent-Type: image/png\r\n\r\nxyz\r\n--b--\r\n'
)


def _http() -> list[bytes]:
    body = _BODIES[0]
    head = b"POST /v1/encode HTTP/1.1\r\nHost: h\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    form = head + b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n" % len(_FORM) + _FORM
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    get = b"GET /requests/a%2Fb?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"
    odd = [
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"GET http://h/ HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nxx",
        head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        head + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
        b"\x80\x04\x95.",
        b"\x16\x03\x01\x02\0\x01\0",
    ]
    return [b"\x1f" + data for data in (whole, chunked, form, get, get * 4, whole + get, *odd)]


_GRID = {"grid_thw": [[1, 2, 2]], "item_rows": [1], "dtype": "float32", "width": 4, "layers": 0}
_SGLANG = (
    {
        "req_id": "r_local_part_0",
        "mm_items": ["data:image/png;base64,AAAA"],
        "modality": "IMAGE",
        "num_parts": 1,
        "part_idx": 0,
        "prefill_host": "127.0.0.1",
        "embedding_port": [5000],
    },
    {"req_id": "r", "receive_url": "127.0.0.1:5000", "receive_count": 2},
    {"req_id": "r", "part_idx": 0},
    {"req_id": "r", "prefill_host": "::1", "embedding_port": 1, "session_id": "h:1", "buffer_address": 8},
    {"destinations": ["127.0.0.1:5000"], "receivers": 2},
)
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_CHATS = (
    {"messages": [{"role": "user", "content": [_PICTURE, {"type": "text", "text": "?"}, "and"]}], "model": "m"},
    {"messages": [{"content": [{"image_url": "https://a/b"}, {"type": "input_audio", "input_audio": {"data": "A"}}]}]},
    {"messages": [{"content": "text alone"}], "mm_processor_kwargs": {"max_pixels": 1}},
    {"messages": [{"content": [{"type": None, "video_url": {"url": "https://a/b"}}]}], "media_io_kwargs": {}},
)


def _pushed() -> list[bytes]:
    problem = b'{"code": "overloaded", "status": 503, "detail": "full", "req_id": "r", "item": 1}'
    escape = b'{"req_id": "\\u001b[2J", "detail": "full"}'
    return [
        step + message for step in (b"\0", b"\1", b"\x14") for message in (*_documents(), problem, escape, b"", b"[]")
    ]


def _grpc() -> list[bytes]:
    asked = b"\n\x1adata:image/png;base64,AAAA\x12\x01r\x18\x01\x20\0*\t127.0.0.1\x32\x02\x88\x27"
    return [
        b"\0" + asked,
        b"\1\n\x01r\x12\x01h\x18\x05",
        b"\2\n\x01r\x12\x03h:1\x18\x02",
        b"\0\xff\xff",
        b"\0" + b"\n\4AAAA" * 8 + asked,
    ]


SEEDS: dict[str, list[bytes]] = {
    "data_uri": [
        b"image/png;base64,iVBORw0KGgo=",
        b";charset=utf-8;base64,AAAA",
        b",a%20b",
        b"image/png",
        b"IMAGE/PNG;BASE64,QUJ-_w",
        b"a/b;base64,%41%41%3d",
    ],
    "base64_text": [b"iVBORw0KGgo=", b"QUJ-_w", b" Q U\nJ D=", b"====", b"A"],
    "url": [
        b"https://example.com/a/b.png?x=1&y=2#part",
        b"http://b\xc3\xbccher.example:81/",
        b"http://[2606:4700::1]/",
        b"http://8.8.8.8/",
        b"http://allowed.com\\@evil/",
        b"http://0x7f000001/",
        b"http://[::ffff:127.0.0.1]/",
        b"http://\xef\xbc\x91\xef\xbc\x92\xef\xbc\x97.0.0.1/",
        b"http://a@b@c:80:90/",
    ],
    "file_url": [b"///etc/passwd", b"//localhost/a", b"//[x/", b"///%2e%2e/a", b"a\0b"],
    "json_body": [*_BODIES, b"", b"null", b'{"items":[' * 40, b'{"num_parts":1e999}', b'"\\ud800"', b"\xff\xfe{\0}\0"],
    "multipart": [
        b"\x20\n" + _FORM,
        b"\x00\n" + _FORM,
        b"\x20; charset=punycode\n" + _FORM,
        b"\x20; charset=utf-8\n" + _FORM[:90],
        b'\x20"c\n--bc\r\n\r\n',
    ],
    "wire_document": _documents(),
    "picture": _pictures(),
    "error_text": [
        b"at <a 0x7f00deadbeef>",
        b"https://u:p@h/a?sig=1",
        b"data:image/png;base64,AAAA",
        b"A" * 200,
        b"a\nb\0",
    ],
    "problem": [
        json.dumps(document).encode()
        for document in (
            {"code": "overloaded", "status": 503, "detail": "full", "retryable": True, "item": 1, "limit": 3},
            {"code": 503, "message": "upstream", "self": 1},
            {"status": "x", "item": "y", "detail": [1]},
        )
    ],
    "http": _http(),
    "sglang_body": [
        *(bytes([kind]) + json.dumps(body).encode() for kind, body in enumerate(_SGLANG)),
        b"\0" + json.dumps({**_SGLANG[0], "part_idx": 1}).encode(),
        b"\0" + json.dumps({**_SGLANG[0], "mm_items": ["AAAA"] * 9}).encode(),
    ],
    "grpc_message": _grpc(),
    "chat_body": [json.dumps(body).encode() for body in _CHATS],
    "pushed_message": _pushed(),
    "mooncake_message": [
        b"\x80\x02}(X\x06\x00\x00\x00req_idX\x01\x00\x00\x00rX\x05\x00\x00\x00dtypectorch\nfloat32\nX\x09\x00\x00\x00error_msgNu.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"cos\nsystem\n(S'x'\ntR.",
    ],
    "local_line": [
        json.dumps({"req_id": "r", "offset": 0, "nbytes": 16, "generation": 1, **_GRID, **changed}).encode()
        for changed in ({}, {"item_rows": [0], "nbytes": 0}, {"width": -4, "item_rows": [-1]}, {"width": 1e999})
    ],
}
