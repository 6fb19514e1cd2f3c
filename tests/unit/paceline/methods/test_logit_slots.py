"""Slots that read logits, turns or the progress of a job, on worked numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.methods.d3s import D3sTokensOptions
from paceline.methods.d3s.correction import d3s_tokens
from paceline.methods.dart import DartStepsOptions
from paceline.methods.dart.correction import dart_steps
from paceline.methods.echo_tree import EchoHybridOptions
from paceline.methods.echo_tree.shaping import echo_hybrid
from paceline.methods.otr import OtrOptions
from paceline.methods.otr.surrogate import one_token, otr
from paceline.methods.parts.batch import Scale, TokenBatch
from paceline.methods.parts.slots import LogitRows, plan_of
from paceline.methods.parts.uniform import uniform
from paceline.methods.parts.whole_batch import WholeBatch

LOGITS = torch.tensor([0.5, 0.3, 0.2]).log()


def rows(logits: Tensor, *, step: int = 0) -> LogitRows:
    """Rows whose demonstrated token is 0."""
    count = len(logits)
    return LogitRows(logits, torch.zeros(count, dtype=torch.int64), torch.arange(count), step)


def loss_and_gradient(options: OtrOptions, count: int = 1) -> tuple[float, list[float]]:
    logits = LOGITS.expand(count, -1).clone().requires_grad_()
    loss = one_token(rows(logits), options).mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient.sum(0).tolist()


def test_otr_in_expectation() -> None:
    loss, gradient = loss_and_gradient(OtrOptions(beta=-0.1, kappa=1.3))
    assert loss == pytest.approx(0.245400, abs=1e-6)
    assert gradient == pytest.approx([-0.257444, 0.153246, 0.104199], abs=1e-6)


def test_otr_at_kappa_1_is_supervised_training_weighted_by_probability() -> None:
    _, gradient = loss_and_gradient(OtrOptions(beta=-0.1, kappa=1.0))
    assert gradient == pytest.approx([-0.275, 0.165, 0.11], abs=1e-6)


def test_otr_sampled_approaches_its_expectation() -> None:
    expected, slope = loss_and_gradient(OtrOptions(beta=-0.1, kappa=1.3))
    options = OtrOptions(mode="sampled", samples=512, beta=-0.1, kappa=1.3)
    loss, gradient = loss_and_gradient(options, count=256)
    assert loss == pytest.approx(expected, abs=0.005)
    assert gradient == pytest.approx(slope, abs=0.005)


def test_otr_draws_the_same_tokens_for_every_split_and_others_at_the_next_step() -> None:
    options = OtrOptions(mode="sampled", samples=8)
    logits = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    whole = rows(logits)
    parts = [
        replace(whole, logits=logits[at], targets=whole.targets[at], keys=whole.keys[at])
        for at in (slice(0, 5), slice(5, 12))
    ]
    found = torch.cat([one_token(each, options) for each in parts])
    assert torch.equal(found, one_token(whole, options))
    assert not torch.equal(found, one_token(rows(logits, step=1), options))


def test_otr_ignores_what_is_no_demonstration() -> None:
    tokens = batch((2, 2), advantages=[1.0, 1.0, -1.0, -1.0], of_logits=[0.5, 0.25, 3.0, 4.0])
    assert otr(tokens, OtrOptions()).loss.tolist() == [0.5, 0.25, 0.0, 0.0]


@given(st.integers(0, 2**39), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_uniform_numbers_are_in_their_interval_and_spread(key: int, step: int) -> None:
    found = uniform(torch.tensor([key, key + 1]), step, 256)
    assert bool(((found >= 0.0) & (found < 1.0)).all())
    assert found.mean(1).tolist() == pytest.approx([0.5, 0.5], abs=0.1)
    assert found.unique().numel() == 512


def batch(lengths: tuple[int, ...], **columns: Any) -> TokenBatch:
    """Sequences of these lengths, with keys as the trainer gives them."""
    total = sum(lengths)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.cat([torch.arange(length) for length in lengths])
    values: dict[str, Any] = {
        "logprobs": [-1.0] * total,
        "behaviour": [-1.0] * total,
        "advantages": [1.0] * total,
        "keys": (sequences << 24) + places,
    } | columns
    tensors: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in values.items()
    }
    return TokenBatch(
        **tensors,
        sequences=sequences,
        num_sequences=len(lengths),
        scale=Scale(total, len(lengths)),
    )


def test_a_turn_is_a_run_of_policy_tokens() -> None:
    keys = torch.tensor([3, 4, 9, 10, 11, (1 << 24) + 12])
    tokens = batch((5, 1), keys=keys)
    assert tokens.turns.tolist() == [3, 3, 9, 9, 9, (1 << 24) + 12]


def weights(slot: Any, tokens: TokenBatch, options: Any) -> list[float]:
    """What a planned slot gives the only rank."""
    planned = plan_of(slot)
    assert planned is not None
    found = slot(tokens, planned.plan(WholeBatch(tokens), options), options)
    return found.tolist()


def test_dart_leaves_out_the_fifth_of_the_turns_with_the_lowest_entropy() -> None:
    means = [0.2, 0.9, 0.5, 0.7, 0.4]
    entropy = torch.tensor([each + shift for each in means for shift in (-0.1, 0.1)])
    keys = torch.tensor([10 * turn + place for turn in range(5) for place in range(2)])
    tokens = batch((10,), entropy=entropy, keys=keys)
    assert weights(dart_steps, tokens, DartStepsOptions()) == [0, 0] + [1] * 8
    assert weights(dart_steps, tokens, DartStepsOptions(share=0.01)) == [0, 0, 1, 1] + [0] * 6


@pytest.mark.parametrize(("step", "chosen"), [(0, 1), (5, 2), (10, 3), (99, 3)])
def test_d3s_takes_more_tokens_as_the_job_goes_on(step: int, chosen: int) -> None:
    entropy = torch.arange(1.0, 11.0)
    tokens = batch((10,), entropy=entropy, step=step, total_steps=11)
    found = weights(d3s_tokens, tokens, D3sTokensOptions(start=0.1, end=0.3))
    assert found == [0.0] * (10 - chosen) + [1.0] * chosen


def test_echo_weighs_uncertain_tokens_more() -> None:
    logprob = float(torch.tensor(0.7).log())
    tokens = batch((2,), behaviour=[logprob] * 2, entropy=torch.tensor([0.6, 1.0]))
    found = weights(echo_hybrid, tokens, EchoHybridOptions())
    assert found == pytest.approx([1.09, 1.13], abs=1e-6)
    certain = batch((2,), behaviour=[0.0, 0.0], entropy=torch.zeros(2))
    assert weights(echo_hybrid, certain, EchoHybridOptions()) == [1.0, 1.0]
