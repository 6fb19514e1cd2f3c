"""Data sets of reasoning_gym, scored by the data set itself."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.reasoning_gym.tasks:ReasoningGymTasks",
    world="paceline.environments.reasoning_gym.world:ReasoningGym",
    options="paceline.environments.reasoning_gym.tasks:ReasoningGymTasks",
)
