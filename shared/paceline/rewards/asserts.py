"""Assert statements as tests: a program computes values, and its judge compares them.

A program that read an assert could claim that it holds. So each is taken apart: calls go to the
program, which answers with their values, and literals, comparisons and functions of the language
that stand around the calls stay here and are evaluated once the program has ended.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

from paceline.errors import InvalidError

MARK = "paceline-result:"
"""Precedes the result in the standard output of a program, where nothing follows it."""
_MAX_BITS = 1 << 16
_MAX_ITEMS = 1 << 20
# Errors that values of a program may raise where they are compared.
_NO_RESULT = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
# Source that is appended to the program. It writes JSON; a type that JSON lacks is
# `[name, contents]`.
CALLS = """

def _paceline_calls():
    import json, sys

    def plain(value):
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, complex):
            return ["complex", [value.real, value.imag]]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", value.hex()]
        if isinstance(value, range):
            return ["range", [value.start, value.stop, value.step]]
        if isinstance(value, dict):
            return ["dict", [[plain(key), plain(each)] for key, each in value.items()]]
        if hasattr(value, "tolist"):
            return plain(value.tolist())
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return [kind.__name__, [plain(each) for each in value]]
        if hasattr(value, "__iter__"):
            return ["iter", [plain(each) for each in value]]
        raise TypeError(f"a result of type {type(value).__name__} cannot be compared by the test")

    results = []
    for kind, source in json.loads(sys.stdin.read()):
        if kind == "exec":
            exec(source, globals())
        else:
            results.append(plain(eval(source, globals())))
    sys.stdout.write("\\n{mark}" + json.dumps(results) + "\\n")
    sys.stdout.flush()


_paceline_calls()
""".replace("{mark}", MARK)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > _MAX_ITEMS:
        raise OverflowError
    return numbers


def _round(value: Any, digits: int | None = None) -> Any:
    if digits is not None and abs(digits) > _MAX_BITS:
        raise OverflowError
    return round(value, digits)


def _type(value: Any) -> type:
    return type(value)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(abs, all, any, bool, dict, float, frozenset, int, isinstance, len, list, max, min),
        *(set, sorted, str, sum, tuple, Counter, math.isclose),
    )
} | {"range": _range, "round": _round, "type": _type}
_DOTTED = {"math.isclose": "isclose", "collections.Counter": "Counter"}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPUTED = "_{}"


def _bounded(kind: type[ast.operator], left: Any, right: Any) -> Any:
    """The result of an operator, unless a short text could make it take long or grow large."""
    for value in (left, right):
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise OverflowError
    if kind is ast.Pow and isinstance(left, int) and left.bit_length() * abs(right) > _MAX_ITEMS:
        raise OverflowError
    if kind is ast.Mod and not isinstance(left, int | float):
        raise TypeError
    if kind is ast.Mult:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, Sized) and len(value) * times > _MAX_ITEMS:
                raise OverflowError
    return _OPERATORS[kind](left, right)


def _operator(kind: type[ast.operator]) -> Callable[[Any, Any], Any]:
    return lambda left, right: _bounded(kind, left, right)


_NAMES: dict[str, Any] = (
    {"__builtins__": {}}
    | _FUNCTIONS
    | {_COMPUTED.format(kind.__name__): _operator(kind) for kind in _OPERATORS}
)


@dataclass(frozen=True, slots=True)
class Asserts:
    """Assert statements and what prepares them, taken apart."""

    steps: tuple[tuple[str, str], ...]
    """For the program: `exec` of a statement or `eval` of an expression, with its text."""
    conditions: tuple[CodeType, ...]
    """Over the values of the expressions, which are named by their numbers."""

    def stdin(self) -> bytes:
        """The input of `CALLS`."""
        return json.dumps(self.steps).encode()

    def hold(self, stdout: str) -> bool:
        """Whether all of them hold for what a program has written, whatever that is."""
        _, mark, rest = stdout.rpartition(MARK)
        try:
            results = cast(list[Any], json.loads(rest)) if mark else []
            names = {_value_name(i): _decoded(result) for i, result in enumerate(results)}
            if len(names) != sum(kind == "eval" for kind, _ in self.steps):
                return False
            # Nothing but literals, operators and calls of `_NAMES` is in a condition.
            return all(eval(condition, _NAMES | names) for condition in self.conditions)
        except _NO_RESULT:
            return False


def take_apart(text: str) -> Asserts:
    """The calls of assert statements, and their conditions.

    Statements before and between them run in the program; a variable that they set to a literal,
    and that no call takes, stays here.

    Raises:
        InvalidError: the text has an assert that cannot be judged outside of the program.
        SyntaxError: it is no program.
    """
    statements = ast.parse(text).body
    known = _literals(statements)
    while True:
        parts = _Parts(known, _bound(statements))
        for statement in statements:
            parts.add(statement)
        taken = known.keys() & parts.names_of_program()
        if not taken:
            return parts.result()
        known = {name: value for name, value in known.items() if name not in taken}


def _bound(statements: list[ast.stmt]) -> list[str]:
    """Names that statements bind, but for imports."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    definitions = (ast.FunctionDef, ast.ClassDef)
    return [
        *(node.id for node in nodes if isinstance(node, ast.Name) and _is_stored(node)),
        *(node.name for node in nodes if isinstance(node, definitions)),
    ]


