"""`stop.when`: every row counts once, and the first condition that is met ends the job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.lifecycle.stopping import StopCondition
from paceline.enums import JobState
from paceline.errors import ConfigError
from paceline_experience.ledger.lifecycle.conditions import advanced
from paceline_experience.ledger.records import WatchRecord, parse_record, record_text
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

EVAL: dict[str, Any] = {"every": 1, "tasks": 2, "options": {"split": "heldout"}}


def condition(**fields: Any) -> StopCondition:
    return StopCondition.model_validate(fields)


def row(step: int, kind: str = "train", **values: Any) -> dict[str, Any]:
    return {"step": step, "kind": kind, "values": values}


GOAL = condition(metric="eval/reward", above=0.9, **{"for": 2})
GUARD = condition(metric="train/kl_behaviour", above=0.1, end="failed")
rows_of_values = st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=30)


@given(values=rows_of_values, restarts=st.sets(st.integers(0, 30)), size=st.integers(1, 4))
def test_restarts_change_nothing(values: list[float | None], restarts: set[int], size: int) -> None:
    """It is met by the same row as in one go, whatever is read again from the store."""
    goal = condition(metric="train/x", above=0.5, **{"for": size})
    rows = [row(n, "train", x=v) for n, v in enumerate(values, 1)]
    whole, *expected = advanced([goal], WatchRecord(), rows)
    watch, found = WatchRecord(), [None, ""]
    while watch.offset < len(rows) and found == [None, ""]:
        step = 1 if watch.offset in restarts else 3
        watch, *found = advanced([goal], watch, rows[watch.offset : watch.offset + step])
        watch = parse_record(WatchRecord, record_text(watch))
    assert (watch, found) == (whole, expected)
    run = best = 0
    for value in values:
        if value is not None:
            run = run + 1 if value > 0.5 else 0
            best = max(best, run)
    assert (expected[0] is not None) == (best >= size)


def test_a_step_that_is_trained_again_does_not_count_again() -> None:
    goal = condition(metric="train/x", above=0.5, **{"for": 3})
    rows = [row(1, x=1.0), row(2, x=1.0), row(2, x=1.0), row(1, x=0.0), row(3, x=1.0)]
    watch, met, text = advanced([goal], WatchRecord(), rows[:4])
    assert met is None
    assert watch.streaks == {0: 2}
    _, met, text = advanced([goal], watch, rows[4:])
    assert (met, text) == (goal, "train/x above 0.5 for 3 rows: 1 at step 3")


def test_evaluations_are_kept_apart_and_incomplete_ones_do_not_count() -> None:
    named = condition(metric="eval/hard/pass@4", above=0.5)
    rows = [
        row(1, "eval", reward=1.0, complete=False),
        row(1, "eval", reward=1.0, complete=True),
        row(1, "eval", set="hard", complete=True, **{"pass@4": 0.5}),
        row(1, kl_behaviour=0.05),
    ]
    watch, met, _ = advanced([GOAL, GUARD, named], WatchRecord(), rows)
    assert met is None
    assert watch.streaks == {0: 1, 1: 0, 2: 0}
    rows = [row(2, "eval", set="hard", complete=True, **{"pass@4": 0.75})]
    assert advanced([GOAL, GUARD, named], watch, rows)[1] == named


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_goal_ends_the_job_with_success(
    store: Store, tmp_path: Path, sites: Sites, restarts: bool
) -> None:
    site = sites(store, tmp_path)
    when = [{"metric": "train/reward_mean", "above": 0.4, "for": 3}]
    await site.submit(stop={"steps": 100, "when": when})
    await site.begin(0)
    for step in range(1, 4):
        assert not (await site.ledger()).stopping
        assert await site.train() == (None if step < 3 else "finished")
        if restarts:
            await site.die()
    assert (await site.take(3)).stop == "finished"
    await site.sweep()
    status = await site.status()
    assert (status.state, status.step) == (JobState.SUCCEEDED, 3)
    assert status.reason == "train/reward_mean above 0.4 for 3 rows: 0.5 at step 3"


async def test_a_guard_ends_the_job_as_failed(store: Store, tmp_path: Path, sites: Sites) -> None:
    site = sites(store, tmp_path)
    when = [{"metric": "train/response_tokens_mean", "below": 4, "end": "failed"}]
    await site.submit(stop={"steps": 100, "when": when})
    await site.begin(0)
    await site.train()
    status = await site.status()
    assert status.state is JobState.FAILED
    assert status.reason == "stop.when: train/response_tokens_mean below 4: 3 at step 1"


async def test_a_goal_on_an_evaluation(store: Store, tmp_path: Path, sites: Sites) -> None:
    site: Site = sites(store, tmp_path)
    when = [{"metric": "eval/reward", "above": -1, "for": 2}]
    await site.submit(eval=EVAL, stop={"steps": 100, "when": when})
    await site.begin(0)
    await site.play()
    await site.sweep()
    assert not (await site.ledger()).stopping
    await site.train()
    await site.play()
    await site.sweep()
    assert (await site.ledger()).stopping


@pytest.mark.parametrize(
    ("when", "problem"),
    [
        ({"metric": "eval/reward"}, r"stop.when.0: above: or `below`, and not both, is needed"),
        ({"metric": "eval/hard/reward", "above": 1}, r"'hard' is not an evaluation of `evals`"),
        ({"metric": "loss", "above": 1}, r"stop.when.0.metric"),
        ({"metric": "train/loss", "above": 1, "for": 0}, r"stop.when.0.for"),
    ],
)
def test_what_could_never_be_met_is_refused(when: dict[str, Any], problem: str) -> None:
    job = {
        "name": "a",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "stop": {"when": [when]},
    }
    with pytest.raises(ConfigError, match=problem):
        parse_job(job)


def test_a_spec_survives_the_store() -> None:
    job = {
        "name": "a",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "stop": {"when": [{"metric": "eval/reward", "above": 0.95, "for": 3}]},
    }
    spec = parse_job(job)
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec
    assert '"for":3' in spec.model_dump_json()
