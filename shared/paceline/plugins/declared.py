"""Declarations of a plug-in, such as its needs, which are read before it is used.

They are attached to the target of its entry point in `paceline.options.<kind>`: its model of
options, or the function itself. Only installed plug-ins have such entry points, so code that comes
with a job cannot declare anything that a shared process would act on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Needs = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
_ATTRIBUTE = "__paceline__"


@dataclass(frozen=True, slots=True)
class Declared:
    """See `declares`."""

    needs: Needs = ()
    inline: bool = False
    load: Callable[..., Any] | None = None

    def needs_with(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """What it needs if it is given these options."""
        return self.needs(options) if callable(self.needs) else self.needs


@dataclass(frozen=True, slots=True)
class RegularExpression:
    """Marks an option as a regular expression: it is compiled at submit, in bounded time."""


def declares(
    *, needs: Needs = (), inline: bool = False, load: Callable[..., Any] | None = None
) -> Callable[[T], T]:
    """Decorates a function, class or model of options.

    Args:
        needs: what the job has to provide (`paceline.config.needs` has the names), or a function
            of the options that returns it. A job that does not is refused at submit.
        inline: of rewards that cannot hang or crash, whatever the response and the options are:
            they are called in the reward worker itself, not in a child process. Of installed
            rewards only.
        load: of rewards: called in the child process with the options before the clock of the
            first score starts, maybe more than once. For imports and models that take long.
    """

    def mark(target: T) -> T:
        setattr(target, _ATTRIBUTE, Declared(needs, inline, load))
        return target

    return mark


def declared(target: Any) -> Declared:
    """The declarations of a function, class or model of options; empty without any."""
    found = getattr(target, _ATTRIBUTE, None)
    return found if isinstance(found, Declared) else Declared()
