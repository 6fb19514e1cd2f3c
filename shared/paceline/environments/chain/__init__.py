"""Several sums in a row, worth something only if all are right: a sparse reward."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.chain.tasks:ChainTasks",
    world="paceline.environments.chain.world:Chain",
    options="paceline.environments.chain.tasks:ChainTasks",
)
