"""From an item to its bytes: base64, data: URIs, and files under one allowed folder."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tectum.errors import BadRequestError
from tectum.media.policy import MediaPolicy
from tectum.media.source import MAX_PERCENT_ENCODED, item_bytes
from tectum.types import MediaItem, Modality

POLICY = MediaPolicy()
SMALL = MediaPolicy(max_media_bytes=10)


def item(url: str | None = None, **source) -> MediaItem:
    return MediaItem(Modality.IMAGE, url=url, **source)


def read(url: str | None = None, policy: MediaPolicy = POLICY, **source) -> bytes:
    return item_bytes(item(url, **source), policy)


def refusal(code: str, status: int, url: str | None = None, policy: MediaPolicy = POLICY, **source) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(url, policy, **source)
    assert (caught.value.code, caught.value.status) == (code, status)
    assert len(caught.value.message) <= 200
    return caught.value


# ------------------------------------------------------------------------------------------------------ which is fetched


@pytest.mark.parametrize("url", ["http://a/b", "https://a/b", "HTTPS://a", "Http://a", "http:a"])
def test_http_urls_are_fetched(url):
    assert item(url).remote


@pytest.mark.parametrize("url", ["data:,x", "file:///a", "ftp://a", "/etc/passwd", "httpx://a", " http://a", ""])
def test_other_urls_are_not_fetched(url):
    assert not item(url).remote
    assert not item(data=b"http://a").remote


def test_bytes_are_read_as_they_are():
    assert read(data=b"raw") == b"raw"


# -------------------------------------------------------------------------------------------------------- empty, too large


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,",
        "data:image/png,",
        "data:,",
        "data:;base64,",
        "data:image/png;base64,====",
        "data:;base64, ",
    ],
)
def test_a_data_uri_with_an_empty_payload_is_refused(url):
    refusal("empty_media", 400, url)


def test_zero_bytes_are_refused_wherever_they_come_from(tmp_path):
    refusal("empty_media", 400, data=b"")
    refusal("empty_media", 400, base64="")
    refusal("empty_media", 400, base64=" \n")
    (tmp_path / "empty.png").touch()
    refusal("empty_media", 400, (tmp_path / "empty.png").as_uri(), MediaPolicy(allowed_media_dir=tmp_path))


def test_the_limit_on_bytes_is_inclusive(tmp_path):
    policy = MediaPolicy(max_media_bytes=10, allowed_media_dir=tmp_path)
    for size in (10, 11):
        data = b"x" * size
        text = base64.b64encode(data).decode()
        path = tmp_path / f"{size}.bin"
        path.write_bytes(data)
        for source in (
            {"data": data},
            {"base64": text},
            {"url": f"data:image/png;base64,{text}"},
            {"url": "data:," + "x" * size},
            {"url": path.as_uri()},
        ):
            if size == 10:
                assert read(policy=policy, **source) == data
            else:
                error = refusal("media_too_large", 413, policy=policy, **source)
                assert error.details["limit"] == 10


def test_texts_that_cannot_fit_are_refused_undecoded():
    # neither is valid base64: were they decoded first, the answer would be another
    refusal("media_too_large", 413, base64="!" * 2000, policy=SMALL)
    refusal("media_too_large", 413, "data:image/png;base64," + "!" * 2000, SMALL)


# ----------------------------------------------------------------------------------------------------------------- base64


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("aGVsbG8=", b"hello"),
        ("aGVsbG8", b"hello"),  # padding left out
        ("aGVs\r\nbG8=\n", b"hello"),  # wrapped, as MIME does
        ("+/+/", b"\xfb\xff\xbf"),
        ("-_-_", b"\xfb\xff\xbf"),  # the url-safe alphabet
        ("-_8", b"\xfb\xff"),
        ("AA==", b"\0"),
    ],
)
def test_base64_that_is_read(text, data):
    assert read(base64=text) == data
    assert read("data:image/png;base64," + text) == data


@pytest.mark.parametrize(
    "text", ["not!!!base64!!!", "aGVs*G8=", "A", "AAAAA", "aG=VsbG8", "aGVsbG8=aGVs", "äöü", "data:,x"]
)
def test_base64_that_is_refused(text):
    assert "base64" in refusal("invalid_base64", 400, base64=text).message
    refusal("invalid_base64", 400, "data:image/png;base64," + text)


def test_the_error_holds_nothing_of_the_media():
    text = "SECRET!" * 400_000
    error = refusal("invalid_base64", 400, "data:image/png;base64," + text)
    assert len(str(error.to_problem("r"))) < 1024
    assert "SECRET" not in str(error.to_problem("r"))


# -------------------------------------------------------------------------------------------------------------- data: URIs


@pytest.mark.parametrize(
    "url",
    [
        "data:image/jpeg;base64,aGVsbG8=",
        "data:image/jpeg;charset=utf-8;base64,aGVsbG8=",
        'data:image/svg+xml;name="a.svg";base64,aGVsbG8=',
        "DATA:IMAGE/JPEG;BASE64,aGVsbG8=",
        "data:image/jpeg; base64,aGVsbG8=",
        "data:;base64,aGVsbG8=",
        "data:image/png;base64,aGVsbG8%3D",
        "data:image/png;base64,aGVs%0AbG8=",
        "data:image/*;base64,aGVsbG8=",
        "data:,hello",
        "data:text/plain,hello",
        "data:text/plain;charset=utf-8,%68ello",
    ],
)
def test_data_uris_that_are_read(url):
    assert read(url) == b"hello"


def test_percent_encoded_bytes_are_any_bytes_and_a_further_comma_is_data():
    assert read("data:image/png,%89PNG%0d%0A") == b"\x89PNG\r\n"
    assert read("data:,a,b") == b"a,b"
    assert read("data:,a+b") == b"a+b"  # a plus is no space here
    assert read("data:;base64=no,aGVs") == b"aGVs"  # a parameter's value is not the marker


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:aGVsbG8=", "no comma"),
        ("data:", "no comma"),
        ("data:png;base64,aGVsbG8=", "media type"),
        ("data:base64,aGVsbG8=", "media type"),
        ("data:image/;base64,aGVsbG8=", "media type"),
        ("data:image/p ng;base64,aGVsbG8=", "media type"),
        ("data:image/png,\u00e9", "percent-encoded"),
    ],
)
def test_malformed_data_uris_are_refused_saying_what_is_wrong(url, said):
    assert said in refusal("invalid_data_uri", 400, url).message


def test_a_long_percent_encoded_uri_must_be_base64():
    assert len(read("data:," + "x" * MAX_PERCENT_ENCODED)) == MAX_PERCENT_ENCODED
    assert "base64" in refusal("invalid_data_uri", 400, "data:," + "x" * (MAX_PERCENT_ENCODED + 1)).message


# -------------------------------------------------------------------------------------------------------------- file: URLs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An allowed folder with files in it, links out of it, and secrets beside it."""
    allowed = tmp_path / "allowed"
    (allowed / "deep").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(b"inside")
    (allowed / "deep" / "c.png").write_bytes(b"deep")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "allowed-too").mkdir()
    (tmp_path / "allowed-too" / "d.png").write_bytes(b"secret")
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "out").symlink_to(tmp_path)
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "inner").symlink_to(allowed / "deep")
    return allowed


