"""Accelerators that a pod asks for: as many as its processes compute on. No side effects.

The chart's template has them for a whole pod: as extended resources of the vendor's device plug-in
(slices of MIG included), or as claims for dynamic resource allocation, one claim per accelerator.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from paceline.errors import ConfigError
from paceline_controller.runtimes.kubernetes.resources import Object

_LISTS = ("requests", "limits")


def request_accelerators(
    pods: Object,
    container: Object,
    *,
    count: int,
    patterns: Collection[str],
    whole: int | None = None,
) -> None:
    """Change a pod template in place so that it asks for `count` accelerators.

    Of extended resources that match one of `patterns` it asks for `count`; or, where the template
    has more than one for each of `whole` accelerators, for as many more. Claims from a
    ResourceClaimTemplate are repeated for each accelerator; claims that name a ResourceClaim stay.

    Raises:
        ConfigError: the quantity of an accelerator is no whole number.
    """
    resources: Object = dict(container.get("resources") or {})
    for name in _LISTS:
        if name in resources:
            resources[name] = _scaled(resources[name] or {}, count, whole, patterns)
    if claims := pods["spec"].get("resourceClaims"):
        pods["spec"]["resourceClaims"], names = _repeated(claims, count)
        requests = resources.get("claims") or []
        resources["claims"] = [
            {**request, "name": name}
            for request in requests
            for name in names.get(request["name"], ())
        ]
    if resources:
        container["resources"] = resources


def _scaled(
    quantities: Object, count: int, whole: int | None, patterns: Collection[str]
) -> dict[str, Any]:
    scaled: dict[str, Any] = {}
    for name, quantity in quantities.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            scaled[name] = quantity
        elif count:
            share = -(-_number(name, quantity) * count // whole) if whole else 0
            scaled[name] = max(count, share)
    return scaled


def _number(name: str, quantity: Any) -> int:
    if not str(quantity).isdecimal():
        raise ConfigError(f"template: resources: {name}: {quantity!r} is no whole number")
    return int(quantity)


def _repeated(
    claims: list[dict[str, Any]], count: int
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Claims of a pod for `count` accelerators, and their names by the template's name."""
    repeated: list[dict[str, Any]] = []
    names: dict[str, list[str]] = {}
    for claim in claims:
        name = claim["name"]
        own = "resourceClaimTemplateName" in claim
        names[name] = [f"{name}-{index}" for index in range(count)] if own else [name]
        repeated += [{**claim, "name": repeated_name} for repeated_name in names[name]]
    return repeated, names
