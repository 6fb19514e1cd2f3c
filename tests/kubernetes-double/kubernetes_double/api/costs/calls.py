"""The cost of a call without its arguments, and the size of its result.

Operators and standard functions: cel-go, `checker/cost.go` (`functionCost`); sets: cel-go,
`ext/sets.go`; Kubernetes extensions: apiserver, `pkg/cel/library/cost.go`. Any other call costs 1.
If the type of an operand is only known at runtime, all overloads are candidates and the most
expensive one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kubernetes_double.api.costs.sizes import (
    BOOL,
    BYTES,
    DOUBLE,
    DYN,
    INT,
    MOST,
    SCALAR,
    TEXT,
    UNKNOWN,
    Kind,
    Size,
    scaled,
)

TRAVERSAL = 0.1
"""Cost per character of a text that is traversed once."""
REGEX = 0.25
"""Cost per character of a pattern, of which one in four counts as a step of the automaton."""
_LONGEST_FORMAT = 128
_ADDRESS_BYTES = 32
_TEXTUAL = ("string", "bytes")


@dataclass(frozen=True)
class Value:
    """An expression's type, cost, size if any, and path.

    The path starts with a variable, except for a part of a result, whose path starts with its own
    field.
    """

    kind: Kind
    cost: int = 0
    size: Size | None = None
    path: tuple[str, ...] = ()
    number: int | None = None

    @property
    def extent(self) -> Size:
        """The size, or the full range if unknown."""
        return self.size or UNKNOWN


@dataclass(frozen=True)
class Use:
    """A call: its target (None for operators and functions) and arguments."""

    target: Value | None
    arguments: list[Value]
    item: Callable[[Value], Size]
    """The size of a list's items."""


@dataclass(frozen=True)
class Price:
    """The cost of a call alone, and the size of its result if the arguments determine it."""

    cost: int = 1
    size: Size | None = None


Pricing = Callable[[Use], Price]


@dataclass
class _Table:
    rows: dict[str, Pricing] = field(default_factory=dict[str, Pricing])

    def row(self, *names: str) -> Callable[[Pricing], Pricing]:
        def keep(pricing: Pricing) -> Pricing:
            self.rows.update(dict.fromkeys(names, pricing))
            return pricing

        return keep


_OPERATORS, _FUNCTIONS, _METHODS = _Table(), _Table(), _Table()


def price(function: str, use: Use) -> Price:
    """The cost of a call itself."""
    count = len(use.arguments)
    if use.target is not None:
        found = _METHODS.rows.get(function)
    else:
        found = _OPERATORS.rows.get(function) if count == 2 else None
        found = found or (_FUNCTIONS.rows.get(function) if count else None)
    try:
        return found(use) if found else Price()
    except IndexError:  # fewer arguments than any overload has
        return Price()


def _read_once(size: Size, times: float = 1) -> int:
    return scaled(size.high, times * TRAVERSAL)


def _pair(use: Use) -> tuple[Value, Value]:
    left, right = use.arguments
    return left, right


def _overloads(use: Use, *textual: str) -> tuple[bool, bool]:
    """Whether an overload for these kinds is a candidate, and whether any other one is."""
    names = {one.kind.name for one in use.arguments}
    if names & set(textual):
        return True, False
    return names == {"dyn"}, True


@_OPERATORS.row("==", "!=")
def _equal(use: Use) -> Price:
    left, right = _pair(use)
    return Price(scaled(min(left.extent.high, right.extent.high), TRAVERSAL))


@_OPERATORS.row("<", "<=", ">", ">=")
def _compare(use: Use) -> Price:
    textual, other = _overloads(use, *_TEXTUAL)
    return Price(max(_equal(use).cost if textual else 0, 1 if other else 0))


@_OPERATORS.row("+")
def _add(use: Use) -> Price:
    left, right = _pair(use)
    names = {left.kind.name, right.kind.name}
    size = left.extent.plus(right.extent)
    if "list" in names:
        return Price(1, size)
    textual, other = _overloads(use, *_TEXTUAL)
    return Price(max(_read_once(size), int(other)), size) if textual else Price()


@_OPERATORS.row("in")
def _contained(use: Use) -> Price:
    among = use.arguments[1]
    return Price(1 if among.kind.name == "map" else among.extent.high)


