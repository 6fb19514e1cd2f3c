"""How rollout workers follow a simulated job: time to the planner's number, turns, waiting, cost.

Usage: python benchmarks/scaling.py [--json PATH] [--hours N] [--seeds N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.service import ControllerOptions
from paceline_controller.scaling.planner import Speed
from paceline_controller.scaling.rehearsal import Rehearsal, planned
from paceline_controller.scaling.simulated import (
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
    """From one worker, for so long after the first order: how far from the planner's number.

    `planned` is that of the law itself, not of the figures as they were measured; periods count
    from the moment at which everything that was ordered is up for the first time.
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
    """Within a tenth, or one worker."""
    return abs(size - number) <= max(1.0, 0.1 * number)


class Paid:
    """Counts what the workers that were asked for cost, in worker-hours."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self.hours = 0.0

    def size(self, world: World) -> Mapping[str, int]:
        """As it is decided."""
        self.hours += sum(world.asked.values()) * PERIOD_S / 3600
        return self._rehearsal.size(world)


def kept(law: WorkloadModel, seed: int, hours: float) -> dict[str, Any]:
    """From the right number on: turns in an hour, waiting, worker-hours."""
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
    """Every law, without noise and with 20 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
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
