"""Data sets of reasoning_gym, each scored by its own rules."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.reasoning_gym.tasks:ReasoningGymTasks",
    world="paceline.environments.reasoning_gym.world:ReasoningGym",
    options="paceline.environments.reasoning_gym.tasks:ReasoningGymTasks",
    # Some data sets evaluate replies as Python, whatever the weights of a job make of them.
    worlds_in="sealed",
    replies="none",
)
