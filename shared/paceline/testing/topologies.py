"""Contract tests for topologies, with a scripted session in place of policy and world."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.enums import TokenSource
from paceline.plugins import Topology
from paceline.testing.common import expect, expect_type, resolved
from paceline.types import TokenSpan, Transcript, VersionRun


class ScriptedSession:
    """A session that takes one turn per word; `calls` records the methods called."""

    def __init__(self, words: Sequence[str]) -> None:
        self.calls: list[str] = []
        self.actions: list[str] = []
        self._words = list(words)
        self._acted = 0

    @property
    def over(self) -> bool:
        """Whether the last word has been passed to `step`."""
        return len(self.actions) >= len(self._words)

    async def reset(self) -> None:
        """Show nothing."""
        self._note("reset", not self.calls, "reset must be called first, and once")

    async def act(self) -> str:
        """The next word."""
        self._note(
            "act", self.calls and not self.over, "act must not be called once the episode is over"
        )
        self._acted += 1
        return self._words[min(self._acted, len(self._words)) - 1]

    async def step(self, action: str) -> None:
        """Record the action."""
        self._note(
            "step",
            self._acted > 0 and not self.over,
            "step must follow act, while the episode is not over",
        )
        expect_type(action, str, "an action")
        self.actions.append(action)

    def transcript(self) -> Transcript:
        """One prompt token, then one policy token per turn."""
        turns = self._acted
        return Transcript(
            tokens=tuple(range(turns + 1)),
            spans=(
                TokenSpan(0, 1, TokenSource.TEMPLATE),
                *([TokenSpan(1, turns + 1, TokenSource.POLICY)] if turns else []),
            ),
            logprobs=(-1.0,) * turns,
            versions=(VersionRun(0, turns),) if turns else (),
        )

    def _note(self, call: str, fits: object, rule: str) -> None:
        self.calls.append(call)
        expect(fits, f"{rule}: {', '.join(self.calls)}")


def fulfils_the_contract(
    plugin: str | Topology, options: Mapping[str, Any] | None = None
) -> ScriptedSession:
    """Check that it resets once, alternates act and step to the end, and returns transcripts.

    Returns:
        The longest session, for further checks.
    """
    topology: Topology = resolved("topologies", plugin)
    sessions = [ScriptedSession(["word"] * turns) for turns in (1, 2, 5)]
    for session in sessions:
        transcripts = asyncio.run(topology(session, **(options or {})))
        expect(session.over, f"it returned before the end: {', '.join(session.calls)}")
        expect_type(transcripts, tuple, "its answer")
        expect(transcripts, "it returns no transcript")
        for each in transcripts:
            expect_type(each, Transcript, "one item of its result")
            expect(each.logprobs, "a transcript has no policy token")
    return sessions[-1]
