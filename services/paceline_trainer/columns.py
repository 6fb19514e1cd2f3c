"""Flattens samples from the wire into columns of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.enums import StopReason
from paceline.errors import InvalidError
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2

TOKEN_BITS = 24  # of a key; the rest is the row
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Trainable sequences of one rank. `*_starts` have one more entry than there are sequences.

    Policy tokens exclude the first token of a sequence, which the trainer cannot score.
    """

    tokens: Ints
    token_starts: Ints
    positions: Ints  # of policy tokens, inside their sequence
    policy_starts: Ints
    behaviour: Floats  # per policy token, as is `advantages`
    advantages: Floats
    versions: Ints
    workers: Ints  # that sampled them: a place in `worker_names`
    worker_names: tuple[str, ...]  # of the whole batch, alike on all ranks; the first is unknown
    temperatures: Floats  # per sequence, as is `weights`
    weights: Floats
    rows: Ints  # per sequence: its position in the batch, over all ranks
    replaced: Bools  # per sequence: another prompt than the one that its tokens were sampled after

    @property
    def keys(self) -> Ints:
        """Per policy token: unique over all ranks, in order of row and token."""
        return (np.repeat(self.rows, self.policy_counts) << TOKEN_BITS) + self.positions

    def check_vocabulary(self, size: int) -> None:
        """Raise `InvalidError` if a token id is outside the model's vocabulary of `size`."""
        if len(self.tokens) and not 0 <= self.tokens.min() <= self.tokens.max() < size:
            token = self.tokens.max() if self.tokens.max() >= size else self.tokens.min()
            raise InvalidError(
                f"token id {token} was sampled, the model has {size}; "
                "engine and trainer need the same vocabulary (see rollout.engine)"
            )

    @property
    def num_sequences(self) -> int:
        """Number of sequences, which have at least one trainable token each."""
        return len(self.temperatures)

    @property
    def num_tokens(self) -> int:
        """Number of trainable tokens."""
        return len(self.positions)

    @property
    def policy_counts(self) -> Ints:
        """Number of trainable tokens of each sequence."""
        return np.diff(self.policy_starts)


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of the batch of a step, and the totals of the whole batch."""

    batch_id: str
    step: int
    total_sequences: int
    total_tokens: int
    samples: tuple[pb.TrainSample, ...]
    stats: pb.BatchStats = field(default_factory=pb.BatchStats)
    stop: StopReason | None = None
    age_steps: Mapping[int, int] = field(default_factory=dict[int, int])  # by version
    publish_again: bool = False  # there is no batch, as no engine accepts the newest version
    workers: tuple[str, ...] = ()  # rollout workers of the whole batch, alike on all ranks

    def ages(self, versions: Ints) -> Ints:
        """How many steps the tokens of each version are behind the batch.

        A version that experience does not know is as old as the newest one before it.
        """
        if not self.age_steps:
            return np.zeros_like(versions)
        known = np.array(sorted(self.age_steps), np.int64)
        steps = np.array([self.age_steps[version] for version in known.tolist()], np.int64)
        places = np.searchsorted(known, versions, side="right") - 1
        found: Ints = np.maximum(self.step - steps[np.maximum(places, 0)], 0)
        return found


def columns(samples: Iterable[pb.TrainSample], workers: Sequence[str] = ()) -> Columns:
    """Flatten samples, except masked ones and those without a trainable token.

    `workers` are those of the whole batch; others are unknown.

    Raises:
        InvalidError: the counts of log-probs, versions or advantages and of policy tokens differ.
    """
    builder = _ColumnBuilder(("", *workers))
    for sample in samples:
        if not sample.masked:
            builder.add(sample)
    return builder.build()


class _ColumnBuilder:
    """Appends sequences to lists, one per column."""

    def __init__(self, worker_names: tuple[str, ...]) -> None:
        self.worker_names = worker_names
        self._places = {name: place for place, name in enumerate(worker_names)}
        self.tokens: list[int] = []
        self.token_ends: list[int] = [0]
        self.positions: list[int] = []
        self.policy_ends: list[int] = [0]
        self.behaviour: list[float] = []
        self.advantages: list[float] = []
        self.versions: list[int] = []
        self.workers: list[int] = []
        self.temperatures: list[float] = []
        self.weights: list[float] = []
        self.rows: list[int] = []
        self.replaced: list[bool] = []

    def add(self, sample: pb.TrainSample) -> None:
        positions: list[int] = []
        for span in sample.spans:
            if span.source == types_pb2.TOKEN_SOURCE_POLICY:
                positions.extend(range(span.start, span.end))
        sampled: list[int] = []
        workers: list[int] = []
        for run in sample.versions:
            sampled += [run.version] * run.count
            workers += [self._places.get(run.worker, 0)] * run.count
        advantages = sample.advantages
        if len(advantages) == 1:
            advantages = [advantages[0]] * len(positions)
        if not len(positions) == len(sampled) == len(sample.logprobs) == len(advantages):
            raise InvalidError(
                f"sample {sample.group_id}/{sample.index}: {len(positions)} policy tokens but "
                f"{len(sample.logprobs)} log-probs, {len(sampled)} versions, "
                f"{len(advantages)} advantages"
            )
        # The first token has no context, so no model gives it a probability.
        skip = 1 if positions and positions[0] == 0 else 0
        if len(positions) == skip:
            return
        self.tokens.extend(sample.tokens)
        self.token_ends.append(len(self.tokens))
        self.positions.extend(positions[skip:])
        self.policy_ends.append(len(self.positions))
        self.behaviour.extend(sample.logprobs[skip:])
        self.advantages.extend(advantages[skip:])
        self.versions.extend(sampled[skip:])
        self.workers.extend(workers[skip:])
        # Log-probs of greedy tokens are at temperature 1.
        self.temperatures.append(sample.temperature or 1.0)
        # Proto3 cannot tell an unset weight from 0; to exclude a sample, it is `masked`.
        self.weights.append(sample.weight or 1.0)
        self.rows.append(sample.row)
        self.replaced.append(sample.original_prompt)

    def build(self) -> Columns:
        return Columns(
            tokens=np.array(self.tokens, np.int64),
            token_starts=np.array(self.token_ends, np.int64),
            positions=np.array(self.positions, np.int64),
            policy_starts=np.array(self.policy_ends, np.int64),
            behaviour=np.array(self.behaviour, np.float32),
            advantages=np.array(self.advantages, np.float32),
            versions=np.array(self.versions, np.int64),
            workers=np.array(self.workers, np.int64),
            worker_names=self.worker_names,
            temperatures=np.array(self.temperatures, np.float32),
            weights=np.array(self.weights, np.float32),
            rows=np.array(self.rows, np.int64),
            replaced=np.array(self.replaced, np.bool_),
        )
