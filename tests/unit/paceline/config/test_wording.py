"""Refusals speak of YAML, with an example where the shape is wrong, and never of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast, get_args

import pytest
from pydantic import BaseModel, ValidationError

from paceline.config import JobSpec, ServiceSettings
from paceline.config.limits import LimitSettings
from paceline.config.load import explain, validate
from paceline.errors import ConfigError, InvalidError
from paceline.generation.samplers.staged import Staged

PYTHON = re.compile(
    r"instance of|dictionary|tuple|frozenset|\bNone\b|Spec\b|after validation|pydantic"
)
WRONG: tuple[Any, ...] = ("x", 5, -1, 0.5, True, None, [], [1], ["x", "y"], {}, {"a": 1}, "x" * 500)


def models(root: Any, seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """All models that a file of a model consists of."""
    if isinstance(root, type) and issubclass(root, BaseModel) and root not in seen:
        seen.add(root)
        yield root
        for field in root.model_fields.values():
            yield from models(field.annotation, seen)
    for inner in get_args(root):
        yield from models(inner, seen)


@pytest.mark.parametrize("root", [JobSpec, ServiceSettings, LimitSettings])
def test_no_refusal_shows_a_type_of_python(root: type[BaseModel]) -> None:
    for model in models(root, set()):
        for name, field in model.model_fields.items():
            for value in WRONG:
                try:
                    model.model_validate({field.alias or name: value})
                except ValidationError as error:
                    text = explain(error, model)
                    assert not PYTHON.search(text), (model, name, value)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        (
            "trainer.lora",
            True,
            "trainer.lora: Input should be a mapping, for example `lora: {rank:",
        ),
        ("stop", 20, "stop: Input should be a mapping, for example `stop: {steps: 20}` (got 20)"),
        ("data", "rows.jsonl", "`data: {path: rows.jsonl}`"),
        ("eval", True, "`eval: {every: "),
        ("reward", "exact", "reward: Input should be a list, for example `reward: [exact]`"),
        ("reward", {"kind": "exact"}, "`reward: [{kind: exact}]`"),
        ("trainer.optimizer", "adamw", "`optimizer: {kind: adamw}`"),
        ("name", None, "name: Input should be a valid string (got null)"),
    ],
)
def test_a_wrong_shape_gets_an_example_that_is_accepted(
    field: str, value: Any, wanted: str
) -> None:
    raw: dict[str, Any] = {}
    *sections, last = field.split(".")
    place = raw
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    with pytest.raises(ConfigError) as refused:
        validate(JobSpec, raw)
    assert wanted in refused.value.message


def test_stages_of_a_sampler_are_refused_by_field() -> None:
    with pytest.raises(InvalidError) as refused:
        Staged(10, seed=0, stages=cast(Any, [{"share": "many"}]))
    text = refused.value.message
    assert "experience.sampler.stages.0.share: Input should be a valid number" in text
    assert "\n" not in text
