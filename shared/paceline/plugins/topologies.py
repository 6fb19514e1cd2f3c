"""The protocol of topologies, which drive an episode from first observation to transcripts."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.types import Transcript


class Session(Protocol):
    """One episode from a topology's point of view: a policy and a world."""

    @property
    def over(self) -> bool:
        """Whether the episode is over, ended by the world or the context length."""
        ...

    async def reset(self) -> None:
        """Start the world and show its first observation, or resume an earlier worker's episode.

        Raises:
            PacelineError: the episode's lease must be returned; do not catch it.
        """
        ...

    async def act(self) -> str:
        """Let the policy take its turn; returns its text."""
        ...

    async def step(self, action: str) -> None:
        """Apply an action to the world and show the resulting observation to the policy."""
        ...

    def transcript(self) -> Transcript:
        """The transcript so far."""
        ...


class Topology(Protocol):
    """Drives one episode."""

    async def __call__(
        self, session: Session, /, *args: Any, **options: Any
    ) -> tuple[Transcript, ...]:
        """Run the episode to its end; returns the transcripts to train on."""
        ...
