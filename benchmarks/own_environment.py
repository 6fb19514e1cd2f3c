"""What hostile worlds of a job cost its healthy episodes.

The same job with an environment of its own runs undisturbed and disturbed, alternating: one attempt
in 50 blocks for a minute, one raises, one never returns, one exhausts its memory, one forks. In a
third run, one in 50 spins for ever, and takes a core from all others. The time of healthy episodes
is that of those which ended in their first attempt, from reset to score.

    .venv/bin/python benchmarks/own_environment.py --json benchmarks/results/own_environment.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline import machine
from rig.installation import ROOT, serving
from rig.smoke import arguments as arguments_of

from paceline.front.client.client import Client

RUNS: dict[str, tuple[str, ...]] = {
    "undisturbed": (),
    "disturbed": ("block", "raise", "wait", "memory", "fork"),
    "spinning": ("spin",),
}
STEPS, ROUNDS = 30, 3
WORLD = """
import json, os, random, threading, time
from paceline.plugins import EnvironmentPlugin

chance = random.Random(os.urandom(8))


def tasks(*, seed, deeds):
    return [{"number": number % 10} for number in range(1000)]


class World:
    replayable = True

    def __init__(self, *, deeds):
        self.deed = ""
        self.number = 0
        at = chance.randrange(50)
        if at < len(deeds):
            self.deed = deeds[at]

    def reset(self, task, seed):
        self.number = json.loads(task.payload)["number"]
        return f"{self.number}+0="

    def step(self, action):
        deed, self.deed = self.deed, ""
        if deed == "block":
            time.sleep(60)
        elif deed == "raise":
            raise RuntimeError("hostile")
        elif deed == "wait":
            threading.Event().wait()
        elif deed == "spin":
            while True:
                pass
        elif deed == "memory":
            hoard = []
            while True:
                hoard.append(bytearray(1 << 26))
        elif deed == "fork":
            os.fork()
        time.sleep(0.02)
        return "", 1.0 + (action.strip() == str(self.number)), True


ENVIRONMENT = EnvironmentPlugin(tasks="world:tasks", world="world:World")
"""


def main() -> int:
    """Run and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = arguments_of(parser, rounds=1)
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in RUNS}
    with tempfile.TemporaryDirectory() as name, serving(arguments.smoke) as client:
        folder = Path(name)
        (folder / "world.py").write_text(WORLD)
        for _ in range(arguments.rounds):
            for kind, deeds in RUNS.items():
                rows[kind].append(run(client, folder, deeds))
            print(json.dumps({kind: each[-1] for kind, each in rows.items()}), flush=True)
    found = {"machine": machine(), "load_average": os.getloadavg(), "runs": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def run(client: Client, folder: Path, deeds: tuple[str, ...]) -> dict[str, Any]:
    """One job: its throughput, and times of healthy episodes in milliseconds."""
    started = time.perf_counter()
    job = client.wait(client.submit(job_of(folder, deeds)).status.job_id, timeout_s=900.0)
    seconds = time.perf_counter() - started
    job_id = job.status.job_id
    trajectories: list[Any] = []
    token = ""
    while not trajectories or token:
        page = client.list_trajectories(job_id, page_size=200, page_token=token)
        trajectories += page.trajectories
        token = page.next_page_token
    healthy = sorted(1000 * each.timing.total_s for each in trajectories if each.attempt == 1)
    report = client.verify(job_id)
    return {
        "state": job.status.state,
        "seconds": round(seconds, 1),
        "steps": job.status.step,
        "episodes": len(trajectories),
        "later_attempts": sum(each.attempt > 1 for each in trajectories),
        "zeros": sum(each.score.reward == 0 for each in trajectories),
        "p50_ms": round(statistics.median(healthy), 1),
        "p99_ms": round(healthy[int(0.99 * (len(healthy) - 1))], 1),
        "ledger_consistent": report.ok,
        "dropped": dict(report.dropped),
    }


def job_of(folder: Path, deeds: tuple[str, ...]) -> dict[str, Any]:
    """A job with these deeds among its episodes."""
    return {
        "name": "own",
        "model": {"path": str(ROOT / "models/arithmetic")},
        "code": {"path": str(folder)},
        "tasks": {
            "environment": "world:ENVIRONMENT",
            "options": {"deeds": list(deeds)},
            "step_timeout_s": 2.0,
        },
        "eval": None,
        "sampling": {"max_tokens": 4, "max_context": 32, "on_truncation": "score"},
        "reward": [{"kind": "environment"}],
        "experience": {
            "batch_groups": 16,
            "group_size": 8,
            "filters": [],
            "keep_trajectories": 4096,
        },
        "rollout": {"engine": {"kind": "torch"}, "max_concurrent": 256},
        "trainer": {"optimizer": {"kind": "adamw", "lr": 1.0e-4}},
        "stop": {"steps": STEPS},
    }


if __name__ == "__main__":
    sys.exit(main())
