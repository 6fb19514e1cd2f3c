"""Policy versions as the trainer knows them: the steps they are from, and their weights."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline_trainer.columns import Ints
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.model import DTYPES, PolicyModel, reshard

MAX_KNOWN_VERSIONS = 1024  # whose step is remembered
Shards = list[Tensor]


class VersionSteps:
    """The step that each published version is from. Collective: all ranks know the same."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._steps: dict[int, int] = {}  # version -> step

    def __getitem__(self, version: int) -> int:
        return self._steps[version]

    def published(self, version: int, step: int) -> None:
        """Share rank 0's newest version and its step with all ranks; negative: there is none."""
        newest, its_step = self._group.gather([version, step])[0].astype(int).tolist()
        if newest >= 0:
            self._steps[newest] = its_step
        for old in list(self._steps)[:-MAX_KNOWN_VERSIONS]:
            del self._steps[old]

    def present(self, versions: Ints) -> list[int]:
        """Known versions among those of any rank."""
        known, local = sorted(self._steps), set(versions.tolist())
        gathered = self._group.gather([float(version in local) for version in known])
        return [version for version, column in zip(known, gathered.T, strict=True) if column.any()]


class WeightHistory:
    """This rank's shards of the newest published weights, in engine precision and main memory."""

    def __init__(
        self, policy: PolicyModel, *, dtype: str, max_versions: int, max_bytes: int
    ) -> None:
        self.policy = policy
        self._dtype = DTYPES[dtype]
        self._max_versions = max_versions
        self._max_bytes = max_bytes
        self._copies: dict[int, Shards] = {}  # by step, oldest first

    def __contains__(self, step: int) -> bool:
        if step not in self._copies:
            self.policy.copied()  # it may be copied at this moment
        return step in self._copies

    @torch.no_grad()
    def keep(self, step: int, weights: Sequence[Tensor] | None = None) -> None:
        """Copy the current weights, and drop old copies to stay within the limits.

        `weights`: the shards of this step, if the policy's may be others by now.
        """
        own = local_shards(self.policy) if weights is None else weights
        shards = [in_host_memory(shard, self._dtype) for shard in own]
        size = sum(shard.nbytes for shard in shards)
        limit = min(self._max_versions, self._max_bytes // max(size, 1))
        self._copies.pop(step, None)
        for old in list(self._copies)[: max(len(self._copies) + 1 - limit, 0)]:
            del self._copies[old]
        if limit:
            self._copies[step] = shards

    def shards(self, step: int) -> Shards:
        """The weights of `step`; whoever has them may use them after this forgets them.

        Raises:
            KeyError: they are not held.
        """
        return self._copies[step]

    @contextmanager
    def restored(self, step: int) -> Generator[None]:
        """Give the policy the weights of `step` inside the context."""
        with with_weights(self.policy, self.shards(step)):
            yield


def in_host_memory(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in main memory, converted by the GPU that has the values, if one has."""
    if values.device.type == "cpu":
        return values.to(dtype, copy=True).contiguous()
    return values.to(dtype).contiguous().to("cpu")


def local_shards(policy: PolicyModel) -> Shards:
    """This rank's part of each parameter that is trained."""
    return [local(parameter.detach()) for parameter in policy.trained()]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def with_weights(policy: PolicyModel, shards: Sequence[Tensor]) -> Generator[None]:
    """Give a policy other weights inside the context; `shards` are those of this rank."""
    if policy.whole:
        before = _point_to(policy, shards)
    else:
        before = [shard.to("cpu", copy=True) for shard in local_shards(policy)]
        _copy_in(policy, shards)
    try:
        yield
    finally:
        if policy.whole:
            _point_to(policy, before)
        else:
            _copy_in(policy, before)


@torch.no_grad()
def _point_to(policy: PolicyModel, shards: Sequence[Tensor]) -> Shards:
    """Exchange the tensors of plain parameters, which copies nothing."""
    before: Shards = []
    for own, other in zip(policy.trained(), shards, strict=True):
        before.append(own.data)
        own.data = other.to(own.device, own.dtype)
    return before


@torch.no_grad()
def _copy_in(policy: PolicyModel, shards: Sequence[Tensor]) -> None:
    """Overwrite sharded parameters, to which FSDP has references."""
    reshard(policy)
    for own, other in zip(local_shards(policy), shards, strict=True):
        own.copy_(other)
