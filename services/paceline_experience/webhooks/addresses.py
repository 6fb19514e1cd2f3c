"""Which addresses a webhook may have.

An IPv6 address may lead to an IPv4 one, through a translator or a tunnel; both have to be allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from paceline.errors import PermissionDeniedError

# Services of clouds that tell credentials to the machine which asks. Most are link-local.
_OF_CLOUDS = frozenset(
    map(
        ip_address,
        (
            "100.100.100.200",  # Alibaba
            "168.63.129.16",  # Azure: the host of a virtual machine
            "192.0.0.192",  # Oracle, of its earlier machines
            "fd00:ec2::254",  # AWS
            "fd00:ec2::23",  # AWS, credentials of pods
            "fd20:ce::254",  # Google
        ),
    )
)
# No receiver on the Internet has an address of these, whatever the tables of Python say.
_NOT_PUBLIC = tuple(
    map(
        ip_network,
        (
            "::/96",  # IPv4-compatible, deprecated
            "::ffff:0:0:0/96",  # IPv4-translated
            "64:ff9b:1::/48",  # NAT64 of a site
            "2001::/32",  # Teredo
            "2002::/16",  # 6to4, deprecated
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fec0::/10",  # of a site, deprecated
        ),
    )
)
# RFC 6052: where a prefix of such a length is followed by an IPv4 address, as shifts of its bytes.
_TRANSLATED = {
    48: (72, 64, 48, 40),
    56: (64, 48, 40, 32),
    64: (48, 40, 32, 24),
    96: (24, 16, 8, 0),
}
_NAT64 = ip_network("64:ff9b::/96")
_NAT64_OF_SITES = ip_network("64:ff9b:1::/48")
_LAST_32_BITS = (_NAT64, ip_network("::/96"), ip_network("::ffff:0:0:0/96"))
_ISATAP = 0x0000_5EFE  # of the interface; bits of scope aside


def check_address(address: str, *, named: bool) -> None:
    """Refuse what no webhook is meant to reach; `named`: the operator allows this host by name.

    A wildcard covers hosts whose owners may point them anywhere, so there only public addresses
    are allowed.

    Raises:
        PermissionDeniedError: it is refused.
    """
    found = ip_address(address)
    if not all(_is_allowed(each, named=named) for each in (found, *_embedded(found))):
        raise PermissionDeniedError(f"notify.webhook: its host is at {address}, which is refused")


def _is_allowed(address: IPv4Address | IPv6Address, *, named: bool) -> bool:
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if ip_address(address.packed) in _OF_CLOUDS:  # without the scope
        return False
    if named:
        return True
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return True  # what it stands for decides
    return address.is_global and not any(address in network for network in _NOT_PUBLIC)


def _embedded(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address]:
    """The IPv4 addresses that an IPv6 address may lead to."""
    if isinstance(address, IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if any(address in network for network in _LAST_32_BITS):
        yield _taken(address, 96)
    if address in _NAT64_OF_SITES:  # its prefix may be longer, and zeros follow the address
        yield from filter(int, (_taken(address, length) for length in _TRANSLATED))
    if (int(address) >> 32) & 0xFDFF_FFFF == _ISATAP:
        yield _taken(address, 96)


def _taken(address: IPv6Address, length: int) -> IPv4Address:
    """The address after a prefix of this length."""
    return IPv4Address(bytes((int(address) >> shift) & 0xFF for shift in _TRANSLATED[length]))
