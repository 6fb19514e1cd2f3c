"""How many trajectories of a step stay when all others of it are deleted."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel


class KeptSamplesSpec(StrictModel):
    """Trajectories that are kept for `ListEpisodes` after the others of their step are deleted.

    They are drawn at random. Together they take at most a sixteenth of `payload_bytes`; beyond
    that, and beyond `total`, those of the oldest steps are deleted.
    """

    trained: int = Field(default=2, ge=0, le=256)
    """Samples of each step, once they are older than the newest `keep_trajectories`."""
    dropped: int = Field(default=2, ge=0, le=256)
    """Samples of each step and each reason, of those that are not trained."""
    total: int = Field(default=512, ge=0, le=65_536)
    """Samples of all steps together."""
