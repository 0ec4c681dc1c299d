"""Hostile input and closed doors, one function a case: what is sent, and in words what should come of it.

A case returns what it got; it holds when that is the word it expects. Names with a letter and a number are situations from
public reports (https://github.com/… and CVE numbers beside them); those with a D are doors of our own.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import torch
from PIL import Image

from tests import zoo
from tests.hostile.servers import GOOD, Door, Servers, has_mooncake, page, read_all, said, saved, until


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    expected: str
    run: Callable[[Servers], str]


CASES: list[Case] = []


def case(name: str, what: str, expected: str) -> Callable[[Callable[[Servers], str]], Callable[[Servers], str]]:
    def keep(run: Callable[[Servers], str]) -> Callable[[Servers], str]:
        CASES.append(Case(name, what, expected, run))
        return run

    return keep


def simple(name: str, what: str, expected: str, *items: bytes | str, **body: object) -> None:
    """One request to the server as it comes."""
    CASES.append(Case(name, what, expected, lambda servers: said(servers.plain.encode(*items, **body))))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG by hand: `rows` with each row's filter byte, `extra` chunks before the data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + data + chunk(b"IEND", b"")


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def alike(servers: Servers, hostile: bytes, shown: Image.Image) -> str:
    """Whether a picture gives the rows of what a viewer shows, sent as a plain PNG."""
    got, meant = servers.plain.rows(hostile), servers.plain.rows(saved(shown))
    if got.grid_thw != meant.grid_thw:
        return f"grid {got.grid_thw}, not {meant.grid_thw}"
    return "same rows" if torch.equal(got.rows, meant.rows) else "other rows"


# --- lifecycle, keys ---

CORRUPT = saved(zoo.picture(224, 224), "JPEG")[:-128]


@case("L3", "a corrupt picture: an error at once (sglang #36945)", "400 media_decode_failed item 0 within 3 s")
def _(servers: Servers) -> str:
    started = time.monotonic()
    got = said(servers.plain.encode(CORRUPT))
    return f"{got} within 3 s" if time.monotonic() - started < 3 else f"{got} late"


@case("L11", "a caller hangs up on a plain call: its work is cancelled (ATOM #1562)", "noticed, nothing is held")
def _(servers: Servers) -> str:
    door = servers.plain
    before = door.gauges()["encoder_hang_ups_total"]
    picture = base64.b64encode(saved(zoo.picture(448, 448))).decode()
    body = json.dumps({"items": [{"type": "image", "data": picture}] * 16}).encode()
    with socket.create_connection(door.address) as connection:
        connection.sendall(
            b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
    noticed = until(lambda: door.gauges()["encoder_hang_ups_total"] == before + 1)
    empty = until(lambda: door.gauges()["encoder_live_requests"] == door.gauges()["encoder_body_bytes"] == 0)
    return f"{'noticed' if noticed else 'missed'}, {'nothing' if empty else 'something'} is held"


@case("L12", "a connection is idle for 10 s, then used (vllm example proxy)", "200")
def _(servers: Servers) -> str:
    with httpx2.Client(base_url=servers.plain.url, limits=httpx2.Limits(keepalive_expiry=60), trust_env=False) as own:
        own.get("/health/live")
        time.sleep(10)  # the case itself
        return said(own.get("/health/ready"))


def conflict(servers: Servers, name: str, one: list[bytes], other: list[bytes]) -> str:
    """Two contents under one id: joined where they count as the same, 409 where they do not."""
    first = servers.plain.encode(*one, req_id=name, delivery={"mode": "hold"})
    second = servers.plain.encode(*other, req_id=name, delivery={"mode": "hold"})
    servers.plain.http.delete(f"/v1/requests/{name}")
    return f"{first.status_code} and {said(second)}"


def raw_bytes_as(width: int, height: int) -> bytes:
    pixels = np.arange(30 * 150 * 3, dtype=np.uint32).astype(np.uint8)
    return saved(Image.frombytes("RGB", (width, height), pixels.tobytes()), "BMP")


@case("K9", "30x150 and 150x30 of equal bytes are two contents (Dynamo #8340)", "200 and 409 request_conflict")
def _(servers: Servers) -> str:
    return conflict(servers, "K9", [raw_bytes_as(30, 150)], [raw_bytes_as(150, 30)])


@case("K11", "two PNGs equal in their first 750 bytes are two contents (vllm-mlx #126)", "200 and 409 request_conflict")
def _(servers: Servers) -> str:
    noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    changed = noise.copy()
    changed[-1] = 0
    one, other = (saved(Image.fromarray(pixels), compress_level=0) for pixels in (noise, changed))
    if one[:750] != other[:750]:
        return "the PNGs differ early: no case"
    return conflict(servers, "K11", [one], [other])


simple("K12", "a 10 MB id (vllm #57219)", "400 invalid_request", GOOD, req_id="u" * 10_000_000)


@case("K13", "one URL serves v1, then v2 (vllm example proxy)", "v1's rows, then v2's")
def _(servers: Servers) -> str:
    door = servers.fetching
    versions = [saved(zoo.picture(64, 64, seed)) for seed in (1, 2)]
    words = []
    for name, version in zip(("v1", "v2"), versions, strict=True):
        servers.site.answers["/changing.png"] = page(200, version)
        answer = door.encode(servers.site.url("/changing.png"))
        same = answer.status_code == 200 and torch.equal(wire_rows(answer), door.rows(version).rows)
        words.append(f"{name}'s" if same else said(answer))
    return f"{words[0]} rows, then {words[1]}"


def wire_rows(answer: httpx2.Response) -> torch.Tensor:
    from tectum.delivery import wire

    return wire.unpack(answer.content).rows


@case("K6", "a grayscale JPEG has three channels (sglang #26751)", "same rows")
def _(servers: Servers) -> str:
    gray = saved(zoo.picture(112, 112).convert("L"), "JPEG", quality=95)
    return alike(servers, gray, Image.open(io.BytesIO(gray)).convert("RGB"))


@case("K7", "a 1x1 picture, then a good one, then health (infinity #609)", "4 rows, 200, 200")
def _(servers: Servers) -> str:
    rows = servers.plain.rows(saved(Image.new("RGB", (1, 1), (9, 9, 9)))).rows.shape[0]
    return f"{rows} rows, {said(servers.plain.encode(GOOD))}, {said(servers.plain.http.get('/health/ready'))}"


# --- errors ---

simple(
    "E1",
    "a JPEG without its last 128 bytes, second of two (vllm #38253)",
    "400 media_decode_failed item 1",
    GOOD,
    CORRUPT,
)


@case("E2", "a URL answers 404 (vllm #21254)", "424 media_fetch_failed item 0 (remote 404)")
def _(servers: Servers) -> str:
    answer = servers.fetching.encode(servers.site.url("/missing"))
    return f"{said(answer)} (remote {answer.json().get('remote_status')})"


simple(
    "E3a",
    "a data: URI with what is not base64 (Dynamo #14604)",
    "400 invalid_base64 item 0",
    "data:image/png;base64,not!!!base64!!!",
)
simple("E3b", "a data: URI without a comma (Dynamo #14604)", "400 invalid_data_uri item 0", "data:image/png")
simple(
    "E4",
    "a 14000x14000 PNG of one colour (Dynamo #13190)",
    "413 image_too_large item 0",
    saved(Image.new("1", (14000, 14000))),
)


@case("E4b", "and it is refused before it is decoded", "within 1 s")
def _(servers: Servers) -> str:
    bomb = saved(Image.new("1", (14000, 14000)))
    started = time.monotonic()
    servers.plain.encode(bomb)
    taken = time.monotonic() - started
    return "within 1 s" if taken < 1 else f"{taken:.1f} s"


@case(
    "E5",
    "a fetch that fails in the middle is an error, never an empty 200 (Rapid-MLX #457)",
    "424 media_fetch_failed item 0",
)
def _(servers: Servers) -> str:
    servers.site.answers["/half.png"] = page(200, GOOD).replace(b"Content-Length: ", b"Content-Length: 9")
    return said(servers.fetching.encode(servers.site.url("/half.png")))


GOOD_64 = base64.b64encode(GOOD).decode()
for number, uri in enumerate(
    [
        f"data:image/png;charset=utf-8;base64,{GOOD_64}",
        f"DATA:IMAGE/PNG;BASE64,{GOOD_64}",
        f"data:;base64,{GOOD_64}",
        f"data:image/png;name=a.png;base64,{GOOD_64[:40]}\r\n {GOOD_64[40:]}",
        f"data:image/png;base64,{GOOD_64.replace('+', '-').replace('/', '_').rstrip('=')}",
        f"data:image/png;base64,{GOOD_64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in GOOD),
    ]
):
    simple(f"E6-{number}", "a data: URI as people write it (vllm #48973)", "200", uri)


@case(
    "E7",
    "a 3 MB bad picture: a small error, no media in it or in the log (litellm #34783)",
    "400 invalid_base64 item 0, clean log",
)
def _(servers: Servers) -> str:
    marker = "U0VDUkVUTUVESUE" * 3
    answer = servers.plain.post(json.dumps({"items": [{"type": "image", "data": marker + "!" * 3_000_000}]}))
    leaked = (
        "SECRETMEDIA" in answer.text
        or marker in answer.text
        or any(marker in line for line in servers.plain.process.lines)
    )
    return f"{said(answer)}, {'leaked' if leaked else 'clean log'}"


MP4 = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + b"\0" * 64


def naming(name: str, what: str, data: bytes, found: str) -> None:
    def run(servers: Servers) -> str:
        answer = servers.plain.encode(data)
        return f"{said(answer)} naming {answer.json().get('found')}"

    CASES.append(Case(name, what, f"415 unsupported_media item 0 naming {found}", run))


naming("E8", "an MP4 sent as a picture (vllm #27071)", MP4, "video/mp4")
naming(
    "P8a",
    "an SVG (Dynamo #10263)",
    b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "image/svg+xml",
)
naming(
    "P8b", "an HTML page saved as .png (Dynamo #10263)", b"<!doctype html><html><body>404</body></html>", "text/html"
)
naming(
    "P8c",
    "an XXE in an SVG",
    b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>',
    "image/svg+xml",
)

# --- security ---


class Bomb:
    """What a pickle of it would do where it is loaded: leave a mark."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        import os

        return os.mkdir, (self.mark,)


