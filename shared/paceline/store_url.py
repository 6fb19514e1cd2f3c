"""Addresses of stores: which kind of server, and as people may see them."""

from __future__ import annotations

import re

from paceline.errors import StoreError

_CLUSTER = "+cluster"
SCHEMES = ("redis", "rediss", "unix", f"redis{_CLUSTER}", f"rediss{_CLUSTER}")


def without_secrets(url: str) -> str:
    """The URL without user, password and query, any of which may hold a secret."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(not a URL)"
    before, _, query = rest.partition("?")
    # With an @ behind the ? nobody can tell a query from a password that was not encoded.
    return f"{scheme}://..." if "@" in query else f"{scheme}://{before.rpartition('@')[2]}"


def plain(url: str) -> tuple[str, bool]:
    """The URL as redis-py takes it, and whether it is that of a cluster.

    Raises:
        StoreError: the scheme is not one of `SCHEMES`, or a password is not percent-encoded.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in SCHEMES:
        raise StoreError(
            f"store_url {without_secrets(url)}: begins with no known scheme; "
            f"use one of {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    # A password with / ? or # in it would be cut there, and another host be called.
    after_host = re.split("[/?#]", rest, maxsplit=1)[1:]
    if scheme != "unix" and "@" in "".join(after_host):
        raise malformed(url)
    return f"{scheme.removesuffix(_CLUSTER)}://{rest}", scheme.endswith(_CLUSTER)


def malformed(url: str) -> StoreError:
    """What to say of a URL that redis-py refuses, whose own words may quote the password."""
    return StoreError(
        f"store_url {without_secrets(url)}: its host, port or options cannot be read; "
        "special characters in a password have to be percent-encoded"
    )
