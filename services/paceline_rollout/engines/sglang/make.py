"""Builds the `sglang` engine of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.load import validate
from paceline.errors import ConfigError
from paceline_rollout.engines.sglang.connection import ServerConnection
from paceline_rollout.engines.sglang.engine import SglangEngine
from paceline_rollout.engines.sglang.loading import LoadOptions, folder_for
from paceline_rollout.engines.sglang.options import SglangOptions, SglangSettings
from paceline_rollout.engines.sglang.server import AttachedServer, Launch, LaunchedServer, Server

# A server on a GPU has little for the processor to compute, and waking many threads delays it.
GPU_THREADS = 8


def sglang(
    *,
    model_dir: Path | None,
    dtype: str,
    max_context: int,
    max_concurrent: int,
    threads: int,
    tokenizer_dir: Path | None,
    job_id: str,
    settings: Mapping[str, Any] | None = None,
    memory_share: float | None = None,
    **options: Any,
) -> SglangEngine:
    """An engine with a server that is launched or attached to.

    `options` are the job's `SglangOptions`, `settings` the pool's `SglangSettings`.
    `memory_share`: its `mem_fraction`, unless the job has one.

    Raises:
        ConfigError: the job has no model files, or an option or setting is wrong.
    """
    if model_dir is None:
        raise ConfigError("rollout.engine: sglang needs a model folder")
    job_options, pool_settings = (
        validate(SglangOptions, options),
        validate(SglangSettings, dict(settings or {})),
    )
    launch = Launch(
        python=pool_settings.python,
        model_dir=model_dir,
        log_path=model_dir / "sglang.log",
        dtype=dtype,
        device=job_options.device,
        max_context=max_context,
        max_concurrent=max_concurrent,
        max_tokens=job_options.cache_tokens,
        threads=threads if job_options.device == "cpu" else min(threads, GPU_THREADS),
        tp=job_options.tp,
        dp=job_options.dp,
        ep=job_options.ep,
        deterministic=job_options.deterministic,
        module=pool_settings.module,
        args=(*_flags(job_options, memory_share), *pool_settings.args),
        environment=pool_settings.environment,
    )
    return SglangEngine(
        connection=ServerConnection(
            server=_server(job_options, pool_settings, launch),
            load_options=_load_options(job_options, pool_settings),
            job_id=job_id,
        ),
        model_dir=model_dir,
        tokenizer_dir=tokenizer_dir,
        dtype=dtype,
        max_context=max_context,
        max_concurrent=max_concurrent,
        job_id=job_id,
        deterministic=job_options.deterministic,
        stall_s=job_options.stall_s,
    )


def _flags(job_options: SglangOptions, memory_share: float | None) -> list[str]:
    flags = [] if job_options.kv_dtype == "auto" else [f"--kv-cache-dtype={job_options.kv_dtype}"]
    share = memory_share if job_options.mem_fraction is None else job_options.mem_fraction
    if share is not None:
        flags.append(f"--mem-fraction-static={share}")
    if job_options.chunked_prefill is not None:
        flags.append(f"--chunked-prefill-size={job_options.chunked_prefill}")
    return flags


def _server(job_options: SglangOptions, pool_settings: SglangSettings, launch: Launch) -> Server:
    key, timeout_s = pool_settings.api_key.get_secret_value(), job_options.startup_timeout_s
    if pool_settings.url:
        return AttachedServer(pool_settings.url, api_key=key, timeout_s=timeout_s)
    return LaunchedServer(launch, api_key=key, timeout_s=timeout_s)


def _load_options(job_options: SglangOptions, pool_settings: SglangSettings) -> LoadOptions:
    launched = not pool_settings.url
    return LoadOptions(
        method=job_options.load,
        ranks=job_options.tp,
        shared_memory=launched
        if pool_settings.shared_memory is None
        else pool_settings.shared_memory,
        folder=folder_for(pool_settings.folder, attached=not launched),
        bucket_bytes=job_options.bucket_bytes,
        backend=job_options.backend or ("gloo" if job_options.device == "cpu" else "nccl"),
    )
