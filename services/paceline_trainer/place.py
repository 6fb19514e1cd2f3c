"""Where this process stands among the ranks: the one reader of torchrun's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Rank, world size, node and the process that started this one."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    node: int = 0
    nodes: int = 1
    parent: int = 0
    master_host: str = ""
    master_port: int = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that speaks for the trainer."""
        return self.rank == 0

    @property
    def seeds(self) -> bool:
        """Whether this rank serves weights: the first of its node does."""
        return self.local_rank == 0

    @property
    def orphaned(self) -> bool:
        """Whether the process that started this one is gone."""
        return self.parent != 0 and os.getppid() != self.parent


def find_place(environment: Mapping[str, str]) -> Place:
    """The place that torchrun gave this process.

    Raises:
        ConfigError: not started by torchrun.
    """
    try:
        rank, local, world = (int(environment[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        node = int(environment.get("GROUP_RANK", "0"))
        nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
        port = int(environment.get("MASTER_PORT", "0"))
    except (KeyError, ValueError):
        raise ConfigError(
            "start the trainer with `python -m torch.distributed.run --nproc-per-node W "
            "-m paceline_trainer SETTINGS.yaml`"
        ) from None
    return Place(
        rank=rank,
        local_rank=local,
        world=world,
        node=node,
        nodes=nodes,
        parent=os.getppid(),
        master_host=environment.get("MASTER_ADDR", ""),
        master_port=port,
    )
