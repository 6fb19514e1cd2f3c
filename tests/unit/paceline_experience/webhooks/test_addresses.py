"""Which addresses webhooks may have."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import PermissionDeniedError
from paceline_experience.webhooks.addresses import check_address


def allowed(address: str, *, named: bool) -> bool:
    try:
        check_address(address, named=named)
    except PermissionDeniedError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "named", "ok"),
    [
        ("93.184.216.34", False, True),
        ("10.0.0.1", False, False),
        ("10.0.0.1", True, True),
        ("127.0.0.1", False, False),
        ("127.0.0.1", True, True),
        ("::1", True, True),
        ("0.0.0.0", True, False),
        ("224.0.0.1", True, False),
        ("2606:2800:220:1::1", False, True),
        ("fd00::1", False, False),
        ("fd00::1", True, True),
        ("::ffff:93.184.216.34", False, True),
        ("::ffff:10.0.0.1", False, False),
        # A network without IPv4 reaches the Internet so.
        ("64:ff9b::5db8:d822", False, True),
        ("64:ff9b:1::10.0.0.1", True, True),
        ("64:ff9b:1::5db8:d822", False, False),
    ],
)
def test_addresses(address: str, named: bool, ok: bool) -> None:
    assert allowed(address, named=named) is ok


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.170.2",
        "168.63.129.16",
        "192.0.0.192",
        "100.100.100.200",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd20:ce::254",
        "fe80::1",
        "fe80::a9fe:a9fe%eth0",
    ],
)
def test_services_of_clouds_are_refused(address: str, named: bool) -> None:
    assert not allowed(address, named=named)


@pytest.mark.parametrize(
    "address", ["2002:5db8:d822::1", "2001:0:5db8:d822::1", "::5db8:d822", "fec0::1", "3fff::1"]
)
def test_addresses_that_no_receiver_has_are_not_public(address: str) -> None:
    assert not allowed(address, named=False)


def after(prefix: str, address: IPv4Address, *, length: int = 96) -> str:
    """RFC 6052: an IPv4 address after a prefix, around the byte that stays zero."""
    data = bytearray(IPv6Address(prefix).packed)
    at = length // 8
    for byte in address.packed:
        at += at == 8
        data[at] = byte
        at += 1
    return str(IPv6Address(bytes(data)))


def embeddings(address: IPv4Address) -> list[str]:
    number = int(address)
    return [
        f"::ffff:{address}",
        after("::", address),
        after("::ffff:0:0:0", address),
        after("64:ff9b::", address),
        *(after("64:ff9b:1::", address, length=length) for length in (48, 56, 64, 96)),
        str(IPv6Address((0x2002 << 112) | (number << 80) | 1)),
        # Teredo: its server, and its client, whose bits are turned.
        str(IPv6Address((0x20010000 << 96) | (number << 64))),
        str(IPv6Address((0x20010000 << 96) | (0x5DB8D822 << 64) | (number ^ 0xFFFF_FFFF))),
        after("2606:2800:220:1:0:5efe::", address),
        after("2606:2800:220:1:200:5efe::", address),
    ]


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
@example(IPv4Address("169.254.169.254"))
@example(IPv4Address("168.63.129.16"))
@example(IPv4Address("10.0.0.1"))
@example(IPv4Address("127.0.0.1"))
def test_no_way_of_writing_an_address_leads_where_it_does_not(address: IPv4Address) -> None:
    for written in embeddings(address):
        assert allowed(str(address), named=False) or not allowed(written, named=False), written
        if int(address):
            assert allowed(str(address), named=True) or not allowed(written, named=True), written
