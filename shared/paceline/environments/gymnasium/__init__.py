"""Environments of Gymnasium whose observations and actions can be written as text."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.gymnasium.tasks:GymnasiumTasks",
    world="paceline.environments.gymnasium.world:GymnasiumWorld",
    options="paceline.environments.gymnasium.options:GymnasiumOptions",
    worlds_in="sealed",
)
