"""Findings of checks."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec


class Condition(StrEnum):
    """How well something is; the worst last."""

    OK = "ok"
    NOTE = "note"  # works, but could do more
    BROKEN = "broken"  # something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    condition: Condition
    detail: str
    mend: str = ""
    """The command that mends it, as a shell takes it; empty: nothing has to be, or none does."""


def installing(requirement: str) -> str:
    """The command that installs a requirement for this Python, which may have no pip."""
    python = shlex.quote(sys.executable)
    pip = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
    return f"{pip} {shlex.quote(requirement)}"


def ok(name: str, detail: str) -> Finding:
    """Something that is as it should be."""
    return Finding(name, Condition.OK, detail)


def note(name: str, detail: str, mend: str = "") -> Finding:
    """Something that could be better."""
    return Finding(name, Condition.NOTE, detail, mend)


def broken(name: str, detail: str, mend: str = "") -> Finding:
    """Something that does not work."""
    return Finding(name, Condition.BROKEN, detail, mend)
