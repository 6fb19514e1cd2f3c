"""Costs of CEL rules, each worked out by hand from what the server's estimate counts.

A variable, a field and most calls cost 1, a constant nothing; reading text costs a tenth of its
size; a pattern counts a quarter of its size for each tenth of the text. A request has 3145728
bytes, so text without a bound has up to 3145726 characters.
"""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes_double.api.costs import (
    check_costs,
    costs,
)
from kubernetes_double.api.costs.estimate import estimate
from kubernetes_double.api.costs.sizes import declared
from kubernetes_double.api.costs.syntax import Call, Literal, Name, Select, read
from kubernetes_double.api.resources.custom import check_definition

ADVICE = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, "
    "maps, and strings are declared)"
)
Object = dict[str, Any]
TEXT: Object = {"type": "string"}
WHOLE: Object = {"type": "integer"}
WORD: Object = {"type": "string", "maxLength": 10}  # 40 bytes at most
PLACE = "spec.validation.openAPIV3Schema"


def listing(items: Object, **bounds: int) -> Object:
    return {"type": "array", "items": items, **bounds}


def table(values: Object, **bounds: int) -> Object:
    return {"type": "object", "additionalProperties": values, **bounds}


def record(**fields: Object) -> Object:
    return {"type": "object", "properties": fields}


def ruled(schema: Object, *rules: str) -> Object:
    return {**schema, "x-kubernetes-validations": [{"rule": rule} for rule in rules]}


def definition(*schemas: Object) -> Object:
    """One version for each schema."""
    versions = [
        {"name": f"v{n}", "storage": n == 1, "schema": {"openAPIV3Schema": schema}}
        for n, schema in enumerate(schemas, 1)
    ]
    spec = {"group": "a.dev", "names": {"plural": "trials"}, "versions": versions}
    return {"metadata": {"name": "trials.a.dev"}, "spec": spec}


