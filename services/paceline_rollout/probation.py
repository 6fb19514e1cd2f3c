"""Holds tokens of a version until it is known that the engine has its weights right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.enums import FinishReason
from paceline.plugins import EngineOutput
from paceline.types import VersionRun

MAX_ACCEPTED = 64  # remembered; engines emit no tokens of versions that are much older
REFUSED = "weights are wrong, or were replaced before they were checked; resume on another worker"


class Probation:
    """Outputs of an engine, in order for each request.

    Engines go on generating while a version that they have just loaded is checked. Tokens of that
    version are kept back until `accept`; after `refuse` they are dropped, so that nobody goes on
    from them.
    """

    def __init__(self) -> None:
        self._accepted: list[int] = []  # versions, the newest last
        self._refused = -1  # this one and those before it are refused, unless they are accepted
        self._held: dict[str, list[EngineOutput]] = {}  # by request

    def admit(self, output: EngineOutput) -> EngineOutput | None:
        """The output if it may be sent; None if it is held.

        Tokens of a refused version are cut off, which ends their request.
        """
        if (held := self._held.get(output.request_id)) is not None:
            held.append(output)
            return None
        if self._num_accepted(output.versions) == len(output.versions):
            return output
        if max(run.version for run in output.versions) <= self._refused:
            return self._cut([output])
        self._held[output.request_id] = [output]
        return None

    def accept(self, version: int) -> list[EngineOutput]:
        """The held outputs that may be sent once a version is accepted.

        Earlier versions without a verdict were replaced before they had one, and never get one.
        """
        self._accepted = [*self._accepted, version][-MAX_ACCEPTED:]
        self._refused = max(self._refused, version - 1)
        held, self._held = self._held, {}
        sent: list[EngineOutput] = []
        for outputs in held.values():
            for output in outputs:
                if (admitted := self.admit(output)) is not None:
                    sent.append(admitted)
                if admitted is not None and admitted is not output:
                    break  # it is cut, and so has ended
        return sent

    def refuse(self, version: int) -> list[EngineOutput]:
        """The ends of requests that have tokens of a version that is wrong."""
        self._refused = max(self._refused, version)
        held, self._held = self._held, {}
        return [self._cut(outputs) for outputs in held.values()]

    def _num_accepted(self, runs: Sequence[VersionRun]) -> int:
        """How many runs come before the first one of another version than accepted ones."""
        wrong = (i for i, run in enumerate(runs) if run.version not in self._accepted)
        return next(wrong, len(runs))

    def _cut(self, outputs: Sequence[EngineOutput]) -> EngineOutput:
        """The tokens of accepted versions that come before all others, and an error."""
        tokens: list[int] = []
        logprobs: list[float] = []
        runs: list[VersionRun] = []
        for output in outputs:
            tokens += output.tokens
            logprobs += output.logprobs
            runs += output.versions
        right = runs[: self._num_accepted(runs)]
        kept = sum(run.count for run in right)
        return replace(
            outputs[-1],
            tokens=tuple(tokens[:kept]),
            logprobs=tuple(logprobs[:kept]),
            versions=tuple(right),
            finish_reason=FinishReason.ERROR,
            matched_stop="",
            error_code="UNAVAILABLE",
            error=REFUSED,
        )
