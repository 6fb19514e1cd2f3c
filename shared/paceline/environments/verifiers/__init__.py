"""Environments of the library verifiers, with their data sets, tools and rubrics."""

from paceline.plugins import EnvironmentPlugin

ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.verifiers.tasks:VerifiersTasks",
    world="paceline.environments.verifiers.world:VerifiersWorld",
    options="paceline.environments.verifiers.options:VerifiersOptions",
    settings="paceline.environments.verifiers.options:VerifiersSettings",
    worlds_in="process",
)