@case("S1", "a pickle bomb to every kind of listening socket, and in every body (CVE-2026-3059)", "ignored, counted")
def _(servers: Servers) -> str:
    import pickle

    from tests.sglang.language_server import LanguageServer
    from tests.sglang.receiver import Receiver

    mark = servers.files / "pickle-bomb-went-off"
    bomb = pickle.dumps(Bomb(str(mark)))
    doors = [servers.plain, servers.fetching, servers.strict, servers.sending]
    if has_mooncake():
        doors.append(servers.mooncake)
    with LanguageServer(servers.sending.url) as asking, Receiver() as receiver:
        (delivered,) = asking.encode("S1", [GOOD], embedding_port=receiver.port)  # a ZeroMQ connection is up, and stays
        if delivered.result(20).status_code != 200:
            return "nothing was delivered over ZeroMQ: no case"
        for door in doors:
            if (wrong := bombed(door, bomb)) is not None:
                return wrong
    if throw(servers.socket, bomb) != b"problem" or said(servers.sending.encode(GOOD)) != "200":
        return "the Unix socket took it"
    ports = {len(ports_of(door)) for door in (servers.sending, servers.plain)}
    if ports != {1, 2}:
        return f"ports were found in these numbers: {ports}, not HTTP's, and gRPC's beside"
    return "it went off" if mark.exists() else "ignored, counted"


