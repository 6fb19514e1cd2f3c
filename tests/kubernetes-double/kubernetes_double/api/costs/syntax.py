"""Parses CEL into a tree for cost estimates; literals keep only their kind and size.

The library that runs the rules does not expose its tree. Grammar and precedence follow the language
definition (cel-spec, `doc/langdef.md`). Macros become folds as in cel-go (`parser/macro.go`), since
estimates count the steps of a fold. Not supported, here or in the library: optional fields, escaped
names and message construction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

RESULT = "@result"
"""The accumulator variable of a fold; no expression can name it."""
_QUOTED = "|".join(
    rf"{quote}(?:{inner})*?{quote}"
    for quote, inner in (
        ('"""', r"\\.|[\s\S]"),
        ("'''", r"\\.|[\s\S]"),
        ('"', r'\\.|[^"\\\n]'),
        ("'", r"\\.|[^'\\\n]"),
    )
)
_RAW = "|".join(
    (r'"""[\s\S]*?"""', r"'''[\s\S]*?'''", r'"[^"\n]*"', r"'[^'\n]*'"),
)
_TOKEN = re.compile(
    rf"(?P<space>(?:\s|//[^\n]*)+)"
    rf"|(?P<raw>(?:[rR][bB]?|[bB][rR])(?:{_RAW}))"
    rf"|(?P<text>[bB]?(?:{_QUOTED}))"
    r"|(?P<number>0x[0-9a-fA-F]+[uU]?|\d*\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+[uU]?)"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<sign>&&|\|\||[<>=!]=|[-+*/%<>?:.,!()\[\]{}])"
)
_CHARACTER = re.compile(
    r"\\(?:[xX][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2}|.)|[\s\S]"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("<", "<=", ">", ">=", "==", "!=", "in"),
    ("+", "-"),
    ("*", "/", "%"),
)
_CONSTANTS = {"true": "bool", "false": "bool", "null": "null"}


class Token(NamedTuple):
    """A token; `kind` is the regex group that matched it, "end" after the last one."""

    kind: str
    text: str


@dataclass(frozen=True)
class Literal:
    """A constant: the size of text and bytes, the value of integers."""

    kind: str
    size: int = 1
    number: int | None = None


@dataclass(frozen=True)
class Name:
    """A variable."""

    name: str


@dataclass(frozen=True)
class Select:
    """A field access, or a test for its presence."""

    of: Expression
    field: str
    test: bool = False


@dataclass(frozen=True)
class Call:
    """A call of a function or operator, the latter by its symbol (`[]`, `?:`, unary `-`)."""

    function: str
    arguments: tuple[Expression, ...]
    target: Expression | None = None


@dataclass(frozen=True)
class Listing:
    """A list literal."""

    items: tuple[Expression, ...]


