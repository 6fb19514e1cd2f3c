"""Policy versions as the trainer knows them: the steps they are from, and their weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
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
        self,
        policy: PolicyModel,
        *,
        dtype: str,
        max_versions: int,
        max_bytes: int,
        served: Sequence[str] = (),
    ) -> None:
        """`served`: published names of the parameters that are trained, in their order.

        With these, what is served is kept, and nothing is copied.
        """
        self.policy = policy
        self.num_served = max_versions if served else 0
        self._served = served
        self._max_versions = max_versions
        self._dtype = DTYPES[dtype]
        self._max_bytes = max_bytes
        self._kept: dict[int, Shards] = {}  # by step, oldest first

    def find(self, step: int) -> Shards | None:
        """The weights of `step`, which stay whole after this forgets them; None: not kept."""
        if step not in self._kept:
            self.policy.copied()  # it may be copied at this moment
        return self._kept.get(step)

    def kept(self, step: int) -> Shards | None:
        """The weights of `step`, if they are there already."""
        return self._kept.get(step)

    @torch.no_grad()
    def copy(self, step: int, weights: Sequence[Tensor] | None = None) -> None:
        """Keep a copy of the current weights, unless `serve` will keep them.

        `weights`: the shards of this step, if the policy's may be others by now.
        """
        own = local_shards(self.policy) if weights is None else weights
        if self._max_versions and not self._served:
            self._keep(step, [in_host_memory(shard, self._dtype) for shard in own])

    def serve(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep what is served of `step`, by published name, which never changes."""
        if self._served:
            self._keep(step, [tensors[name] for name in self._served])

    def _keep(self, step: int, shards: Shards) -> None:
        """Keep shards, and forget the oldest ones to stay within the limits."""
        size = sum(shard.nbytes for shard in shards)
        limit = min(self._max_versions, self._max_bytes // max(size, 1))
        others = [each for each in self._kept if each != step]
        for old in others[: max(len(others) + 1 - limit, 0)]:
            self.forget(old)
        if limit:
            self._kept[step] = shards

    def forget(self, step: int) -> None:
        """Free the weights of `step` once nobody has them."""
        self._kept.pop(step, None)


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
