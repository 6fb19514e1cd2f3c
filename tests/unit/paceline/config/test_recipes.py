"""Recipes are laid under a job's own values, once, at submit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import load_job, parse_job, resolve_job
from paceline.config.named import problems
from paceline.config.recipes import JOINED, recipe, with_recipes
from paceline.errors import ConfigError
from paceline.front.client.calls import with_uploads
from paceline.plugins import registry

JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}, {"kind": "exact", "name": "flawed", "weight": 0.0}],
}
RECIPES = sorted(registry.installed("recipes"))
# Those that leave each other's fields alone.
APART = ("tis", "kl", "entropy", "outcome_exploration", "xrpo", "gdpo")


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Values by dotted field; lists are values."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {
        field: inner
        for key, each in value.items()
        for field, inner in flat(each, f"{path}.{key}".lstrip(".")).items()
    }


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_valid_job(name: str) -> None:
    spec = resolve_job(JOB | {"recipe": name})
    assert list(problems(spec)) == []
    dumped = flat(json.loads(spec.model_dump_json()))
    for field, value in flat(recipe(name).fragment()).items():
        if field not in JOINED:
            assert dumped[field] == value


@pytest.mark.parametrize("name", RECIPES)
def test_an_accepted_job_needs_its_recipe_no_more(name: str) -> None:
    spec = resolve_job(JOB | {"recipe": [name]})
    stored = json.loads(spec.model_dump_json())
    assert resolve_job(stored) == spec
    assert parse_job(stored | {"recipe": ["gone"]}).trainer == spec.trainer


@given(st.sampled_from(RECIPES), st.data())
def test_what_the_job_sets_wins(name: str, data: st.DataObject) -> None:
    fragment = recipe(name).fragment()
    settable = [field for field in flat(fragment) if field not in JOINED and ".kind" not in field]
    if not settable:
        return
    field = data.draw(st.sampled_from(settable))
    job = dict(JOB, recipe=[name])
    here = job
    *parents, last = field.split(".")
    source: Any = fragment
    for key in parents:
        source = source[key]
        here[key] = {"kind": source["kind"]} if "kind" in source else {}
        here = here[key]
    here[last] = "mine"
    laid = flat(with_recipes(job))
    assert laid[field] == "mine"
    others = {each: value for each, value in flat(fragment).items() if each not in {field, *JOINED}}
    assert {each: laid[each] for each in others} == others


@given(st.permutations(APART), st.integers(0, len(APART)))
def test_recipes_compose_in_steps_as_at_once(order: list[str], cut: int) -> None:
    at_once = with_recipes(JOB | {"recipe": order[:cut]})
    assert with_recipes(at_once) == at_once
    lists = {field: value for field, value in flat(at_once).items() if field in JOINED}
    for field in JOINED - {"reward"}:
        entries = [
            entry for name in order[:cut] for entry in flat(recipe(name).fragment()).get(field, [])
        ]
        assert lists.get(field, []) == entries


def test_a_plug_in_of_another_kind_replaces_that_of_the_recipe() -> None:
    job = JOB | {"recipe": "dapo", "trainer": {"objective": {"surrogate": "gspo"}}}
    objective = resolve_job(job).trainer.objective
    assert (objective.surrogate.kind, objective.surrogate.options) == ("gspo", {})
    same = JOB | {"recipe": "cispo", "trainer": {"objective": {"surrogate": "cispo"}}}
    assert resolve_job(same).trainer.objective.surrogate.options == {"low": 1.0, "high": 0.2}


def test_a_list_of_the_job_replaces_that_of_the_recipe_but_rewards_are_added() -> None:
    job = JOB | {"recipe": ["tis", "dapo"], "trainer": {"objective": {"corrections": ["icepop"]}}}
    spec = resolve_job(job)
    assert [each.kind for each in spec.trainer.objective.corrections] == ["icepop"]
    assert [each.part for each in spec.reward] == ["exact", "flawed", "overlong"]
    own = job | {"reward": ["exact", {"kind": "overlong", "weight": 0.0}]}
    assert [each.weight for each in resolve_job(own).reward] == [1.0, 0.0]


def test_a_conflict_names_both_recipes_and_the_job_can_settle_it() -> None:
    job = JOB | {"recipe": ["kl", "dapo", "gspo"]}
    with pytest.raises(ConfigError) as caught:
        resolve_job(job)
    assert str(caught.value).startswith(
        "recipe: 'dapo' and 'gspo' set trainer.objective.proximal to {'kind': 'behaviour'} and "
        "{'kind': 'batch'}; set it in the job itself"
    )
    trainer = {"objective": {"proximal": "batch", "surrogate": "gspo", "aggregation": "token_mean"}}
    settled = resolve_job(job | {"trainer": trainer}).trainer
    assert settled.objective.surrogate.options == {"low": 3e-4, "high": 4e-4}
    assert settled.mini_batches == 4


def test_the_same_part_with_other_options_is_a_conflict() -> None:
    with pytest.raises(ConfigError, match=r"'grpo' and 'kl' set trainer\.objective\.regularisers"):
        resolve_job(JOB | {"recipe": ["grpo", "kl"]})


def test_a_recipe_of_ones_own_is_a_file_beside_the_job(tmp_path: Path) -> None:
    own = {
        "experience": {"group_size": 6, "filters": [{"kind": "mean_reward", "low": 0.1}]},
        "trainer": {"objective": {"surrogate": {"kind": "ppo_clip", "high": 0.3}}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB | {"recipe": ["tis", "mine.yaml"]}))
    spec = load_job(path)
    assert spec.recipe == ("tis",)
    assert (spec.experience.group_size, spec.experience.filters[0].kind) == (6, "mean_reward")
    assert spec.trainer.objective.surrogate.options == {"high": 0.3}
    # As the SDK sends it, whose gateway sees no files.
    sent, _ = with_uploads(path, ExitStack())
    assert resolve_job(sent).trainer == resolve_job(spec.model_dump(mode="json")).trainer
    path.write_text(yaml.safe_dump(JOB | {"recipe": "other.yaml"}))
    with pytest.raises(ConfigError, match=r"recipe: .*other\.yaml: .*no such file"):
        load_job(path)
    with pytest.raises(ConfigError, match=r"recipe: 'mine\.yaml' is not installed"):
        resolve_job(JOB | {"recipe": "mine.yaml"})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("m2pp", "recipe: 'm2pp' is not installed; did you mean 'm2po'?"),
        (["tis", "/etc/passwd"], "recipe: '/etc/passwd' is not installed; installed: bapo,"),
        (7, "recipe: Input should be a list"),
        ([["tis"]], "recipe.0: Input should be a valid string"),
        (["tis"] * 17, "recipe: List should have at most 16 items"),
        ("x" * 1000, "recipe.0: String should have at most 253 characters"),
        ({"tis": 1}, "recipe: Input should be a list"),
    ],
)
def test_what_is_not_a_recipe_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_job(JOB | {"recipe": value})
    assert str(caught.value).startswith(says)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["trainer", "objective", "surrogate", "kind", "reward", "filters"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_a_job_has_in_place_of_a_section_is_refused_by_its_field(odd: Any) -> None:
    for key in ("trainer", "experience", "reward", "sampling"):
        job = JOB | {"recipe": ["dapo", "tis"], key: odd}
        assert with_recipes(job)["name"] == "a"
