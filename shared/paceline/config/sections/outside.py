"""Restrictions on a job whose model is behind an outside endpoint: no weights, no tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.config.sections.model import ModelSpec

TOOL_PARSER = "hermes"
"""The form in which environments are given calls of tools, which come as JSON from an endpoint."""


def outside_problem(
    model: ModelSpec,
    *,
    kind: str,
    is_fork: bool,
    is_scaled: bool,
    options: Mapping[str, Mapping[str, Any]],
) -> str:
    """The problem of a job with `model.endpoint`, by field; empty: none, or no endpoint.

    `options`: of its environments, by field.
    """
    if model.endpoint is None:
        return ""
    problems = _problems(
        model, model.endpoint.name, kind=kind, is_fork=is_fork, is_scaled=is_scaled
    )
    return next(problems, "") or next(_parsers(options), "")


def _problems(
    model: ModelSpec, name: str, *, kind: str, is_fork: bool, is_scaled: bool
) -> Iterator[str]:
    if kind != "eval":
        yield (
            f"model.endpoint: {name!r} with kind {kind}: an outside endpoint has no weights "
            "to train and names no log-probs; allowed: kind eval"
        )
    if not model.path:
        yield f"model.path: is empty; the name of the model at endpoint {name!r} is needed"
    for field in ("revision", "digest"):
        if getattr(model, field):
            yield f"model.{field}: with model.endpoint; nothing of the model is loaded here"
    if is_fork:
        yield "fork: with model.endpoint; a checkpoint has weights, and an endpoint takes none"
    if is_scaled:
        yield "rollout.scaling: with model.endpoint; no rollout worker is started"


def _parsers(options: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for field, values in options.items():
        parser = values.get("tool_parser", TOOL_PARSER)
        if parser != TOOL_PARSER:
            yield (
                f"{field}.tool_parser: {parser!r} with model.endpoint, whose calls of tools are "
                f"shown to the environment in one form; allowed: {TOOL_PARSER}"
            )
