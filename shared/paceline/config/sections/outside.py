"""What a job may have whose model is behind an outside endpoint: no weights and no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from paceline.config.base import Options
from paceline.plugins import StrictModel
from paceline.plugins.endpoints import EndpointName

if TYPE_CHECKING:
    from paceline.config.job import JobSpec

# Of a request: what is said, and the form of the answer that is read.
_OWN_FIELDS = frozenset({"model", "messages", "tools", "n", "stream", "stream_options"})
TOOL_PARSER = "hermes"
"""The form in which environments are given calls of tools, which come as JSON from an endpoint."""


class EndpointModelSpec(StrictModel):
    """An OpenAI-compatible server that answers instead of workers of this installation."""

    name: EndpointName
    """Of the server in the operator's `endpoints`, which have its address and its key."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Requests of the job that each environment worker has open at a time."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """In which a turn has to be answered, with all repetitions of its request; waiting for one's
    place among `concurrency` does not count. Afterwards the attempt has failed, and another one
    goes on from the turns so far (`experience.max_attempts`)."""
    request: Options = Field(default_factory=dict)
    """Further fields of each request; null leaves one out. Those that come from `sampling`
    (`temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `stop`, `seed`) can be replaced."""

    @field_validator("request")
    @classmethod
    def _leaves_the_dialogue(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_FIELDS & set(value)):
            raise ValueError(f"{taken[0]!r} is set by the job; allowed: all but {_listed()}")
        return value


def outside_problem(spec: JobSpec) -> str:
    """What a job with `model.endpoint` may not have, by field; empty: nothing, or no endpoint."""
    return next(_problems(spec), "") if spec.model.endpoint is not None else ""


def _problems(spec: JobSpec) -> Iterator[str]:
    model = spec.model
    assert model.endpoint is not None
    name = model.endpoint.name
    if spec.trains:
        yield (
            f"model.endpoint: {name!r} with kind {spec.kind}: an outside endpoint has no weights "
            "to train and names no log-probs; allowed: kind eval"
        )
    if not model.path:
        yield f"model.path: is empty; the name of the model at endpoint {name!r} is needed"
    for field in ("revision", "digest"):
        if getattr(model, field):
            yield f"model.{field}: with model.endpoint; nothing of the model is loaded here"
    if spec.fork is not None:
        yield "fork: with model.endpoint; a checkpoint has weights, and an endpoint takes none"
    if spec.rollout.scaling is not None:
        yield "rollout.scaling: with model.endpoint; no rollout worker is started"
    for field, options in _options(spec):
        parser = options.get("tool_parser", TOOL_PARSER)
        if parser != TOOL_PARSER:
            yield (
                f"{field}.tool_parser: {parser!r} with model.endpoint, whose calls of tools are "
                f"shown to the environment in one form; allowed: {TOOL_PARSER}"
            )


def _options(spec: JobSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "tasks.options", spec.tasks.options
    for name, each in spec.eval_sets.items():
        yield f"evals.{name}.options" if name else "eval.options", each.options


def _listed() -> str:
    return ", ".join(sorted(_OWN_FIELDS))
