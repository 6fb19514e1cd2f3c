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
    ours = [each for each in entries if each.get("manager") == MANAGER and _claims(each)]
    for each in ours:
        del each["fieldsV1"][SPEC][REPLICAS]
        if not set(each["fieldsV1"][SPEC]) - {"."}:
            del each["fieldsV1"][SPEC]
    return [each for each in entries if each.get("fieldsV1")] if ours else None


def _claims(entry: Object) -> bool:
    return REPLICAS in ((entry.get("fieldsV1") or {}).get(SPEC) or {})
