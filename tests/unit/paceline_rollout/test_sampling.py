from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_rollout.engines.torch.sampling import OFF, SamplingBatch, restrict, sample, uniforms

VOCAB = 12


def knobs(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k or 1 << 40),
        top_p=torch.full((rows,), top_p if top_p < 1 else OFF),
        min_p=torch.full((rows,), min_p),
        restricted=bool(top_k or top_p < 1 or min_p),
        greedy=temperature == 0,
        tempered=temperature not in (0, 1),
    )


def allowed(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[:top_k] if top_k else order
    total, before, found = sum(probs[i] for i in kept), 0.0, set[int]()
    for i in kept:
        if before / total < top_p - 1e-6 and probs[i] >= min_p * probs[order[0]] * (1 + 1e-6):
            found.add(i)
        before += probs[i]
    return found | {order[0]}


@settings(max_examples=80, deadline=None)
@given(
    logits=st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB, unique=True),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_support_is_restricted(logits: list[float], top_k: int, top_p: float, min_p: float):
    probs = torch.softmax(torch.tensor([logits]), -1)
    left = restrict(probs, knobs(1, top_k=top_k, top_p=top_p, min_p=min_p))[0]
    support = {i for i, p in enumerate(left.tolist()) if p > 0}
    strict = allowed(probs[0].tolist(), top_k, top_p, min_p)
    # Values within rounding of a threshold may fall on either side.
    loose = allowed(probs[0].tolist(), top_k, top_p + 2e-5, max(min_p - 2e-5, 0))
    assert strict <= support <= loose
    assert not top_k or len(support) <= top_k


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**20))
def test_uniforms_depend_on_seed_and_position_only(seed: int, position: int):
    alone = uniforms(torch.tensor([seed]), torch.tensor([position]))
    crowd = uniforms(torch.tensor([7, seed, 9]), torch.tensor([1, position, 3]))
    assert alone[0] == crowd[1]
    assert 0 <= float(alone[0]) < 1


def test_uniforms_are_spread():
    u = uniforms(torch.full((20_000,), 3), torch.arange(20_000))
    v = uniforms(torch.arange(20_000), torch.full((20_000,), 3))
    for values in (u, v):
        assert float(values.mean()) == pytest.approx(0.5, abs=0.01)
        counts = torch.histc(values, bins=16, min=0, max=1) / len(values)
        assert float((counts - 1 / 16).abs().max()) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 0.03


def test_frequencies_follow_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    rows = 20_000
    u = uniforms(torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    tokens, logprobs = sample(logits.expand(rows, 4), knobs(rows, temperature=0.5), u)
    wanted = torch.softmax(logits[0] / 0.5, -1)
    counts = Counter(tokens.tolist())
    for token in range(4):
        assert counts[token] / rows == pytest.approx(float(wanted[token]), abs=0.01)
    assert torch.allclose(logprobs, torch.log(wanted)[tokens], atol=1e-6)


def test_logprobs_are_not_renormalised():
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0))
    u = torch.linspace(0, 0.999, 64, dtype=torch.float64)
    tokens, logprobs = sample(logits, knobs(64, temperature=0.7, top_k=2), u)
    wanted = torch.log_softmax(logits / 0.7, -1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert torch.allclose(logprobs, wanted)
    assert all(
        int(t) in row.topk(2).indices.tolist() for t, row in zip(tokens, logits, strict=True)
    )


def test_greedy_gives_the_untempered_logprob():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, knobs(1, temperature=0.0), torch.tensor([0.9]).double())
    assert tokens.tolist() == [1]
    assert float(logprobs) == pytest.approx(float(torch.log_softmax(logits[0], -1)[1]))


def test_extreme_uniforms_never_hit_an_impossible_token():
    logits = torch.tensor([[-1e30, 0.0, 0.0, -1e30]]).expand(2, 4)
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, _ = sample(logits, knobs(2), u)
    assert tokens.tolist() == [1, 2]


def test_not_a_number_does_not_raise():
    tokens, logprobs = sample(torch.full((1, 4), torch.nan), knobs(1), torch.tensor([0.5]).double())
    assert 0 <= int(tokens) < 4
    assert not torch.isfinite(logprobs).any()
