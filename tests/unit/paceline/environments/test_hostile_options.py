"""Options of installed environments that name files, modules or attributes of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from reasoning_gym.factory import DATASETS

from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.gymnasium.options import GymnasiumOptions
from paceline.environments.reasoning_gym.tasks import ReasoningGymTasks
from paceline.environments.reasoning_gym.world import ReasoningGym
from paceline.environments.texts import filled
from paceline.environments.verifiers.options import VerifiersOptions
from paceline.errors import InvalidError
from paceline.plugins import registry

SECRET = "agivensecretwithoutspaces"


def text_options() -> Iterator[tuple[str, str]]:
    """Each data set with its options that are annotated as text, or have a text as default."""
    for name, (_, config) in sorted(DATASETS.items()):
        for each in fields(config):
            if "str" in str(each.type) or isinstance(each.default, str):
                yield name, each.name


@pytest.mark.parametrize(("name", "option"), [*text_options()])
def test_no_option_of_a_data_set_shows_a_file(name: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text(f"{SECRET}\n" * 100)
    above = f"{'../' * 40}{path}"
    for value in (str(path), above, [str(path)], {"a": [str(path)]}, f"x/../{above}"):
        options: dict[str, Any] = {option: value, "size": 2}
        with pytest.raises(InvalidError, match="looks like a path"):
            ReasoningGymTasks(dataset=name, **options)
        with pytest.raises(InvalidError, match="looks like a path"):
            ReasoningGym(dataset=name, **options)


def test_files_and_operators_that_come_with_data_sets_are_options() -> None:
    words = ReasoningGymTasks(dataset="spell_backward", size=2, data_file="words3to10.txt")
    assert "Spell this word" in json.loads(words[0].payload)["question"]
    operators = ["+", "/"]
    sums = ReasoningGymTasks(dataset="basic_arithmetic", size=2, operators=operators)
    assert "Calculate" in json.loads(sums[0].payload)["question"]


@pytest.mark.parametrize("operator", ["**", "+__import__('os').getpid()+", "or", ",", "if 1 else"])
def test_data_sets_evaluate_no_operators_of_jobs(operator: str) -> None:
    """In the service of experience: what is made there is evaluated there."""
    with pytest.raises(InvalidError):
        ReasoningGymTasks(dataset="basic_arithmetic", size=2, operators=[operator])


@pytest.mark.parametrize(
    "name",
    [
        "composite_:x",
        "reasoning_gym.code.codeio:CodeIODataset",
        "os:system",
        "../chain_sum",
        "__class__",
        "",
    ],
)
def test_a_data_set_is_one_that_is_registered(name: str) -> None:
    with pytest.raises(InvalidError, match="not registered"):
        ReasoningGymTasks(dataset=name)


@pytest.mark.parametrize(
    "name",
    [
        "strangers:FrozenLake-v1",
        "strangers:ns/FrozenLake-v1",
        "FrozenLake-v1:strangers",
        "strangers\uff1aFrozenLake-v1",  # a full-width colon
        "FrozenLake-v1\n",
        "ns/strangers:FrozenLake-v1",
        "a/b/FrozenLake-v1",
    ],
)
def test_an_id_of_gymnasium_has_no_module(name: str) -> None:
    with pytest.raises(ValidationError):
        GymnasiumOptions(id=name)


@pytest.mark.parametrize(
    "name", ["strangers:load", "../strangers", "/strangers", "a/../b/c", "a b", "-m", "strangers\n"]
)
def test_an_id_of_verifiers_is_a_plain_name(name: str) -> None:
    with pytest.raises(ValidationError):
        VerifiersOptions(id=name, size=1)


@pytest.mark.parametrize(
    "template",
    ["{a.__class__}", "{a.real}", "{op[0]}", "{a!r}", "{0}", "{}", "{a:{b}}", "{__self__}"],
)
def test_a_template_of_arithmetic_reaches_no_attribute(template: str) -> None:
    with pytest.raises(InvalidError, match=r"^tasks\.options\.template"):
        ArithmeticTasks(template=template)


@pytest.mark.parametrize(
    "template", ["{observation.__class__}", "{a[0]}", "{a!r}", "{a:>9}", "%(a)s"]
)
def test_a_template_of_observations_reaches_no_attribute(template: str) -> None:
    assert filled(template, {"a": "1", "observation": "2"}, option="template") == template


@pytest.mark.parametrize(
    "name", ["strangers:ENVIRONMENT", "paceline.environments.dataset:ENVIRONMENT"]
)
def test_mixtures_name_installed_environments_only(name: str) -> None:
    from paceline.environments.dataset.world import Dataset, mixable

    assert "dataset" in registry.installed("environments")
    with pytest.raises(InvalidError, match="is not installed"):
        mixable(name)
    world = Dataset(sources=[{"environment": name}])
    with pytest.raises(InvalidError, match="is not installed"):
        _ = world.replayable
