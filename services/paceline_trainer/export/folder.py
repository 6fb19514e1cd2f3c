"""Writes the folder: weights, tokenizer, configuration and model card, or nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paceline.errors import ConfigError, IntegrityError, InvalidError
from paceline.models.resolve import ModelResolver
from paceline.platform.digest import digest_of
from paceline_trainer.checkpoints.folders import SavedCheckpoint, saved_checkpoint
from paceline_trainer.export.card import CURVES, card
from paceline_trainer.export.request import ExportRequest
from paceline_trainer.export.weights import write_adapter, write_model

# Written from the model by transformers, with the precision of the exported weights.
_REWRITTEN = ("config.json",)


def export(request: ExportRequest) -> Path:
    """Write the checkpoint to `request.output`, which appears complete or not at all.

    Raises:
        InvalidError: the folder exists, or an adapter is wanted of a job without LoRA.
        NotFoundError: there is no such checkpoint.
        IntegrityError: the checkpoint or the tokenizer is not as the job's record has it.
        ConfigError: the job's model cannot be read.
        UnavailableError: the storage, the hub or the store cannot be reached.
    """
    output, spec = request.output, request.job
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidError(f"--output {output} exists and is not an empty folder")
    if request.adapter and spec.trainer.lora is None:
        raise InvalidError("--adapter: the job has no trainer.lora; its weights are whole")
    found = request.checkpoint()
    saved = saved_checkpoint(
        request.base, request.status.job_id, step=found.step, digest=found.digest
    )
    saved.verify()
    base = _base(request)
    small = _small_files(base, request.artifacts)
    draft = output.parent / f".{output.name}.{os.getpid()}"
    output.parent.mkdir(parents=True, exist_ok=True)
    draft.mkdir()
    try:
        _write_weights(request, saved, base, draft)
        for name, content in small.items():
            if name not in _REWRITTEN:
                (draft / name).write_bytes(content)
        readme, curves = card(request, found, saved)
        (draft / "README.md").write_text(readme)
        (draft / CURVES).write_text(curves)
        for each in draft.iterdir():  # safetensors makes files that only their owner can read
            each.chmod((draft / "README.md").stat().st_mode)
        if output.exists():
            output.rmdir()
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return output


def _base(request: ExportRequest) -> Path:
    if request.base_model is not None:
        return request.base_model
    resolver = ModelResolver(request.models, run_dir=request.run_dir)
    return resolver.folder(request.job.model)


def _small_files(base: Path, artifacts: dict[str, str]) -> dict[str, bytes]:
    """Tokenizer, configuration and chat template, as the job was accepted with them."""
    found: dict[str, bytes] = {}
    for name, digest in artifacts.items():
        try:
            content = (base / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"model.path: {base / name} cannot be read ({error.strerror}); name a folder with "
                "the original files with --base-model"
            ) from None
        if digest_of(content) != digest:
            raise IntegrityError(
                f"{base / name} has changed since the job was submitted; name a folder with the "
                "original files with --base-model"
            )
        found[name] = content
    return found


def _write_weights(request: ExportRequest, saved: SavedCheckpoint, base: Path, draft: Path) -> None:
    lora = request.job.trainer.lora
    if request.adapter and lora is not None:
        model = request.job.model
        write_adapter(saved, draft, lora=lora, base=model, dtype=request.precision)
        return
    write_model(
        saved,
        base,
        draft,
        lora=lora,
        dtype=request.precision,
        max_shard_size=request.max_shard_size,
    )
