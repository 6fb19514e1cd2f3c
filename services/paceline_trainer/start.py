"""From a settings file to an exit code; nothing heavy is imported before the file is checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline import logs
from paceline.chassis import Chassis, run_process
from paceline.config import ServiceSettings, parse_arguments
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
    try:
        settings = parse_arguments(arguments, program="torchrun -m paceline_trainer")
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
    """The settings of one rank: the first of a node has its ports and address, rank 0 the names."""
    if place.first:
        return settings
    path = settings.logs.path
    own = path and path.with_stem(f"{path.stem}-rank{place.rank}")
    changes: dict[str, Any] = {
        "worker_id": f"{settings.worker_id}-rank{place.rank}",
        "logs": settings.logs.model_copy(update={"path": own}),
    }
    if place.local_rank != 0:
        changes |= {"advertise": "", "port": 0, "metrics_port": 0}
    return settings.model_copy(update=changes)


def _serve(settings: ServiceSettings, options: TrainerOptions, place: Place) -> int:
    from paceline_trainer.service import TrainerService

    built: list[TrainerService] = []

    async def build(chassis: Chassis) -> TrainerService:
        built.append(TrainerService(chassis=chassis, options=options, place=place))
        return built[0]

    def end(code: int) -> None:
        os._exit((built[0].exit_code if built else 0) or code)

    failed = run_process(settings, build, end=end)
    return built[0].exit_code or failed
