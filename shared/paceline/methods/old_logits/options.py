"""Options of `snapshot` and `interpolated`; no torch here."""

from __future__ import annotations

from paceline.plugins import StrictModel, declares


@declares(needs=("snapshots",))
class SnapshotOptions(StrictModel):
    """`snapshot` has no options; see `trainer.mismatch.bytes`."""


class InterpolatedOptions(StrictModel):
    """`interpolated` has no options."""