def bombed(door: Door, bomb: bytes) -> str | None:
    """Send it bare to every TCP port of a server, and in every body; what is wrong, if anything."""
    before = door.refusals("invalid_request")
    ports = ports_of(door)
    if door.address[1] not in ports:
        return f"the port of {door.url} was not found among {ports}"
    for port in ports:
        with socket.create_connection((door.address[0], port), 5) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(bomb + b"\r\n\r\n")
            read_all(connection, 1)
    # by HTTP's port: at gRPC's, its library drops what is none
    if not until(lambda: door.refusals("invalid_request") == before + 1):
        return f"bare, it was not counted once by {door.url}"
    for kind in ("application/json", "application/octet-stream", "application/python-pickle"):
        door.post(bomb, content_type=kind)
    door.encode(bomb)
    door.encode("data:application/python-pickle;base64," + base64.b64encode(bomb).decode())
    if door.refusals("invalid_request") <= before + 1:
        return f"in bodies, it was not counted by {door.url}"
    return None if said(door.encode(GOOD)) == "200" else f"{door.url} does not serve any more"


def throw(path: Path, bomb: bytes) -> bytes:
    """Send it to a Unix socket as a line; the first word of the answer behind the greeting."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        connection.sendall(bomb.replace(b"\n", b" ") + b"\n")
        with connection.makefile("rb") as lines:
            lines.readline()
            return next(iter(json.loads(lines.readline())), "").encode()


def ports_of(door: Door) -> set[int]:
    return {port for pid in door.pids() for port in listening(pid)}


def listening(pid: int) -> list[int]:
    """The TCP ports that a process listens on, v4 and v6, as the kernel lists them."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            sockets.add(link.readlink().name)
    inodes = {name[8:-1] for name in sockets if name.startswith("socket:[")}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


