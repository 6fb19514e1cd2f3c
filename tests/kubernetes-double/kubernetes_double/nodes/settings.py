"""The settings of a cluster's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A simulated machine. `resources`: capacity by name, as Kubernetes quantities."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    taints: tuple[Mapping[str, str], ...] = ()
    resources: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`images`, `files`, `variables` as in `kubelet/machine.py`; `haste` divides back-offs."""

    folder: Path
    nodes: tuple[Node, ...]
    images: Mapping[str, str]
    files: Mapping[str, str]
    variables: Mapping[str, str]
    haste: float
