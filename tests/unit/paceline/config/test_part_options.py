"""Every part of every installed method refuses wrong options at submit.

The checks are those of the gateway, `resolve_job` and `problems`. A message has the field, the
value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import resolve_job
from paceline.config.named import named, problems
from paceline.config.options import model_of, options_source
from paceline.errors import ConfigError
from paceline.errors.wording import shown
from paceline_harness.methods.parts import Part, parts, placed

JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact", {"kind": "exact", "name": "flawed", "weight": 0.0}],
    "trainer": {"objective": {"inert": True}},
}
PARTS = parts()
# By JSON type: values of another one, some of which would be converted by a lenient check, and what
# a message says is allowed.
OTHER_TYPES: dict[str, list[tuple[Any, str]]] = {
    "number": [("much", " valid number"), ("0.5", " valid number"), (True, " valid number")],
    "integer": [
        ("many", " valid integer"),
        ("8", " valid integer"),
        (8.5, " valid integer"),
        (True, " valid integer"),
    ],
    "boolean": [("perhaps", " valid boolean"), ("no", " valid boolean"), (1, " valid boolean")],
    "string": [(7, " valid string")],
    "object": [([1], "n object")],
}
Wrong = Iterator[tuple[Any, str]]


def schema_of(part: Part) -> dict[str, dict[str, Any]]:
    """The JSON schema of each option of a part."""
    source = options_source(part.kind, part.name)
    assert source is not None, f"nothing describes the options of {part}"
    return model_of(source, part.kind).model_json_schema(by_alias=True).get("properties", {})


def wrong_values(schema: Mapping[str, Any]) -> Wrong:
    """Values that an option must not have, and what of its bounds a message has to say."""
    for branch in schema.get("anyOf", [schema]):
        if "enum" in branch:
            yield "nonsense", " or ".join(map(repr, branch["enum"][-2:]))
            continue
        for value, allowed in OTHER_TYPES.get(branch["type"], ()):
            yield value, f"be a{allowed}"
        yield from _beyond(branch)


def _beyond(schema: Mapping[str, Any]) -> Wrong:
    if (limit := schema.get("exclusiveMinimum")) is not None:
        yield limit, f"greater than {limit:g}"
    if (limit := schema.get("minimum")) is not None:
        yield limit - 1, f"greater than or equal to {limit:g}"
    if (limit := schema.get("exclusiveMaximum")) is not None:
        yield limit, f"less than {limit:g}"
    if (limit := schema.get("maximum")) is not None:
        yield limit + 1, f"less than or equal to {limit:.15g}"
    if (limit := schema.get("maxLength")) is not None:
        yield "x" * (limit + 1), f"at most {limit} characters"
    if schema.get("type") in {"number", "integer"}:
        yield math.nan, "finite"
        yield math.inf, "finite"


def field_of(part: Part) -> str:
    """The field that has the options of a part."""
    (field,) = {
        each.options_field
        for each in named(resolve_job(placed(JOB, part)))
        if (each.kind, each.name) == (part.kind, part.name)
    }
    return field


def refusal(part: Part, options: Mapping[str, Any]) -> str:
    """What a user reads who submits a job with a part that has these options."""
    job = placed(JOB, replace(part, options={**part.options, **options}))
    try:
        return "; ".join(problems(resolve_job(job)))
    except ConfigError as error:
        return error.message


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_the_options_of_recipes_are_accepted(part: Part) -> None:
    assert refusal(part, {}) == ""


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_an_unknown_option_is_refused_with_those_that_there_are(part: Part) -> None:
    allowed = ", ".join(sorted(schema_of(part))) or "none"
    assert refusal(part, {"bogus": 1}) == (
        f"{field_of(part)}.bogus: unknown option of {part.name!r}; allowed: {allowed}"
    )


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_wrong_value_is_refused_with_what_is_allowed(part: Part) -> None:
    for option, schema in schema_of(part).items():
        for value, allowed in wrong_values(schema):
            message = refusal(part, {option: value})
            assert message.startswith(f"{field_of(part)}.{option}: "), message
            assert allowed in message, message
            # A boolean in place of a number is shown as in YAML.
            assert message.lower().endswith(f"(got {shown(value).lower()})"), message
