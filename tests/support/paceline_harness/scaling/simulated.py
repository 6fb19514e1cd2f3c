"""Simulates a job as the roster and the ledger would report it.

A trainer, rollout workers that take a while to start, admission by staleness, and noise on
everything. Groups share the workers' speed evenly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from paceline.enums import WorkerKind
from paceline.types import Worker
from paceline_controller.demand_source import JobDemand
from paceline_controller.scaling.planner import Speed


@dataclass(frozen=True, slots=True)
class WorkloadModel:
    """Parameters of the job and its machines; times in seconds."""

    batch_groups: int = 32
    group_size: int = 8
    max_staleness: int = 4
    step_s: float = 60.0
    spread_s: float = 5.0  # of new weights
    episode_tokens: float = 1000.0
    usable: float = 0.9  # share of groups that pass the filters
    speed: Speed = field(default_factory=lambda: Speed(0.0, 1 / 180))
    max_concurrent: int = 256
    start_s: float = 60.0  # from requesting a worker until it has weights
    noise: float = 0.0  # relative standard deviation of all times and lengths


@dataclass(slots=True)
class Pod:
    """A rollout worker, starting or ready."""

    name: str
    pool: str
    due_s: float
    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    request_s: float = 0.0


@dataclass(slots=True)
class SimulatedTraining:
    """State and counters of the trainer."""

    step: int = 0
    until_s: float = -1.0  # end of the current step; -1: waiting for a batch
    work_s: float = 0.0
    wait_s: float = 0.0


class World:
    """One job; `tick` lets a second pass. `asked` are rollout workers by pool."""

    def __init__(
        self, model: WorkloadModel, *, seed: int = 0, job_id: str = "a-1", pid: int = 1
    ) -> None:
        self.model = model
        self.now_s = 0.0
        self.asked: dict[str, int] = {}
        self.capacity: dict[str, int] = {}  # machines by pool; unlimited if missing
        self.training = SimulatedTraining()
        self.over = False
        self._random = random.Random(seed)
        self._job_id = job_id
        self._pid = pid
        self._pods: list[Pod] = []
        self._born = 0
        self._clock = 0.0  # tokens that an episode in progress would have got since the start
        self._working: list[tuple[float, int]] = []  # when groups finish, by that clock
        self._ready = 0
        self._accepted = 0
        self._tokens = 0.0
        self._published: list[tuple[float, int]] = []  # when, and the step, of weights on their way
        self._serving = 0

    @property
    def ready(self) -> dict[str, int]:
        """Rollout workers that serve, by pool."""
        found: dict[str, int] = {}
        for pod in self._serving_pods():
            found[pod.pool] = found.get(pod.pool, 0) + 1
        return found

    @property
    def all_up(self) -> bool:
        """Whether all requested workers are ready."""
        return self.ready == {pool: count for pool, count in self.asked.items() if count}

    def preempt(self, pool: str, count: int) -> None:
        """Remove `count` ready workers of a pool; they have to start elsewhere."""
        for pod in [pod for pod in self._serving_pods() if pod.pool == pool][:count]:
            self._pods.remove(pod)

    def tick(self) -> None:
        """Advance by one second."""
        self.now_s += 1.0
        self._start_and_stop()
        if not self.over:
            self._admit()
            self._sample()
            self._train()

    def demand(self) -> dict[str, JobDemand]:
        """Demand as the experience service reports it."""
        if self.over:
            return {}
        size = self.model.group_size
        demand = JobDemand(
            job_id=self._job_id,
            leased=len(self._working) * size,
            ready_groups=self._ready,
            headroom_groups=self._headroom(),
            step=self.training.step,
            accepted_groups=self._accepted,
            sampled_tokens=round(self._tokens),
        )
        return {self._job_id: demand}

    def workers(self) -> list[Worker]:
        """Workers as the roster reports them."""
        trainer = Worker(
            worker_id=f"trainer-{self._job_id}",
            kind=WorkerKind.TRAINER,
            endpoint="",
            job_id=self._job_id,
            active_version=self.training.step,
            load={"wait_s": self.training.wait_s, "step_s": self.training.work_s},
        )
        rollouts = [self._rollout(pod) for pod in self._serving_pods()]
        return [*rollouts, *([] if self.over else [trainer])]

    def _rollout(self, pod: Pod) -> Worker:
        return Worker(
            worker_id=pod.name,
            kind=WorkerKind.ROLLOUT,
            endpoint="",
            job_id=self._job_id,
            active_version=self._serving,
            pid=self._pid,
            pool=pod.pool,
            load={
                "running": self._each(),
                "waiting": max(0.0, self._episodes() / self._up() - self._each()),
                "tokens_generated": pod.tokens,
                "busy_s": pod.busy_s,
                "idle_s": pod.idle_s,
                "request_s": pod.request_s,
                "max_running": float(self.model.max_concurrent),
            },
        )

    def _start_and_stop(self) -> None:
        for pool, count in self.asked.items():
            mine = [pod for pod in self._pods if pod.pool == pool]
            there = min(count, self.capacity.get(pool, count))
            for _ in range(there - len(mine)):
                self._born += 1
                due_s = self.now_s + self._about(self.model.start_s)
                self._pods.append(Pod(f"rollout-{self._job_id}-{self._born}", pool, due_s))
            for pod in sorted(mine, key=lambda each: each.due_s)[there:]:
                self._pods.remove(pod)

    def _serving_pods(self) -> list[Pod]:
        return [pod for pod in self._pods if pod.due_s <= self.now_s]

    def _up(self) -> int:
        return max(1, len(self._serving_pods()))

    def _episodes(self) -> int:
        return len(self._working) * self.model.group_size

    def _each(self) -> float:
        """Concurrent requests per worker."""
        return min(self._episodes() / self._up(), float(self.model.max_concurrent))

    def _headroom(self) -> int:
        model = self.model
        bound = (model.max_staleness + self._serving + 1) * model.batch_groups
        return max(0, bound - self._accepted - len(self._working))

    def _admit(self) -> None:
        while self._published and self._published[0][0] <= self.now_s:
            self._serving = self._published.pop(0)[1]
        for _ in range(self._headroom()):
            self._born += 1
            length = self._about(self.model.episode_tokens)
            heapq.heappush(self._working, (self._clock + length, self._born))

    def _sample(self) -> None:
        pods, each = self._serving_pods(), self._each()
        for pod in pods:
            rate = self._about(self.model.speed.rate(each))
            pod.tokens += rate
            pod.busy_s += 1.0 if each else 0.0
            pod.idle_s += 0.0 if each else 1.0
            pod.request_s += each
            if self._working:
                self._clock += rate / self._episodes()
        while self._working and self._working[0][0] <= self._clock:
            heapq.heappop(self._working)
            self._tokens += self._about(self.model.episode_tokens) * self.model.group_size
            if self._random.random() < self.model.usable:
                self._accepted += 1
                self._ready += 1

    def _train(self) -> None:
        it, model = self.training, self.model
        if it.until_s < 0 and self._ready >= model.batch_groups:
            self._ready -= model.batch_groups
            it.until_s = self.now_s - 1.0 + round(self._about(model.step_s))  # this second counts
        elif it.until_s < 0:
            it.wait_s += 1.0
            return
        it.work_s += 1.0
        if self.now_s >= it.until_s:
            it.step, it.until_s = it.step + 1, -1.0
            self._published.append((self.now_s + self._about(model.spread_s), it.step))

    def _about(self, value: float) -> float:
        """The value with noise; never below a tenth of it."""
        if not self.model.noise:
            return value
        return value * max(0.1, self._random.gauss(1.0, self.model.noise))


class Autoscaler(Protocol):
    """Sets the number of a world's workers."""

    def size(self, world: World) -> Mapping[str, int]:
        """Rollout workers by pool, from the present state of the world."""
        ...


@dataclass(frozen=True, slots=True)
class SizeChange:
    """Sizes requested at a time, and the training step then."""

    at_s: float
    sizes: dict[str, int]
    step: int

    @property
    def total(self) -> int:
        """Over all pools."""
        return sum(self.sizes.values())


def simulate(
    world: World, autoscaler: Autoscaler, *, seconds: float, period_s: float
) -> list[SizeChange]:
    """Run the simulation; returns the changes of sizes."""
    changes: list[SizeChange] = []
    for tick in range(round(seconds)):
        world.tick()
        if tick % round(period_s) == 0:
            sizes = dict(autoscaler.size(world))
            if sizes != world.asked:
                changes.append(SizeChange(world.now_s, sizes, world.training.step))
            world.asked = sizes
    return changes


def reversals(changes: Sequence[SizeChange]) -> int:
    """How often growing turned into shrinking, or the other way round."""
    totals = [change.total for change in changes]
    signs = [b > a for a, b in pairwise(totals) if a != b]
    return sum(a != b for a, b in pairwise(signs))
