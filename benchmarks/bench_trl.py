"""Paceline beside TRL's GRPO: the same models, tasks and batches on the same machine, alternating.

Three cases: the demo task; the same in an environment whose three calls take lognormal time; and
SmolLM2-135M-Instruct on one-digit sums. Both have all cores; TRL has the number of threads that
suits it best, which is tried first. TRL's clock stops during evaluations, Paceline's does not.

    make bench-trl
    .venv/bin/python benchmarks/bench_trl.py --trl-python .venv-trl/bin/python --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import machine, observe, steady, table
from rig.installation import ROOT, serving
from rig.smoke import arguments as arguments_of
from transformers import AutoTokenizer

from paceline.config import load_job
from paceline.config.precision import fast_dtype
from paceline.enums import Purpose
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.reasoning_gym.tasks import ReasoningGymTasks

WORKER = ROOT / "benchmarks" / "with_trl" / "grpo.py"
GOAL = 0.85
# Median 0.2 s, 99th percentile 2 s.
LATENCY: dict[str, float] = {"calls": 3, "mu": math.log(0.2), "sigma": math.log(10.0) / 2.3263}
SLOW = '''
import asyncio, random
from paceline.environments.arithmetic.world import Arithmetic
from paceline.plugins import EnvironmentPlugin

class Slow(Arithmetic):
    """Every call takes a lognormal time."""

    async def reset(self, task, seed):
        self._chance = random.Random(f"{{task.task_id}}{{seed}}")
        await self._wait()
        return await super().reset(task, seed)

    async def step(self, action):
        await self._wait()
        return await super().step(action)

    async def close(self):
        await self._wait()

    async def _wait(self):
        await asyncio.sleep(self._chance.lognormvariate({mu}, {sigma}))

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.arithmetic.tasks:ArithmeticTasks",
    world="slow_arithmetic:Slow",
    options="paceline.environments.arithmetic.tasks:ArithmeticTasks",
)
'''


@dataclass(frozen=True, slots=True)
class Case:
    """What both sides train."""

    name: str
    job: Path
    steps: int
    warm: int  # steps before the steady part
    rounds: int
    trl_steps: int
    trl_warm: int
    micro_batch: int  # of TRL, in samples
    latency: bool = False
    goal: bool = False  # measure the time to a held-out reward


CASES = {
    "demo": Case("demo", ROOT / "examples/arithmetic.yaml", 120, 10, 5, 60, 10, 256, goal=True),
    "slow": Case("slow", ROOT / "examples/arithmetic.yaml", 120, 20, 3, 10, 1, 256, latency=True),
    "smollm2": Case("smollm2", ROOT / "examples/smollm2.yaml", 12, 3, 2, 4, 1, 16),
}


def main() -> int:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trl-python", type=Path, help="interpreter with TRL; required")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help="alternating runs, instead of the case's own")
    arguments = arguments_of(parser, cases=["demo"], rounds=1)
    if not (arguments.trl_python or arguments.smoke):
        parser.error("--trl-python is required")
    found: dict[str, Any] = {"machine": machine(), "cases": {}}
    if arguments.json.exists():
        found["cases"] = json.loads(arguments.json.read_text())["cases"]
    if arguments.smoke:
        found["cases"]["smoke"] = ours_only(arguments.smoke)
        found["not_run"] = "TRL: it has an environment of its own"
    for name in () if arguments.smoke else arguments.cases:
        found["cases"][name] = compare(CASES[name], arguments.trl_python, arguments.rounds)
        print(name, json.dumps(found["cases"][name]["ratio"]), flush=True)
        write(arguments.json, found)
    write(arguments.json, found)
    return 0


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def ours_only(smoke: Path) -> dict[str, Any]:
    """The side of Paceline, and the input of the other one, with the model of a smoke."""
    case = replace(CASES["demo"], steps=4, warm=0)
    given = inputs(case, smoke / "model")
    return {"paceline": [run_ours(case, smoke)], "tasks": len(given["tasks"])}


def compare(case: Case, python: Path, rounds: int | None) -> dict[str, Any]:
    """Alternating runs of both, their medians and ratios."""
    given = inputs(case)
    tried = [run_trl(case, python, given, threads, steps=4) for threads in threads_to_try()]
    best = min(tried, key=lambda each: each["step_s"])["threads"]
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(rounds or case.rounds):
        ours.append(run_ours(case))
        theirs.append(run_trl(case, python, given, best))
        print(case.name, json.dumps(ours[-1]), json.dumps(theirs[-1]), flush=True)
    found: dict[str, Any] = {
        "load_average": os.getloadavg(),
        "dtype": fast_dtype(),
        "paceline": ours,
        "trl": theirs,
        "trl_threads": {str(each["threads"]): each["step_s"] for each in tried},
        "ratio": {"samples_per_s": ratio(ours, theirs, "samples_per_s")},
    }
    if case.goal:
        found["ratio"]["time_to_goal"] = ratio(theirs, ours, "goal_s")
    if case.latency:
        found["bound_samples_per_s"] = latency_bound(given)
    return found


def ratio(first: list[dict[str, Any]], second: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The ratio of medians, and the range of ratios of the alternating runs."""
    pairs = [a[key] / b[key] for a, b in zip(first, second, strict=True)]
    medians = [statistics.median(each[key] for each in side) for side in (first, second)]
    return {"median": round(medians[0] / medians[1], 3), "runs": [round(x, 3) for x in pairs]}


def threads_to_try() -> list[int]:
    """One thread, and all cores."""
    return sorted({1, os.cpu_count() or 1})


