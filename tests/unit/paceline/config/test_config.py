from copy import deepcopy
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}],
}


def changed(dotted: str, value: Any) -> dict[str, Any]:
    raw = deepcopy(MINIMAL)
    *parents, last = dotted.split(".")
    here = raw
    for key in parents:
        here = here.setdefault(key, {})
    here[last] = value
    return raw


def test_a_minimal_job_gets_the_defaults() -> None:
    spec = parse_job(MINIMAL)
    assert spec.experience.max_staleness == 4
    assert spec.trainer.objective.surrogate.kind == "ppo_clip"
    assert spec.reward[0].part == "exact"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("trainer.optimiser", {}, "trainer.optimiser: unknown field; allowed here: checkpoint,"),
        (
            "stop.when",
            [{"metric": "train/loss", "above": 1.0, "rows": 3}],
            "stop.when.0.rows: unknown field; allowed here: above, below, end, for, metric",
        ),
        ("experience.max_staleness", -1, "experience.max_staleness: Input should be greater than"),
        ("experience.batch_groups", "many", "experience.batch_groups: Input should be a valid int"),
        ("sampling.temperature", float("inf"), "sampling.temperature: Input should be a finite"),
        ("reward", [{"kind": "exact", "weight": float("nan")}], "reward.0.weight: Input should be"),
        ("sampling.max_tokens", 4096, "sampling.max_tokens: 4096 leaves no room for a prompt"),
        ("trainer.publish_every", 6, "trainer.publish_every: 6 with experience.max_staleness 4"),
        ("name", "Not A Name", "name: String should match pattern"),
        ("reward", [], "reward: List should have at least 1 item"),
        ("reward", ["exact", "exact"], "two parts are named 'exact'"),
        ("rollout.activation", "whenever", "rollout.activation: Input should be 'in_flight', "),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(changed(field, value))
    assert says in str(caught.value)


def test_a_missing_section_is_named() -> None:
    raw = {key: value for key, value in MINIMAL.items() if key != "model"}
    with pytest.raises(ConfigError, match="model: is missing"):
        parse_job(raw)


def test_a_plugin_may_be_a_bare_name_and_keeps_its_options() -> None:
    spec = parse_job(changed("trainer.objective", {"corrections": [{"kind": "tis", "cap": 3.0}]}))
    assert spec.trainer.objective.corrections[0].options == {"cap": 3.0}
    spec = parse_job(changed("trainer.objective", {"surrogate": "gspo"}))
    assert spec.trainer.objective.surrogate.kind == "gspo"


def test_an_objective_of_one_kind_is_refused_with_the_slots() -> None:
    for old in ("grpo", {"kind": "decoupled_ppo", "clip": 0.2}):
        with pytest.raises(ConfigError, match=r"trainer\.objective: .*made of slots.*surrogate"):
            parse_job(changed("trainer.objective", old))


def test_the_spec_survives_json() -> None:
    spec = parse_job(MINIMAL)
    assert parse_job(spec.model_dump(mode="json")) == spec


def test_a_stored_job_of_0_1_0_drops_the_site_option() -> None:
    job = changed("experience.advantage", {"kind": "rloo", "site": "experience"})
    advantage = parse_job(job).experience.advantage
    assert (advantage.kind, advantage.options) == ("rloo", {})
