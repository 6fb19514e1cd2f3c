"""Forward and backward pass of a batch in both layouts: padded rows, and a prefix tree.

Prompts are half of the tokens of each sequence, so that a tree of groups of G feeds
1 / (0.5 + 0.5 / G) times fewer tokens: the bound of the speed-up. Models are random, one thread
each; the passes of both layouts alternate, and the medians are compared.

    .venv/bin/python benchmarks/shared_prompts.py --json benchmarks/results/shared_prompts.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pipeline import machine
from rig.smoke import arguments
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline_trainer.columns import Columns
from paceline_trainer.step.data import Layout, assemble, plan
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import PolicyModel

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 448},
    "135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
BUDGET = 16_384


class Case(NamedTuple):
    """Groups of `size` samples, with as many tokens of prompt as of answer."""

    model: str
    groups: int
    size: int
    tokens: int


CASES = (
    Case("1M", 32, 8, 32),
    Case("1M", 8, 32, 32),
    Case("1M", 4, 8, 256),
    Case("135M", 2, 8, 48),
    Case("135M", 1, 32, 48),
)
SMOKE = Case("1M", 2, 4, 8)


def main() -> None:
    """Measure all cases, print them and write them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    given = arguments(parser, repeats=1)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "cases": []}
    for case in [SMOKE] if given.smoke else CASES:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(case, make_model(case.model, Path(folder)), given.repeats)
        found["cases"].append(row)
        print(json.dumps(row), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def make_model(name: str, folder: Path) -> PolicyModel:
    """A random model, as the trainer loads it."""
    torch.manual_seed(0)
    options: dict[str, Any] = SMALL | SIZES[name]
    config = LlamaConfig(**options, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_policy(str(folder))


def measure(case: Case, policy: PolicyModel, repeats: int) -> dict[str, Any]:
    """Seconds of both layouts, and how far apart their results are."""
    data = batch(case, policy.vocab_size)
    results = {layout: train(policy, data, layout) for layout in ("padded", "tree")}
    seconds: dict[Layout, list[float]] = {"padded": [], "tree": []}
    for _ in range(repeats):
        for layout, taken in seconds.items():
            start = time.perf_counter()
            train(policy, data, layout)
            taken.append(time.perf_counter() - start)
    padded, tree = (statistics.median(seconds[layout]) for layout in ("padded", "tree"))
    bound = 1 / (0.5 + 0.5 / case.size)
    (one, gradients, fed), (two, others, distinct) = results["padded"], results["tree"]
    return {
        **case._asdict(),
        "padded_s": round(padded, 4),
        "tree_s": round(tree, 4),
        "speed_up": round(padded / tree, 3),
        "bound": round(bound, 3),
        "of_bound": round(padded / tree / bound, 3),
        "padded_tokens": fed,
        "tree_tokens": distinct,
        "logprob_difference": float((one - two).abs().max()),
        "gradient_difference": max(
            float((a - b).norm() / a.norm()) for a, b in zip(gradients, others, strict=True)
        ),
    }


def batch(case: Case, vocabulary: int) -> Columns:
    """Random tokens."""
    chance = np.random.default_rng(0)
    prompts = chance.integers(0, vocabulary, (case.groups, case.tokens))
    num = case.groups * case.size
    answers = chance.integers(0, vocabulary, (num, case.tokens))
    tokens = np.concatenate([np.repeat(prompts, case.size, axis=0), answers], axis=1)
    size = num * case.tokens
    return Columns(
        tokens=tokens.reshape(-1),
        token_starts=np.arange(num + 1) * 2 * case.tokens,
        positions=np.tile(np.arange(case.tokens, 2 * case.tokens), num),
        policy_starts=np.arange(num + 1) * case.tokens,
        behaviour=np.zeros(size, np.float32),
        advantages=chance.normal(size=size).astype(np.float32),
        versions=np.zeros(size, np.int64),
        workers=np.zeros(size, np.int64),
        worker_names=("",),
        temperatures=np.ones(num, np.float32),
        weights=np.ones(num, np.float32),
        rows=np.arange(num),
        replaced=np.zeros(num, np.bool_),
    )


def train(
    policy: PolicyModel, data: Columns, layout: Layout
) -> tuple[Tensor, Sequence[Tensor], int]:
    """Log-probs, gradients and the number of tokens that were fed."""
    policy.zero_grad()
    rows = np.arange(data.num_sequences)
    _, chunks = plan(data, rows, budget=BUDGET, cost=policy.cost(), layouts=[layout])
    found = torch.zeros(data.num_tokens)
    fed = 0
    for chunk in chunks:
        micro = assemble(data, chunk, layout, torch.device("cpu"))
        inputs = (micro.input_ids, micro.position_ids, micro.hidden_indices)
        scores = policy(*inputs, micro.tokens.targets, 1.0, tree=micro.tree)
        (-(scores.logprobs * micro.tokens.advantages).sum() / data.num_tokens).backward()
        found[torch.from_numpy(micro.tokens.select)] = scores.logprobs.detach()
        fed += micro.input_ids.numel()
    gradients = [each.grad.clone() for each in policy.parameters() if each.grad is not None]
    return found, gradients, fed


if __name__ == "__main__":
    main()
