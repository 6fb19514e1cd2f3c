"""Observations and actions of Gymnasium as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from gymnasium import Space, spaces

from paceline.errors import InvalidError

_MAX_NUMBERS = 4096
_INTEGER = r"-?[0-9]{1,9}"
_NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"


def shown(space: Space[Any], value: Any, names: Sequence[str] = ()) -> str:
    """A value of a space as text.

    A number of a discrete space is its name, if there are names. Numbers of an array are separated
    by spaces, its rows by newlines; floats have three significant digits. The parts of a tuple are
    separated by commas, those of a dictionary are lines `key: value`.

    Raises:
        InvalidError: the space is no text.
    """
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        place = int(value) - int(space.start)
        return names[place] if place < len(names) else str(int(value))
    if isinstance(space, spaces.Tuple):
        return ", ".join(shown(inner, part) for inner, part in zip(space, value, strict=True))
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {shown(inner, value[key])}" for key, inner in space.items())
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return _rows(np.asarray(value))
    raise InvalidError(
        f"tasks.options.id: observations of {type(space).__name__} cannot be written; "
        "allowed: Text, Discrete, MultiDiscrete, MultiBinary, Box, Tuple, Dict"
    )


def parts(space: Space[Any], value: Any) -> dict[str, str]:
    """The parts of a value as text, by key or position."""
    if isinstance(space, spaces.Dict):
        return {key: shown(inner, value[key]) for key, inner in space.items()}
    if isinstance(space, spaces.Tuple):
        both = zip(space, value, strict=True)
        return {str(place): shown(inner, part) for place, (inner, part) in enumerate(both)}
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        flat = np.asarray(value).ravel()
        if len(flat) <= _MAX_NUMBERS:
            return {str(place): _rows(row) for place, row in enumerate(flat)}
    return {}


def _rows(value: Any) -> str:
    array = np.asarray(value)
    if array.size > _MAX_NUMBERS:
        raise InvalidError(
            f"tasks.options.id: observations have {array.size} numbers; "
            f"at most {_MAX_NUMBERS} can be written"
        )
    if array.ndim > 1:
        return "\n".join(_rows(row) for row in array)
    is_real = np.issubdtype(array.dtype, np.floating)
    return " ".join(f"{number:.3g}" if is_real else str(int(number)) for number in array.ravel())


class Actions:
    """Valid replies of a policy, and the action that each stands for."""

    def __init__(self, space: Space[Any], names: Sequence[str], *, exact: bool) -> None:
        """`names` of discrete actions; `exact`: the whole reply has to be an action.

        Raises:
            InvalidError: the space cannot be written, or has another number of actions.
        """
        if isinstance(space, spaces.Discrete):
            if names and len(names) != int(space.n):
                raise InvalidError(
                    f"tasks.options.actions: {len(names)} names for {int(space.n)} actions"
                )
        elif names:
            raise InvalidError("tasks.options.actions: only discrete actions have names")
        elif not isinstance(
            space, (spaces.Text, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)
        ):
            raise InvalidError(
                f"tasks.options.id: actions of {type(space).__name__} cannot be written; "
                "allowed: Text, Discrete, MultiDiscrete, MultiBinary, Box"
            )
        self._space, self._exact = space, exact
        self._places = {name.casefold(): place for place, name in enumerate(names)}
        self._names = names
        longest = sorted(map(re.escape, self._places), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest) or _INTEGER})(?!\w)")

    def described(self) -> str:
        """A description of the valid replies."""
        space = self._space
        if isinstance(space, spaces.Discrete):
            first = int(space.start)
            return ", ".join(self._names) or f"{first} to {first + int(space.n) - 1}"
        if isinstance(space, spaces.Text):
            characters = "".join(sorted(space.character_set))
            return f"text of at most {space.max_length} characters out of {characters}"
        count = int(np.prod(space.shape or ()))
        return f"{count} numbers" if count != 1 else "a number"

    def parsed(self, reply: str) -> Any:
        """The action that a reply stands for; None if it is none."""
        space = self._space
        if isinstance(space, spaces.Text):
            action: Any = reply
        elif isinstance(space, spaces.Discrete):
            action = self._discrete(reply.strip().casefold())
        else:
            action = self._array(reply.strip())
        return action if action is not None and space.contains(action) else None

    def _discrete(self, reply: str) -> int | None:
        if self._exact:
            actions = [reply] if self._pattern.fullmatch(reply) else []
        else:
            actions = self._pattern.findall(reply)
        if not actions:
            return None
        if not self._places:
            return int(actions[-1])
        start = int(cast("spaces.Discrete", self._space).start)
        return self._places[actions[-1]] + start

    def _array(self, reply: str) -> Any:
        """The last numbers of a reply; they have to be all of it if `exact`."""
        texts = re.findall(_NUMBER, reply)
        count = int(np.prod(self._space.shape or ()))
        whole = re.fullmatch(rf"{_NUMBER}(?:[\s,]+{_NUMBER})*", reply)
        if len(texts) < count or (self._exact and (len(texts) > count or not whole)):
            return None
        dtype: np.dtype[Any] = np.dtype(self._space.dtype)
        numbers = np.array([float(number) for number in texts[-count:]])
        if np.issubdtype(dtype, np.integer):
            limits = np.iinfo(cast("np.dtype[np.integer[Any]]", dtype))
            fit = (limits.min <= numbers) & (numbers <= limits.max)
            if not (fit & (numbers == np.floor(numbers))).all():
                return None
        return numbers.astype(dtype).reshape(self._space.shape)
