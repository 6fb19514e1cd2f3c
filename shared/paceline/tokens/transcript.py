"""Builds a transcript from tokens as they arrive; sampled text is never tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

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
        self._runs, runs = split_runs(self._runs, keep)
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
    """`runs` with one more appended; neighbours of the same version and worker are merged."""
    last = runs[-1] if runs else None
    if last is not None and (last.version, last.worker) == (run.version, run.worker):
        runs[-1] = replace(last, count=last.count + run.count)
    else:
        runs.append(run)
    return runs


def split_runs(runs: Iterable[VersionRun], count: int) -> tuple[list[VersionRun], list[VersionRun]]:
    """The runs of the first `count` tokens, and those of the others."""
    before: list[VersionRun] = []
    after: list[VersionRun] = []
    for run in runs:
        taken = min(run.count, count)
        count -= taken
        if taken:
            before.append(replace(run, count=taken))
        if run.count > taken:
            after.append(replace(run, count=run.count - taken))
    return before, after
