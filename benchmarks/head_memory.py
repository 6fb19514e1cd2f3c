"""Peak memory of log-probs and entropy, forward and backward, against logits of all tokens at once.

Each case is a process of its own with one decoder layer of width 64, so that the head is what there
is. The figure is the growth of its resident memory, from before the first forward pass to the peak.

    .venv/bin/python benchmarks/head_memory.py --json benchmarks/results/head_memory.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from pathlib import Path
from typing import Any

from pipeline import machine
from rig.smoke import arguments as arguments_of

VOCABULARY = 50_000
TOKENS = (2048, 4096, 8192)
NAIVE = 1 << 62  # elements of logits below which nothing is chunked


def main() -> int:
    """Measure all cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    arguments = arguments_of(parser, tokens=[512])
    cases = [
        {
            "tokens": tokens,
            "chunked_mib": case(tokens, naive=False),
            "naive_mib": case(tokens, naive=True),
        }
        for tokens in arguments.tokens
    ]
    for each in cases:
        each["ratio"] = round(each["chunked_mib"] / each["naive_mib"], 3)
    found: dict[str, Any] = {"machine": machine(), "vocabulary": VOCABULARY, "cases": cases}
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def case(tokens: int, *, naive: bool) -> float:
    """The growth in MiB, measured in a new process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:  # this process has imported no torch
        return pool.apply(measure, (tokens,), {"naive": naive})


def measure(tokens: int, *, naive: bool) -> float:
    """Peak growth of this process in MiB over one forward and backward pass."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline_trainer.step.model import PolicyModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=tokens,
    )
    policy = PolicyModel(LlamaForCausalLM(config), max_logits=NAIVE if naive else None)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, VOCABULARY, (tokens // 512, 512))
    before = _peak_mib()
    scores = policy(ids, None, torch.arange(tokens), ids.reshape(-1), 1.0, entropy=True)
    assert scores.entropy is not None
    (scores.logprobs + scores.entropy).sum().backward()
    return round(_peak_mib() - before, 1)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
