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
from paceline_trainer.step.mismatch.choice import choose
from paceline_trainer.step.mismatch.comparison import Mismatch
from paceline_trainer.step.mismatch.verdicts import Differences, MismatchLimit, WorkerCheck
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


WRONG, WORKERS = "rollout-2", [f"rollout-{number}" for number in range(4)]


def sampled_by_four(path: Path, samples: list[Any], *, off_by: float) -> Columns:
    """The samples, of four workers in turn, of which one has log-probs that are off."""
    for place, sample in enumerate(truthful(path, samples)):
        name = WORKERS[place % 4]
        for run in sample.versions:
            run.worker = name
        if name == WRONG:
            sample.logprobs[:] = [logprob - off_by for logprob in sample.logprobs]
    return columns(samples, WORKERS)


@pytest.mark.parametrize("num_sequences", [100, 2])
def test_the_worker_of_four_that_is_wrong_is_at_fault(
    llama: Path, group: RankGroup, make_samples: Any, num_sequences: int
) -> None:
    """Over all four, its mismatch may stay below what is allowed."""
    mismatch = make(llama, group, num_sequences=num_sequences)
    at_fault = list[str]()
    overall = list[float]()
    for version in range(3 * 4 // min(num_sequences, 4)):
        samples = make_samples(16, version=version, seed=version)
        publish(mismatch, version)
        metrics = mismatch.start(sampled_by_four(llama, samples, off_by=0.45), "tree")()
        overall.append(metrics["mismatch_kl"])
        by_worker = {each.worker_id: each for each in mismatch.verdicts}
        assert all(each.kl < 1e-6 for name, each in by_worker.items() if name != WRONG)
        if WRONG in by_worker:
            assert by_worker[WRONG].kl == pytest.approx(0.118, abs=0.001)
            assert by_worker[WRONG].since_version is not None
        at_fault += [name for name, each in by_worker.items() if each.at_fault]
    assert at_fault == [WRONG]
    if num_sequences == 100:
        assert max(overall) < 0.05


def test_a_worker_that_is_always_late_is_compared_too(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    mismatch = make(llama, group, num_sequences=2)
    seen = set[str]()
    for version in range(6):
        publish(mismatch, version)
        fresh = truthful(llama, make_samples(4, version=version))
        late = truthful(llama, make_samples(4, version=max(version - 1, 0), seed=1))
        for sample, name in [*((s, "fast") for s in fresh), *((s, "slow") for s in late)]:
            for run in sample.versions:
                run.worker = name
        some = [*fresh, *(late if version else [])]
        metrics = mismatch.start(columns(some, ["fast", "slow"]), "tree")()
        assert (metrics["versions_sampled"], metrics["versions_checked"]) == (1, 1)
        seen |= {each.worker_id for each in mismatch.verdicts}
    assert seen == {"fast", "slow"}


class Model:
    """What `MismatchLimit` has to say, from the whole story."""

    def __init__(self) -> None:
        self.versions: list[dict[str, bool]] = []  # whether each worker disagreed

    def streak(self, worker: str) -> list[int]:
        """The last versions running in which a worker was compared and disagreed."""
        numbers = [n for n, some in enumerate(self.versions) if worker in some]
        agreed = [n for n in numbers if not self.versions[n][worker]]
        return [n for n in numbers if n > max(agreed, default=-1)][-3:]

    def at_fault(self, worker: str) -> bool:
        streak = self.streak(worker)
        if len(streak) < 3:
            return False
        return any(not wrong for some in self.versions[streak[0] :] for wrong in some.values())

    @property
    def fails(self) -> bool:
        return len(self.versions) > 2 and all(all(some.values()) for some in self.versions[-3:])


KLS = st.sampled_from([0.0, 0.04, 0.06, 0.5, float("nan")])
NOISES = st.sampled_from([None, 0.0, 0.01, 0.1])
ROUND = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.tuples(KLS, NOISES), min_size=1, max_size=3
)


@given(rounds=st.lists(ROUND, max_size=9))
def test_who_is_at_fault_and_when_the_job_fails(
    rounds: list[dict[str, tuple[float, float | None]]],
) -> None:
    limit, model = MismatchLimit(), Model()
    for version, some in enumerate(rounds):
        model.versions.append(
            {name: not kl <= max(0.05, 20 * (noise or 0)) for name, (kl, noise) in some.items()}
        )
        checks = [
            WorkerCheck(worker, version, Differences(10, 0, 10 * kl, 0), noise)
            for worker, (kl, noise) in some.items()
        ]
        verdicts = {each.worker_id: each for each in limit.take(checks)}
        assert verdicts.keys() == some.keys()
        for worker, verdict in verdicts.items():
            streak = model.streak(worker)
            assert verdict.since_version == (streak[0] if streak else None)
            assert verdict.at_fault == model.at_fault(worker)
        assert bool(limit.problem) == model.fails


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
        workers=np.zeros(len(versions), np.int64),
        worker_names=("",),
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
    rows, lengths = choose(table(runs), 1, limit=limit, budget=budget, checked={})
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
