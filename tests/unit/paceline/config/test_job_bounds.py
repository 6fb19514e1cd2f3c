"""Everything in a job file is bounded, and an error names field, value and what is allowed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.base import MAX_OPTIONS_BYTES, MAX_OPTIONS_DEPTH
from paceline.config.job import JobSpec
from paceline.config.load import parse_job
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.reasoning_gym.tasks import ReasoningGymTasks
from paceline.errors import ConfigError, InvalidError

SCHEMA = JobSpec.model_json_schema()
MINIMAL: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}],
}


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field that is not a section, with its path."""
    if "$ref" in schema:
        yield from leaves(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], path)
        return
    if "anyOf" in schema:
        for branch in schema["anyOf"]:
            yield from leaves(branch, path)
        return
    if schema.get("properties"):
        for name, field in schema["properties"].items():
            yield from leaves(field, f"{path}.{name}" if path else name)
        return
    if schema.get("type") == "array":
        for item in [schema["items"]] if "items" in schema else schema["prefixItems"]:
            yield from leaves(item, f"{path}[]")
    yield path, schema


def is_bounded(schema: dict[str, Any]) -> bool:
    match schema.get("type"):
        case "integer" | "number":
            low = {"minimum", "exclusiveMinimum"} & schema.keys()
            return bool(low and {"maximum", "exclusiveMaximum"} & schema.keys())
        case "string":
            return bool({"maxLength", "enum", "const"} & schema.keys()) or "{0,51}" in str(
                schema.get("pattern")
            )
        case "array":
            return "maxItems" in schema
        case "object":
            return "maxProperties" in schema
        case kind:
            return kind in {"boolean", "null"}


def test_every_field_has_a_maximum() -> None:
    found = dict(leaves(SCHEMA))
    assert len(found) > 80
    assert [path for path, schema in found.items() if not is_bounded(schema)] == []


def job(path: str, value: Any) -> dict[str, Any]:
    """A job with one field set."""
    *sections, last = path.split(".")
    raw: dict[str, Any] = {
        name: dict(v) if name != "reward" else v
        for name, v in MINIMAL.items()
        if isinstance(v, (dict, list))
    } | {"name": "j"}
    here = raw
    for section in sections:
        here = here.setdefault(section, {})
    here[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "most"),
    [
        ("trainer.world_size", 10**15, 4096),
        ("stop.steps", 10**9, 1_000_000),
        ("eval.tasks", 10**9, 1_000_000),
        ("rollout.replicas", 10**6, 10_000),
        ("experience.batch_groups", 10**9, 65_536),
    ],
)
def test_an_error_names_field_value_and_maximum(path: str, value: int, most: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(job(path, value))
    assert caught.value.message.startswith(f"{path}: ")
    assert str(value) in caught.value.message
    assert f"less than or equal to {most}" in caught.value.message


NUMBERS = [
    path
    for path, schema in leaves(SCHEMA)
    if schema.get("type") in {"integer", "number"} and "[]" not in path
]


@given(st.sampled_from(NUMBERS), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_numbers_must_be_finite(path: str, value: float) -> None:
    with pytest.raises(ConfigError, match="^" + path.split(".")[0]):
        parse_job(job(path, value))


def test_a_batch_is_bounded_as_a_whole() -> None:
    experience = {"batch_groups": 60_000, "group_size": 4000}
    with pytest.raises(ConfigError, match="240000000 episodes in a batch; at most 262144"):
        parse_job(MINIMAL | {"experience": experience})


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (nested(MAX_OPTIONS_DEPTH), "levels deep; at most 16"),
        (nested(60), "levels deep; at most 16"),
        ("a" * MAX_OPTIONS_BYTES, "bytes; at most 65536"),
        ("\ud800", None),
        (float("nan"), r"\.x: Input should be a finite number \(got nan\)"),
    ],
)
@pytest.mark.parametrize("place", ["tasks.options", "eval.options", "rollout.engine", "reward"])
def test_options_of_plugins_are_bounded(place: str, value: Any, says: str | None) -> None:
    options = {"x": value} if "options" in place else {"kind": "exact", "x": value}
    raw = job(place, [options] if place == "reward" else options)
    if says is None:
        parse_job(raw)  # as JSON it is plain ASCII
        return
    with pytest.raises(ConfigError, match=says):
        parse_job(raw)


def test_a_large_collection_costs_nothing() -> None:
    tracemalloc.start()
    try:
        tasks = ArithmeticTasks(digits=9, operations=["+", "-", "*"])
        assert len(tasks) > 10**17
        assert tasks[len(tasks) - 1].payload
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"template": "{a:60000000}"}, "allowed in braces: a, op, b, without a format"),
        ({"template": "{a.__class__}"}, "allowed in braces"),
        ({"template": "{a!r}"}, "allowed in braces"),
        ({"template": "{"}, "template"),
        ({"template": "{a}" * 2000}, "6000 characters; at most 4096"),
        ({"digits": 10}, "allowed: 1 to 9"),
        ({"operations": ["+"] * 10_000}, "each once"),
        ({"size": -1}, "at least 0"),
    ],
)
def test_options_of_arithmetic(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidError, match=says):
        ArithmeticTasks(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 10**12}, "allowed: 0 to 10000000"),
        ({"min_terms": 10**9}, "min_terms: 1000000000; at most 1000 is allowed for 'chain_sum'"),
        (
            {"dataset": "composite", "datasets": [{"name": "chain_sum", "config": {"x": 1e300}}]},
            "datasets: 1e",
        ),
    ],
)
def test_options_of_reasoning_gym(options: dict[str, Any], says: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InvalidError, match=says):
        ReasoningGymTasks(**options)
