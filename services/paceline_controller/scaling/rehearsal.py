"""The decision in a closed loop with a simulated job: to try options before machines are paid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config import JobSpec, parse_job
from paceline.config.service import ControllerOptions
from paceline.planner import needed_rate, overlap_steps
from paceline.testing.scaling import Law, World
from paceline.types import JobState
from paceline_controller.plan import LiveJob, pools_of, rollout_name
from paceline_controller.scaling.collector import Collector
from paceline_controller.scaling.decide import Decision, Memory, decide

JOB = "a-1"
BOUNDS = {"min_replicas": 1, "max_replicas": 64}


def spec_of(law: Law, **rollout: Any) -> JobSpec:
    """A job that is scaled, as the law of a world wants it."""
    return parse_job(
        {
            "name": "a",
            "model": {"path": "models/tiny"},
            "tasks": {"environment": "arithmetic"},
            "reward": ["exact"],
            "experience": {
                "batch_groups": law.batch_groups,
                "group_size": law.group_size,
                "max_staleness": law.max_staleness,
            },
            "rollout": {"scaling": BOUNDS, "max_concurrent": law.max_concurrent, **rollout},
        }
    )


def planned(law: Law, options: ControllerOptions) -> float:
    """Workers of speed 1 that the planner wants, knowing the law."""
    overlap = overlap_steps(max_staleness=law.max_staleness, publish_every=1)
    rate = needed_rate(
        per_step=law.episode_tokens * law.group_size * law.batch_groups / law.usable,
        step_s=law.step_s,
        overlap=overlap,
        spread_s=law.spread_s,
        wait_share=options.scaling.sync_wait,
    )
    requests = max(1, overlap) * law.batch_groups * law.group_size
    workers = law.speed.workers(rate, requests=requests, most_each=law.max_concurrent)
    return workers * (1 + options.scaling.margin)


class Rehearsal:
    """Sizes a simulated world by the real collector and the real decision."""

    def __init__(self, law: Law, options: ControllerOptions, **rollout: Any) -> None:
        self.options = options
        self.job = LiveJob(JOB, JobState.RUNNING, 0, spec_of(law, **rollout))
        self.collector = Collector(options)
        self.memory = Memory()
        self.decisions: list[Decision] = []
        self._sizes: Mapping[str, int] = {}

    def begin_again(self) -> None:
        """As a new controller does: it finds the workers, and has seen nothing."""
        self.collector, self.memory = Collector(self.options), Memory()

    def size(self, world: World) -> Mapping[str, int]:
        """Workers by pool."""
        signals = self.collector.look(
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
