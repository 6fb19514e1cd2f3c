"""The job file and the settings of services, as closed pydantic models. Imports nothing heavy.

These names are imported lazily: one section of the settings does not need all of the job file.
"""

from paceline.config.lazy import lazily

TYPE_CHECKING = False  # importing `typing` would cost light processes 2 ms
if TYPE_CHECKING:
    from paceline.config.job import JobSpec
    from paceline.config.load import (
        job_of,
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
    "job_of",
    "load_job",
    "load_settings",
    "parse_arguments",
    "parse_job",
    "resolve_job",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "JobSpec": "paceline.config.job",
        "ServiceSettings": "paceline.config.service",
        "job_of": "paceline.config.load",
        "load_job": "paceline.config.load",
        "load_settings": "paceline.config.load",
        "parse_arguments": "paceline.config.load",
        "parse_job": "paceline.config.load",
        "resolve_job": "paceline.config.load",
    },
)
