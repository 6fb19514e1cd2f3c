"""Publishes the weights of a step: copied in engine precision, numbered, served to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.job import JobSpec
from paceline.errors import StateError
from paceline.platform.telemetry.logs import Log
from paceline.types import PolicyVersion
from paceline.weights.adapters import merge_one
from paceline.weights.canary import Canary
from paceline.weights.names import CheckpointNames, Conversion
from paceline.weights.snapshot.manifest import SnapshotHeader, TensorEntry, choose_chunk_bytes, plan
from paceline.weights.snapshot.staging import Staging
from paceline.weights.transport import WeightTransport
from paceline_trainer.client import NumberedVersion, TrainerLedger
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.lora import is_adapter, plain_name, scales
from paceline_trainer.step.model import DTYPES, PolicyModel, reshard
from paceline_trainer.step.versions import WeightHistory, in_host_memory
from paceline_trainer.weights.canary import MAX_LENGTH, CanaryMaker
from paceline_trainer.weights.layerwise import Weights
from paceline_trainer.weights.tensor_queue import MOST_WAITING, TensorQueue

Staged = Callable[[Mapping[str, Tensor]], None]
"""Is given the tensors of a version by name, in the memory from which they are served."""
log = Log("publish")


class Held(NamedTuple):
    """A tensor of the policy, as it is when a copy begins."""

    name: str
    value: Tensor
    frozen: bool  # never trained


class Unit(NamedTuple):
    """Tensors of the policy that become one or several of a checkpoint together."""

    conversion: Conversion
    held: tuple[Held, ...]

    @property
    def frozen(self) -> bool:
        """Whether all are frozen."""
        return all(tensor.frozen for tensor in self.held)


class Source(NamedTuple):
    """The policy at one moment: by name for what is published, as modules for the canary."""

    held: tuple[Held, ...]
    weights: Weights


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """A copy of the weights: its description, and its tensors as they are gathered."""

    step: int
    entries: tuple[TensorEntry, ...]
    num_bytes: int
    tied: tuple[tuple[str, str], ...]
    canary: Canary
    tensors: TensorQueue
    source: tuple[Held, ...] = ()
    frozen_bytes: int = 0  # the first bytes, which no later version changes


class Snapshotter:
    """Takes snapshots. Collective: call it in the thread of all other collective work.

    For a policy that is whole, another thread may call it, until the weights change.
    Ranks that serve weights keep the gathered tensors, one whole copy per node.
    """

    def __init__(
        self,
        policy: PolicyModel,
        group: RankGroup,
        *,
        engine_dtype: str,
        dtype: str,
        merge: bool = False,
        max_context: int = MAX_LENGTH,
        seed: int = 0,
    ) -> None:
        """`merge`: adapters are merged into the weights, instead of being published themselves.

        So they are where checkpoints have an adapted weight in another form than the model. The
        canary is at most `max_context` tokens long, and drawn with `seed`.
        """
        self._policy = policy
        self._scales = scales(policy.inner)
        self._names = CheckpointNames(policy.config)
        adapters = [plain_name(n) for n, _ in policy.inner.named_parameters() if is_adapter(n)]
        self._merge = merge or not all(map(self._names.takes, adapters))
        self._frozen: dict[str, Tensor] = {}  # in engine precision, gathered only once
        # The same of a checkpoint, by conversion, where that is more than another name.
        self._converted: dict[Conversion, dict[str, Tensor]] = {}
        self._group = group
        self._dtype = DTYPES[engine_dtype]
        # In its own thread or on a GPU, which another thread's work does not hold up.
        self.in_place = not policy.whole or group.device.type == "cuda"
        self._canary = CanaryMaker(
            policy,
            group,
            engine_dtype=engine_dtype,
            own=self.in_place and engine_dtype == dtype,
            max_context=max_context,
            seed=seed,
        )

    @property
    def canary_text(self) -> Tensor:
        """The tokens of canaries, -1 before the first one; a checkpoint may fill it in place."""
        return self._canary.text

    @property
    def published_as(self) -> tuple[str, ...] | None:
        """Published names of the parameters that are trained, in their order.

        None: this rank has no whole parameters, or some are published with other values.
        """
        if not self._policy.whole or self._merge or self._scales:
            return None
        names = {id(each): name for name, each in self._policy.inner.named_parameters()}
        found: list[str] = []
        for parameter in self._policy.trained():
            conversion = self._names.of(plain_name(names[id(parameter)]))
            if conversion.computed:
                return None
            found += conversion.checkpoint
        return tuple(found)

    def source(self) -> Source:
        """What a copy is made of, which no longer follows the policy if that gets other weights."""
        return Source(self._state(), self._canary.capture())

    @torch.no_grad()
    def begin(self, step: int, source: Source | None = None) -> WeightCopy:
        """Describe a copy of the weights, whose tensors are gathered later by `gather`.

        `source`: what `source` has returned, if the weights may be others by now.

        Raises:
            InvalidError: the trainer's log-probs of the canary are wrong.
        """
        if source is None:
            reshard(self._policy)
            source = self.source()
        canary = self._canary.make(source.weights)
        reshard(self._policy)
        units = self._units(source.held)
        described = [self._described(unit) for unit in units]
        entries, num_bytes = plan([tensor for unit in described for tensor in unit])
        num_frozen = sum(
            len(names) for names, unit in zip(described, units, strict=True) if unit.frozen
        )
        tied = self._names.tied((plain_name(n), plain_name(same)) for n, same in self._policy.tied)
        return WeightCopy(
            step=step,
            entries=entries,
            num_bytes=num_bytes,
            tied=tied,
            canary=canary,
            tensors=TensorQueue(most_bytes=None if self.in_place else MOST_WAITING),
            source=source.held,
            frozen_bytes=self._frozen_bytes(entries[:num_frozen]),
        )

    @torch.no_grad()
    def gather(self, snapshot: WeightCopy) -> None:
        """Gather the full weights in engine precision, tensor by tensor."""
        error: BaseException | None = None
        try:
            for name, tensor in self._gathered(snapshot.source):
                snapshot.tensors.put(name, tensor)
        except BaseException as caught:
            error = caught
            raise
        finally:
            snapshot.tensors.end(error)

    def _gathered(self, source: Sequence[Held]) -> Iterator[tuple[str, Tensor]]:
        """The published tensors in their order, on ranks that serve weights."""
        adapters: dict[str, Tensor] = {}
        if self._merge:
            own = [each for each in source if is_adapter(each.name)]
            adapters = {plain_name(name): each for name, each in self._whole(own)}
        for unit in self._units(source):
            yield from self._checkpoint(unit, adapters).items()

    def _checkpoint(self, unit: Unit, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collective: the tensors of a unit as a checkpoint has them; none on other ranks."""
        conversion = unit.conversion
        if conversion in self._converted:
            return self._converted[conversion]
        whole = {plain_name(name): value for name, value in self._whole(unit.held)}
        merged = {name: merge_one(name, value, adapters) for name, value in whole.items()}
        if not whole:
            return {}
        converted = self._names.to_checkpoint(conversion, merged)
        unmerged = all(merged[name] is whole[name] for name in whole)
        if conversion.computed and unit.frozen and unmerged:
            self._converted[conversion] = converted
            self._frozen |= {held.name: torch.empty(0) for held in unit.held}
        return converted

    def _whole(self, source: Iterable[Held]) -> Iterator[tuple[str, Tensor]]:
        """Collective: gather tensors in engine precision; those that never change only once."""
        for name, value, frozen in source:
            if name not in self._frozen:
                full = value.full_tensor() if isinstance(value, DTensor) else value
                own = torch.empty(0)
                if self._group.rank_info.seeds:
                    if name in self._scales:
                        full = full * self._scales[name]
                    own = in_host_memory(full.detach(), self._precision(value))
                if frozen:
                    self._frozen[name] = own
            else:
                own = self._frozen[name]
            if self._group.rank_info.seeds:
                yield name, own

    def _units(self, source: Sequence[Held]) -> list[Unit]:
        """What is published, frozen tensors first, as receivers keep these bytes."""
        held: dict[Conversion, list[Held]] = {}
        for tensor in source:
            if not (self._merge and is_adapter(tensor.name)):
                held.setdefault(self._names.of(plain_name(tensor.name)), []).append(tensor)
        units = [Unit(conversion, tuple(tensors)) for conversion, tensors in held.items()]
        return sorted(units, key=lambda unit: not unit.frozen)

    def _described(self, unit: Unit) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of the tensors that a unit becomes."""
        value = unit.held[0].value
        dtype, own = str(self._precision(value))[6:], tuple(value.shape)  # of an adapter
        return [
            (name, dtype, self._names.shapes.get(name, own)) for name in unit.conversion.checkpoint
        ]

    def _frozen_bytes(self, frozen: Sequence[TensorEntry]) -> int:
        if self._merge:
            return 0
        return max((entry.offset + entry.num_bytes for entry in frozen), default=0)

    def _state(self) -> tuple[Held, ...]:
        """The tensors of the policy by name, without a copy."""
        tied = {name for name, _ in self._policy.tied}
        with self._policy.in_float32():
            state = self._policy.inner.state_dict(keep_vars=True)
        return tuple(
            Held(name, value.detach(), isinstance(value, nn.Parameter) and not value.requires_grad)
            for name, value in state.items()
            if name not in tied
        )

    def _precision(self, value: Tensor) -> torch.dtype:
        return self._dtype if value.is_floating_point() else value.dtype


class Publisher:
    """Rank 0: has snapshots numbered, and serves all of their chunks."""

    def __init__(
        self,
        *,
        ledger: TrainerLedger,
        transport: WeightTransport,
        endpoint: str,
        incarnation: int,
        parts: int = 1,
        config_json: str = "",
        history: WeightHistory | None = None,
    ) -> None:
        """`config_json`: of the model, as `model_config.canonical` gives it.

        `history` may keep what is served.
        """
        self._history = history
        self._ledger = ledger
        self._transport = transport
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._parts = parts
        self._config_json = config_json
        self.published: PolicyVersion | None = None

    async def publish(self, snapshot: WeightCopy, *, parent: int) -> PolicyVersion:
        """Announce a version, then serve it while tensors are still being gathered.

        Raises:
            StateError: the version has lost its number, so what is served is useless.
        """
        try:
            return await self._publish(snapshot, parent)
        finally:
            snapshot.tensors.close()

    async def _publish(self, snapshot: WeightCopy, parent: int) -> PolicyVersion:
        numbered = await self._publish_version(snapshot, parent)
        staging = self._transport.publish(
            self._header(snapshot, numbered, parent), key=numbered.key, keep=numbered.held
        )
        self.published = numbered.version
        await asyncio.to_thread(self._fill, staging, snapshot)
        number = numbered.version.version
        confirmed = await self._publish_version(snapshot, parent, digest=staging.root, known=number)
        version = confirmed.version
        if version.version != number:
            raise StateError(f"version {number} is served, but numbered {version.version} now")
        log.info(
            "published",
            version=version.version,
            step=version.step,
            bytes=version.num_bytes,
            digest=version.digest,
        )
        return version

    def _fill(self, staging: Staging, snapshot: WeightCopy) -> None:
        """Fill in all tensors, which the history has before any worker has all of them."""
        history = self._history
        fill(staging, snapshot.tensors, history and partial(history.serve, snapshot.step))

    async def _publish_version(
        self, snapshot: WeightCopy, parent: int, *, digest: str = "", known: int = -1
    ) -> NumberedVersion:
        return await self._ledger.publish_version(
            step=snapshot.step,
            parent=parent,
            endpoint=self._endpoint,
            num_bytes=snapshot.num_bytes,
            part=0,
            parts=self._parts,
            digest=digest,
            known=known,
        )

    def _header(
        self, snapshot: WeightCopy, numbered: NumberedVersion, parent: int
    ) -> SnapshotHeader:
        return SnapshotHeader(
            job_id=self._ledger.job_id,
            version=numbered.version.version,
            step=snapshot.step,
            parent_version=parent,
            base_version=-1,
            incarnation=self._incarnation,
            num_bytes=snapshot.num_bytes,
            # Experience of an earlier release does not send the size of chunks.
            chunk_bytes=numbered.chunk_bytes or choose_chunk_bytes(snapshot.num_bytes),
            tensors=snapshot.entries,
            tied=snapshot.tied,
            canary=snapshot.canary,
            frozen_bytes=snapshot.frozen_bytes,
            names="checkpoint",
            config_json=self._config_json,
        )


def fill(
    staging: Staging, tensors: Iterable[tuple[str, Tensor]], staged: Staged | None = None
) -> None:
    """Copy tensors into a staging buffer as they arrive, in the order of its header."""
    found: dict[str, Tensor] = {}
    try:
        for entry, (name, tensor) in zip(staging.header.tensors, tensors, strict=True):
            if name != entry.name:
                raise StateError(f"tensor {name} arrived instead of {entry.name}")
            staging.fill(entry.offset, tensor.reshape(-1).view(torch.uint8).numpy().data)
            if staged is not None and entry.num_bytes:
                data = staging.buffer()[entry.offset : entry.offset + entry.num_bytes]
                found[name] = torch.frombuffer(data, dtype=tensor.dtype).view(entry.shape)
        if staged is not None:
            staged(found)
        staging.finish()
    except BaseException:
        staging.abandon()
        raise


def snapshotter_of(spec: JobSpec, policy: PolicyModel, group: RankGroup) -> Snapshotter:
    """The `Snapshotter` of a job."""
    trainer = spec.trainer
    return Snapshotter(
        policy,
        group,
        engine_dtype=spec.model.dtype,
        dtype=trainer.dtype,
        merge=trainer.lora is not None and trainer.lora.publish == "merged",
        max_context=spec.sampling.max_context,
        seed=spec.tasks.seed,
    )
