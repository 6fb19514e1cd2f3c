"""Arithmetic in text, whatever the text: no names, no calls, numbers of bounded size."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

Number = int | float
MAX_CHARS = 200
MAX_BITS = 512  # of a whole number
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (2 + 3) * 4.

    Raises:
        ValueError: it is none, or a number in it is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has more than {MAX_CHARS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("the expression cannot be read") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, MemoryError, RecursionError):
        raise ValueError("a number is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError("allowed: numbers, + - * / // % ** and brackets")


def _power(base: Number, exponent: Number) -> Number:
    """A power, unless even its size would be too large to compute."""
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent < 0:
            return _bounded(float(base) ** exponent)
        if exponent * base.bit_length() > MAX_BITS and abs(base) > 1:
            raise OverflowError
        return _bounded(base**exponent)
    value: Number | complex = float(base) ** float(exponent)
    if isinstance(value, complex):
        raise ValueError("the root of a negative number")
    return _bounded(value)


def _bounded(value: Number) -> Number:
    too_large = isinstance(value, int) and value.bit_length() > MAX_BITS
    if too_large or value != value or value in (float("inf"), float("-inf")):
        raise OverflowError
    return value
