"""Which kind of service may call which RPC, by the names in its certificate.

`CALLERS` has a row for every RPC that a kind of service serves; one without a row is refused. It
says the same as the arrows of the architecture and of the chart's NetworkPolicy, method by method.
A certificate carries the name `KIND.paceline.internal` of every kind that its process may speak
for: one name on a cluster, several where one machine shares a certificate.

Certificates tell kinds apart, not jobs and not workers of one kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextvars import ContextVar
from typing import Any, Final

from paceline.errors import PermissionDeniedError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.types import WorkerKind

Kind = WorkerKind
Callers = Set[WorkerKind] | None
ANYBODY: Final = None
"""No certificate is asked for: tokens decide (and nothing else answers who has neither)."""
NOBODY: Final[Set[WorkerKind]] = frozenset()
"""For people with TLS off; no part of the platform calls it."""
WORKERS: Final = frozenset(Kind) - {Kind.EXPERIENCE}
ALL: Final = frozenset(Kind)

_HEALTH: Mapping[str, Callers] = {"Check": ALL, "Watch": ALL}
_JOBS: Mapping[str, Callers] = {
    "SubmitJob": {Kind.GATEWAY},
    "GetJob": ALL - {Kind.EXPERIENCE, Kind.REWARD},
    "ListJobs": {Kind.GATEWAY, Kind.CONTROLLER, Kind.TRACKING},
    "CancelJob": {Kind.GATEWAY},
    "WatchJob": {Kind.GATEWAY, Kind.TRACKING},
    "ListMetrics": {Kind.GATEWAY, Kind.TRACKING},
    "ListTrajectories": {Kind.GATEWAY, Kind.TRACKING},
    "AuditJob": {Kind.GATEWAY},
    "ListWeights": {Kind.GATEWAY},
}
_ACCESS: Mapping[str, Callers] = {
    "CreateToken": {Kind.GATEWAY},
    "ListTokens": {Kind.GATEWAY},
    "RevokeToken": {Kind.GATEWAY},
    "ListAudit": {Kind.GATEWAY},
}
_GATEKEEPER: Mapping[str, Callers] = {
    "Authenticate": {Kind.GATEWAY},
    "Report": {Kind.GATEWAY},
}
_TENANTS: Mapping[str, Callers] = {
    "ListTenants": {Kind.GATEWAY, Kind.CONTROLLER},
    "SetQuota": {Kind.GATEWAY},
}
_LEDGER: Mapping[str, Callers] = {
    "Lease": {Kind.ENVIRONMENT},
    "Submit": {Kind.ENVIRONMENT},
    "GrantIncarnation": {Kind.CONTROLLER},
    "ReportFailure": {Kind.CONTROLLER, Kind.TRAINER},
    "SetJobState": {Kind.CONTROLLER, Kind.TRAINER},  # a trainer: to `failed` only
    "Demand": {Kind.CONTROLLER},
    "Rewind": {Kind.TRAINER},
    "TakeBatch": {Kind.TRAINER},
    "CommitStep": {Kind.TRAINER},
    "Checkpointed": {Kind.TRAINER},
    "GetArtefact": {Kind.ENVIRONMENT, Kind.ROLLOUT, Kind.TRACKING},
    "ReportTracking": {Kind.TRACKING},
}
_ROSTER: Mapping[str, Callers] = {
    "Join": WORKERS,  # as its own kind
    "Beat": WORKERS,  # likewise
    "Leave": WORKERS,  # likewise
    "ListWorkers": {Kind.CONTROLLER, Kind.TRACKING},
    "WatchWorkers": {Kind.ENVIRONMENT},
    "Announce": {Kind.TRAINER},
    "WatchRoute": {Kind.ROLLOUT},
    "ReportTransfer": {Kind.ROLLOUT},
}

CALLERS: Mapping[WorkerKind, Mapping[str, Mapping[str, Callers]]] = {
    Kind.EXPERIENCE: {
        "Jobs": _JOBS,
        "Access": _ACCESS,
        "Gatekeeper": _GATEKEEPER,
        "Tenants": _TENANTS,
        "Experience": _LEDGER,
        "Roster": _ROSTER,
        "Health": _HEALTH,
    },
    Kind.GATEWAY: {
        "Jobs": dict.fromkeys(_JOBS, ANYBODY),
        "Access": dict.fromkeys(_ACCESS, ANYBODY),
        "Tenants": dict.fromkeys(_TENANTS, ANYBODY),
        "Health": {"Check": ANYBODY, "Watch": NOBODY},  # a watch never ends
    },
    Kind.CONTROLLER: {"Health": _HEALTH},
    Kind.ENVIRONMENT: {"Environment": {"Status": NOBODY}, "Health": _HEALTH},
    Kind.REWARD: {"Reward": {"Score": {Kind.ENVIRONMENT}}, "Health": _HEALTH},
    Kind.ROLLOUT: {
        "Rollout": {"Generate": {Kind.ENVIRONMENT}, "Status": {Kind.ENVIRONMENT}},
        "Health": _HEALTH,
    },
    Kind.TRACKING: {"Health": _HEALTH},
    Kind.TRAINER: {"Trainer": {"Status": NOBODY}, "Health": _HEALTH},
}
"""Server -> service -> method -> callers; services of `paceline.v1` and `grpc.health.v1`."""

WEIGHTS: Final = frozenset({Kind.TRAINER, Kind.ROLLOUT})
"""Who gives weights over HTTP, and who may pull them."""

SAY_EVERY_S = 10.0
log = Log("callers")
_caller: ContextVar[Set[WorkerKind] | None] = ContextVar("caller", default=None)


def roles_of(names: Iterable[str], domain: str) -> Set[WorkerKind]:
    """The kinds that a certificate with these DNS names speaks for; a wildcard is none."""
    found = set(names)
    return frozenset(kind for kind in Kind if f"{kind}.{domain}" in found)


def callers_of(server: WorkerKind, method: str) -> Callers:
    """Who may call `/package.Service/Method` of a server; `NOBODY` if it has no row."""
    full, _, name = method.removeprefix("/").partition("/")
    package, _, service = full.rpartition(".")
    if package != ("grpc.health.v1" if service == "Health" else "paceline.v1"):
        return NOBODY
    return CALLERS[server].get(service, {}).get(name, NOBODY)


def may_speak_for(kind: str) -> None:
    """Check that the caller of the RPC being served may call itself of this kind.

    Raises:
        PermissionDeniedError: its certificate is that of another kind.
    """
    roles = _caller.get()
    if roles is not None and kind not in roles:
        raise PermissionDeniedError(f"{_told(roles)} cannot speak for another kind of service")


class Refusals:
    """Counts refused callers; one event in `SAY_EVERY_S`: who tries again fills no disk."""

    def __init__(
        self, metrics: Metrics | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._said = float("-inf")
        self._unsaid = 0

    def add(self, what: str, roles: Set[WorkerKind]) -> None:
        """Somebody of these kinds may not have this."""
        caller = "several" if len(roles) > 1 else str(min(roles, default="none"))
        if self._metrics is not None:
            self._metrics.add("refused_calls", caller=caller)
        self._unsaid += 1
        if self._clock() - self._said >= SAY_EVERY_S:
            log.warning("refused", what=what, caller=caller, calls=self._unsaid)
            self._said, self._unsaid = self._clock(), 0


class Guard:
    """Refuses callers whose certificate the table does not allow."""

    def __init__(self, *, kind: WorkerKind, domain: str, refusals: Refusals) -> None:
        self._kind = kind
        self._domain = domain
        self._refusals = refusals

    def check(self, method: str, context: Any) -> None:
        """Let a call pass, and remember who calls while it is served.

        Raises:
            PermissionDeniedError: names the method and the caller's own kind, nothing else.
        """
        allowed = callers_of(self._kind, method)
        if allowed is None:
            return
        names = context.auth_context().get("peer_dns", ())
        roles = roles_of((name.decode("ascii", "replace") for name in names), self._domain)
        if roles.isdisjoint(allowed):
            self._refusals.add(method, roles)
            raise PermissionDeniedError(f"{_told(roles)} may not call {method}")
        _caller.set(roles)


def _told(roles: Set[WorkerKind]) -> str:
    if not roles:
        return "a caller without a service's certificate"
    return f"a certificate of {' and '.join(sorted(roles))}"
