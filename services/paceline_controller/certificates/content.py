"""Serializes certificates to Secret data and parses them; unreadable data counts as missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from paceline_controller.certificates.issue import Authority, Issued, Retired
from paceline_controller.certificates.pair import Pair, pem

CERTIFICATE, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"
NEXT_CERTIFICATE, NEXT_KEY, STATE = "next.crt", "next.key", "state.json"

Data = dict[str, bytes]


def leaf_data(issued: Issued) -> Data:
    """The certificate, key and bundle files of a service."""
    return {
        CERTIFICATE: issued.pair.certificate_pem,
        KEY: issued.pair.key_pem,
        BUNDLE: b"".join(map(pem, issued.bundle)),
    }


def parse_leaf(data: Mapping[str, bytes]) -> Issued | None:
    """The inverse of `leaf_data`; None if the data is incomplete or invalid."""
    try:
        pair = Pair.parse(data[CERTIFICATE], data[KEY])
        return Issued(pair, tuple(x509.load_pem_x509_certificates(data[BUNDLE])))
    except (KeyError, ValueError, TypeError):
        return None


def authority_data(authority: Authority) -> Data:
    """The authority with its private keys, for its own Secret only."""
    since = authority.spread_since
    state = {
        "spread_since": since and since.isoformat(),
        "retired": {_digest(e.certificate): e.until.isoformat() for e in authority.retired},
    }
    data = {
        CERTIFICATE: authority.active.certificate_pem,
        KEY: authority.active.key_pem,
        BUNDLE: b"".join(map(pem, authority.bundle)),
        STATE: json.dumps(state).encode(),
    }
    if authority.next is not None:
        data[NEXT_CERTIFICATE] = authority.next.certificate_pem
        data[NEXT_KEY] = authority.next.key_pem
    return data


def parse_authority(data: Mapping[str, bytes]) -> Authority | None:
    """The inverse of `authority_data`; None if the data is incomplete or invalid."""
    try:
        active = Pair.parse(data[CERTIFICATE], data[KEY])
        upcoming = Pair.parse(data[NEXT_CERTIFICATE], data[NEXT_KEY]) if NEXT_KEY in data else None
        bundle = x509.load_pem_x509_certificates(data[BUNDLE])
        state: dict[str, Any] = json.loads(data[STATE])
        since = state["spread_since"] and datetime.fromisoformat(state["spread_since"])
        until = {name: datetime.fromisoformat(text) for name, text in state["retired"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    dated = ((certificate, until.get(_digest(certificate))) for certificate in bundle)
    retired = tuple(Retired(certificate, over) for certificate, over in dated if over is not None)
    return Authority(active=active, next=upcoming, spread_since=since or None, retired=retired)


def _digest(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()
