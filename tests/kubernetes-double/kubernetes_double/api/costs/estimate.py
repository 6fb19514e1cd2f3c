"""The worst-case cost of an expression, as estimated by cel-go's `checker/cost.go`.

A variable or field costs 1, a constant nothing, a new list 10, a new map 30; a loop costs its
steps times the maximum number of items. Two quirks of the server are reproduced: map keys have
size 0, and a part of a result (an item of `map()`, a field of a call's result) is looked up as if
it were a part of `self`.
"""

from __future__ import annotations

from kubernetes_double.api.costs.calls import Price, Use, Value, price, result
from kubernetes_double.api.costs.sizes import (
    BOOL,
    DYN,
    MOST,
    SCALAR,
    TEXT,
    Kind,
    Size,
)
from kubernetes_double.api.costs.syntax import (
    RESULT,
    Call,
    Expression,
    Fold,
    Listing,
    Literal,
    Name,
    Select,
    Table,
    read,
)

ITEMS, KEYS, VALUES = "@items", "@keys", "@values"
_NEW_LIST, _NEW_MAP = 10, 30
_OPAQUE = ("quantity", "ip", "cidr", "semver")
"""Kubernetes types that compare at a cost of 1."""
Scope = dict[str, Value]


def estimate(source: str, kind: Kind) -> int:
    """The estimated cost of a rule on a value of this type. Raises ValueError for invalid CEL."""
    scope = {name: Value(kind, path=(name,)) for name in ("self", "oldSelf")}
    return min(_Coster(kind).visit(read(source), scope).cost, MOST)


class _Coster:
    def __init__(self, root: Kind) -> None:
        self._root = root

    def visit(self, node: Expression, scope: Scope) -> Value:
        """The type, cost and size of an expression."""
        match node:
            case Literal():
                return Value(Kind(node.kind), 0, Size(node.size, node.size), (), node.number)
            case Name():
                known = scope.get(node.name, Value(DYN, path=(node.name,)))
                return self._value(known.kind, 1, known.path, known.size)
            case Select():
                return self._select(node, scope)
            case Call():
                return self._call(node, scope)
            case Fold():
                return self._fold(node, scope)
            case Listing():
                items = [self.visit(one, scope) for one in node.items]
                kind = Kind("list", item=items[0].kind if items else DYN)
                return _written(kind, _NEW_LIST, items, len(items))
            case Table():
                parts = [self.visit(one, scope) for one in node.parts]
                kind = Kind("map", item=parts[1].kind if parts else DYN)
                return _written(kind, _NEW_MAP, parts, len(parts) // 2)

    def _value(
        self, kind: Kind, cost: int, path: tuple[str, ...] = (), size: Size | None = None
    ) -> Value:
        """A value whose size comes from the schema or else from the type."""
        found = self._declared(path) or (SCALAR if kind.scalar else size)
        return Value(kind, cost, found, path)

    def _declared(self, path: tuple[str, ...]) -> Size | None:
        if not path:
            return None
        kind: Kind | None = self._root
        for step in path[1:]:
            if step in (ITEMS, VALUES):
                kind = kind.item
            elif step == KEYS:
                kind = TEXT if kind.name == "map" else None
            else:
                kind = kind.fields.get(step)
            if kind is None:
                return None
        return Size(0, kind.most)

    def _item(self, container: Value) -> Size:
        path = (*container.path, ITEMS) if container.path else ()
        return self._declared(path) or Value(DYN).extent

    def _select(self, node: Select, scope: Scope) -> Value:
        of = self.visit(node.of, scope)
        if node.test:
            return self._value(BOOL, of.cost)
        kind = of.kind.item if of.kind.name == "map" else of.kind.fields.get(node.field)
        cost = of.cost + (of.kind.name in ("map", "object"))
        return self._value(kind or DYN, cost, (*of.path, node.field))

    def _call(self, node: Call, scope: Scope) -> Value:
        function, target = node.function, None
        arguments = [self.visit(one, scope) for one in node.arguments]
        if isinstance(node.target, Name) and node.target.name not in scope:
            function = f"{node.target.name}.{function}"
        elif node.target is not None:
            target = self.visit(node.target, scope)
        cost = sum(one.cost for one in arguments) + (target.cost if target else 0)
        if function in ("&&", "||"):
            return self._value(BOOL, cost)
        if function == "dyn" and arguments:
            return Value(DYN, 1 + cost, arguments[0].size)
        if function == "?:":
            return _either(*arguments)
        if function == "[]":
            return self._index(arguments[0], cost + 1)
        use = Use(target, arguments, self._item)
        found = _own_equality(function, arguments) or price(function, use)
        return self._value(result(function, use), cost + found.cost, size=found.size)

    def _index(self, container: Value, cost: int) -> Value:
        kind = container.kind
        if kind.item is None:
            return self._value(DYN, cost)
        step = VALUES if kind.name == "map" else ITEMS
        return self._value(kind.item, cost, (*container.path, step))

    def _fold(self, node: Fold, scope: Scope) -> Value:
        over, start = self.visit(node.over, scope), self.visit(node.start, scope)
        kind, step = over.kind.item or DYN, ITEMS
        if over.kind.name != "list":
            kind, step = (TEXT if over.kind.name == "map" else DYN), KEYS
        item = self._value(kind, 0, (*over.path, step))
        inner = {**scope, RESULT: start, node.item: item}
        each = self.visit(node.condition, inner).cost
        stepped = self.visit(node.step, inner)
        loop = over.extent.high * min(each + stepped.cost, MOST)
        outcome = self.visit(node.result, {**scope, RESULT: start})
        cost = min(over.cost + start.cost + outcome.cost + loop, MOST)
        if isinstance(node.start, Listing):
            return Value(stepped.kind, cost, over.extent)
        return Value(BOOL, cost, start.size)


def _written(kind: Kind, base: int, parts: list[Value], count: int) -> Value:
    return Value(kind, base + sum(one.cost for one in parts), Size(count, count))


def _either(condition: Value, first: Value, second: Value) -> Value:
    cost = condition.cost + max(first.cost, second.cost)
    kind = second.kind if first.kind.name in ("null", "dyn") else first.kind
    return Value(kind, cost, first.extent.or_else(second.extent))


def _own_equality(function: str, arguments: list[Value]) -> Price | None:
    names = {one.kind.name for one in arguments}
    same = function == "==" and len(names) == 1 and names <= set(_OPAQUE)
    return Price(1) if same else None
