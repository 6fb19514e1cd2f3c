"""The slots of an objective, on the worked numbers of the sources and on batches of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.base import PluginSpec
from paceline.config.objective import ObjectiveSpec
from paceline.config.recipes import with_recipes
from paceline.methods.bapo import BapoOptions
from paceline.methods.bapo.surrogate import bounds, share
from paceline.methods.kl.regulariser import estimate
from paceline.methods.m2po import M2poOptions
from paceline.methods.m2po.surrogate import cap
from paceline.methods.objective.load import load_objective
from paceline.methods.parts.batch import Loss, Scale, TokenBatch
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.methods.ppo_ewma import EwmaOptions
from paceline.plugins import registry


def batch(lengths: tuple[int, ...] = (3, 2), **columns: Any) -> TokenBatch:
    """Two sequences of three and two tokens, or others."""
    total = sum(lengths)
    values: dict[str, Any] = {
        "logprobs": [-1.0, -0.5, -2.0, -0.7, -1.4],
        "proximal": [-1.2, -0.5, -1.5, -0.7, -1.0],
        "behaviour": [-1.3, -0.5, -1.3, -0.7, -2.0],
        "advantages": [1.0, 1.0, 1.0, -1.0, -1.0],
    } | columns
    tensors: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in values.items()
    }
    tensors["logprobs"].requires_grad_()
    return TokenBatch(
        **tensors,
        sequences=torch.repeat_interleave(
            torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
        ),
        num_sequences=len(lengths),
        scale=Scale(total, len(lengths)),
        keys=torch.arange(total),
    )


def loss_of(tokens: TokenBatch | None = None, **slots: Any) -> Loss:
    """The loss with these slots; without corrections unless given."""
    spec = ObjectiveSpec.model_validate({"corrections": [], **slots})
    objective, tokens = load_objective(spec), batch() if tokens is None else tokens
    return objective.loss(tokens, objective.plan(WholeBatch(detached(tokens))))


def detached(tokens: TokenBatch) -> TokenBatch:
    from dataclasses import replace

    return replace(tokens, logprobs=tokens.logprobs.detach())


def gradient_of(tokens: TokenBatch, **slots: Any) -> list[float]:
    loss_of(tokens, **slots).value.backward()
    assert tokens.logprobs.grad is not None
    return tokens.logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ({}, -0.201306),
        ({"aggregation": "seq_mean_token_sum"}, -0.503265),
        ({"aggregation": "seq_mean_token_mean"}, -0.017755),
        ({"aggregation": {"kind": "seq_mean_token_sum_norm", "norm": 3}}, -0.167755),
        ({"corrections": [{"kind": "behaviour_weight", "upper": None}]}, 0.070367),
        (
            {"corrections": [{"kind": "behaviour_weight", "upper": 2.0, "action": "clamp"}]},
            -0.044558,
        ),
        ({"corrections": [{"kind": "behaviour_weight", "upper": 2.0}]}, -0.364558),
        (
            {
                "corrections": [{"kind": "behaviour_weight", "upper": 2.0}],
                "aggregation": {"kind": "token_mean", "denominator": "after_masks"},
            },
            -0.455698,
        ),
        (
            {
                "corrections": [{"kind": "mis", "level": "sequence", "upper": 2.0}],
                "aggregation": {"kind": "token_mean", "denominator": "after_masks"},
            },
            -0.935510,
        ),
    ],
)
def test_worked_losses(slots: dict[str, Any], expected: float) -> None:
    assert loss_of(**slots).value.item() == pytest.approx(expected, abs=2e-6)


def test_around_the_behaviour_policy() -> None:
    tokens = batch()
    around = batch(proximal=tokens.behaviour)
    assert loss_of(around).value.item() == pytest.approx(0.025107, abs=1e-6)


def weights_of(tokens: TokenBatch | None = None, **correction: Any) -> list[float]:
    """The weights of a correction: losses of REINFORCE with an advantage of -1 and log p of 1."""
    spec = ObjectiveSpec.model_validate({"corrections": [correction]})
    objective = load_objective(spec)
    tokens = batch() if tokens is None else tokens
    [slot] = [each for each in objective.slots if each.name == correction["kind"]]
    return slot(tokens, *slot.plan(WholeBatch(detached(tokens)))).tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"kind": "tis", "normalise": True}, [0.932807, 0.844038, 0.691040, 0.844038, 1.688077]),
        ({"kind": "tis", "level": "sequence"}, [0.904837] * 3 + [2.0] * 2),
        # verl divides by the mean over sequences here: (0.904837 + 2) / 2.
        (
            {"kind": "tis", "level": "sequence", "normalise": True},
            [0.622987] * 3 + [1.377013] * 2,
        ),
        ({"kind": "mis", "level": "geometric", "lower": 0.999, "upper": 1.001}, [0.0] * 5),
        ({"kind": "mis", "level": "geometric"}, [1.0] * 5),
        ({"kind": "mis", "level": "sequence"}, [1.0] * 3 + [0.0] * 2),
        ({"kind": "mis", "upper": 1e9, "lower": 0.0, "veto": 0.9}, [0.0] * 3 + [1.0] * 2),
        ({"kind": "behaviour_weight", "level": "sequence"}, [0.967216] * 3 + [1.648721] * 2),
    ],
)
def test_worked_weights(correction: dict[str, Any], expected: list[float]) -> None:
    assert weights_of(**correction) == pytest.approx(expected, abs=1e-6)


def stale() -> TokenBatch:
    """Six tokens whose squared log-ratios are .0025, .01, .09, .36, .81 and .16."""
    ratios = [0.05, 0.1, 0.3, 0.6, 0.9, -0.4]
    return batch(
        (3, 3),
        logprobs=[-1.0 + each for each in ratios],
        behaviour=[-1.0] * 6,
        proximal=[-1.0] * 6,
        advantages=[1.0, 1.0, 1.0, 1.0, -1.0, 1.0],
    )


def test_m2po_masks_the_fewest_tokens() -> None:
    assert weights_of(stale(), kind="m2po") == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    slots = {"corrections": ["m2po"], "surrogate": {"kind": "reinforce", "is_ratio": True}}
    assert loss_of(stale(), **slots).value.item() == pytest.approx(-0.286170, abs=1e-6)


def test_m2po_of_the_proximal_policy_is_blind_to_the_advantage() -> None:
    moved = stale()
    tokens = batch((3, 3), logprobs=moved.logprobs.detach(), proximal=moved.logprobs.detach(),
                   behaviour=moved.behaviour, advantages=moved.advantages)  # fmt: skip
    assert weights_of(tokens, kind="m2po_prox_mask") == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_m2po_cap_uses_its_whole_budget() -> None:
    found = cap(WholeBatch(detached(stale())), M2poOptions())
    assert found == pytest.approx(0.271570, abs=1e-6)


def test_m2po_without_an_affected_token_masks_nothing() -> None:
    tokens = batch(advantages=[0.0] * 5)
    assert weights_of(tokens, kind="m2po") == [1.0] * 5
    assert math.exp(cap(WholeBatch(detached(tokens)), M2poOptions())) > 1e8


def test_minpro_weighs_by_the_smallest_ratio_before() -> None:
    logs = [math.log(each) for each in (0.5, 1.6, 1.1)]
    logprobs = [-1.0, -0.5, -2.0]
    behaviour = [p - r for p, r in zip(logprobs, logs, strict=True)]
    tokens = batch((3,), logprobs=logprobs, behaviour=behaviour, proximal=behaviour,
                   advantages=[1.0] * 3)  # fmt: skip
    assert loss_of(tokens, surrogate="minpro").value.item() == pytest.approx(0.666667, abs=1e-6)
    found = gradient_of(tokens, surrogate="minpro")
    assert found == pytest.approx([-0.166667, -0.266667, -0.183333], abs=1e-6)


def test_minpro_starts_anew_in_each_sequence() -> None:
    ratios = torch.tensor([0.5, 1.2, 1.1]).log()
    tokens = batch((1, 2), logprobs=ratios - 1.0, behaviour=[-1.0] * 3, proximal=[-1.0] * 3,
                   advantages=[-1.0] * 3)  # fmt: skip
    found = gradient_of(tokens, surrogate={"kind": "minpro", "high": 9.0})
    assert found == pytest.approx([0.5 / 3, 1.2 / 3, 1.2 * 1.1 / 3], abs=1e-6)


def unbalanced() -> WholeBatch:
    ratios = torch.tensor([2.5, 1.1, 0.7, 0.5, 0.65, 1.3]).log()
    behaviour = torch.tensor([0.5, 0.5, 0.8, 0.9, 0.6, 0.5]).log()
    tokens = batch((6,), logprobs=behaviour + ratios, behaviour=behaviour, proximal=behaviour,
                   advantages=[1.0, 1.0, -1.0, -1.0, -1.0, -1.0])  # fmt: skip
    return WholeBatch(detached(tokens))


@pytest.mark.parametrize(
    ("options", "expected", "reached"),
    [
        ({"share": 0.4}, (0.6, 1.8), 0.403900),
        ({"share": 0.5}, (0.9, 3.0), 0.398230),
        # The token whose ratio is 0.7 is on the bound at 0.7, which does not clip it.
        ({"share": 0.6, "measure": "gradient"}, (0.72, 3.0), 0.734694),
        ({"share": 0.3}, (0.6, 1.2), 0.349544),
    ],
)
def test_bapo_raises_its_bounds(
    options: dict[str, Any], expected: tuple[float, float], reached: float
) -> None:
    given = BapoOptions(**options)
    found = bounds(unbalanced(), given)
    assert found == pytest.approx(expected, abs=1e-9)
    assert share(unbalanced(), given, *found) == pytest.approx(reached, abs=1e-6)


def test_kl_estimators() -> None:
    logprobs, reference = torch.tensor([0.0]), torch.tensor([-0.5])
    found = [estimate(logprobs, reference, each).item() for each in ("k1", "k2", "k3", "k3_k2")]
    assert found == pytest.approx([0.5, 0.125, 0.106531, 0.106531], abs=1e-6)


def test_k3_k2_has_the_gradient_of_the_kl() -> None:
    reference = torch.tensor([0.25, 0.25, 0.5])
    logits = torch.tensor([0.5, 0.3, 0.2]).log().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    drawn = logprobs.exp().detach()
    (drawn * estimate(logprobs, reference.log(), "k3_k2")).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.237568, -0.010707, -0.226861], abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3_k2"])
@pytest.mark.parametrize("apart", [-60.0, -21.0, 21.0, 60.0])
def test_kl_pulls_back_however_far_the_policy_has_gone(estimator: str, apart: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value = estimate(logprobs, torch.tensor([-1.0 - apart]), estimator)
    value.sum().backward()
    assert logprobs.grad is not None
    expected = 1.0 if estimator == "k1" else math.copysign(20.0, apart)
    assert logprobs.grad.item() == pytest.approx(expected)


def stale_by(deviation: float, spec: ObjectiveSpec) -> tuple[TokenBatch, torch.Tensor]:
    """A batch of one update, and by how much the log-probs have moved since it was sampled."""
    noise = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(64, generator=noise) - 0.1
    moved = deviation * torch.randn(8, generator=noise).repeat_interleave(8)
    behaviour = logprobs - moved
    before = spec.proximal.kind in {"behaviour", "snapshot"}
    tokens = batch(
        (8,) * 8,
        logprobs=logprobs.clone(),
        behaviour=behaviour,
        proximal=behaviour if before else None,
        advantages=torch.randn(8, generator=noise).repeat_interleave(8),
        reference=logprobs - 0.01,
        entropy=torch.rand(64, generator=noise),
    )
    return tokens, moved


@pytest.mark.parametrize("name", sorted(registry.installed("recipes")))
def test_recipes_correct_for_stale_episodes(name: str) -> None:
    """A weight or a ratio, not the plain gradient: the default staleness is several steps."""
    job = with_recipes({"recipe": name})
    spec = ObjectiveSpec.model_validate(job.get("trainer", {}).get("objective", {}))
    gradients: list[torch.Tensor] = []
    for deviation in (0.0, 0.02):
        tokens, moved = stale_by(deviation, spec)
        objective = load_objective(spec)
        plan = objective.plan(WholeBatch(detached(tokens)))
        read = [-tokens.logprobs for _ in objective.logit_slots]
        objective.loss(tokens, plan, read).value.backward()
        assert tokens.logprobs.grad is not None
        gradients.append(tokens.logprobs.grad.clone())
    fresh, stale = gradients
    trained = (fresh != 0) & (stale != 0)
    change = (stale[trained] / fresh[trained]).log()
    assert trained.sum() > 6
    # A KL to the reference, which DART does not weight, takes a part in it.
    assert torch.corrcoef(torch.stack([change, moved[trained]]))[0, 1] > 0.85


SURROGATES: list[dict[str, Any]] = [
    {"surrogate": "ppo_clip"},
    {"surrogate": "gspo", "aggregation": "seq_mean_token_mean"},
    {"surrogate": "cispo"},
    {"surrogate": "minpro"},
    {"surrogate": "bapo"},
    {"surrogate": "m2po_cap"},
    {"surrogate": "reinforce"},
    {"surrogate": {"kind": "reinforce", "is_ratio": True}},
    {"corrections": ["behaviour_weight"]},
    {"corrections": ["tis"]},
    {"corrections": ["icepop"]},
    {"corrections": ["mis"]},
    {"corrections": ["m2po"]},
    {"corrections": ["m2po_prox_mask"]},
]


@pytest.mark.parametrize("slots", SURROGATES, ids=str)
def test_on_policy_all_have_the_plain_gradient(slots: dict[str, Any]) -> None:
    same = [-1.0, -0.5, -2.0, -0.7, -1.4]
    tokens = batch(logprobs=list(same), behaviour=same, proximal=same)
    found = torch.tensor(gradient_of(tokens, **slots))
    counts = torch.tensor([6.0] * 3 + [4.0] * 2) if "aggregation" in slots else 5.0
    assert torch.allclose(found, -tokens.advantages / counts, atol=1e-6)


@pytest.mark.parametrize("slots", SURROGATES, ids=str)
def test_log_probs_that_are_not_finite_do_no_harm(slots: dict[str, Any]) -> None:
    tokens = batch(behaviour=[-1.3, -math.inf, -1.3, math.nan, -2.0])
    found = loss_of(tokens, **slots)
    found.value.backward()
    assert torch.isfinite(found.value)
    assert tokens.logprobs.grad is not None
    assert torch.isfinite(tokens.logprobs.grad).all()


@pytest.mark.parametrize("slots", SURROGATES, ids=str)
def test_no_token_is_a_live_zero(slots: dict[str, Any]) -> None:
    columns = ("logprobs", "behaviour", "proximal", "advantages")
    tokens = batch((), **{name: torch.zeros(0) for name in columns})
    found = loss_of(tokens, **slots)
    found.value.backward()
    assert found.value.item() == 0.0


# Statistics over ranks


@given(
    st.lists(st.tuples(st.floats(0, 4, width=32), st.booleans()), min_size=1, max_size=40),
    st.integers(0, 40),
    st.floats(0.001, 2),
)
@settings(max_examples=60, deadline=None)
def test_the_largest_are_those_of_a_sort(
    drawn: list[tuple[float, bool]], k: int, tau: float
) -> None:
    values = torch.tensor([value for value, _ in drawn])
    among = torch.tensor([taken for _, taken in drawn])
    n = len(drawn)
    empty = torch.zeros(n)
    whole = WholeBatch(
        batch((n,), logprobs=empty.clone(), behaviour=empty, proximal=empty, advantages=empty)
    )
    order = sorted((i for i in range(n) if among[i]), key=lambda i: (-values[i].item(), i))
    assert whole.largest(values, k, among).nonzero()[:, 0].tolist() == sorted(order[:k])

    def enough(taken: int, left: float) -> bool:
        return left <= tau * (len(order) - taken)

    expected = next(
        j for j in range(len(order) + 1)
        if math.fsum(values[i].item() for i in order[j:]) <= tau * (len(order) - j) + 1e-9
    )  # fmt: skip
    found = int(whole.largest_until(values, among, enough).sum())
    close = abs(math.fsum(values[i].item() for i in order[found:]) - tau * (len(order) - found))
    assert found == expected or close < 1e-6


@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=60), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_sums_are_the_same_to_the_last_bit_for_every_split(drawn: list[float], parts: int) -> None:
    values = np.array(drawn, dtype=np.float32)
    order = np.random.default_rng(len(drawn)).permutation(len(drawn))
    assert _sum(values, 1) == _sum(values[order], parts)
    total = math.fsum(values.tolist())
    assert _sum(values, parts) == pytest.approx(total, abs=1e-6 * max(1.0, abs(total)))


def _sum(values: np.ndarray, parts: int) -> float:
    """What each of some ranks finds for the sum of all values; they gather in lockstep."""
    import threading

    barrier, board = threading.Barrier(parts), [None] * parts
    found: list[float] = [0.0] * parts

    def work(rank: int) -> None:
        def gather(own: Any) -> np.ndarray:
            board[rank] = own
            barrier.wait()
            rows = np.array(board, dtype=np.float64)
            barrier.wait()
            return rows

        own = torch.from_numpy(values[rank::parts].copy())
        n = len(own)
        tokens = TokenBatch(
            logprobs=own, behaviour=own, advantages=own, sequences=torch.zeros(n).long(),
            num_sequences=1, scale=Scale(len(values), parts),
        )  # fmt: skip
        found[rank] = WholeBatch(tokens, gather).sum(own)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    return found[0]


def _sampled(weights: list[float], shift: float = 0.0) -> WholeBatch:
    """One sequence of two tokens for each weight of policy / behaviour, times exp(shift)."""
    logs = [math.log(weight) + shift for weight in weights for _ in range(2)]
    tokens = batch(
        (2,) * len(weights),
        logprobs=[-30.0 + each / 2 for each in logs],
        behaviour=[-30.0] * len(logs),
        proximal=None,
        advantages=[1.0] * len(logs),
    )
    return WholeBatch(detached(tokens))


@pytest.mark.parametrize("shift", [0.0, -30.0, 20.0])
@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 0.816497), ({"base": 0.55}, 1.0), ({"rule": "linear"}, 0.666667)],
)
def test_the_step_is_scaled_by_the_effective_sample_size(
    options: dict[str, Any], factor: float, shift: float
) -> None:
    hooks = [PluginSpec.model_validate({"kind": "vcpo_step"} | options)]
    scale = load_objective(ObjectiveSpec(), hooks).scale_step(_sampled([1.0, 1.0, 4.0], shift))
    assert scale.factor == pytest.approx(factor, abs=1e-5)
    assert scale.log["vcpo_step_ess"] == pytest.approx(0.666667, abs=1e-5)


def test_without_sequences_there_is_no_step() -> None:
    hooks = load_objective(ObjectiveSpec(), [PluginSpec(kind="vcpo_step")])
    assert hooks.scale_step(_sampled([])).factor == 0.0


def test_missing_old_logits_on_the_example_of_the_paper() -> None:
    """Discrepancy mask, staleness clip, and the active tokens that decide about a reset."""
    tokens = batch(
        (4,),
        logprobs=[-1.0, -0.5, -2.0, -0.7],
        proximal=[-1.2, -0.5, -1.5, -0.7],
        behaviour=[-1.3, -0.5, -1.3, -2.0],
        advantages=[1.0] * 4,
    )
    loss = loss_of(tokens, corrections=[{"kind": "icepop", "lower": 0.5, "upper": 2.0}])
    assert loss.value.item() == pytest.approx(-0.705698, abs=2e-6)
    assert float(loss.sums["active_fraction"]) == 2
    assert [EwmaOptions(window=each).beta for each in (2, 4, 8)] == pytest.approx([0.5, 2 / 3, 0.8])
