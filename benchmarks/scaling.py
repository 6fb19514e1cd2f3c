"""Autoscaling of a simulated job: time to the planned size, reversals, waiting and cost.

Usage: python benchmarks/scaling.py [--json PATH] [--hours N] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rig.smoke import arguments

from paceline.config.service import ControllerOptions
from paceline_controller.scaling.planner import Speed
from paceline_harness.scaling.rehearsal import Rehearsal, planned
from paceline_harness.scaling.simulated import (
    SizeChange,
    WorkloadModel,
    World,
    reversals,
    simulate,
)

PERIOD_S = 5.0
OPTIONS = ControllerOptions()
LAW = WorkloadModel(
    batch_groups=16,
    group_size=8,
    max_staleness=2,
    step_s=30.0,
    spread_s=3.0,
    episode_tokens=790.0,
    max_concurrent=1024,
)
LAWS = {
    "even": LAW,
    "batching": replace(LAW, speed=Speed(fixed_s=0.03, request_s=0.003)),
    "synchronous": replace(LAW, max_staleness=0),
}


def grown(law: WorkloadModel, seed: int, hours: float) -> dict[str, Any]:
    """Start with one worker, and run until some hours after the second resize.

    `planned` follows from the true workload, not from measurements of it. `periods` are counted
    from the first moment at which all requested workers are up.
    """
    world, rehearsal = World(law, seed=seed), Rehearsal(law, OPTIONS)
    number = planned(law, OPTIONS)
    changes: list[SizeChange] = []
    up_s, away_s, most_away_s = None, 0.0, 0.0
    found: dict[str, Any] = {"planned": number}
    while len(changes) < 2 or world.now_s < changes[1].at_s + 3600 * hours:
        changes += simulate(world, rehearsal, seconds=PERIOD_S, period_s=PERIOD_S)
        size = sum(world.asked.values())
        if up_s is None and size > 1 and world.all_up:
            up_s = world.now_s
            found |= {"first_size": size, "up_s": up_s}
        if up_s is None:
            continue
        if is_near(size, number) and "periods" not in found:
            found["periods"] = (world.now_s - up_s) / PERIOD_S
            found["steps"] = world.training.step
        away_s = away_s + PERIOD_S if abs(size - number) > 0.15 * number else 0.0
        most_away_s = max(most_away_s, away_s)
    return found | {
        "most_minutes_outside_15_percent": most_away_s / 60,
        "orders": [[change.at_s, change.total] for change in changes],
        "turns_per_hour": reversals(changes) / hours,
    }


def is_near(size: int, number: float) -> bool:
    """Whether a size is within a tenth, or one worker, of a number."""
    return abs(size - number) <= max(1.0, 0.1 * number)


class Paid:
    """Counts the worker-hours of requested workers."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self.hours = 0.0

    def size(self, world: World) -> Mapping[str, int]:
        """Sizes decided by the rehearsal."""
        self.hours += sum(world.asked.values()) * PERIOD_S / 3600
        return self._rehearsal.size(world)


def kept(law: WorkloadModel, seed: int, hours: float) -> dict[str, Any]:
    """Start with the planned size: reversals per hour, waiting, worker-hours."""
    world = World(law, seed=seed)
    number = planned(law, OPTIONS)
    paid = Paid(Rehearsal(law, OPTIONS, replicas=round(number)))
    changes: Sequence[SizeChange] = simulate(world, paid, seconds=3600 * hours, period_s=PERIOD_S)
    training = world.training
    return {
        "planned": number,
        "sizes": [change.total for change in changes],
        "turns_per_hour": reversals(changes) / hours,
        "wait_share": training.wait_s / (training.wait_s + training.work_s),
        "workers_mean": paid.hours / hours,
        "steps": training.step,
    }


def main() -> None:
    """Run every workload without noise and with 20 % noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=5)
    options = arguments(parser, hours=0.1, seeds=1)
    found = [
        {
            "law": name,
            "noise": noise,
            "seed": seed,
            "period_s": PERIOD_S,
            "grown": grown(replace(law, noise=noise), seed, options.hours),
            "kept": kept(replace(law, noise=noise), seed, options.hours),
        }
        for name, law in LAWS.items()
        for noise, seeds in ((0.0, 1), (0.2, options.seeds))
        for seed in range(seeds)
    ]
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
