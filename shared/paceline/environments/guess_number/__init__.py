"""Guess a number, with a hint after each guess: several turns, with and without a chat template."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.guess_number.tasks:GuessTasks",
    world="paceline.environments.guess_number.world:GuessNumber",
    options="paceline.environments.guess_number.tasks:GuessTasks",
)
