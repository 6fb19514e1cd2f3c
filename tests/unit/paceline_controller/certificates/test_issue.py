from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_controller.certificates.config import DOMAIN, Issue
from paceline_controller.certificates.content import (
    authority_data,
    leaf_data,
    parse_authority,
    parse_leaf,
)
from paceline_controller.certificates.issue import Issued, State, renew
from paceline_controller.certificates.pair import (
    make_authority,
    make_leaf,
    may_sign,
    names_of,
    renewal,
)

MakeIssue = Callable[..., Issue]
EMPTY = State(None, {})


def settle(state: State, issue: Issue, now: datetime) -> State:
    """As a run does: until there is nothing left to do, and stored in between."""
    for _ in range(6):
        wanted = renew(state, issue, now)
        if wanted.authority is state.authority and all(
            wanted.leaves[name] is state.leaves.get(name) for name in issue.services
        ):
            return state
        state = stored(wanted)
    raise AssertionError("does not settle")


def stored(state: State) -> State:
    assert state.authority is not None
    leaves = {n: parse_leaf(leaf_data(leaf)) for n, leaf in state.leaves.items() if leaf}
    return State(parse_authority(authority_data(state.authority)), leaves)


def files(state: State) -> dict[str, dict[str, bytes]]:
    return {name: leaf_data(leaf) for name, leaf in state.leaves.items() if leaf}


def check_trust(leaf: Issued, bundle: tuple[x509.Certificate, ...], now: datetime) -> None:
    """By the library's own verifier, for both ends of a connection."""
    builder = PolicyBuilder().store(Store(list(bundle))).time(now)
    certificate = leaf.pair.certificate
    builder.build_client_verifier().verify(certificate, [])
    builder.build_server_verifier(x509.DNSName(DOMAIN)).verify(certificate, [])


def check_all(state: State, now: datetime) -> None:
    for leaf in state.leaves.values():
        for other in state.leaves.values():
            assert leaf is not None
            assert other is not None
            check_trust(leaf, other.bundle, now)


def test_a_certificate_has_names_and_key_usages(make_issue: MakeIssue, start: datetime) -> None:
    state = settle(EMPTY, make_issue(), start)
    check_all(state, start)
    leaf = state.leaves["gateway"]
    assert leaf is not None
    certificate = leaf.pair.certificate
    assert certificate.subject.rfc4514_string() == "CN=paceline-gateway"
    assert names_of(certificate) == (
        "gateway.paceline.internal",
        "paceline.internal",
        "p-gateway",
        "p-gateway.t.svc",
    )
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert certificate.not_valid_after_utc == start + timedelta(days=90)
    assert certificate.not_valid_before_utc < start


def test_an_authority_may_sign_only_names_of_its_installation(
    make_issue: MakeIssue, start: datetime
) -> None:
    state = settle(EMPTY, make_issue(), start)
    assert state.authority is not None
    active = state.authority.active
    limits = active.certificate.extensions.get_extension_for_class(x509.NameConstraints)
    allowed = {tree.value for tree in limits.value.permitted_subtrees or ()}
    assert allowed == {"paceline.internal", "p-gateway", "p-gateway.t.svc", "p-experience"}
    foreign = make_leaf(active, "gateway", [DOMAIN, "bank.example"], now=start, days=1)
    with pytest.raises(x509.verification.VerificationError):
        check_trust(Issued(foreign, ()), (active.certificate,), start)


def test_only_the_authority_has_its_key(make_issue: MakeIssue, start: datetime) -> None:
    state = settle(EMPTY, make_issue(), start)
    assert state.authority is not None
    for leaf in state.leaves.values():
        assert leaf is not None
        for value in leaf_data(leaf).values():
            assert state.authority.active.key_pem not in value


def test_nothing_changes_before_two_thirds_of_the_lifetime(
    make_issue: MakeIssue, start: datetime
) -> None:
    issue = make_issue()
    state = settle(EMPTY, issue, start)
    leaf = state.leaves["gateway"]
    assert leaf is not None
    due = renewal(leaf.pair.certificate)
    assert start + timedelta(days=59) < due < start + timedelta(days=60)
    assert settle(state, issue, due - timedelta(seconds=1)) is state
    renewed = settle(state, issue, due).leaves["gateway"]
    assert renewed is not None
    assert renewed.pair.certificate != leaf.pair.certificate


def test_a_new_authority_is_trusted_by_all_before_it_signs(
    make_issue: MakeIssue, start: datetime
) -> None:
    issue = make_issue()
    state = settle(EMPTY, issue, start)
    assert state.authority is not None
    old = state.authority.active.certificate
    due = renewal(old)
    before = settle(state, issue, due - timedelta(seconds=1))
    first = settle(before, issue, due)
    assert first.authority is not None
    assert first.authority.next is not None
    upcoming = first.authority.next.certificate
    assert first.authority.active.certificate == old
    assert all(leaf and set(leaf.bundle) == {old, upcoming} for leaf in first.leaves.values())
    early = settle(first, issue, due + issue.spread - timedelta(seconds=1))
    assert early.authority is not None
    assert early.authority.active.certificate == old
    second = settle(early, issue, due + issue.spread)
    assert second.authority is not None
    assert second.authority.active.certificate == upcoming
    # No process has to start again for this.
    assert files(second) == files(early)
    later = due + timedelta(days=issue.days + 2)
    third = settle(second, issue, later)
    assert all(leaf and leaf.bundle == (upcoming,) for leaf in third.leaves.values())
    check_all(third, later)


