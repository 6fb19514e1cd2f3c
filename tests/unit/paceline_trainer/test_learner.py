from __future__ import annotations

import json
import math
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.base import PluginSpec
from paceline.config.job import OptimizerSpec
from paceline.config.objective import ObjectiveSpec
from paceline.errors import InvalidError
from paceline.methods.objective.load import load_objective
from paceline.methods.parts.slots import StepScale
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.plugins import StrictModel
from paceline.plugins.allowed import AllowedTargets
from paceline_trainer.columns import Share, columns
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy, load_reference
from paceline_trainer.step.mismatch.comparison import Mismatch
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import VersionSteps, WeightHistory, local

# Adam makes a whole step of a gradient that is rounding only, unless its epsilon is larger.
ABOVE_ROUNDING = 1e-5
UNBOUNDED = {"corrections": [{"kind": "behaviour_weight", "upper": None}]}
OBJECTIVES: list[dict[str, Any]] = [
    {"aggregation": "token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "seq_mean_token_mean", "corrections": ["m2po"], "surrogate": "bapo"},
    {"aggregation": {"kind": "seq_mean_token_sum_norm", "norm": 9}},
    {"corrections": ["high_entropy", "tis"], "regularisers": [{"kind": "entropy", "coef": 0.1}]},
    {"hooks": ["vcpo_step"], "proximal": "interpolated"},
    {
        "shaping": ["echo_hybrid"],
        "corrections": ["dart_steps"],
        "surrogate": {"kind": "otr", "mode": "sampled", "samples": 16},
    },
    {
        "corrections": ["mis"],
        "aggregation": {"kind": "seq_mean_token_mean", "denominator": "after_masks"},
    },
]


def share_of(samples: list[Any], *, step: int = 0) -> Share:
    data = columns(samples)
    return Share("b", step, data.num_sequences, data.num_tokens, tuple(samples))


def make(
    path: Path, group: RankGroup, *, dtype: str = "float32", lr: float = 1e-2, **options: Any
) -> tuple[PolicyModel, Learner]:
    budget = options.pop("budget", 100_000)
    mini_batches = options.pop("mini_batches", 1)
    keeps = options.pop("keeps", False)
    hooks = [PluginSpec(kind=each) for each in options.pop("hooks", ())]
    plugin = ObjectiveSpec.model_validate(UNBOUNDED | options)
    policy = load_policy(str(path))
    shard(policy, group, dtype=dtype)
    listed = AllowedTargets.of(each.kind for each in hooks)
    objective = load_objective(plugin, hooks, allowed=listed)
    history = WeightHistory(policy, dtype=dtype, max_versions=4, max_bytes=1 << 30)
    checks = Mismatch(
        group=group,
        history=history,
        versions=VersionSteps(group),
        num_sequences=0,
        budget=budget,
    )
    needed = "reference" in objective.needs
    reference = load_reference(str(path), group, dtype=dtype) if needed else None
    learner = Learner(
        policy=policy,
        optimizer=Optimizer(policy, OptimizerSpec(lr=lr, eps=ABOVE_ROUNDING), total_steps=10),
        objective=objective,
        reference=reference,
        group=group,
        budget=budget,
        mini_batches=mini_batches,
        mismatch=checks if keeps else None,
    )
    if keeps:
        history.copy(0)
    return policy, learner


def weights_of(policy: PolicyModel) -> torch.Tensor:
    full = [local(p.detach()) for p in policy.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in full])


@pytest.mark.parametrize("options", OBJECTIVES)
def test_micro_batches_are_one_batch(
    llama: Path, group: RankGroup, make_samples: Any, options: dict[str, Any]
) -> None:
    share = share_of(make_samples(24))
    one, two = make(llama, group, **options), make(llama, group, budget=40, **options)
    whole, parts = one[1].step(share), two[1].step(share)
    assert whole["loss"] == pytest.approx(parts["loss"], abs=1e-5)
    assert whole["grad_norm"] == pytest.approx(parts["grad_norm"], rel=1e-5)
    assert torch.allclose(weights_of(one[0]), weights_of(two[0]), atol=1e-4)


