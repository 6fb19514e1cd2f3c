"""Follows a value through the calls of a tree, from one method on; see `dev/house.py`.

What is computed from the value is not followed: passing that on, instead of the value, is what
makes a walk short. An object that is created with the value itself is followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from modules import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Stop:
    """The call of a function with the value."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass
class _Class:
    module: str
    name: str
    methods: dict[str, Function]
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    parameters: list[str] = field(default_factory=list[str])  # of its constructor
    fields: dict[str, str] = field(default_factory=dict[str, str])  # where it keeps each of them


@dataclass(frozen=True)
class _Place:
    """A function, with the class that it is a method of."""

    module: str
    function: Function
    owner: _Class | None = None

    @property
    def stop(self) -> Stop:
        name = self.function.name
        return Stop(self.module, f"{self.owner.name}.{name}" if self.owner else name)


def walk(modules: list[Module], owner: str, method: str, parameter: str) -> list[Stop]:
    """The stops of a value that `owner.method` takes as `parameter`, in the order of the source."""
    return _Walk(modules).start(owner, method, parameter)


class _Walk:
    def __init__(self, modules: list[Module]) -> None:
        self._classes: dict[str, _Class] = {}
        self._functions: dict[str, _Place] = {}
        self._imports: dict[str, dict[str, str]] = {}
        self._stops: list[Stop] = []
        for module in modules:
            self._index(module)
        self._methods: dict[str, list[_Class]] = {}
        for kind in self._classes.values():
            for name in kind.methods:
                self._methods.setdefault(name, []).append(kind)

    def _index(self, module: Module) -> None:
        imports = self._imports.setdefault(module.name, {})
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.ClassDef):
                self._classes[node.name] = _class(module.name, node)
        for node in module.tree.body:
            if isinstance(node, Function):
                self._functions[f"{module.name}.{node.name}"] = _Place(module.name, node)

    def start(self, owner: str, method: str, parameter: str) -> list[Stop]:
        """Walk from a method on."""
        kind = self._classes[owner]
        self._enter(_Place(kind.module, kind.methods[method], kind), {parameter})
        return self._stops[1:]

    def _enter(self, place: _Place, held: set[str]) -> None:
        if place.stop in self._stops or not held:
            return
        self._stops.append(place.stop)
        held = self._derived(place, held)
        for call in _calls(place.function):
            callee, arguments = _called(call)
            if (target := self._target(place, callee)) is not None:
                self._enter(target, _bound(target, arguments, call.keywords, held))

    def _derived(self, place: _Place, held: set[str]) -> set[str]:
        """Paths to the value in a function: names, and fields of objects that keep it."""
        held = set(held)
        assignments = [
            node
            for node in ast.walk(place.function)
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        ]
        for _ in assignments:
            for node in assignments:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                paths = self._kept(place, node.value, held) if node.value is not None else set()
                for name in (target.id for target in targets if isinstance(target, ast.Name)):
                    held |= {_joined(name, path) for path in paths}
        return held

    def _kept(self, place: _Place, value: ast.expr, held: set[str]) -> set[str]:
        """Paths to the value below an expression, which may create an object that keeps it."""
        while isinstance(value, ast.Await):
            value = value.value
        if not isinstance(value, ast.Call):
            return _paths(value, held)
        callee, arguments = _called(value)
        kind = self._kind_of(place, callee)
        if kind is None:
            return set()
        kept = set[str]()
        for name, argument in _arguments(kind.parameters, arguments, value.keywords):
            field = kind.fields.get(name, "")
            whole = {path for path in _paths(argument, held) if path or _is_whole(argument, held)}
            kept |= {_joined(field, path) for path in whole if field}
        return kept

    def _kind_of(self, place: _Place, callee: ast.expr) -> _Class | None:
        if not isinstance(callee, ast.Name):
            return None
        name = self._imports[place.module].get(callee.id, callee.id)
        return self._classes.get(name.rpartition(".")[2])

    def _target(self, place: _Place, callee: ast.expr) -> _Place | None:
        if isinstance(callee, ast.Name):
            name = self._imports[place.module].get(callee.id, f"{place.module}.{callee.id}")
            return self._functions.get(name) or self._method(name.rpartition(".")[2], "__init__")
        if not isinstance(callee, ast.Attribute):
            return None
        receiver = callee.value
        if isinstance(receiver, ast.Name):
            if receiver.id == "self" and place.owner is not None:
                return self._method(place.owner.name, callee.attr)
            name = self._imports[place.module].get(receiver.id, "")
            if (function := self._functions.get(f"{name}.{callee.attr}")) is not None:
                return function
            return self._method(name.rpartition(".")[2], callee.attr) or self._only(callee.attr)
        if isinstance(receiver, ast.Attribute) and place.owner is not None:
            kind = place.owner.attributes.get(receiver.attr, "")
            return self._method(kind, callee.attr) or self._only(callee.attr)
        return self._only(callee.attr)

    def _method(self, kind: str, name: str) -> _Place | None:
        owner = self._classes.get(kind)
        if owner is None or name not in owner.methods:
            return None
        return _Place(owner.module, owner.methods[name], owner)

    def _only(self, name: str) -> _Place | None:
        owners = self._methods.get(name, [])
        return self._method(owners[0].name, name) if len(owners) == 1 else None


