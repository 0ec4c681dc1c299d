"""Pictures as a viewer would show them, from files made here; what is no picture is refused by its content."""

from __future__ import annotations

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, features

from tectum.errors import BadRequestError
from tectum.media.image import decode_image
from tectum.media.policy import MediaPolicy
from tectum.media.sniff import media_type

POLICY = MediaPolicy()
AVIF = pytest.param("AVIF", marks=pytest.mark.skipif(not features.check("avif"), reason="Pillow has no AVIF here"))
RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)


def saved(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def corners(picture: Image.Image) -> list[tuple[int, ...]]:
    """Top left, top right, bottom left, bottom right."""
    right, bottom = picture.width - 1, picture.height - 1
    return [picture.getpixel(at) for at in ((0, 0), (right, 0), (0, bottom), (right, bottom))]


def refusal(data: bytes, code: str, status: int, policy: MediaPolicy = POLICY) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        decode_image(data, policy)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert len(caught.value.message) <= 200
    assert not re.search(r"\b0x[0-9a-f]{4}", caught.value.message)  # no memory address
    return caught.value


def quarters(width: int, height: int) -> Image.Image:
    """Red, green over blue, yellow: a picture whose four corners tell how it was turned."""
    picture = Image.new("RGB", (width, height), RED)
    picture.paste(GREEN, (width // 2, 0, width, height // 2))
    picture.paste(BLUE, (0, height // 2, width // 2, height))
    picture.paste(YELLOW, (width // 2, height // 2, width, height))
    return picture


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG by hand: `rows` with each row's filter byte, `extra` chunks before the data."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    data = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + data + png_chunk(b"IEND", b"")


# how each EXIF orientation shows the stored corners (top left, top right, bottom left, bottom right)
ORIENTATIONS = {
    1: (RED, GREEN, BLUE, YELLOW),
    2: (GREEN, RED, YELLOW, BLUE),  # mirrored
    3: (YELLOW, BLUE, GREEN, RED),  # upside down
    4: (BLUE, YELLOW, RED, GREEN),  # flipped
    5: (RED, BLUE, GREEN, YELLOW),  # transposed
    6: (BLUE, RED, YELLOW, GREEN),  # to be turned clockwise
    7: (YELLOW, GREEN, BLUE, RED),  # transversed
    8: (GREEN, YELLOW, RED, BLUE),  # to be turned counter-clockwise
}


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_exif_orientation_is_applied(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = decode_image(saved(quarters(40, 24), kind, exif=exif), POLICY)
    assert shown.size == ((24, 40) if orientation >= 5 else (40, 24))
    assert corners(shown) == list(ORIENTATIONS[orientation])


def test_a_turned_jpeg_has_its_sides_swapped_before_anything_is_computed_from_them():
    exif = Image.Exif()
    exif[0x0112] = 6
    shown = decode_image(saved(quarters(64, 32), "JPEG", exif=exif, quality=95, subsampling=0), POLICY)
    assert shown.size == (32, 64)
    for found, meant in zip(corners(shown), ORIENTATIONS[6], strict=True):
        assert np.abs(np.subtract(found, meant)).max() <= 8


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_ignored(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = decode_image(saved(quarters(40, 24), exif=exif), POLICY)
    assert (shown.size, corners(shown)) == ((40, 24), [RED, GREEN, BLUE, YELLOW])


def test_transparency_is_composited_on_white_and_black_text_stays_visible():
    picture = Image.new("RGBA", (8, 8), (0, 0, 0, 0))  # transparent black, as many logos are stored
    picture.paste((0, 0, 0, 255), (2, 2, 6, 6))
    picture.putpixel((7, 7), (255, 0, 0, 51))  # a fifth of red: 255 red, and 255 * (1 - 0.2) = 204 of the others
    shown = decode_image(saved(picture), POLICY)
    assert shown.mode == "RGB"
    assert shown.getpixel((0, 0)) == (255, 255, 255)
    assert shown.getpixel((3, 3)) == (0, 0, 0)
    assert shown.getpixel((7, 7)) == (255, 204, 204)


def test_gray_with_alpha_is_composited_on_white():
    picture = Image.new("LA", (4, 4), (0, 0))
    picture.putpixel((1, 1), (100, 255))
    shown = decode_image(saved(picture), POLICY)
    assert (shown.getpixel((0, 0)), shown.getpixel((1, 1))) == ((255, 255, 255), (100, 100, 100))


def test_a_transparent_palette_entry_becomes_white():
    picture = Image.new("P", (4, 4), 0)
    picture.putpalette([10, 20, 30, 200, 100, 50])
    picture.putpixel((1, 1), 1)
    for kind in ("PNG", "GIF"):
        shown = decode_image(saved(picture, kind, transparency=0), POLICY)
        assert (shown.getpixel((0, 0)), shown.getpixel((1, 1))) == ((255, 255, 255), (200, 100, 50))


def test_a_transparent_colour_of_an_rgb_png_becomes_white():
    picture = Image.new("RGB", (4, 4), (1, 2, 3))
    picture.putpixel((1, 1), (4, 5, 6))
    shown = decode_image(saved(picture, transparency=(1, 2, 3)), POLICY)
    assert (shown.mode, shown.getpixel((0, 0)), shown.getpixel((1, 1))) == ("RGB", (255, 255, 255), (4, 5, 6))


def test_16_bit_gray_is_scaled_not_clipped():
    values = [0, 255, 257, 25700, 32768, 65535]  # / 257: 0, 0.99, 1, 100, 127.5, 255
    rows = b"\0" + struct.pack(">6H", *values)
    shown = decode_image(png(6, 1, 16, 0, rows), POLICY)
    assert shown.mode == "RGB"
    grays = [shown.getpixel((x, 0)) for x in range(6)]
    assert grays == [(g, g, g) for g in (0, 1, 1, 100, 128, 255)]


def test_a_dark_16_bit_picture_stays_dark():
    shown = decode_image(saved(Image.fromarray(np.full((2, 2), 2570, np.uint16))), POLICY)
    assert corners(shown) == [(10, 10, 10)] * 4


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_a_turned_16_bit_picture_is_both_turned_and_scaled(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.fromarray(np.array([[0, 25700, 65535]], np.uint16))
    shown = decode_image(saved(stored, kind, exif=exif), POLICY)
    assert shown.size == (1, 3)
    assert [shown.getpixel((0, y))[0] for y in range(3)] == [0, 100, 255]


def test_16_bit_colour_keeps_its_high_bytes():
    rows = b"\0" + struct.pack(">3H", 65535, 0x8000, 0x0100)
    assert decode_image(png(1, 1, 16, 2, rows), POLICY).getpixel((0, 0)) == (255, 128, 1)


def test_float_and_32_bit_pictures_are_scaled_by_their_largest_value():
    floats = decode_image(saved(Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)), "TIFF"), POLICY)
    assert [floats.getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]
    deep = decode_image(saved(Image.fromarray(np.array([[0, 1 << 19, 1 << 20]], np.int32)), "TIFF"), POLICY)
    assert [deep.getpixel((x, 0))[0] for x in range(3)] == [0, 128, 255]


def test_values_that_are_not_finite_and_negative_ones_are_shown_as_black():
    values = np.array([[np.nan, np.inf, -np.inf, -3.0, 1.0]], np.float32)
    shown = decode_image(saved(Image.fromarray(values), "TIFF"), POLICY)
    assert [shown.getpixel((x, 0)) for x in range(5)] == [(0, 0, 0)] * 4 + [(255, 255, 255)]


@pytest.mark.parametrize(
    ("ink", "colour"),
    [
        ((255, 0, 0, 0), (0, 255, 255)),  # cyan
        ((0, 255, 0, 0), (255, 0, 255)),  # magenta
        ((0, 0, 255, 0), (255, 255, 0)),  # yellow
        ((0, 0, 0, 255), (0, 0, 0)),
        ((0, 0, 0, 0), (255, 255, 255)),
    ],
)
def test_cmyk_has_the_right_colours(ink, colour):
    picture = Image.new("CMYK", (16, 16), ink)
    # a CMYK JPEG of Adobe's kind stores its inks inverted, which is what Pillow writes
    jpeg = saved(picture, "JPEG", quality=100)
    assert b"Adobe" in jpeg
    for data in (jpeg, saved(picture, "TIFF")):
        shown = decode_image(data, POLICY)
        assert shown.mode == "RGB"
        assert np.abs(np.subtract(shown.getpixel((8, 8)), colour)).max() <= 2


def test_a_grayscale_jpeg_has_three_channels():
    shown = decode_image(saved(Image.new("L", (16, 16), 77), "JPEG"), POLICY)
    assert (shown.mode, shown.getpixel((5, 5))) == ("RGB", (77, 77, 77))
    assert np.asarray(shown).shape == (16, 16, 3)


def test_a_picture_of_one_bit_is_black_and_white():
    picture = Image.new("1", (9, 2), 0)
    picture.putpixel((8, 1), 1)
    assert corners(decode_image(saved(picture), POLICY)) == [(0, 0, 0)] * 3 + [(255, 255, 255)]


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_of_an_animation_the_first_frame_is_taken(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE, GREEN)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
    shown = decode_image(data, POLICY)
    assert (shown.mode, corners(shown)) == ("RGB", [RED] * 4)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
@pytest.mark.parametrize("size", [(1, 1), (26, 28), (332, 27), (1000, 5)])
def test_odd_sizes_are_decoded_as_they_are(kind, size):
    shown = decode_image(saved(Image.new("RGB", size, RED), kind), POLICY)
    assert (shown.mode, shown.size, shown.getpixel((0, 0))) == ("RGB", size, RED)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", AVIF])
def test_lossy_formats_are_decoded(kind):
    shown = decode_image(saved(Image.new("RGB", (16, 16), (200, 100, 50)), kind, quality=95), POLICY)
    assert (shown.mode, shown.size) == ("RGB", (16, 16))
    assert np.abs(np.subtract(shown.getpixel((8, 8)), (200, 100, 50))).max() <= 6


def test_a_jpeg_without_its_last_128_bytes_is_refused():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise), "JPEG")
    assert decode_image(data, POLICY).size == (64, 64)
    error = refusal(data[:-128], "media_decode_failed", 400)
    assert error.at_item(3).to_problem("r")["item"] == 3
    assert str(error) == f"{error.message} (item 3) [media_decode_failed]", "as Python's caller of a batch reads it"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP", "GIF", AVIF])
def test_half_a_picture_is_refused(kind):
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise), kind)
    refusal(data[: len(data) // 2], "media_decode_failed", 400)


def test_a_large_bad_picture_makes_a_small_error_without_media_in_it():
    data = saved(Image.new("RGB", (4, 4)))[:33] + b"SECRET-MEDIA" * 250_000
    assert len(data) > 3_000_000
    problem = str(refusal(data, "media_decode_failed", 400).to_problem("r"))
    assert len(problem) < 1024
    assert "SECRET" not in problem


def test_a_picture_of_too_many_pixels_is_refused_by_its_header_alone():
    # the data is one byte of garbage: a decoder that got as far as the pixels would call it damaged
    bomb = png(14000, 14000, 8, 2, b"\0")
    error = refusal(bomb, "image_too_large", 413)
    assert "more than 64000000 pixels" in error.message
    assert error.details["limit"] == POLICY.max_image_pixels == 64_000_000


def test_the_pixel_limit_is_inclusive():
    policy = MediaPolicy(max_image_pixels=12 * 10)
    assert decode_image(saved(Image.new("RGB", (12, 10))), policy).size == (12, 10)
    assert "11x11" in refusal(saved(Image.new("RGB", (11, 11))), "image_too_large", 413, policy).message


MP4 = b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41" + b"\0" * 64
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"></svg>'


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (MP4, "video/mp4"),
        (SVG, "image/svg+xml"),
        (b'<?xml version="1.0"?>\n' + SVG, "image/svg+xml"),
        (b"\xef\xbb\xbf\r\n <!DOCTYPE html><html><body>404</body></html>", "text/html"),
        (b"<HTML><body>", "text/html"),
        (b'{"error": "no such picture"}', "text/plain"),
        (b"%PDF-1.7\n", "application/pdf"),
        (b"\x80\x81\x82\x83", "application/octet-stream"),
        (b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0", "audio/x-wav"),
    ],
)
def test_what_is_no_picture_is_refused_by_the_name_of_what_it_is(data, found):
    assert media_type(data) == found
    error = refusal(data, "unsupported_media", 415)
    assert found in error.message
    assert "JPEG" in error.message
    assert error.details["found"] == found


def test_heic_is_decoded_only_where_pillow_has_learnt_it():
    assert media_type(HEIC) == "image/heic"
    Image.init()
    if "HEIF" in Image.OPEN:
        refusal(HEIC, "media_decode_failed", 400)  # only a header
    else:
        assert "image/heic" in refusal(HEIC, "unsupported_media", 415).message


@pytest.mark.parametrize("length", range(13))
def test_the_first_bytes_of_a_picture_are_no_picture(length):
    with pytest.raises(BadRequestError) as caught:
        decode_image(saved(Image.new("RGB", (2, 2)))[:length], POLICY)
    assert caught.value.code in {"unsupported_media", "media_decode_failed"}


def test_mutated_pictures_are_decoded_or_refused_never_anything_else():
    rng = np.random.default_rng(7)
    noise = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    policy = MediaPolicy(max_image_pixels=100_000)
    for kind in ("JPEG", "PNG", "GIF", "BMP"):
        whole = np.frombuffer(saved(noise, kind), np.uint8)
        for _ in range(150):
            bad = whole.copy()
            bad[rng.integers(0, min(len(bad), 400), 4)] = rng.integers(0, 256, 4)
            try:
                assert decode_image(bad.tobytes(), policy).mode == "RGB"
            except BadRequestError as error:
                assert error.code in {"unsupported_media", "media_decode_failed", "image_too_large"}
