from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import TokenSource
from paceline.errors import InvalidError
from paceline.tokens.transcript import TranscriptBuilder
from paceline.types import TokenSpan, VersionRun

Part = tuple[str, list[int], list[int]]

shown = st.tuples(
    st.sampled_from(["template", "environment", "tool"]),
    st.lists(st.integers(0, 99), max_size=5),
    st.just([]),
)
said = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), max_size=6).map(
    lambda pairs: ("policy", [token for token, _ in pairs], [version for _, version in pairs])
)
parts = st.lists(st.one_of(shown, said), max_size=12)


def grow(builder: TranscriptBuilder, made: list[Part]) -> TranscriptBuilder:
    for source, tokens, versions in made:
        if source == "policy":
            runs = [VersionRun(version, 1) for version in versions]
            builder.add_policy(tokens, [-0.5] * len(tokens), runs)
        else:
            builder.add(tokens, TokenSource(source))
    return builder


@given(parts)
def test_spans_cover_all_tokens_without_gaps(made: list[Part]) -> None:
    transcript = grow(TranscriptBuilder(), made).build()
    at = 0
    for span in transcript.spans:
        assert span.start == at
        assert span.end > span.start
        at = span.end
    assert at == len(transcript.tokens)
    expected = [token for _, tokens, _ in made for token in tokens]
    assert list(transcript.tokens) == expected


@given(parts)
def test_counts_of_policy_tokens_agree(made: list[Part]) -> None:
    transcript = grow(TranscriptBuilder(), made).build()
    policy = sum(s.end - s.start for s in transcript.spans if s.source is TokenSource.POLICY)
    assert policy == len(transcript.logprobs) == sum(run.count for run in transcript.versions)
    sampled = [version for _, _, versions in made for version in versions]
    assert [run.version for run in transcript.versions for _ in range(run.count)] == sampled


@given(parts, parts)
def test_a_resumed_transcript_equals_an_uninterrupted_one(
    before: list[Part], after: list[Part]
) -> None:
    whole = grow(TranscriptBuilder(), before + after).build()
    half = grow(TranscriptBuilder(), before).build()
    assert grow(TranscriptBuilder.resume(half), after).build() == whole


def test_neighbours_of_one_source_share_a_span() -> None:
    builder = TranscriptBuilder()
    builder.add([1], TokenSource.TEMPLATE)
    builder.add([2], TokenSource.TEMPLATE)
    builder.add_policy([3], [-1.0], [VersionRun(0, 1)])
    builder.add_policy([4], [-1.0], [VersionRun(0, 1)])
    transcript = builder.build()
    assert transcript.spans == (
        TokenSpan(0, 2, TokenSource.TEMPLATE),
        TokenSpan(2, 4, TokenSource.POLICY),
    )
    assert transcript.versions == (VersionRun(0, 2),)


def test_policy_tokens_need_as_many_logprobs() -> None:
    with pytest.raises(InvalidError, match="2 policy tokens came with 1 log-probs"):
        TranscriptBuilder().add_policy([1, 2], [-1.0], [VersionRun(0, 2)])


def test_policy_tokens_are_not_added_as_shown() -> None:
    with pytest.raises(InvalidError, match="add_policy"):
        TranscriptBuilder().add([1], TokenSource.POLICY)


def test_steps_mark_turns() -> None:
    builder = TranscriptBuilder()
    builder.add([1], TokenSource.ENVIRONMENT)
    builder.add_policy([2, 3], [-1.0, -1.0], [VersionRun(0, 2)])
    builder.mark_step(1, reward=0.5)
    (step,) = builder.build().steps
    assert (step.start, step.end, step.reward) == (1, 3, 0.5)