def test_files_under_the_allowed_folder_are_read(folder):
    policy = MediaPolicy(allowed_media_dir=folder)
    assert read(f"file://{folder}/a%20b.png", policy) == b"inside"
    assert read(f"file://localhost{folder}/deep/c.png", policy) == b"deep"
    assert read(f"FILE:{folder}/deep/../deep/c.png", policy) == b"deep"
    assert read(f"file://{folder}/inner/c.png", policy) == b"deep"  # a link that stays inside


def test_a_folder_named_by_a_link_is_the_folder_behind_it(folder, tmp_path):
    (tmp_path / "media").symlink_to(folder)
    policy = MediaPolicy(allowed_media_dir=tmp_path / "media")
    assert read(f"file://{tmp_path}/media/deep/c.png", policy) == b"deep"
    refusal("url_refused", 400, f"file://{tmp_path}/media/link", policy)


@pytest.mark.parametrize(
    "path",
    [
        "/../secret",
        "/deep/../../secret",
        "/%2e%2e/secret",
        "/..%2Fsecret",
        "-too/d.png",  # a sibling that begins like the folder
        "/link",
        "/out/secret",
        "/loop",
        "/deep",
        "/absent.png",
        "/a%00b",
        "/" + "n" * 300,
        "",
    ],
)
def test_files_outside_and_files_that_are_not_there_get_one_answer(folder, path):
    error = refusal("url_refused", 400, f"file://{folder}{path}", MediaPolicy(allowed_media_dir=folder))
    assert "no such file under the allowed folder" in error.message
    assert str(folder) not in error.message


def test_system_files_are_refused_with_and_without_an_allowed_folder(folder):
    for policy in (POLICY, MediaPolicy(allowed_media_dir=folder)):
        for url in ("file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "file:/etc/passwd", "file:etc/passwd"):
            assert "passwd" not in refusal("url_refused", 400, url, policy).message


def test_without_an_allowed_folder_no_file_is_read(folder):
    assert "--allowed-media-dir" in refusal("url_refused", 400, f"file://{folder}/deep/c.png").message


@pytest.mark.parametrize("url", ["file://evil/deep/c.png", "file:///deep/c.png?x=1", "file:///deep/c.png#f"])
def test_a_file_url_names_no_host_query_or_fragment(folder, url):
    refusal("url_refused", 400, url, MediaPolicy(allowed_media_dir=folder))


@pytest.mark.parametrize(
    "url", ["ftp://a/b.png", "gopher://a", "javascript:alert(1)", "blob:x", "", "picture.png", "s3://a/b"]
)
def test_other_schemes_are_refused(url):
    assert "https:" in refusal("url_refused", 400, url).message
