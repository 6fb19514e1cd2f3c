"""End-to-end throughput of an installation on this machine.

Runs jobs with `paceline up` and REST on all services, and evaluates the loads that they report to
the roster during the steady part of the run: tokens/s, episodes/s, busy shares, wait reasons,
staleness, CPU seconds by process.

    .venv/bin/python benchmarks/pipeline.py --json benchmarks/results/pipeline.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rig.installation import ROOT, installed, url_of
from rig.smoke import arguments as arguments_of

from paceline.config import ServiceSettings, load_job
from paceline.enums import JobState, WorkerKind
from paceline.front.client.client import Client
from paceline.front.local.ports import PortSlots
from paceline.platform import wire
from paceline.platform.files import token_of
from paceline.platform.transport.rpc import call, connect_as
from paceline.platform.transport.service_keys import FILE
from paceline.v1 import roster_pb2 as pb
from paceline.v1.roster_pb2_grpc import RosterStub

if TYPE_CHECKING:
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

LIGHT = ("gateway", "controller", "experience", "environment", "reward")

# For throughput: no filters, so every episode is trained on, and rare evaluations.
DEMO: dict[str, Any] = {
    "experience.filters": [],
    "experience.batch_groups": 64,
    "eval.every": 1000,
    "eval.tasks": 8,
    "trainer.checkpoint.every": 50,
}
SIMULATED: dict[str, Any] = {
    **DEMO,
    "rollout.engine": {"kind": "simulated", "decode_tokens_per_s": 20000.0},
}


@dataclass(slots=True)
class Sample:
    """Reported loads at one moment."""

    at_s: float
    step: int
    load: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])


def main() -> int:
    """Run the scenarios and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "arithmetic.yaml")
    parser.add_argument("--only", choices=["demo", "simulated"])
    arguments = arguments_of(parser, steps=4, only="simulated")
    scenarios = {"demo": DEMO, "simulated": SIMULATED}
    rows: list[dict[str, Any]] = []
    for name, overrides in scenarios.items():
        if arguments.only in (None, name):
            sizes = {**overrides, "stop.steps": arguments.steps}
            rows.append(run(name, arguments.job, sizes, smoke=arguments.smoke))
            print(json.dumps(rows[-1], indent=1), flush=True)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


