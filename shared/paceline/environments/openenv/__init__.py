"""Environments that an OpenEnv server runs, reached over the network."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.openenv.tasks:OpenEnvTasks",
    world="paceline.environments.openenv.world:OpenEnvWorld",
    options="paceline.environments.openenv.options:OpenEnvOptions",
    settings="paceline.environments.openenv.options:OpenEnvSettings",
)
