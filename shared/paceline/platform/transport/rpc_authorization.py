"""Authorizes RPCs between services by the kinds of service that a caller proves to be.

The proto of each method declares which kinds may call it (option `operation.callers`); a method
that declares none is refused. The chart's NetworkPolicy follows the same declarations.
A caller proves its kind by its certificate or, in an installation without certificates, by the
credential of its kind (`paceline.platform.transport.service_keys`). A certificate carries the name
`KIND.paceline.internal` for every kind that its process may speak for: one on a cluster, several
where the processes of one machine share a certificate.

Both distinguish kinds of service. Which job, worker and incarnation a trainer or rollout worker
is, its own credential says: `paceline.platform.transport.job_credential`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

from paceline.enums import WorkerKind
from paceline.errors import PermissionDeniedError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.operations import operations

Kind = WorkerKind
Callers = Set[WorkerKind] | None
ANYBODY: Final = None
"""No proof is needed: the gateway authenticates users by their tokens."""
NOBODY: Final[Set[WorkerKind]] = frozenset()
"""No service may call the method."""
UNKNOWN_METHOD: Final = NOBODY
"""Callers of a method that the server does not declare: it is refused like one for nobody."""
ALL_KINDS: Final = frozenset(Kind)
Identify = Callable[[Any], Set[WorkerKind]]
"""Takes the context of a call; returns the kinds of service that its caller proves to be."""

_HEALTH: Mapping[str, Callers] = {"Check": ALL_KINDS, "Watch": ALL_KINDS}


@cache
def callers() -> Mapping[WorkerKind, Mapping[str, Mapping[str, Callers]]]:
    """Server -> service -> method -> callers, for `paceline.v1` and gRPC's health service."""
    found: dict[WorkerKind, dict[str, dict[str, Callers]]] = {
        kind: {"Health": dict(_HEALTH)} for kind in Kind
    }
    found[Kind.GATEWAY]["Health"] = {"Check": ANYBODY, "Watch": NOBODY}  # a watch never ends
    for each in operations().values():
        found[each.served_by].setdefault(each.service, {})[each.name] = each.callers
        if each.role is not None:
            found[Kind.GATEWAY].setdefault(each.service, {})[each.name] = ANYBODY
    return found


WEIGHT_PEERS: Final = frozenset({Kind.TRAINER, Kind.ROLLOUT})
"""Kinds that serve weights over HTTP, and that may pull them."""

LOG_INTERVAL_S = 10.0
log = Log("callers")
_caller_kinds: ContextVar[Set[WorkerKind] | None] = ContextVar("caller_kinds", default=None)


def certified_kinds(names: Iterable[str], domain: str) -> Set[WorkerKind]:
    """The kinds that a certificate with these DNS names speaks for; wildcards do not count."""
    found = set(names)
    return frozenset(kind for kind in Kind if f"{kind}.{domain}" in found)


def by_certificate(domain: str) -> Identify:
    """Identifies callers by the DNS names of their certificates."""

    def identify(context: Any) -> Set[WorkerKind]:
        names = context.auth_context().get("peer_dns", ())
        return certified_kinds((name.decode("ascii", "replace") for name in names), domain)

    return identify


def allowed_callers(server: WorkerKind, method: str) -> Callers:
    """Who may call `/package.Service/Method` of a server."""
    full, _, name = method.removeprefix("/").partition("/")
    package, _, service = full.rpartition(".")
    if package != ("grpc.health.v1" if service == "Health" else "paceline.v1"):
        return UNKNOWN_METHOD
    return callers()[server].get(service, {}).get(name, UNKNOWN_METHOD)


def check_speaks_for(kind: str) -> None:
    """Check that the caller of the current RPC may act as this kind.

    Raises:
        PermissionDeniedError: it has proved to be of other kinds only.
    """
    kinds = _caller_kinds.get()
    if kinds is not None and kind not in kinds:
        raise PermissionDeniedError(f"{_describe(kinds)} cannot speak for another kind of service")


def caller_kinds() -> Set[WorkerKind] | None:
    """The kinds that the caller of the current RPC has proved; None: an `insecure` server."""
    return _caller_kinds.get()


def narrow_caller(kind: WorkerKind) -> None:
    """The caller of the current RPC has proved that it is of this kind alone."""
    _caller_kinds.set(frozenset({kind}))


class RefusedCallers:
    """Counts refused calls; logs one event per `LOG_INTERVAL_S` to keep retries off the disk."""

    def __init__(
        self, metrics: Metrics | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._logged_s = float("-inf")
        self._num_unlogged = 0

    def add(self, what: str, kinds: Set[WorkerKind]) -> None:
        """Record that a caller of these kinds was refused access to `what`."""
        caller = "several" if len(kinds) > 1 else str(min(kinds, default="none"))
        if self._metrics is not None:
            self._metrics.add("refused_calls", caller=caller)
        self._num_unlogged += 1
        if self._clock() - self._logged_s >= LOG_INTERVAL_S:
            log.warning("refused", what=what, caller=caller, calls=self._num_unlogged)
            self._logged_s, self._num_unlogged = self._clock(), 0


class Guard:
    """Refuses RPCs whose caller does not prove to be of an allowed kind."""

    def __init__(self, *, kind: WorkerKind, identify: Identify, refusals: RefusedCallers) -> None:
        self._kind = kind
        self._identify = identify
        self._refusals = refusals

    def check(self, method: str, context: Any) -> None:
        """Check one call, and remember its caller while it is being served.

        Raises:
            PermissionDeniedError: names only the method and the caller's own kinds.
        """
        allowed = allowed_callers(self._kind, method)
        if allowed is None:
            return
        kinds = self._identify(context)
        if kinds.isdisjoint(allowed):
            self._refusals.add(method, kinds)
            raise PermissionDeniedError(f"{_describe(kinds)} may not call {method}")
        _caller_kinds.set(kinds)


def _describe(kinds: Set[WorkerKind]) -> str:
    if not kinds:
        return "a caller without a service's certificate or credential"
    return f"a service of kind {' and '.join(sorted(kinds))}"
