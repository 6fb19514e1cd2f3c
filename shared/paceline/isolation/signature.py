"""How a reward of a job's own code wants to be called, as far as it can be seen without a call."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

_BY_POSITION = {
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
}
# Parameters of reward functions of TRL, which are called once with a batch and return a list.
_OF_BATCHES = {"completions", "prompts", "completion_ids", "completions_ids", "prompt_ids"}


def misfit_of_reward(function: Callable[..., Any], target: str, options: Mapping[str, Any]) -> str:
    """Why a reward cannot be called with an item and these options; empty: it can.

    Options that it does not know are left to `refused_options`.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables of C have none
        return ""
    name = target.rpartition(":")[2]
    if (batch := _of_batches(signature)) or _returns_list(function):
        what = f"has the parameter {batch!r}" if batch else "returns a list"
        return (
            f"{target} takes {signature}{place_of(function)} and {what}: it scores a batch, as "
            "rewards of TRL do; a reward is called with one item, and returns one number: "
            f"def {name}(item, **options), where item.response is the answer and "
            "item.task.payload has the fields of the row"
        )
    places = [e for e in signature.parameters.values() if e.kind in _BY_POSITION]
    if any(e.kind is e.VAR_POSITIONAL for e in places):
        return ""
    missing = [e.name for e in places[1:] if e.default is e.empty and e.name not in options]
    if places and not missing:
        return ""
    return (
        f"{target} takes {signature}{place_of(function)}; a reward is called with one item, and "
        f"with the options of the job as keywords: def {name}(item, *, option=1.0)"
    )


def _of_batches(signature: Signature) -> str:
    """The parameter by which a function shows that it takes a batch; empty: it shows nothing."""
    required = (e.name for e in signature.parameters.values() if e.default is e.empty)
    return next((name for name in required if name in _OF_BATCHES), "")


def _returns_list(function: Callable[..., Any]) -> bool:
    """Whether all that it returns are lists, as they are written in it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or a part of an expression
        return False
    if not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    values = [*_return_values(tree.body[0])]
    return bool(values) and all(isinstance(e, ast.List | ast.ListComp) for e in values)


def _return_values(node: ast.AST) -> Iterator[ast.expr | None]:
    """Values of the return statements of a function, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child.value
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _return_values(child)


def place_of(function: Callable[..., Any]) -> str:
    """Where it is, for a message: ` (scoring.py:3)`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""
