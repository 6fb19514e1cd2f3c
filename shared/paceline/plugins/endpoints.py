"""Servers outside of the installation that an operator lets rewards ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, Field

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "is the name of a server, with letters, digits, '.', '_' and '-'; its URL belongs into "
            "the operator's `endpoints`, as base_url (`--endpoints FILE` of paceline run, try, up)"
        )
    return name


EndpointName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_name)]


class Endpoints(Protocol):
    """Asks servers by the names that an operator gave them; addresses and keys stay with him."""

    async def post(
        self, endpoint: str, path: str, body: Mapping[str, Any], *, most: int, fresh: bool = False
    ) -> dict[str, Any]:
        """The JSON object that a server answers to a JSON request, which is repeated until then.

        Args:
            endpoint: its name in the settings of the reward workers.
            path: after the base URL, e.g. `/chat/completions`.
            body: of the request.
            most: requests of the job that this worker has open at a time.
            fresh: what was answered to an equal request before does not count.

        Raises:
            InvalidError: there is no such endpoint, or it refuses the request.
            UnavailableError: it has not answered in the time that there is for the item.
        """
        ...
