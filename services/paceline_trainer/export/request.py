"""What is to be exported: the job as it is recorded, and which of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from paceline.config import JobSpec, parse_job
from paceline.config.sections.model import ModelSettings
from paceline.errors import NotFoundError
from paceline.plugins import StrictModel
from paceline.types import CheckpointStatus, JobStatus

Which = Literal["best", "latest"] | int


class ExportRequest(StrictModel):
    """The input of `python -m paceline_trainer.export`, as JSON."""

    status: JobStatus
    spec: dict[str, Any]
    artifacts: dict[str, str]
    """File name -> SHA-256, of the small files that the job was accepted with."""
    rows: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """The history of the job: `step`, `kind` and values."""
    which: Which
    base: str
    """Storage of the installation, or its run directory: checkpoints are below it."""
    run_dir: Path
    models: ModelSettings = ModelSettings()
    base_model: Path | None = None
    """Folder to use instead of the job's model, which must have the same small files."""
    output: Path
    adapter: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the one that the job publishes to its engines."""
    max_shard_size: str = "5GB"

    @property
    def job(self) -> JobSpec:
        """The job file."""
        return parse_job(self.spec)

    @property
    def precision(self) -> str:
        """The precision of the exported weights."""
        return self.job.model.dtype if self.dtype == "auto" else self.dtype

    def checkpoint(self) -> CheckpointStatus:
        """The checkpoint that is wanted, as the job's record has it.

        Raises:
            NotFoundError: there is none.
        """
        return choose(self.status, self.which)


def choose(status: JobStatus, which: Which) -> CheckpointStatus:
    """A job's checkpoint of a step, its newest one, or the best one by eval.

    Raises:
        NotFoundError: there is none; the message names the steps that exist.
    """
    known: Mapping[int, CheckpointStatus] = {each.step: each for each in status.checkpoints}
    if which == "best":
        found = next((each for each in status.checkpoints if each.best), None)
    elif which == "latest":
        found = known[max(known)] if known else None
    else:
        found = known.get(which)
    if found is None:
        wanted = f"of step {which}" if isinstance(which, int) else f"that is the {which}"
        steps = ", ".join(map(str, sorted(known))) or "none"
        hint = ""
        if which == "best" and known:
            hint = "; none of these steps was evaluated, so none is the best: use --latest"
        raise NotFoundError(
            f"job {status.job_id} has no checkpoint {wanted}; there are: {steps}{hint}"
        )
    return found
