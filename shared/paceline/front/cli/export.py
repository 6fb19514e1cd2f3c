"""`paceline export`: a checkpoint of a job as a Hugging Face folder; `paceline checkpoints`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from paceline.config.load import load
from paceline.config.sections.model import ModelSettings
from paceline.config.service import ModelsFile
from paceline.errors import ConfigError, InvalidError, NotFoundError
from paceline.errors.extras import installing
from paceline.front.api.documents import JobView
from paceline.front.cli.entry import Exit
from paceline.front.cli.report import read_metrics
from paceline.front.cli.target.clients import named_url, reader_of
from paceline.front.cli.target.run_dirs import run_dir_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.platform.files import read_json

PAGE_SIZE = 5000
Row = dict[str, Any]


def export(arguments: Namespace) -> int:
    """`paceline export JOB --step N | --best | --latest --output DIR`."""
    if importlib.util.find_spec("paceline_trainer") is None:
        raise ConfigError(f"export needs the trainer: {installing('trainer')}")
    job, rows = job_and_rows(arguments)
    run_dir: Path = run_dir_of(arguments)
    models = models_of(arguments) or ModelSettings()
    request = {
        **job.model_dump(mode="json"),
        "rows": rows,
        "which": arguments.which,
        "base": arguments.storage or str(run_dir.resolve()),
        "run_dir": str(run_dir.resolve()),
        "models": models.model_dump(mode="json"),
        "base_model": str(arguments.base_model.resolve()) if arguments.base_model else None,
        "output": str(arguments.output.absolute()),
        "adapter": arguments.adapter,
        "dtype": arguments.dtype,
        "max_shard_size": arguments.max_shard_size,
    }
    # A process of its own: it imports torch, and this library no service.
    child = subprocess.run(
        [sys.executable, "-m", "paceline_trainer.export"],
        input=_json(request),
        text=True,
        check=False,
    )
    return child.returncode


def checkpoints(arguments: Namespace) -> int:
    """`paceline checkpoints JOB`."""
    job, _ = job_and_rows(arguments, rows=False)
    metric = ((job.spec["trainer"].get("checkpoint") or {}).get("best") or {}).get("metric", "")
    table = FittingTable("step", metric or "value", "", Column("digest", 1))
    for checkpoint in job.status.checkpoints:
        value = "" if checkpoint.value is None else f"{checkpoint.value:.4f}"
        table.add_row(
            str(checkpoint.step), value, "best" if checkpoint.best else "", checkpoint.digest[:12]
        )
    SafeConsole().print(table if job.status.checkpoints else "no checkpoint yet")
    return Exit.OK


def job_and_rows(arguments: Namespace, *, rows: bool = True) -> tuple[JobView, list[Row]]:
    """A job and its history: from a gateway if there is a URL, else from the run directory.

    Raises:
        NotFoundError: there is no such job; the message names those that there are.
    """
    if named_url(arguments):
        return _from_gateway(arguments, rows)
    run_dir: Path = run_dir_of(arguments)
    folder = run_dir / "jobs" / arguments.job
    record = read_json(folder / "job.json") if Path(arguments.job).name == arguments.job else None
    if record is None:
        known = sorted(path.parent.name for path in (run_dir / "jobs").glob("*/job.json"))
        listed = ", ".join(known) or "none with a checkpoint"
        raise NotFoundError(
            f"no job {arguments.job!r} with a checkpoint in {run_dir}; there are: {listed}. Name "
            "another --run-dir, or a gateway with --url"
        )
    history = folder / "metrics.jsonl"
    return JobView.model_validate(record), read_metrics(history) if history.exists() else []


def models_of(arguments: Namespace) -> ModelSettings | None:
    """The file of `--models`; None: there is none."""
    return load(ModelsFile, arguments.models).models if arguments.models else None


def _from_gateway(arguments: Namespace, wanted: bool) -> tuple[JobView, list[Row]]:
    if wanted and not arguments.storage and not arguments.run_dir:
        raise InvalidError(
            "--storage: is missing; with a gateway's URL, name where the checkpoints lie: "
            "`storage.url` of the installation, or the folder that its volume is mounted at"
        )
    rows: list[Row] = []
    with reader_of(arguments) as client:
        job = client.get(arguments.job)
        after = 0
        while wanted:
            page = client.list_metrics(arguments.job, after=after, page_size=PAGE_SIZE)
            rows += [{"step": r.step, "kind": r.kind.value, **r.values} for r in page.rows]
            if not page.next:
                break
            after = page.next
    return job, rows


def _json(request: dict[str, Any]) -> str:
    from pydantic_core import to_json

    return to_json(request).decode()
