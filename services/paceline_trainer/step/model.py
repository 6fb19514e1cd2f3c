"""The policy: a Hugging Face causal LM with float32 master weights, sharded with FSDP2."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from paceline.methods.parts.slots import LogitRows
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.attention import TreeAttention, keep_out_of_graphs
from paceline_trainer.step.chosen import chosen_logprobs
from paceline_trainer.step.data import Cost, Layout
from paceline_trainer.step.fused import compile_layers
from paceline_trainer.step.lora import without_adapters
from paceline_trainer.step.masters import MasterWeights

# Elements by device; above it the head is computed in chunks, and again in the backward pass. On a
# GPU, chunks as small as those of a CPU would cost more in launches than in arithmetic.
MAX_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 30}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


# Reads a rank's rows of parameters: the parameters, the rank, the number of ranks.
Source = Callable[[Iterable[Tensor], int, int], None]


class TokenScores(NamedTuple):
    """What the head says of target tokens."""

    logprobs: Tensor  # [P]
    entropy: Tensor | None  # [P] of the full distribution, in nats, if it was asked for
    of_logits: tuple[Tensor, ...] = ()  # [P] each, what functions of logits have returned


class LogitReaders(NamedTuple):
    """Functions of the logits of target tokens, and what they are given beside them."""

    functions: Sequence[Callable[[LogitRows], Tensor]]
    keys: Tensor  # [P]
    step: int

    def part(self, at: slice) -> LogitReaders:
        """Those of some target tokens."""
        return self._replace(keys=self.keys[at])


class PolicyModel(nn.Module):
    """Computes the log-probs of target tokens, and logits only at their positions."""

    def __init__(
        self, inner: nn.Module, *, source: Source | None = None, max_logits: int | None = None
    ) -> None:
        """`source` reads the weights; without one, `inner` has them.

        `max_logits`: instead of `MAX_LOGITS` of the device.
        """
        super().__init__()
        self.source = source
        self._max_logits = max_logits
        self.inner = inner
        self.config: Any = inner.config
        self.layouts: tuple[Layout, ...] = ("padded",)
        self.tied = _tied(inner)
        self.masters: MasterWeights | None = None
        self._copying: Future[Any] | None = None
        self._writing: Future[Any] | None = None
        self._structure: tuple[PolicyModel, ...] = ()  # in a tuple it is no module of this one
        self.num_parameters = sum(p.numel() for p in inner.parameters())
        self.vocab_size = int(self.config.get_text_config().vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        hidden_indices: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        *,
        tree: TreeAttention | None = None,
        entropy: bool = False,
        readers: LogitReaders | None = None,
    ) -> TokenScores:
        """Scores of `targets`, from the hidden states at flat `hidden_indices`.

        With a `tree`, the inputs are one row; without, rows of sequences.

        Logits of all tokens never exist at once: beyond `max_logits` elements, the head runs in
        chunks, and again in the backward pass.
        """
        inner = cast(Any, self.inner)
        out = inner.base_model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            **({} if tree is None else {"tree": tree, "attention_mask": tree.no_mask}),
        )
        hidden: Tensor = out.last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1])[hidden_indices]
        most = self._max_logits or MAX_LOGITS.get(chosen.device.type, MAX_LOGITS["cpu"])
        size = max(most // self.vocab_size, 1)
        if len(chosen) <= size:
            return self._head(chosen, targets, temperature, entropy, readers)
        chunks: list[TokenScores] = []
        for start in range(0, len(chosen), size):
            at = slice(start, start + size)
            heat = temperature[at] if isinstance(temperature, Tensor) else temperature
            found: Any = checkpoint(
                self._head,
                chosen[at],
                targets[at],
                heat,
                entropy,
                None if readers is None else readers.part(at),
                use_reentrant=False,
            )
            chunks.append(found)
        entropies = [each.entropy for each in chunks if each.entropy is not None]
        return TokenScores(
            torch.cat([each.logprobs for each in chunks]),
            torch.cat(entropies) if entropies else None,
            tuple(map(torch.cat, zip(*(each.of_logits for each in chunks), strict=True))),
        )

    def _head(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        entropy: bool,
        readers: LogitReaders | None,
    ) -> TokenScores:
        logits = self._scaled(cast(Any, self.inner).get_output_embeddings()(hidden))
        if readers is None and not entropy:
            return TokenScores(chosen_logprobs(logits, targets, temperature), None)
        logits = logits.float()
        if isinstance(temperature, Tensor):
            logits = logits / temperature[:, None]
        elif temperature != 1.0:
            logits = logits / temperature
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        read: tuple[Tensor, ...] = ()
        if readers is not None:
            rows = LogitRows(logits, targets, readers.keys, readers.step)
            read = tuple(function(rows) for function in readers.functions)
        if not entropy:
            return TokenScores(logprobs, None, read)
        expected = (logits.softmax(-1) * logits).sum(-1)
        return TokenScores(logprobs, normaliser - expected, read)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Scale or cap the logits of the head, as some model families do."""
        config = self.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits

    def train(self, mode: bool = True) -> Self:
        """Let layers recompute activations in the backward pass, without noise in the forward pass.

        Log-probs must match those of the engine, so all modules stay in evaluation mode but those
        that would recompute nothing there.
        """
        super().train(mode)
        self.inner.eval()
        for module in self.inner.modules() if mode else ():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
        return self

    def load(self, parameters: Iterable[Tensor], rank: int, world: int) -> None:
        """Read a rank's rows of parameters, unless they have been read."""
        if self.source is not None:
            self.source(parameters, rank, world)

    @property
    def whole(self) -> bool:
        """Whether this rank has all weights as plain tensors, so that any thread may read them."""
        return not isinstance(self, FSDPModule)

    def copied_by(self, copying: Future[Any]) -> None:
        """A thread reads the weights until this is done: they must not change before."""
        self._copying = copying

    def written_by(self, writing: Future[Any]) -> None:
        """A thread writes the state of training until this is done: it must not change before."""
        self._writing = writing

    def copied(self) -> None:
        """Wait until no other thread copies the weights; raises what that thread raised."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.result()

    def settle(self) -> None:
        """Wait until weights and optimiser may change; raises as `copied`."""
        self.copied()
        writing, self._writing = self._writing, None
        if writing is not None:
            wait([writing])  # its error is for whoever has begun it

    def replica(self) -> PolicyModel:
        """A model with the same frozen tensors, of a rank that has them whole.

        What is trained is empty until it is pointed to other tensors, as `with_weights` does while
        this one computes in another thread.
        """

        def parameter(own: nn.Parameter) -> nn.Parameter:
            value = own.detach()
            trained = own.requires_grad
            return nn.Parameter(value.new_empty(0) if trained else value, requires_grad=trained)

        made = self._copied(parameter)
        made.num_parameters = self.num_parameters
        return made

    def keep_structure(self) -> None:
        """Keep a copy of the modules, without weights: once they are sharded, none can be made."""
        made = self._copied(
            lambda own: nn.Parameter(torch.empty_like(own, device="meta"), requires_grad=False)
        )
        self._structure = (made.eval(),)

    @property
    def structure(self) -> PolicyModel:
        """The modules as they were before they were sharded or compiled; parameters are `meta`."""
        return self._structure[0]

    def _copied(self, parameter: Callable[[nn.Parameter], nn.Parameter]) -> PolicyModel:
        """The same modules and buffers, with other parameters."""
        memo: dict[int, Any] = {id(b): b for b in self.inner.buffers()}
        memo |= {id(own): parameter(own) for own in self.inner.parameters()}
        return PolicyModel(copy.deepcopy(self.inner, memo), max_logits=self._max_logits)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that training changes: all, or those of adapters."""
        return [each for each in self.parameters() if each.requires_grad]

    def in_float32(self) -> AbstractContextManager[None]:
        """The policy with the weights that the optimiser changes, inside the context."""
        return nullcontext() if self.masters is None else self.masters.restored()

    def changed(self) -> None:
        """Compute with the weights that the optimiser, or a checkpoint, has changed."""
        if self.masters is not None:
            self.masters.copy()

    def share(self, shards: Sequence[Tensor]) -> bool:
        """Compute with these copies of the weights, until they change, instead of an own one.

        Returns whether it does: only a policy with float32 weights beside its copies has some to
        spare, and only for copies on its device, in its precision.
        """
        return self.masters is not None and self.masters.borrow(self.trained(), shards)

    def without_adapters(self) -> AbstractContextManager[None]:
        """The policy as it was before training, inside the context, if it has adapters."""
        return without_adapters(self.inner)

    def cost(self) -> Cost:
        """FLOPs of a forward pass, per token and per pair of tokens."""
        config = self.config.get_text_config()
        pairs = 4.0 * int(config.hidden_size) * int(config.num_hidden_layers)
        return Cost(token=2.0 * self.num_parameters, pair=pairs)


