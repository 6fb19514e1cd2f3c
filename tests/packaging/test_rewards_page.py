"""What docs/rewards.md shows is what job files accept."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.load import validate
from paceline.config.service import EndpointsFile
from paceline.plugins import registry
from paceline.testing.rewards import item
from paceline.types import Score
from paceline_reward.parts import read_parts

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return [part.split("```")[0] for part in PAGE.split(f"```{language}\n")[1:]]


YAML: list[dict[str, Any]] = [yaml.safe_load(text) for text in blocks("yaml")]


@pytest.mark.parametrize("part", [each for each in YAML if "reward" in each])
def test_rewards_of_the_page_are_accepted(part: dict[str, Any]) -> None:
    section = part["reward"]
    assert len(read_parts(json.dumps(section), has_code="code" in part)) == len(section)


def test_endpoints_of_the_page_are_accepted() -> None:
    (given,) = [each for each in YAML if "endpoints" in each]
    assert set(validate(EndpointsFile, given).endpoints) == {"local", "openai"}


def test_the_function_of_the_page_scores() -> None:
    space: dict[str, Any] = {}
    (source,) = blocks("python")
    exec(source, space)
    assert space["short"](item("word " * 60), words=30) == 0.5
    empty = space["short"](item(""))
    assert isinstance(empty, Score)
    assert empty.status == "parse_error"


@pytest.mark.parametrize("kind", sorted({*registry.built_in("rewards")} - {"python"}))
def test_every_built_in_reward_and_its_options_are_on_the_page(kind: str) -> None:
    assert f"`{kind}`" in PAGE
    if kind in {"math", "numeric", "format", "length", "json_schema", "code", "judge"}:
        section = PAGE.split(f"\n## {kind}\n")[1].split("\n## ")[0]
        options = [*inspect.signature(registry.find("rewards", kind)).parameters][1:]
        for option in options:
            if option not in {"programs", "endpoints"}:
                assert f"`{option}`" in section, option
