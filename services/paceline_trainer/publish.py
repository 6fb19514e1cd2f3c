"""The weights of a step, copied in engine precision, numbered by the ledger, served to workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from paceline.logs import Log
from paceline.types import PolicyVersion
from paceline.weights import Header, Staging, WeightServer, choose_chunk_bytes, plan
from paceline_trainer.client import Ledger
from paceline_trainer.distributed import Group
from paceline_trainer.model import DTYPES, Policy, reshard

CANARY_LENGTH = 8
log = Log("publish")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the weights, on rank 0; empty elsewhere."""

    step: int
    tensors: dict[str, Tensor]
    tied: tuple[tuple[str, str], ...]
    canary_tokens: tuple[int, ...]
    canary_logprobs: tuple[float, ...]


class Copier:
    """Takes snapshots. Collective, and in the same thread as all other collective work."""

    def __init__(self, policy: Policy, group: Group, *, engine_dtype: str, dtype: str) -> None:
        self._policy = policy
        self._group = group
        self._dtype = DTYPES[engine_dtype]
        self._same_dtype = engine_dtype == dtype
        vocab = int(policy.config.get_text_config().vocab_size)
        self._canary = tuple((1 + 7919 * i) % vocab for i in range(CANARY_LENGTH))

    @torch.no_grad()
    def copy(self, step: int) -> Snapshot:
        """Gather the full weights in engine precision, with the canary's log-probs under them."""
        logprobs = self._forward() if self._same_dtype else ()
        reshard(self._policy)
        tensors = self._gather()
        if self._group.place.first and not self._same_dtype:
            logprobs = self._forward_under(tensors)
        return Snapshot(step, tensors, self._policy.tied, self._canary, logprobs)

    def _gather(self) -> dict[str, Tensor]:
        inner = self._policy.inner
        tied = {name for name, _ in self._policy.tied}
        tensors: dict[str, Tensor] = {}
        for name, value in inner.state_dict().items():
            if name in tied:
                continue
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if self._group.place.first:
                dtype = self._dtype if full.is_floating_point() else full.dtype
                tensors[name] = full.detach().to("cpu", dtype, copy=True).contiguous()
        return tensors

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
    """Rank 0: numbers snapshots and serves them."""

    def __init__(
        self, *, ledger: Ledger, server: WeightServer, endpoint: str, incarnation: int
    ) -> None:
        self._ledger = ledger
        self._server = server
        self._endpoint = endpoint
        self._incarnation = incarnation
        self.published: PolicyVersion | None = None

    async def publish(self, snapshot: Snapshot, *, parent: int) -> PolicyVersion:
        """Announce, then serve while the bytes are still being digested."""
        described = [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in snapshot.tensors.items()]
        entries, num_bytes = plan(described)
        version, held = await self._ledger.announce(
            step=snapshot.step,
            parent=parent,
            endpoint=self._endpoint,
            num_bytes=num_bytes,
        )
        header = Header(
            job_id=self._ledger.job_id,
            version=version.version,
            step=snapshot.step,
            parent_version=parent,
            base_version=-1,
            incarnation=self._incarnation,
            num_bytes=num_bytes,
            chunk_bytes=choose_chunk_bytes(num_bytes),
            tensors=entries,
            tied=snapshot.tied,
            canary_tokens=snapshot.canary_tokens,
            canary_logprobs=snapshot.canary_logprobs,
        )
        staging = Staging(header)
        self._server.offer(staging, keep=held)
        self.published = version
        await asyncio.to_thread(fill, staging, snapshot.tensors)
        log.info("published", version=version.version, step=snapshot.step, bytes=num_bytes)
        return version


def fill(staging: Staging, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a staging buffer."""
    for entry in staging.header.tensors:
        flat = tensors[entry.name].reshape(-1).view(torch.uint8)
        staging.fill(entry.offset, flat.numpy().data)
    staging.finish()