for number, url in enumerate(
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://0x7f000001/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://localhost/",
        "http://[::ffff:127.0.0.1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://0.0.0.0/",
        "http://１２７.0.0.1/",
        "http://10.0.0.1:30100/",
    ]
):
    simple(f"S4-{number}", f"a private address: {url} (CVE-2025-6242)", "400 url_refused item 0", url)


@case(
    "S4-redirect",
    "a public page that redirects to the cloud's metadata (CVE-2025-6242)",
    "400 url_refused item 0, asked once",
)
def _(servers: Servers) -> str:
    # private addresses are allowed on this server, but what leads to no address at all, or to another scheme, is not
    servers.site.answers["/away"] = page(302, b"", "Location: file:///etc/passwd")
    servers.site.asked.clear()
    got = said(servers.fetching.encode(servers.site.url("/away")))
    return f"{got}, asked {'once' if servers.site.asked == ['/away'] else servers.site.asked}"


@case("S4-redirects", "redirects without end", "424 media_fetch_failed item 0, asked 4 times")
def _(servers: Servers) -> str:
    servers.site.answers["/round"] = page(302, b"", "Location: /round")
    servers.site.asked.clear()
    got = said(servers.fetching.encode(servers.site.url("/round")))
    return f"{got}, asked {len(servers.site.asked)} times"


simple("S5a", "a backslash and an @ (CVE-2026-24779)", "400 url_refused item 0", "http://allowed.com\\@evil/")
simple("S5b", "user information", "400 url_refused item 0", "http://allowed.com@evil/")
simple("S5c", "a line break in a URL", "400 url_refused item 0", "http://allowed.com/\r\nHost:evil")


@case("S6", "no memory address in the body of a decode error (CVE-2026-22778)", "none in 40 answers")
def _(servers: Servers) -> str:
    random = np.random.default_rng(11)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "AVIF", "ICO"):
        whole = np.frombuffer(saved(zoo.picture(64, 64), kind), np.uint8)
        for _ in range(5):
            bad = whole.copy()
            bad[random.integers(8, len(bad), 40)] ^= 255
            text = servers.plain.encode(bad.tobytes()).content
            if b"object at" in text or b"0x0" in text or b"0x7" in text:
                return text.decode("latin-1")[:100]
    return "none in 40 answers"


for number, (url, expected) in enumerate(
    [
        ("file:///etc/passwd", "400 url_refused item 0"),
        ("/etc/passwd", "400 url_refused item 0"),
        ("../../../../etc/passwd", "400 url_refused item 0"),
        ("FILE:/etc/passwd", "400 url_refused item 0"),
        ("file://localhost/etc/passwd", "400 url_refused item 0"),
        ("", "400 invalid_request item 0"),
    ]
):
    simple(f"S8-{number}", f"a path: {url!r} (ms-swift GHSA-7mpg-jvqj-ccxr)", expected, url)


@case(
    "S8-allowed",
    "files under the allowed folder: theirs yes; ../ and a symlink that leads out, no",
    "200, 400 url_refused item 0, 400 url_refused item 0",
)
def _(servers: Servers) -> str:
    (servers.files / "good.png").write_bytes(GOOD)
    (servers.files.parent / "outside.png").write_bytes(GOOD)
    link = servers.files / "link.png"
    if not link.is_symlink():
        link.symlink_to(servers.files.parent / "outside.png")
    tails = ("good.png", "../outside.png", "link.png")
    return ", ".join(said(servers.fetching.encode(f"file://{servers.files}/{tail}")) for tail in tails)


@case(
    "S9",
    "a server that trickles one byte at a time: one deadline for all (img2dataset #437)",
    "424 media_fetch_timeout item 0 in time",
)
def _(servers: Servers) -> str:
    import asyncio

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    servers.site.answers["/trickle"] = trickle
    started = time.monotonic()
    got = said(servers.fetching.encode(servers.site.url("/trickle")))
    return f"{got} {'in time' if time.monotonic() - started < 6 else 'late'}"


@case(
    "S-query", "the signature of a URL is neither in the error nor in the log", "424 media_fetch_failed item 0, clean"
)
def _(servers: Servers) -> str:
    answer = servers.fetching.encode(servers.site.url("/missing?X-Amz-Signature=5ec2e7"))
    leaked = "5ec2e7" in answer.text or any("5ec2e7" in line for line in servers.fetching.process.lines)
    return f"{said(answer)}, {'leaked' if leaked else 'clean'}"


# --- pictures ---


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(zoo.picture(168, 84), "JPEG", quality=95, exif=exif)


@case("P1", "EXIF orientation 6 is turned before sizes are computed (sglang #33464)", "same rows")
def _(servers: Servers) -> str:
    stored = Image.open(io.BytesIO(turned())).convert("RGB")
    return alike(servers, turned(), Image.fromarray(np.rot90(np.asarray(stored), -1).copy()))


