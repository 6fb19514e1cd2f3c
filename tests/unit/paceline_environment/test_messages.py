"""How content is split into messages of limited size."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import GiveBackReason, TokenSource
from paceline.types import EpisodeProgress, TokenSpan, Transcript
from paceline_environment.coalesce import Coalescer, portions
from paceline_environment.leases import Key, LeaseOutbox, messages


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_portions_keep_order_and_fit(sizes: list[int], max_size: int) -> None:
    found = portions(sizes, size=lambda each: each, max_size=max_size)
    assert [each for part in found for each in part] == sizes
    assert all(sum(part) <= max_size or len(part) == 1 for part in found)
    assert all(sum(one) + two[0] > max_size for one, two in pairwise(found))


def long_progress(index: int) -> EpisodeProgress:
    length = 200_000
    spans = (TokenSpan(0, length, TokenSource.ENVIRONMENT),)
    transcript = Transcript(tokens=(7,) * length, spans=spans, logprobs=(), versions=())
    return EpisodeProgress("g", index, 1, (transcript,))


def test_long_progress_is_split_and_sent_before_anything_is_given_back() -> None:
    key = Key("job", "g", 4, 1)
    outbox = LeaseOutbox(
        3, 1, [long_progress(i) for i in range(5)], [key], [(key, GiveBackReason.DRAIN, "")]
    )
    made = messages(outbox, worker_id="w")
    assert [[p.index for p in message.progress] for message in made] == [[0, 1], [2, 3], [4]]
    assert [message.worker_id for message in made] == ["w", "", ""]
    assert [message.credits for message in made] == [0, 0, 3]
    assert [len(message.give_back) for message in made] == [0, 0, 1]


def test_an_empty_outbox_is_one_message() -> None:
    (made,) = messages(LeaseOutbox(), worker_id="w")
    assert (made.worker_id, made.credits) == ("w", 0)


async def test_what_is_put_soon_takes_along_what_waits() -> None:
    sent: list[list[int]] = []

    async def send(items: list[int]) -> None:
        sent.append(items)

    queue = Coalescer(send, linger=lambda: 60.0, max_items=5)
    queue.put(1)
    await asyncio.sleep(0.01)
    assert sent == []
    for item in (2, 3, 4):
        queue.put(item, soon=True)
    await asyncio.sleep(0.01)
    assert sent == [[1, 2, 3, 4]]
    queue.put(5)
    await asyncio.sleep(0.01)
    assert sent == [[1, 2, 3, 4]]  # the next list waits again
    for item in (6, 7, 8, 9, 10):
        queue.put(item)
    await asyncio.sleep(0.01)
    assert sent[1:] == [[5, 6, 7, 8, 9]]
    queue.put(11, soon=True)
    await asyncio.sleep(0.01)
    assert sent[2:] == [[10, 11]]
