"""Questions that are answered with tools: a calculator, a search, notes; several turns."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.tools.tasks:ToolTasks",
    world="paceline.environments.tools.world:Tools",
    options="paceline.environments.tools.tasks:ToolTasks",
    replies="tools",
)
