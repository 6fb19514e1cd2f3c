"""The rank of this process, from torchrun's environment, which is read nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank, world size, node and the process that started this one."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1  # ranks of this node
    node: int = 0
    nodes: int = 1
    parent: int = 0  # torchrun's process; 0: a single rank, started without it
    master_host: str = ""
    master_port: int = 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the only one that reports to the ledger."""
        return self.rank == 0

    @property
    def seeds(self) -> bool:
        """Whether this rank serves weights, as the first one of each node does."""
        return self.local_rank == 0

    @property
    def orphaned(self) -> bool:
        """Whether the process that started this one is gone."""
        return self.parent != 0 and os.getppid() != self.parent


def find_rank(environment: Mapping[str, str]) -> RankInfo:
    """The rank that torchrun, or who started a single rank, gave this process.

    Raises:
        ConfigError: the environment has no rank.
    """
    try:
        rank, local, world = (int(environment[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        local_world = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        node = int(environment.get("GROUP_RANK", "0"))
        nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
        port = int(environment.get("MASTER_PORT", "0"))
    except (KeyError, ValueError):
        raise ConfigError(
            "start the trainer with `python -m torch.distributed.run --nproc-per-node W "
            "-m paceline_trainer SETTINGS.yaml`"
        ) from None
    return RankInfo(
        rank=rank,
        local_rank=local,
        world=world,
        local_world=local_world,
        node=node,
        nodes=nodes,
        parent=os.getppid() if "TORCHELASTIC_RUN_ID" in environment else 0,
        master_host=environment.get("MASTER_ADDR", ""),
        master_port=port,
    )
