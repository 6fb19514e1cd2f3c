"""The job of kind `eval` that a command line asks for."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import JobSpec, parse_job
from paceline.config.documents import read_yaml
from paceline.config.evaluation import DAY_S
from paceline.config.sections.model import is_folder
from paceline.errors import InvalidError
from paceline.front.cli.check import override, read_job
from paceline.front.cli.lifecycle import merged, nested
from paceline.front.cli.measure.outside import name_of

_JOB = re.compile(r"(?P<job>[a-z0-9][a-z0-9-]*-[0-9a-f]{6})(@(?P<step>latest|best|[0-9]+))?")
_TIMEOUT_S = 7 * DAY_S  # every task counts, however slow the machine is
_NAME_CHARS = 40
_OF_ENDPOINT = "model.endpoint."
Fields = dict[str, Any]
# Fields of a job file for training that are dropped: nobody waits for the end of this job.
_DROPPED: Fields = {
    "fork": None,
    "stop": {},
    "recipe": [],
    "notify": None,
    "tracking": [],
    "ttl_seconds_after_finished": None,
}


class EvalTarget(NamedTuple):
    """A target of a measurement: a model, or the checkpoint of a job."""

    model: str = ""
    job: str = ""
    step: str = "latest"


def target_of(text: str) -> EvalTarget:
    """A folder is a model, and so is all that does not look like the id of a job."""
    match = None if is_folder(Path(text)) else _JOB.fullmatch(text)
    if match is not None:
        return EvalTarget(job=match["job"], step=match["step"] or "latest")
    return EvalTarget(model=text)


def of_model(arguments: Namespace, model: str) -> JobSpec:
    """The job that measures a model, by a job file or by the options alone.

    Raises:
        InvalidError: neither a file nor an environment is given.
    """
    if arguments.file is not None:
        later = [override for override in arguments.overrides if override.startswith(_OF_ENDPOINT)]
        first = [override for override in arguments.overrides if override not in later]
        base = read_job(arguments.file, first, arguments.data)
        fields: Fields = base.model_dump(mode="json", by_alias=True)
        fields["model"] = _model(arguments, model, fields["model"])
        if fields["model"]["endpoint"] is not None:
            fields["rollout"]["scaling"] = None  # no worker is started
        return parse_job(_overridden(_measured(fields, arguments), later))
    if not arguments.env:
        raise InvalidError("--env: is missing; name an environment, or a job file with -f")
    fields = {
        "name": _slug(model),
        "model": _model(arguments, model, {}),
        "tasks": {"environment": arguments.env},
        "reward": [{"kind": "environment"}],
        "eval": {},
    }
    return parse_job(_overridden(_measured(fields, arguments), arguments.overrides))


def _model(arguments: Namespace, model: str, before: Fields) -> Fields:
    """The model of the job: files, or a name at the endpoint that is given or that the job has."""
    pinned = {"revision": "", "digest": ""}
    endpoint: Fields | None = before.get("endpoint")
    if arguments.endpoint:
        endpoint = {**(endpoint or {}), "name": name_of(arguments)}
    elif is_folder(Path(model)):
        model, endpoint = str(Path(model).resolve()), None
    return {**before, **pinned, "path": model, "endpoint": endpoint}


def of_job(arguments: Namespace, target: EvalTarget, parent: Mapping[str, Any]) -> JobSpec:
    """The job that measures a checkpoint of a job, whose fields hold unless others are given."""
    fields: Fields = {**parent, "name": f"{parent['name']}"[:_NAME_CHARS].rstrip("-") + "-eval"}
    if arguments.file is not None:
        text = arguments.file.read_text()
        fields = merged(fields, read_yaml(text, what=str(arguments.file)))
    fork: Fields | None = None
    if target.step != "0":  # what it began with
        step: int | str = int(target.step) if target.step.isdecimal() else target.step
        fork = {"job": target.job, "step": step}
    measured = _measured(fields, arguments) | {"fork": fork}
    return parse_job(_overridden(measured, arguments.overrides))


def _measured(fields: Fields, arguments: Namespace) -> Fields:
    """The fields of a job of kind `eval`, with the sets that the options ask for."""
    measured: Fields = {**fields, **_DROPPED, "kind": "eval"}
    if "trainer" in measured:  # the best checkpoint may be that of a set that is not measured here
        measured = merged(measured, {"trainer": {"checkpoint": {"best": None}}})
    if arguments.env:
        measured["tasks"] = {"environment": arguments.env}
    if arguments.reward:
        measured["reward"] = [{"kind": kind} for kind in arguments.reward]
    if arguments.data is not None:
        measured["data"] = {"path": str(arguments.data.resolve())}
    options = dict(override(text, option="--option") for text in arguments.options)
    own = bool(arguments.env or options or arguments.collects)
    temperature = float((measured.get("sampling") or {}).get("temperature", 1.0))
    if own:
        evaluation: Fields = {"options": options}
        if arguments.collects:
            seed = (measured.get("tasks") or {}).get("seed", 0)
            evaluation |= {"temperature": temperature, "seed": seed}
        return measured | {"eval": _set(evaluation, arguments, temperature), "evals": {}}
    sets: Fields = measured.get("evals") or {}
    one = measured.get("eval")
    if one is None and not sets:
        raise InvalidError("--option: is missing; the job has no evaluation of its own")
    return measured | {
        "eval": None if one is None else _set(one, arguments, temperature),
        "evals": {
            name: _set(one_of_several, arguments, temperature)
            for name, one_of_several in sets.items()
        },
    }


def _set(base: Mapping[str, Any], arguments: Namespace, temperature: float) -> Fields:
    """One set: what is given on the command line, else what the job says, else defaults."""
    names = ("tasks", "samples", "temperature", "seed", "pass_reward", "pass_at", "majority_at")
    overrides = {name: getattr(arguments, name, None) for name in names}
    fields: Fields = {
        **base,
        **{name: value for name, value in overrides.items() if value is not None},
    }
    fields["timeout_s"] = arguments.timeout or _TIMEOUT_S
    samples = int(fields.get("samples", 1))
    if samples > 1 and not fields.get("temperature"):
        fields["temperature"] = temperature
    if not fields.get("pass_at"):
        fields["pass_at"] = sorted({1, samples})
    if not fields.get("majority_at") and samples > 1:
        fields["majority_at"] = [samples]
    return fields


def _overridden(fields: Fields, overrides: Sequence[str]) -> Fields:
    for field, value in map(override, overrides):
        fields = merged(fields, nested(field, value))
    return fields


def _slug(model: str) -> str:
    """A job's name from that of a model."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(model).name.lower()).strip("-")
    return f"eval-{name[:_NAME_CHARS]}".strip("-")
