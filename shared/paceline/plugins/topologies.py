"""Topologies: how an episode is led from its first observation to its transcripts."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.types import Transcript


class Session(Protocol):
    """One episode, as a topology sees it: the policy on one side, the world on the other."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to be said: the world or the context has ended it."""
        ...

    async def reset(self) -> None:
        """Start the world and show its first observation, or go on where an earlier worker was.

        Raises:
            PacelineError: the episode has to be given back; let it through.
        """
        ...

    async def act(self) -> str:
        """Let the policy take its turn; its text."""
        ...

    async def step(self, action: str) -> None:
        """Give an action to the world and show the policy what follows."""
        ...

    def transcript(self) -> Transcript:
        """All that was said so far, in tokens."""
        ...


class Topology(Protocol):
    """Drives one episode."""

    async def __call__(
        self, session: Session, /, *args: Any, **options: Any
    ) -> tuple[Transcript, ...]:
        """Run to the end; the transcripts to train on."""
        ...
