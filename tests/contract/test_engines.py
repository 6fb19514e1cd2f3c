"""What every engine promises, whatever computes behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline import plugins
from paceline.errors import InvalidError
from paceline.interfaces import Engine, Generation
from paceline.testing.engines import Answers, ask
from paceline.testing.sglang import FakeSglang

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
    """An engine's name and options, with the server behind it running."""
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
        make: Any = plugins.find("engines", kind)
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


def crowd() -> list[Generation]:
    """Work for seconds, whatever the engine; some of it is half done at each moment."""
    return [ask(f"c{n}", max_tokens=100 + 37 * n % 150) for n in range(200)]


async def test_generates_after_the_first_version(out: Answers):
    out.engine.submit([ask(str(i), seed=i) for i in range(40)])
    await asyncio.sleep(0.05)
    assert not out.parts
    await out.swap(3)
    for name in map(str, range(40)):
        end = await out.end(name)
        assert end.finish_reason == "length"
        tokens = out.tokens(name)
        assert len(tokens) == 8
        assert all(0 <= t < VOCAB for t in tokens)
        assert out.versions(name) == [3] * 8
        assert all(x <= 0 for e in out.parts[name] for x in e.logprobs)
    now = out.engine.status()
    assert (now.running, now.waiting, now.tokens_generated) == (0, 0, 320)
    assert (now.version, now.vocab_size, now.max_context) == (3, VOCAB, CONTEXT)


@pytest.mark.parametrize("out", SEEDED, indirect=True)
async def test_same_seed_same_answer(out: Answers):
    await out.swap(0)
    out.engine.submit([ask("a", seed=1), ask("b", seed=1), ask("c", seed=2)])
    for name in "abc":
        await out.end(name)
    assert out.tokens("a") == out.tokens("b") != out.tokens("c")


async def test_streams_before_the_end(out: Answers):
    await out.swap(0)
    out.engine.submit([ask("a", max_tokens=200)])
    await out.until("a", 1)
    await out.end("a")
    assert len(out.parts["a"]) > 1
    assert len(out.tokens("a")) == 200


async def test_abort_keeps_what_there_is(out: Answers):
    await out.swap(0)
    most = {request.request_id: request.sampling.max_tokens for request in crowd()}
    out.engine.submit([*crowd(), ask("later", pinned=7), ask("b")])
    await out.until("c0", 3)
    seen = {name: len(out.tokens(name)) for name in most}
    out.engine.abort([*most, "later", "unknown"])
    aborted = [name for name in most if (await out.end(name)).finish_reason == "abort"]
    kept = {name: len(out.tokens(name)) for name in aborted}
    assert any(kept.values())
    # Whole, if the abort met it between its last token and its end.
    assert all(seen[name] <= kept[name] <= most[name] for name in aborted)
    assert (await out.end("later")).finish_reason == "abort"
    assert (await out.end("b")).finish_reason == "length"


@pytest.mark.parametrize("activation", ["in_flight", "interrupt"])
async def test_swap_while_running(out: Answers, activation: str):
    await out.swap(0)
    most = {request.request_id: request.sampling.max_tokens for request in crowd()}
    out.engine.submit(crowd())
    await out.until("c0", 3)
    await out.swap(1, activation)
    out.engine.abort([name for name in most if not out.tokens(name)])
    whole = [name for name in most if (await out.end(name)).finish_reason == "length"]
    for name in whole:
        versions = out.versions(name)
        assert len(versions) == most[name]
        assert versions == sorted(versions)
    assert any(set(out.versions(name)) == {0, 1} for name in whole)


async def test_at_boundary(out: Answers):
    await out.swap(0)
    out.engine.submit([ask("a", max_tokens=100)])
    await out.until("a", 3)
    swap = asyncio.create_task(out.swap(1, "at_boundary"))
    names = ["a"]
    # Each begins while the one before it runs, so without an end of admission there is no swap.
    while not swap.done():
        names.append(f"b{len(names)}")
        out.engine.submit([ask(names[-1], max_tokens=100)])
        await out.until(names[-1], 3)
    await swap
    out.engine.submit([ask("last")])
    for name in [*names, "last"]:
        await out.end(name)
    versions = [set(out.versions(name)) for name in [*names, "last"]]
    assert all(len(found) == 1 for found in versions)
    assert versions == sorted(versions, key=max)
    assert (versions[0], versions[-1]) == ({0}, {1})


async def test_pinned_requests(out: Answers):
    await out.swap(1)
    out.engine.submit([ask("now", pinned=1, max_tokens=100), ask("next", pinned=2)])
    out.engine.submit([ask("gone", pinned=0)])
    assert (await out.end("gone")).error_code == "FAILED_PRECONDITION"
    await out.until("now", 3)
    await out.swap(2)
    assert set(out.versions("now")) == {1}
    await out.end("next")
    assert set(out.versions("next")) == {2}
    out.engine.submit([ask("skipped", pinned=3)])
    await out.swap(4)
    assert "pinned_version: 3 is gone" in (await out.end("skipped")).error


BAD: list[tuple[Generation, str]] = [
    (ask("x", ()), "tokens: is empty"),
    (ask("x", (1, VOCAB)), f"tokens: id {VOCAB} is not in the vocabulary; allowed: 0 to 31"),
    (ask("x", (-1,)), "tokens: id -1"),
    (ask("x", [1] * CONTEXT), f"tokens: {CONTEXT} of them; allowed: fewer than {CONTEXT}"),
    (ask("x", sampled=3), "sampled: 3; allowed: 0 to 2"),
    (ask("x", sampled=-1), "sampled: -1"),
    (ask("x", max_tokens=0), "sampling.max_tokens: 0"),
    (ask("x", temperature=float("nan")), "sampling.temperature: nan"),
    (ask("x", temperature=-1.0), "sampling.temperature: -1.0"),
    (ask("x", temperature=1e9), "sampling.temperature: 1000000000.0; allowed: 0 or"),
    (ask("x", top_p=0.0), "sampling.top_p: 0.0; allowed: above 0"),
    (ask("x", top_k=-1), "sampling.top_k: -1"),
    (ask("x", min_p=1.5), "sampling.min_p: 1.5"),
    (ask("x", stop_tokens=(99,)), "sampling.stop_tokens: id 99"),
    (ask("x", stop_strings=("",)), "sampling.stop_strings"),
    (ask("x", seed=1 << 64), "sampling.seed"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[m[:30] for _, m in BAD])
async def test_bad_requests_end_with_an_error(out: Answers, bad: Generation, message: str):
    await out.swap(0)
    out.engine.submit([bad, ask("good")])
    end = await out.end("x")
    assert (end.finish_reason, end.error_code) == ("error", "INVALID_ARGUMENT")
    assert message in end.error
    assert (await out.end("good")).finish_reason == "length"


async def test_unknown_activation_is_refused(out: Answers):
    with pytest.raises(InvalidError, match="in_flight, interrupt, at_boundary"):
        await out.swap(0, "someday")


async def test_close_ends_everything(out: Answers):
    await out.swap(0)
    out.engine.submit([ask("a", max_tokens=250), ask("b", pinned=9)])
    await out.until("a", 1)
    await out.engine.close()
    await asyncio.wait_for(out.task, 60)
    assert out.ended("a")
    assert out.ended("b")
