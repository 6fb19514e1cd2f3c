from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config.base import PluginSpec
from paceline.errors import ConfigError, InvalidError
from paceline.methods.grpo.objective import grpo
from paceline.methods.grpo.options import GrpoOptions
from paceline.methods.parts.aggregation import aggregate
from paceline.methods.parts.batch import Scale, TokenBatch
from paceline.methods.parts.options import ClipOptions
from paceline.methods.parts.surrogates import clipped
from paceline.methods.tis.objective import weights
from paceline_trainer.objective import load_objective


def batch(**changes: Any) -> TokenBatch:
    """Two sequences of three and two tokens."""
    values: dict[str, Any] = {
        "logprobs": torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.4], requires_grad=True),
        "proximal": torch.tensor([-1.2, -0.5, -1.5, -0.7, -1.0]),
        "behaviour": torch.tensor([-1.3, -0.5, -1.3, -0.7, -2.0]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        "sequences": torch.tensor([0, 0, 0, 1, 1]),
        "num_sequences": 2,
        "scale": Scale(tokens=5, sequences=2),
    }
    return TokenBatch(**(values | changes))


def loss_of(kind: str, given: TokenBatch | None = None, **options: Any) -> Tensor:
    objective = load_objective(PluginSpec.model_validate({"kind": kind, **options}))
    return objective(batch() if given is None else given).value


def test_clipped_tokens() -> None:
    given = batch()
    ratio = (given.logprobs - given.old).exp()
    tokens, clip_mask = clipped(ratio, given.advantages, ClipOptions())
    expected = [-1.2, -1.0, -0.606531, 1.0, 0.8]
    assert tokens.tolist() == pytest.approx(expected, abs=1e-6)
    assert clip_mask.tolist() == [True, False, False, False, True]


def test_dual_clip_bounds_bad_tokens_only() -> None:
    ratio = torch.tensor([1.5]).exp().repeat(2)
    advantages = torch.tensor([-1.0, 1.0])
    free, _ = clipped(ratio, advantages, ClipOptions(clip=0.2))
    bounded, _ = clipped(ratio, advantages, ClipOptions(clip=0.2, dual_clip=3.0))
    assert free[0].item() == pytest.approx(4.481689)
    assert bounded.tolist() == pytest.approx([3.0, -1.2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -0.201306),
        ({"aggregation": "seq_mean_token_sum"}, -0.503265),
        ({"aggregation": "seq_mean_token_mean"}, -0.017755),
        ({"aggregation": "seq_mean_token_sum_norm", "norm": 3}, -0.167755),
        ({"clip_high": 0.28}, -0.205587),
    ],
)
def test_ppo_clip(options: dict[str, Any], expected: float) -> None:
    assert loss_of("ppo_clip", old="proximal", **options).item() == pytest.approx(
        expected, abs=2e-6
    )


def test_ppo_clip_gradient() -> None:
    given = batch()
    loss_of("ppo_clip", given, old="proximal").backward()
    assert given.logprobs.grad is not None
    expected = [0.0, -0.2, -0.121306, 0.2, 0.0]
    assert given.logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_ppo_clip_around_the_behaviour_policy() -> None:
    assert loss_of("ppo_clip").item() == pytest.approx(0.025107, abs=1e-6)


def test_grpo_weighs_sequences_alike() -> None:
    assert loss_of("grpo", old="proximal").item() == pytest.approx(-0.017755, abs=1e-6)


def test_grpo_with_reference() -> None:
    reference = torch.tensor([-1.0, -0.5, -1.5, -0.7, -1.4])
    loss = grpo(batch(reference=reference), GrpoOptions(old="proximal", kl=0.04))
    assert loss.value.item() == pytest.approx(-0.016764, abs=1e-6)
    assert loss.sums["reference_kl"].item() == pytest.approx(0.148721, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"upper": None}, 0.070367),
        ({"upper": 2.0, "action": "clamp"}, -0.044558),
        ({"upper": 2.0, "action": "mask"}, -0.364558),
        ({"weight": False, "upper": None}, -0.201306),
    ],
)
def test_decoupled_ppo(options: dict[str, Any], expected: float) -> None:
    assert loss_of("decoupled_ppo", **options).item() == pytest.approx(expected, abs=1e-6)


