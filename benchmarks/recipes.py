"""Runs every recipe through all services, on the small model and the same tasks.

One installation; the jobs follow each other, so that each has the whole machine. A recipe is laid
under the same job file, which sets model, tasks, batch and learning rate. What is recorded: the
held-out reward before and after, the reward of the last five batches, seconds a step, and the
difference of the held-out reward to the default objective at equal samples. The small model learns
within few steps whatever the objective, so the table says that a recipe trains and what it costs,
not that its paper's claim holds. Recipes of continuations train chains of sums, whose rewards are
not those of the others.

    .venv/bin/python examples/tools/make_model.py chain
    .venv/bin/python benchmarks/recipes.py --json benchmarks/results/recipes.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml
from pipeline import machine
from rig.installation import ROOT, serving
from rig.smoke import arguments as arguments_of

from paceline.enums import JobState, Purpose
from paceline.front.api.documents import MetricRow
from paceline.front.client import Client
from paceline.plugins import registry

JOB = ROOT / "examples" / "arithmetic.yaml"
WAIT_S = 600.0
TAIL = 5  # batches
DEFAULT = "default"
# The model that `python examples/tools/make_model.py chain` creates.
CHAINS: dict[str, Any] = {
    "model": {"path": str(ROOT / "models" / "chain")},
    "tasks": {"environment": "chain", "options": {"length": 3, "digits": 2}},
    "eval": {"options": {"split": "heldout", "length": 1}},
    "sampling": {"max_tokens": 6, "max_context": 256},
    "reward": [{"kind": "environment"}],
}
# What a recipe asks of a job besides the model and the tasks.
OWN: dict[str, dict[str, Any]] = {
    # Continuations need turns. An error ends the episode, so all turns but the last were right.
    "rac": CHAINS | {"experience": {"allocator": {"kind": "rac", "share": 1.0}}},
    "scope": CHAINS | {"experience": {"allocator": {"kind": "scope", "share": 1.0}}},
    # As many episodes a step as the others, in groups as wide as that allows.
    "brorl": {"experience": {"batch_groups": 1, "group_size": 256}},
    # The vocabulary of the small model has only digits and signs. The recipe's own reward for the
    # format adds 1 to all of its figures.
    "prompt_augmentation": {
        "tasks": {
            "transform": {
                "kind": "prompt_augmentation",
                "templates": [
                    {"name": "plain", "text": "{question}"},
                    {"name": "zero", "text": "0+{question}"},
                ],
            }
        },
        "sampling": {"max_context": 18},
        "reward": [{"kind": "exact"}],
    },
    # Tasks have to come again for what is known of them.
    **{
        name: {"tasks": {"options": {"digits": 2, "operations": ["+"], "size": 256}}}
        for name in ("dart", "difficulty_pools", "vade")
    },
    "fapo": {
        "reward": [
            {"kind": "exact"},
            # Stands for a judge: flags the sums that begin with 1.
            {"kind": "regex", "name": "flawed", "weight": 0.0, "pattern": "^(1)"},
        ],
        # In the paper rewards are -1 and 1; here they are 0 and 1.
        "experience": {"advantage": {"kind": "fapo", "penalty": 0.5}},
    },
    # Answers of this task may use the whole of `max_tokens`, which is 4.
    "dapo": {"reward": [{"kind": "exact"}, {"kind": "overlong", "limit": 8, "buffer": 2}]},
    "dr_grpo": {
        "trainer": {"objective": {"aggregation": {"kind": "seq_mean_token_sum_norm", "norm": 4}}}
    },
}


def main() -> int:
    """Run the jobs and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--recipes", nargs="+", default=sorted(registry.installed("recipes")))
    arguments = arguments_of(parser, steps=3)
    found: dict[str, Any] = {"machine": machine(), "steps": arguments.steps, "recipes": {}}
    if arguments.json.exists():  # only the recipes that are asked for are replaced
        found |= {"recipes": json.loads(arguments.json.read_text())["recipes"]}
    with serving(arguments.smoke) as client:
        for name in (DEFAULT, *arguments.recipes):
            runs = [run(client, name, seed, arguments.steps) for seed in arguments.seeds]
            found["recipes"][name] = runs
            print(name, json.dumps(runs), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    recipes: dict[str, list[dict[str, Any]]] = found["recipes"]
    failed = [name for name, runs in recipes.items() if any("error" in each for each in runs)]
    print(f"failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def run(client: Client, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One job to its end; an `error` instead of figures if it did not succeed."""
    job = yaml.safe_load(JOB.read_text())
    job["model"]["path"] = str(ROOT / job["model"]["path"])
    job["tasks"]["seed"] = seed
    job["stop"] = {"steps": steps}
    job["eval"] |= {"every": steps}
    job["name"] = f"{name.replace('_', '-')}-{seed}"
    for section, values in OWN.get(name, {}).items():
        own = job.get(section)
        job[section] = {**own, **values} if isinstance(own, dict) else values
    if name != DEFAULT:
        job["recipe"] = name
    view = client.submit(job)
    status = client.wait(view.status.job_id, timeout_s=WAIT_S).status
    if status.state is not JobState.SUCCEEDED:
        return {"seed": seed, "error": f"{status.state.name.lower()}: {status.reason}"}
    return {"seed": seed} | figures(rows(client, status.job_id))


def rows(client: Client, job_id: str) -> list[MetricRow]:
    """The history of a job."""
    found: list[MetricRow] = []
    while page := client.list_metrics(job_id, after=len(found)).rows:
        found += page
    return found


def figures(history: list[MetricRow]) -> dict[str, Any]:
    """Rewards, seconds a step, and what the corrections did."""
    steps = [row.values for row in history if row.kind is Purpose.TRAIN]
    evals = [row.values["reward"] for row in history if row.kind is Purpose.EVAL]
    busy = [row["step_s"] for row in steps if "step_s" in row]
    last = steps[-TAIL:]
    slots = {name for row in last for name in row if name.endswith("_zeroed")}
    return {
        "steps": len(steps),
        "eval_before": evals[0],
        "eval_after": evals[-1],
        "reward_last": statistics.mean(row["reward_mean"] for row in last),
        "step_s": statistics.median(busy),
        "zeroed": {name: statistics.mean(row.get(name, 0.0) for row in last) for name in slots},
    }


if __name__ == "__main__":
    sys.exit(main())
