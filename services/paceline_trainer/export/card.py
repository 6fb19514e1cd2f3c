"""The model card: what the weights are, how they came about, and how well they did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from paceline.config import JobSpec
from paceline.config.sections.model import ModelPlace
from paceline.types import CheckpointStatus
from paceline_trainer.checkpoints.checkpoint import libraries
from paceline_trainer.checkpoints.folders import META, SavedCheckpoint
from paceline_trainer.export.curves import Points, draw
from paceline_trainer.export.published import place, published
from paceline_trainer.export.request import ExportRequest

CURVES = "rewards.svg"
MAX_EVALS = 20  # rows of the table


def card(
    request: ExportRequest, checkpoint: CheckpointStatus, saved: SavedCheckpoint
) -> tuple[str, str]:
    """README.md, and the SVG that it shows."""
    spec, status = request.job, request.status
    recorded: Mapping[str, Any] = json.loads(saved.storage.read(saved.folder.name, META))
    lines = [
        "---",
        yaml.safe_dump(_front(spec), sort_keys=False).rstrip(),
        "---",
        "",
        f"# {spec.name}, step {checkpoint.step}",
        "",
        f"`{place(spec.model.path)}`, trained by reinforcement learning with Paceline: "
        f"{checkpoint.step} steps of {spec.experience.batch_groups} groups on the tasks of "
        f"`{spec.tasks.environment}`.",
        "",
        f"![Rewards by trainer step]({CURVES})",
        "",
        "## Evaluations",
        "",
        *_evaluations(request.rows, checkpoint.step),
        "",
        "## Provenance",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _provenance(request, checkpoint, recorded)),
        "",
        "## Sampling while it was trained",
        "",
        f"temperature {spec.sampling.temperature:g}, top_p {spec.sampling.top_p:g}, top_k "
        f"{spec.sampling.top_k}, min_p {spec.sampling.min_p:g}, at most "
        f"{spec.sampling.max_tokens} tokens a turn in a context of {spec.sampling.max_context}.",
        "",
        "## Job file",
        "",
        "```yaml",
        yaml.safe_dump(published(request.spec), sort_keys=False, width=100).rstrip(),
        "```",
        "",
    ]
    title = f"{spec.name} ({status.job_id})"
    return "\n".join(lines), draw(_series(request.rows), title=title)


def _front(spec: JobSpec) -> dict[str, Any]:
    """What the hub reads."""
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if spec.model.place is ModelPlace.HUB:
        found["base_model"] = spec.model.path
    return found | {"tags": ["paceline", "reinforcement-learning"]}


def _provenance(
    request: ExportRequest, checkpoint: CheckpointStatus, recorded: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    spec, model = request.job, request.job.model
    yield "job", f"`{request.status.job_id}`, submitted {request.status.created_at}"
    yield "step", str(checkpoint.step)
    version = version_of(request.rows, checkpoint.step)
    yield "weight version", "not known" if version is None else str(version)
    yield "checkpoint (SHA-256 of its list of files)", f"`{checkpoint.digest}`"
    yield "incarnation of the trainer", str(recorded.get("incarnation", ""))
    revision = f" at `{model.revision}`" if model.revision else ""
    digest = f", files `{model.digest}`" if model.digest else ""
    yield "base model", f"`{place(model.path)}`{revision}{digest}"
    for name, value in sorted(request.artifacts.items()):
        yield f"base {name} (SHA-256)", f"`{value}`"
    if spec.code is not None:
        yield "code (SHA-256)", f"`{spec.code.digest}`"
    yield "precision of these weights", request.precision
    for when, found in (("trained", recorded.get("libraries") or {}), ("exported", libraries())):
        if found:
            yield f"{when} with", ", ".join(f"{k} {v}" for k, v in found.items())


def version_of(rows: Sequence[Mapping[str, Any]], step: int) -> int | None:
    """The published version of a step, as an evaluation of it says; None: none does."""
    found = [r["version"] for r in rows if r["kind"] == "eval" and r["step"] == step]
    return int(found[-1]) if found else None


def _evaluations(rows: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    evals = [row for row in rows if row["kind"] == "eval" and row.get("complete")]
    if not evals:
        return ["None."]
    table = ["| evaluation | step | reward | tasks | |", "|---|---|---|---|---|"]
    for row in evals[-MAX_EVALS:]:
        mark = "this model" if row["step"] == step else ""
        name = row.get("set") or "eval"
        reward = f"{row['reward']:.4f}"
        table.append(f"| {name} | {row['step']} | {reward} | {row['measured']} | {mark} |")
    return table


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    found: dict[str, dict[float, float]] = {}  # of a step that was trained again, the last counts
    for row in rows:
        value = row.get("reward_mean") if row["kind"] == "train" else row.get("reward")
        if isinstance(value, int | float):
            name = "training" if row["kind"] == "train" else row.get("set") or "eval"
            found.setdefault(str(name), {})[float(row["step"])] = float(value)
    return {name: sorted(points.items()) for name, points in found.items()}