def test_decoupled_ppo_masking_everything_is_a_live_zero() -> None:
    given = batch()
    loss = loss_of("decoupled_ppo", given, lower=50.0, upper=60.0)
    loss.backward()
    assert loss.item() == 0.0
    assert given.logprobs.grad is not None
    assert not given.logprobs.grad.any()


def test_tis_weights() -> None:
    token = weights(batch(), "token").clamp(max=2.0)
    assert token.tolist() == pytest.approx([1.105171, 1.0, 0.818731, 1.0, 2.0], abs=1e-6)
    sequence = weights(batch(), "sequence")
    expected = [0.904837] * 3 + [2.718282] * 2
    assert sequence.tolist() == pytest.approx(expected, abs=1e-6)


def test_tis() -> None:
    assert loss_of("tis").item() == pytest.approx(-0.044558, abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo_clip", "decoupled_ppo", "tis"])
def test_on_policy_all_have_the_plain_gradient(kind: str) -> None:
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.7, -1.4], requires_grad=True)
    given = batch(logprobs=logprobs, proximal=None, behaviour=logprobs.detach())
    loss_of(kind, given).backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -given.advantages / 5)


def test_infinite_behaviour_log_probs_do_no_harm() -> None:
    broken = torch.tensor([-1.3, -torch.inf, -1.3, torch.nan, -2.0])
    given = batch(behaviour=broken)
    loss = loss_of("decoupled_ppo", given)
    loss.backward()
    assert torch.isfinite(loss)
    assert given.logprobs.grad is not None
    assert torch.isfinite(given.logprobs.grad).all()


@pytest.mark.parametrize(
    "options",
    [
        ClipOptions(),
        ClipOptions(aggregation="seq_mean_token_sum"),
        ClipOptions(aggregation="seq_mean_token_mean"),
        ClipOptions(aggregation="seq_mean_token_sum_norm", norm=7),
    ],
)
def test_micro_batches_add_up_to_the_batch(options: ClipOptions) -> None:
    tokens = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    whole = aggregate(tokens, batch(), options)
    first = batch(sequences=torch.tensor([0, 0, 0]), num_sequences=1)
    second = batch(sequences=torch.tensor([0, 0]), num_sequences=1)
    parts = aggregate(tokens[:3], first, options) + aggregate(tokens[3:], second, options)
    assert parts.item() == pytest.approx(whole.item())


def test_empty_batch_has_zero_loss_and_a_graph() -> None:
    empty = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    given = batch(
        logprobs=empty,
        proximal=None,
        behaviour=none,
        advantages=none,
        sequences=torch.zeros(0, dtype=torch.int64),
        num_sequences=0,
        scale=Scale(0, 0),
    )
    for kind in ("ppo_clip", "grpo", "decoupled_ppo", "tis"):
        loss = loss_of(kind, given)
        loss.backward()
        assert loss.item() == 0.0


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"kind": "ppo"}, "'ppo' is not installed; installed: .*ppo_clip"),
        ({"kind": "ppo_clip", "clp": 0.1}, "'ppo_clip': clp: unknown field; allowed here: .*clip"),
        ({"kind": "ppo_clip", "clip": -1}, r"clip: .*greater than 0 \(got -1\)"),
        ({"kind": "tis", "aggregation": "mean"}, "aggregation: .*'token_mean'"),
        ({"kind": "tis", "aggregation": "seq_mean_token_sum_norm"}, "norm: is needed"),
        ({"kind": "decoupled_ppo", "lower": 3, "upper": 2}, "lower: 3.0 is above upper 2.0"),
        ({"kind": "grpo", "kl": 0.1}, "needs reference, which this trainer does not have"),
    ],
)
def test_bad_options_are_named(plugin: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        load_objective(PluginSpec.model_validate(plugin))


def test_wrong_options_are_configuration_errors() -> None:
    with pytest.raises(ConfigError):
        load_objective(PluginSpec.model_validate({"kind": "tis", "cap": 0}))
