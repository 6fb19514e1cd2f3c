"""What traces cost: the pipeline benchmark without them and with them, round by round.

Each round runs both, in turns the one or the other first, on fresh platforms that send to a real
OTLP receiver in this process. Medians over rounds, and the ratio of those with traces to those
without: of throughput, and of processor time for a thousand episodes, which other load on the
machine disturbs less. `spread` is the largest deviation of a round without traces from their
median: a difference below it says nothing.

    .venv/bin/python benchmarks/tracing.py --json benchmarks/results/tracing.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import DEMO, ROOT, SIMULATED, machine, run

from paceline.testing.otlp import Collector

FIGURES = ("episodes_per_s", "cpu_seconds_per_1000_episodes")


def main() -> int:
    """Run the rounds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--sample", type=float, default=0.01)
    parser.add_argument("--scenario", choices=["demo", "simulated"], default="simulated")
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "arithmetic.yaml")
    parser.add_argument("--model", type=Path, default=None, help="instead of the job's")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for traced in (number % 2 == 1, number % 2 == 0):
            rows.append(measure(arguments, traced=traced))
            print(json.dumps(rows[-1]), flush=True)
    found = {
        "machine": machine(),
        "scenario": arguments.scenario,
        "steps": arguments.steps,
        "sample": arguments.sample,
        **{figure: compare(rows, figure) for figure in FIGURES},
        "rounds": rows,
    }
    print(json.dumps({name: found[name] for name in FIGURES}, indent=1))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(arguments: argparse.Namespace, *, traced: bool) -> dict[str, Any]:
    """One run of the pipeline."""
    overrides = {**(DEMO if arguments.scenario == "demo" else SIMULATED)}
    overrides["stop.steps"] = arguments.steps
    if arguments.model is not None:
        overrides["model.path"] = str(arguments.model.resolve())
    load = machine()["load_average"][0]
    with Collector() as collector:
        more = ("--otlp", collector.endpoint, "--otlp-sample", str(arguments.sample))
        row = run(arguments.scenario, arguments.job, overrides, *(more if traced else ()))
        spans = len(collector.spans())
    cpu_s = sum(row["cpu_seconds"].values())
    return {
        "traced": traced,
        "load_average": round(load, 2),
        "seconds": row["seconds"],
        "episodes": row["episodes"],
        "episodes_per_s": row["episodes_per_s"],
        "cpu_seconds_per_1000_episodes": round(1000 * cpu_s / max(row["episodes"], 1), 3),
        "spans": spans,
    }


def compare(rows: Sequence[dict[str, Any]], figure: str) -> dict[str, float]:
    """Medians without and with traces, their ratio, and how far single rounds are off."""
    without = [row[figure] for row in rows if not row["traced"]]
    with_them = [row[figure] for row in rows if row["traced"]]
    middle = statistics.median(without)
    return {
        "without": middle,
        "with": statistics.median(with_them),
        "ratio": round(statistics.median(with_them) / middle, 4),
        "spread": round(max(abs(value / middle - 1) for value in without), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
