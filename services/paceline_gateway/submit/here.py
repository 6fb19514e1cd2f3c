"""What a gateway checks of a job, on the machine with its files.

`python -m paceline_gateway.submit.here`; see `paceline.local.checks`.
"""

from __future__ import annotations

from pathlib import Path

from paceline.code.sealed import sandbox_for
from paceline.code.tokenizers.process import MODULE as TOKENIZER
from paceline.config.sections.model import ModelPlace, ModelSettings
from paceline.config.tokenizers import TokenizerSettings
from paceline.local.checks import CheckRequest, Findings, answer
from paceline.models.resolve import ModelResolver
from paceline.plugins.allowed import AllowedTargets
from paceline_gateway.submit.job_checks import JobChecks
from paceline_gateway.submit.trial import ModelTrial


async def check(request: CheckRequest) -> Findings:
    """What is wrong with a job; models of a hub or a store are not fetched.

    Raises:
        ConfigError: as `JobChecks`.
        UnavailableError: its tokenizer cannot be tried here.
    """
    spec, sandbox = request.spec, sandbox_for(TOKENIZER)
    checks = JobChecks(
        trial=ModelTrial(TokenizerSettings(), sandbox),
        models=ModelResolver(ModelSettings(), run_dir=Path()),
        allowed=AllowedTargets.of(request.allowed),
    )
    try:
        await checks.check_plugins(spec, spec.tenant)
        if spec.model.place is ModelPlace.FOLDER:
            await checks.check_model(spec, {}, spec.tenant)
    finally:
        await sandbox.close()
    return Findings()


if __name__ == "__main__":
    answer(check)