@pytest.mark.parametrize(
    ("rule", "schema", "cost"),
    [
        ("self > 1", WHOLE, 2),
        ("self == oldSelf", record(), 2),  # an object with listed fields has no size
        ("has(self.a) && self.a > 0", record(a=WHOLE), 1 + 3),  # has() itself is free
        ("self.matches('^a')", TEXT, 1 + 314573),
        ("self.matches('^a')", WORD, 1 + 5),  # (40 + 1) / 10, rounded up
        ("self.matches('^abcdefg$')", WORD, 1 + 5 * 3),
        ("self.contains('abcdefghijkl')", WORD, 1 + 4 * 2),
        ("self.startsWith('abcdefghijkl')", TEXT, 1 + 2),  # only the needle is read
        ("self == 'abc'", TEXT, 1 + 1),  # the shorter one counts
        ("self < oldSelf", WORD, 2 + 4),
        ("size(self + 'ab') > 3", WORD, 1 + 5 + 1 + 1),
        ("self.split(',').size() > 1", WORD, 1 + 8 + 1 + 1),
        ("self.replace('a', 'bcd') == oldSelf", WORD, 2 + 8 + 4),
        ("self.lowerAscii().upperAscii() == self", WORD, 1 + 4 + 4 + 1 + 4),
        ("string(self) == 'a'", WHOLE, 1 + 1 + 1),
        ("self in ['a', 'b', 'c']", TEXT, 1 + 10 + 3),
        ("self[0] in self", listing(WORD, maxItems=7), 3 + 7),
        ("self['a'] > 0 && 'a' in self", table(WHOLE), 3 + 2),
        ("{'a': 1}.size() == [1].size()", WHOLE, 30 + 1 + 10 + 1 + 1),
        ("self > 1 ? self < 9 : true", WHOLE, 2 + 2),
        # Per item: two for the loop, one for the result, plus the cost of the predicate.
        ("self.all(x, x > 0)", listing(WHOLE, maxItems=10), 2 + 10 * 5),
        ("self.all(x, x > 0)", listing(WHOLE), 2 + 1572863 * 5),  # a digit and a comma each
        ("self.exists(x, x > 0)", listing(WHOLE, maxItems=10), 2 + 10 * 6),
        ("self.exists_one(x, x > 0)", listing(WHOLE, maxItems=10), 3 + 10 * 4),
        ("self.filter(x, x > 0).size() > 1", listing(WHOLE, maxItems=10), 14 + 10 * 15),
        ("self.map(x, x + 1).size() > 1", listing(WHOLE, maxItems=10), 14 + 10 * 14),
        ("self.all(k, self[k] > 0)", table(WHOLE, maxProperties=4), 2 + 4 * 7),
        ("self.all(k, true)", table(WHOLE), 2 + 449389 * 3),  # 7 bytes for an entry
        ("self.all(x, x.matches('^a'))", listing(WORD, maxItems=10), 2 + 10 * (3 + 6)),
        ("self.isSorted()", listing(WORD, maxItems=10), 1 + 10 * 5),
        ("self.join(',') == ''", listing(WORD, maxItems=10), 1 + 41),  # 400 and 9 commas
        ("sets.contains(self, [1, 2])", listing(WHOLE, maxItems=10), 1 + 10 + 10 * 2 + 1),
    ],
)
def test_an_expression_costs(rule: str, schema: Object, cost: int) -> None:
    kind = declared(schema)
    assert kind is not None
    assert estimate(rule, kind) == cost


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        (TEXT, 3145726),
        ({"type": "string", "maxLength": 5}, 20),
        ({"type": "string", "enum": ["a", "abc"]}, 3),
        ({"type": "string", "format": "date-time"}, 32),
        ({"type": "string", "format": "byte", "maxLength": 5}, 5),
        ({"x-kubernetes-int-or-string": True, "maxLength": 5}, 20),
        (listing(TEXT), 3145726 // 3),
        (listing({**record(a=TEXT), "required": ["a"]}), 3145726 // 10),
        (table(listing(WHOLE)), 3145726 // 8),
        (listing(TEXT, maxItems=4), 4),
        (record(a=TEXT), 0),
    ],
)
def test_a_schema_bounds_its_values(schema: Object, most: int) -> None:
    kind = declared(schema)
    assert kind is not None
    assert kind.most == most


def test_rules_see_neither_lists_of_anything_nor_fields_without_a_type() -> None:
    anything = {"x-kubernetes-preserve-unknown-fields": True}
    assert declared({"type": "array", "items": anything}) is None
    kind = declared(record(**{"a-b": WHOLE, "for": WHOLE, "any": anything}))
    assert kind is not None
    assert set(kind.fields) == {"a__dash__b", "__for__"}


def test_a_rule_below_lists_runs_for_each_item() -> None:
    inner = ruled(WHOLE, "self > 1")
    bounded = record(a=listing(table(inner, maxProperties=20), maxItems=10))
    assert [one.cost for one in costs(bounded, PLACE)] == [10 * 20 * 2]
    # An unbounded list is limited only by the request size: a digit and a comma each.
    loose = record(a=listing(table(inner), maxItems=10))
    (found,) = costs(loose, PLACE)
    assert found.cost == 1572864 * 2
    assert found.place == (
        f"{PLACE}.properties[a].items.additionalProperties.x-kubernetes-validations[0].rule"
    )


def test_a_message_is_made_once() -> None:
    rule = {"rule": "self > 1", "messageExpression": "'a' + 'b'"}
    schema = listing({**WHOLE, "x-kubernetes-validations": [rule]}, maxItems=10)
    assert [(one.title, one.cost) for one in costs(schema, "")] == [
        ("rule", 20),
        ("messageExpression", 1),
    ]


def messages(causes: list[Object]) -> list[tuple[str, str]]:
    assert {one["reason"] for one in causes} <= {"FieldValueForbidden"}
    return [(one["field"], one["message"].removesuffix(f" {ADVICE}")) for one in causes]


DEAR = f"self.a.matches('{'a' * 128}')"
"""2 and 314573 * 32: a little over the budget of 10 million."""


def test_text_without_a_bound_is_too_long_for_a_long_pattern() -> None:
    found = messages(check_definition(definition(ruled(record(a=TEXT), DEAR))))
    place = f"{PLACE}.x-kubernetes-validations[0].rule"
    why = "Forbidden: estimated rule cost exceeds budget by factor of 1.006634x"
    assert found == [(place, why)]
    assert check_definition(definition(ruled(record(a=WORD), DEAR))) == []


def test_lists_in_lists_without_a_bound_are_too_many() -> None:
    rule = "self.a.all(x, x.all(y, y > 0))"
    found = messages(check_costs(ruled(record(a=listing(listing(WHOLE))), rule), PLACE))
    # The rule itself, its part in the whole, and the whole.
    assert len(found) == 3
    assert found[0][1].endswith("estimated rule cost exceeds budget by factor of more than 100x")
    bounded = record(a=listing(listing(WHOLE, maxItems=100), maxItems=100))
    assert check_costs(ruled(bounded, rule), "") == []


def test_a_factor_is_precise_where_it_is_small() -> None:
    dear = record(a=listing(ruled(TEXT, "self.matches('^a')"), maxItems=100))
    (found,) = messages(check_costs(dear, ""))
    assert found[1].endswith("exceeds budget by factor of 3.1x")


def test_all_rules_together_have_a_budget() -> None:
    rule = f"self.a.matches('{'a' * 40}')"  # 2 and 314573 * 10
    assert check_costs(ruled(record(a=TEXT), *[rule] * 31), PLACE) == []
    found = messages(check_costs(ruled(record(a=TEXT), *[rule] * 32), PLACE))
    assert [why for _, why in found] == [
        *["Forbidden: contributed to estimated rule cost total exceeding cost limit for entire "
          "OpenAPIv3 schema"] * 4,
        "Forbidden: x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema "
        "exceeds budget by factor of 1.006634x",
    ]  # fmt: skip
    assert found[-1][0] == PLACE


def test_an_existing_rule_may_stay() -> None:
    old, cheap = ruled(record(a=TEXT), DEAR), record(a=TEXT)
    assert check_definition(definition(old), definition(old)) == []
    assert check_definition(definition(old), definition(cheap)) != []
    both = definition(cheap, old)
    (found,) = messages(check_definition(both, definition(cheap)))
    assert found[0] == "spec.versions[1].schema.openAPIV3Schema.x-kubernetes-validations[0].rule"


def test_names_of_objects_have_no_bound() -> None:
    rule = "self.metadata.name.matches('^a')"
    assert [one.cost for one in costs(ruled(record(), rule), "")] == [3 + 314573]
    metadata = record(name=WORD, generateName=WORD)
    declared_all = record(kind=TEXT, apiVersion=TEXT, metadata=metadata)
    assert [one.cost for one in costs(ruled(declared_all, rule), "")] == [3 + 5]


@pytest.mark.parametrize(
    ("source", "tree"),
    [
        ("-1", Literal("int", 1, 1)),
        ("--a", Name("a")),
        ("!(a)", Call("!", (Name("a"),))),
        ("a + b * c", Call("+", (Name("a"), Call("*", (Name("b"), Name("c")))))),
        ("a - b - c", Call("-", (Call("-", (Name("a"), Name("b"))), Name("c")))),
        ("a || b && c", Call("||", (Name("a"), Call("&&", (Name("b"), Name("c")))))),
        ("has(a.b) // why", Select(Name("a"), "b", test=True)),
        ("a.b(c)[d]", Call("[]", (Call("b", (Name("c"),), Name("a")), Name("d")))),
        (r"'\u00e9\n\'\x41'", Literal("string", 4)),
        (r"""r'\d"'""", Literal("string", 3)),
        ('"""a"b\n"""', Literal("string", 4)),
        (r"b'é\x00'", Literal("bytes", 3)),
        ("0x1f", Literal("int", 1, 31)),
        ("7u", Literal("uint")),
        ("1.5e3", Literal("double")),
        ("null", Literal("null")),
    ],
)
def test_expressions_are_read(source: str, tree: Any) -> None:
    assert read(source) == tree


@pytest.mark.parametrize("source", ["", "a +", "(a", "a b", "'a", "has(a)", "a ? b", "in", "a.1b"])
def test_what_is_no_expression_is_not_read(source: str) -> None:
    with pytest.raises(ValueError, match=r"Syntax error|invalid argument"):
        read(source)
