"""The contract of topologies, and an episode without policy and world for them to lead."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.enums import TokenSource
from paceline.plugins import Topology
from paceline.testing.common import expect, expect_type, resolved
from paceline.types import TokenSpan, Transcript, VersionRun


class ScriptedSession:
    """Is over after as many turns as it has words; `calls` has what it was asked for."""

    def __init__(self, words: Sequence[str]) -> None:
        self.calls: list[str] = []
        self.actions: list[str] = []
        self._words = list(words)
        self._acted = 0

    @property
    def over(self) -> bool:
        """Whether the last word has been given to the world."""
        return len(self.actions) >= len(self._words)

    async def reset(self) -> None:
        """Show nothing."""
        self._note("reset", not self.calls, "reset comes first, and once")

    async def act(self) -> str:
        """The next word."""
        self._note("act", self.calls and not self.over, "act is for one that is not over")
        self._acted += 1
        return self._words[min(self._acted, len(self._words)) - 1]

    async def step(self, action: str) -> None:
        """Note the action."""
        self._note("step", self._acted > 0 and not self.over, "step follows act, until it is over")
        expect_type(action, str, "an action")
        self.actions.append(action)

    def transcript(self) -> Transcript:
        """One token for a turn, after one of the prompt."""
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
    """It resets once, acts and steps until the episode is over, and gives its transcripts.

    Returns:
        The longest of its sessions, to look at more.
    """
    topology: Topology = resolved("topologies", plugin)
    sessions = [ScriptedSession(["word"] * turns) for turns in (1, 2, 5)]
    for session in sessions:
        transcripts = asyncio.run(topology(session, **(options or {})))
        expect(session.over, f"it left before the end: {', '.join(session.calls)}")
        expect_type(transcripts, tuple, "its answer")
        expect(transcripts, "it gives no transcript")
        for each in transcripts:
            expect_type(each, Transcript, "one of its answer")
            expect(each.logprobs, "a transcript without a token of the policy")
    return sessions[-1]
