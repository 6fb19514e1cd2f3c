"""Finds out, with a few tokens, whether the trainer can compute a model's log-probs, and how."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidError
from paceline.models.foreign_code import of_model
from paceline_trainer.step.attention import NAME, TreeAttention
from paceline_trainer.step.data import Layout
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.tree import prefix_tree

TOLERANCE = 1e-3


def layouts_of(policy: PolicyModel) -> tuple[Layout, ...]:
    """The layouts that give the log-probs of the model's own logits.

    Raises:
        InvalidError: the trainer's log-probs differ in any layout, or by chance.
    """
    name = f"model type {policy.config.model_type!r}"
    with of_model(f"{name}: this trainer cannot train it", unless=(torch.OutOfMemoryError,)):
        return _layouts_of(policy)


@torch.no_grad()
def _layouts_of(policy: PolicyModel) -> tuple[Layout, ...]:
    vocab = int(policy.config.get_text_config().vocab_size)
    ids = torch.tensor([[0, 7, 14, 21], [0, 7, 28, 35]]) % vocab
    targets = ids[:, 1:].reshape(-1)
    hidden_indices = torch.arange(8).view(2, 4)[:, :-1].reshape(-1)
    policy.eval()
    recomputed = policy(ids, None, hidden_indices, targets, 1.0).logprobs
    policy.train()
    again = policy(ids, None, hidden_indices, targets, 1.0).logprobs
    policy.eval()
    inner = cast(Any, policy.inner)
    inner.set_attn_implementation("eager")  # of the model itself
    if inner.config._attn_implementation != "eager":
        raise InvalidError(
            f"model type {policy.config.model_type!r}: its attention is its own; this trainer "
            "cannot train it"
        )
    logits = inner(input_ids=ids, use_cache=False).logits.float()
    inner.set_attn_implementation(NAME)
    expected = (
        torch.log_softmax(logits, -1).view(8, -1)[hidden_indices].gather(-1, targets[:, None])[:, 0]
    )
    if not torch.isfinite(expected).all():
        raise InvalidError(_not_finite(policy))
    if not torch.allclose(expected, recomputed, atol=TOLERANCE):
        raise InvalidError(
            f"model type {policy.config.model_type!r}: its logits are not a plain head over its "
            "last hidden states, or its attention is its own; this trainer cannot train it"
        )
    if not torch.equal(recomputed, again):
        raise InvalidError(
            f"model type {policy.config.model_type!r}: its log-probs in training mode depend on "
            "chance, and are not those of the engine; this trainer cannot train it"
        )
    return ("padded", "tree") if _takes_trees(policy, ids, targets, expected) else ("padded",)


def _not_finite(policy: PolicyModel) -> str:
    """What to say of log-probs that are no numbers."""
    named = policy.inner.named_parameters()
    wrong = [name for name, value in named if not value.isfinite().all()]
    why = f"{wrong[0]} has NaN or infinite values" if wrong else "by its configuration"
    return f"model type {policy.config.model_type!r}: its log-probs are not finite: {why}"


def _takes_trees(policy: PolicyModel, ids: Tensor, targets: Tensor, expected: Tensor) -> bool:
    """Whether log-probs of two sequences with half of their tokens in common stay the same."""
    if not getattr(policy.inner, "_supports_attention_backend", False):
        return False
    attention = TreeAttention(prefix_tree(np.array([4, 4]), np.array([0, 2])), ids.device)
    row, positions = ids.reshape(-1)[[0, 1, 2, 3, 6, 7]], torch.tensor([0, 1, 2, 3, 2, 3])
    places = torch.tensor([0, 1, 2, 0, 1, 4])
    found = policy(row[None], positions[None], places, targets, 1.0, tree=attention).logprobs
    same = torch.allclose(expected, found, atol=TOLERANCE)
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
