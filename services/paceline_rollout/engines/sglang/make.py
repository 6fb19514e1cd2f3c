"""The `sglang` engine of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.load import validate
from paceline.errors import ConfigError
from paceline_rollout.engines.sglang.connection import Connection
from paceline_rollout.engines.sglang.engine import SglangEngine
from paceline_rollout.engines.sglang.loading import Loading, folder_for
from paceline_rollout.engines.sglang.options import SglangOptions, SglangSettings
from paceline_rollout.engines.sglang.server import AttachedServer, Launch, LaunchedServer, Server


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
    **options: Any,
) -> SglangEngine:
    """An engine whose server is launched, or attached to.

    `options` are the job's `SglangOptions`, `settings` the pool's `SglangSettings`.

    Raises:
        ConfigError: the job has no model files, or an option or setting is wrong.
    """
    if model_dir is None:
        raise ConfigError("rollout.engine: sglang needs a model folder")
    chosen, place = validate(SglangOptions, options), validate(SglangSettings, dict(settings or {}))
    launch = Launch(
        python=place.python,
        model_dir=model_dir,
        log_path=model_dir / "sglang.log",
        dtype=dtype,
        device=chosen.device,
        max_context=max_context,
        max_concurrent=max_concurrent,
        max_tokens=chosen.cache_tokens,
        threads=threads,
        tp=chosen.tp,
        dp=chosen.dp,
        ep=chosen.ep,
        deterministic=chosen.deterministic,
        module=place.module,
        args=(*_flags(chosen), *place.args),
        environment=place.environment,
    )
    return SglangEngine(
        connection=Connection(
            server=_server(chosen, place, launch), loading=_loading(chosen, place), job_id=job_id
        ),
        model_dir=model_dir,
        tokenizer_dir=tokenizer_dir,
        dtype=dtype,
        max_context=max_context,
        max_concurrent=max_concurrent,
        job_id=job_id,
        deterministic=chosen.deterministic,
        stall_s=chosen.stall_s,
    )


def _flags(chosen: SglangOptions) -> list[str]:
    flags = [] if chosen.kv_dtype == "auto" else [f"--kv-cache-dtype={chosen.kv_dtype}"]
    if chosen.mem_fraction is not None:
        flags.append(f"--mem-fraction-static={chosen.mem_fraction}")
    if chosen.chunked_prefill is not None:
        flags.append(f"--chunked-prefill-size={chosen.chunked_prefill}")
    return flags


def _server(chosen: SglangOptions, place: SglangSettings, launch: Launch) -> Server:
    key, timeout_s = place.api_key.get_secret_value(), chosen.startup_timeout_s
    if place.url:
        return AttachedServer(place.url, api_key=key, timeout_s=timeout_s)
    return LaunchedServer(launch, api_key=key, timeout_s=timeout_s)


def _loading(chosen: SglangOptions, place: SglangSettings) -> Loading:
    ours = not place.url
    return Loading(
        way=chosen.load,
        ranks=chosen.tp,
        shared_memory=ours if place.shared_memory is None else place.shared_memory,
        folder=folder_for(place.folder, attached=not ours),
        bucket_bytes=chosen.bucket_bytes,
        backend=chosen.backend or ("gloo" if chosen.device == "cpu" else "nccl"),
    )
