"""A job's code runs only in its own processes; shared services import plug-ins by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import parse_job
from paceline.config.named import problems
from paceline.errors import InvalidError
from paceline.isolation.code.modules import missing_modules, own_targets
from paceline.plugins import registry
from paceline.plugins.allowed import AllowedTargets

EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
"""


def spec_of(**changes: Any) -> Any:
    job = {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
    }
    return parse_job({**job, **changes})


@pytest.mark.parametrize(
    ("changes", "field", "known"),
    [
        ({"tasks": {"environment": "evil:f"}}, "tasks.environment", "arithmetic"),
        ({"experience": {"sampler": "evil:f"}}, "experience.sampler.kind", "dart_order, "),
        (
            {"experience": {"filters": ["zero_variance", "sys:exit"]}},
            "experience.filters.1.kind",
            "",
        ),
        (
            {"experience": {"advantage": "evil:f"}},
            "experience.advantage.kind",
            "d3s_episodes, dart_trim",
        ),
        ({"rollout": {"engine": "evil:f"}}, "rollout.engine.kind", "inexact, sglang"),
        ({"rollout": {"engine": ":"}}, "rollout.engine.kind", "inexact, sglang"),
    ],
)
def test_a_shared_process_imports_no_module_of_a_job(
    changes: dict[str, Any], field: str, known: str
) -> None:
    (line,) = problems(spec_of(**changes))
    assert line.startswith(f"{field}: '")
    assert f"is not installed; installed: {known}" in line
    assert "only rewards and slots of the objective may be named" in line


def test_rewards_and_slots_of_the_objective_may_be_modules_that_are_listed() -> None:
    spec = spec_of(
        reward=[{"kind": "mine:score"}], trainer={"objective": {"surrogate": "mine:loss"}}
    )
    listed = AllowedTargets.of(["mine:score", "mine:loss"])
    assert list(problems(spec, allowed=listed)) == []
    score, loss = problems(spec)
    assert score.startswith("reward.0.kind: 'mine:score' is not a function that jobs may name here")
    assert "`code: {path: ...}`" in score
    assert loss.startswith("trainer.objective.surrogate.kind: 'mine:loss' is not a function")
    assert "`code" not in loss  # code of jobs never enters a trainer


OWN = {"code": {"digest": "0" * 64}}


def test_what_may_come_with_a_job_is_left_to_its_own_processes() -> None:
    spec = spec_of(
        **OWN,
        tasks={"environment": "mine:WORLD"},
        reward=[{"kind": "mine:score"}],
        experience={
            "sampler": "mine:Order",
            "allocator": "mine:Sizes",
            "replay": "mine:Best",
            "filters": ["mine:keep"],
            "advantage": {"kind": "mine:values", "any": 1},
            "advantage_shaping": ["mine:shaped"],
        },
    )
    assert list(problems(spec)) == []
    assert list(problems(spec, in_process=True)) == []
    lines = list(missing_modules(own_targets(spec), ["other.py"]))
    fields = [line.partition(":")[0] for line in lines]
    assert fields == [
        "tasks.environment",
        "reward.0.kind",
        "experience.sampler.kind",
        "experience.allocator.kind",
        "experience.replay.kind",
        "experience.filters.0.kind",
        "experience.advantage.kind",
        "experience.advantage_shaping.0.kind",
    ]
    assert list(missing_modules(own_targets(spec), ["mine/__init__.py"])) == []


def test_other_kinds_do_not_come_with_a_job() -> None:
    (line,) = problems(spec_of(**OWN, sampling={"topology": "mine:f"}))
    assert line == (
        "sampling.topology.kind: 'mine:f': of the code that comes with a job only its environment, "
        "transform, rewards, sampler, allocator, replay, filters and advantages may be named"
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer": {"objective": {"surrogate": "mine:f"}}}, "trainer.objective.surrogate.kind"),
        ({"trainer": {"hooks": ["mine:f"]}}, "trainer.hooks.0.kind"),
    ],
)
def test_code_of_a_job_never_enters_its_trainer(changes: dict[str, Any], field: str) -> None:
    spec = spec_of(**OWN, **changes)
    (line,) = problems(spec)
    assert line.startswith(f"{field}: 'mine:f' is not a function that jobs may name here")
    assert list(problems(spec, allowed=AllowedTargets.of(["mine:f"]))) == []


@pytest.mark.parametrize("kind", sorted(set(registry.KINDS) - registry.FROM_MODULES))
def test_nothing_is_imported_by_path(kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidError, match="'evil:f' is not installed"):
        registry.find(kind, "evil:f")
    assert not (tmp_path / "imported").exists()
