"""How much of its gain a method keeps when all samples are k steps old.

One process: the trainer's learner, the torch engine, and a queue between them that delays every
batch by k steps. Both compute in float32, so that age is the only difference between the policy
that sampled and the one that is trained. Every method is a recipe; all have the same tasks,
batches, learning rate and number of updates.

    .venv/bin/python benchmarks/staleness.py --json benchmarks/results/staleness.json
"""

from __future__ import annotations

import argparse
import asyncio
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
from pipeline import machine
from rig.installation import ROOT
from rig.smoke import arguments as arguments_of
from transformers import AutoTokenizer

from paceline.config import JobSpec, resolve_job
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.methods.objective.load import load_objective
from paceline.plugins import EngineRequest
from paceline.types import SamplingParams
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline.weights import SnapshotHeader, Staging, plan
from paceline_rollout.engines.torch.engine import TorchEngine
from paceline_trainer.columns import Share
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.ranks.rank_info import RankInfo
from paceline_trainer.step.average import WeightAverage
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.mismatch.comparison import Mismatch, mismatch_of
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import local_shards

JOB = "staleness"
MODEL = ROOT / "models" / "arithmetic"
METHODS = ("ppo", "decoupled_ppo", "tis", "m2po", "bapo", "vcpo", "minpro", "ppo_ewma", "gspo")
DELAYS = (0, 4, 16, 64)
GROUPS, SIZE, MAX_TOKENS, HELD_OUT = 16, 8, 4, 400
MINI_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    method: str
    delay: int
    seed: int
    steps: int
    lr: float
    model: Path = MODEL


def main() -> int:
    """Run all cases that are not in the file yet, a process each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--delays", type=int, nargs="+", default=DELAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--processes", type=int, default=2)
    arguments = arguments_of(parser, methods=["ppo"], delays=[1], seeds=[0], steps=2, processes=1)
    path: Path = arguments.json
    found: dict[str, Any] = {"machine": machine(), "runs": []}
    if path.exists():
        found = json.loads(path.read_text())
    done = {tuple(run[name] for name in ("method", "delay", "seed", "lr")) for run in found["runs"]}
    wanted = product(arguments.seeds, arguments.delays, arguments.methods)
    model: Path = arguments.smoke / "model" if arguments.smoke else MODEL
    cases = [
        Case(method, delay, seed, arguments.steps, arguments.lr, model)
        for seed, delay, method in wanted
        if (method, delay, seed, arguments.lr) not in done
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")  # this process computes nothing
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
    loop = asyncio.new_event_loop()
    sampler = Sampler(loop, policy, case.model, seed=case.seed)
    queue = deque(sampler.batch(0) for _ in range(case.delay))
    curve, rows = [sampler.held_out()], list[dict[str, float]]()
    for step in range(case.steps):
        mismatch.versions.published(step, step)
        mismatch.history.copy(step)
        queue.append(sampler.batch(step))
        samples = queue.popleft()
        tokens = sum(len(each.logprobs) for each in samples)
        age_steps = {version: version for version in range(step + 1)}
        share = Share("b", step, len(samples), tokens, tuple(samples), age_steps=age_steps)
        rows.append(learner.step(share))
        sampler.follow(step + 1)
        if (step + 1) % max(case.steps // 8, 1) == 0:
            curve.append(sampler.held_out())
    sampler.close()
    loop.close()
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
        "name": JOB,
        "model": {"path": str(case.model)},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "experience": {"advantage": "grpo", "group_size": SIZE, "max_staleness": case.delay},
        "trainer": {
            "dtype": "float32",  # as the engine's, also where bfloat16 is fast
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
    """The torch engine in this process; it samples with the weights that it was given last."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, policy: PolicyModel, model: Path, *, seed: int
    ) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)
        self._loop = loop
        self._policy = policy
        self._seed = seed
        self._order = np.random.default_rng(seed)
        self._train = ArithmeticTasks(seed)
        self._held_out = ArithmeticTasks(1, split="heldout")
        self._engine = TorchEngine(
            model_dir=model,
            dtype="float32",
            max_context=64,
            max_concurrent=256,
            threads=1,
            tokenizer_dir=None,
            job_id=JOB,
        )
        self._asked = 0
        loop.run_until_complete(self._engine.start())
        self._emissions = self._engine.emissions()
        self.follow(0)

    def close(self) -> None:
        """Stop the engine."""
        self._loop.run_until_complete(self._engine.close())

    def follow(self, version: int) -> None:
        """Load the weights that the trainer has now."""
        self._loop.run_until_complete(
            self._engine.load(_snapshot(self._policy, version), "in_flight")
        )

    def batch(self, version: int) -> list[pb.TrainSample]:
        """A batch of groups, with GRPO's advantages."""
        chosen = self._order.choice(len(self._train), GROUPS, replace=False).tolist()
        payloads = [json.loads(self._train[place].payload) for place in chosen]
        prompts = [tokens for each in payloads for tokens in [self._prompt(each)] * SIZE]
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
        said = self._sample([self._prompt(each) for each in payloads], temperature=0.0)
        right = [
            self._right(s, each["answer"]) for (s, _), each in zip(said, payloads, strict=True)
        ]
        return statistics.mean(right)

    def _prompt(self, payload: dict[str, str]) -> list[int]:
        return self._tokenizer.encode(payload["question"], add_special_tokens=False)

    def _right(self, tokens: Sequence[int], answer: str) -> float:
        text = tokens[:-1] if tokens and tokens[-1] == self._end else tokens
        return float(self._tokenizer.decode(text).replace(" ", "") == answer)

    def _sample(
        self, prompts: Sequence[list[int]], *, temperature: float
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of an answer to each prompt."""
        requests = [
            EngineRequest(
                str(self._asked + place),
                tuple(prompt),
                SamplingParams(
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                    stop_tokens=(self._end,),
                    seed=(self._seed << 32) + self._asked + place,
                ),
            )
            for place, prompt in enumerate(prompts)
        ]
        first, self._asked = self._asked, self._asked + len(prompts)
        found = self._loop.run_until_complete(self._run(requests))
        return [found[str(first + place)] for place in range(len(prompts))]

    async def _run(
        self, requests: Sequence[EngineRequest]
    ) -> dict[str, tuple[list[int], list[float]]]:
        found = {each.request_id: (list[int](), list[float]()) for each in requests}
        self._engine.submit(requests)
        left = len(requests)
        while left:
            for output in await anext(self._emissions):
                if output.error:
                    raise RuntimeError(output.error)
                tokens, logprobs = found[output.request_id]
                tokens.extend(output.tokens)
                logprobs.extend(output.logprobs)
                left -= output.finish_reason is not None
        return found


def _snapshot(policy: PolicyModel, version: int) -> Staging:
    """The policy's weights as the trainer publishes them."""
    named = dict(zip(dict(policy.inner.named_parameters()), local_shards(policy), strict=True))
    entries, size = plan([(name, "float32", tuple(x.shape)) for name, x in named.items()])
    staging = Staging(
        SnapshotHeader(JOB, version, version, version - 1, -1, 1, size, size, entries)
    )
    for entry in entries:
        values = named[entry.name].detach().contiguous().view(torch.uint8)
        staging.fill(entry.offset, values.numpy().tobytes())
    staging.finish()
    return staging


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