def machine() -> dict[str, Any]:
    """The machine, and its load."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def run(
    name: str, job: Path, overrides: dict[str, Any], *, smoke: Path | None = None
) -> dict[str, Any]:
    """Run one scenario on a fresh installation."""
    spec, samples, summary = observe(job, overrides, smoke=smoke)
    return table(name, spec, steady(spec, samples), summary)


def observe(
    job: Path, overrides: dict[str, Any], *more: str, smoke: Path | None = None
) -> tuple[dict[str, Any], list[Sample], dict[str, Any]]:
    """Run a job on a fresh installation to its end; returns spec, samples and summary.

    `more` are additional options of `paceline up`.
    """
    if smoke is not None:
        own = {
            "model.path": str(smoke.resolve() / "model"),
            "rollout.engine": {"kind": "simulated"},
        }
        overrides = {**overrides, **own, "experience.batch_groups": 4}
    spec = load_job(job, overrides).model_dump(mode="json")
    spec["model"]["path"] = str((ROOT / spec["model"]["path"]).resolve())
    with (
        installed(*more, smoke=smoke) as folder,
        Client(url_of(folder), token=token_of(folder)) as client,
    ):
        job_id = client.submit(spec).status.job_id
        samples = asyncio.run(watch(client, job_id, folder))
        return spec, samples, client.get(job_id).status.summary


async def watch(client: Client, job_id: str, folder: Path) -> list[Sample]:
    """Sample every half second until the job has ended."""
    samples: list[Sample] = []
    kind = WorkerKind.CONTROLLER
    keys = folder / "service-keys" / kind / FILE
    caller = ServiceSettings(kind=kind, worker_id="watch", run_dir=folder, service_keys=keys)
    async with connect_as(caller, experience_address(folder)) as channel:
        roster: RosterAsyncStub = RosterStub(channel)
        while True:
            status = (await asyncio.to_thread(client.get, job_id)).status
            if status.state.terminal:
                if status.state != JobState.SUCCEEDED:
                    raise RuntimeError(f"{status.state}: {status.reason}")
                return samples
            reply = await call(roster.ListWorkers, pb.ListWorkersRequest(), timeout_s=60)
            sample = Sample(time.monotonic(), status.step)
            for worker in reply.workers:
                kind = wire.member_of(WorkerKind, worker.kind, "kind")
                sample.load[f"{kind}:{worker.worker_id}"] = dict(worker.load)
            samples.append(sample)
            await asyncio.sleep(0.5)


def experience_address(folder: Path) -> str:
    """host:port of the experience service of a run."""
    port = PortSlots(folder / "ports.json").known("experience")
    return f"127.0.0.1:{port}"


def steady(spec: dict[str, Any], samples: list[Sample]) -> list[Sample]:
    """The samples between the first tenth of the steps and the last step.

    All samples of a run that is too short for two of these, as a smoke may be.
    """
    steps = spec["stop"]["steps"]
    moving = [s for s in samples if steps // 10 <= s.step < steps]
    return moving if len(moving) > 1 else samples


def table(
    name: str, spec: dict[str, Any], moving: list[Sample], summary: dict[str, Any]
) -> dict[str, Any]:
    """Statistics of a part of a run."""
    first, last = moving[0], moving[-1]
    seconds = last.at_s - first.at_s
    per_step = spec["experience"]["batch_groups"] * spec["experience"]["group_size"]
    episodes = (last.step - first.step) * per_step
    cpu = {kind: difference(first, last, kind, "cpu_s") for kind in (*LIGHT, "rollout", "trainer")}
    tokens = difference(first, last, "rollout", "tokens_generated")
    light = sum(cpu[kind] for kind in LIGHT)
    return {
        "scenario": name,
        "seconds": round(seconds, 2),
        "steps": last.step - first.step,
        "episodes": episodes,
        "episodes_per_s": round(episodes / seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        "busy_share": {
            "trainer": share(first, last, "trainer", "step_s"),
            "rollout": share(first, last, "rollout", "busy_s"),
            "environment": round(cpu["environment"] / seconds, 3),
        },
        "wait_share": {
            "trainer_for_batch": share(first, last, "trainer", "wait_s"),
            "trainer_publishing": share(first, last, "trainer", "publish_s"),
            "rollout_for_requests": share(first, last, "rollout", "idle_s"),
            "rollout_swapping": share(first, last, "rollout", "swap_s"),
        },
        "open_episodes_waiting_for": {
            key.removeprefix("waiting_"): mean_of(moving, "environment", key)
            for key in ("waiting_generate", "waiting_step", "waiting_score", "waiting_submit")
        },
        "cpu_seconds": {kind: round(value, 2) for kind, value in cpu.items()},
        "light_cpu_seconds_per_1000_episodes": round(1000 * light / max(episodes, 1), 3),
        "staleness_histogram": summary.get("staleness_histogram"),
        "staleness_max": summary.get("staleness_max"),
        "ledger_consistent": summary.get("ledger_consistent"),
    }


def difference(first: Sample, last: Sample, kind: str, key: str) -> float:
    """Increase of a counter, summed over the workers of a kind."""
    grown = 0.0
    for worker, load in last.load.items():
        if worker.startswith(f"{kind}:"):
            before = first.load.get(worker, {}).get(key, 0.0)
            grown += load.get(key, 0.0) - before
    return grown


def share(first: Sample, last: Sample, kind: str, key: str) -> float:
    """Increase of a counter of seconds, per second."""
    return round(difference(first, last, kind, key) / (last.at_s - first.at_s), 3)


def mean_of(samples: list[Sample], kind: str, key: str) -> float:
    """Mean of a gauge over time, summed over the workers of a kind."""
    totals = [
        sum(load.get(key, 0.0) for worker, load in s.load.items() if worker.startswith(f"{kind}:"))
        for s in samples
    ]
    return round(statistics.fmean(totals), 1) if totals else 0.0


if __name__ == "__main__":
    sys.exit(main())
