"""An environment: repeat the digits shown. Imports only the descriptor."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline_example.copying.tasks:CopyingTasks",
    world="paceline_example.copying.world:Copying",
    options="paceline_example.copying.tasks:CopyingTasks",
    replies="none",
)