def _class(module: str, node: ast.ClassDef) -> _Class:
    methods = {child.name: child for child in node.body if isinstance(child, Function)}
    kind = _Class(module, node.name, methods)
    for child in node.body:
        if isinstance(child, ast.AnnAssign):
            name = ast.unparse(child.target)
            kind.attributes[name] = _plain(child.annotation)
            kind.parameters.append(name)
            kind.fields[name] = name
    if (init := methods.get("__init__")) is not None:
        kinds = {
            argument.arg: _plain(argument.annotation)
            for argument in (*init.args.args, *init.args.kwonlyargs)
            if argument.annotation is not None
        }
        kind.parameters = [argument.arg for argument in init.args.args[1:]]
        kind.fields = {}
        for child in ast.walk(init):
            if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Attribute):
                kind.attributes[child.targets[0].attr] = _kind(child.value, kinds)
                if isinstance(child.value, ast.Name):
                    kind.fields[child.value.id] = child.targets[0].attr
    return kind


def _kind(value: ast.expr, kinds: dict[str, str]) -> str:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id
    return kinds.get(ast.unparse(value), "")


def _plain(annotation: ast.expr) -> str:
    return ast.unparse(annotation).strip("'").partition(" |")[0]


def _calls(function: Function) -> Iterator[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    yield from sorted(calls, key=lambda node: (node.lineno, node.col_offset))


def _called(call: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """What a call calls, and with what; `partial` and `to_thread` call their first argument."""
    if ast.unparse(call.func) in ("partial", "asyncio.to_thread") and call.args:
        return call.args[0], call.args[1:]
    return call.func, call.args


def _path(value: ast.expr) -> str:
    """The dotted path of an expression, without what stands in brackets; empty: it has none."""
    names: list[str] = []
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Await | ast.Starred):
        if isinstance(value, ast.Attribute):
            names.insert(0, value.attr)
        value = value.value
    return ".".join([value.id, *names]) if isinstance(value, ast.Name) else ""


def _paths(value: ast.expr, held: set[str]) -> set[str]:
    """Paths to the value below an expression; the empty one: it is the value, or a part of it.

    A collection with one of these counts as a part.
    """
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return {""} if any(_paths(element, held) for element in value.elts) else set()
    path = _path(value)
    below = {each[len(path) + 1 :] for each in held if path and each.startswith(f"{path}.")}
    return below | ({""} if any(f"{path}.".startswith(f"{each}.") for each in held) else set())


def _is_whole(value: ast.expr, held: set[str]) -> bool:
    """Whether an expression is the value itself.

    An object that keeps the value holds it; one that keeps what it needs of it does not.
    """
    return _path(value) in held


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name


def _arguments(
    parameters: list[str], arguments: list[ast.expr], keywords: list[ast.keyword]
) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(parameters, arguments, strict=False)
    yield from ((word.arg, word.value) for word in keywords if word.arg)


def _bound(
    target: _Place, arguments: list[ast.expr], keywords: list[ast.keyword], held: set[str]
) -> set[str]:
    names = [argument.arg for argument in target.function.args.args]
    if target.owner is not None and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    return {
        _joined(name, path)
        for name, value in _arguments(names, arguments, keywords)
        for path in _paths(value, held)
    }
