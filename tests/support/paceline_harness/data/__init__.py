"""Data of jobs without a process for each index, which takes a second to start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data import JobData
from paceline.data.index_child import attempt


class InProcess(JobData):
    """Builds indexes in the process of the test, as the child does, without its limits."""

    def _ask(self, request: Mapping[str, Any], name: str) -> list[str]:
        del name
        return attempt(dict(request))