@case("P2", "black text on transparency is composited on white (vllm #18569)", "same rows")
def _(servers: Servers) -> str:
    picture = np.zeros((84, 84, 4), np.uint8)
    picture[30:50, 20:60, 3] = 255
    shown = np.where(picture[..., 3:] == 255, 0, 255).astype(np.uint8).repeat(3, -1)
    return alike(servers, saved(Image.fromarray(picture)), Image.fromarray(shown))


@case("P3", "a CMYK JPEG of Adobe's kind (inverted inks) has the right colours (Pillow #6563)", "cyan")
def _(servers: Servers) -> str:
    cyan = servers.plain.rows(saved(Image.new("CMYK", (84, 84), (255, 0, 0, 0)), "JPEG", quality=100)).rows
    distances = {
        name: float((servers.plain.rows(saved(Image.new("RGB", (84, 84), colour))).rows - cyan).norm())
        for name, colour in {"cyan": (0, 255, 255), "red": (255, 0, 0), "black": (0, 0, 0)}.items()
    }
    return min(distances, key=lambda name: distances[name])


@case("P4", "a 16-bit grayscale PNG is scaled, not clipped (unsloth #10094)", "same rows")
def _(servers: Servers) -> str:
    values = (np.arange(84 * 84, dtype=np.uint32) * 9).astype(np.uint16).reshape(84, 84)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    shown = np.rint(values / 257).astype(np.uint8)
    return alike(servers, png(84, 84, 16, 0, rows), Image.fromarray(shown).convert("RGB"))


