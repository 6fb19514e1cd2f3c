"""Declarations of plug-ins: read the same way everywhere, and only from installed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.config.named import patterns, problems
from paceline.platform.fair_queue import FairQueue
from paceline.plugins import RewardInput, declared, declares
from paceline.plugins.allowed import AllowedTargets
from paceline.types import Task
from paceline_reward.parts import read_parts
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer


def spec_of(**changes: Any) -> Any:
    job = {
        "name": "sums",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": "exact"}],
    }
    return parse_job({**job, **changes})


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "pairwise"])
def test_an_advantage_that_compares_episodes_needs_groups(kind: str) -> None:
    alone = {"advantage": kind, "group_size": 1}
    (line,) = problems(spec_of(experience=alone))
    assert line.startswith(f"experience.group_size: 1 with advantage '{kind}', which compares")
    assert not list(problems(spec_of(experience={**alone, "group_size": 2})))
    # A plug-in without declarations for the gateway is checked where it runs.
    assert not list(problems(spec_of(experience={"advantage": "short", "group_size": 1})))


def test_an_unknown_need_is_refused() -> None:
    (line,) = problems(spec_of(experience={"advantage": "unheard_of"}))
    assert line.startswith(
        "experience.advantage: advantage 'unheard_of' needs 'telepathy', "
        "which is unknown; known: entropy, group>=2, memory, ratio, reference, "
    )


def test_a_need_may_depend_on_options() -> None:
    class Options:
        pass

    found = declares(needs=lambda options: ("reference",) if options.get("kl") else ())(Options)
    assert declared(found).needs_with({"kl": 0.0}) == ()
    assert declared(found).needs_with({"kl": 0.1}) == ("reference",)


def test_what_the_trainer_computes_is_refused_to_nobody() -> None:
    slots = {"corrections": ["high_entropy"], "regularisers": [{"kind": "kl", "coef": 0.1}]}
    assert not list(problems(spec_of(trainer={"objective": slots})))


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo", "bapo"])
def test_clipping_that_cannot_act_is_refused(kind: str) -> None:
    (line,) = problems(spec_of(trainer={"objective": {"surrogate": kind}}))
    assert line.startswith(f"trainer.objective.proximal: 'batch' with surrogate '{kind}'")
    assert "allowed: another proximal policy such as 'behaviour', more mini-batches" in line
    for trainer in (
        {"objective": {"surrogate": kind, "proximal": "behaviour"}},
        {"objective": {"surrogate": kind}, "mini_batches": 2},
        {"objective": {"surrogate": kind, "inert": True}},
        {"objective": {"corrections": ["tis"]}},
        {},
    ):
        spec = spec_of(trainer=trainer)
        assert not list(problems(spec))
        # The accepted job has all values, and stays acceptable.
        assert not list(problems(parse_job(spec.model_dump(mode="json"))))


def test_only_installed_rewards_run_inline() -> None:
    kinds = ["rushed", "exact", "regex", "silent", "paceline_test_declaring:quick"]
    section = json.dumps([{"kind": kind, **_options(kind)} for kind in kinds])
    parts = read_parts(section, allowed=AllowedTargets.of(kinds))
    assert [part.inline is not None for part in parts] == [True, True, False, False, False]


def _options(kind: str) -> dict[str, str]:
    return {"pattern": "x"} if kind == "regex" else {}


def test_regular_expressions_are_found_by_their_mark() -> None:
    reward = [{"kind": "regex", "pattern": "a+"}, {"kind": "rushed", "mark": "b+"}, "silent"]
    found = patterns(spec_of(reward=reward))
    assert found == {"reward.0.pattern": "a+", "reward.1.mark": "b+"}


async def test_a_reward_loads_before_the_timeout_of_its_first_score(tmp_path: Path) -> None:
    pool = ChildPool(plain_children(), FairQueue(1))
    item = RewardInput("g/0", Task("t", "arithmetic", "{}"), "")
    section = json.dumps([{"kind": "silent", "note": str(tmp_path / "loaded"), "timeout_s": 60.0}])
    try:
        (score,) = await Scorer(pool=pool).score(section, [item])
    finally:
        await pool.close()
    assert score.reward == 1.0
