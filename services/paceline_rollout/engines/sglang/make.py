"""The `sglang` engine of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.config.load import validate
from paceline.errors import ConfigError
from paceline_rollout.engines.sglang.connection import Connection
from paceline_rollout.engines.sglang.engine import SglangEngine
from paceline_rollout.engines.sglang.loading import Loading, folder_for
from paceline_rollout.engines.sglang.options import SglangOptions
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
    **options: Any,
) -> SglangEngine:
    """An engine whose server is launched, or attached to; `options` are `SglangOptions`.

    Raises:
        ConfigError: the job has no model files, or an option is wrong.
    """
    if model_dir is None:
        raise ConfigError("rollout.engine: sglang needs a model folder")
    chosen = validate(SglangOptions, options)
    launch = Launch(
        python=chosen.python,
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
        module=chosen.module,
        args=chosen.args,
        environment=chosen.environment,
    )
    return SglangEngine(
        connection=Connection(
            server=_server(chosen, launch), loading=_loading(chosen), job_id=job_id
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


def _server(chosen: SglangOptions, launch: Launch) -> Server:
    key, timeout_s = chosen.api_key.get_secret_value(), chosen.startup_timeout_s
    if chosen.url:
        return AttachedServer(chosen.url, api_key=key, timeout_s=timeout_s)
    return LaunchedServer(launch, api_key=key, timeout_s=timeout_s)


def _loading(chosen: SglangOptions) -> Loading:
    ours = not chosen.url
    return Loading(
        way=chosen.load,
        ranks=chosen.tp,
        shared_memory=ours if chosen.shared_memory is None else chosen.shared_memory,
        folder=folder_for(chosen.folder, attached=not ours),
        bucket_bytes=chosen.bucket_bytes,
        backend=chosen.backend or ("gloo" if chosen.device == "cpu" else "nccl"),
    )