@case("P4b", "1-bit, palette with transparency, and an animation's first frame", "same rows, same rows, same rows")
def _(servers: Servers) -> str:
    dots = (np.indices((84, 84)).sum(0) // 7 % 2 * 255).astype(np.uint8)
    bits = saved(Image.fromarray(dots).convert("1"))
    palette = Image.fromarray((dots // 255).astype(np.uint8), "P")
    palette.putpalette([10, 20, 30, 200, 100, 50])
    see_through = np.where(dots[..., None] > 0, [200, 100, 50], [255, 255, 255]).astype(np.uint8)
    frames = [Image.new("RGB", (84, 84), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    checks = [
        (bits, Image.fromarray(dots).convert("RGB")),
        (saved(palette, "PNG", transparency=0), Image.fromarray(see_through)),
        (animated, frames[0]),
    ]
    return ", ".join(alike(servers, hostile, shown) for hostile, shown in checks)


@case("P5", "26x28 and 332x27 pictures are upscaled, never dropped (vllm #15080)", "rows for both")
def _(servers: Servers) -> str:
    got = servers.plain.rows(saved(zoo.picture(26, 28)), saved(zoo.picture(332, 27)))
    return "rows for both" if all(got.item_rows) and len(got.item_rows) == 2 else str(got.item_rows)


@case(
    "P6",
    "200:1 is taken; 1093x5 is refused with the family's limit (omlx #3529)",
    "200 and 400 media_refused item 0 limit 200",
)
def _(servers: Servers) -> str:
    thin = servers.plain.encode(saved(Image.new("RGB", (1093, 5))))
    return f"{said(servers.plain.encode(saved(Image.new('RGB', (1000, 5)))))} and {said(thin)} limit {thin.json().get('limit')}"


def heic_expected() -> str:
    try:
        import pillow_heif  # noqa: F401
    except ImportError:
        return "415 unsupported_media item 0 naming image/heic"
    return "400 media_decode_failed item 0"  # the library is there, and this one has only a header


@case("P7", "HEIC named .jpg: decoded where the library is there, else 415 naming it (hermes #106408)", heic_expected())
def _(servers: Servers) -> str:
    answer = servers.plain.encode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64)
    found = answer.json().get("found")
    return said(answer) + (f" naming {found}" if found else "")


simple("P9a", "zero bytes (sglang #31944)", "400 empty_media item 0", b"")
simple("P9b", "a data: URI with an empty payload (sglang #31944)", "400 empty_media item 0", "data:image/png;base64,")
simple("P9c", "white space for a payload", "400 empty_media item 0", "data:image/png;base64, \n ")
simple(
    "P-bomb",
    "a picture that claims the largest sides there are",
    "413 image_too_large item 0",
    png(2**31 - 1, 2**31 - 1, 8, 2, b"\0"),
)
simple("P-zero", "a picture without pixels", "400 media_decode_failed item 0", png(0, 5, 8, 2, b"\0"))


# --- doors ---

HEAD = b"POST /v1/encode HTTP/1.1\r\nHost: localhost\r\n"
AUTH = b"Authorization: Bearer open-sesame\r\n"


def status_of(answer: bytes) -> str:
    """The status and code of an answer that was read byte by byte; what follows a first one is said."""
    if not answer:
        return "closed"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1].decode()
    try:
        code = json.loads(body)["code"]
    except (ValueError, KeyError):
        code = body[:20].decode("latin-1")
    return f"{status} {code}"


def raw(name: str, what: str, expected: str, *sent: bytes, seconds: float = 5.0) -> None:
    """Bytes for the strict server's socket, and what it says before it closes the connection."""
    CASES.append(Case(name, what, expected, lambda servers: status_of(servers.strict.raw(*sent, seconds=seconds))))


raw(
    "D1",
    "no token: refused before a byte of the body is asked for",
    "401 unauthorized",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n",
)
raw(
    "D2",
    "a declared body above the cap: refused before it is asked for",
    "413 body_too_large",
    HEAD + AUTH + b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n",
)
raw(
    "D3",
    "a body without a length that grows above the cap",
    "413 body_too_large",
    HEAD + AUTH + b"Transfer-Encoding: chunked\r\n\r\n",
    (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 5,
)
raw("D4", "a body that stops half-way", "408 request_timeout", HEAD + AUTH + b"Content-Length: 1000\r\n\r\n{")
raw("D5", "headers that never end", "408 request_timeout", HEAD + b"X-A: b\r\n")
raw("D6", "a header that never ends", "431 head_too_large", HEAD + b"X-A: " + b"b" * 100_000)
raw(
    "D7",
    "a request line of 100 KB",
    "431 head_too_large",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
)
raw(
    "D8",
    "more than a hundred headers",
    "431 head_too_large",
    b"GET /health/live HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n",
)
raw("D9", "a connection that sends nothing", "closed", seconds=5)
raw("D10", "line breaks without end", "408 request_timeout", b"\r\n" * 100)
raw(
    "D11",
    "a length and chunks at once (smuggling)",
    "400 invalid_request",
    HEAD + AUTH + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)
raw(
    "D12",
    "two lengths (smuggling)",
    "400 invalid_request",
    HEAD + AUTH + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ",
)
raw("D13", "a negative length", "400 invalid_request", HEAD + AUTH + b"Content-Length: -1\r\n\r\n")
raw("D14", "HTTP/2 without asking", "400 invalid_request", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
raw("D15", "a TLS hello", "400 invalid_request", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100))
raw(
    "D16",
    "a proxy request",
    "401 unauthorized",
    b"GET http://169.254.169.254/latest HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
)
raw(
    "D17",
    "a body where none belongs",
    "400 invalid_request",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + AUTH + b"Content-Length: 5\r\n\r\nhello",
)
raw(
    "D18",
    "a compressed body",
    "400 invalid_request",
    HEAD + AUTH + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
)
raw(
    "D33",
    "a body that its transfer compresses",
    "400 invalid_request",
    HEAD + AUTH + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
)

raw(
    "D32",
    "an upgrade to a protocol that is not spoken is answered in the one that is",
    '200 {"status":"live"}',
    b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\n",
)


@case("D19", "requests sent ahead by the hundred", "closed after at most 9 answers")
def _(servers: Servers) -> str:
    answer = servers.strict.raw(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500, seconds=5)
    count = answer.count(b"HTTP/1.1 ")
    return "closed after at most 9 answers" if count <= 9 else f"{count} answers"


@case(
    "D20",
    "stalled uploads are bounded together, cut in time, and their memory comes back",
    "at most 8 MB, then 0, and 200",
)
def _(servers: Servers) -> str:
    door = servers.strict
    head = HEAD + AUTH + b"Content-Length: 4000000\r\n\r\n"
    most = 0.0
    connections = [socket.create_connection(door.address, 10) for _ in range(12)]
    try:
        for connection in connections:
            connection.settimeout(3)
            try:
                connection.sendall(head + b" " * 3_000_000)
            except (TimeoutError, ConnectionError):
                continue  # refused already
            most = max(most, door.gauges()["encoder_body_bytes"])
        answers = {status_of(read_all(connection, 5)) for connection in connections}
    finally:
        for connection in connections:
            connection.close()
    empty = until(lambda: door.gauges()["encoder_body_bytes"] == 0)
    if not answers <= {"408 request_timeout", "503 overloaded", "closed"} or not answers & {"503 overloaded"}:
        return str(answers)
    bound = "at most 8 MB" if 3_000_000 <= most <= 8 << 20 else f"{most:.0f} bytes"
    return f"{bound}, then {'0' if empty else 'some'}, and {said(door.encode(GOOD))}"


@case("D21", "a body of a million unknown keys is refused at once", "413 request_too_large within 2 s")
def _(servers: Servers) -> str:
    body = b'{"items":[{"type":"image","data":"AAAA"}],' + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}"
    started = time.monotonic()
    answer = servers.plain.post(body)
    taken = time.monotonic() - started
    return f"{said(answer)} {'within 2 s' if taken < 2 else f'after {taken:.1f} s'}"


@case("D22", "JSON as dense, deep or odd as it comes", "all 4xx within 2 s")
def _(servers: Servers) -> str:
    items = b'{"type":"image","data":"AAAA"}'
    for body in (
        b'{"items":[' + items + b'],"options":{' + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}}",
        b'{"items":[' + b",".join([items] * 400_000) + b"]}",
        b'{"items":' + b"[" * 5_000_000,
        b'{"items":[' + items + b'],"options":{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}}",
        b'{"num_parts":' + b"9" * 5_000_000 + b"}",
        b'{"items":[' + items + b'],"num_parts":1e999}',
        b'{"items":[{"type":"image","data":"\\ud800"}]}',
        b'{"items":[{"type":"image","data":"\xff"}]}',
        b"\xff\xfe{\0}\0",
        b"",
        b"null",
        b"[]",
        b'{"items":[' + items + b'],"options":{"max_pixels":NaN}}',
    ):
        started = time.monotonic()
        answer = servers.plain.post(body)
        taken = time.monotonic() - started
        if not 400 <= answer.status_code < 500 or taken > 2 or "(" in said(answer):
            return f"{said(answer)} after {taken:.2f} s for {body[:40]!r}"
    return "all 4xx within 2 s"


def multipart(content_type: str, body: bytes) -> Callable[[Servers], str]:
    return lambda servers: said(servers.plain.post(body, content_type=content_type))


PART = b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"items":[{"type":"image","file":"f"}]}\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n' + GOOD + b"\r\n--b--\r\n"
FORM = "multipart/form-data; boundary=b"
for name, what, expected, content_type, body in (
    ("D23a", "a multipart body as it should be", "200", FORM, PART + FILE),
    ("D23b", "charset=punycode", "400 invalid_request", FORM + "; charset=punycode", PART + FILE),
    ("D23c", "charset=zlib_codec", "400 invalid_request", FORM + "; charset=zlib_codec", PART + FILE),
    ("D23d", "no boundary", "400 invalid_request", "multipart/form-data", PART + FILE),
    ("D23e", "an empty boundary", "400 invalid_request", "multipart/form-data; boundary=", PART + FILE),
    ("D23f", "a part without a name", "400 invalid_request", FORM, b"--b\r\n\r\nx\r\n--b--\r\n"),
    ("D23g", "a part's header without end", "400 invalid_request", FORM, b"--b\r\nA: " + b"b" * 500_000),
    ("D23h", "parts by the thousand", "400 invalid_request", FORM, FILE[:-5] * 5000),
    ("D23i", "a body that ends in the middle", "400 invalid_request", FORM, PART + FILE[:60]),
    (
        "D23j",
        "the request in a file",
        "400 invalid_request",
        FORM,
        PART.replace(b'"request"', b'"request"; filename="r"') + FILE,
    ),
    ("D23k", "a name that is not UTF-8", "400 invalid_request", FORM, PART.replace(b'"request"', b'"\xff\xfe"') + FILE),
    ("D23l", "another kind of multipart", "200", "multipart/mixed; boundary=b", PART + FILE),
):
    CASES.append(Case(name, what, expected, multipart(content_type, body)))


