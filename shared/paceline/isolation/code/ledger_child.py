"""Runs what the ledger calls of a job's own code, in a process of that job, one call at a time.

numpy may be one that the job requires: it is not there before its folders are.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

from paceline.config.options import refused_options
from paceline.errors import InvalidError
from paceline.isolation.child import ServedCall, raised, serve
from paceline.isolation.code.generation.child import OPERATIONS, Generation, methods_of
from paceline.isolation.frames import Frame
from paceline.isolation.signature import misfit_of_reward, place_of
from paceline.plugins import declared
from paceline.plugins.loading import attribute

_LESS_URGENT = 10  # than the service, whose machine it shares
_MOST_NAMED = 20  # functions of a module
_MADE_WITH: Mapping[str, tuple[int, Sequence[str]]] = {
    "samplers": (1, ("seed", "epochs")),
    "allocators": (0, ("group_size",)),
    "replays": (0, ()),
}
"""By kind of classes: the number of positional arguments, and the keywords besides the options."""


def main() -> None:
    """Serve calls on standard input."""
    with suppress(OSError):
        os.nice(_LESS_URGENT)
    tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")
    generation = Generation()
    own = {"describe": _describe, "filter": _filter, "advantage": _advantage}
    serve({**own, **dict.fromkeys(OPERATIONS, partial(_generate, generation))}, words=raised)


def _describe(call: ServedCall) -> dict[str, Any]:
    return _described(call.fields)


def _generate(generation: Generation, call: ServedCall) -> dict[str, Any]:
    return generation.answer(_found(call.fields["target"]), call.fields)


def _filter(call: ServedCall) -> dict[str, Any]:
    from paceline.isolation.code.ledger_messages import decision_fields, group_of

    group = group_of(call.fields["group"])
    answer = _found(call.fields["target"])(group, **call.fields["options"])
    return decision_fields(answer, len(group.rewards))


def _advantage(call: ServedCall) -> Frame:
    from paceline.isolation.code.ledger_messages import advantages_message, batch_of, context_of

    batch = batch_of(call.fields["answers"], call.parts)
    context = context_of(call.fields["context"])
    answer = _found(call.fields["target"])(batch, context, **call.fields["options"])
    return Frame(*advantages_message(answer))


def _described(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is wrong with a plug-in that the field `named` names, or its options, and what it needs.

    `lacks_package`: it cannot be imported here, as a package is missing, and that is no fault.
    """
    field, kind, target, options = (fields[n] for n in ("field", "kind", "target", "options"))
    named = fields["named"]
    if problem := _import_problem(target):
        if problem.package_missing and fields["may_lack_packages"]:
            return {"lacks_package": True}
        return {"wrong": [f"{named}: {problem.text}"]}
    try:
        function = _found(target)
    except InvalidError as error:
        return {"wrong": [f"{named}: {error.message}"]}
    if kind == "rewards" and (misfit := misfit_of_reward(function, target, options)):
        return {"wrong": [f"{named}: {misfit}"]}
    if kind in _MADE_WITH and (misfit := _misfit_of_class(function, kind, target, options)):
        return {"wrong": [f"{named}: {misfit}"]}
    if wrong := list(refused_options(field, kind, target, options, source=function)):
        return {"wrong": wrong}
    if kind == "transforms" and (misfit := _misfit_of_transform(function, target, options)):
        return {"wrong": [f"{named}: {misfit}"]}
    methods = methods_of(kind, function)[0] if kind in _MADE_WITH else []
    return {"needs": list(declared(function).needs_with(options)), "methods": methods}


class _ImportProblem(NamedTuple):
    text: str
    package_missing: bool


def _import_problem(target: str) -> _ImportProblem | None:
    """Why the module of a function cannot be imported here."""
    try:
        importlib.import_module(target.partition(":")[0])
    except ModuleNotFoundError as error:
        hint = "name its package in requirements.txt in the folder code.path"
        text = f"{target}: {raised(error)}; {hint}"
        return _ImportProblem(text, package_missing=True)
    except SyntaxError as error:
        where = f"{os.path.basename(error.filename or '')}:{error.lineno}"
        return _ImportProblem(f"{target}: SyntaxError: {error.msg} ({where})", False)
    except (Exception, SystemExit) as error:  # the supervisor boundary of an import
        return _ImportProblem(f"{target}: {raised(error)}", package_missing=False)
    return None


def _misfit_of_transform(function: Any, target: str, options: Mapping[str, Any]) -> str:
    """Why a transform cannot be called with these options; empty: it can."""
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        return (
            f"{target} takes {inspect.signature(function)}: {error}; a transform is called with an "
            "observation and its context, and with the options of the job as keywords"
        )
    return ""


def _misfit_of_class(plugin: Any, kind: str, target: str, options: Mapping[str, Any]) -> str:
    """Why a sampler, allocator or replay cannot be made and called; empty: it can.

    Options that it does not know, or lacks, are left to `refused_options`.
    """
    if not inspect.isclass(plugin):
        return f"{target} is a function{place_of(plugin)}; a class is needed"
    where = place_of(plugin.__init__)
    if lacks := methods_of(kind, plugin)[1]:
        return f"{target} {lacks}{where}"
    positional, keywords = _MADE_WITH[kind]
    signature = inspect.signature(plugin)
    known = {name: None for name in options if name in signature.parameters}
    try:
        signature.bind_partial(*[None] * positional, **dict.fromkeys(keywords), **known)
    except TypeError as error:
        due = ", ".join(["size"] * positional + [f"{name}=..." for name in keywords])
        return f"{target} takes {signature}{where}: {error}; it is made with ({due}, **options)"
    return ""


@cache
def _found(target: str) -> Any:
    module, _, name = target.partition(":")
    if module in sys.modules and not hasattr(sys.modules[module], name):
        there = ", ".join(_functions_of(sys.modules[module])) or "none"
        raise InvalidError(
            f"cannot import {target!r}: module {module!r} has no attribute {name!r}; functions in "
            f"it: {there}"
        )
    found = attribute(target)
    if not callable(found):
        raise InvalidError(f"{target!r} is a {type(found).__name__}, no function")
    return found


def _functions_of(module: ModuleType) -> list[str]:
    """The public functions and classes that a module defines itself; the first ones."""
    own = (
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    )
    return sorted(name for name in own if not name.startswith("_"))[:_MOST_NAMED]
