"""A gateway's checks of a job, on the machine with its files; see `paceline.front.local.checks`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.config import JobSpec
from paceline.config.sections.model import ModelPlace, ModelSettings
from paceline.config.tokenizers import TokenizerSettings
from paceline.front.local.checks import Findings
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.tokenizers.process import MODULE as TOKENIZER
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.models.resolve import ModelResolver
from paceline.plugins.allowed import AllowedTargets
from paceline_gateway.submit.job_checks import JobChecks
from paceline_gateway.submit.trial import ModelTrial

_HUB_S = 1.5


async def found_in(spec: JobSpec, allowed: AllowedTargets, sandbox: Sandbox) -> Findings:
    """The problems of a job. A model of the hub has to be on this machine; nothing is fetched.

    Raises:
        ConfigError: as `JobChecks`.
        UnavailableError: its tokenizer cannot be tried here, or the hub does not answer.
    """
    models = ModelResolver(ModelSettings(timeout_s=_HUB_S), run_dir=Path())
    checks = JobChecks(
        trial=ModelTrial(TokenizerSettings(), sandbox),
        models=models,
        allowed=allowed,
    )
    await checks.check_plugins(spec, spec.tenant)
    if spec.model.place is ModelPlace.FOLDER:
        await checks.check_model(spec, {}, spec.tenant)
    if spec.model.place is ModelPlace.HUB:
        await asyncio.to_thread(models.look_up, spec.model)
    return Findings()


async def check(spec: JobSpec, allowed: AllowedTargets) -> Findings:
    """`found_in` with a sandbox of its own."""
    sandbox = sandbox_for(TOKENIZER)
    try:
        return await found_in(spec, allowed, sandbox)
    finally:
        await sandbox.close()