def _is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _literals(statements: list[ast.stmt]) -> dict[str, ast.expr]:
    """Variables that are set once, to what can be evaluated here."""
    bound = _bound(statements)
    literals: dict[str, ast.expr] = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if bound.count(name) == 1:
                parts = _Parts({}, bound)
                try:
                    judged = parts.judged(value)
                except InvalidError:
                    continue
                if not parts.steps:
                    literals[name] = judged
            case _:
                pass
    return literals


class _Parts:
    """Collects what a program evaluates and what is judged here."""

    def __init__(self, known: Mapping[str, ast.expr], bound: list[str]) -> None:
        self._known = known
        self._bound = frozenset(bound)
        self.steps: list[tuple[str, ast.stmt | ast.expr]] = []
        self._conditions: list[CodeType] = []
        self._idle: list[ast.stmt] = []

    def result(self) -> Asserts:
        """Raises InvalidError if there is no assert, or one for which nothing is computed."""
        if not self._conditions:
            raise InvalidError("it has no assert statement")
        for statement in self._idle:
            raise InvalidError(f"{_quoted(statement)} calls nothing of the program")
        steps = tuple((kind, ast.unparse(node)) for kind, node in self.steps)
        return Asserts(steps, tuple(self._conditions))

    def names_of_program(self) -> set[str]:
        """Names in what the program evaluates."""
        nodes = (node for _, step in self.steps for node in ast.walk(step))
        return {node.id for node in nodes if isinstance(node, ast.Name)}

    def add(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assert(test=test):
                before = len(self.steps)
                condition = ast.Expression(self.judged(test))
                if len(self.steps) == before:
                    self._idle.append(statement)
                self._conditions.append(
                    compile(ast.fix_missing_locations(condition), "<assert>", "eval")
                )
            case ast.Assign(targets=[ast.Name(id=name)]) if name in self._known:
                pass
            case _:
                if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
                    raise InvalidError(f"the assert in {_quoted(statement)} is not on its own")
                self.steps.append(("exec", statement))

    def judged(self, node: ast.expr) -> ast.expr:
        """The expression with values of the program in place of its calls."""
        match node:
            case ast.Constant():
                return node
            case ast.Name(id=name) if name in self._known:
                return self._known[name]
            case ast.Name(id=name) if self._is_function(name):
                return node
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return type(node)([self.judged(item) for item in items], ast.Load())
            case ast.Set(elts=items):
                return ast.Set([self.judged(item) for item in items])
            case ast.Dict(keys=keys, values=values) if None not in keys:
                judged = [self.judged(cast(ast.expr, key)) for key in keys]
                return ast.Dict(cast(Any, judged), [self.judged(value) for value in values])
            case ast.UnaryOp(op=op, operand=operand):
                return ast.UnaryOp(op, self.judged(operand))
            case ast.BoolOp(op=op, values=values):
                return ast.BoolOp(op, [self.judged(value) for value in values])
            case ast.Compare():
                return self._comparison(node)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                function = ast.Name(_COMPUTED.format(type(op).__name__), ast.Load())
                return ast.Call(function, [self.judged(left), self.judged(right)], [])
            case ast.Call():
                return self._call(node)
            case _:
                return self._value(node)

    def _is_function(self, name: str) -> bool:
        return name in _FUNCTIONS and name not in self._bound

    def _comparison(self, node: ast.Compare) -> ast.expr:
        operands, computed = [node.left, *node.comparators], 0
        judged: list[ast.expr] = []
        for operand in operands:
            before = len(self.steps)
            judged.append(self.judged(operand))
            computed += len(self.steps) > before
        if computed == len(operands):
            raise InvalidError(
                f"{_quoted(node)} compares what the program computes with what it computes; one "
                "side has to be a literal"
            )
        exact = any(
            isinstance(operand, ast.Constant) and _is_single(operand) for operand in operands
        )
        return ast.Compare(judged[0], [_identity(op, exact) for op in node.ops], judged[1:])

    def _call(self, node: ast.Call) -> ast.expr:
        name = ast.unparse(node.func)
        name = _DOTTED.get(name, name)
        if not self._is_function(name):
            return self._value(node)
        before = len(self.steps)
        try:
            arguments = [self.judged(argument) for argument in node.args]
            keywords = [
                ast.keyword(keyword.arg, self.judged(keyword.value)) for keyword in node.keywords
            ]
        except InvalidError:  # for example `sorted(f(1), key=lambda ...)`
            del self.steps[before:]
            return self._value(node)
        return ast.Call(ast.Name(name, ast.Load()), arguments, keywords)

    def _value(self, node: ast.expr) -> ast.expr:
        """The value of an expression that the program evaluates, which must compare nothing."""
        is_known = isinstance(
            node,
            ast.Call
            | ast.Name
            | ast.Attribute
            | ast.Subscript
            | ast.ListComp
            | ast.SetComp
            | ast.DictComp
            | ast.GeneratorExp,
        )
        if not is_known or _compares(node):
            raise InvalidError(f"{_quoted(node)} cannot be evaluated outside of the program")
        number = sum(kind == "eval" for kind, _ in self.steps)
        self.steps.append(("eval", node))
        return ast.Name(_value_name(number), ast.Load())


def _value_name(number: int) -> str:
    return f"_{number}"


def _quoted(node: ast.AST) -> str:
    text = ast.unparse(node)
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _compares(node: ast.AST) -> bool:
    """Whether an expression compares something; functions among its arguments may."""
    if isinstance(node, ast.Lambda):
        return False
    return isinstance(node, ast.Compare) or any(map(_compares, ast.iter_child_nodes(node)))


def _is_single(constant: ast.Constant) -> bool:
    return constant.value is None or isinstance(constant.value, bool)


def _identity(op: ast.cmpop, exact: bool) -> ast.cmpop:
    """`is` of values that have come from another process is equality, but for None and booleans."""
    if exact or not isinstance(op, ast.Is | ast.IsNot):
        return op
    return ast.Eq() if isinstance(op, ast.Is) else ast.NotEq()


def _decoded(value: Any) -> Any:
    """The opposite of `plain`. Raises one of `_NO_RESULT` for anything that it does not write."""
    if isinstance(value, dict):
        raise TypeError
    if not isinstance(value, list):
        return value
    kind, contents = cast(list[Any], value)
    match kind:
        case "complex":
            return complex(*contents)
        case "bytes":
            return bytes.fromhex(contents)
        case "range":
            return _range(*contents)
        case "dict":
            return {_decoded(key): _decoded(item) for key, item in contents}
        case _:
            kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iter": iter}
            items: list[Any] = [_decoded(item) for item in contents]
            return kinds[kind](items)
