"""What was generated and is not trained, between two batches: how many episodes, how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline_experience.ledger.generation.submission import Report, Verdict
from paceline_experience.ledger.state import DROPPED, GroupRecord

_OPEN = "ql"
_FAILURES = frozenset({Verdict.REQUEUE, Verdict.INVALID, Verdict.OVERSIZED})
_MOST_DETAIL = 500


@dataclass(slots=True)
class _Sum:
    episodes: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.episodes += 1
        self.tokens += tokens

    @property
    def mean(self) -> float:
        return self.tokens / self.episodes if self.episodes else 0.0


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Shares of episodes, and mean policy tokens of one, beside the batch that is trained."""

    dropped_share: float = 0.0  # finished, then dropped: of those and the batch
    dropped_tokens_mean: float = 0.0
    aborted_share: float = 0.0  # dropped before they finished, if they had tokens
    aborted_tokens_mean: float = 0.0
    resumed_share: float = 0.0  # of the batch: took more than one lease
    resumed_tokens_mean: float = 0.0


class Losses:
    """Sums since the last batch was fixed; a restart of the service forgets them."""

    def __init__(self) -> None:
        self._dropped, self._aborted = _Sum(), _Sum()
        self._failed, self._last = 0, ""

    def note_failures(self, reports: Sequence[Report]) -> None:
        """Attempts have ended; those that failed are counted, also in evaluations."""
        for each in reports:
            if each.verdict in _FAILURES:
                self._failed += 1
                self._last = each.detail[:_MOST_DETAIL] or self._last

    def failures(self) -> dict[str, Any]:
        """Failed attempts so far, as fields of `LedgerProgress`."""
        return {"failed_attempts": self._failed, "last_failure": self._last}

    def note(self, before: GroupRecord, after: GroupRecord | None) -> None:
        """A group has lost some of its episodes, or all of them."""
        if before.is_eval:
            return
        for index, state in enumerate(before.states):
            if (after is not None and after.states[index] != DROPPED) or state == DROPPED:
                continue
            found = before.results[index]
            if found is not None:
                self._dropped.add(found.own_tokens)
            elif state in _OPEN and before.sampled.get(index):
                self._aborted.add(before.sampled[index])

    def beside(self, batch: list[GroupRecord]) -> LengthBias:
        """How these lengths compare with a batch that is about to be fixed."""
        episodes = [found for group in batch for found in group.summaries()]
        resumed = _Sum()
        for found in episodes:
            if found.attempt > 1:
                resumed.add(found.policy_tokens)
        return LengthBias(
            dropped_share=_share(self._dropped, len(episodes)),
            dropped_tokens_mean=self._dropped.mean,
            aborted_share=_share(self._aborted, len(episodes)),
            aborted_tokens_mean=self._aborted.mean,
            resumed_share=resumed.episodes / len(episodes),
            resumed_tokens_mean=resumed.mean,
        )

    def reset(self) -> None:
        """The batch is fixed."""
        self._dropped, self._aborted = _Sum(), _Sum()


def _share(lost: _Sum, trained: int) -> float:
    return lost.episodes / (lost.episodes + trained)
