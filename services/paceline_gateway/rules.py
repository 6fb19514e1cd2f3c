"""What each route and each method needs. What is not in these tables is not served."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fastapi import FastAPI
from google.protobuf.descriptor import ServiceDescriptor

from paceline.access import Role
from paceline.errors import PermissionDeniedError

# None: for everybody, without a token.
REST: Mapping[str, Role | None] = {
    "GET /healthz": None,
    "GET /readyz": None,
    "GET /docs": None,
    "GET /docs/{asset}": None,
    "GET /openapi.json": None,
    "GET /v1/jobs": Role.READ,
    "POST /v1/jobs": Role.SUBMIT,
    "GET /v1/jobs/{job_id}": Role.READ,
    "DELETE /v1/jobs/{job_id}": Role.SUBMIT,
    "POST /v1/jobs/{job_id}/cancel": Role.SUBMIT,
    "GET /v1/jobs/{job_id}/events": Role.READ,
    "GET /v1/jobs/{job_id}/metrics": Role.READ,
    "GET /v1/jobs/{job_id}/trajectories": Role.READ,
    "GET /v1/jobs/{job_id}/audit": Role.READ,
    "GET /v1/jobs/{job_id}/weights": Role.READ,
    "GET /v1/tenants": Role.READ,
    "PUT /v1/tenants/{tenant}/quota": Role.ADMIN,
    "DELETE /v1/tenants/{tenant}/quota": Role.ADMIN,
    "GET /v1/tokens": Role.ADMIN,
    "POST /v1/tokens": Role.ADMIN,
    "DELETE /v1/tokens/{token_id}": Role.ADMIN,
    "GET /v1/audit-log": Role.ADMIN,
}

GRPC: Mapping[str, Role] = {
    "paceline.v1.Jobs/SubmitJob": Role.SUBMIT,
    "paceline.v1.Jobs/GetJob": Role.READ,
    "paceline.v1.Jobs/ListJobs": Role.READ,
    "paceline.v1.Jobs/CancelJob": Role.SUBMIT,
    "paceline.v1.Jobs/WatchJob": Role.READ,
    "paceline.v1.Jobs/ListMetrics": Role.READ,
    "paceline.v1.Jobs/ListTrajectories": Role.READ,
    "paceline.v1.Jobs/AuditJob": Role.READ,
    "paceline.v1.Jobs/ListWeights": Role.READ,
    "paceline.v1.Tenants/ListTenants": Role.READ,
    "paceline.v1.Tenants/SetQuota": Role.ADMIN,
    "paceline.v1.Access/CreateToken": Role.ADMIN,
    "paceline.v1.Access/ListTokens": Role.ADMIN,
    "paceline.v1.Access/RevokeToken": Role.ADMIN,
    "paceline.v1.Access/ListAudit": Role.ADMIN,
}


class Routes:
    """Finds the rule for a request by its path alone, before anything of the application runs."""

    def __init__(self, table: Mapping[str, Role | None] = REST) -> None:
        self._rules = [(*name.split(" "), role) for name, role in table.items()]
        self._patterns = {path: _pattern(path) for _, path, _ in self._rules}

    def find(self, method: str, path: str) -> tuple[str, Role | None] | None:
        """The route, as in the table, and its role; of several that fit, the one that needs most.

        None: nothing of this name is served.
        """
        known = "GET" if method == "HEAD" else method
        fits = [
            (f"{each} {template}", role)
            for each, template, role in self._rules
            if each == known and self._patterns[template].fullmatch(path)
        ]
        return max(fits, key=lambda fit: _height(fit[1]), default=None)

    def methods(self, path: str) -> list[str]:
        """With which methods this path is served."""
        return sorted(
            {m for m, template, _ in self._rules if self._patterns[template].fullmatch(path)}
        )


def least_of(method: str) -> Role:
    """The role that a gRPC method (`package.Service/Method`) needs.

    Raises:
        PermissionDeniedError: it has none, so it is not for users.
    """
    if method not in GRPC:
        raise PermissionDeniedError(f"{method} is not served here")
    return GRPC[method]


def check_rest(app: FastAPI, table: Mapping[str, Role | None] = REST) -> None:
    """Raise `ValueError` if a route of the application has no rule, or a rule no route."""
    served = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    ruled = {name for name, role in table.items() if role is not None}
    open_ = set(table) - ruled
    if lost := sorted((served - ruled - open_) | (ruled - served)):
        raise ValueError(f"routes without a rule, or rules without a route: {', '.join(lost)}")


def check_grpc(services: Iterable[ServiceDescriptor], table: Mapping[str, Role] = GRPC) -> None:
    """Raise `ValueError` if a method of the services has no rule, or a rule no method."""
    served = {f"{each.full_name}/{method.name}" for each in services for method in each.methods}
    if lost := sorted(served ^ set(table)):
        raise ValueError(f"methods without a rule, or rules without a method: {', '.join(lost)}")


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", path)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def _height(role: Role | None) -> int:
    return -1 if role is None else list(Role).index(role)
