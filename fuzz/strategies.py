"""Hypothesis strategies: for each target, inputs that are nearly right. What mutation of bytes seldom finds is built here."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from fuzz.seeds import SEEDS

ANY = st.text(st.characters(codec="utf-8"), max_size=40)


def _joined(*parts: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(lambda found: "".join(found).encode("utf-8", "surrogateescape"))


def _spoilt(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """A seed with some stretches replaced, cut out or doubled."""

    def spoil(given: tuple[bytes, list[tuple[float, int, bytes]]]) -> bytes:
        seed, changes = given
        for where, length, instead in changes:
            at = int(where * len(seed))
            seed = seed[:at] + instead + seed[at + length :]
        return seed

    change = st.tuples(st.floats(0, 1), st.integers(0, 16), st.binary(max_size=16))
    return st.tuples(st.sampled_from(seeds), st.lists(change, max_size=4)).map(spoil)


HOST = st.one_of(
    st.sampled_from(
        ["example.com", "127.0.0.1", "0x7f.1", "[::1]", "[::ffff:10.0.0.1]", "2130706433", "１２７.0.0.1", "a..b"]
    ),
    st.ip_addresses().map(lambda address: f"[{address}]" if address.version == 6 else str(address)),
    st.from_regex(r"[0-9a-fxX.:%\[\]-]{1,24}", fullmatch=True),
    ANY,
)
URL = _joined(
    st.sampled_from(["http://", "https://", "HTTP://", "http:", "//", "http:///", "ftp://", "\thttp://"]),
    st.sampled_from(["", "", "", "a@", "a:b@", "@", "\\@", "allowed.com\\@", "allowed.com#@", "allowed.com?@"]),
    HOST,
    st.sampled_from(["", ":80", ":0", ":65536", ":-1", ":٨٠", ":"]),
    st.one_of(st.just(""), ANY.map(lambda text: "/" + text), ANY.map(lambda text: "?" + text), ANY),
)
DATA_URI = _joined(
    st.one_of(st.just(""), st.sampled_from(["image/png", "a/b", "*/*", "IMAGE/JPEG", "/"]), ANY),
    st.lists(st.sampled_from([";base64", ";BASE64", ";charset=utf-8", ";", ";a", "; base64"]), max_size=3).map("".join),
    st.sampled_from([",", ",", ",", "", ",,"]),
    st.one_of(st.from_regex(r"[A-Za-z0-9+/_=\s%-]{0,60}", fullmatch=True), ANY),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ANY),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(ANY, inner, max_size=4)),
    max_leaves=12,
)
ITEM = st.fixed_dictionaries(
    {"type": st.one_of(st.sampled_from(["image", "video", "audio"]), JSON)},
    optional={"url": st.one_of(ANY, JSON), "data": st.one_of(ANY, JSON), "file": st.one_of(ANY, JSON), "extra": JSON},
)
BODY = st.one_of(
    st.fixed_dictionaries(
        {"items": st.one_of(st.lists(ITEM, max_size=10), JSON)},
        optional={
            "req_id": st.one_of(ANY, JSON),
            "num_parts": st.one_of(st.integers(), JSON),
            "part_idx": st.one_of(st.integers(), JSON),
            "deadline_ms": st.one_of(st.integers(), JSON),
            "options": st.one_of(st.dictionaries(ANY, JSON, max_size=70), JSON),
            "delivery": st.one_of(st.fixed_dictionaries({"mode": st.sampled_from(["inline", "hold", "x"])}), JSON),
            "extra": JSON,
        },
    ),
    JSON,
).map(lambda body: json.dumps(body).encode())


def _document(given: tuple[dict[str, Any], bytes, int]) -> bytes:
    header, data, off = given
    text = json.dumps(header).encode()
    return max(len(text) + off, 0).to_bytes(8, "little") + text + data


TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I64", "F64", "U8", "BOOL", "F8_E4M3", "x"]),
        "shape": st.lists(st.integers(-1, 6) | st.sampled_from([2**31, 2**63, 2**64 - 1]), max_size=3),
        "data_offsets": st.lists(st.integers(-1, 64) | st.just(2**63), min_size=2, max_size=2),
    }
)
METADATA = st.dictionaries(st.sampled_from(["tectum", "dtype", "req_id"]) | ANY, ANY | JSON, max_size=5)
NAMES = st.sampled_from(["rows", "item_rows", "grid_thw", "deepstack.0", "deepstack.1", "xxh3", "x"])
WIRE = st.tuples(
    st.one_of(
        st.tuples(st.dictionaries(NAMES, TENSOR | JSON, max_size=5), st.none() | METADATA).map(
            lambda found: found[0] if found[1] is None else {**found[0], "__metadata__": found[1]}
        ),
        st.dictionaries(ANY, JSON, max_size=3),
    ),
    st.binary(max_size=80),
    st.sampled_from([0, 0, 0, -1, 1, 2**40]),
).map(_document)

HEADER = st.one_of(
    st.sampled_from(
        [
            "Content-Length: 5",
            "Content-Length: 99999999999999999999",
            "Transfer-Encoding: chunked",
            "Transfer-Encoding: gzip, chunked",
            "Expect: 100-continue",
            "Connection: close",
            "Connection: upgrade\r\nUpgrade: h2c",
            "Content-Type: multipart/form-data; boundary=b",
            "Content-Encoding: gzip",
            "Authorization: Bearer x",
        ]
    ),
    ANY,
)
HTTP = _joined(
    st.sampled_from(["\x1f", "\x00", "\x03"]),
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "BREW"]),
    st.just(" "),
    st.one_of(st.sampled_from(["/v1/encode", "/requests/x", "*", "http://h/", "/%2e%2e/%00", "//h/x"]), ANY),
    st.sampled_from([" HTTP/1.1\r\n", " HTTP/1.0\r\n", " HTTP/9.9\r\n", "\r\n", "\n"]),
    st.lists(HEADER, max_size=6).map(lambda lines: "".join(line + "\r\n" for line in lines)),
    st.sampled_from(["\r\n", "\n", ""]),
    st.one_of(st.sampled_from(["hello", "5\r\nhello\r\n0\r\n\r\n", "ffffffffffffffffff\r\n", '{"items":[]}']), ANY),
)

SMALL = st.integers(-2, 6) | st.sampled_from([2**31, 2**63, 10**30]) | st.floats() | st.none()
GRANT = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["float32", "bfloat16", "float16", "int8"]) | JSON,
        "width": SMALL,
        "layers": SMALL,
        "item_rows": st.lists(SMALL, max_size=3) | JSON,
        "grid_thw": st.lists(st.lists(SMALL, min_size=2, max_size=4), max_size=3) | JSON,
        "offset": SMALL,
        "nbytes": st.integers(-8, 96) | SMALL,
    },
    optional={"req_id": JSON},
)
PART = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["image_url", "video_url", "input_audio", "text", "image_embeds", "", None]) | JSON,
            "image_url": st.sampled_from(["https://a/b", {"url": "https://a/b"}, {}]) | JSON,
            "input_audio": st.sampled_from([{"data": "AAAA"}, "x"]) | JSON,
            "image_embeds": JSON,
        },
    ),
    JSON,
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"content": st.lists(PART, max_size=4) | JSON}) | JSON, max_size=3)},
    optional={"mm_processor_kwargs": JSON, "media_io_kwargs": JSON, "stream": JSON},
).map(lambda body: json.dumps(body).encode())
FIELDS = st.sampled_from(
    [
        *("req_id", "mm_items", "modality", "num_parts", "part_idx", "prefill_host", "embedding_port", "session_id"),
        *("receive_url", "receive_count", "buffer_address", "destinations", "receivers"),
    ]
)


def _numbered(kinds: int, bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bodies behind a byte that says which kind they are."""
    return st.tuples(st.integers(0, kinds - 1), bodies).map(lambda found: bytes([found[0]]) + found[1])


