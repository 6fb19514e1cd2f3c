"""The policy: a Hugging Face causal LM with float32 master weights, sharded with FSDP2."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from paceline.errors import ConfigError, InvalidError
from paceline.methods.parts.slots import LogitRows
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.attention import NAME, TreeAttention
from paceline_trainer.step.data import Cost, Layout
from paceline_trainer.step.tree import prefix_tree

MAX_LOGITS = (
    1 << 24
)  # elements; above it the head is computed in chunks, and again in the backward pass
PROBE_TOLERANCE = 1e-3
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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

    def __init__(self, inner: nn.Module, *, max_logits: int = MAX_LOGITS) -> None:
        super().__init__()
        self._max_logits = max_logits
        self.inner = inner
        self.config: Any = inner.config
        self.layouts: tuple[Layout, ...] = ("padded",)
        self.tied = _tied(inner)
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
        size = max(self._max_logits // self.vocab_size, 1)
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
        logits = self._scaled(cast(Any, self.inner).get_output_embeddings()(hidden)).float()
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

    def cost(self) -> Cost:
        """FLOPs of a forward pass, per token and per pair of tokens."""
        config = self.config.get_text_config()
        pairs = 4.0 * int(config.hidden_size) * int(config.num_hidden_layers)
        return Cost(token=2.0 * self.num_parameters, pair=pairs)


def load_policy(path: str, *, gradient_checkpointing: bool = False) -> PolicyModel:
    """Load the whole model in float32, and detect which layouts it supports.

    Raises:
        ConfigError: the folder has no model that can be loaded.
        InvalidError: the trainer's log-probs differ from those of the model itself.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a folder with a config.json")
    disable_progress_bar()
    try:
        inner = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=NAME, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {path}: {error}") from None
    inner.config.use_cache = False
    _no_dropout(inner)
    policy = PolicyModel(inner)
    _probe(policy)
    if gradient_checkpointing:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    return policy


def load_reference(path: str, group: RankGroup, *, dtype: str) -> PolicyModel:
    """The job's initial model, sharded and frozen.

    Raises:
        ConfigError: the folder has no model that can be loaded.
        InvalidError: the trainer's log-probs differ from those of the model itself.
    """
    policy = load_policy(path)
    policy.requires_grad_(False)
    policy.eval()
    shard(policy, group, dtype=dtype)
    return policy


def shard(policy: PolicyModel, group: RankGroup, *, dtype: str) -> None:
    """Shard each decoder layer, and the rest as one; forward and backward run in `dtype`."""
    single_rank = group.rank_info.world == 1
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == "float32" else DTYPES[dtype],
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in _layers(policy.inner):
        # A single rank owns all weights, so resharding would free nothing.
        fully_shard(
            layer, mesh=group.mesh, mp_policy=precision, reshard_after_forward=not single_rank
        )
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


def _layers(inner: nn.Module) -> list[nn.Module]:
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


def _no_dropout(inner: nn.Module) -> None:
    """Disable dropout: log-probs must match those of the engine, which has none."""
    for module in inner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            cast(Any, module).attention_dropout = 0.0


@torch.no_grad()
def _probe(policy: PolicyModel) -> None:
    """Compare with the model's own logits; allow trees only if paths do not see each other."""
    vocab = int(policy.config.get_text_config().vocab_size)
    ids = torch.tensor([[0, 7, 14, 21], [0, 7, 28, 35]]) % vocab
    targets = ids[:, 1:].reshape(-1)
    hidden_indices = torch.arange(8).view(2, 4)[:, :-1].reshape(-1)
    policy.eval()
    logits = cast(Any, policy.inner)(input_ids=ids, use_cache=False).logits.float()
    expected = (
        torch.log_softmax(logits, -1).view(8, -1)[hidden_indices].gather(-1, targets[:, None])[:, 0]
    )
    recomputed = policy(ids, None, hidden_indices, targets, 1.0).logprobs
    if not torch.allclose(expected, recomputed, atol=PROBE_TOLERANCE):
        raise InvalidError(
            f"model type {policy.config.model_type!r}: its logits are not a plain head over its "
            "last hidden states; this trainer cannot train it"
        )
    if _takes_trees(policy, ids, targets, expected):
        policy.layouts = ("padded", "tree")


def _takes_trees(policy: PolicyModel, ids: Tensor, targets: Tensor, expected: Tensor) -> bool:
    """Whether log-probs of two sequences with half of their tokens in common stay the same."""
    if not getattr(policy.inner, "_supports_attention_backend", False):
        return False
    attention = TreeAttention(prefix_tree(np.array([4, 4]), np.array([0, 2])), ids.device)
    row, positions = ids.reshape(-1)[[0, 1, 2, 3, 6, 7]], torch.tensor([0, 1, 2, 3, 2, 3])
    places = torch.tensor([0, 1, 2, 0, 1, 4])
    found = policy(row[None], positions[None], places, targets, 1.0, tree=attention).logprobs
    same = torch.allclose(expected, found, atol=PROBE_TOLERANCE)
    return same and attention.windows == _windows(policy.config)


def _windows(config: Any) -> set[int | None]:
    """The windows that attention has to be told of, which a probe is too short to see."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds:
        return {window}
    by_kind = {"full_attention": None, "sliding_attention": window}
    return {by_kind.get(kind, 0) for kind in kinds}  # no layer has a window of 0: refused
