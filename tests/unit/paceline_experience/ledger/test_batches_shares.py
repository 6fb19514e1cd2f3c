"""Samples of a batch and their split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import wire
from paceline.enums import Purpose
from paceline.types import Assignment, Task
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_experience.ledger.shares import balance, train_samples
from paceline_experience.store.payloads import pack, unpack

if TYPE_CHECKING:
    from conftest import Worlds

    from paceline_experience.store.store import Store

ASSIGNMENT = Assignment("j", "g", (0,), (1,), Task("t", "e", "{}"), Purpose.TRAIN, 10.0, 1)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 5))
def test_balance_covers_all_and_is_even(costs: list[int], world: int) -> None:
    parts = balance(costs, world)
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0)


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
    [(data, tokens, trainable)] = train_samples(
        kept, np.array([advantage], np.float32), mask_truncated=True
    )
    sample = pb.TrainSample.FromString(data)
    assert list(sample.advantages) == [advantage]
    assert (tokens, trainable, sample.masked, sample.weight) == (5, 3, False, 1.0)
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
    [(data, _, found)] = train_samples(kept, np.ones(1, np.float32), mask_truncated=mask)
    assert found == trainable
    assert pb.TrainSample.FromString(data).masked is mask
