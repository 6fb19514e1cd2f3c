"""What the built-in multi-turn environments teach a small model: held-out reward, before and after.

The example jobs, with three seeds of training each; all are measured on the same 200 held-out
tasks, with the weights they begin with and the last ones. The interval is a percentile bootstrap of
the mean gain that draws both seeds and tasks with replacement, and keeps before and after of a task
together.

    .venv/bin/python benchmarks/learning/environments.py --json benchmarks/results/environments.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from paceline.enums import JobState, Purpose
from paceline.front.client import Client

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pipeline import machine
from rig.installation import ROOT, serving
from rig.smoke import arguments as arguments_of

ENVIRONMENTS = ("guess_number", "tools", "key_door")
TASKS, DRAWS, WAIT_S = 200, 10_000, 1200.0
Rewards = dict[str, float]  # by task


def main() -> int:
    """Run the jobs and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--only", choices=ENVIRONMENTS, nargs="+", default=ENVIRONMENTS)
    arguments = arguments_of(parser, seeds=[0])
    found: dict[str, Any] = {"machine": machine(), "environments": {}}
    with serving(arguments.smoke) as client:
        for name in arguments.only:
            runs = [run(client, job_of(name, seed, arguments.models)) for seed in arguments.seeds]
            found["environments"][name] = summary(runs)
            print(name, json.dumps(found["environments"][name]), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """One job: rewards of the held-out tasks at its beginning and end."""
    started = time.perf_counter()
    status = client.wait(client.submit(job).status.job_id, timeout_s=WAIT_S).status
    if status.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"{job['name']}: {status.state}: {status.reason}")
    before, after = evals(client, status.job_id)
    return {
        "seed": job["tasks"]["seed"],
        "seconds": round(time.perf_counter() - started, 1),
        "steps": status.step,
        "gains": {task: after[task] - before[task] for task in before},
        "before": statistics.mean(before.values()),
        "after": statistics.mean(after.values()),
    }


def job_of(name: str, seed: int, models: Path) -> dict[str, Any]:
    """The example job with a seed of training, measured at its beginning and end only."""
    job = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    job["name"] = f"{job['name']}-{seed}"
    job["model"]["path"] = str((models / name).resolve())
    job["tasks"]["seed"] = seed
    job["eval"] |= {"every": job["stop"]["steps"], "tasks": TASKS}
    job["experience"]["keep_trajectories"] = 4 * TASKS
    return job


def evals(client: Client, job_id: str) -> tuple[Rewards, Rewards]:
    """Rewards by task with the first and the last weights that were measured."""
    by_version: dict[int, Rewards] = defaultdict(dict)
    token = ""
    while True:
        page = client.list_trajectories(
            job_id, page_size=200, page_token=token, purpose=Purpose.EVAL
        )
        for each in page.trajectories:
            by_version[each.oldest_version][each.task_id] = each.score.reward
        token = page.next_page_token
        if not token:
            break
    before, after = by_version[min(by_version)], by_version[max(by_version)]
    if len(by_version) < 2 or before.keys() != after.keys():
        raise RuntimeError(f"measured versions and tasks: {_sizes(by_version)}")
    return before, after


def _sizes(by_version: dict[int, Rewards]) -> dict[int, int]:
    return {version: len(rewards) for version, rewards in by_version.items()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The gain over all seeds and tasks with its interval; the runs without their tasks."""
    gains = [list(each["gains"].values()) for each in runs]
    low, high = interval(gains)
    return {
        "tasks": len(gains[0]),
        "before": round(statistics.mean(each["before"] for each in runs), 4),
        "after": round(statistics.mean(each["after"] for each in runs), 4),
        "gain": round(statistics.mean(map(statistics.mean, gains)), 4),
        "gain_interval_95": [round(low, 4), round(high, 4)],
        "runs": [{key: value for key, value in each.items() if key != "gains"} for each in runs],
    }


def interval(gains: list[list[float]], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean of gains [seed][task], which are drawn in both directions."""
    chance, num_tasks = random.Random(seed), len(gains[0])
    means: list[float] = []
    for _ in range(draws):
        drawn = chance.choices(gains, k=len(gains))
        totals = [sum(column) for column in zip(*drawn, strict=True)]
        means.append(sum(chance.choices(totals, k=num_tasks)) / num_tasks / len(gains))
    means.sort()
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


if __name__ == "__main__":
    sys.exit(main())
