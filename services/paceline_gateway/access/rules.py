"""The role that each route and method requires, from the options of the protos."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import PermissionDeniedError
from paceline.platform.transport.operations import for_users, operations
from paceline.platform.transport.principal import Role

# Served without a token.
PUBLIC = ("GET /livez", "GET /readyz", "GET /docs", "GET /docs/{asset}", "GET /openapi.json")


def rest_roles() -> dict[str, Role | None]:
    """The role that each route requires; None: no token is needed."""
    ruled = {str(route): operation.role for operation in for_users() for route in operation.routes}
    return {**dict.fromkeys(PUBLIC), **ruled}


class Routes:
    """Finds the rule for a request by method and path, before the application runs."""

    def __init__(self, table: Mapping[str, Role | None] | None = None) -> None:
        self._rules = [(*name.split(" "), role) for name, role in (table or rest_roles()).items()]
        self._patterns = {path: _pattern(path) for _, path, _ in self._rules}

    def find(self, method: str, path: str) -> tuple[str, Role | None] | None:
        """The matching route, as in the table, and its role; of several, the highest role.

        None: there is no such route.
        """
        known = "GET" if method == "HEAD" else method
        matches = [
            (f"{verb} {template}", role)
            for verb, template, role in self._rules
            if verb == known and self._patterns[template].fullmatch(path)
        ]
        return max(matches, key=lambda match: _rank(match[1]), default=None)

    def methods(self, path: str) -> list[str]:
        """HTTP methods with which a path is served."""
        return sorted(
            {m for m, template, _ in self._rules if self._patterns[template].fullmatch(path)}
        )


def required_role(method: str) -> Role:
    """The role that a gRPC method (`package.Service/Method`) requires.

    Raises:
        PermissionDeniedError: it has none, so it is not for users.
    """
    operation = operations().get(f"/{method}")
    if operation is None or operation.role is None:
        raise PermissionDeniedError(f"{method} is not served here")
    return operation.role


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", path)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def _rank(role: Role | None) -> int:
    return -1 if role is None else list(Role).index(role)
