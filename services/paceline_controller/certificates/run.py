"""One run of the issuer: repeats passes over all Secrets until one changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

from paceline.errors import ConflictError, DeadlineError, StateError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s
from paceline_controller.certificates.config import Issue
from paceline_controller.certificates.content import (
    Data,
    authority_data,
    leaf_data,
    parse_authority,
    parse_leaf,
)
from paceline_controller.certificates.issue import Authority, Issued, State, renew
from paceline_controller.certificates.secrets import Secrets, StoredSecret

# A new authority takes three; the rest is for conflicts with concurrent runs.
MAX_PASSES = 20
log = Log("certificates")


def utc_now() -> datetime:
    """The current time, with time zone UTC."""
    return datetime.now(UTC)


def run(
    issue: Issue,
    secrets: Secrets,
    *,
    now: Callable[[], datetime] = utc_now,
    sleep: Callable[[float], None] = time.sleep,
    chance: Callable[[], float] = random.random,
) -> int:
    """Bring all Secrets up to date; returns the number of writes.

    Concurrent runs are safe: a Secret is replaced only if it has not changed since it was read,
    and a run ends only after a pass that had nothing to write.

    Raises:
        StateError: it does not converge, or a Secret was not created by the issuer.
        UnavailableError: the API server was unreachable until the deadline.
        DeadlineError: the deadline has passed, although the API server was reachable.
    """
    written = passes = failures = 0
    away: UnavailableError | None = None  # since the last complete pass
    while passes < MAX_PASSES:
        try:
            did = _pass(issue, secrets, now())
            away = None
            if not did:
                return written
            written += did
            passes += 1
        except ConflictError as error:
            log.info("another run writes too", error=error)
            sleep(backoff_s(passes, rng=chance))
            passes += 1
        except UnavailableError as error:
            pause = backoff_s(failures, base_s=0.2, max_s=5.0, rng=chance)
            if pause >= secrets.left_s():
                raise
            log.warning("repeats", error=error, pause_s=pause)
            away = error
            sleep(pause)
            failures += 1
        except DeadlineError as error:
            # The deadline ended a retry delay; the error that caused the retry says more.
            raise away or error from None
    raise StateError(
        f"the certificates do not settle in {MAX_PASSES} passes; does an issuer with another "
        f"file write the Secrets of {issue.namespace} too?"
    )


def _pass(issue: Issue, secrets: Secrets, now: datetime) -> int:
    stored = {name: secrets.read(name) for name in _names(issue)}
    state = _parse(issue, stored)
    wanted = renew(state, issue, now)
    contents = _contents(issue, wanted)
    written = 0
    # The authority first: it must be stored before anything that it has signed.
    for name in _names(issue):
        seen = stored[name]
        if seen is None or seen.data != contents[name] or not secrets.labelled(seen):
            secrets.write(name, contents[name], seen)
            written += 1
    _tell(state, wanted, issue)
    return written


def _names(issue: Issue) -> list[str]:
    return [issue.authority, *(leaf.secret for leaf in issue.services.values())]


def _parse(issue: Issue, stored: dict[str, StoredSecret | None]) -> State:
    authority = stored[issue.authority]
    leaves: dict[str, Issued | None] = {}
    for service, leaf in issue.services.items():
        seen = stored[leaf.secret]
        leaves[service] = None if seen is None else parse_leaf(seen.data)
    return State(None if authority is None else parse_authority(authority.data), leaves)


def _contents(issue: Issue, wanted: State) -> dict[str, Data]:
    contents: dict[str, Data] = {}
    if wanted.authority is not None:
        contents[issue.authority] = authority_data(wanted.authority)
    for service, issued in wanted.leaves.items():
        if issued is not None:
            contents[issue.services[service].secret] = leaf_data(issued)
    return contents


def _tell(before: State, after: State, issue: Issue) -> None:
    old, new = before.authority, after.authority
    if new is not None and old is not new:
        log.info("authority", secret=issue.authority, change=_change(old, new))
    for service, issued in after.leaves.items():
        seen = before.leaves.get(service)
        if issued is not None and (seen is None or seen.pair is not issued.pair):
            end = issued.pair.certificate.not_valid_after_utc
            log.info("issued", service=service, until=end.isoformat(timespec="seconds"))


def _change(old: Authority | None, new: Authority) -> str:
    if old is None or (old.active is not new.active and old.next is not new.active):
        return "made"
    if old.active is not new.active:
        return "the next one signs"
    if new.next is not old.next:
        return "a next one is made"
    return "trusted by all" if new.spread_since != old.spread_since else "a retired one is over"
