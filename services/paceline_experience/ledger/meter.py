"""Metrics of one job: its ledger, its rewards, its last step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config import JobSpec
from paceline.enums import Purpose
from paceline.platform import wire
from paceline.platform.progress import LedgerProgress
from paceline.platform.telemetry.metrics import Metrics
from paceline.v1 import types_pb2
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.counts import identity

# Gauges by the names of values in a row.
BATCH = {
    "reward_std": "reward_std",
    "group_reward_std": "group_std",
    "zero_variance_share": "zero_variance",
    "response_tokens_mean": "response",
    "response_tokens_max": "response_max",
    "truncated_share": "truncated",
    "parse_error_share": "parse_errors",
    "timeout_share": "score_timeouts",
    "staleness_mean": "staleness_mean",
    "batch_versions": "batch_versions",
}
STEP = {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr"}
STATISTICS = (
    "entropy_estimate",
    "ratio",
    "ratio_max",
    "clip_fraction",
    "active_fraction",
    "behaviour_weight",
    "ess",
    "kl_behaviour",
    "kl_proximal",
    "kl_reference",
    "token_age",
    "token_age_max",
    "interpolated",
    "average_reset",
    "lr_factor",
    "out_of_bounds",
    "mismatch_kl",
    "mismatch_kl_worst",
    "mismatch_k1",
    "logprob_diff_max",
    "skipped_updates",
    "nonfinite_updates",
)
_MOST_PARTS = 200  # of rewards, by name
OF_SLOTS = ("_zeroed", "_weight", "_weight_max")  # ends of statistics of single corrections
_PURPOSES = wire.members_of(Purpose, types_pb2.Purpose.DESCRIPTOR)
GROUPS = {"open": "open_groups", "ready": "ready_groups", "headroom": "headroom_groups"}


class JobMeter:
    """The metrics of one live job; they disappear with `close`."""

    def __init__(
        self, metrics: Metrics, job_id: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._job_id = job_id
        self._clock = clock
        self._sampled = self._saved = clock()
        self._parts: dict[str, tuple[float, int]] = {}

    def open(self) -> None:
        """Start reporting ages."""
        follow, job = self._metrics.follow, self._job_id
        follow("sample_age", lambda: self._clock() - self._sampled, job=job)
        follow("checkpoint_age", lambda: self._clock() - self._saved, job=job)

    def bounded(self, spec: JobSpec) -> None:
        """Report how many versions rollout workers may lag behind."""
        versions = spec.experience.max_staleness // spec.trainer.publish_every
        self._metrics.set("lag_bound", versions, job=self._job_id)

    def close(self) -> None:
        """The job is over: remove its metrics; later calls have no effect."""
        self._metrics.forget(self._job_id)
        self._metrics = Metrics()

    def store_rolled_back(self) -> None:
        """The store has lost the most recent writes."""
        self._metrics.add("store_losses", job=self._job_id)

    def expired(self, count: int) -> None:
        """Leases expired or were taken from workers that are gone."""
        self._metrics.add("expired", count, job=self._job_id)

    def submitted(self, messages: Sequence[pb.Trajectory]) -> None:
        """Trajectories were accepted."""
        if not messages:
            return
        job = self._job_id
        self._sampled = self._clock()
        purposes = Counter(_PURPOSES.get(each.purpose, Purpose.TRAIN) for each in messages)
        for purpose, count in purposes.items():
            self._metrics.add("submitted", count, job=job, purpose=purpose)
        for stage, seconds in _stages(messages).items():
            self._metrics.add("episode_seconds", seconds, job=job, episode_stage=stage)
        for each in messages:
            for name, value in each.score.parts.items():
                total, count = self._parts.get(name, (0.0, 0))
                if not count and len(self._parts) >= _MOST_PARTS:
                    continue  # names that change with every score
                self._parts[name] = (total + value, count + 1)

    def decided(self, rewards: Sequence[float]) -> None:
        """A group is complete, with these rewards of its episodes."""
        variance = "some" if max(rewards) > min(rewards) else "zero"
        self._metrics.add("finished_groups", job=self._job_id, variance=variance)

    def checkpointed(self) -> None:
        """A checkpoint is durable."""
        self._saved = self._clock()

    def compared(self, worker: str, kl: float) -> None:
        """Log-probs of a rollout worker were compared with the trainer's."""
        self._metrics.set("worker_mismatch", kl, job=self._job_id, worker=worker)

    def gone(self, worker: str) -> None:
        """A rollout worker is not there any more."""
        self._metrics.drop("worker_mismatch", job=self._job_id, worker=worker)

    def verified(self, problems: int) -> None:
        """Number of problems that a verification has found."""
        self._metrics.set("ledger_problems", problems, job=self._job_id)

    def row(self, kind: str, values: Mapping[str, Any]) -> None:
        """A row of the job's history: an eval, or a step with its batch."""
        if kind != "train":
            return
        job, metrics = self._job_id, self._metrics
        for names in (BATCH, STEP):
            for name in names.keys() & values.keys():
                metrics.set(names[name], float(values[name]), job=job)
        # Names beyond the limit of the label are summed up, so those of all jobs come first.
        of_slots = sorted(name for name in values if name.endswith(OF_SLOTS))
        for name in (*STATISTICS, *of_slots):
            if name in values:
                metrics.set("objective", float(values[name]), job=job, statistic=name)
        for age, count in values.get("staleness", {}).items():
            metrics.observe("staleness", [float(age)] * int(count), job=job)
        metrics.add("trained_episodes", values.get("batch_episodes", 0), job=job)
        parts, self._parts = self._parts, {}
        for name, (total, count) in parts.items():
            metrics.set("reward_part", total / count, job=job, part=name)

    def show(self, live: LedgerProgress, counts: Counter[str]) -> None:
        """Set the gauges from the ledger's live values."""
        job, metrics = self._job_id, self._metrics
        states: dict[str, int] = dict(live.counts)
        if not states["queued"] + states["leased"]:
            self._sampled = self._clock()  # nothing to sample, so nothing is late
        if not live.step:
            self._saved = self._clock()  # nothing to save yet
        metrics.total("admitted", states.pop("admitted"), job=job)
        for state, count in states.items():
            metrics.set("episodes", count, job=job, state=state)
        for reason, count in live.dropped.items():
            metrics.total("dropped", count, job=job, reason=reason)
        for state, name in GROUPS.items():
            metrics.set("groups", getattr(live, name), job=job, state=state)
        metrics.set("step", live.step, job=job)
        metrics.set("version", live.version, job=job)
        metrics.set("payload_bytes", live.payload_bytes, job=job)
        metrics.set("trainer_waiting", live.waiting_s, job=job)
        metrics.set("ledger_inconsistent", any(True for _ in identity(counts)), job=job)
        metrics.total("attempts", counts["attempts"], job=job)
        metrics.total("trained_tokens", live.trained_tokens, job=job)
        metrics.total("sampled_tokens", live.tokens_generated, job=job, purpose="train")
        metrics.total("sampled_tokens", live.eval_tokens, job=job, purpose="eval")
        for purpose, reward in (("train", live.reward_mean), ("eval", live.eval_reward)):
            if reward is not None:
                metrics.set("reward", reward, job=job, purpose=purpose)
        self._show_evals(live)

    def _show_evals(self, live: LedgerProgress) -> None:
        found = {each.name: each.last for each in live.evals}
        if live.eval_last is not None and live.eval_last not in found.values():
            found["eval"] = live.eval_last
        for name, last in found.items():
            scores = {"reward": last.reward, **last.scores} if last.complete else {}
            for score, value in scores.items():
                if value is not None:
                    self._metrics.set(
                        "eval_score", value, job=self._job_id, evaluation=name, score=score
                    )


def _stages(messages: Sequence[pb.Trajectory]) -> dict[str, float]:
    """Seconds of episodes by stage."""
    generate = environment = reward = other = 0.0
    for each in messages:
        timing = each.timing
        in_generate = timing.generate_s
        in_environment = timing.environment_s
        in_reward = timing.reward_s
        generate += max(in_generate, 0.0)
        environment += max(in_environment, 0.0)
        reward += max(in_reward, 0.0)
        other += max(timing.total_s - in_generate - in_environment - in_reward, 0.0)
    return {"generate": generate, "environment": environment, "reward": reward, "other": other}
