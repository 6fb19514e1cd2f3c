"""Runs a trainer from a settings file, which is checked before heavy imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.config import ServiceSettings, parse_arguments
from paceline.config.load import validate
from paceline.config.service import TrainerOptions
from paceline.errors import ConfigError, PacelineError, UnavailableError
from paceline.platform.free_memory import share_one_arena
from paceline.platform.program import importing
from paceline.platform.server.chassis import Chassis, run_process
from paceline.platform.telemetry import logs
from paceline.platform.telemetry.logs import Log
from paceline_trainer.ranks.rank_info import RankInfo, find_rank

if TYPE_CHECKING:
    from paceline_trainer.service import TrainerService

log = Log("start")


def run(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Returns 0: ok, 1: failed, 2: invalid settings or job, 3: port or peer missing, 4: fenced."""
    try:
        settings = parse_arguments(arguments, program="torchrun -m paceline_trainer")
        options = validate(TrainerOptions, settings.options)
        rank_info = find_rank(environment)
        if not settings.job_id or not settings.experience:
            raise ConfigError("job_id, experience: are required for a trainer")
        settings = of_rank(settings, rank_info)
        logs.setup(settings.logs)
        share_one_arena()
        return _serve(settings, options, rank_info)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        log.error("cannot start", error=error)
        return 3 if isinstance(error, UnavailableError) else 2


def of_rank(settings: ServiceSettings, rank_info: RankInfo) -> ServiceSettings:
    """The settings of a rank; only rank 0 has the worker's name, only the first of a node ports."""
    if rank_info.first:
        return settings
    path = settings.logs.path
    own = path and path.with_stem(f"{path.stem}-rank{rank_info.rank}")
    changes: dict[str, Any] = {
        "worker_id": f"{settings.worker_id}-rank{rank_info.rank}",
        "logs": settings.logs.model_copy(update={"path": own}),
    }
    if rank_info.local_rank != 0:
        changes |= {"advertise": "", "port": 0, "metrics_port": 0}
    return settings.model_copy(update=changes)


def _serve(settings: ServiceSettings, options: TrainerOptions, rank_info: RankInfo) -> int:
    with importing():
        from paceline_trainer.service import TrainerService

    built: list[TrainerService] = []

    async def build(chassis: Chassis) -> TrainerService:
        built.append(TrainerService(chassis=chassis, options=options, rank_info=rank_info))
        return built[0]

    def end(code: int) -> None:
        os._exit((built[0].exit_code if built else 0) or code)

    failed = run_process(settings, build, end=end)
    return built[0].exit_code or failed
