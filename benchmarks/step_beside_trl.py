"""The trainer's step beside TRL's loss step and plain Hugging Face with AdamW, alternating.

All train the same batch of random tokens again and again. Paceline also receives it from another
process, publishes every step and writes checkpoints. Each side has all cores, and the number of
threads that suits it best; the rivals also the best size of a micro-batch, which is tried first.

    .venv/bin/python benchmarks/step_beside_trl.py --trl-python .venv-trl/bin/python --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline import machine
from rig.installation import ROOT
from rig.smoke import arguments as arguments_of
from trainer_step import WARM_UP, Shape, batch, make_model

from paceline.config.precision import fast_dtype

HERE = ROOT / "benchmarks"
SIDES = ("trl", "plain")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a batch, and how often it is trained."""

    name: str
    shape: Shape
    model: Path | None  # None: a million parameters with random weights
    tokenizer: Path
    steps: int
    budget: int  # tokens per micro-batch
    micro_batches: tuple[int, ...]  # sequences, of the rivals
    rounds: int = 3


ARITHMETIC, SMOLLM2 = ROOT / "models/arithmetic", ROOT / "models/smollm2-135m-instruct"
CASES = {
    "million": Case("million", Shape(), None, ARITHMETIC, 20, 4096, (128, 512)),
    "smollm2": Case(
        "smollm2",
        Shape(sequences=64, vocab=49_000, prompt=48, answer=16),
        SMOLLM2,
        SMOLLM2,
        5,
        1024,
        (8, 32),
    ),
}
SMOKE = Case("smoke", Shape(sequences=16, vocab=18), None, ARITHMETIC, 1, 4096, (), rounds=1)


def main() -> int:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL; required")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    arguments = arguments_of(parser)
    found: dict[str, Any] = {"machine": machine(), "dtype": fast_dtype(), "cases": {}}
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as folder:
            seconds = run_ours(SMOKE, arguments.smoke / "model", 1, 1, Path(folder))
            rows = [asdict(each) for each in batch(SMOKE.shape)]
        found["cases"]["smoke"] = {"s_per_step": {"paceline": [seconds]}, "batch": len(rows)}
        found["not_run"] = "TRL and the plain loop: they have an environment of their own"
    elif arguments.trl_python is None:
        parser.error("--trl-python is required")
    for name in () if arguments.smoke else arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            found["cases"][name] = compare(CASES[name], arguments.trl_python, Path(folder))
        print(name, json.dumps(found["cases"][name]["ratio"]), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def compare(case: Case, python: Path, folder: Path) -> dict[str, Any]:
    """Alternating runs of the three, with the settings that suit each best."""
    model = case.model or folder / "model"
    if case.model is None:
        make_model(model, case.shape.vocab)
    threads = sorted({1, os.cpu_count() or 1})

    def ours(count: int, steps: int) -> float:
        return run_ours(case, model, count, steps, folder)

    def rival(side: str) -> Callable[[tuple[int, int], int], float]:
        return lambda given, steps: run_rival(case, python, side, model, given, steps, folder)

    tried: dict[str, dict[str, float]] = {
        "paceline": {str(count): ours(count, 2) for count in threads}
    }
    settings = [(count, size) for count in threads for size in case.micro_batches]
    best: dict[str, tuple[int, int]] = {}
    for side in SIDES:
        seconds = {given: rival(side)(given, 2) for given in settings}
        best[side] = min(seconds, key=lambda given: seconds[given])
        tried[side] = {f"{given[0]} threads, {given[1]}": s for given, s in seconds.items()}
    count = int(min(tried["paceline"], key=lambda each: tried["paceline"][each]))
    runs: dict[str, list[float]] = {"paceline": [], "trl": [], "plain": []}
    for _ in range(case.rounds):
        runs["paceline"].append(ours(count, case.steps))
        for side in SIDES:
            runs[side].append(rival(side)(best[side], case.steps))
        print(case.name, {side: round(each[-1], 4) for side, each in runs.items()}, flush=True)
    medians = {side: statistics.median(each) for side, each in runs.items()}
    return {
        "load_average": os.getloadavg(),
        "s_per_step": runs,
        "tried": tried,
        "ratio": {side: round(medians[side] / medians["paceline"], 3) for side in SIDES},
        "ratios": {
            side: [round(a / b, 3) for a, b in zip(runs[side], runs["paceline"], strict=True)]
            for side in SIDES
        },
    }


def run_ours(case: Case, model: Path, threads: int, steps: int, folder: Path) -> float:
    """Seconds per step of Paceline's trainer."""
    out = folder / "ours.json"
    command = [sys.executable, HERE / "trainer_step.py", "--json", out, "--model", model]
    options = {"threads": threads, "steps": steps, "budget": case.budget}
    options |= {field.name: getattr(case.shape, field.name) for field in fields(Shape)}
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    return json.loads(out.read_text())["s_per_step"]


def run_rival(
    case: Case,
    python: Path,
    side: str,
    model: Path,
    setting: tuple[int, int],
    steps: int,
    folder: Path,
) -> float:
    """Seconds per step of TRL or the plain loop; a setting is threads and a micro-batch."""
    threads, micro_batch = setting
    given, out = folder / "case.json", folder / "out.json"
    asked: dict[str, Any] = {
        "side": side,
        "model": str(model),
        "tokenizer": str(case.tokenizer),
        "batch": [asdict(each) for each in batch(case.shape)],
        "group": case.shape.group,
        "micro_batch": micro_batch,
        "threads": threads,
        "steps": steps + WARM_UP,
        "dtype": fast_dtype(),
    }
    given.write_text(json.dumps(asked))
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [python, HERE / "with_trl" / "step.py", given, out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    ends = json.loads(out.read_text())["ends"]
    return (ends[-1] - ends[WARM_UP - 1]) / steps


if __name__ == "__main__":
    sys.exit(main())
