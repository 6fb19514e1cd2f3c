"""What is copied for a job that is forked from another one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.config import JobSpec


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """A checkpoint of a job, and what its copy depends on in the new job."""

    tenant: str
    parent_id: str
    step: int
    digest: str
    trains: bool  # the ledger is copied too
    batch_groups: int
    eval_sets: Collection[str]


def fork_plan(spec: JobSpec) -> ForkPlan | None:
    """The plan of a job whose checkpoint is resolved; None: it is no fork."""
    fork = spec.fork
    if fork is None:
        return None
    assert isinstance(fork.step, int)
    return ForkPlan(
        tenant=spec.tenant,
        parent_id=fork.job,
        step=fork.step,
        digest=fork.digest,
        trains=spec.trains,
        batch_groups=spec.experience.batch_groups,
        eval_sets=spec.eval_sets.keys(),
    )
