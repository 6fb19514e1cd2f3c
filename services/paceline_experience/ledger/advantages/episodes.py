"""The episodes of a batch as the columns that advantages are given."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from paceline.plugins import EpisodeBatch, Turns
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.generation.allocation import starts_of
from paceline_experience.ledger.records import EpisodeSummary
from paceline_experience.ledger.state import GroupRecord
from paceline_experience.store.payloads import unpack

NEEDS_PAYLOADS = frozenset({"tokens", "turns"})


def episode_batch(
    groups: Sequence[GroupRecord], *, needs: Collection[str] = (), payloads: Sequence[bytes] = ()
) -> EpisodeBatch:
    """Columns of the episodes of these groups, in order.

    `payloads`, one per episode, are read only for the needs `tokens` and `turns`.
    """
    episodes = [(number, g, e) for number, g in enumerate(groups) for e in g.members()]
    read = not NEEDS_PAYLOADS.isdisjoint(needs)
    found = [pb.Trajectory.FromString(unpack(data)) for data in payloads] if read else []
    return EpisodeBatch(
        groups=np.array([number for number, _, _ in episodes], np.int64),
        tasks=np.array([g.position for _, g, _ in episodes], np.int64),
        rewards=np.array([e.reward for _, _, e in episodes], np.float64),
        lengths=np.array([e.policy_tokens for _, _, e in episodes], np.int64),
        truncated=np.array([e.truncated for _, _, e in episodes], np.bool_),
        answers=tuple(e.answer for _, _, e in episodes),
        parts=_parts([e for _, _, e in episodes]),
        replayed=_replayed(groups),
        **_continued(groups, episodes),
        logprobs=_logprobs(found) if "tokens" in needs else None,
        turns=_turns(found) if "turns" in needs else None,
    )


def trial_batch(parts: Sequence[str]) -> EpisodeBatch:
    """Two episodes of one group with all columns, to try plug-ins on before a job is accepted."""
    pair, none = np.arange(2), np.zeros(2, np.bool_)
    return EpisodeBatch(
        groups=np.zeros(2, np.int64),
        tasks=np.zeros(2, np.int64),
        rewards=pair.astype(np.float64),
        lengths=np.ones(2, np.int64),
        truncated=none,
        answers=("0", "1"),
        parts={name: pair.astype(np.float64) for name in parts} if len(parts) > 1 else {},
        logprobs=-np.ones(2),
        turns=Turns(
            pair, np.zeros(2, np.int64), pair, pair + 1, pair.astype(np.float64), none, none
        ),
    )


def _parts(episodes: Sequence[EpisodeSummary]) -> dict[str, np.ndarray]:
    names = sorted({name for each in episodes for name in each.parts})
    nan = float("nan")
    return {name: np.array([each.parts.get(name, nan) for each in episodes]) for name in names}


def _replayed(groups: Sequence[GroupRecord]) -> np.ndarray | None:
    if not any(group.guests for group in groups):
        return None
    flags = [(False,) * len(g.summaries()) + (True,) * len(g.guests) for g in groups]
    return np.concatenate([np.array(each, np.bool_) for each in flags])


def _continued(
    groups: Sequence[GroupRecord], episodes: Sequence[tuple[int, GroupRecord, EpisodeSummary]]
) -> dict[str, np.ndarray]:
    """Columns of the episodes that continue others; none if there are none."""
    inherited = [e.inherited for _, _, e in episodes]
    if not any(inherited):
        return {}
    parents: list[int] = []
    for group in groups:
        first, starts, indices = len(parents), starts_of(group), group.member_indices()
        place = {index: first + number for number, index in enumerate(indices)}
        found = [starts[index].parent if index < len(starts) else None for index in indices]
        parents += [place.get(each[0], -1) if each else -1 for each in found]
    return {
        "parents": np.array(parents, np.int64),
        "inherited": np.array(inherited, np.int64),
    }


def _logprobs(trajectories: Sequence[pb.Trajectory]) -> np.ndarray:
    values = [x for each in trajectories for t in each.transcripts for x in t.logprobs]
    return np.array(values, np.float64)


def _turns(trajectories: Sequence[pb.Trajectory]) -> Turns:
    """All turns; a transcript without marks is one turn without a reward of the environment."""
    rows: list[tuple[int, int, int, int, float, bool, bool]] = []
    first = 0  # policy token of the transcript
    for episode, trajectory in enumerate(trajectories):
        turn = 0
        for transcript in trajectory.transcripts:
            places = _policy_positions(transcript)
            for mark in transcript.steps:
                start, end = np.searchsorted(places, (mark.start, mark.end)).tolist()
                flags = (mark.matched_expert, mark.patched)
                rows.append((episode, turn, first + start, first + end, mark.reward, *flags))
                turn += 1
            if not transcript.steps and len(places):
                rows.append((episode, turn, first, first + len(places), 0.0, False, False))
                turn += 1
            first += len(places)
    columns = list(zip(*rows, strict=True)) or [()] * 7
    integers = [np.array(column, np.int64) for column in columns[:4]]
    return Turns(
        *integers,
        rewards=np.array(columns[4], np.float64),
        matched=np.array(columns[5], np.bool_),
        patched=np.array(columns[6], np.bool_),
    )


def _policy_positions(transcript: pb.Transcript) -> np.ndarray:
    spans = [s for s in transcript.spans if s.source == pb.TOKEN_SOURCE_POLICY]
    places = [np.arange(span.start, span.end) for span in spans]
    return np.concatenate(places) if places else np.zeros(0, np.int64)
