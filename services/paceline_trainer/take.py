"""Samples as they come off the wire, turned into columns of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidError
from paceline.types import Source
from paceline.v1 import experience_pb2 as pb

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Columns:
    """Trainable sequences of one rank. `*_starts` have one entry more than there are sequences.

    A policy token is one that the trainer can score: it is not the first of its sequence.
    """

    tokens: Ints
    token_starts: Ints
    positions: Ints  # of policy tokens, inside their sequence
    policy_starts: Ints
    behaviour: Floats  # per policy token, as is `advantages`
    advantages: Floats
    versions: Ints
    temperatures: Floats  # per sequence, as is `weights`
    weights: Floats

    def check_vocabulary(self, size: int) -> None:
        """Raise `InvalidError` unless every token id is one that the model knows."""
        if len(self.tokens) and not 0 <= self.tokens.min() <= self.tokens.max() < size:
            worst = self.tokens.max() if self.tokens.max() >= size else self.tokens.min()
            raise InvalidError(
                f"token id {worst} was sampled, the model has {size}; "
                "engine and trainer need the same vocabulary (see rollout.engine)"
            )

    @property
    def num_sequences(self) -> int:
        """Sequences with at least one trainable token."""
        return len(self.temperatures)

    @property
    def num_tokens(self) -> int:
        """Trainable tokens."""
        return len(self.positions)

    @property
    def policy_counts(self) -> Ints:
        """Trainable tokens of each sequence."""
        return np.diff(self.policy_starts)


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of the batch of a step, and what the whole batch amounts to."""

    batch_id: str
    step: int
    total_sequences: int
    total_tokens: int
    samples: tuple[pb.TrainSample, ...]
    stats: dict[str, Any]
    stop: str = ""


def columns(samples: Iterable[pb.TrainSample]) -> Columns:
    """Flatten samples; masked ones and those without a trainable token are left out.

    Raises:
        InvalidError: log-probs, versions or advantages do not fit the policy tokens.
    """
    flat = _Flat()
    for sample in samples:
        if not sample.masked:
            flat.add(sample)
    return flat.whole()


class _Flat:
    """Lists that grow by whole sequences."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.token_ends: list[int] = [0]
        self.positions: list[int] = []
        self.policy_ends: list[int] = [0]
        self.behaviour: list[float] = []
        self.advantages: list[float] = []
        self.versions: list[int] = []
        self.temperatures: list[float] = []
        self.weights: list[float] = []

    def add(self, sample: pb.TrainSample) -> None:
        where: list[int] = []
        for span in sample.spans:
            if span.source == Source.POLICY:
                where.extend(range(span.start, span.end))
        sampled = [run.version for run in sample.versions for _ in range(run.count)]
        gains = sample.advantages
        if len(gains) == 1:
            gains = [gains[0]] * len(where)
        if not len(where) == len(sampled) == len(sample.logprobs) == len(gains):
            raise InvalidError(
                f"sample {sample.group_id}/{sample.index}: {len(where)} policy tokens but "
                f"{len(sample.logprobs)} log-probs, {len(sampled)} versions, "
                f"{len(gains)} advantages"
            )
        # Nothing precedes a first token, so no model gives it a probability.
        skip = 1 if where and where[0] == 0 else 0
        if len(where) == skip:
            return
        self.tokens.extend(sample.tokens)
        self.token_ends.append(len(self.tokens))
        self.positions.extend(where[skip:])
        self.policy_ends.append(len(self.positions))
        self.behaviour.extend(sample.logprobs[skip:])
        self.advantages.extend(gains[skip:])
        self.versions.extend(sampled[skip:])
        # Greedy tokens carry untempered log-probs.
        self.temperatures.append(sample.temperature or 1.0)
        # Proto3 cannot tell an unset weight from 0; `masked` is how a sample is left out.
        self.weights.append(sample.weight or 1.0)

    def whole(self) -> Columns:
        return Columns(
            tokens=np.array(self.tokens, np.int64),
            token_starts=np.array(self.token_ends, np.int64),
            positions=np.array(self.positions, np.int64),
            policy_starts=np.array(self.policy_ends, np.int64),
            behaviour=np.array(self.behaviour, np.float32),
            advantages=np.array(self.advantages, np.float32),
            versions=np.array(self.versions, np.int64),
            temperatures=np.array(self.temperatures, np.float32),
            weights=np.array(self.weights, np.float32),
        )
