"""What methods of generation save: tokens until a held-out reward, or episodes of as many steps.

Each comparison runs the same job with and without a method, with several seeds of training, on one
installation, one job after another. With a target, tokens are those of training episodes until the
held-out reward reaches it, interpolated between the last measurement below it and the first that
reaches it; a job that never does counts with all its tokens, and is listed. Without a target, both
arms train as many steps, and the episodes that they generate are compared, beside the held-out
reward at the end. Intervals are percentile bootstraps over pairs of seeds.

    .venv/bin/python benchmarks/learning/generation.py --json benchmarks/results/generation.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.enums import JobState, Purpose
from paceline.front.api.documents import MetricRow
from paceline.front.client import Client

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pipeline import machine
from recipes import rows
from rig.installation import ROOT, serving
from rig.smoke import arguments as arguments_of

Pairs = list[tuple[float, float]]
DRAWS, WAIT_S = 10_000, 1200.0
MIXTURE = {"2-plain": 0.45, "2-carry": 0.1, "3": 0.45}  # solved at the start, learnable, hopeless
CARRIES = {"split": "heldout", "mixture": {"2-carry": 1.0}}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job of `examples/`, changed for both arms, and what the arms add to that."""

    job: str
    target: float | None  # held-out reward; None: episodes of as many steps are compared
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
    # Tasks come again often enough for their success rates to be known.
    "dart_number": Comparison(
        job="arithmetic",
        target=None,
        common={
            "tasks": {"options": {"size": 256}},
            "eval": {"every": 20, "tasks": 500},
            "stop": {"steps": 80},
        },
        without={},
        with_method={"experience": {"allocator": {"kind": "dart_rollouts", "slack": 1.5}}},
    ),
    # A chain of six sums is rewarded only if all are right, which groups hardly ever see; without
    # waves they have as many episodes as others have with them.
    "second_wave": Comparison(
        job="chain",
        target=None,
        common={"experience": {"filters": []}, "stop": {"steps": 100}},
        without={
            "recipe": [],
            "experience": {"allocator": None, "advantage_shaping": [], "group_size": 96},
        },
        with_method={},
    ),
}


def main() -> int:
    """Run the jobs and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", choices=COMPARISONS, nargs="+", default=list(COMPARISONS))
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    arguments = arguments_of(parser, seeds=[0])
    found: dict[str, Any] = {"machine": machine(), "comparisons": {}}
    if arguments.json.exists():  # only the comparisons that are asked for are replaced
        found["comparisons"] = json.loads(arguments.json.read_text())["comparisons"]
    with serving(arguments.smoke) as client:
        for name in arguments.only:
            runs = compared(client, name, arguments.seeds, arguments.models)
            target = COMPARISONS[name].target
            found["comparisons"][name] = {"target": target} | summary(runs, target)
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


def run(client: Client, job: dict[str, Any], target: float | None) -> dict[str, Any]:
    """One job to its end: tokens until the target, episodes, and where it ended."""
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
        "episodes": ended(client.verify(status.job_id).counts),
        "steps": status.step,
        "reward_first": evals[0],
        "reward_last": evals[-1],
        "seconds": round(time.perf_counter() - started, 1),
    }


def ended(counts: Mapping[str, int]) -> int:
    """Episodes that were begun and are over, whatever became of them."""
    return counts["admitted"] - counts["queued"] - counts["leased"]


def tokens_to(history: list[MetricRow], target: float | None) -> tuple[float, bool]:
    """Tokens generated when the held-out reward reached the target, and whether it did."""
    generated = {0: 0.0} | {
        row.step: float(row.values["tokens_generated"])
        for row in history
        if row.kind is Purpose.TRAIN
    }
    before = (0.0, 0.0)  # tokens and reward of the last measurement
    for row in history:
        if row.kind is not Purpose.EVAL or target is None:
            continue
        reward, tokens = float(row.values["reward"]), generated[row.step]
        if reward >= target:
            share = (target - before[1]) / max(reward - before[1], 1e-9)
            return before[0] + share * (tokens - before[0]), True
        before = (tokens, reward)
    return max(generated.values()), False


def summary(runs: list[dict[str, dict[str, Any]]], target: float | None) -> dict[str, Any]:
    """The ratio of means with its interval, and the runs."""
    what = "episodes" if target is None else "tokens"
    pairs = pairs_of(runs, what)
    found: dict[str, Any] = {
        f"{what}_ratio": round(ratio(pairs), 3),
        f"{what}_ratio_interval_95": interval(pairs, ratio),
        f"{what}_ratio_runs": [round(mine / other, 3) for mine, other in pairs],
    }
    if target is None:
        rewards = pairs_of(runs, "reward_last")
        found["reward_difference"] = round(difference(rewards), 4)
        found["reward_difference_interval_95"] = interval(rewards, difference)
    else:
        found["not_reached"] = {
            arm: sum(not each[arm]["reached"] for each in runs) for arm in ("without", "with")
        }
    return found | {"runs": runs}


def pairs_of(runs: list[dict[str, dict[str, Any]]], what: str) -> Pairs:
    """A figure of the run with the method and of the one without, for each seed."""
    return [(each["with"][what], each["without"][what]) for each in runs]


def ratio(pairs: Pairs) -> float:
    """Mean of the first over mean of the second."""
    return statistics.mean(a for a, _ in pairs) / statistics.mean(b for _, b in pairs)


def difference(pairs: Pairs) -> float:
    """Mean of the first minus mean of the second."""
    return statistics.mean(a - b for a, b in pairs)


def interval(pairs: Pairs, of: Callable[[Pairs], float], *, seed: int = 0) -> list[float]:
    """The 95 % interval of a figure, from pairs that are drawn with replacement."""
    chance = random.Random(seed)
    found = sorted(of(chance.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return [round(found[int(0.025 * DRAWS)], 4), round(found[int(0.975 * DRAWS) - 1], 4)]


if __name__ == "__main__":
    sys.exit(main())
