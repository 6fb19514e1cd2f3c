"""What goes into one message, and what into the next."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.types import Progress, Source, Span, Transcript
from paceline_environment.coalesce import portions
from paceline_environment.leases import Key, Outbox, messages


@given(st.lists(st.integers(0, 30)), st.integers(1, 40))
def test_portions_keep_order_and_fit(sizes: list[int], most: int) -> None:
    found = portions(sizes, size=lambda each: each, most=most)
    assert [each for part in found for each in part] == sizes
    assert all(sum(part) <= most or len(part) == 1 for part in found)
    assert all(sum(one) + two[0] > most for one, two in pairwise(found))


def long_progress(index: int) -> Progress:
    length = 200_000
    spans = (Span(0, length, Source.ENVIRONMENT),)
    transcript = Transcript(tokens=(7,) * length, spans=spans, logprobs=(), versions=())
    return Progress("g", index, 1, (transcript,))


def test_long_progress_takes_several_messages_before_anything_is_given_back() -> None:
    key = Key("job", "g", 4, 1)
    said = Outbox(3, 1, [long_progress(i) for i in range(5)], [key], [(key, "drain", "")])
    made = messages(said, worker_id="w")
    assert [[p.index for p in message.progress] for message in made] == [[0, 1], [2, 3], [4]]
    assert [message.worker_id for message in made] == ["w", "", ""]
    assert [message.credits for message in made] == [0, 0, 3]
    assert [len(message.give_back) for message in made] == [0, 0, 1]


def test_nothing_to_say_is_one_message() -> None:
    (made,) = messages(Outbox(), worker_id="w")
    assert (made.worker_id, made.credits) == ("w", 0)
