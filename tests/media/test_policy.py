"""Which URLs may be fetched, and which addresses they may lead to."""

from __future__ import annotations

import pytest

from tectum.errors import BadRequestError
from tectum.media.policy import MediaPolicy, Target, check_address, parse_target

POLICY = MediaPolicy()
PRIVATE = MediaPolicy(allow_private_urls=True)


def refusal(call, *arguments) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        call(*arguments)
    assert (caught.value.code, caught.value.status) == ("url_refused", 400)
    assert len(caught.value.message) <= 200
    return caught.value


@pytest.mark.parametrize(
    ("url", "target", "origin"),
    [
        ("http://example.com", Target("http", "example.com", 80, "/"), "example.com"),
        (
            "https://example.com/a/b.png?x=1&y=2#part",
            Target("https", "example.com", 443, "/a/b.png?x=1&y=2"),
            "example.com",
        ),
        ("https://example.com:8443/", Target("https", "example.com", 8443, "/"), "example.com:8443"),
        ("http://example.com:443?q", Target("http", "example.com", 443, "/?q"), "example.com:443"),
        ("https://example.com:443/", Target("https", "example.com", 443, "/"), "example.com"),
        ("HTTP://EXAMPLE.com./A", Target("http", "example.com", 80, "/A"), "example.com"),
        ("http://b\u00fccher.example/", Target("http", "xn--bcher-kva.example", 80, "/"), "xn--bcher-kva.example"),
        ("http://8.8.8.8:81/", Target("http", "8.8.8.8", 81, "/"), "8.8.8.8:81"),
        ("http://[2606:4700::0:1]/", Target("http", "2606:4700::1", 80, "/"), "[2606:4700::1]"),
        ("https://[2606:4700::1]:444/", Target("https", "2606:4700::1", 444, "/"), "[2606:4700::1]:444"),
        ("http://example.com//evil.com/@x", Target("http", "example.com", 80, "//evil.com/@x"), "example.com"),
        # full-width digits and dots are what they look like: a loopback address, for `check_address` to refuse
        ("http://\uff11\uff12\uff17.0.0.1/", Target("http", "127.0.0.1", 80, "/"), "127.0.0.1"),
    ],
)
def test_a_url_is_taken_apart_once(url, target, origin):
    found = parse_target(url, POLICY)
    assert found == target
    assert found.origin == origin


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://allowed.com\\@evil/", "backslash"),
        ("http://allowed.com\\.evil/", "backslash"),
        ("http://allowed.com/\r\nHost: evil", "control character"),
        ("http://allowed.com/a b", "space"),
        ("http://allowed.com/\x00", "control character"),
        ("http://allowed.com/\u2028", "space"),
        ("http://allowed.com/\u200b", "control character"),  # no width at all
        ("http://allowed.com@evil/", "user information"),
        ("http://user:password@allowed.com/", "user information"),
        ("http://@allowed.com/", "user information"),
        ("http://allowed.com:http/", "malformed"),
        ("http://allowed.com:65536/", "malformed"),
        ("http://allowed.com:-1/", "malformed"),
        ("http://[::1", "malformed"),
        ("http://[::g]/", "malformed"),
        ("http:///etc/passwd", "no host"),
        ("http:allowed.com", "no host"),
        ("http://./", "malformed"),
        ("http://a..b/", "malformed"),
        ("http://" + "a" * 64 + ".com/", "malformed"),
        ("http://0x7f000001/", "dotted"),
        ("http://0X7F000001/", "dotted"),
        ("http://2130706433/", "dotted"),
        ("http://127.1/", "dotted"),
        ("http://0177.0.0.1/", "dotted"),
        ("http://127.0.0.0x1/", "dotted"),
        ("http://1.2.3.4.5/", "dotted"),
        ("http://256.1.1.1/", "dotted"),
        ("http://\uff10\uff58\uff17f000001/", "dotted"),  # full-width 0x7
        ("ftp://allowed.com/", "'ftp'"),
        ("file:///etc/passwd", "'file'"),
        ("gopher://allowed.com/", "'gopher'"),
        ("data:image/png;base64,AAAA", "'data'"),
        ("//allowed.com/", "''"),
        ("/etc/passwd", "''"),
        ("", "''"),
    ],
)
def test_a_url_that_could_be_read_in_two_ways_is_refused(url, said):
    assert said in refusal(parse_target, url, POLICY).message


def test_the_rules_on_urls_hold_where_private_addresses_are_allowed():
    refusal(parse_target, "http://allowed.com\\@evil/", PRIVATE)
    refusal(parse_target, "http://0x7f000001/", PRIVATE)
    refusal(parse_target, "file:///etc/passwd", PRIVATE)


def test_plain_http_may_be_turned_off():
    policy = MediaPolicy(allow_http=False)
    assert "plain http:" in refusal(parse_target, "http://example.com/", policy).message
    assert parse_target("https://example.com/", policy).scheme == "https"


LOCAL = [
    "127.0.0.1",
    "127.255.0.9",
    "::1",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",  # the clouds' metadata
    "168.63.129.16",  # and Azure's, public by number
    "100.64.0.1",
    "100.100.100.200",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "198.18.0.1",
    "192.0.2.1",
    "2001:db8::1",
    "240.0.0.1",
    "255.255.255.255",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:168.63.129.16",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
    "64:ff9b::a9fe:a9fe",
    "2001:0:808:808:0:0:80ff:fffe",  # Teredo of 127.0.0.1
]


@pytest.mark.parametrize("address", LOCAL)
def test_addresses_off_the_public_internet_are_refused_unless_allowed(address):
    assert "--allow-private-urls" in refusal(check_address, address, POLICY).message
    check_address(address, PRIVATE)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "172.15.0.1", "172.32.0.1", "100.63.0.1", "168.63.129.17", "2606:4700::1", "64:ff9b::808:808"],
)
def test_public_addresses_are_allowed(address):
    check_address(address, POLICY)
    check_address(address, PRIVATE)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "224.0.0.1", "239.255.255.255", "ff02::1", "::ffff:224.0.0.1", "::ffff:0.0.0.0"]
)
def test_multicast_and_unspecified_addresses_are_refused_even_where_private_ones_are_allowed(address):
    for policy in (POLICY, PRIVATE):
        assert "multicast or unspecified" in refusal(check_address, address, policy).message
