"""Functions that an operator allows jobs to name besides plug-ins and their own code."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.plugins import StrictModel
from paceline.plugins.allowed import TARGET, AllowedTargets

Target = Annotated[str, Field(pattern=f"^{TARGET}$", max_length=256)]


class PluginSettings(StrictModel):
    """Must be the same in all processes of an installation. See docs/plugins.md."""

    allowed: tuple[Target, ...] = ()
    """Functions of installed modules that any job may name as rewards or slots of the objective,
    each as `module:attribute`. They run as the user of the reward workers and of trainers."""

    @property
    def targets(self) -> AllowedTargets:
        """The list as a set."""
        return AllowedTargets(frozenset(self.allowed))
