"""The torch engine samples with each family's own log-probs, or refuses to start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.errors import InvalidError
from paceline.models.model_probe import problem
from paceline.plugins import EngineRequest
from paceline_harness.models.families import (
    NAMES,
    REFUSED_BY_ENGINE,
    SERVED,
    UNSHARED,
    WINDOW,
    config_of,
    save_family,
    tokens_of,
)
from paceline_rollout.engines.torch.model import TorchModel, read_config
from paceline_rollout.engines.torch.probe import shares_prefixes
from paceline_rollout.engines.torch.submit_probe import check

TOLERANCE = 2e-4


@pytest.mark.parametrize("family", SERVED)
async def test_sampled_log_probs_are_those_of_the_model(
    family: str, tmp_path: Path, open_torch: Any, request_of: Callable[..., EngineRequest]
) -> None:
    folder = save_family(family, tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    prompt = tokens_of(family, rows=1, columns=2 * WINDOW)[0].tolist()
    # Chunked prefill, a prefix that several requests share, one that they do not, many steps.
    knobs: dict[str, Any] = {"max_tokens": 2 * WINDOW, "temperature": 1.0}
    requests = [
        request_of("short", prompt[:5], seed=1, **knobs),
        request_of("one", prompt, seed=2, **knobs),
        request_of("two", prompt, seed=3, **knobs),
        request_of("longer", [*prompt, *prompt[:4]], seed=4, **knobs),
    ]
    async with open_torch(model, prefill_tokens=5, least_shared=WINDOW) as found:
        await found.run(*requests)
        scored = await found.engine.score(prompt)
    assert scored == pytest.approx(own_logprobs(model, prompt, 1), abs=TOLERANCE)
    for request in requests:
        tokens = [*request.tokens, *found.tokens(request.request_id)]
        assert len(tokens) == len(request.tokens) + 2 * WINDOW
        expected = own_logprobs(model, tokens, len(request.tokens))
        assert found.logprobs(request.request_id) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("family", NAMES)
def test_the_configuration_alone_tells_whether_a_family_is_served(
    family: str, tmp_path: Path
) -> None:
    config_of(family).save_pretrained(tmp_path)
    why = problem(read_config, check, tmp_path)
    assert bool(why) == (family in REFUSED_BY_ENGINE), why


@pytest.mark.parametrize("family", REFUSED_BY_ENGINE)
def test_a_family_that_would_be_computed_wrong_is_refused(family: str, tmp_path: Path) -> None:
    config_of(family).save_pretrained(tmp_path)
    with pytest.raises(InvalidError, match=r"model|sampling\.max_context"):
        TorchModel(model_dir=tmp_path, dtype="float32", max_context=64, device="cpu")


@pytest.mark.parametrize("family", ["llama", "mistral_window", *UNSHARED])
def test_prefixes_are_read_in_place_where_attention_reads_the_cache(
    family: str, tmp_path: Path
) -> None:
    config_of(family).save_pretrained(tmp_path)
    model = TorchModel(model_dir=tmp_path, dtype="float32", max_context=64, device="cpu")
    assert model.shares_prefixes == (family not in UNSHARED)


def test_what_is_tried_is_small(tmp_path: Path) -> None:
    config = config_of("mistral_window")
    config.num_hidden_layers, config.sliding_window, config.vocab_size = 1000, 4096, 1 << 20
    config.max_position_embeddings, config.pad_token_id = 1 << 20, 7000
    config.save_pretrained(tmp_path)
    assert shares_prefixes(AutoConfig.from_pretrained(tmp_path), "cpu")


def own_logprobs(model: Any, tokens: list[int], start: int) -> list[float]:
    """Of the tokens from `start` on, by transformers alone."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    logp = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return logp[start - 1 :].tolist()
