"""Computes the certificates that an installation should have. No side effects.

Authorities are rotated so that every peer is trusted throughout:

    next created -> in the bundle of every Secret -> `spread_s` later it signs -> the old one is
    trusted until everything that it signed has expired

Bundles are compared as sets, so that only the first and the last step change the files of a
process whose own certificate is not due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509

from paceline_controller.certificates.config import Issue
from paceline_controller.certificates.pair import (
    Pair,
    make_authority,
    make_leaf,
    may_sign,
    names_of,
    renewal,
    signed_by,
    valid,
)


@dataclass(frozen=True, slots=True)
class Retired:
    """A former authority, and until when certificates signed by it may be in use."""

    certificate: x509.Certificate
    until: datetime


@dataclass(frozen=True, slots=True)
class Authority:
    """The active, the next and the retired authorities."""

    active: Pair
    next: Pair | None = None
    spread_since: datetime | None = None
    """Since when the bundles of all Secrets have contained `next`; None: not all do."""
    retired: tuple[Retired, ...] = ()

    @property
    def bundle(self) -> tuple[x509.Certificate, ...]:
        """All authorities to trust."""
        upcoming = () if self.next is None else (self.next.certificate,)
        old = (retired.certificate for retired in self.retired)
        return (self.active.certificate, *upcoming, *old)


@dataclass(frozen=True, slots=True)
class Issued:
    """A service's certificate and the authorities that the service trusts."""

    pair: Pair
    bundle: tuple[x509.Certificate, ...]


@dataclass(frozen=True, slots=True)
class State:
    """All certificates of an installation; None for those missing or unreadable."""

    authority: Authority | None
    leaves: Mapping[str, Issued | None]


def renew(state: State, issue: Issue, now: datetime) -> State:
    """The state that should follow; parts that remain valid are the same objects.

    Store the result and call it again until nothing changes: rotating an authority takes several
    steps, and each must be stored before the next.
    """
    authority = _advance(state, issue, now)
    leaves = {
        service: _leaf(state.leaves.get(service), authority, issue, service, now)
        for service in issue.services
    }
    return State(authority, leaves)


def why_due(
    certificate: x509.Certificate, *, names: Iterable[str], days: float, now: datetime
) -> str:
    """Why a service's certificate must be reissued; empty: it need not be."""
    if now >= renewal(certificate):
        return "two thirds of its life are over"
    if now < certificate.not_valid_before_utc:
        return "it is not yet in force"
    if certificate.not_valid_after_utc > now + timedelta(days=days):
        return "it would live too long"
    return "" if set(names_of(certificate)) == set(names) else "its names have changed"


def _advance(state: State, issue: Issue, now: datetime) -> Authority:
    names = {name for service in issue.services for name in issue.names(service)}
    seen = state.authority
    if seen is None or not any(valid(p.certificate, now) for p in (seen.active, seen.next) if p):
        return Authority(make_authority(names, now=now, days=issue.authority_days))
    authority = _prepare(seen, names, issue, now)
    authority = _note_spread(authority, state.leaves.values(), issue, now)
    retired = tuple(
        retired_certificate
        for retired_certificate in authority.retired
        if now < retired_certificate.until
    )
    return authority if retired == authority.retired else replace(authority, retired=retired)


def _prepare(seen: Authority, names: set[str], issue: Issue, now: datetime) -> Authority:
    """Add a next authority if the newest one is due for renewal or may not sign all names."""
    if seen.next is None:
        due = _outgrown(seen.active, names, now)
    else:
        due = _outgrown(seen.next, names, now)
    if not due:
        return seen
    successor = make_authority(names, now=now, days=issue.authority_days)
    return replace(seen, next=successor, spread_since=None)


def _outgrown(pair: Pair, names: set[str], now: datetime) -> bool:
    certificate = pair.certificate
    return now >= renewal(certificate) or not all(may_sign(certificate, name) for name in names)


def _note_spread(
    authority: Authority, leaves: Iterable[Issued | None], issue: Issue, now: datetime
) -> Authority:
    """Promote the next authority once all services have trusted it for long enough."""
    upcoming = authority.next
    if upcoming is None:
        return authority
    everywhere = all(leaf and upcoming.certificate in leaf.bundle for leaf in leaves)
    since = (authority.spread_since or now) if everywhere else None
    spread = since is not None and now - since >= issue.spread
    old = authority.active.certificate
    if spread or not valid(old, now):
        until = min(old.not_valid_after_utc, now + timedelta(days=issue.days))
        return Authority(active=upcoming, retired=(*authority.retired, Retired(old, until)))
    return authority if since == authority.spread_since else replace(authority, spread_since=since)


def _leaf(
    seen: Issued | None, authority: Authority, issue: Issue, service: str, now: datetime
) -> Issued:
    bundle = authority.bundle
    signer = authority.active
    # Names that this authority may not sign wait for the next one.
    names = [name for name in issue.names(service) if may_sign(signer.certificate, name)]
    pair = None if seen is None else seen.pair
    if pair is None or not _may_stay(pair.certificate, bundle, names, issue.days, now):
        pair = make_leaf(signer, service, names, now=now, days=issue.days)
    elif seen is not None and set(seen.bundle) == set(bundle):
        return seen
    return Issued(pair, bundle)


def _may_stay(
    certificate: x509.Certificate,
    bundle: Sequence[x509.Certificate],
    names: Sequence[str],
    days: float,
    now: datetime,
) -> bool:
    trusted = any(signed_by(certificate, issuer) for issuer in bundle)
    return trusted and not why_due(certificate, names=names, days=days, now=now)
