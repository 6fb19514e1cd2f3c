"""What a published method says about itself, for `paceline recipes` and docs/methods.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Method:
    """A published method: an attribute of its package, which an entry point of its recipe names.

    The docstring of that package says what the method is; its first line is the title, with the
    source. The package must be light to import.
    """

    stage: Literal["generate", "filter", "control", "replay"]
    """Where it acts (taxonomy of arXiv 2605.02913): on what is sampled, what is kept of it, how it
    is trained, or what is used again."""
    evidence: Literal["code", "notes", "reconstructed"]
    """Whether formulas are from the authors' code, from notes on the paper, or in part ours."""
    claim: str = ""
    """What the paper says it gains; empty for what every paper has as its baseline."""
    recipe: str = "recipe.yaml"
    """File of the package: the fragment of a job file with the method's parts and defaults."""