@pytest.mark.slow
def test_two_ranks_are_one_rank(
    llama: Path, group: RankGroup, make_samples: Any, run_ranks: Any, tmp_path: Path
) -> None:
    samples = make_samples(25)
    (tmp_path / "job.json").write_text(
        json.dumps(
            {
                "path": str(llama),
                # In the last one the second rank has five sequences for eight updates.
                "objectives": [*OBJECTIVES, {"mini_batches": 8, "corrections": ["m2po"]}],
                "samples": [s.SerializeToString().hex() for s in samples],
                "header": [len(samples), columns(samples).num_tokens],
            }
        )
    )
    run_ranks(2, "step", tmp_path)
    found = json.loads((tmp_path / "metrics.json").read_text())
    weights = torch.from_numpy(np.load(tmp_path / "weights.npy"))
    assert np.isfinite(found.pop()["loss"])
    for options, together, both in zip(OBJECTIVES, found, weights[:-1], strict=True):
        policy, learner = make(llama, group, **options)
        alone = learner.step(share_of(samples))
        for name in ("loss", "grad_norm", "tokens", "sequences", "ratio", "entropy_estimate"):
            assert together[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-5), (options, name)
        assert torch.allclose(weights_of(policy), both, atol=1e-4), options


def test_tokens_that_are_all_masked_move_nothing(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    policy, learner = make(llama, group, corrections=[{"kind": "mis", "lower": 1e6, "upper": 1e7}])
    before = weights_of(policy)
    metrics = learner.step(share_of(make_samples(8)))
    assert metrics["mis_zeroed"] == 1.0
    assert metrics["skipped_updates"] == 1.0
    assert torch.equal(weights_of(policy), before)


def test_nothing_to_train_moves_nothing(llama: Path, group: RankGroup, make_samples: Any) -> None:
    policy, learner = make(llama, group)
    learner.step(share_of(make_samples(8)))
    before = weights_of(policy)
    masked, flat = make_samples(4, seed=1), make_samples(4, seed=2)
    for sample in masked:
        sample.masked = True
    for sample in flat:
        sample.advantages[:] = [0.0]
    for samples in (masked, flat):
        metrics = learner.step(share_of(samples, step=1))
        assert metrics["skipped_updates"] == 1
        assert metrics["loss"] == 0
    assert torch.equal(before, weights_of(policy))


@pytest.mark.parametrize("surrogate", ["ppo_clip", "otr"])
def test_what_is_not_finite_moves_nothing_and_ends_the_job_at_the_third_step(
    llama: Path,
    group: RankGroup,
    make_samples: Any,
    caplog: pytest.LogCaptureFixture,
    surrogate: str,
) -> None:
    policy, learner = make(llama, group, surrogate=surrogate)
    learner.step(share_of(make_samples(8)))
    before = weights_of(policy)
    bad = make_samples(8, seed=1)
    bad[3].advantages[:] = [float("inf")]
    for step in (1, 2):
        assert learner.step(share_of(bad, step=step))["nonfinite_updates"] == 1
    assert torch.equal(before, weights_of(policy))
    named = [vars(record)["event"]["groups"] for record in caplog.records]
    assert named == [bad[3].group_id] * 2
    assert learner.step(share_of(make_samples(8, seed=2), step=3))["nonfinite_updates"] == 0
    for step in (4, 5):
        learner.step(share_of(bad, step=step))
    with pytest.raises(InvalidError, match="in 3 steps in a row, the last one step 7"):
        learner.step(share_of(bad, step=6))


def half(whole: WholeBatch, options: StrictModel) -> StepScale:
    del options
    return StepScale(0.5, {"tokens": float(whole.scale_tokens)})


def never(whole: WholeBatch, options: StrictModel) -> StepScale:
    del whole, options
    return StepScale(0.0)


def test_hooks_scale_and_veto_an_update(llama: Path, group: RankGroup, make_samples: Any) -> None:
    share = share_of(make_samples(8))
    moved: dict[str, float] = {}
    for hooks in ((), ("half",), ("half", "half"), ("never", "half")):
        policy, learner = make(llama, group, hooks=[f"{__name__}:{each}" for each in hooks])
        before = weights_of(policy)
        metrics = learner.step(share)
        moved["".join(hooks)] = float((weights_of(policy) - before).norm())
        assert metrics.get("lr_factor", 1.0) == (0.0 if "never" in hooks else 0.5 ** len(hooks))
        assert metrics["skipped_updates"] == ("never" in hooks)
    # AdamW's first step has the length of the learning rate.
    assert moved["half"] == pytest.approx(moved[""] / 2, rel=1e-3)
    assert moved["halfhalf"] == pytest.approx(moved[""] / 4, rel=1e-3)
    assert moved["neverhalf"] == 0.0


def test_mini_batches_update_more_than_once(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    share = share_of(make_samples(16))
    _, once = make(llama, group)
    _, thrice = make(llama, group, mini_batches=3)
    assert once.step(share)["ratio_max"] == pytest.approx(1.0)
    metrics = thrice.step(share)
    assert metrics["ratio_max"] > 1.0
    assert metrics["tokens"] == share.total_tokens


def test_weights_stay_while_another_thread_copies_them(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    policy, learner = make(llama, group)
    assert policy.whole
    before, share = weights_of(policy).clone(), share_of(make_samples(8))
    copying = Future[None]()
    policy.copied_by(copying)
    with ThreadPoolExecutor(1) as compute:
        step = compute.submit(learner.step, share)
        with pytest.raises(TimeoutError):
            step.result(2.0)
        assert torch.equal(weights_of(policy), before)
        copying.set_result(None)
        step.result(60.0)
    assert not torch.equal(weights_of(policy), before)
    broken = Future[None]()
    broken.set_exception(MemoryError("no memory for the copy"))
    policy.copied_by(broken)
    with pytest.raises(MemoryError):
        learner.step(share)


def test_bfloat16_forward_keeps_float32_weights(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    policy, learner = make(llama, group, dtype="bfloat16")
    metrics = learner.step(share_of(make_samples(8)))
    assert np.isfinite(metrics["loss"])
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    with policy.in_float32():
        assert {p.dtype for p in policy.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_copy_that_is_served_is_the_one_that_computes(
    dtype: str, llama: Path, group: RankGroup, make_samples: Any
) -> None:
    """From the next micro-batch on, until the first update; what is trained stays the same."""
    found: list[torch.Tensor] = []
    for keeps in (False, True):
        policy, learner = make(
            llama, group, dtype=dtype, keeps=keeps, budget=20, mini_batches=2, lr=0.1
        )
        own = [each.data_ptr() for each in policy.trained()]
        moved: list[bool] = []

        @contextmanager
        def stage(
            name: str,
            policy: PolicyModel = policy,
            own: list[int] = own,
            moved: list[bool] = moved,
        ) -> Generator[None]:
            if name == "backward":
                moved.append([each.data_ptr() for each in policy.trained()] != own)
            yield

        learner.step(share_of(make_samples(8)), stage)
        assert len(moved) > 2
        assert moved[0] is (keeps and dtype == "bfloat16")
        found.append(weights_of(policy))
    assert torch.equal(*found)


def test_loss_falls_on_one_batch(llama: Path, group: RankGroup, make_samples: Any) -> None:
    _, learner = make(llama, group, lr=3e-3)
    samples = make_samples(8)
    for sample in samples:
        sample.advantages[:] = [1.0]
    surprise = [learner.step(share_of(samples, step=step))["entropy_estimate"] for step in range(6)]
    assert surprise[-1] < surprise[0]


def test_kl_to_the_initial_model_starts_at_zero_and_grows(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    kl = {"kind": "kl", "estimator": "k3", "coef": 1.0}
    _, learner = make(llama, group, regularisers=[kl])
    found = [learner.step(share_of(make_samples(8)))["kl"] for _ in range(2)]
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert found[1] > 1e-4


def test_a_strong_kl_holds_the_policy_near_the_initial_model(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    def divergence(coef: float) -> float:
        _, learner = make(llama, group, regularisers=[{"kind": "kl", "coef": coef}])
        rows = [learner.step(share_of(make_samples(8))) for _ in range(5)]
        return rows[-1]["kl"] / coef

    assert divergence(10.0) < 0.5 * divergence(1e-6)


def test_the_share_of_masked_tokens_is_logged(
    llama: Path, group: RankGroup, make_samples: Any
) -> None:
    forks = {"kind": "high_entropy", "share": 0.25}
    _, learner = make(llama, group, corrections=[{"kind": "mis", "upper": 1.5}, forks])
    row = learner.step(share_of(make_samples(8)))
    assert 0.0 < row["mis_zeroed"] < 1.0
    assert row["mis_weight"] == pytest.approx(1.0 - row["mis_zeroed"])
    kept = (1.0 - row["high_entropy_zeroed"]) * row["tokens"]
    assert kept == pytest.approx(math.ceil(0.25 * row["tokens"]))
    assert row["out_of_bounds"] >= max(row["mis_zeroed"], row["high_entropy_zeroed"])
