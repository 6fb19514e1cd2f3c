"""Cost of tracing: two installations side by side, one of them with tracing.

Both run the pipeline benchmark at the same time on the same cores, so that other load on the
machine affects both; only the time in which both are steady counts. The traced one exports to a
real OTLP receiver on the same machine. They take turns in starting first. The results are medians
over rounds of the ratios of throughput and of CPU time per thousand episodes. `rounds_differ` is
half of the range of these ratios; smaller differences are not significant. The cost is proportional
to the sampled share, since more traces only add spans, so a large share shows the cost of a small
one.

    .venv/bin/python benchmarks/tracing.py --json benchmarks/results/tracing.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline import DEMO, SIMULATED, machine, observe, steady, table
from rig.installation import ROOT
from rig.smoke import arguments as arguments_of

from paceline_harness.otlp import Collector

FIGURES = ("episodes_per_s", "cpu_seconds_per_1000_episodes")


def main() -> int:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--samples", type=float, nargs="+", default=[0.01, 0.2])
    parser.add_argument("--scenario", choices=["demo", "simulated"], default="demo")
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "arithmetic.yaml")
    parser.add_argument(
        "--model", type=Path, default=None, help="model folder, instead of the job's"
    )
    arguments = arguments_of(parser, rounds=1, steps=16, samples=[0.1], scenario="simulated")
    found = {
        "machine": machine(),
        "scenario": arguments.scenario,
        "steps": arguments.steps,
        "shares": [measure_share(arguments, sample) for sample in arguments.samples],
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure_share(arguments: argparse.Namespace, sample: float) -> dict[str, Any]:
    """Run all rounds with one sampled share."""
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        rounds.append(measure(arguments, sample, traced_first=number % 2 == 0))
        print(json.dumps(rounds[-1]), flush=True)
    figures = {figure: compare(rounds, figure) for figure in FIGURES}
    print(json.dumps({"sample": sample, **figures}, indent=1))
    return {"sample": sample, **figures, "rounds": rounds}


def measure(arguments: argparse.Namespace, sample: float, *, traced_first: bool) -> dict[str, Any]:
    """Run one round."""
    overrides = {**(DEMO if arguments.scenario == "demo" else SIMULATED)}
    overrides["stop.steps"] = arguments.steps
    if arguments.model is not None:
        overrides["model.path"] = str(arguments.model.resolve())
    load = machine()["load_average"][0]
    with Collector() as collector, ThreadPoolExecutor(2) as threads:
        more = ("--otlp", collector.endpoint, "--otlp-sample", str(sample))
        # A smoke has only the traced one, beside itself.
        kinds = (True,) if arguments.smoke else (traced_first, not traced_first)
        runs = {
            traced: threads.submit(
                observe,
                arguments.job,
                overrides,
                *(more if traced else ()),
                smoke=arguments.smoke,
            )
            for traced in kinds
        }
        seen = {traced: runs.get(traced, runs[kinds[0]]).result() for traced in (True, False)}
        spans = len(collector.spans())
    parts = {traced: steady(spec, samples) for traced, (spec, samples, _) in seen.items()}
    begin = max(samples[0].at_s for samples in parts.values())
    end = min(samples[-1].at_s for samples in parts.values())
    row: dict[str, Any] = {"load_average": round(load, 2), "spans": spans}
    for traced, (spec, _, summary) in seen.items():
        together = [s for s in parts[traced] if begin <= s.at_s <= end]
        figures = table(arguments.scenario, spec, together, summary)
        row["with" if traced else "without"] = {
            "seconds": figures["seconds"],
            "episodes": figures["episodes"],
            "episodes_per_s": figures["episodes_per_s"],
            "cpu_seconds_per_1000_episodes": processor_time(figures),
        }
    return row


def processor_time(figures: dict[str, Any]) -> float:
    """CPU seconds of all services per thousand episodes."""
    return round(1000 * sum(figures["cpu_seconds"].values()) / max(figures["episodes"], 1), 4)


def compare(rounds: Sequence[dict[str, Any]], figure: str) -> dict[str, float]:
    """Medians of both installations and of their ratio, and the variation between rounds."""
    ratios = [row["with"][figure] / row["without"][figure] for row in rounds]
    return {
        **{
            side: round(statistics.median(row[side][figure] for row in rounds), 4)
            for side in ("without", "with")
        },
        "ratio": round(statistics.median(ratios), 4),
        "rounds_differ": round((max(ratios) - min(ratios)) / 2, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
