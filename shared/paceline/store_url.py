"""Addresses of stores, as people may see them."""

from __future__ import annotations


def without_secrets(url: str) -> str:
    """The URL without user, password and query, any of which may hold a secret."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(not a URL)"
    place = rest.rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{place}"
