"""From a settings file to an exit code; nothing heavy is imported before the file is checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import logs
from paceline.chassis import Chassis, run_loop, serve
from paceline.config import ServiceSettings, load_settings
from paceline.config.load import validate
from paceline.config.service import TrainerOptions
from paceline.errors import ConfigError, PacelineError, UnavailableError
from paceline.logs import Log
from paceline_trainer.place import Place, find_place

if TYPE_CHECKING:
    from paceline_trainer.service import TrainerService

log = Log("start")


def run(arguments: list[str], environment: Mapping[str, str]) -> int:
    """0 well, 1 failed, 2 wrong settings or job, 3 a port or peer is missing, 4 replaced."""
    if len(arguments) != 1 or arguments[0] in {"-h", "--help"}:
        print("usage: python -m paceline_trainer SETTINGS.yaml, under torchrun", file=sys.stderr)
        return 2
    try:
        settings = load_settings(Path(arguments[0]))
        options = validate(TrainerOptions, settings.options)
        place = find_place(environment)
        if not settings.job_id or not settings.experience:
            raise ConfigError("job_id, experience: a trainer needs both")
        settings = of_rank(settings, place)
        logs.setup(settings.logs)
        return _serve(settings, options, place)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        log.error("cannot start", error=error)
        return 3 if isinstance(error, UnavailableError) else 2


def of_rank(settings: ServiceSettings, place: Place) -> ServiceSettings:
    """The settings of one rank: only rank 0 has fixed ports and the log file of that name."""
    if place.first:
        return settings
    path = settings.logs.path
    own = path and path.with_stem(f"{path.stem}-rank{place.rank}")
    return settings.model_copy(
        update={
            "port": 0,
            "metrics_port": 0,
            "advertise": "",
            "worker_id": f"{settings.worker_id}-rank{place.rank}",
            "logs": settings.logs.model_copy(update={"path": own}),
        }
    )


def _serve(settings: ServiceSettings, options: TrainerOptions, place: Place) -> int:
    from paceline_trainer.service import TrainerService

    built: list[TrainerService] = []

    async def build(chassis: Chassis) -> TrainerService:
        built.append(TrainerService(chassis=chassis, options=options, place=place))
        return built[0]

    failed = run_loop(serve(settings, build))
    return built[0].exit_code or failed
