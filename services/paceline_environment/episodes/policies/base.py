"""The policy of an episode: rollout workers, or an endpoint outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.plugins import Observation
from paceline.types import EpisodeProgress, Transcript
from paceline_environment.rollouts.turn import PrefixHolders


class PolicyTurns(Protocol):
    """The policy's part in one episode: what it was shown, and the turns that it took."""

    @property
    def truncated(self) -> bool:
        """Whether the last turn ran out of tokens."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether there was no room for the last turn, so that it is none."""
        ...

    @property
    def samples(self) -> bool:
        """Whether a turn is being generated."""
        ...

    @property
    def num_sampled(self) -> int:
        """Policy tokens so far, including those of an unfinished turn; grows with each turn."""
        ...

    @property
    def num_policy_tokens(self) -> int:
        """Policy tokens of finished turns."""
        ...

    @property
    def workers(self) -> Sequence[str]:
        """The rollout workers that have generated, the last one at the end."""
        ...

    @property
    def engine(self) -> tuple[str, str]:
        """Name and precision of the engine that generates; empty: not known."""
        ...

    def generate_s(self, now: float) -> float:
        """How long its turns took to generate, including an unfinished one."""
        ...

    def waited_s(self, now: float) -> float:
        """Waiting time so far that does not count as the episode's own."""
        ...

    def begin(self, observation: Observation, holders: PrefixHolders) -> None:
        """The first observation; `holders` have its prompt. `open` or `resume` is next."""
        ...

    async def open(self) -> None:
        """Show the first observation.

        Raises:
            InvalidError: it leaves the policy no tokens to answer with.
            LimitError: it is too long.
        """
        ...

    async def act(self, number: int) -> str:
        """Take the next turn, after `number` others; returns its text."""
        ...

    def reward(self, reward: float) -> None:
        """The environment's reward for the last turn."""
        ...

    async def show(self, observation: Observation) -> bool:
        """Show the next observation; False: it does not fit."""
        ...

    async def resume(
        self, progress: EpisodeProgress, *, replayable: bool
    ) -> tuple[str, ...] | None:
        """Restore the turns of an earlier attempt; the actions to replay, None: start again."""
        ...

    def lacks_observation(self, num_actions: int) -> bool:
        """After `resume`: whether it was never shown the answer to that many actions."""
        ...

    def replayed(self, observation: Observation) -> None:
        """After `resume`: an observation that it was shown."""
        ...

    def transcript(self, *, several: bool) -> Transcript:
        """The transcript so far, with an unfinished turn; `several`: marks its turns."""
        ...

    def reward_turns(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Fields of `RewardTurn` of each turn, given the texts."""
        ...
