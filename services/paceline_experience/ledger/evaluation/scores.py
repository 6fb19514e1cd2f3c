"""What several samples of a task come to: pass@k and the answer of the majority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb

from paceline.config.evaluation import EvalSpec
from paceline.enums import ScoreStatus
from paceline_experience.ledger.records import EpisodeSummary, EvalTotals


def pass_at(n: int, c: int, k: int) -> float:
    """The unbiased estimate of pass@k from `n` samples of which `c` are right, `k <= n`.

    1 - C(n - c, k) / C(n, k), equation 1 of arXiv 2107.03374, in exact integers.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(answers: Sequence[str]) -> int:
    """Index of the first sample with the most frequent answer.

    Among equally frequent answers the one that came first wins. An empty answer counts only if
    there is no other.
    """
    given = [answer for answer in answers if answer] or [*answers]
    votes = Counter(given)
    return answers.index(max(votes, key=votes.__getitem__))  # the first of equals


def scores_of(samples: Sequence[EpisodeSummary], spec: EvalSpec) -> dict[str, float]:
    """The scores of a task that the evaluation reports, by name."""
    right = [each.reward >= spec.pass_reward for each in samples]
    answers = [each.answer for each in samples]
    found = {f"pass@{k}": pass_at(len(right), sum(right), k) for k in spec.pass_at}
    voted = {f"maj@{k}": float(right[majority(answers[:k])]) for k in spec.majority_at}
    return found | voted


def added(
    totals: EvalTotals, tasks: Iterable[Sequence[EpisodeSummary]], spec: EvalSpec
) -> EvalTotals:
    """Totals with the samples of these tasks added."""
    found = [*tasks]
    scores = Counter(totals.scores)
    statuses = Counter(s.status for each in found for s in each)
    for samples in found:
        scores.update(scores_of(samples, spec))
    return EvalTotals(
        measured=totals.measured + len(found),
        reward=totals.reward + sum(sum(s.reward for s in each) / len(each) for each in found),
        tokens=totals.tokens + sum(s.policy_tokens for each in found for s in each),
        truncated=totals.truncated + sum(s.truncated for each in found for s in each),
        parse_errors=totals.parse_errors + statuses[ScoreStatus.PARSE_ERROR],
        timeouts=totals.timeouts + statuses[ScoreStatus.TIMEOUT],
        scores=dict(scores),
    )


def means(scores: Mapping[str, float], count: int) -> dict[str, float]:
    """Sums of scores over so many tasks as means; nothing if there are none."""
    return {name: total / count for name, total in scores.items()} if count else {}
