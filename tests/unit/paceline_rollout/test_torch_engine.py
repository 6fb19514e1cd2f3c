from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import Qwen2Config

from paceline.errors import InvalidError
from paceline.plugins import EngineRequest
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines.torch.model import TorchModel

Ask = Callable[..., EngineRequest]
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12], list(range(20))]


def reference(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
async def test_greedy_equals_generate(kind: str, model_of: Any, open_torch: Any, request_of: Ask):
    model = model_of(kind)
    async with open_torch(model) as out:
        asked = [request_of(str(i), p, temperature=0.0) for i, p in enumerate(PROMPTS)]
        await out.run(*asked)
        for name, prompt in enumerate(PROMPTS):
            wanted = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert out.tokens(str(name)) == wanted[0, len(prompt) :].tolist()
            assert out.end(str(name)).finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_logprobs_equal_a_full_forward(
    kind: str, model_of: Any, open_torch: Any, request_of: Ask
):
    model = model_of(kind)
    async with open_torch(model) as out:
        asked = [
            request_of(f"{i}-{j}", p, temperature=0.7, seed=10 * i + j, max_tokens=30)
            for i, p in enumerate(PROMPTS)
            for j in range(4)
        ]
        await out.run(*asked)
        for one in asked:
            tokens = out.tokens(one.request_id)
            wanted = reference(model, list(one.tokens), tokens, 0.7)
            assert out.logprobs(one.request_id) == pytest.approx(wanted, abs=1e-5)
            assert out.versions(one.request_id) == [0] * 30
        # All but the last token of a prompt once, the last one for every sample.
        shared = sum(len(prompt) - 1 for prompt in PROMPTS)
        assert out.engine.status().prompt_tokens == shared + len(asked)


async def test_tokens_do_not_depend_on_other_requests(
    model_of: Any, open_torch: Any, request_of: Ask
):
    model = model_of()
    probe = [
        request_of(f"p{i}", p, seed=i, max_tokens=25, top_p=0.9) for i, p in enumerate(PROMPTS)
    ]
    async with open_torch(model, max_concurrent=8) as out:
        for one in probe:
            await out.run(one)
        alone = {one.request_id: out.tokens(one.request_id) for one in probe}
    crowd = [
        request_of(f"c{i}", PROMPTS[i % 5], seed=100 + i, max_tokens=1 + i % 17) for i in range(60)
    ]
    async with open_torch(model, max_concurrent=8) as out:
        mixed = [x for i, one in enumerate(probe) for x in (*crowd[12 * i : 12 * i + 12], one)]
        await out.run(*mixed)
        assert {name: out.tokens(name) for name in alone} == alone
        assert all(len(out.tokens(c.request_id)) == c.sampling.max_tokens for c in crowd)


async def test_seeds_differ_and_a_resumed_request_continues(
    model_of: Any, open_torch: Any, request_of: Ask
):
    async with open_torch(model_of()) as out:
        group = [request_of(str(i), [1, 2], seed=i, max_tokens=20) for i in range(8)]
        await out.run(*group)
        answers = {tuple(out.tokens(str(i))) for i in range(8)}
        assert len(answers) == 8
        half = [1, 2, *out.tokens("3")[:10]]
        await out.run(request_of("resumed", half, seed=3, max_tokens=10))
        assert out.tokens("resumed") == out.tokens("3")[10:]


async def test_cache_grows_and_rows_are_compacted(model_of: Any, open_torch: Any, request_of: Ask):
    model = model_of()
    async with open_torch(model, max_context=120, max_concurrent=20) as out:
        asked = [
            request_of(str(i), PROMPTS[i % 5], seed=i, max_tokens=3 + 7 * (i % 14))
            for i in range(40)
        ]
        await out.run(*asked)
        for one in asked:
            tokens = out.tokens(one.request_id)
            assert len(tokens) == one.sampling.max_tokens
            wanted = reference(model, list(one.tokens), tokens, 1.0)
            assert out.logprobs(one.request_id) == pytest.approx(wanted, abs=1e-5)


async def test_small_cache_budget_makes_requests_wait(
    model_of: Any, open_torch: Any, request_of: Ask
):
    async with open_torch(model_of(), cache_bytes=1) as out:
        await out.run(*(request_of(str(i), [1, 2], seed=i) for i in range(5)))
        assert all(len(out.tokens(str(i))) == 8 for i in range(5))


async def test_stop_tokens_and_context_end_a_request(
    model_of: Any, open_torch: Any, request_of: Ask
):
    async with open_torch(model_of(), max_context=16) as out:
        await out.run(request_of("free", [1, 2], temperature=0.0, max_tokens=100))
        free = out.tokens("free")
        assert len(free) == 14
        assert out.end("free").finish_reason == "length"
        stops = (min(set(range(37)) - set(free)), free[4])
        await out.run(request_of("stop", [1, 2], temperature=0.0, stop_tokens=stops))
        assert out.tokens("stop") == free[: free.index(free[4]) + 1]
        assert out.end("stop").finish_reason == "stop"
        assert out.end("stop").matched_stop == str(free[4])


def save_words(tmp_path: Any) -> None:
    """A tokenizer whose token i reads `wi `."""
    words = {f"w{i} ": i for i in range(37)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))


