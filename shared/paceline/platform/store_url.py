"""Store URLs: parsing, and redaction for messages."""

from __future__ import annotations

import re

from paceline.errors import StoreError

_CLUSTER = "+cluster"
SCHEMES = ("redis", "rediss", "unix", f"redis{_CLUSTER}", f"rediss{_CLUSTER}")


def without_secrets(url: str) -> str:
    """The URL without user, password and query, each of which may hold a secret."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(not a URL)"
    before, _, query = rest.partition("?")
    # With an @ after the ? a query cannot be told from an unencoded password.
    return f"{scheme}://..." if "@" in query else f"{scheme}://{before.rpartition('@')[2]}"


def plain(url: str) -> tuple[str, bool]:
    """The URL for redis-py, and whether it addresses a cluster.

    Raises:
        StoreError: the scheme is not one of `SCHEMES`, or a password is not percent-encoded.
    """
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in SCHEMES:
        raise StoreError(
            f"store_url {without_secrets(url)}: has an unknown scheme; "
            f"use one of {', '.join(f'{name}://' for name in SCHEMES)}"
        )
    # A password containing / ? or # would be cut there, and another host contacted.
    after_host = re.split("[/?#]", rest, maxsplit=1)[1:]
    if scheme != "unix" and "@" in "".join(after_host):
        raise malformed(url)
    return f"{scheme.removesuffix(_CLUSTER)}://{rest}", scheme.endswith(_CLUSTER)


def malformed(url: str) -> StoreError:
    """The error for a URL that redis-py refuses, whose own message may quote the password."""
    return StoreError(
        f"store_url {without_secrets(url)}: its host, port or options cannot be parsed; "
        "special characters in a password must be percent-encoded"
    )
