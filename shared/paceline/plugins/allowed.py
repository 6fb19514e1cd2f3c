"""The functions of installed modules that jobs may name: exactly those that an operator lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

TARGET = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of `module:attribute`: identifiers, and one attribute of the module itself."""
_TARGET = re.compile(TARGET)


@dataclass(frozen=True, slots=True)
class AllowedTargets:
    """A set of `module:attribute`, compared as whole strings.

    A module cannot be listed as such: it would also allow everything that it imports.
    """

    targets: frozenset[str] = field(default_factory=frozenset[str])

    @classmethod
    def of(cls, targets: Iterable[str]) -> AllowedTargets:
        """Those of some names that are `module:attribute`; others could not be imported."""
        return cls(frozenset(each for each in targets if _TARGET.fullmatch(each)))

    def __contains__(self, name: object) -> bool:
        return name in self.targets

    def __or__(self, other: AllowedTargets) -> AllowedTargets:
        return AllowedTargets(self.targets | other.targets)

    def __str__(self) -> str:
        return ", ".join(sorted(self.targets)) or "none"


NO_TARGETS = AllowedTargets()
