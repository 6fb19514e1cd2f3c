"""Deltas are only encoded while they are smaller than chunks."""

import random

import pytest

from paceline.weights import SnapshotHeader, Staging, plan
from paceline.weights.stream.delta_encoder import Encoder

CHUNK = 4096
NUM_CHUNKS = 40


def made(version: int, data: bytes) -> Staging:
    entries, total = plan([("a", "bfloat16", (len(data) // 2,))])
    staging = Staging(
        SnapshotHeader("job", version, version, version - 1, -1, 1, total, CHUNK, entries)
    )
    staging.fill(0, data)
    staging.finish()
    return staging


@pytest.mark.parametrize("changed", [range(NUM_CHUNKS), range(0, NUM_CHUNKS, 2)])
async def test_encoding_stops_after_many_incompressible_chunks(changed: range) -> None:
    chance = random.Random(3)
    before = chance.randbytes(CHUNK * NUM_CHUNKS)
    after = bytearray(before)
    for index in changed:
        after[index * CHUNK : (index + 1) * CHUNK] = chance.randbytes(CHUNK)
    tried: list[float] = []
    encoder = Encoder(made(2, bytes(after)), made(1, before), observe=tried.append)
    sent = [await encoder.get(index) for index in range(NUM_CHUNKS)]
    assert {index for index, each in enumerate(sent) if each is None} == set(changed)
    assert len(tried) < 15 if len(changed) == NUM_CHUNKS else len(tried) == NUM_CHUNKS
