"""Reads a rollout worker's job: the spec, the small model files, the engine."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import JobSpec, job_of
from paceline.errors import ConfigError, IntegrityError
from paceline.platform.digest import digest_of
from paceline.platform.program import importing
from paceline.platform.server import artifacts
from paceline.platform.server.cores import threads_for
from paceline.platform.server.job_records import fetch_job
from paceline.plugins import Engine, EngineFactory, registry

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

START_TIMEOUT_S = 60.0


async def read_job(jobs: JobsAsyncStub, job_id: str) -> tuple[JobSpec, dict[str, str]]:
    """The spec, and the digests of the model files by name; waits for the experience service."""
    job = await fetch_job(jobs, job_id, timeout_s=START_TIMEOUT_S)
    return job_of(job), job.artifacts


async def fetch_files(
    experience: ExperienceAsyncStub, digests: Mapping[str, str], folder: Path
) -> None:
    """Download the model files into a folder, except those that are already intact."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in digests.items():
        if Path(name).name != name or name in {".", ".."}:
            raise IntegrityError(f"artifact: {name!r} is not a plain file name")
        path = folder / name
        if path.exists() and digest_of(path.read_bytes()) == digest:
            continue
        data = await artifacts.fetch(experience, digest)
        await asyncio.to_thread(path.write_bytes, data)


def build_engine(
    spec: JobSpec,
    *,
    folder: Path,
    job_id: str,
    engines: Mapping[str, Mapping[str, Any]] | None = None,
    memory_share: float | None = None,
) -> Engine:
    """Build the job's engine from its options and the pool's settings for this kind of engine.

    `memory_share`: of a GPU that it shares with the trainer, for engines that take all they find.

    Raises:
        ConfigError: the engine has no such option, or takes no settings of a pool.
    """
    rollout, kind = spec.rollout, spec.rollout.engine.kind
    with importing():
        make: EngineFactory = registry.find("engines", kind)
    arguments: dict[str, Any] = {
        "model_dir": folder if (folder / "config.json").exists() else None,
        "dtype": spec.model.dtype,
        "max_context": spec.sampling.max_context,
        "max_concurrent": rollout.max_concurrent,
        "threads": threads_for(rollout.threads, hidden=_hidden_size(folder / "config.json")),
        "tokenizer_dir": folder if (folder / "tokenizer.json").exists() else None,
        "job_id": job_id,
    }
    options = rollout.engine.options
    known = inspect.signature(make).parameters
    if settings := (engines or {}).get(kind):
        if "settings" not in known:
            raise ConfigError(f"options.engines.{kind}: this engine takes no settings of a pool")
        arguments["settings"] = settings
    if memory_share is not None and "memory_share" in known:
        arguments["memory_share"] = memory_share
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    reserved = {*arguments, "settings", "memory_share"}
    unknown = sorted(
        name for name in options if name in reserved or not (open_ended or name in known)
    )
    if unknown:
        allowed = ", ".join(sorted(set(known) - reserved)) or "none"
        raise ConfigError(
            f"rollout.engine.{unknown[0]}: unknown option of {kind!r}; allowed: {allowed}"
        )
    return make(**arguments, **options)


def _hidden_size(config: Path) -> int:
    """The hidden size of the model by its configuration; 0 if it does not say."""
    if not config.exists():
        return 0
    model_config = json.loads(config.read_text())
    value = model_config.get("hidden_size") or model_config.get("text_config", {}).get(
        "hidden_size"
    )
    return value if isinstance(value, int) else 0
