"""Declarations that plug-ins make about themselves, read before a plug-in is used.

They are attached to what describes the options of a plug-in: a model, or the function itself, as
its descriptor or its entry point in `paceline.options.<kind>` names it. Only installed plug-ins
have these, so code that comes with a job cannot declare anything that a shared process would act
on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from paceline.errors import InvalidError, plugin_boundary

T = TypeVar("T")
Needs = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
_ATTRIBUTE = "__paceline__"


@dataclass(frozen=True, slots=True)
class Declared:
    """The declarations of a plug-in; see `declares`."""

    needs: Needs = ()
    inline: bool = False
    load: Callable[..., Any] | None = None
    programs: bool = False
    endpoints: bool = False
    golds: Callable[..., None] | None = None
    row_golds: Callable[..., None] | None = None

    def needs_with(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The plug-in's needs with these options."""
        return self.needs(options) if callable(self.needs) else self.needs


@dataclass(frozen=True, slots=True)
class RegularExpression:
    """Marks an option as a regular expression, to be compiled at submit in bounded time."""


def declares(
    *,
    needs: Needs = (),
    inline: bool = False,
    load: Callable[..., Any] | None = None,
    programs: bool = False,
    endpoints: bool = False,
    golds: Callable[..., None] | None = None,
    row_golds: Callable[..., None] | None = None,
) -> Callable[[T], T]:
    """Decorate a function, class or options model with declarations.

    Args:
        needs: requirements on the job (names from `paceline.config.needs`), or a function of the
            options that returns them. A job that does not meet them is refused at submit.
        inline: installed rewards only: the reward cannot hang or crash, whatever the response and
            options, so it is called in the reward worker itself, not in a child process.
        load: rewards only: called with the options in the child process before the timeout of the
            first score starts, maybe more than once. For slow imports and models.
        programs: installed rewards only: a coroutine function whose keyword `programs`, a
            `Programs`, runs programs in the sandbox of the reward worker. It is called in the
            worker itself, as what it judges must not share a process with it.
        endpoints: installed rewards only: a coroutine function whose keyword `endpoints`, an
            `Endpoints`, asks servers that the operator has named. It is called in the worker
            itself, many at a time, and must not block.
        golds: rewards only: called at submit with a task and the options, after `load`. It raises
            `InvalidError` if the reward could not read the task's answer.
        row_golds: as `golds`, but only for tasks that are rows of data, and with the keyword
            `world`, the environment of the job.
    """

    def mark(target: T) -> T:
        told = Declared(needs, inline, load, programs, endpoints, golds, row_golds)
        setattr(target, _ATTRIBUTE, told)
        return target

    return mark


def declared(target: Any) -> Declared:
    """The declarations on a function, class or options model; empty if it has none."""
    found = getattr(target, _ATTRIBUTE, None)
    return found if isinstance(found, Declared) else Declared()


class Provided:
    """Base of what Paceline passes to factories of plug-ins that annotate a parameter with it.

    Such a parameter is none of the options.
    """

    __slots__ = ()


def type_hints(factory: Callable[..., Any], *, include_extras: bool = False) -> dict[str, Any]:
    """Types of the parameters of a function or class by name; `include_extras`: with `Annotated`.

    None if they cannot be evaluated: annotations can be anything.
    """
    function = factory.__init__ if isinstance(factory, type) else factory
    try:
        with plugin_boundary():
            return get_type_hints(function, include_extras=include_extras)
    except InvalidError:
        return {}


def provided(factory: Callable[..., Any], kind: type[Provided] = Provided) -> str:
    """The parameter of a factory that is annotated with a kind of `Provided`; empty: none is."""
    for name, hint in type_hints(factory).items():
        if isinstance(hint, type) and issubclass(hint, kind):
            return name
    return ""
