"""The simulated engine answers with texts, where it is asked to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline.enums import FinishReason
from paceline.errors import InvalidError
from paceline.plugins import EngineRequest
from paceline.types import SamplingParams
from paceline.weights.canary import NO_CANARY, Canary
from paceline_rollout.engines.simulated import SimulatedEngine

LETTERS = "_abcdefg"
STOP = 0
REPLIES = ["abc", "de", "g"]


@dataclass
class Header:
    version: int = 0
    step: int = 0
    tied: tuple[str, ...] = ()
    canary: Canary = NO_CANARY


class Snapshot:
    header = Header()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def engine(folder: Path | None) -> SimulatedEngine:
    common: dict[str, Any] = {"model_dir": None, "dtype": "float32", "threads": 1, "job_id": "job"}
    return SimulatedEngine(
        **common,
        max_context=64,
        max_concurrent=8,
        tokenizer_dir=folder,
        vocab_size=len(LETTERS),
        tick_s=0.001,
        decode_tokens_per_s=10_000.0,
        replies=REPLIES,
    )


async def answered(folder: Path, *requests: EngineRequest) -> dict[str, list[int]]:
    """The tokens of each request, by its id."""
    made, found = engine(folder), dict[str, list[int]]()
    await made.start()
    await made.load(Snapshot(), "in_flight")
    made.submit(requests)
    ended = 0
    async for batch in made.emissions():
        for output in batch:
            found.setdefault(output.request_id, []).extend(output.tokens)
            ended += output.finish_reason is not None
            assert output.finish_reason in (None, FinishReason.STOP, FinishReason.LENGTH)
        if ended == len(requests):
            break
    await made.close()
    return found


def ask(name: str, seed: int, *, tokens: tuple[int, ...] = (1,), **more: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=more.pop("max_tokens", 8), stop_tokens=(STOP,), seed=seed)
    return EngineRequest(name, tokens, sampling, **more)


def spelt(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


async def test_each_answer_is_one_of_them_and_ends(folder: Path) -> None:
    found = await answered(folder, *(ask(str(seed), seed) for seed in range(40)))
    assert {spelt(tokens) for tokens in found.values()} == {f"{text}_" for text in REPLIES}


async def test_the_seed_chooses_and_another_worker_goes_on_with_it(folder: Path) -> None:
    whole = await answered(folder, *(ask(str(seed), seed) for seed in range(8)))
    parts = [
        ask(name, int(name), tokens=(1, *tokens[:1]), sampled=1) for name, tokens in whole.items()
    ]
    rest = await answered(folder, *parts)
    assert {name: tokens[:1] + rest[name] for name, tokens in whole.items()} == whole


async def test_a_long_one_is_cut(folder: Path) -> None:
    found = await answered(folder, *(ask(str(seed), seed, max_tokens=2) for seed in range(40)))
    assert {spelt(tokens) for tokens in found.values()} == {"ab", "de", "g_"}


def test_without_a_tokenizer_there_are_none() -> None:
    with pytest.raises(InvalidError, match=r"engine\.replies: the model has no tokenizer"):
        engine(None)
