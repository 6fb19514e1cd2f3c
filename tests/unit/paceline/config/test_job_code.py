"""A job's code runs only in its own processes; shared services import plug-ins by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import parse_job
from paceline.config.named import problems
from paceline.errors import InvalidError
from paceline.plugins import registry

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
        ({"rollout": {"engine": "evil:f"}}, "rollout.engine.kind", "sglang, simulated"),
        ({"rollout": {"engine": ":"}}, "rollout.engine.kind", "sglang, simulated"),
    ],
)
def test_a_shared_process_imports_no_module_of_a_job(
    changes: dict[str, Any], field: str, known: str
) -> None:
    (line,) = problems(spec_of(**changes))
    assert line.startswith(f"{field}: '")
    assert f"is not installed; installed: {known}" in line
    assert "only rewards and slots of the objective may be module:attribute" in line


def test_rewards_and_slots_of_the_objective_may_be_modules() -> None:
    spec = spec_of(
        reward=[{"kind": "mine:score"}], trainer={"objective": {"surrogate": "mine:loss"}}
    )
    assert list(problems(spec)) == []


@pytest.mark.parametrize("kind", sorted(set(registry.KINDS) - registry.FROM_MODULES))
def test_nothing_is_imported_by_path(kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidError, match="'evil:f' is not installed"):
        registry.find(kind, "evil:f")
    assert not (tmp_path / "imported").exists()
