"""How much of its gain a method keeps when all samples are k steps old.

One process: the trainer's learner, a sampler with weights of its own, and a queue between them that
delays every batch by k steps. The sampler is the same model in the same precision, so that age is
the only difference between the policy that sampled and the one that is trained. Every method is a
recipe; all have the same tasks, batches, learning rate and number of updates.

    .venv/bin/python benchmarks/staleness.py --json benchmarks/results/staleness.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pipeline import ROOT, machine
from torch import Tensor
from transformers import AutoTokenizer

from paceline.config import JobSpec, resolve_job
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.objective.load import load_objective
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_trainer.columns import Share
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.ranks.rank_info import RankInfo
from paceline_trainer.step.average import WeightAverage
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.mismatch import Mismatch, mismatch_of
from paceline_trainer.step.model import PolicyModel, load_policy, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local_shards

MODEL = ROOT / "models" / "arithmetic"
METHODS = ("ppo", "decoupled_ppo", "tis", "m2po", "bapo", "vcpo", "minpro", "ppo_ewma", "gspo")
DELAYS = (0, 4, 16, 64)
GROUPS, SIZE, MAX_TOKENS, HELD_OUT = 16, 8, 4, 500
MINI_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    method: str
    delay: int
    seed: int
    steps: int
    lr: float


def main() -> int:
    """Run all cases that are not in the file yet, a process each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--delays", type=int, nargs="+", default=DELAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    path: Path = arguments.json
    found: dict[str, Any] = {"machine": machine(), "runs": []}
    if path.exists():
        found = json.loads(path.read_text())
    done = {tuple(run[name] for name in ("method", "delay", "seed")) for run in found["runs"]}
    wanted = product(arguments.seeds, arguments.delays, arguments.methods)
    cases = [
        Case(method, delay, seed, arguments.steps, arguments.lr)
        for seed, delay, method in wanted
        if (method, delay, seed) not in done
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(run, cases):
            found["runs"].append(result)
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps({k: v for k, v in result.items() if k != "curve"}), flush=True)
    return 0


def run(case: Case) -> dict[str, Any]:
    """Train one case and evaluate it."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    started = time.perf_counter()
    spec = job(case)
    group = RankGroup(RankInfo())
    learner, policy, mismatch = make(spec, group)
    sampler = Sampler(policy, seed=case.seed)
    queue = deque(sampler.batch(0) for _ in range(case.delay))
    curve, rows = [sampler.held_out()], list[dict[str, float]]()
    for step in range(case.steps):
        mismatch.versions.published(step, step)
        mismatch.history.keep(step)
        queue.append(sampler.batch(step))
        samples = queue.popleft()
        tokens = sum(len(each.logprobs) for each in samples)
        rows.append(learner.step(Share("b", step, len(samples), tokens, tuple(samples))))
        sampler.follow(policy)
        if (step + 1) % max(case.steps // 8, 1) == 0:
            curve.append(sampler.held_out())
    group.close()
    last = rows[-case.steps // 8 :]
    names = ("entropy_estimate", "kl_behaviour", "ess", "clip_fraction", "active_fraction")
    return {
        "method": case.method,
        "delay": case.delay,
        "seed": case.seed,
        "steps": case.steps,
        "lr": case.lr,
        "before": curve[0],
        "after": statistics.mean(curve[-2:]),
        "best": max(curve),
        "curve": curve,
        "seconds": round(time.perf_counter() - started, 1),
        "last": {name: statistics.mean(row.get(name, 0.0) for row in last) for name in names},
    }


def job(case: Case) -> JobSpec:
    """The job file of a case."""
    raw = {
        "recipe": case.method,
        "name": "staleness",
        "model": {"path": str(MODEL)},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "experience": {"advantage": "grpo", "group_size": SIZE, "max_staleness": case.delay},
        "trainer": {
            "mini_batches": MINI_BATCHES,
            "optimizer": {"lr": case.lr, "betas": [0.9, 0.95], "weight_decay": 0.0},
            "mismatch": {"sequences": 0},
        },
        "stop": {"steps": case.steps},
    }
    return resolve_job(raw)


def make(spec: JobSpec, group: RankGroup) -> tuple[Learner, PolicyModel, Mismatch]:
    """What the trainer's service builds of a job."""
    trainer = spec.trainer
    objective = load_objective(trainer.objective, trainer.hooks)
    policy = load_policy(spec.model.path)
    shard(policy, group, dtype=trainer.dtype)
    average = None
    if "weight_average" in objective.needs:
        options = objective.proximal.options
        average = WeightAverage(policy, beta=options.beta, reset_below=options.reset_below)
    mismatch = mismatch_of(spec, policy, group, snapshots="snapshots" in objective.needs)
    learner = Learner(
        policy=policy,
        optimizer=Optimizer(policy, trainer.optimizer, total_steps=spec.stop.steps),
        objective=objective,
        group=group,
        budget=trainer.tokens_per_micro_batch,
        mini_batches=trainer.mini_batches,
        mismatch=mismatch,
        average=average,
    )
    return learner, policy, mismatch


