"""Where the tokenizers and chat templates of jobs run: the section `tokenizers` of the settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.quota import GIB, MIB
from paceline.plugins import StrictModel


class TokenizerSettings(StrictModel):
    """Limits of tokenizers and chat templates, and where they run. See docs/security.md.

    Environment, gateway and tracking, which serve all jobs, have them; a job chooses none.
    """

    run_in: Literal["process", "in_process"] = "process"
    """`process`: a sealed process for each job, so that no template or tokenizer holds up other
    jobs; `in_process`: that of the service, which is faster, and safe if one user owns all jobs."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """For rendering and encoding one observation, or decoding one turn."""
    load_s: float = Field(default=30.0, gt=0, le=600)
    """For reading the files of a model."""
    memory_bytes: int = Field(default=2 * GIB, ge=256 * MIB)
    """Address space of one of these processes."""
