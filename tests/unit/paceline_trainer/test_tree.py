from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from paceline.errors import InvalidError
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_trainer.columns import Columns, columns
from paceline_trainer.step.data import Cost, Layout, assemble, plan
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.tree import prefix_order, prefix_tree

CPU = torch.device("cpu")
VOCAB = 32
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
MODELS: dict[str, Any] = {
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "window": MistralConfig(**SMALL, sliding_window=7),
    "some_layers_window": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "wide_heads": Qwen3Config(**SMALL, head_dim=16),
    "softcap": Gemma2Config(**SMALL, head_dim=8, sliding_window=7, query_pre_attn_scalar=8),
    "learned_positions": GPT2Config(**GPT2, initializer_range=0.3),
}


def sequence(tokens: Sequence[int], first: int) -> pb.TrainSample:
    """Tokens of which those from `first` are the policy's."""
    num = len(tokens) - first
    return pb.TrainSample(
        tokens=tokens,
        spans=[
            types_pb2.TokenSpan(start=0, end=first, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
            types_pb2.TokenSpan(start=first, end=len(tokens), source=types_pb2.TOKEN_SOURCE_POLICY),
        ],
        logprobs=[-1.0] * num,
        versions=[types_pb2.VersionRun(version=0, count=num)],
        advantages=[1.0],
        temperature=1.0,
    )


def groups(*, prompts: Sequence[int], answers: int, seed: int = 0) -> Columns:
    """A few answers of different lengths to each prompt, of which some begin alike."""
    chance = np.random.default_rng(seed)
    samples: list[pb.TrainSample] = []
    for length in prompts:
        prompt = chance.integers(1, VOCAB, length).tolist()
        for _ in range(answers):
            answer = chance.integers(1, 4, 3).tolist() + chance.integers(1, VOCAB, 15).tolist()
            samples.append(sequence(prompt + answer[: chance.integers(1, 18)], length))
    return columns(samples)


def saved(config: Any, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def scored(
    policy: PolicyModel, data: Columns, layout: Layout, budget: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs, and the gradient of their weighted sum."""
    policy.zero_grad()
    found = torch.zeros(data.num_tokens)
    weights = torch.linspace(-1, 1, data.num_tokens)
    rows = np.arange(data.num_sequences)
    _, chunks = plan(data, rows, budget=budget, cost=policy.cost(), layouts=[layout])
    for chunk in chunks:
        m = assemble(data, chunk, layout, CPU)
        inputs = (m.input_ids, m.position_ids, m.hidden_indices)
        out = policy(*inputs, m.tokens.targets, m.tokens.temperature, tree=m.tree)
        select = torch.from_numpy(m.tokens.select)
        (out.logprobs * weights[select]).sum().backward()
        found[select] = out.logprobs.detach()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return found, [each.clone() for each in gradients]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("budget", [10_000, 60])
@pytest.mark.parametrize("name", MODELS)
def test_layouts_agree(name: str, budget: int, again: bool, tmp_path: Path) -> None:
    policy = load_policy(str(saved(MODELS[name], tmp_path)), gradient_checkpointing=again)
    assert policy.layouts == ("padded", "tree")
    data = groups(prompts=[12, 5, 30], answers=5)
    expected, wanted = scored(policy, data, "padded", budget)
    found, gradients = scored(policy, data, "tree", budget)
    assert torch.allclose(found, expected, atol=1e-5)
    scale = max(float(each.norm()) for each in wanted)
    for one, two in zip(gradients, wanted, strict=True):
        assert float((one - two).norm()) <= 1e-5 * max(float(two.norm()), 0.01 * scale)


@pytest.mark.parametrize("name", ["window", "some_layers_window", "softcap"])
def test_windows_matter(name: str, tmp_path: Path) -> None:
    """Without its window the model would say something else, so that the test above sees it."""
    config = MODELS[name]
    policy = load_policy(str(saved(config, tmp_path / "one")))
    data = groups(prompts=[30], answers=2)
    narrow, _ = scored(policy, data, "tree", 1000)
    wide_config = type(config)(**(config.to_dict() | {"sliding_window": 100}))
    wide_config.save_pretrained(tmp_path / "one")
    wide, _ = scored(load_policy(str(tmp_path / "one")), data, "tree", 1000)
    assert not torch.allclose(narrow, wide, atol=1e-2)


def test_a_model_whose_attention_is_its_own_is_refused(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(InvalidError, match="its attention is its own"):
        load_policy(str(saved(config, tmp_path)))


@pytest.mark.parametrize("answers", [1, 8, 32])
def test_a_prompt_is_fed_once(answers: int) -> None:
    prompt = list(range(1, 11))
    samples = [sequence([*prompt, i, i + 1, i + 2], 10) for i in range(answers)]
    data = columns(samples)
    fed = assemble(data, np.arange(answers), "tree", CPU).input_ids.numel()
    assert fed == 10 + 2 * answers  # the last token is only a target


def test_repeated_keys_are_bounded_too() -> None:
    prompt = list(range(1, 21)) * 5
    data = columns([sequence([*prompt, i + 1, i + 2], 100) for i in range(30)])
    rows = np.arange(30)
    _, chunks = plan(data, rows, budget=130, cost=Cost(1.0, 0.0), layouts=["tree"])
    assert [len(chunk) for chunk in chunks] == [20, 10]  # of 101 keys each, at most 16 x 130


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_paths_are_the_sequences(sequences: list[list[int]]) -> None:
    tokens = np.concatenate(sequences)
    used = np.array([len(each) for each in sequences])
    order, common = prefix_order(tokens, np.cumsum(used) - used, used)
    tree = prefix_tree(used[order], common)
    row: dict[int, tuple[int, ...]] = {}
    for place, index in enumerate(order):
        for depth in range(used[index]):
            path = tuple(sequences[index][: depth + 1])
            assert row.setdefault(int(tree.places[place, depth]), path) == path
    assert sorted(row) == list(range(tree.num_tokens))
    assert len(set(row.values())) == tree.num_tokens
    assert len(tree.segments) < 2 * len(sequences)
