"""Descriptors: what a method, or a package of plug-ins, says about itself and about its plug-ins.

A descriptor is the target of one entry point. Its module must be light to import, since the gateway
and the command line read it: neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel

KINDS = (
    "environments",
    "topologies",
    "transforms",
    "rewards",
    "filters",
    "samplers",
    "allocators",
    "replays",
    "advantages",
    "proximals",
    "shapings",
    "corrections",
    "surrogates",
    "regularisers",
    "aggregations",
    "hooks",
    "engines",
    "trackers",
)
SLOTS = (
    *("proximals", "shapings", "corrections", "surrogates", "regularisers", "aggregations"),
    "hooks",
)
"""Kinds that the objective of a trainer is made of, and hooks of its steps."""
DESCRIBED = tuple(kind for kind in KINDS if kind != "environments")
"""Kinds that `parts` may have; an environment is described by an `EnvironmentPlugin`."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in as its descriptor names it; both modules may begin with a dot.

    Such a module lies in the package that has the descriptor.
    """

    target: str
    """`module:attribute`, imported only where the plug-in runs."""
    options: type[BaseModel] | str = ""
    """What describes its options and carries its declarations: a model, or the `module:attribute`
    of a model, function or class (see `paceline.config.options`). If empty, `target` itself, which
    then must be light to import, as must be all that describes options."""


Parts = Mapping[str, Mapping[str, Plugin]]
"""Plug-ins by kind (one of `DESCRIBED`) and by the name that job files use."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """The descriptor of a package of plug-ins, which an entry point in `paceline.plugins` names.

    Raises:
        ValueError: a kind or a name cannot be, or a slot of the objective has no options.
    """

    parts: Parts

    def __post_init__(self) -> None:
        check_parts(self.parts)


@dataclass(frozen=True, slots=True)
class Method:
    """The descriptor of a published method, which an entry point in `paceline.methods` names.

    The name of the entry point is that of the recipe. The docstring of the package that has the
    descriptor says what the method is; its first line is the title, with the source.

    Raises:
        ValueError: as `Plugins`.
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
    parts: Parts = field(default_factory=dict[str, Mapping[str, Plugin]])

    def __post_init__(self) -> None:
        check_parts(self.parts)


def check_parts(parts: Parts) -> None:
    """Raise `ValueError` for a kind or a name that cannot be, or a slot without options."""
    for kind, plugins in parts.items():
        if kind not in DESCRIBED:
            raise ValueError(f"parts: {kind!r} is not one of {', '.join(DESCRIBED)}")
        for name, plugin in plugins.items():
            if not name or ":" in name:
                raise ValueError(f"parts: {kind}: {name!r} cannot be a name")
            if kind in SLOTS and not plugin.options:
                raise ValueError(
                    f"parts: {kind}: {name!r} needs `options`, since its module imports torch"
                )
