"""Fetch a key and take it to the door of a grid: several turns, with and without chat template."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.key_door.tasks:KeyDoorTasks",
    world="paceline.environments.key_door.world:KeyDoor",
    options="paceline.environments.key_door.tasks:KeyDoorTasks",
)
