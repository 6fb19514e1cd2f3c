"""Samples of a batch and their split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import Purpose
from paceline.platform import wire
from paceline.types import Assignment, Task
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_experience.ledger.shares import BatchSample, balance, train_samples
from paceline_experience.store.payloads import pack, unpack

if TYPE_CHECKING:
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import Worlds

ASSIGNMENT = Assignment("j", "g", (0,), (1,), Task("t", "e", "{}"), Purpose.TRAIN, 10.0, 1)


def of_group(group: str, prompt: int, answer: int) -> BatchSample:
    return BatchSample(b"", group, prompt, prompt + answer, answer)


def computed(samples: Sequence[BatchSample], part: Sequence[int]) -> int:
    """Tokens of a rank that computes each prompt once."""
    prompts = {samples[i].group: samples[i].prompt for i in part}
    return sum(prompts.values()) + sum(samples[i].trainable for i in part)


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.lists(st.integers(1, 500), min_size=1, max_size=9)),
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_balance_covers_all_and_is_even(groups: list[tuple[int, list[int]]], world: int) -> None:
    samples = [
        of_group(str(number), prompt, answer)
        for number, (prompt, answers) in enumerate(groups)
        for answer in answers
    ]
    parts = balance(samples, world)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    loads = [computed(samples, part) for part in parts]
    # No worse than single samples, which leave ranks at most the largest of them apart.
    total = sum(each.tokens for each in samples)
    assert max(loads) <= total / world + max((each.tokens for each in samples), default=0)


def test_groups_stay_whole_on_a_rank() -> None:
    samples = [of_group(group, 100, 10) for group in "abcd" for _ in range(8)]
    for part in balance(samples, 2):
        assert computed(samples, part) == 2 * (100 + 8 * 10)


def test_a_group_is_split_if_ranks_would_be_idle() -> None:
    samples = [of_group("a", 100, 10) for _ in range(8)]
    assert [len(part) for part in balance(samples, 2)] == [4, 4]


@given(st.binary(max_size=3000), st.integers(0, 2000))
def test_packing_keeps_the_bytes(data: bytes, over: int) -> None:
    assert unpack(pack(data, over)) == data


def test_large_payloads_are_compressed() -> None:
    assert len(pack(b"a" * 5000, 1024)) < 100
    assert len(pack(b"a" * 1000, 1024)) == 1001


@pytest.mark.parametrize("advantage", [0.25, -1.5, 0.0])
def test_sample_carries_the_advantage(store: Store, worlds: Worlds, advantage: float) -> None:
    trajectory = worlds(store).made(ASSIGNMENT, 0, reward=1.0, version=4)
    kept = pack(wire.to_proto(trajectory, types_pb2.Trajectory).SerializeToString(), 1024)
    [found] = train_samples(kept, np.array([advantage], np.float32), mask_truncated=True)
    sample = pb.TrainSample.FromString(found.data)
    assert list(sample.advantages) == [advantage]
    assert (found.tokens, found.prompt, found.trainable) == (5, 2, 3)
    assert (sample.masked, sample.weight) == (False, 1.0)
    assert (sample.reward, sample.temperature) == (1.0, 0.7)
    transcript = wire.to_proto(trajectory, types_pb2.Trajectory).transcripts[0]
    assert list(sample.tokens) == list(transcript.tokens)
    assert list(sample.spans) == list(transcript.spans)
    assert list(sample.logprobs) == list(transcript.logprobs)


@pytest.mark.parametrize(("mask", "trainable"), [(True, 0), (False, 3)])
def test_truncated_answers_are_masked(
    store: Store, worlds: Worlds, mask: bool, trainable: int
) -> None:
    trajectory = worlds(store).made(ASSIGNMENT, 0, truncated=True)
    kept = pack(wire.to_proto(trajectory, types_pb2.Trajectory).SerializeToString(), 1024)
    [found] = train_samples(kept, np.ones(1, np.float32), mask_truncated=mask)
    assert found.trainable == trainable
    assert pb.TrainSample.FromString(found.data).masked is mask
