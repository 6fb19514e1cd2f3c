"""Every family of models trains on its own log-probs, or is refused while it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.errors import PacelineError
from paceline_harness.models.families import (
    NOISY,
    REFUSED_BY_TRAINER,
    TRAINED,
    WINDOW,
    save_family,
    tokens_of,
)
from paceline_trainer.step.attention import TreeAttention
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.tree import prefix_tree

TOLERANCE = 2e-4


def own_logprobs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of the second token on, by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("family", TRAINED)
def test_training_mode_computes_the_log_probs_of_the_model(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    ids = tokens_of(family, rows=2, columns=3 * WINDOW)
    ids[1, : 2 * WINDOW] = ids[0, : 2 * WINDOW]
    expected = own_logprobs(folder, ids)
    policy = load_policy(str(folder))
    policy.train()
    num, start = ids.shape[1], 2 * WINDOW
    places = torch.arange(2 * num).view(2, num)[:, :-1].reshape(-1)
    targets = ids[:, 1:].reshape(-1)
    with torch.no_grad():
        padded = policy(ids, None, places, targets, 1.0).logprobs.view(2, -1)
        assert torch.allclose(padded, expected, atol=TOLERANCE)
        if "tree" not in policy.layouts:
            return
        tree = TreeAttention(prefix_tree(np.array([num, num]), np.array([0, start])), ids.device)
        row = torch.cat([ids[0], ids[1, start:]])
        positions = torch.cat([torch.arange(num), torch.arange(start, num)])
        second = torch.cat([torch.arange(start), torch.arange(num, num + num - start)])
        places = torch.cat([torch.arange(num)[:-1], second[:-1]])
        shared = policy(row[None], positions[None], places, targets, 1.0, tree=tree).logprobs
    assert torch.allclose(shared.view(2, -1), expected, atol=TOLERANCE)


@pytest.mark.parametrize("family", REFUSED_BY_TRAINER)
def test_a_family_that_would_train_on_others_is_refused(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    with pytest.raises(PacelineError, match="model"):
        load_policy(str(folder))


@pytest.mark.parametrize("family", NOISY)
def test_no_family_draws_random_numbers_in_training(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path, noise=0.5)
    ids = tokens_of(family, rows=1, columns=6)
    expected = own_logprobs(folder, ids)[0]
    policy = load_policy(str(folder))
    policy.train()
    for _ in range(3):
        found = policy(ids, None, torch.arange(5), ids[0, 1:], 1.0).logprobs
        assert torch.allclose(found, expected, atol=TOLERANCE)
