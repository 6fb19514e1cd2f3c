"""Rows of data files as tasks of one turn: question and answer, or the start of a dialogue."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.dataset.tasks:DatasetTasks",
    world="paceline.environments.dataset.world:Dataset",
    options="paceline.environments.dataset.options:DatasetOptions",
    replies="none",
)
