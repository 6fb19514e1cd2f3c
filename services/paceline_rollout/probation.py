"""Holds tokens of a version until it is known that the engine has its weights right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.enums import FinishReason
from paceline.plugins import EngineOutput
from paceline.types import VersionRun

REFUSED = "the worker's weights are wrong; resume on another worker"


class Probation:
    """Outputs of an engine, in order for each request.

    Engines go on generating while a version that they have just loaded is checked. Tokens of that
    version are kept back until `accept`; after `refuse` they are dropped, so that nobody goes on
    from them.
    """

    def __init__(self) -> None:
        self._accepted = self._refused = -1  # versions
        self._held: dict[str, list[EngineOutput]] = {}  # by request

    def admit(self, output: EngineOutput) -> EngineOutput | None:
        """The output if it may be sent; None if it is held.

        Tokens of a refused version are cut off, which ends their request.
        """
        newest = max((run.version for run in output.versions), default=-1)
        if (held := self._held.get(output.request_id)) is not None:
            held.append(output)
            return None
        if newest <= self._accepted:
            return output
        if newest <= self._refused:
            return self._cut([output])
        self._held[output.request_id] = [output]
        return None

    def accept(self, version: int) -> list[EngineOutput]:
        """What may be sent now that a version is right."""
        self._accepted = max(self._accepted, version)
        held, self._held = self._held, {}
        outputs = (self.admit(output) for each in held.values() for output in each)
        return [output for output in outputs if output is not None]

    def refuse(self, version: int) -> list[EngineOutput]:
        """The ends of requests that have tokens of a version that is wrong."""
        self._refused = max(self._refused, version)
        held, self._held = self._held, {}
        return [self._cut(outputs) for outputs in held.values()]

    def _cut(self, outputs: Sequence[EngineOutput]) -> EngineOutput:
        """The tokens of accepted versions that come before all others, and an error."""
        tokens: list[int] = []
        logprobs: list[float] = []
        runs: list[VersionRun] = []
        for output in outputs:
            tokens += output.tokens
            logprobs += output.logprobs
            runs += output.versions
        wrong = next((i for i, run in enumerate(runs) if run.version > self._accepted), len(runs))
        kept = sum(run.count for run in runs[:wrong])
        return replace(
            outputs[-1],
            tokens=tuple(tokens[:kept]),
            logprobs=tuple(logprobs[:kept]),
            versions=tuple(runs[:wrong]),
            finish_reason=FinishReason.ERROR,
            matched_stop="",
            error_code="UNAVAILABLE",
            error=REFUSED,
        )