def test_a_service_without_the_next_authority_holds_it_back(
    make_issue: MakeIssue, start: datetime
) -> None:
    issue = make_issue()
    state = settle(EMPTY, issue, start)
    assert state.authority is not None
    due = renewal(state.authority.active.certificate)
    first = settle(state, issue, due)
    assert first.authority is not None
    assert first.authority.next is not None
    upcoming = first.authority.next.certificate
    gateway = first.leaves["gateway"]
    assert gateway is not None
    stale = Issued(gateway.pair, (first.authority.active.certificate,))
    late = due + issue.spread
    again = settle(State(first.authority, {**first.leaves, "gateway": stale}), issue, late)
    assert again.authority is not None
    assert again.authority.active.certificate != upcoming
    assert again.authority.spread_since == late
    assert all(leaf and upcoming in leaf.bundle for leaf in again.leaves.values())


def test_new_names_are_signed_immediately_or_by_the_next_authority(
    make_issue: MakeIssue, start: datetime
) -> None:
    state = settle(EMPTY, make_issue(), start)
    wider = make_issue(
        services={
            "gateway": {"secret": "p-tls-gateway", "names": ["a.p-gateway", "api.example"]},
            "experience": {"secret": "p-tls-experience", "names": ["p-experience"]},
        }
    )
    first = settle(state, wider, start)
    gateway = first.leaves["gateway"]
    assert gateway is not None
    assert "a.p-gateway" in names_of(gateway.pair.certificate)
    assert "api.example" not in names_of(gateway.pair.certificate)
    check_all(first, start)
    later = start + wider.spread
    gateway = settle(first, wider, later).leaves["gateway"]
    assert gateway is not None
    assert "api.example" in names_of(gateway.pair.certificate)
    check_all(settle(first, wider, later), later)


def test_a_shorter_lifetime_takes_effect_immediately(
    make_issue: MakeIssue, start: datetime
) -> None:
    state = settle(EMPTY, make_issue(), start)
    state = settle(state, make_issue(days=10), start)
    for leaf in state.leaves.values():
        assert leaf is not None
        assert leaf.pair.certificate.not_valid_after_utc == start + timedelta(days=10)


@pytest.mark.parametrize("lost", ["tls.crt", "tls.key", "ca.crt", "state.json"])
def test_a_broken_authority_is_made_again(
    make_issue: MakeIssue, start: datetime, lost: str
) -> None:
    issue = make_issue()
    state = settle(EMPTY, issue, start)
    assert state.authority is not None
    data = authority_data(state.authority)
    assert parse_authority(data) is not None
    assert parse_authority({**data, lost: b"nonsense"}) is None
    del data[lost]
    assert parse_authority(data) is None
    check_all(settle(State(None, state.leaves), issue, start), start)


def test_after_years_without_a_run_all_is_new(make_issue: MakeIssue, start: datetime) -> None:
    issue = make_issue()
    late = start + timedelta(days=5000)
    check_all(settle(settle(EMPTY, issue, start), issue, late), late)


@dataclass
class World:
    """Processes that learn of what was issued only after a while, as the kubelet tells them."""

    issue: Issue
    now: datetime
    state: State = EMPTY
    history: list[tuple[datetime, State]] = field(default_factory=list[tuple[datetime, State]])

    def run(self) -> None:
        self.state = settle(self.state, self.issue, self.now)
        self.history.append((self.now, self.state))

    def lose(self, service: str) -> None:
        self.state = State(self.state.authority, {**self.state.leaves, service: None})

    def check(self, lag: timedelta, now: datetime) -> None:
        """Whoever has files that are up to `lag` old trusts all others who have."""
        old = [state for at, state in self.history if at < now - lag][-1:]
        states = old + [state for at, state in self.history if at >= now - lag]
        held = [leaf for state in states for leaf in state.leaves.values() if leaf]
        pairs = {(leaf.pair.certificate, other.bundle): leaf for leaf in held for other in held}
        for (_, bundle), leaf in pairs.items():
            check_trust(leaf, bundle, now)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, deadline=None)
def test_at_every_moment_everyone_trusts_everyone(seed: int) -> None:
    """Over a year with runs at random times, and Secrets that get lost.

    An authority lives half a year, a certificate a month, news travel for up to a day.
    """
    chance = random.Random(seed)
    issue = Issue.model_validate(
        {
            "namespace": "n",
            "authority": "a",
            "days": 30,
            "authority_days": 180,
            "services": {"gateway": {"secret": "g"}, "reward": {"secret": "r"}},
        }
    )
    begin = datetime.fromisoformat("2030-01-01T00:00:00+00:00")
    world = World(issue, begin)
    authorities: set[x509.Certificate] = set()
    # The third change of authorities has come by then, however late runs are, and the fourth not.
    while world.now < begin + timedelta(days=460):
        world.run()
        assert world.state.authority is not None
        authorities.add(world.state.authority.active.certificate)
        pause = timedelta(days=chance.choice([0.1, 0.5, 1.0, 4.0, 9.0]) * chance.random())
        for part in (0.0, 0.5, 1.0):
            world.check(timedelta(days=0.99), world.now + pause * part)
        world.now += pause
        if chance.random() < 0.5:
            world.lose("reward")
    assert len(authorities) == 4


def test_a_name_constraint_is_no_prefix_match(start: datetime) -> None:
    authority = make_authority(["gateway"], now=start, days=10).certificate
    assert may_sign(authority, "gateway")
    assert may_sign(authority, "*.gateway")
    assert not may_sign(authority, "my-gateway")
    assert not may_sign(authority, "gateway.example")
