"""Turns the groups of a batch into training samples and splits them evenly over ranks."""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.job import AdvantageSpec
from paceline.enums import StopReason
from paceline.errors import InvalidError
from paceline.plugins import Advantage
from paceline.telemetry.logs import Log
from paceline.v1 import experience_pb2, types_pb2
from paceline_experience.ledger.records import BatchStats
from paceline_experience.ledger.state import GroupRecord, LedgerState
from paceline_experience.store.payloads import unpack

# Field 7 of TrainSample, one packed float: appending it to an encoded sample adds the advantage.
_ADVANTAGE = struct.Struct("<BBf")
_TAG = (7 << 3) | 2
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
log = Log("shares")


@dataclass(frozen=True, slots=True)
class BatchShare:
    """What one rank trains at a step; a non-empty `stop` means no batch: the job is ending."""

    batch_id: str = ""
    step: int = 0
    total_sequences: int = 0
    total_tokens: int = 0
    stop: StopReason | None = None
    stats: BatchStats = field(default_factory=BatchStats)
    samples: tuple[bytes, ...] = ()  # encoded `TrainSample` messages


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples of a step, before they are split."""

    batch_id: str
    step: int
    samples: tuple[bytes, ...]
    costs: tuple[int, ...]  # tokens of each sample
    total_sequences: int  # those with a trainable token
    total_tokens: int  # trainable ones
    stats: BatchStats

    def share(self, rank: int, world: int) -> BatchShare:
        """The share of one rank."""
        indices = balance(self.costs, world)[rank]
        return BatchShare(
            batch_id=self.batch_id,
            step=self.step,
            total_sequences=self.total_sequences,
            total_tokens=self.total_tokens,
            stats=self.stats,
            samples=tuple(self.samples[i] for i in indices),
        )


def balance(costs: Sequence[int], world: int) -> list[list[int]]:
    """Sample indices by rank: longest first, each to the rank with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(world)]
    heap = [(0, rank) for rank in range(world)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        tokens, rank = heapq.heappop(heap)
        parts[rank].append(index)
        heapq.heappush(heap, (tokens + costs[index], rank))
    return [sorted(part) for part in parts]


def estimated(
    estimate: Advantage, rewards: Floats, groups: Ints, lengths: Ints, options: Mapping[str, Any]
) -> Floats:
    """Call an advantage plug-in on [N] episodes; returns [N] values. It may raise anything.

    Raises:
        TypeError: the result has another shape.
    """
    values = np.asarray(estimate(rewards, groups, lengths, **options), dtype=np.float64)
    if values.shape != rewards.shape:
        raise TypeError(f"an answer of shape {values.shape}; one number per episode is needed")
    return values


def advantages(
    groups: Sequence[GroupRecord], estimate: Advantage, spec: AdvantageSpec
) -> list[float]:
    """Advantages, one per episode of the batch, in the order of the groups.

    Raises:
        InvalidError: the plug-in has raised or returned something else than one finite number each.
    """
    episodes = [(number, e) for number, group in enumerate(groups) for e in group.summaries()]
    rewards = np.array([e.reward for _, e in episodes], dtype=np.float64)
    ids = np.array([number for number, _ in episodes], dtype=np.int64)
    lengths = np.array([e.policy_tokens for _, e in episodes], dtype=np.int64)
    try:
        found = estimated(estimate, rewards, ids, lengths, spec.options)
        wrong = found[~(np.abs(found) <= np.finfo(np.float32).max)]
        if wrong.size:
            raise ValueError(f"finite numbers of 32 bits are due; it gave {wrong[0]}")
    except (Exception, SystemExit) as error:  # the boundary of a plug-in
        log.exception("an advantage has failed", advantage=spec.kind)
        text = f"experience.advantage: {spec.kind}: {type(error).__name__}: {error}"
        raise InvalidError(text) from error
    return found.tolist()


def train_samples(
    payload: bytes,
    advantage: float,
    *,
    mask_truncated: bool,
    trace: str = "",
    first_row: int = 0,
) -> list[tuple[bytes, int, int]]:
    """Encoded sample, number of tokens and of trainable tokens for each transcript."""
    trajectory = types_pb2.Trajectory.FromString(unpack(payload))
    masked = mask_truncated and trajectory.truncated
    found: list[tuple[bytes, int, int]] = []
    for row, transcript in enumerate(trajectory.transcripts, first_row):
        sample = experience_pb2.TrainSample(
            group_id=trajectory.group_id,
            index=trajectory.index,
            tokens=transcript.tokens,
            spans=transcript.spans,
            logprobs=transcript.logprobs,
            versions=transcript.versions,
            reward=trajectory.score.reward,
            temperature=trajectory.sampling.temperature,
            truncated=trajectory.truncated,
            masked=masked,
            weight=1.0,
            trace=trace,
            row=row,
        )
        data = sample.SerializeToString() + _ADVANTAGE.pack(_TAG, 4, advantage)
        trainable = 0 if masked else len(transcript.logprobs)
        found.append((data, len(transcript.tokens), trainable))
    return found


def batch_stats(groups: Sequence[GroupRecord], state: LedgerState, step: int) -> BatchStats:
    """Reward, staleness and length statistics of a whole batch."""
    episodes = [f for group in groups for f in group.summaries()]
    rewards = np.array([f.reward for f in episodes])
    lengths = np.array([f.policy_tokens for f in episodes])
    grouped = [[f.reward for f in group.summaries()] for group in groups]
    deviations = [float(np.std(each)) for each in grouped]
    ages = [0 if f.oldest_version < 0 else step - state.age(f.oldest_version) for f in episodes]
    return BatchStats(
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        group_reward_std=sum(deviations) / len(deviations),
        zero_variance_share=sum(max(r) == min(r) for r in grouped) / len(grouped),
        batch_versions=len({f.oldest_version for f in episodes}),
        staleness_mean=sum(ages) / len(ages),
        staleness_max=max(ages),
        staleness=dict(sorted(Counter(ages).items())),
        batch_episodes=len(episodes),
        batch_groups=len(groups),
        batch_tokens=int(lengths.sum()),
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=int(lengths.max()),
        truncated_share=sum(f.truncated for f in episodes) / len(episodes),
    )
