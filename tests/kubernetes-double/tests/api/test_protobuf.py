"""Bodies in protobuf: bytes as Go clients send them, written out by hand."""

from __future__ import annotations

import pytest

from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.requests.protobuf import MAGIC, Decoder


def part(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2, len(content)]) + content


def envelope(kind: str, raw: bytes) -> bytes:
    version = part(1, b"v1") + part(2, kind.encode())
    return MAGIC + part(1, version) + part(2, raw)


def test_a_secret_is_read() -> None:
    label = part(1, b"owner") + part(2, b"helm")
    metadata = part(1, b"release") + part(2, b"") + part(3, b"") + part(11, label)
    entry = part(1, b"release") + part(2, b"abc")
    raw = part(1, metadata) + part(2, entry) + part(3, b"helm.sh/release.v1")
    assert Decoder().decode(envelope("Secret", raw)) == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "release", "labels": {"owner": "helm"}},
        "data": {"release": "YWJj"},
        "type": "helm.sh/release.v1",
    }


def test_options_of_a_deletion_are_read() -> None:
    raw = bytes([1 << 3, 5]) + part(4, b"Foreground")
    found = Decoder().decode(envelope("DeleteOptions", raw))
    assert (found["gracePeriodSeconds"], found["propagationPolicy"]) == ("5", "Foreground")


def test_other_kinds_and_other_bytes_are_refused() -> None:
    with pytest.raises(StatusError) as caught:
        Decoder().decode(envelope("Deployment", b""))
    assert caught.value.code == 415
    with pytest.raises(StatusError) as caught:
        Decoder().decode(b"{}")
    assert caught.value.code == 400
    with pytest.raises(StatusError) as caught:
        Decoder().decode(MAGIC + b"\xff\xff")
    assert caught.value.code == 400