@_OPERATORS.row("sets.contains", "sets.intersects")
def _sets(use: Use) -> Price:
    left, right = _pair(use)
    return Price(min(left.extent.times(right.extent).high + 1, MOST))


@_OPERATORS.row("sets.equivalent")
def _equivalent(use: Use) -> Price:
    left, right = _pair(use)
    return Price(min(scaled(left.extent.times(right.extent).high, 2) + 1, MOST))


@_FUNCTIONS.row("bytes")
def _to_bytes(use: Use) -> Price:
    text = use.arguments[0]
    if text.kind.name not in ("string", "dyn"):
        return Price()
    return Price(_read_once(text.extent), text.extent.times(Size(1, 4)))


@_FUNCTIONS.row("string")
def _to_text(use: Use) -> Price:
    """Only the result of a conversion from bytes has a size."""
    given = use.arguments[0]
    if given.kind.name not in ("bytes", "dyn"):
        return Price()
    low, high = given.extent
    return Price(max(_read_once(given.extent), 1), Size(low // 4, high))


@_FUNCTIONS.row("strings.quote")
def _quoted(use: Use) -> Price:
    """Price quoting: every character may need an escape, plus two quotes."""
    low, high = use.arguments[0].extent
    return Price(_read_once(Size(low, high)), Size(low + 2, min(high * 2 + 2, MOST)))


@_FUNCTIONS.row("url")
def _location(use: Use) -> Price:
    size = use.arguments[0].extent
    return Price(_read_once(size), size)


@_FUNCTIONS.row("cidr", "ip", "isCIDR", "isIP", "quantity", "isQuantity", "semver", "isSemver")
def _parsed(use: Use) -> Price:
    return Price(_read_once(use.arguments[0].extent))


@_FUNCTIONS.row("ip.isCanonical")
def _parsed_and_compared(use: Use) -> Price:
    return Price(_read_once(use.arguments[0].extent, 2))


@_METHODS.row("format")
def _formatted(use: Use) -> Price:
    return Price(_read_once(_target(use).extent))


def _target(use: Use) -> Value:
    assert use.target is not None
    return use.target


@_METHODS.row("startsWith", "endsWith")
def _starts(use: Use) -> Price:
    return Price(_read_once(use.arguments[0].extent))


@_METHODS.row("contains")
def _contains(use: Use) -> Price:
    text, part = _target(use).extent, use.arguments[0].extent
    return Price(min(_read_once(text) * _read_once(part), MOST))


@_METHODS.row("matches")
def _matches(use: Use) -> Price:
    """Price a regex match; even an empty text costs, because of the pattern."""
    text, pattern = _target(use).extent, use.arguments[0].extent
    return Price(min(_read_once(text.plus(SCALAR)) * scaled(pattern.high, REGEX), MOST))


@_METHODS.row("find", "findAll")
def _find(use: Use) -> Price:
    return Price(_matches(use).cost, Size(0, _target(use).extent.high))


@_METHODS.row("lowerAscii", "upperAscii", "substring", "trim")
def _transformed(use: Use) -> Price:
    size = _target(use).extent
    return Price(_read_once(size), size)


@_METHODS.row("split")
def _split(use: Use) -> Price:
    """Price a split: every character may be an item, unless a limit is given."""
    size = _target(use).extent
    bound = use.arguments[1].number if len(use.arguments) > 1 else None
    most = size.high if bound is None else bound % 2**64
    return Price(_read_once(size, 2), Size(0, most))


@_METHODS.row("join")
def _join(use: Use) -> Price:
    target = _target(use)
    count, size = target.extent, Size(0, 0)
    if target.kind.item is not None:
        size = count.times(use.item(target))
    if use.arguments:
        gaps = Size(max(count.low - 1, 0), max(count.high - 1, 0))
        size = size.plus(use.arguments[0].extent.times(gaps))
    return Price(_read_once(size), size)


@_METHODS.row("replace")
def _replace(use: Use) -> Price:
    size = _target(use).extent
    old, new = use.arguments[0].extent, use.arguments[1].extent
    low, high = _shortest(size.low, old.high, new.low), _longest(size.high, old.low, new.high)
    return Price(_read_once(size, 2), Size(low, high))


def _longest(size: int, old: int, new: int) -> int:
    """Maximum size of a text after replacing its parts of one size by longer ones."""
    if old == 0:  # around every character
        return min(min(size + 1, MOST) * new + size, MOST)
    return size if new <= old else min(math.ceil(size / old) * new, MOST)


def _shortest(size: int, old: int, new: int) -> int:
    if old == 0:
        return min(min(size + 1, MOST) * new + size, MOST)
    return size if old <= new else min(math.ceil(size / old) * new, MOST)


@_METHODS.row("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf", "includes")
def _scan(use: Use) -> Price:
    """Price a scan of a list, per item and its text, or of a text."""
    target = _target(use)
    item = TEXT if target.kind.name == "map" else target.kind.item
    if item is None:
        return Price(_read_once(target.extent))
    each = 1 + (_read_once(use.item(target)) if item.name in _TEXTUAL else 0)
    return Price(min(target.extent.high * each, MOST))


@_METHODS.row("validate")
def _valid(use: Use) -> Price:
    once = _read_once(use.arguments[0].extent)
    return Price(scaled(once, _LONGEST_FORMAT * REGEX))


@_METHODS.row("containsIP")
def _contains_address(use: Use) -> Price:
    """Price an address comparison (16 bytes); a text is parsed first."""
    other = use.arguments[0]
    read = _read_once(other.extent) if other.kind.name in ("string", "dyn") else 0
    return Price(min(scaled(_ADDRESS_BYTES, TRAVERSAL) + read, MOST))


@_METHODS.row("containsCIDR")
def _contains_network(use: Use) -> Price:
    """Price a network comparison, which also masks one side."""
    masked = scaled(_ADDRESS_BYTES // 2, TRAVERSAL) + 1
    return Price(min(_contains_address(use).cost + masked, MOST))


_TEXTS = Kind("list", item=TEXT)
_RESULTS = {
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "!", "in", "bool"), BOOL),
    **dict.fromkeys(("contains", "startsWith", "endsWith", "matches", "isSorted"), BOOL),
    **dict.fromkeys(("sets.contains", "sets.intersects", "sets.equivalent", "includes"), BOOL),
    **dict.fromkeys(("isIP", "isCIDR", "isQuantity", "isSemver", "isURL", "isInteger"), BOOL),
    **dict.fromkeys(("isGreaterThan", "isLessThan", "containsIP", "containsCIDR"), BOOL),
    **dict.fromkeys(("ip.isCanonical", "isUnspecified", "isLoopback", "isGlobalUnicast"), BOOL),
    **dict.fromkeys(("isLinkLocalMulticast", "isLinkLocalUnicast", "@not_strictly_false"), BOOL),
    **dict.fromkeys(("size", "int", "indexOf", "lastIndexOf", "compareTo", "sign"), INT),
    **dict.fromkeys(("string", "format", "replace", "join", "find", "charAt", "reverse"), TEXT),
    **dict.fromkeys(("lowerAscii", "upperAscii", "substring", "trim", "strings.quote"), TEXT),
    **dict.fromkeys(("getScheme", "getHost", "getHostname", "getPort", "getEscapedPath"), TEXT),
    **dict.fromkeys(("split", "findAll"), _TEXTS),
    **dict.fromkeys(("+", "-", "*", "/", "%"), None),
    **dict.fromkeys(("uint", "timestamp", "duration"), INT),
    **dict.fromkeys(("asInteger", "prefixLength", "family", "major", "minor", "patch"), INT),
    "double": DOUBLE,
    "asApproximateFloat": DOUBLE,
    "bytes": BYTES,
    "add": Kind("quantity"),
    "sub": Kind("quantity"),
    "masked": Kind("cidr"),
    **{name: Kind(name) for name in ("quantity", "ip", "cidr", "url", "semver")},
}


def result(function: str, use: Use) -> Kind:
    """The type of a result if it matters for costs, else the dynamic type."""
    if function.startswith("get") and function not in _RESULTS:
        return INT  # a part of a time
    if use.target is not None and function in ("min", "max", "sum"):
        return use.target.kind.item or DYN
    if function not in _RESULTS:
        return DYN
    kinds = [one.kind for one in use.arguments if one.kind.name != "dyn"]
    # The item type of an empty list is unknown.
    kinds.sort(key=lambda kind: kind.item is not None and kind.item.name == "dyn")
    return _RESULTS[function] or (kinds[0] if kinds else DYN)
