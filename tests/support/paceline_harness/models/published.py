"""Weights of a trainer as its workers get them."""

from __future__ import annotations

from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.staging import Staging
from paceline_trainer.weights.publish import WeightCopy, fill


def staged(copy: WeightCopy) -> Staging:
    """A copy with the header that a publisher gives it, complete."""
    header = SnapshotHeader(
        job_id="j",
        version=copy.step,
        step=copy.step,
        parent_version=copy.step - 1,
        base_version=-1,
        incarnation=1,
        num_bytes=copy.num_bytes,
        chunk_bytes=4096,
        tensors=copy.entries,
        tied=copy.tied,
        canary=copy.canary,
        frozen_bytes=copy.frozen_bytes,
        names="checkpoint",
    )
    staging = Staging(header)
    fill(staging, copy.tensors)
    return staging
