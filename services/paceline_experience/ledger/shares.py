"""Turns the groups of a batch into training samples and splits them evenly over ranks."""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.enums import ScoreStatus, StopReason
from paceline.v1 import experience_pb2, types_pb2
from paceline_experience.ledger.generation.prefix import as_context, inherited
from paceline_experience.ledger.records import BatchStats
from paceline_experience.ledger.state import GroupRecord, LedgerState
from paceline_experience.store.payloads import unpack

# Field 7 of TrainSample, one packed float: appending it to an encoded sample adds the advantage.
_ADVANTAGE = struct.Struct("<BBf")
_TAG = (7 << 3) | 2
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BatchShare:
    """What one rank trains at a step; a non-empty `stop` means no batch: the job is ending.

    With `publish_again` there is none yet, as no engine accepts the newest version.
    """

    batch_id: str = ""
    step: int = 0
    total_sequences: int = 0
    total_tokens: int = 0
    stop: StopReason | None = None
    stats: BatchStats = field(default_factory=BatchStats)
    samples: tuple[bytes, ...] = ()  # encoded `TrainSample` messages
    age_steps: Mapping[int, int] = field(default_factory=dict[int, int])
    publish_again: bool = False
    workers: tuple[str, ...] = ()  # that have sampled tokens of the batch, in order


@dataclass(frozen=True, slots=True)
class BatchSample:
    """An encoded `TrainSample` and its size in tokens."""

    data: bytes
    group: str
    prompt: int  # tokens before the first of the policy, which its group has in common
    tokens: int
    trainable: int
    workers: frozenset[str] = frozenset()  # that have sampled what is trainable


@dataclass(frozen=True, slots=True)
class Batch:
    """All samples of a step, before they are split."""

    batch_id: str
    step: int
    samples: tuple[BatchSample, ...]
    stats: BatchStats
    age_steps: Mapping[int, int]  # version -> step from which its tokens count their age

    def share(self, rank: int, world: int) -> BatchShare:
        """The share of one rank."""
        return BatchShare(
            batch_id=self.batch_id,
            step=self.step,
            total_sequences=sum(each.trainable > 0 for each in self.samples),
            total_tokens=sum(each.trainable for each in self.samples),
            stats=self.stats,
            samples=tuple(self.samples[i].data for i in balance(self.samples, world)[rank]),
            age_steps=self.age_steps,
            workers=tuple(sorted(frozenset().union(*(each.workers for each in self.samples)))),
        )


def balance(samples: Sequence[BatchSample], world: int) -> list[list[int]]:
    """Sample indices by rank, such that the busiest computes as few tokens as possible.

    A rank computes a prompt once for all samples of its group, so groups stay whole unless they are
    too few or too unequal.
    """
    groups: dict[str, list[int]] = {}
    for index, each in enumerate(samples):
        groups.setdefault(each.group, []).append(index)
    whole = _spread(samples, list(groups.values()), world)
    split = _spread(samples, [[index] for index in range(len(samples))], world)
    return min(whole, split, key=lambda parts: max(_computed(samples, part) for part in parts))


def _spread(
    samples: Sequence[BatchSample], units: Sequence[list[int]], world: int
) -> list[list[int]]:
    """Largest unit first, each to the rank with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(world)]
    heap = [(0, rank) for rank in range(world)]
    sized = [(_computed(samples, unit), unit) for unit in units]
    for size, unit in sorted(sized, key=lambda each: (-each[0], each[1][0])):
        tokens, rank = heapq.heappop(heap)
        parts[rank].extend(unit)
        heapq.heappush(heap, (tokens + size, rank))
    return [sorted(part) for part in parts]


def _computed(samples: Sequence[BatchSample], part: Sequence[int]) -> int:
    """Tokens of some samples, with the prompt of each group once."""
    prompts = {samples[index].group: samples[index].prompt for index in part}
    own = sum(samples[index].tokens - samples[index].prompt for index in part)
    return own + sum(prompts.values())


def train_samples(
    payload: bytes,
    advantages: Values,
    *,
    mask_truncated: bool,
    place: tuple[str, int] | None = None,
    weight: float = 1.0,
    trace: str = "",
    first_row: int = 0,
) -> list[BatchSample]:
    """One sample for each transcript.

    `advantages` has one value, or one per policy token of all transcripts. A sample of weight 0 is
    masked. `place`: group and index, if they are others than the episode's own.
    """
    trajectory = types_pb2.Trajectory.FromString(unpack(payload))
    group, index = place or (trajectory.group_id, trajectory.index)
    masked = weight == 0 or (mask_truncated and trajectory.truncated)
    start = 0
    found: list[BatchSample] = []
    for row, whole in enumerate(trajectory.transcripts, first_row):
        skip = inherited(whole)
        transcript = as_context(whole) if skip else whole
        sample = experience_pb2.TrainSample(
            group_id=group,
            index=index,
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
            original_prompt=whole.original_prompt,
        )
        end = start + len(whole.logprobs)
        own = advantages if len(advantages) == 1 else advantages[start + skip : end]
        start = end
        found.append(
            BatchSample(
                data=_with_advantages(sample, own),
                group=group,
                prompt=_prompt(transcript),
                tokens=len(transcript.tokens),
                trainable=0 if masked else len(transcript.logprobs),
                workers=frozenset(run.worker for run in transcript.versions if run.worker),
            )
        )
    return found


def _prompt(transcript: types_pb2.Transcript) -> int:
    """Tokens before the first of the policy."""
    policy = types_pb2.TOKEN_SOURCE_POLICY
    starts = (span.start for span in transcript.spans if span.source == policy)
    return min(starts, default=len(transcript.tokens))


def _with_advantages(sample: experience_pb2.TrainSample, values: Values) -> bytes:
    if len(values) == 1 or (len(values) and (values == values[0]).all()):
        return sample.SerializeToString() + _ADVANTAGE.pack(_TAG, 4, float(values[0]))
    sample.advantages.extend(values.tolist())
    return sample.SerializeToString()


def batch_stats(groups: Sequence[GroupRecord], state: LedgerState, step: int) -> BatchStats:
    """Reward, staleness and length statistics of a whole batch.

    They are of its own episodes; only the spread of rewards within groups is that of what is
    trained, guests included.
    """
    episodes = [f for group in groups for f in group.summaries()]
    rewards = np.array([f.reward for f in episodes])
    lengths = np.array([f.policy_tokens for f in episodes])
    grouped = [[f.reward for f in group.members()] for group in groups]
    guests = [each.result.oldest_version for group in groups for each in group.guests]
    guest_ages = [0 if first < 0 else step - state.age(first) for first in guests]
    deviations = [float(np.std(each)) for each in grouped]
    statuses = Counter(f.status for f in episodes)
    ages = [0 if f.oldest_version < 0 else step - state.age(f.oldest_version) for f in episodes]
    return BatchStats(
        replayed=len(guests),
        replayed_age_mean=sum(guest_ages) / len(guests) if guests else 0.0,
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
        batch_tokens=sum(f.own_tokens for f in episodes),
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=int(lengths.max()),
        truncated_share=sum(f.truncated for f in episodes) / len(episodes),
        parse_error_share=statuses[ScoreStatus.PARSE_ERROR] / len(episodes),
        timeout_share=statuses[ScoreStatus.TIMEOUT] / len(episodes),
    )
