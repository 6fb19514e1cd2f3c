"""What the samples of tasks come to: means with standard errors, pass@k, the majority's answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import comb, sqrt

from paceline.config.evaluation import EvalSpec
from paceline.enums import ScoreStatus
from paceline_experience.ledger.records import EpisodeSummary, EvalTotals

REWARD = "reward"  # its name among the scores
MAX_MODELS, OTHERS = 16, "others"  # names of models that are counted one by one; and the rest


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
    answers = [each.answer or each.said for each in samples]
    found = {f"pass@{k}": pass_at(len(right), sum(right), k) for k in spec.pass_at}
    voted = {f"maj@{k}": float(right[majority(answers[:k])]) for k in spec.majority_at}
    return found | voted


def added(
    totals: EvalTotals, tasks: Iterable[Sequence[EpisodeSummary]], spec: EvalSpec
) -> EvalTotals:
    """Totals with the samples of these tasks added."""
    found = [*tasks]
    scores, squares = dict(totals.scores), dict(totals.squares)
    reward = totals.reward
    statuses = Counter(s.status for each in found for s in each)
    for count, samples in enumerate(found, totals.measured):
        mean = sum(each.reward for each in samples) / len(samples)
        squares[REWARD] = _spread(squares.get(REWARD, 0.0), reward, count, mean)
        reward += mean
        for name, score in scores_of(samples, spec).items():
            before = scores.get(name, 0.0)
            squares[name] = _spread(squares.get(name, 0.0), before, count, score)
            scores[name] = before + score
    return EvalTotals(
        measured=totals.measured + len(found),
        reward=reward,
        tokens=totals.tokens + sum(s.policy_tokens for each in found for s in each),
        truncated=totals.truncated + sum(s.truncated for each in found for s in each),
        parse_errors=totals.parse_errors + statuses[ScoreStatus.PARSE_ERROR],
        timeouts=totals.timeouts + statuses[ScoreStatus.TIMEOUT],
        texts=totals.texts + sum(not s.answer and bool(s.said) for each in found for s in each),
        scores=scores,
        squares=squares,
        models=_models(totals.models, (s.model for each in found for s in each)),
    )


def _models(before: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Samples by the model that has answered, of so many models: an endpoint may say anything."""
    found = dict(before)
    for name in filter(None, names):
        name = name if name in found or len(found) < MAX_MODELS else OTHERS
        found[name] = found.get(name, 0) + 1
    return found


def _spread(squares: float, total: float, count: int, value: float) -> float:
    """Squares of deviations from the mean with one more value: Welford (1962), loses no digits."""
    if not count:
        return 0.0
    deviation = value - total / count
    return squares + deviation * deviation * count / (count + 1)


def standard_errors(totals: EvalTotals) -> dict[str, float]:
    """Standard errors of `reward` and of the scores; nothing for fewer than two tasks.

    sqrt(sum((x_i - mean)^2) / (n - 1) / n) over the values x_i of n tasks. Samples of a task depend
    on each other, so each task counts once, however many it has: clustered by task, as in equation
    4 of arXiv 2411.00640 for clusters of one size, but for the factor n / (n - 1).
    """
    n = totals.measured
    if n < 2:
        return {}
    return {name: sqrt(each / (n - 1) / n) for name, each in totals.squares.items()}


def means(scores: Mapping[str, float], count: int) -> dict[str, float]:
    """Sums of scores over so many tasks as means; nothing if there are none."""
    return {name: total / count for name, total in scores.items()} if count else {}
