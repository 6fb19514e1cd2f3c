"""Cost limits on the CEL rules of a definition, beyond which the server rejects it.

Limits, messages and how often a rule may run: apiextensions-apiserver,
`pkg/apis/apiextensions/validation` (`validation.go`, `cel_validation.go`) and
`pkg/apiserver/schema/cel/compilation.go`. Not supported, because such rules do not run here:
optional values, loops with two variables, the list library of 1.34. Types are tracked only as far
as costs depend on them, so a rule that names a nonexistent field passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes_double.api.costs.estimate import estimate
from kubernetes_double.api.costs.sizes import MOST, REQUEST_BYTES, Kind, declared
from kubernetes_double.api.costs.syntax import read
from kubernetes_double.api.requests.errors import cause
from kubernetes_double.api.resources.schemas import Node, children

__all__ = ["EXPRESSION_LIMIT", "SCHEMA_LIMIT", "RuleCost", "check_costs", "costs", "read"]

Object = dict[str, Any]
EXPRESSION_LIMIT = 10_000_000
"""StaticEstimatedCostLimit: limit per expression."""
SCHEMA_LIMIT = 100_000_000
"""StaticEstimatedCRDCostLimit: limit on all expressions of a schema."""
_NAMED = 4
_ADVICE = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, "
    "maps, and strings are declared)"
)


@dataclass(frozen=True)
class RuleCost:
    """The estimated cost of one expression for a whole object."""

    place: str
    title: str
    """`rule` or `messageExpression`."""
    cost: int


def check_costs(schema: Node, path: str, *, known: bool = False) -> list[Object]:
    """Costs that exceed their budget; in a schema that is already `known`, only the total can."""
    found = list(costs(schema, path))
    dear = [] if known else [one for one in found if one.cost > EXPRESSION_LIMIT]
    causes = [
        _cause(one.place, f"estimated {one.title} cost {_excess(one.cost, EXPRESSION_LIMIT)}")
        for one in dear
    ]
    total = min(sum(one.cost for one in found), MOST)
    if total > SCHEMA_LIMIT:
        what = "estimated rule cost total {} entire OpenAPIv3 schema".format
        most = sorted(found, key=lambda one: -one.cost)[:_NAMED]
        named = [one.place for one in most if one.cost >= SCHEMA_LIMIT // 100]
        blame = f"contributed to {what('exceeding cost limit for')}"
        causes += [_cause(place, blame) for place in named]
        whole = f"x-kubernetes-validations {what('for')} {_excess(total, SCHEMA_LIMIT)}"
        causes.append(_cause(path, whole))
    return causes


def _cause(place: str, why: str) -> Object:
    return cause("FieldValueForbidden", f"Forbidden: {why}", place)


def _excess(cost: int, limit: int) -> str:
    factor = cost / limit
    shown = f"{factor:.6f}x" if factor < 1.5 else f"{factor:.1f}x"
    shown = "more than 100x" if factor > 100 else shown
    return f"exceeds budget by factor of {shown} {_ADVICE}"


def costs(schema: Node, path: str) -> Iterator[RuleCost]:
    """The costs of all expressions of a schema."""
    yield from _walk(schema, path, 1, whole=True)


def _walk(node: Node, path: str, times: int | None, *, whole: bool = False) -> Iterator[RuleCost]:
    """`times`: maximum number of such values in an object; None if unbounded."""
    fan = _fan(node)
    inner = None if times is None or fan is None else min(times * fan, MOST)
    for child, place in children(node, path):
        yield from _walk(child, place, inner)
    rules = node.get("x-kubernetes-validations") or ()
    kind = declared(node, whole=whole or bool(node.get("x-kubernetes-embedded-resource")))
    if rules and kind is not None:
        yield from _rules(rules, f"{path}.x-kubernetes-validations", kind, times)


def _fan(node: Node) -> int | None:
    """Maximum number of children per child schema; None if unbounded."""
    bounds = {"array": "maxItems", "object": "maxProperties"}
    if node.get("type") == "object" and node.get("additionalProperties") is None:
        return 1
    bound = bounds.get(str(node.get("type")))
    if bound is None:
        return 1
    return max(int(node[bound]), 0) if bound in node else None


def _rules(rules: Any, path: str, kind: Kind, times: int | None) -> Iterator[RuleCost]:
    """Costs of rules, per value, and of messages, once; an invalid expression costs nothing."""
    if times is None:
        # As many values as fit into a request, each followed by a comma.
        times = REQUEST_BYTES // (kind.least_bytes + 1)
    for index, rule in enumerate(rules):
        for title, repeat in (("rule", times), ("messageExpression", 1)):
            try:
                cost = estimate(rule[title], kind)
            except (KeyError, ValueError):
                continue
            yield RuleCost(f"{path}[{index}].{title}", title, min(cost * repeat, MOST))
