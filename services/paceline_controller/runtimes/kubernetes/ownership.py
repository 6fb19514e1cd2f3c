"""Who owns the number of replicas of a Deployment, by its `managedFields`. Pure."""

from __future__ import annotations

import copy
from typing import Any

from paceline_controller.runtimes.kubernetes.names import MANAGER
from paceline_controller.runtimes.kubernetes.resources import Object

SPEC, REPLICAS = "f:spec", "f:replicas"


def released(body: Object) -> list[Any] | None:
    """The entries of `managedFields` without our claim to replicas; None if we have none."""
    entries: list[Any] = copy.deepcopy(body["metadata"].get("managedFields") or [])
    ours = [entry for entry in entries if entry.get("manager") == MANAGER and _claims(entry)]
    for entry in ours:
        del entry["fieldsV1"][SPEC][REPLICAS]
        if not set(entry["fieldsV1"][SPEC]) - {"."}:
            del entry["fieldsV1"][SPEC]
    return [entry for entry in entries if entry.get("fieldsV1")] if ours else None


def _claims(entry: Object) -> bool:
    return REPLICAS in ((entry.get("fieldsV1") or {}).get(SPEC) or {})
