from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.v1 import types_pb2
from paceline.v1.types_pb2 import TOKEN_SOURCE_POLICY
from paceline_trainer.columns import Columns, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.data import Layout
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.mismatch import (
    Differences,
    Mismatch,
    MismatchLimit,
    VersionCheck,
    choose,
)
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.versions import VersionSteps, WeightHistory


def make(
    path: Path,
    group: RankGroup,
    *,
    dtype: str = "float32",
    max_versions: int = 4,
    **options: Any,
) -> Mismatch:
    policy = load_policy(str(path))
    shard(policy, group, dtype=dtype)
    history = WeightHistory(policy, dtype=dtype, max_versions=max_versions, max_bytes=1 << 30)
    chosen: dict[str, Any] = {"num_sequences": 100, "budget": 10_000, **options}
    return Mismatch(group=group, history=history, versions=VersionSteps(group), **chosen)


def policy_of(mismatch: Mismatch) -> PolicyModel:
    return mismatch.history.policy


@torch.no_grad()
def move(policy: PolicyModel) -> None:
    for parameter in policy.parameters():
        parameter.mul_(1.1)


def publish(mismatch: Mismatch, version: int) -> None:
    mismatch.history.copy(version)
    mismatch.versions.published(version, version)


def weights_of(policy: PolicyModel) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.parameters()]


def true_logprobs(path: Path, samples: list[Any]) -> list[list[float]]:
    """Of the policy tokens of each sample, by the model alone."""
    model: Any = load_policy(str(path)).inner
    found: list[list[float]] = []
    for sample in samples:
        ids = torch.tensor(list(sample.tokens))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0].detach()
        scored = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        spans = [s for s in sample.spans if s.source == TOKEN_SOURCE_POLICY]
        found.append([x for s in spans for x in scored[s.start - 1 : s.end - 1].tolist()])
    return found


def truthful(path: Path, samples: list[Any]) -> list[Any]:
    """The samples, as an engine with the weights in `path` would have made them."""
    for sample, logprobs in zip(samples, true_logprobs(path, samples), strict=True):
        sample.logprobs[:] = logprobs
    return samples