@case("D24", "a caller that hangs up in the middle of its body: counted, no error in the log", "counted, quiet")
def _(servers: Servers) -> str:
    door = servers.strict
    before, lines = door.gauges()["encoder_hang_ups_total"], len(door.process.lines)
    for _ in range(3):
        with socket.create_connection(door.address) as connection:
            connection.sendall(HEAD + AUTH + b"Content-Length: 100000\r\n\r\n" + b" " * 1000)
    counted = until(lambda: door.gauges()["encoder_hang_ups_total"] >= before + 3)
    loud = [line for line in door.process.lines[lines:] if "ERROR" in line or "Traceback" in line]
    return f"{'counted' if counted else 'not counted'}, {'loud' if loud else 'quiet'}"


@case("D25", "a reader that stalls in the middle of its answer is dropped", "dropped, quiet")
def _(servers: Servers) -> str:
    door = servers.strict
    lines = len(door.process.lines)
    picture = base64.b64encode(saved(Image.new("RGB", (448, 448)))).decode()
    held = json.dumps({"items": [{"type": "image", "data": picture}] * 64})  # 4 MB of rows: more than sockets buffer
    with socket.socket(socket.AF_INET6) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(door.address)
        before = door.gauges()["encoder_hang_ups_total"]
        reader.sendall(HEAD + AUTH + b"Content-Length: %d\r\n\r\n" % len(held) + held.encode())
        dropped = until(lambda: door.gauges()["encoder_hang_ups_total"] > before, 30)
        whole = len(read_all(reader, 5)) > 64 * 256 * 64 * 4
    loud = [line for line in door.process.lines[lines:] if "ERROR" in line or "Traceback" in line]
    return f"{'dropped' if dropped and not whole else 'kept'}, {'loud' if loud else 'quiet'}"


