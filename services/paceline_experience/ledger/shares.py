"""Turns the groups of a batch into training samples and splits them evenly over ranks."""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.enums import StopReason
from paceline.v1 import experience_pb2, types_pb2
from paceline_experience.ledger.records import BatchStats
from paceline_experience.ledger.state import GroupRecord, LedgerState
from paceline_experience.store.payloads import unpack

# Field 7 of TrainSample, one packed float: appending it to an encoded sample adds the advantage.
_ADVANTAGE = struct.Struct("<BBf")
_TAG = (7 << 3) | 2
Values = NDArray[np.float32]


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


def train_samples(
    payload: bytes,
    advantages: Values,
    *,
    mask_truncated: bool,
    weight: float = 1.0,
    trace: str = "",
    first_row: int = 0,
) -> list[tuple[bytes, int, int]]:
    """Encoded sample, number of tokens and of trainable tokens for each transcript.

    `advantages` has one value, or one per policy token of all transcripts. A sample of weight 0 is
    masked.
    """
    trajectory = types_pb2.Trajectory.FromString(unpack(payload))
    masked = weight == 0 or (mask_truncated and trajectory.truncated)
    start = 0
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
            weight=weight or 1.0,
            trace=trace,
            row=row,
        )
        own = advantages if len(advantages) == 1 else advantages[start:][: len(transcript.logprobs)]
        start += len(transcript.logprobs)
        data = _with_advantages(sample, own)
        trainable = 0 if masked else len(transcript.logprobs)
        found.append((data, len(transcript.tokens), trainable))
    return found


def _with_advantages(sample: experience_pb2.TrainSample, values: Values) -> bytes:
    if len(values) == 1 or (len(values) and (values == values[0]).all()):
        return sample.SerializeToString() + _ADVANTAGE.pack(_TAG, 4, float(values[0]))
    sample.advantages.extend(values.tolist())
    return sample.SerializeToString()


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
