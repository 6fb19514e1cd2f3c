"""Runs the filters and advantages of a job, in a process of that job, one call at a time."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from inspect import Parameter
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.code.errors import told
from paceline.code.frames import MAX_FRAME_BYTES, frame, take_pipes
from paceline.config.options import refused_options
from paceline.errors import InvalidError
from paceline.plugins import declared
from paceline.plugins.loading import attribute

if TYPE_CHECKING:  # numpy may be one that the job requires: it is not there before its folders are
    from paceline.code.arrays import ArrayMessage

_BY_POSITION = {
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
}
_LESS_URGENT = 10  # than the service, whose machine it shares


def main() -> None:
    """Serve requests on standard input."""
    with suppress(OSError):
        os.nice(_LESS_URGENT)
    tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    source, sink = take_pipes()
    from paceline.code.arrays import array_requests

    for request in array_requests(source):
        sink.write(_answer(request))
        sink.flush()


def _answer(request: ArrayMessage) -> bytes:
    """The answer to a request; whatever the code raises is an answer too."""
    try:
        data = _called(request)
    except BaseException as error:  # the boundary of the job's code: each call has an answer
        return frame({"error": told(error)})
    if int.from_bytes(data[:4]) > MAX_FRAME_BYTES:
        return frame({"error": "returned too much besides its arrays"})
    return data


def _called(request: ArrayMessage) -> bytes:
    from paceline.code.arrays import array_frame
    from paceline.code.ledger_messages import (
        advantages_message,
        batch_of,
        context_of,
        decision_fields,
        group_of,
    )

    fields = request.fields
    if fields["op"] == "describe":
        return frame(_described(fields))
    function = _found(fields["target"])
    if fields["op"] == "filter":
        group = group_of(fields["group"])
        answer = function(group, **fields["options"])
        return frame(decision_fields(answer, len(group.rewards)))
    batch = batch_of(fields["answers"], request.arrays)
    answer = function(batch, context_of(fields["context"]), **fields["options"])
    return array_frame(*advantages_message(answer))


def _described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is wrong with the options of a plug-in, and what it needs of its job."""
    field, kind, target, options = (fields[n] for n in ("field", "kind", "target", "options"))
    if kind == "rewards" and (problem := _import_problem(target)):
        excused = problem.package_missing and fields["may_lack_packages"]
        return {"wrong": [] if excused else [f"{field}.kind: {problem.text}"], "needs": []}
    try:
        function = _found(target)
    except InvalidError as error:
        return {"wrong": [f"{field}.kind: {error.message}"], "needs": []}
    if kind == "rewards" and (misfit := _misfit(function, target, options)):
        return {"wrong": [f"{field}.kind: {misfit}"], "needs": []}
    if wrong := list(refused_options(field, kind, target, options, source=function)):
        return {"wrong": wrong, "needs": []}
    return {"wrong": [], "needs": list(declared(function).needs_with(options))}


class _ImportProblem(NamedTuple):
    text: str
    package_missing: bool


def _import_problem(target: str) -> _ImportProblem | None:
    """Why the module of a reward cannot be imported here."""
    try:
        importlib.import_module(target.partition(":")[0])
    except ModuleNotFoundError as error:
        hint = "name its package in requirements.txt in the folder code.path"
        text = f"{target}: {told(error)}; {hint}"
        return _ImportProblem(text, package_missing=True)
    except Exception as error:  # the boundary of the job's code
        return _ImportProblem(f"{target}: {told(error)}", package_missing=False)
    return None


def _misfit(function: Any, target: str, options: Mapping[str, Any]) -> str:
    """Why a reward cannot be called with an item and these options; empty: it can.

    Options that it does not know are left to `refused_options`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables of C have none
        return ""
    places = [e for e in signature.parameters.values() if e.kind in _BY_POSITION]
    if any(e.kind is e.VAR_POSITIONAL for e in places):
        return ""
    missing = [e.name for e in places[1:] if e.default is e.empty and e.name not in options]
    if places and not missing:
        return ""
    return (
        f"{target} takes {signature}; a reward is called with one item, and with the options of "
        f"the job as keywords: def {target.rpartition(':')[2]}(item, *, option=1.0)"
    )


@cache
def _found(target: str) -> Any:
    found = attribute(target)
    if not callable(found):
        raise InvalidError(f"{target!r} is a {type(found).__name__}, no function")
    return found