def inputs(case: Case, model: Path | None = None) -> dict[str, Any]:
    """The job as TRL's side gets it: texts and numbers; with another model if it is named."""
    spec = load_job(case.job)
    folder = model or ROOT / spec.model.path
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    needed = case.steps * spec.experience.batch_groups
    return {
        "model": str(folder),
        "tasks": tasks(spec, tokenizer, {}, needed),
        "heldout": tasks(spec, tokenizer, spec.eval.options, spec.eval.tasks) if spec.eval else [],
        "pattern": spec.reward[0].options.get("pattern", ""),
        "batch_groups": spec.experience.batch_groups,
        "group_size": spec.experience.group_size,
        "max_staleness": spec.experience.max_staleness,
        "max_tokens": spec.sampling.max_tokens,
        "temperature": spec.sampling.temperature,
        "lr": spec.trainer.optimizer.lr,
        "warmup_steps": spec.trainer.optimizer.warmup_steps,
        "dtype": fast_dtype(),
        "latency_s": LATENCY if case.latency else None,
        "micro_batch": case.micro_batch,
        "eval_every": 10 if case.goal else 0,
        "warm": case.trl_warm,
        "seed": 0,
    }


def tasks(spec: Any, tokenizer: Any, more: dict[str, Any], num: int) -> list[dict[str, str]]:
    """Prompts as the environment worker renders them, and the answers."""
    options = {**spec.tasks.options, **more}
    source: Any = (
        ArithmeticTasks(spec.tasks.seed, **options)
        if spec.tasks.environment == "arithmetic"
        else ReasoningGymTasks(spec.tasks.seed, **options)
    )
    found: list[dict[str, str]] = []
    for position in range(num):
        payload = json.loads(source[position % len(source)].payload)
        prompt = str(payload["question"])
        if tokenizer.chat_template is not None:
            messages = [
                {"role": "system", "content": options.get("system_prompt", "")},
                {"role": "user", "content": prompt},
            ]
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        found.append({"prompt": prompt, "answer": str(payload["answer"])})
    return found


def run_trl(
    case: Case, python: Path, given: dict[str, Any], threads: int, steps: int | None = None
) -> dict[str, Any]:
    """One run of TRL; a short one has no evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            **given,
            "threads": threads,
            "steps": steps or case.trl_steps,
            "folder": folder,
        }
        if steps is not None:
            asked |= {"eval_every": 0, "warm": 1}
        (Path(folder) / "case.json").write_text(json.dumps(asked))
        command = [python, WORKER, f"{folder}/case.json", f"{folder}/out.json"]
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=variables, stdout=subprocess.DEVNULL)
        found = json.loads((Path(folder) / "out.json").read_text())
    reached = (seconds for _, seconds, value in found["curve"] if value >= GOAL)
    return found | ({"goal_s": next(reached, math.inf)} if case.goal else {})


def run_ours(case: Case, smoke: Path | None = None) -> dict[str, Any]:
    """One installation and one job for throughput, and one for the time to the goal."""
    overrides: dict[str, Any] = {
        "experience.filters": [],
        "eval.every": 100_000,
        "eval.tasks": 8,
        "stop.steps": case.steps,
    }
    if case.latency:
        overrides["tasks.environment"] = "slow_arithmetic"
    with slow_environment() if case.latency else nullcontext():
        spec, samples, summary = observe(case.job, overrides, smoke=smoke)
        moving = [each for each in steady(spec, samples) if each.step >= case.warm]
        found = table(case.name, spec, moving, summary)
        found["samples_per_s"] = found.pop("episodes_per_s")
        if case.goal:
            found["goal_s"] = time_to_goal(case, smoke)
    return found


def time_to_goal(case: Case, smoke: Path | None = None) -> float:
    """Seconds from the warm model's first evaluation to a held-out reward of `GOAL`."""
    overrides = {"experience.filters": [], "eval.every": 10, "stop.steps": case.steps}
    spec = load_job(case.job, overrides).model_dump(mode="json")
    spec["model"]["path"] = str(ROOT / spec["model"]["path"])
    with serving(smoke) as client:
        started = math.nan
        for event in client.watch(client.submit(spec).status.job_id):
            evals = [each for each in event.metrics if each.kind is Purpose.EVAL]
            if evals and math.isnan(started):
                started = time.perf_counter()
            if any(each.values["reward"] >= GOAL for each in evals):
                return time.perf_counter() - started
    return math.inf


def latency_bound(given: dict[str, Any]) -> float:
    """Samples a second if nothing but latency took time: groups are open until all have ended.

    The staleness bound admits (S + 1) B groups; by Little's law they are replaced every mean
    duration of a group, that of its slowest episode.
    """
    chance = random.Random(0)

    def episode() -> float:
        return sum(chance.lognormvariate(LATENCY["mu"], LATENCY["sigma"]) for _ in range(3))

    size = given["group_size"]
    duration = statistics.fmean(max(episode() for _ in range(size)) for _ in range(20_000))
    groups = (given["max_staleness"] + 1) * given["batch_groups"]
    return round(groups * size / duration, 1)


@contextmanager
def slow_environment() -> Generator[None]:
    """The environment `slow_arithmetic`, installed for the processes started inside."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow_arithmetic.py").write_text(SLOW.format(**LATENCY))
        info = Path(folder) / "slow_arithmetic-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-arithmetic\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[paceline.environments]\nslow_arithmetic = slow_arithmetic:ENVIRONMENT\n"
        )
        os.environ["PYTHONPATH"] = folder if not before else f"{folder}:{before}"
        try:
            yield
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


if __name__ == "__main__":
    sys.exit(main())
