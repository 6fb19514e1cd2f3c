"""What the object stores of URLs need, which fsspec reads by packages of their own."""

from __future__ import annotations

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def package_of(scheme: str) -> str:
    """The distribution that a scheme needs, or words for it."""
    return _PACKAGES.get(scheme, f"the package of {scheme}:// for fsspec")
