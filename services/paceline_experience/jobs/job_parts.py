"""What this service reads in the spec of a job."""

from __future__ import annotations

from functools import cached_property

from paceline.config import JobSpec
from paceline.config.named import named, own_called_by_workers, own_ledger_parts
from paceline.isolation.code.modules import own_targets
from paceline_experience.ledger.generation.plan import generation_plan, wanted_tasks


class JobParts:
    """What this service lists, calls and stores of a job, for which its spec is read once."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.name, self.tenant = spec.name, spec.tenant
        self.code = spec.code.digest if spec.code is not None else None  # of the upload
        self.data = spec.data.digest if spec.data is not None else None
        self.modules = tuple(own_targets(spec))
        self.own = tuple(own_ledger_parts(spec))  # plug-ins in its code that its ledger calls
        self.own_of_workers = tuple(own_called_by_workers(spec))
        self.plugins = tuple(named(spec))
        self.tasks = wanted_tasks(spec)
        self.lists_own_tasks = spec.lists_own_tasks
        self.generation = generation_plan(spec, self.own)
        self.parent_id = spec.fork.job if spec.fork is not None else ""
        self.rewards = [part.part for part in spec.reward]
        self.evals = spec.eval_sets

    @cached_property
    def text(self) -> str:
        """The spec as it is stored, JSON."""
        return self.spec.model_dump_json()
