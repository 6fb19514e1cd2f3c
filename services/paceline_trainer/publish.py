"""The weights of a step, copied in engine precision, numbered by the ledger, served to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from paceline.errors import StateError
from paceline.logs import Log
from paceline.types import PolicyVersion
from paceline.weights.manifest import Header, TensorEntry, choose_chunk_bytes, plan
from paceline.weights.server import WeightServer
from paceline.weights.staging import Staging
from paceline_trainer.client import Announced, Ledger
from paceline_trainer.distributed import Group
from paceline_trainer.model import DTYPES, Policy, reshard

CANARY_LENGTH = 8
log = Log("publish")


class Gathering:
    """Tensors on their way from the thread that gathers them to the one that stages them."""

    def __init__(self) -> None:
        self._queue = SimpleQueue[tuple[str, Tensor] | None]()
        self._unwanted = False
        self._error: BaseException | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        """The next one."""
        if not self._unwanted:
            self._queue.put((name, tensor))

    def end(self, error: BaseException | None = None) -> None:
        """No more come; with an error that is what the other side gets."""
        self._error = error
        self._queue.put(None)

    def refuse(self) -> None:
        """Nobody takes them any more."""
        self._unwanted = True

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._queue.get()) is not None:
            yield item
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the weights: what it will hold, and its tensors as they come."""

    step: int
    entries: tuple[TensorEntry, ...]
    num_bytes: int
    tied: tuple[tuple[str, str], ...]
    canary_tokens: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    tensors: Gathering


class Copier:
    """Takes snapshots. Collective, and in the same thread as all other collective work.

    Ranks that serve weights keep what they gather, one whole copy per node.
    """

    def __init__(self, policy: Policy, group: Group, *, engine_dtype: str, dtype: str) -> None:
        self._policy = policy
        self._group = group
        self._dtype = DTYPES[engine_dtype]
        self._same_dtype = engine_dtype == dtype
        vocab = int(policy.config.get_text_config().vocab_size)
        self._canary = tuple((1 + 7919 * i) % vocab for i in range(CANARY_LENGTH))

    @torch.no_grad()
    def begin(self, step: int) -> Snapshot:
        """What can be told before the tensors are gathered, by `gather`.

        Where the engine computes in another precision than the trainer, the canary needs the
        tensors themselves: then they are gathered here.
        """
        logprobs = self._forward() if self._same_dtype else ()
        reshard(self._policy)
        tensors = Gathering()
        if not self._same_dtype:
            logprobs = self._gather_first(tensors)
        entries, num_bytes = plan(
            [
                (name, str(self._precision(value))[6:], tuple(value.shape))
                for name, value in self._state()
            ]
        )
        tied = self._policy.tied
        return Snapshot(step, entries, num_bytes, tied, self._canary, logprobs, tensors)

    @torch.no_grad()
    def gather(self, snapshot: Snapshot) -> None:
        """Gather the full weights in engine precision, tensor by tensor."""
        if not self._same_dtype:
            return
        error: BaseException | None = None
        try:
            for name, tensor in self._gathered():
                snapshot.tensors.put(name, tensor)
        except BaseException as caught:
            error = caught
            raise
        finally:
            snapshot.tensors.end(error)

    def _gather_first(self, tensors: Gathering) -> tuple[float, ...]:
        kept = dict(self._gathered())
        logprobs = self._forward_under(kept) if self._group.place.first else ()
        for name, tensor in kept.items():
            tensors.put(name, tensor)
        tensors.end()
        return logprobs

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._state():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self._group.place.seeds:
                dtype = self._precision(value)
                yield name, full.detach().to("cpu", dtype, copy=True).contiguous()

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        tied = {name for name, _ in self._policy.tied}
        state = self._policy.inner.state_dict()
        return ((name, value) for name, value in state.items() if name not in tied)

    def _precision(self, value: Tensor) -> torch.dtype:
        return self._dtype if value.is_floating_point() else value.dtype

    def _forward(self) -> tuple[float, ...]:
        ids, targets, places = self._inputs(self._group.device)
        return tuple(self._policy(ids, None, places, targets, 1.0).tolist())

    def _forward_under(self, tensors: dict[str, Tensor]) -> tuple[float, ...]:
        """The canary by a model that has exactly the tensors that are sent."""
        inner = cast(Any, self._policy.inner)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(inner.config, attn_implementation="sdpa")
        state = {name: b.detach().cpu() for name, b in inner.named_buffers()} | tensors
        ids, targets, _ = self._inputs(torch.device("cpu"))
        logits = functional_call(skeleton, state, (ids,), {"use_cache": False}).logits[0].float()
        found = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
        return tuple(found.tolist())

    def _inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.tensor(self._canary, device=device)
        return tokens[None, :-1], tokens[1:], torch.arange(len(tokens) - 1, device=device)


class Publisher:
    """Rank 0: numbers snapshots and serves them, all chunks of them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        server: WeightServer,
        endpoint: str,
        incarnation: int,
        parts: int = 1,
    ) -> None:
        self._ledger = ledger
        self._server = server
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._parts = parts
        self.published: PolicyVersion | None = None

    async def publish(self, snapshot: Snapshot, *, parent: int) -> PolicyVersion:
        """Announce, then serve while tensors are still being gathered.

        Raises:
            StateError: it has lost its number; what is served under the old one helps nobody.
        """
        try:
            return await self._publish(snapshot, parent)
        finally:
            snapshot.tensors.refuse()

    async def _publish(self, snapshot: Snapshot, parent: int) -> PolicyVersion:
        made = await self._announce(snapshot, parent)
        staging = self._server.stage(
            self._header(snapshot, made, parent), key=made.key, keep=made.held
        )
        self.published = made.version
        await asyncio.to_thread(fill, staging, snapshot.tensors)
        number = made.version.version
        again = await self._announce(snapshot, parent, digest=staging.root, known=number)
        version = again.version
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

    async def _announce(
        self, snapshot: Snapshot, parent: int, *, digest: str = "", known: int = -1
    ) -> Announced:
        return await self._ledger.announce(
            step=snapshot.step,
            parent=parent,
            endpoint=self._endpoint,
            num_bytes=snapshot.num_bytes,
            part=0,
            parts=self._parts,
            digest=digest,
            known=known,
        )

    def _header(self, snapshot: Snapshot, made: Announced, parent: int) -> Header:
        return Header(
            job_id=self._ledger.job_id,
            version=made.version.version,
            step=snapshot.step,
            parent_version=parent,
            base_version=-1,
            incarnation=self._incarnation,
            num_bytes=snapshot.num_bytes,
            # A service of an earlier release does not say how to cut.
            chunk_bytes=made.chunk_bytes or choose_chunk_bytes(snapshot.num_bytes),
            tensors=snapshot.entries,
            tied=snapshot.tied,
            canary_tokens=snapshot.canary_tokens,
            canary_logprobs=snapshot.canary_logprobs,
        )


def fill(staging: Staging, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors into a staging buffer, in the order of its header, as they come."""
    try:
        for entry, (name, tensor) in zip(staging.header.tensors, tensors, strict=True):
            if name != entry.name:
                raise StateError(f"tensor {name} came in the place of {entry.name}")
            staging.fill(entry.offset, tensor.reshape(-1).view(torch.uint8).numpy().data)
        staging.finish()
    except BaseException:
        staging.abandon()
        raise
