"""Runs the scaling decision against a simulated job, to try options without machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import JobSpec, parse_job
from paceline.config.service import ControllerOptions
from paceline.enums import JobState
from paceline_controller.jobs.plan import LiveJob, pools_of, rollout_name
from paceline_controller.scaling.collector import Collector
from paceline_controller.scaling.decide import Decision, ScalingMemory, decide
from paceline_controller.scaling.planner import needed_rate, overlap_steps
from paceline_harness.scaling.simulated import WorkloadModel, World

JOB = "a-1"
BOUNDS = {"min_replicas": 1, "max_replicas": 64}


def spec_of(model: WorkloadModel, **rollout: Any) -> JobSpec:
    """Spec of an autoscaled job that matches a model."""
    return parse_job(
        {
            "name": "a",
            "model": {"path": "models/tiny"},
            "tasks": {"environment": "arithmetic"},
            "reward": ["exact"],
            "experience": {
                "batch_groups": model.batch_groups,
                "group_size": model.group_size,
                "max_staleness": model.max_staleness,
            },
            "rollout": {"scaling": BOUNDS, "max_concurrent": model.max_concurrent, **rollout},
        }
    )


def planned(model: WorkloadModel, options: ControllerOptions) -> float:
    """Workers of speed 1 that the planner wants if it knows the model exactly."""
    overlap = overlap_steps(max_staleness=model.max_staleness, publish_every=1)
    rate = needed_rate(
        per_step=model.episode_tokens * model.group_size * model.batch_groups / model.usable,
        step_s=model.step_s,
        overlap=overlap,
        spread_s=model.spread_s,
        wait_share=options.scaling.sync_wait,
    )
    requests = max(1, overlap) * model.batch_groups * model.group_size
    workers = model.speed.workers(rate, requests=requests, max_requests=model.max_concurrent)
    return workers * (1 + options.scaling.margin)


class Rehearsal:
    """Sizes a simulated world with the real collector and decision."""

    def __init__(self, model: WorkloadModel, options: ControllerOptions, **rollout: Any) -> None:
        self.options = options
        self.job = LiveJob(JOB, JobState.RUNNING, 0, spec_of(model, **rollout))
        self.collector = Collector(options)
        self.memory = ScalingMemory()
        self.decisions: list[Decision] = []
        self._sizes: Mapping[str, int] = {}

    def begin_again(self) -> None:
        """Simulate a restart of the controller: workers remain, its memory is lost."""
        self.collector, self.memory = Collector(self.options), ScalingMemory()

    def size(self, world: World) -> Mapping[str, int]:
        """Workers by pool."""
        signals = self.collector.collect(
            jobs=[] if world.over else [self.job],
            workers=world.workers(),
            demand=world.demand(),
            now_s=world.now_s,
        )
        decision = decide(
            signals, self._sizes, options=self.options, memory=self.memory, now_s=world.now_s
        )
        self.decisions.append(decision)
        self.memory, self._sizes = decision.memory, decision.sizes
        pools = pools_of(self.job.spec, self.options)
        return {pool: self._sizes.get(rollout_name(JOB, pool), 0) for pool in pools}