@dataclass(frozen=True)
class Table:
    """A map literal: alternating keys and values."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Fold:
    """The expansion of a macro: a loop that accumulates in `RESULT`."""

    over: Expression
    item: str
    start: Expression
    condition: Expression
    step: Expression
    result: Expression


Expression: TypeAlias = Literal | Name | Select | Call | Listing | Table | Fold
_TRUE = Literal("bool")
_ONE = Literal("int", 1, 1)
_COLLECTED = Name(RESULT)


def read(source: str) -> Expression:
    """Parse an expression. Raises ValueError if it is invalid or unsupported."""
    reader = _Reader(list(_tokens(source)))
    found = reader.expression()
    reader.take("end")
    return found


def _tokens(source: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            raise ValueError(f"Syntax error: token recognition error at: {source[at]!r}")
        at = match.end()
        if match.lastgroup != "space":
            found.append(Token(str(match.lastgroup), match.group()))
    return [*found, Token("end", "")]


class _Reader:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def take(self, kind: str, text: str = "") -> str:
        """Consume the next token, which must be this one."""
        token = self._tokens[self._at]
        if token.kind != kind or (text and token.text != text):
            raise ValueError(f"Syntax error: unexpected {token.text or 'end'!r}")
        self._at += 1
        return token.text

    def expression(self) -> Expression:
        """Parse an expression."""
        condition = self._binary(0)
        if not self._skip("?"):
            return condition
        first = self._binary(0)
        self.take("sign", ":")
        return Call("?:", (condition, first, self.expression()))

    def _next(self, *texts: str) -> bool:
        token = self._tokens[self._at]
        return token.kind in ("sign", "name") and token.text in texts

    def _skip(self, *texts: str) -> bool:
        found = self._next(*texts)
        self._at += found
        return found

    def _binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._next(*_LEVELS[level]):
            sign = self._tokens[self._at].text
            self._at += 1
            left = Call(sign, (left, self._binary(level + 1)))
        return left

    def _unary(self) -> Expression:
        """Parse unary operators: pairs cancel out, and a number includes its sign."""
        for sign in ("!", "-"):
            if self._next(sign):
                times = 0
                while self._skip(sign):
                    times += 1
                if sign == "-" and self._tokens[self._at].kind == "number":
                    times -= 1
                inner = self._member()
                return Call(sign, (inner,)) if times % 2 else inner
        return self._member()

    def _member(self) -> Expression:
        found = self._primary()
        while True:
            if self._skip("."):
                name = self.take("name")
                if self._skip("("):
                    found = _method(found, name, self._series(")"))
                else:
                    found = Select(found, name)
            elif self._skip("["):
                found = Call("[]", (found, self.expression()))
                self.take("sign", "]")
            else:
                return found

    def _primary(self) -> Expression:
        token = self._tokens[self._at]
        self._at += 1
        if token.kind in ("raw", "text", "number"):
            return _literal(token)
        if token.kind == "name" and token.text != "in":
            return self._named(token.text)
        if token.text == "(":
            inner = self.expression()
            self.take("sign", ")")
            return inner
        if token.text == "[":
            return Listing(self._series("]"))
        if token.text == "{":
            return Table(self._pairs())
        if token.text == ".":
            return self._named(self.take("name"))
        raise ValueError(f"Syntax error: unexpected {token.text or 'end'!r}")

    def _named(self, name: str) -> Expression:
        if name in _CONSTANTS:
            return Literal(_CONSTANTS[name])
        return _function(name, self._series(")")) if self._skip("(") else Name(name)

    def _series(self, end: str) -> tuple[Expression, ...]:
        found: list[Expression] = []
        while not self._skip(end):
            found.append(self.expression())
            if not self._next(end):
                self.take("sign", ",")
        return tuple(found)

    def _pairs(self) -> tuple[Expression, ...]:
        found: list[Expression] = []
        while not self._skip("}"):
            found.append(self.expression())
            self.take("sign", ":")
            found.append(self.expression())
            if not self._next("}"):
                self.take("sign", ",")
        return tuple(found)


def _literal(token: Token) -> Literal:
    text = token.text
    if token.kind == "number":
        if text[-1] in "uU":
            return Literal("uint")
        if not text.startswith("0x") and set(text) & set(".eE"):
            return Literal("double")
        return Literal("int", 1, int(text, 0) if text.startswith("0x") else int(text))
    prefix = text[: min(text.index(quote) for quote in "\"'" if quote in text)].lower()
    inner = text[len(prefix) :]
    mark = 3 if inner.startswith(('"""', "'''")) else 1
    inner = inner[mark:-mark]
    pieces = list(inner) if token.kind == "raw" else _CHARACTER.findall(inner)
    if "b" not in prefix:
        return Literal("string", len(pieces))
    return Literal("bytes", sum(1 if len(one) > 1 else len(one.encode()) for one in pieces))


def _function(name: str, arguments: tuple[Expression, ...]) -> Expression:
    if name != "has":
        return Call(name, arguments)
    if len(arguments) != 1 or not isinstance(arguments[0], Select):
        raise ValueError("invalid argument to has() macro")
    return Select(arguments[0].of, arguments[0].field, test=True)


def _method(target: Expression, name: str, arguments: tuple[Expression, ...]) -> Expression:
    variable = arguments[0] if arguments else None
    if not isinstance(variable, Name) or len(arguments) not in (2, 3):
        return Call(name, arguments, target)
    if len(arguments) == 2:
        found = _folded(target, name, variable, arguments[1])
    elif name == "map":
        found = _listed(target, variable, arguments[1], arguments[2])
    else:
        found = None
    return found or Call(name, arguments, target)


def _folded(over: Expression, name: str, variable: Name, inner: Expression) -> Fold | None:
    item = variable.name
    if name == "all":
        going = Call("@not_strictly_false", (_COLLECTED,))
        return Fold(over, item, _TRUE, going, Call("&&", (_COLLECTED, inner)), _COLLECTED)
    if name == "exists":
        going = Call("@not_strictly_false", (Call("!", (_COLLECTED,)),))
        return Fold(over, item, _TRUE, going, Call("||", (_COLLECTED, inner)), _COLLECTED)
    if name in ("exists_one", "existsOne"):
        step = Call("?:", (inner, Call("+", (_COLLECTED, _ONE)), _COLLECTED))
        result = Call("==", (_COLLECTED, _ONE))
        return Fold(over, item, Literal("int", 1, 0), _TRUE, step, result)
    if name == "map":
        return _listed(over, variable, None, inner)
    return _listed(over, variable, inner, variable) if name == "filter" else None


def _listed(over: Expression, variable: Name, wanted: Expression | None, made: Expression) -> Fold:
    step: Expression = Call("+", (_COLLECTED, Listing((made,))))
    if wanted is not None:
        step = Call("?:", (wanted, step, _COLLECTED))
    return Fold(over, variable.name, Listing(()), _TRUE, step, _COLLECTED)
