"""The options of a slot of the objective that is a function of a module, without its imports.

Such a module imports torch, which takes seconds and is not where jobs are checked. So of its source
only the class of the options is run, with the imports, functions and values that it makes use of.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.errors import InvalidError, plugin_boundary

_HEAVY = {"torch", "transformers"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def slot_options(target: str) -> type[BaseModel] | None:
    """The model that the parameter `options` of `module:function` is annotated with.

    Code of the module is run, so an operator has to have listed the function.

    None: its module is not here, or it cannot be told without running it; the trainer checks then.

    Raises:
        InvalidError: the module has no such function, or that has no such parameter.
    """
    module, _, name = target.partition(":")
    source = _source(module)
    if source is None:
        return None
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError) as error:
        where = f"{source.name}:{getattr(error, 'lineno', 0)}"
        raise InvalidError(f"cannot import {target!r}: {error.args[0]} ({where})") from None
    made = _made(tree)
    function = made.get(name)
    if name not in made:
        there = ", ".join(n for n, e in made.items() if isinstance(e, Function)) or "none"
        raise InvalidError(
            f"cannot import {target!r}: {source.name} has no {name!r}; functions in it: {there}"
        )
    if not isinstance(function, Function):
        return None  # an import, or a value that is a function
    places = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    options = next((each for each in places if each.arg == "options"), None)
    if options is None or options.annotation is None:
        raise InvalidError(
            f"{target!r} ({source.name}:{function.lineno}) must have a parameter `options`, "
            "annotated with a pydantic model: def loss(tokens, options: Options)"
        )
    found = _value(_annotation(options.annotation), made, module)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def is_here(module: str) -> bool:
    """Whether there is such a module to import; imports nothing, not even the packages it is in."""
    return _found(module) is not None


def _found(module: str) -> ModuleSpec | None:
    first, *inner = module.split(".")
    try:
        found = find_spec(first)
    except ValueError:  # the module that is run
        return None
    for number in range(len(inner)):
        if found is None or found.submodule_search_locations is None:
            return None
        name = ".".join([first, *inner[: number + 1]])
        found = PathFinder.find_spec(name, [*found.submodule_search_locations])
    return found


def _source(module: str) -> Path | None:
    """The file of a module, if it is one of Python."""
    found = _found(module)
    path = Path(found.origin) if found is not None and found.origin else None
    return path if path is not None and path.suffix == ".py" else None


def _made(tree: ast.Module) -> dict[str, ast.stmt]:
    """What each name at the top of a module is made by."""
    made: dict[str, ast.stmt] = {}
    for each in tree.body:
        made |= dict.fromkeys(_names(each), each)
    return made


def _names(each: ast.stmt) -> Iterator[str]:
    if isinstance(each, Function | ast.ClassDef):
        yield each.name
    elif isinstance(each, ast.Import | ast.ImportFrom):
        for alias in each.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(each, ast.Assign | ast.AnnAssign):
        targets = each.targets if isinstance(each, ast.Assign) else [each.target]
        for target in targets:
            yield from (e.id for e in ast.walk(target) if isinstance(e, ast.Name))


def _annotation(node: ast.expr) -> ast.expr:
    """An annotation that is written as a text stands for what is in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return ast.parse(node.value, mode="eval").body
    return node


def _value(expression: ast.expr, made: dict[str, ast.stmt], module: str) -> Any:
    """The value of an expression, by running what it needs of its module; None: it needs more."""
    wanted, needed = [expression], dict[int, ast.stmt]()
    left: list[ast.AST] = [*wanted]
    while left:
        for each in ast.walk(left.pop()):
            found = made.get(each.id) if isinstance(each, ast.Name) else None
            if found is not None and id(found) not in needed:
                needed[id(found)] = found
                left.append(found)
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    body = sorted(needed.values(), key=lambda each: each.lineno)
    if any(_is_heavy(each) for each in body):
        return None
    body = [each for each in body if getattr(each, "module", "") != "__future__"]
    tree = ast.fix_missing_locations(ast.Module([future, *body], []))
    space: dict[str, Any] = {"__name__": module, "__package__": module.rpartition(".")[0]}
    try:
        with plugin_boundary(module):
            exec(compile(tree, module, "exec"), space)
            return eval(compile(ast.Expression(expression), module, "eval"), space)
    except InvalidError:  # the trainer says what is wrong with it
        return None


def _is_heavy(each: ast.stmt) -> bool:
    if isinstance(each, ast.ImportFrom):
        return (each.module or "").partition(".")[0] in _HEAVY
    names = each.names if isinstance(each, ast.Import) else []
    return any(alias.name.partition(".")[0] in _HEAVY for alias in names)
