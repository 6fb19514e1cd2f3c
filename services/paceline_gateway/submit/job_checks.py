"""The checks of a job's plug-ins and model, in the order in which a submission makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from paceline.config import JobSpec
from paceline.config.sections.model import ModelPlace, ModelSpec
from paceline.errors import ConfigError, UnavailableError
from paceline.models.resolve import FoundModel, ModelResolver
from paceline.platform.fair_queue import FairThreads, QueueOwner
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
from paceline_gateway.submit.checks import check_files, check_plugins, find_model, replies_of
from paceline_gateway.submit.model_limits import check_model_limits
from paceline_gateway.submit.patterns import Patterns
from paceline_gateway.submit.trial import ModelTrial

if TYPE_CHECKING:
    from paceline_gateway.submit.probe import ModelProbe

MODEL_S = 120.0
MAX_MODEL_READERS, MOST_OF_TENANT = 4, 3


class JobChecks:
    """Checks a job by its plug-ins and by the small files of its model."""

    def __init__(
        self,
        *,
        trial: ModelTrial,
        models: ModelResolver,
        allowed: AllowedTargets = NO_TARGETS,
        probe: ModelProbe | None = None,
        endpoints: Collection[str] | None = None,
    ) -> None:
        """`allowed`: functions of installed modules that jobs may name.

        `probe`: None where models cannot be computed before their job is accepted. `endpoints`:
        names of those whose models may be measured; None: they are not known here.
        """
        self._endpoints = endpoints
        self._patterns = Patterns()
        self._trial = trial
        self._probe = probe
        self._models = models
        self._allowed = allowed
        self._readers = FairThreads(MAX_MODEL_READERS, "models", most_of_tenant=MOST_OF_TENANT)

    async def check_plugins(self, spec: JobSpec, tenant: str) -> None:
        """Raise `ConfigError` for plug-ins that may not be named or refuse their options."""
        await check_plugins(spec, self._patterns, tenant, self._allowed)

    async def check_model(
        self, spec: JobSpec, files: Mapping[str, bytes], tenant: str
    ) -> tuple[JobSpec, Mapping[str, bytes]]:
        """The job with a model that is pinned to its content, and the small files of that.

        `files`: those that came with the job, instead of the model's own.

        Raises:
            ConfigError: the model cannot be trained, or not by this job.
            UnavailableError: it cannot be read for now.
        """
        if spec.model.endpoint is not None:
            self._check_endpoint(spec.model.endpoint.name, files)
            return spec, {}
        owner = QueueOwner(tenant)
        if files:
            files = await self._readers.run(owner, partial(check_files, files, source="files"))
        if not files or spec.model.place is not ModelPlace.FOLDER:
            found_model = await self._find_model(spec.model, owner)
            spec, files = (
                spec.model_copy(update={"model": found_model.spec}),
                files or found_model.files,
            )
        limits = partial(check_model_limits, spec, files)
        vocab_size = await self._readers.run(owner, limits)
        for replies in sorted(replies_of(spec)):
            await self._trial.check(files, tenant, replies=replies, vocab_size=vocab_size)
        if self._probe is not None:
            await self._probe.check(files["config.json"], spec.rollout.engine.kind, tenant)
        return spec, files

    def _check_endpoint(self, name: str, files: Mapping[str, bytes]) -> None:
        if files:
            raise ConfigError("files: with model.endpoint; nothing of the model is read here")
        if self._endpoints is not None and name not in self._endpoints:
            known = ", ".join(sorted(self._endpoints)) or "none"
            raise ConfigError(
                f"model.endpoint.name: {name!r} is not one of this installation's endpoints: "
                f"{known} (an operator sets options.endpoints of the environment workers)"
            )

    async def _find_model(self, spec: ModelSpec, owner: QueueOwner) -> FoundModel:
        """The model with its small files, read in threads that nothing else waits for."""
        search = self._readers.run(owner, partial(find_model, spec, self._models))
        try:
            return await asyncio.wait_for(search, MODEL_S)
        except TimeoutError:
            raise UnavailableError(f"model.path: {spec.path} does not answer; try again") from None