STRATEGIES: dict[str, st.SearchStrategy[bytes]] = {
    "data_uri": DATA_URI,
    "base64_text": st.from_regex(r"[A-Za-z0-9+/_=\s!-]{0,60}", fullmatch=True).map(str.encode),
    "url": URL,
    "file_url": _joined(st.sampled_from(["//", "///", "/", "//localhost/", ""]), ANY),
    "json_body": BODY,
    "multipart": _spoilt(SEEDS["multipart"]),
    "wire_document": st.one_of(WIRE, _spoilt(SEEDS["wire_document"])),
    "picture": _spoilt(SEEDS["picture"]),
    "error_text": _joined(
        st.lists(st.sampled_from(["https://", "?", "@", "data:", ",", "0x7fff", " "]) | ANY).map("".join)
    ),
    "problem": JSON.map(lambda document: json.dumps({"code": "x", "detail": document, "item": document}).encode()),
    "http": st.one_of(HTTP, _spoilt(SEEDS["http"])),
    "sglang_body": st.one_of(
        _spoilt(SEEDS["sglang_body"]),
        _numbered(5, st.dictionaries(FIELDS, JSON, max_size=8).map(lambda body: json.dumps(body).encode())),
    ),
    "grpc_message": st.one_of(_spoilt(SEEDS["grpc_message"]), _numbered(3, st.binary(max_size=40))),
    "chat_body": st.one_of(CHAT, _spoilt(SEEDS["chat_body"])),
    "pushed_message": st.one_of(
        _spoilt(SEEDS["pushed_message"]), _numbered(256, WIRE | JSON.map(repr).map(str.encode))
    ),
    "mooncake_message": st.one_of(_spoilt(SEEDS["mooncake_message"]), st.binary(max_size=60)),
    "local_line": st.one_of(
        GRANT.map(lambda message: json.dumps(message).encode()),
        JSON.map(lambda message: json.dumps(message).encode()),
        _spoilt(SEEDS["local_line"]),
    ),
}