@pytest.mark.parametrize("layout", ["padded", "tree"])
def test_tokens_are_compared_under_the_weights_that_sampled_them(
    llama: Path, group: RankGroup, make_samples: Any, layout: Layout
) -> None:
    mismatch = make(llama, group)
    data = columns(truthful(llama, make_samples(8, version=3)))
    publish(mismatch, 3)
    for version in (4, 5):
        move(policy_of(mismatch))
        publish(mismatch, version)
    now = weights_of(policy_of(mismatch))
    metrics = mismatch.start(data, layout)()
    assert metrics["logprob_diff_max"] < 1e-5
    assert metrics["mismatch_kl"] < 1e-8
    assert metrics["mismatch_tokens"] == data.num_tokens
    assert all(map(torch.equal, now, weights_of(policy_of(mismatch))))
    assert (metrics["versions_sampled"], metrics["versions_checked"]) == (1, 1)
    assert mismatch.start(data, layout)() == {"versions_sampled": 0, "versions_checked": 0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_may_change_the_weights_while_versions_are_checked(
    llama: Path, group: RankGroup, make_samples: Any, dtype: str
) -> None:
    data = columns(truthful(llama, make_samples(8, version=3)))
    alone, beside = make(llama, group, dtype=dtype), make(llama, group, dtype=dtype)
    for mismatch in (alone, beside):
        publish(mismatch, 3)
    expected = alone.start(data, "tree")()
    result = beside.start(data, "tree")
    for _ in range(20):
        move(policy_of(beside))
    now = weights_of(policy_of(beside))
    assert result() == expected
    assert all(map(torch.equal, now, weights_of(policy_of(beside))))


def test_a_wrong_label_shows(llama: Path, group: RankGroup, make_samples: Any) -> None:
    mismatch = make(llama, group)
    publish(mismatch, 3)
    move(policy_of(mismatch))
    publish(mismatch, 4)
    data = columns(truthful(llama, make_samples(8, version=4)))
    assert mismatch.start(data, "tree")()["logprob_diff_max"] > 1e-2


@pytest.mark.parametrize("layout", ["padded", "tree"])
def test_tokens_after_a_swap_are_left_out(
    llama: Path, group: RankGroup, make_samples: Any, layout: Layout
) -> None:
    mismatch = make(llama, group)
    publish(mismatch, 3)
    samples = truthful(llama, make_samples(8, version=3))
    kept = 0
    for sample in samples:
        some = (len(sample.logprobs) + 1) // 2
        kept += some
        sample.logprobs[some:] = [-9.0] * (len(sample.logprobs) - some)
        runs = [(3, some), (4, len(sample.logprobs) - some)]
        del sample.versions[:]
        sample.versions.extend(types_pb2.VersionRun(version=v, count=n) for v, n in runs)
    metrics = mismatch.start(columns(samples), layout)()
    assert metrics["mismatch_tokens"] == kept
    assert metrics["logprob_diff_max"] < 1e-5


def test_an_engine_that_is_wrong_for_three_versions_ends_the_job(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    mismatch, warned = make(llama, group), make(llama, group, on_excess="warn")
    made_up = make(llama, group, on_excess="pass")
    for version in (3, 4, 5):
        samples = truthful(llama, make_samples(4, version=version))
        for sample in samples:
            sample.logprobs[:] = [logprob - 1.0 for logprob in sample.logprobs]
        data = columns(samples)
        for each in (mismatch, warned, made_up):
            publish(each, version)
        assert "mismatch_noise" not in made_up.start(data, "tree")()
        assert warned.start(data, "tree")()["mismatch_kl"] > 0.5
        result = mismatch.start(data, "tree")
        if version < 5:
            found = result()
            assert found["mismatch_kl"] > 0.5
            assert found["mismatch_noise"] < 1e-9
    with pytest.raises(InvalidError, match=r"versions 3, 4, 5 is 0\.71.*on_excess: warn"):
        result()


def check_of(kl: float, noise: float | None) -> VersionCheck:
    return VersionCheck(0, Differences(10, 0, 10 * kl, 0), noise)


CHECKS = st.builds(
    check_of,
    st.sampled_from([0.0, 0.04, 0.06, 0.5, float("nan")]),
    st.sampled_from([None, 0.0, 0.01, 0.1]),
)


@given(checks=st.lists(st.lists(CHECKS, min_size=1, max_size=3), max_size=6))
def test_only_versions_running_beyond_noise_are_a_problem(checks: list[list[VersionCheck]]) -> None:
    limit, seen = MismatchLimit(), list[bool]()
    for some in checks:
        seen += [
            not (c.differences.kl <= 0.05 or c.differences.kl <= 20 * (c.noise or 0)) for c in some
        ]
        assert bool(limit.problem(some)) == (len(seen) > 2 and all(seen[-3:]))


def test_what_is_not_held_is_not_checked(llama: Path, group: RankGroup, make_samples: Any) -> None:
    mismatch = make(llama, group, max_versions=2)
    for version in (3, 4, 5):
        publish(mismatch, version)
    old = mismatch.start(columns(make_samples(4, version=3)), "tree")()
    assert old == {"versions_sampled": 1, "versions_checked": 0}
    unknown = mismatch.start(columns(make_samples(4, version=9)), "tree")()
    assert unknown == {"versions_sampled": 0, "versions_checked": 0}


def test_room_bounds_what_is_held(llama: Path, group: RankGroup) -> None:
    policy = load_policy(str(llama))
    shard(policy, group, dtype="float32")
    size = 4 * policy.num_parameters
    for room, held in ((0, 0), (size - 1, 0), (2 * size, 2), (100 * size, 3)):
        history = WeightHistory(policy, dtype="float32", max_versions=3, max_bytes=room)
        for step in range(5):
            history.copy(step)
        assert [step for step in range(5) if history.find(step) is not None] == list(
            range(5 - held, 5)
        )


def test_nothing_is_done_when_nothing_is_asked(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    mismatch = make(llama, group, num_sequences=0)
    publish(mismatch, 0)
    metrics = mismatch.start(columns(make_samples(4, version=0)), "tree")()
    assert metrics == {"versions_sampled": 1, "versions_checked": 0}


def table(runs: list[list[int]]) -> Columns:
    """Sequences of one prompt token and policy tokens of these versions."""
    counts = np.array([len(versions) for versions in runs], np.int64)
    versions = np.array([v for each in runs for v in each], np.int64)
    return Columns(
        tokens=np.zeros(int(counts.sum()) + len(runs), np.int64),
        token_starts=np.append(0, np.cumsum(counts + 1)),
        positions=np.concatenate([np.arange(1, n + 1) for n in counts]),
        policy_starts=np.append(0, np.cumsum(counts)),
        behaviour=np.zeros(len(versions), np.float32),
        advantages=np.zeros(len(versions), np.float32),
        versions=versions,
        temperatures=np.ones(len(runs), np.float32),
        weights=np.ones(len(runs), np.float32),
        rows=np.arange(len(runs)),
        replaced=np.zeros(len(runs), np.bool_),
    )


@settings(deadline=None)
@given(
    runs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    limit=st.integers(1, 4),
    budget=st.integers(1, 30),
)
def test_the_longest_runs_within_the_budget_are_chosen(
    runs: list[list[int]], limit: int, budget: int
) -> None:
    rows, lengths = choose(table(runs), 1, limit=limit, budget=budget)
    leading = {
        row: next((i for i, v in enumerate(versions) if v != 1), len(versions))
        for row, versions in enumerate(runs)
        if versions[0] == 1
    }
    assert bool(len(rows)) == bool(leading)
    assert len(rows) <= limit
    assert [leading[row] for row in rows.tolist()] == lengths.tolist()
    assert sorted(lengths.tolist(), reverse=True) == lengths.tolist()
    if len(rows):
        assert lengths[0] == max(leading.values())
    fed = max((len(runs[row]) for row in rows.tolist()), default=0) * len(rows)
    assert fed <= budget or len(rows) == 1


@pytest.mark.slow
def test_two_ranks_measure_together(
    llama: Path, make_samples: Any, run_ranks: Any, tmp_path: Path
) -> None:
    samples = truthful(llama, make_samples(25, version=3))
    job: dict[str, Any] = {"path": str(llama), "objectives": [{}], "version": 3}
    job["samples"] = [sample.SerializeToString().hex() for sample in samples]
    data = columns(samples)
    job["header"] = [data.num_sequences, data.num_tokens]
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks(2, "step", tmp_path)
    (metrics,) = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["mismatch_tokens"] == data.num_tokens
    assert metrics["logprob_diff_max"] < 1e-5
    assert (metrics["versions_sampled"], metrics["versions_checked"]) == (1, 1)