@case("D26", "more connections than there may be", "503 overloaded, then 200")
def _(servers: Servers) -> str:
    door = servers.strict
    door.http.close()
    connections = [socket.create_connection(door.address, 5) for _ in range(30)]
    try:
        connections[-1].sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = status_of(read_all(connections[-1], 3))
    finally:
        for connection in connections:
            connection.close()
        door.__post_init__()
    served = until(lambda: door.http.get("/health/live").status_code == 200)
    return f"{got}, then {'200' if served else 'nothing'}"


@case(
    "D27",
    "metrics, limits, models and the API's document are behind the token; probes and error pages are not",
    "401 401 401 401 401 200 200 200",
)
def _(servers: Servers) -> str:
    door = servers.strict
    closed = ["/metrics", "/v1/limits", "/v1/models", "/openapi.json", "/errors/../metrics"]
    with httpx2.Client(base_url=door.url, trust_env=False) as stranger:
        return " ".join(
            str(stranger.get(path).status_code)
            for path in [*closed, "/health/live", "/health/ready", "/errors/internal"]
        )


@case("D28", "tokens that are nearly right", "all 401")
def _(servers: Servers) -> str:
    near = [
        "",
        "Bearer",
        "Bearer ",
        "Bearer open-sesam",
        "Bearer open-sesame2",
        "Basic open-sesame",
    ]
    near += ["Bearer open-sesame, Bearer x", "Bearer \xf6pen-sesame", "Bearer  open-sesame", "open-sesame"]
    lines = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: %s\r\n\r\n"
    got = {status_of(servers.strict.raw(lines % text.encode("latin-1"))) for text in near}
    return "all 401" if got == {"401 unauthorized"} else str(got)


@case("D29", "no page asks another host for anything", "none")
def _(servers: Servers) -> str:
    import re

    door = servers.plain
    paths = [
        "/",
        "/docs",
        "/redoc",
        "/errors",
        *(f"/errors/{code}" for code in ("internal", "url_refused", "overloaded")),
    ]
    for path in paths:
        text = door.http.get(path).text
        if found := re.search(r"(?:src|href|action|@import|url\()\s*=?\s*[\"'(]?(https?:)?//[^\"')\s]+", text):
            return f"{path}: {found[0][:60]}"
    return "none"


@case("D31", "a web page of another site calls a server on loopback that has no token", "403 403 403 200 200 200")
def _(servers: Servers) -> str:
    said_by_browsers = [
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": servers.plain.url},
    ]
    answers = [servers.plain.http.get("/v1/models", headers=headers) for headers in said_by_browsers]
    return " ".join(str(answer.status_code) for answer in answers)


@case("D35", "a web page that had its own name lead to the loopback address (DNS rebinding)", "403 403 403 200")
def _(servers: Servers) -> str:
    port = servers.plain.address[1]
    names = [f"evil.example:{port}", "evil.example", f"127.0.0.1.evil.example:{port}", f"localhost:{port}"]
    answers = [servers.plain.http.get("/v1/models", headers={"host": name}) for name in names]
    return " ".join(str(answer.status_code) for answer in answers)


@case("D30", "options that are no options", "all 400")
def _(servers: Servers) -> str:
    bad = [{"max_pixels": [1]}, {"max_pixels": -1}, {"max_pixels": 10**30}, {"max_pixels": True}, {"a" * 300: 1}]
    bad += [
        {"min_pixels": 2**28 + 1},
        {"max_pixels": "9" * 1000},
        {"max_pixels": 1.5},
        {f"k{i}": 1 for i in range(100)},
    ]
    got = {servers.plain.encode(GOOD, options=options).status_code for options in bad}
    return "all 400" if got == {400} else str(got)
