"""The contract of engines, on all built-in ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.plugins import Engine, registry
from paceline.testing.engine_contract import CHECKS, Check, same_seed_same_answer
from paceline.testing.engines import Answers
from paceline_harness.sglang import FakeSglang

VOCAB, CONTEXT = 32, 256
OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"flush_s": 0.01},
    "simulated": {
        "vocab_size": VOCAB,
        "decode_tokens_per_s": 400.0,
        "length": {"mean": 10_000.0},
        "tick_s": 0.002,
        "flush_s": 0.01,
        # Goes on with the ticks alone: no answer is over because the process stood still.
        "clock": count(0.0, 0.002).__next__,
    },
}


SEEDED = [*sorted(OPTIONS)]
ALL = [*SEEDED, "fake-0.5.6", "fake-0.5.23", pytest.param("sglang", marks=pytest.mark.sglang)]


@asynccontextmanager
async def options_of(name: str, request: Any) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """An engine's name and options, with its server running."""
    if name in OPTIONS:
        yield name, OPTIONS[name]
    elif name == "sglang":
        url = request.getfixturevalue("sglang_url")
        yield (
            "sglang",
            {
                "settings": {"url": url, "shared_memory": True},
                "startup_timeout_s": 60,
            },
        )
    else:
        fake = FakeSglang(vocab_size=VOCAB, context=CONTEXT + 8, version=name.removeprefix("fake-"))
        url = await fake.start()
        yield "sglang", {"settings": {"url": url}}
        await fake.stop()


@pytest.fixture(params=ALL)
async def out(request: Any, model: Any, model_dir: Path) -> AsyncGenerator[Answers]:
    async with options_of(request.param, request) as (kind, options):
        make: Any = registry.find("engines", kind)
        engine: Engine = make(
            model_dir=model_dir,
            dtype="float32",
            max_context=CONTEXT,
            max_concurrent=16,
            threads=1,
            tokenizer_dir=None,
            job_id="job",
            **options,
        )
        await engine.start()
        yield Answers(engine, model)
        await engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(out: Answers, check: Check) -> None:
    await check(out)


@pytest.mark.parametrize("out", SEEDED, indirect=True)
async def test_same_seed_same_answer(out: Answers) -> None:
    await same_seed_same_answer(out)
