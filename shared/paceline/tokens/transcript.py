"""Builds a transcript from tokens as they arrive; sampled text is never tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.enums import TokenSource
from paceline.errors import InvalidError
from paceline.types import StepMark, TokenSpan, Transcript, VersionRun


class TranscriptBuilder:
    """An append-only transcript. Neighbouring tokens of one source share a span."""

    __slots__ = ("_branch", "_logprobs", "_runs", "_spans", "_steps", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[TokenSpan] = []
        self._runs: list[VersionRun] = []
        self._steps: list[StepMark] = []
        self._branch = (-1, 0)  # parent, and the tokens it has from it

    @classmethod
    def resume(cls, transcript: Transcript) -> TranscriptBuilder:
        """Continue the transcript of an earlier attempt."""
        made = cls()
        made.tokens = list(transcript.tokens)
        made._logprobs = list(transcript.logprobs)
        made._spans = list(transcript.spans)
        made._runs = list(transcript.versions)
        made._steps = list(transcript.steps)
        made._branch = (transcript.parent, transcript.branch_token)
        return made

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return len(self._logprobs)

    @property
    def turns(self) -> list[TokenSpan]:
        """Policy spans, one per turn; the last may be unfinished."""
        return [span for span in self._spans if span.source is TokenSource.POLICY]

    @property
    def steps(self) -> list[StepMark]:
        """Steps of the environment that are marked so far."""
        return list(self._steps)

    @property
    def awaits_policy(self) -> bool:
        """Whether the last token was shown to the policy rather than sampled by it."""
        return bool(self._spans) and self._spans[-1].source is not TokenSource.POLICY

    def add(self, tokens: Sequence[int], source: TokenSource) -> None:
        """Append tokens that are shown to the policy."""
        if source is TokenSource.POLICY:
            raise InvalidError("policy tokens need log-probs and versions: use add_policy")
        self._extend(tokens, source)

    def add_spans(self, tokens: Sequence[int], spans: Iterable[TokenSpan]) -> None:
        """Append rendered tokens with spans counted from their start."""
        for span in spans:
            self.add(tokens[span.start : span.end], span.source)

    def add_policy(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Iterable[VersionRun]
    ) -> None:
        """Append sampled tokens, including the sampled end of turn.

        Raises:
            InvalidError: the three differ in their number of tokens.
        """
        runs = [run for run in versions if run.count]
        num_versions = sum(run.count for run in runs)
        if not len(tokens) == len(logprobs) == num_versions:
            raise InvalidError(
                f"{len(tokens)} policy tokens came with {len(logprobs)} log-probs "
                f"and versions for {num_versions}"
            )
        self._extend(tokens, TokenSource.POLICY)
        self._logprobs.extend(logprobs)
        for run in runs:
            self._runs = merge_run(self._runs, run)

    def pop_turn(self) -> tuple[list[int], list[float], list[VersionRun]]:
        """Remove the last turn; returns its tokens, log-probs and versions."""
        if not self._spans or self._spans[-1].source is not TokenSource.POLICY:
            return [], [], []
        span = self._spans.pop()
        count = span.end - span.start
        tokens, self.tokens = self.tokens[span.start :], self.tokens[: span.start]
        keep = len(self._logprobs) - count
        logprobs, self._logprobs = self._logprobs[keep:], self._logprobs[:keep]
        every = [run.version for run in self._runs for _ in range(run.count)]
        self._runs, runs = _runs(every[:keep]), _runs(every[keep:])
        return tokens, logprobs, runs

    def mark_step(self, start: int, *, reward: float) -> None:
        """Record the environment's reward for the turn that began at `start`."""
        self._steps.append(StepMark(start, len(self.tokens), reward))

    def build(self, *, steps: bool = True) -> Transcript:
        """The transcript so far."""
        return Transcript(
            tokens=tuple(self.tokens),
            spans=tuple(self._spans),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._runs),
            steps=tuple(self._steps) if steps else (),
            parent=self._branch[0],
            branch_token=self._branch[1],
        )

    def _extend(self, tokens: Sequence[int], source: TokenSource) -> None:
        if not tokens:
            return
        start = len(self.tokens)
        self.tokens.extend(tokens)
        if self._spans and self._spans[-1].source is source:
            start = self._spans.pop().start
        self._spans.append(TokenSpan(start, len(self.tokens), source))


def merge_run(runs: list[VersionRun], run: VersionRun) -> list[VersionRun]:
    """`runs` with one more appended; neighbours of the same version are merged."""
    if runs and runs[-1].version == run.version:
        runs[-1] = VersionRun(run.version, runs[-1].count + run.count)
    else:
        runs.append(run)
    return runs


def _runs(versions: Iterable[int]) -> list[VersionRun]:
    runs: list[VersionRun] = []
    for version in versions:
        merge_run(runs, VersionRun(version, 1))
    return runs
