"""A small OpenEnv server: guess a number from 0 to 5, with a hint after each of three guesses.

pip install 'openenv>=0.10,<0.11'
python examples/openenv/server.py [--port 8765] [--sessions 512]
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MOST = 5
GUESSES = 3


class GuessAction(Action):
    """One guess."""

    guess: int


class GuessObservation(Observation):
    """A sum of what the policy has to beat: the last guess, and whether to go up or down."""

    hint: str


class Guess(Environment[GuessAction, GuessObservation, State]):
    """One episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> GuessObservation:
        """Choose a number."""
        self._number = random.Random(seed).randint(0, MOST)
        self._state = State(episode_id=episode_id, step_count=0)
        return GuessObservation(hint=f"0+{MOST}=")

    def step(
        self, action: GuessAction, timeout_s: float | None = None, **more: Any
    ) -> GuessObservation:
        """Compare a guess."""
        self._state.step_count += 1
        if action.guess == self._number:
            return GuessObservation(hint="", reward=1.0, done=True)
        sign = "+" if action.guess < self._number else "-"
        is_over = self._state.step_count == GUESSES
        return GuessObservation(hint=f"{action.guess}{sign}1=", reward=0.0, done=is_over)

    @property
    def state(self) -> State:
        """How far the episode is."""
        return self._state


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--sessions", type=int, default=512)
    given = parser.parse_args()
    app = create_fastapi_app(Guess, GuessAction, GuessObservation, given.sessions)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