class Sampler:
    """Samples answers with weights of its own, which follow those of the trainer."""

    def __init__(self, policy: PolicyModel, *, seed: int) -> None:
        self._model = load_policy(str(MODEL)).inner
        tokenizer: Any = AutoTokenizer.from_pretrained(str(MODEL), local_files_only=True)
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)
        self._chance = torch.Generator().manual_seed(seed)
        self._order = np.random.default_rng(seed)
        self._train = ArithmeticTasks(seed)
        self._held_out = ArithmeticTasks(1, split="heldout")
        self.follow(policy)

    @torch.no_grad()
    def follow(self, policy: PolicyModel) -> None:
        """Take over the weights."""
        for own, other in zip(self._model.parameters(), local_shards(policy), strict=True):
            own.copy_(other)

    def batch(self, version: int) -> list[pb.TrainSample]:
        """A batch of groups, with GRPO's advantages."""
        chosen = self._order.choice(len(self._train), GROUPS, replace=False).tolist()
        payloads = [json.loads(self._train[place].payload) for place in chosen]
        prompts = [
            self._tokenizer.encode(each["question"], add_special_tokens=False)
            for each in payloads
            for _ in range(SIZE)
        ]
        said = self._sample(prompts, temperature=1.0)
        answers = [each["answer"] for each in payloads for _ in range(SIZE)]
        rewards = np.array([self._right(s, a) for (s, _), a in zip(said, answers, strict=True)])
        of_groups = rewards.reshape(GROUPS, SIZE)
        spread = of_groups.std(axis=1, ddof=1, keepdims=True)
        advantages = (of_groups - of_groups.mean(axis=1, keepdims=True)) / (spread + 1e-6)
        return [
            _sample(index, prompts[index], *said[index], float(advantage), version)
            for index, advantage in enumerate(advantages.reshape(-1))
        ]

    def held_out(self) -> float:
        """Share of right greedy answers."""
        payloads = [json.loads(self._held_out[place].payload) for place in range(HELD_OUT)]
        said = self._sample(
            [
                self._tokenizer.encode(each["question"], add_special_tokens=False)
                for each in payloads
            ],
            temperature=0.0,
        )
        right = [
            self._right(s, each["answer"]) for (s, _), each in zip(said, payloads, strict=True)
        ]
        return statistics.mean(right)

    def _right(self, tokens: Sequence[int], answer: str) -> float:
        text = tokens[:-1] if tokens and tokens[-1] == self._end else tokens
        return float(self._tokenizer.decode(text).replace(" ", "") == answer)

    @torch.no_grad()
    def _sample(
        self, prompts: Sequence[list[int]], *, temperature: float
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of an answer to each prompt; prompts are padded on the left."""
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        logprobs: list[Tensor] = []
        for _ in range(MAX_TOKENS):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            found = self._model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False
            )
            scores = torch.log_softmax(found.logits[:, -1].float(), -1)
            if temperature:
                drawn = torch.multinomial(scores.exp(), 1, generator=self._chance)
            else:
                drawn = scores.argmax(-1, keepdim=True)
            logprobs.append(scores.gather(-1, drawn))
            tokens = torch.cat([tokens, drawn], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        answers, chances = tokens[:, longest:].tolist(), torch.cat(logprobs, 1).tolist()
        lengths = [_length(each, self._end) for each in answers]
        return [(a[:n], c[:n]) for a, c, n in zip(answers, chances, lengths, strict=True)]


def _length(tokens: list[int], end: int) -> int:
    return tokens.index(end) + 1 if end in tokens else len(tokens)


def _sample(
    row: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    logprobs: Sequence[float],
    advantage: float,
    version: int,
) -> pb.TrainSample:
    asked, end = len(prompt), len(prompt) + len(answer)
    return pb.TrainSample(
        group_id=f"g{row // SIZE}",
        index=row % SIZE,
        row=row,
        tokens=[*prompt, *answer],
        spans=[
            types_pb2.TokenSpan(start=0, end=asked, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
            types_pb2.TokenSpan(start=asked, end=end, source=types_pb2.TOKEN_SOURCE_POLICY),
        ],
        logprobs=logprobs,
        versions=[types_pb2.VersionRun(version=version, count=len(answer))],
        advantages=[advantage],
        temperature=1.0,
        weight=1.0,
    )


if __name__ == "__main__":
    sys.exit(main())
