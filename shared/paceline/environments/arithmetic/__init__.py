"""Sums of small numbers, answered in one turn: for demos and tests."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.arithmetic.tasks:ArithmeticTasks",
    world="paceline.environments.arithmetic.world:Arithmetic",
    options="paceline.environments.arithmetic.tasks:ArithmeticTasks",
    replies="none",
)
