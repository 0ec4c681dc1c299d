"""What an attack on the media room found, kept as cases."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tectum.errors import BadRequestError, clean_text
from tectum.media.image import decode_image
from tectum.media.policy import MediaPolicy, check_address, parse_target
from tectum.media.source import item_bytes
from tectum.types import MediaItem, Modality

POLICY = MediaPolicy()


def two_colours(width: int = 40, height: int = 20) -> Image.Image:
    """Left half red, right half blue."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return Image.fromarray(pixels)


@pytest.mark.parametrize("piece", [b"mdat", b"iloc", b"av1C"])
def test_a_damaged_avif_is_the_pictures_fault(piece):
    file = io.BytesIO()
    two_colours(64, 64).save(file, "AVIF")
    data = file.getvalue()
    at = data.index(piece) + (4 if piece == b"mdat" else 0)
    broken = data[:at] + (bytes(len(data) - at) if piece == b"mdat" else b"XXXX" + data[at + 4 :])
    with pytest.raises(BadRequestError) as caught:
        decode_image(broken, POLICY)
    assert caught.value.code == "media_decode_failed"


@pytest.mark.parametrize(("orientation", "red_at"), [(3, (39, 0)), (6, (0, 0)), (8, (0, 39)), (2, (39, 0))])
def test_orientation_is_applied_even_beside_damaged_metadata(orientation, red_at):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    two_colours().save(file, "PNG", exif=exif)
    shown = decode_image(file.getvalue(), POLICY)
    assert shown.size == ((20, 40) if orientation in (6, 8) else (40, 20))
    assert shown.getpixel(red_at) == (255, 0, 0)


def test_a_malformed_file_url_is_refused(tmp_path):
    policy = MediaPolicy(allowed_media_dir=tmp_path)
    with pytest.raises(BadRequestError) as caught:
        item_bytes(MediaItem(Modality.IMAGE, url="file://[x/"), policy, None)
    assert caught.value.code == "url_refused"


def test_sizes_survive_the_cleaning_of_texts_and_addresses_do_not():
    assert (
        clean_text("The picture is 14000x14000, at <Foo 0x7f00deadbeef>") == "The picture is 14000x14000, at <Foo 0x…>"
    )
    assert clean_text("30x150 and 100x0000") == "30x150 and 100x0000"


@pytest.mark.parametrize("address", ["::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "fec0::1", "::1", "::"])
def test_addresses_that_hide_a_private_one_are_refused(address):
    with pytest.raises(BadRequestError) as caught:
        check_address(address, POLICY)
    assert caught.value.code == "url_refused"


def test_public_addresses_pass_and_port_zero_does_not():
    for address in ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"):
        check_address(address, POLICY)
    with pytest.raises(BadRequestError):
        parse_target("http://example.org:0/", POLICY)
