"""The job file and the settings of services, as closed pydantic models. Imports nothing heavy."""

from paceline.config.job import JobSpec
from paceline.config.load import (
    load_job,
    load_settings,
    parse_arguments,
    parse_job,
    resolve_job,
)
from paceline.config.service import ServiceSettings

__all__ = [
    "JobSpec",
    "ServiceSettings",
    "load_job",
    "load_settings",
    "parse_arguments",
    "parse_job",
    "resolve_job",
]
