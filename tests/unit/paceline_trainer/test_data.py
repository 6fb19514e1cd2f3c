from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import InvalidError
from paceline.methods.otr import OtrOptions
from paceline.methods.otr.surrogate import one_token
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_trainer.columns import Columns, columns
from paceline_trainer.step.data import Cost, Layout, assemble, plan
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import LogitReaders, PolicyModel, TokenScores

CPU = torch.device("cpu")
CHEAP_PAIRS = Cost(token=1e6, pair=1e-9)
DEAR_PAIRS = Cost(token=1.0, pair=1e6)


def flat_logprobs(policy: PolicyModel, data: Columns, layout: Layout, *, budget: int) -> Tensor:
    _, chunks = plan(
        data, np.arange(data.num_sequences), budget=budget, cost=DEAR_PAIRS, layouts=[layout]
    )
    found = torch.full((data.num_tokens,), torch.nan)
    for chunk in chunks:
        m = assemble(data, chunk, layout, CPU)
        inputs = (m.input_ids, m.position_ids, m.hidden_indices)
        out = policy(*inputs, m.tokens.targets, m.tokens.temperature, tree=m.tree)
        found[torch.from_numpy(m.tokens.select)] = out.logprobs.detach()
    return found


def plain_logprobs(policy: PolicyModel, samples: list[pb.TrainSample]) -> Tensor:
    """One sequence at a time, all logits, the formula as written."""
    found: list[Tensor] = []
    for sample in samples:
        ids = torch.tensor(list(sample.tokens))[None]
        logits = policy.inner(input_ids=ids, use_cache=False).logits[0].detach()
        all_tokens = torch.log_softmax(logits / sample.temperature, -1)[:-1]
        scored = all_tokens.gather(-1, ids[0, 1:, None])[:, 0]
        for span in sample.spans:
            if span.source == types_pb2.TOKEN_SOURCE_POLICY:
                found.append(scored[span.start - 1 : span.end - 1])
    return torch.cat(found)


@pytest.mark.parametrize("layout", ["padded", "tree"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_layout_leaks(
    llama: Path, make_samples: Any, layout: Layout, temperature: float
) -> None:
    policy = load_policy(str(llama))
    given_samples = make_samples(24, temperature=temperature)
    found = flat_logprobs(policy, columns(given_samples), layout, budget=100)
    assert torch.allclose(found, plain_logprobs(policy, given_samples), atol=1e-5)


def test_temperatures_may_differ_in_a_batch(llama: Path, make_samples: Any) -> None:
    policy = load_policy(str(llama))
    mixed = [*make_samples(3, temperature=0.5), *make_samples(3, seed=1, temperature=2.0)]
    found = flat_logprobs(policy, columns(mixed), "padded", budget=1000)
    assert torch.allclose(found, plain_logprobs(policy, mixed), atol=1e-5)


def test_head_in_pieces_is_the_same(llama: Path, make_samples: Any) -> None:
    policy = load_policy(str(llama))
    data = columns(make_samples(8))
    m = assemble(data, np.arange(8), "padded", CPU)
    pieces = PolicyModel(policy.inner, max_logits=32 * 5)
    inputs = (m.input_ids, m.position_ids, m.hidden_indices, m.tokens.targets, m.tokens.temperature)
    options = OtrOptions(mode="sampled", samples=16)
    readers = LogitReaders([partial(one_token, options=options)], m.tokens.keys, 3)
    whole = policy(*inputs, entropy=True, readers=readers)
    cut = pieces(*inputs, entropy=True, readers=readers)
    parameters = list(policy.parameters())
    one = torch.autograd.grad(_sum(whole), parameters)
    two = torch.autograd.grad(_sum(cut), parameters)
    assert torch.allclose(whole.of_logits[0], cut.of_logits[0], atol=1e-6)
    assert torch.allclose(whole.logprobs, cut.logprobs, atol=1e-6)
    assert torch.allclose(whole.entropy, cut.entropy, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, two, strict=True))


def _sum(scores: TokenScores) -> torch.Tensor:
    assert scores.entropy is not None
    return scores.logprobs.sum() + scores.entropy.sum() + scores.of_logits[0].sum()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_in_one_micro_batch(lengths: list[int], budget: int) -> None:
    data = columns([sample(length) for length in lengths])
    rows = np.arange(len(lengths))
    for layout in ("padded", "tree"):
        _, chunks = plan(data, rows, budget=budget, cost=DEAR_PAIRS, layouts=[layout])
        assert sorted(np.concatenate(chunks).tolist()) == rows.tolist()
        for chunk in chunks:
            fed = assemble(data, chunk, layout, CPU).input_ids.numel()
            assert fed <= budget or len(chunk) == 1


@pytest.mark.parametrize(
    ("prompts", "expected"), [([1, 2], "padded"), ([1, 1], "tree")], ids=["apart", "shared"]
)
def test_layout_follows_cost(prompts: list[int], expected: Layout) -> None:
    data = columns([sample(20, prompt=prompt) for prompt in prompts])
    layout, _ = plan(data, np.arange(2), budget=500, cost=CHEAP_PAIRS, layouts=["padded", "tree"])
    assert layout == expected


def test_masked_and_empty_samples_are_left_out() -> None:
    first = sample(3)
    first.masked = True
    silent = pb.TrainSample(
        tokens=[1, 2],
        spans=[types_pb2.TokenSpan(start=0, end=2, source=types_pb2.TOKEN_SOURCE_TOOL)],
    )
    assert columns([first, silent]).num_sequences == 0


def test_first_token_of_a_sequence_is_not_trained() -> None:
    alone = sample(3)
    alone.spans[0].source = types_pb2.TOKEN_SOURCE_POLICY
    alone.logprobs[:] = [-1.0] * 4
    alone.versions[0].count = 4
    data = columns([alone])
    assert data.positions.tolist() == [1, 2, 3]
    assert data.num_tokens == 3


def test_broken_sample_is_named() -> None:
    broken = sample(3)
    broken.logprobs.pop()
    with pytest.raises(InvalidError, match="sample g/0: 3 policy tokens but 2 log-probs"):
        columns([broken])


def sample(policy_tokens: int, *, prompt: int = 0) -> pb.TrainSample:
    """One token of prompt, then policy tokens."""
    return pb.TrainSample(
        group_id="g",
        tokens=[prompt, *range(1, policy_tokens + 1)],
        spans=[
            types_pb2.TokenSpan(start=0, end=1, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
            types_pb2.TokenSpan(
                start=1, end=policy_tokens + 1, source=types_pb2.TOKEN_SOURCE_POLICY
            ),
        ],
        logprobs=[-1.0] * policy_tokens,
        versions=[types_pb2.VersionRun(version=0, count=policy_tokens)],
        advantages=[0.5],
        temperature=1.0,
    )


def test_far_lengths_do_not_share_a_row_of_padding() -> None:
    data = columns([sample(length) for length in (60, 58, 3, 3)])
    _, chunks = plan(data, np.arange(4), budget=500, cost=DEAR_PAIRS, layouts=["padded"])
    assert [chunk.tolist() for chunk in chunks] == [[0, 1], [2, 3]]


def test_a_token_that_the_model_does_not_know_is_refused(make_samples: Any) -> None:
    data = columns(make_samples(2))
    data.check_vocabulary(int(data.tokens.max()) + 1)
    with pytest.raises(InvalidError, match="engine and trainer need the same vocabulary"):
        data.check_vocabulary(int(data.tokens.max()))
