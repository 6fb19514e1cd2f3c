"""Injects faults of all kinds into a local installation, and checks independent records of it.

    .venv/bin/python benchmarks/faults.py --json benchmarks/results/faults.json --profile full

`short` takes less than 8 minutes and injects each kind once if time allows; `full` injects at least
300 faults. `make generate` writes docs/faults.md from the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos.faults import not_injected
from chaos.naming import Named, Naming
from chaos.runner import Profile, Runner
from chaos.site import make_model
from chaos.table import table, table_of_names
from rig.smoke import arguments as arguments_of

from paceline.platform.files import write_json

ROOT = Path(__file__).resolve().parent.parent
PROFILES = {
    "short": Profile(
        rounds=1,
        faults_per_job=14,
        steps=120,
        wall_s=75.0,
        budget_s=240.0,
        patience_s=40.0,
        end_s=80.0,
        freezes_s=(0.5, 2.0, 5.0),
        named="^(refused|start fails: rollout, a missing|hangs: trainer|frozen: rollout)",
    ),
    # Limits are for a busy machine: none is reached on a quiet one.
    "smoke": Profile(
        rounds=1,
        faults_per_job=3,
        steps=15,
        wall_s=600.0,
        budget_s=600.0,
        patience_s=300.0,
        end_s=600.0,
        freezes_s=(0.5,),
        named="^refused",
    ),
    "full": Profile(
        rounds=9,
        faults_per_job=25,
        steps=250,
        wall_s=150.0,
        budget_s=4 * 3600.0,
        patience_s=90.0,
        end_s=300.0,
        freezes_s=(0.5, 2.0, 5.0, 12.0),
    ),
}


def main() -> int:
    """Run a campaign and write its JSON."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="short")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="regular expression: only matching kinds")
    parser.add_argument("--named", help="the same, of those that a status names; of the profile")
    parser.add_argument("--minutes", type=float, help="time budget, instead of the profile's")
    parser.add_argument("--workers", type=int, default=2, help="of each kind")
    kinds = "^(kill trainer|network reset|environment plug-in: raise)$"
    result = run(arguments_of(parser, profile="smoke", kinds=kinds, workers=1))
    print(json.dumps(result["total"], indent=1))
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a campaign; the JSON is written after each job, in case it is interrupted."""
    profile, before = PROFILES[arguments.profile], machine()
    if arguments.minutes is not None:
        profile = replace(profile, budget_s=60.0 * arguments.minutes)
    began = time.monotonic()
    model = make_model(model_folder(arguments.smoke))
    runner = Runner(
        model=model,
        profile=profile,
        seed=arguments.seed,
        wanted=arguments.kinds,
        workers=arguments.workers,
    )

    named: list[Named] = []
    wanted = profile.named if arguments.named is None else arguments.named

    def write() -> dict[str, Any]:
        result = {
            "machine": before,
            "load_average_after": os.getloadavg(),
            "profile": arguments.profile,
            "seed": arguments.seed,
            "commit": commit(),
            "seconds": round(time.monotonic() - began, 1),
            "not_injected": not_injected(runner.site),
            **table(runner.told),
            **table_of_names(named),
        }
        write_json(arguments.json, result)
        return result

    try:
        runner.run(after_job=write)
        named.extend(Naming(runner.site, model).run(wanted))
        return write()
    finally:
        runner.close()


def model_folder(smoke: Path | None) -> Path:
    """That of the smoke, which has a model: to make one takes as long as a trainer to start."""
    return Path(tempfile.mkdtemp(prefix="paceline-model-")) if smoke is None else smoke / "model"


def machine() -> dict[str, Any]:
    """The machine, and its load."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def commit() -> str:
    """Commit of the checkout; empty if there is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
