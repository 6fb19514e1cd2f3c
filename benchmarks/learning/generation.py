"""What methods of generation save: tokens that a job generates until it reaches a held-out reward.

Each comparison runs the same job with and without a method, with several seeds of training, on one
installation, one job after another. Tokens are those of training episodes, interpolated between the
last measurement below the target and the first that reaches it; a job that never does counts with
all its tokens, and is listed. The interval of the ratio is a percentile bootstrap over pairs of
seeds.

    .venv/bin/python benchmarks/learning/generation.py --json benchmarks/results/generation.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.api.documents import MetricRow
from paceline.client import Client
from paceline.enums import JobState, Purpose

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pipeline import ROOT, machine
from recipes import rows, serving

DRAWS, WAIT_S = 10_000, 1200.0
MIXTURE = {"2-plain": 0.45, "2-carry": 0.1, "3": 0.45}  # solved at the start, learnable, hopeless
CARRIES = {"split": "heldout", "mixture": {"2-carry": 1.0}}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job of `examples/`, changed for both arms, and what the arms add to that."""

    job: str
    target: float  # held-out reward
    common: dict[str, Any]
    without: dict[str, Any]
    with_method: dict[str, Any]


COMPARISONS: dict[str, Comparison] = {
    "vade": Comparison(
        job="arithmetic",
        target=0.8,
        common={
            "tasks": {"options": {"mixture": MIXTURE, "size": 500}},
            "eval": {"every": 5, "tasks": 300, "options": CARRIES},
            "experience": {"filters": []},
            "stop": {"steps": 120, "eval_reward": 0.8},
        },
        without={},
        with_method={"experience": {"sampler": {"kind": "vade"}}},
    ),
}


def main() -> int:
    """Run the jobs and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", choices=COMPARISONS, nargs="+", default=list(COMPARISONS))
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "comparisons": {}}
    if arguments.json.exists():  # only the comparisons that are asked for are replaced
        found["comparisons"] = json.loads(arguments.json.read_text())["comparisons"]
    with serving() as client:
        for name in arguments.only:
            runs = compared(client, name, arguments.seeds, arguments.models)
            found["comparisons"][name] = {"target": COMPARISONS[name].target} | summary(runs)
            print(name, json.dumps(found["comparisons"][name]), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def compared(
    client: Client, name: str, seeds: list[int], models: Path
) -> list[dict[str, dict[str, Any]]]:
    """For each seed the run without the method and the one with it."""
    comparison = COMPARISONS[name]
    found: list[dict[str, dict[str, Any]]] = []
    for seed in seeds:
        pair: dict[str, dict[str, Any]] = {}
        for arm, own in (("without", comparison.without), ("with", comparison.with_method)):
            job = job_of(comparison, own, models)
            job["tasks"]["seed"] = seed
            job["name"] = f"{name.replace('_', '-')}-{arm}-{seed}"
            pair[arm] = {"seed": seed} | run(client, job, comparison.target)
            print(job["name"], json.dumps(pair[arm]), flush=True)
        found.append(pair)
    return found


def job_of(comparison: Comparison, own: dict[str, Any], models: Path) -> dict[str, Any]:
    """The example job with both changes."""
    job = yaml.safe_load((ROOT / "examples" / f"{comparison.job}.yaml").read_text())
    job["model"]["path"] = str((models / comparison.job).resolve())
    return merged(merged(job, comparison.common), own)


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The mappings laid over each other; whatever else `more` has replaces what `base` has."""
    found = dict(base)
    for key, value in more.items():
        old: Any = found.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        found[key] = merged(old, value) if both else value
    return found


def run(client: Client, job: dict[str, Any], target: float) -> dict[str, Any]:
    """One job to its end: tokens until the target, and where it ended."""
    started = time.perf_counter()
    status = client.wait(client.submit(job).status.job_id, timeout_s=WAIT_S).status
    if status.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"{job['name']}: {status.state}: {status.reason}")
    history = rows(client, status.job_id)
    tokens, reached = tokens_to(history, target)
    evals = [row.values["reward"] for row in history if row.kind is Purpose.EVAL]
    return {
        "tokens": round(tokens),
        "reached": reached,
        "steps": status.step,
        "reward_first": evals[0],
        "reward_last": evals[-1],
        "seconds": round(time.perf_counter() - started, 1),
    }


def tokens_to(history: list[MetricRow], target: float) -> tuple[float, bool]:
    """Tokens generated when the held-out reward reached the target, and whether it did."""
    generated = {0: 0.0} | {
        row.step: float(row.values["tokens_generated"])
        for row in history
        if row.kind is Purpose.TRAIN
    }
    before = (0.0, 0.0)  # tokens and reward of the last measurement
    for row in history:
        if row.kind is not Purpose.EVAL:
            continue
        reward, tokens = float(row.values["reward"]), generated[row.step]
        if reward >= target:
            share = (target - before[1]) / max(reward - before[1], 1e-9)
            return before[0] + share * (tokens - before[0]), True
        before = (tokens, reward)
    return max(generated.values()), False


def summary(runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The ratio of means with its interval, and the runs."""
    pairs = [(each["with"]["tokens"], each["without"]["tokens"]) for each in runs]
    low, high = interval(pairs)
    return {
        "tokens_ratio": round(ratio(pairs), 3),
        "tokens_ratio_interval_95": [round(low, 3), round(high, 3)],
        "tokens_ratio_runs": [round(mine / other, 3) for mine, other in pairs],
        "not_reached": {
            arm: sum(not each[arm]["reached"] for each in runs) for arm in ("without", "with")
        },
        "runs": runs,
    }


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Mean of the first over mean of the second."""
    return statistics.mean(a for a, _ in pairs) / statistics.mean(b for _, b in pairs)


def interval(pairs: list[tuple[float, float]], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the ratio, from pairs that are drawn with replacement."""
    chance = random.Random(seed)
    found = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS) - 1]


if __name__ == "__main__":
    sys.exit(main())