async def test_stop_strings(model_of: Any, open_torch: Any, request_of: Ask, tmp_path: Any):
    save_words(tmp_path)
    async with open_torch(model_of()) as out:
        await out.run(request_of("free", [1, 2], seed=5, max_tokens=20))
        free = out.tokens("free")
        stop = f"w{free[6]} w{free[7]} "
        stopped = request_of("stop", [1, 2], seed=5, max_tokens=20, stop_strings=("zzz", stop))
        await out.run(stopped, request_of("other", [3], seed=6, max_tokens=20))
        assert out.tokens("stop") == free[:8]
        assert out.end("stop").matched_stop == stop
        assert len(out.tokens("other")) == 20


async def test_a_stop_string_that_began_at_another_worker(
    model_of: Any, open_torch: Any, request_of: Ask, tmp_path: Any
):
    """It matches; one that began in the prompt does not."""
    save_words(tmp_path)
    async with open_torch(model_of()) as out:
        await out.run(request_of("free", [1, 2], seed=5, max_tokens=20))
        free = out.tokens("free")
        knobs: dict[str, Any] = {
            "seed": 5,
            "max_tokens": 13,
            "stop_strings": (f"w{free[5]} w{free[6]} w{free[7]} ",),
        }
        moved = request_of("moved", [1, 2, *free[:7]], sampled=7, **knobs)
        partly = request_of("partly", [1, 2, *free[:7]], sampled=1, **knobs)
        await out.run(moved, partly)
        assert out.tokens("moved") == free[7:8]
        assert out.end("moved").finish_reason == "stop"
        assert out.tokens("partly") == free[7:20]
        assert out.end("partly").finish_reason == "length"


async def test_long_answers_stream(model_of: Any, open_torch: Any, request_of: Ask):
    async with open_torch(model_of(), max_context=128, flush_s=0.0) as out:
        await out.run(request_of("a", [1], seed=1, max_tokens=100))
        assert len(out.parts["a"]) > 5
        assert len(out.tokens("a")) == len(out.logprobs("a")) == len(out.versions("a")) == 100


async def test_an_aborted_request_returns_all_sampled_tokens(
    model_of: Any, open_torch: Any, request_of: Ask
):
    async with open_torch(model_of(), max_context=120, flush_s=60.0) as out:
        out.engine.submit([request_of(name, [1], max_tokens=110) for name in "ab"])
        async with asyncio.timeout(PATIENCE_S):
            while out.engine.status().tokens_generated < 10:
                await asyncio.sleep(0)
        out.engine.abort(["a", "b"])
        await out.finish("ab")
        got = len(out.tokens("a")) + len(out.tokens("b"))
        assert got == out.engine.status().tokens_generated


async def test_bfloat16_stays_close(model_of: Any, open_torch: Any, request_of: Ask):
    model = model_of()
    async with open_torch(model, dtype="bfloat16") as out:
        await out.run(request_of("a", [1, 2, 3], seed=1, max_tokens=20))
        wanted = reference(model, [1, 2, 3], out.tokens("a"), 1.0)
        assert out.logprobs("a") == pytest.approx(wanted, abs=0.25)


async def test_weights_that_are_not_numbers_end_requests(
    model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask
):
    model = model_of()
    async with open_torch(model) as out:
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)
        await out.engine.load(snapshot_of(model, version=1), "in_flight")
        await out.run(request_of("a", [1, 2]))
        assert out.end("a").error_code == "INTERNAL"
        assert "version 1" in out.end("a").error


async def test_foreign_snapshot_leaves_the_old_version(
    model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask
):
    async with open_torch(model_of()) as out:
        with pytest.raises(InvalidError, match="unknown to this model"):
            await out.engine.load(snapshot_of(model_of("gpt2"), version=1), "in_flight")
        assert out.engine.status().version == 0
        await out.run(request_of("a", [1, 2], seed=1))
        assert out.versions("a") == [0] * 8


async def test_score_is_the_canary(model_of: Any, open_torch: Any, snapshot_of: Any):
    model = model_of("qwen2")
    async with open_torch(model) as out:
        (sequence,) = snapshot_of(model, canary=(3, 1, 4, 1, 5)).header.canary.sequences
        got = await out.engine.score(sequence.tokens)
        assert got == pytest.approx(list(sequence.logprobs), abs=1e-5)


def test_model_that_cannot_be_served_is_refused_by_name(tmp_path: Any):
    Qwen2Config(vocab_size=9, max_position_embeddings=32).save_pretrained(tmp_path)
    with pytest.raises(InvalidError, match="max_context: 64"):
        TorchModel(model_dir=tmp_path, dtype="float32", max_context=64, device="cpu")