def shard(policy: PolicyModel, group: RankGroup, *, dtype: str) -> None:
    """Shard each decoder layer, and the rest as one; forward and backward run in `dtype`.

    Weights that are not loaded yet are read unit by unit, each rank its own rows. A single rank has
    nothing to gather, so its parameters stay plain tensors.
    """
    policy.keep_structure()
    if group.rank_info.world == 1:
        _place(policy, group.device, DTYPES[dtype])
    else:
        _shard(policy, group, dtype=dtype)
    if compile_layers(decoder_layers(policy.inner), group.device):
        keep_out_of_graphs()


def _place(policy: PolicyModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move a policy that is whole to its device, unit by unit."""
    policy.masters = MasterWeights(dtype) if dtype != torch.float32 else None
    loaded = set[int]()
    for unit in (*decoder_layers(policy.inner), policy):
        policy.load((each for each in unit.parameters() if id(each) not in loaded), 0, 1)
        unit.to(device)
        if policy.masters is not None:
            policy.masters.adopt(unit)
        loaded.update(map(id, unit.parameters()))
    policy.source = None


def _shard(policy: PolicyModel, group: RankGroup, *, dtype: str) -> None:
    rank, world = group.rank_info.rank, group.rank_info.world
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == "float32" else DTYPES[dtype],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in decoder_layers(policy.inner):
        policy.load(layer.parameters(), rank, world)
        fully_shard(layer, mesh=group.mesh, mp_policy=precision)
    policy.load((p for p in policy.parameters() if not isinstance(p, DTensor)), rank, world)
    policy.source = None
    fully_shard(policy, mesh=group.mesh, mp_policy=precision, reshard_after_forward=False)
    # FSDP moves parameters to the device of the mesh, but not buffers.
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(group.device))


def reshard(policy: PolicyModel) -> None:
    """Free gathered weights after a forward pass without a backward pass."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(inner: nn.Module) -> list[nn.Module]:
    """The decoder layers: the shallowest list of modules."""
    queue: deque[nn.Module] = deque([inner])
    while queue:
        module = queue.popleft()
        if isinstance(module, nn.ModuleList):
            return list(module)
        queue.extend(module.children())
    return []


def _tied(inner: nn.Module) -> tuple[tuple[str, str], ...]:
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        if first_name != name:
            pairs.append((name, first_name))
    return tuple(pairs)
