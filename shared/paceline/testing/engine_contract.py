"""Contract tests for engines, independent of the inference backend.

`CHECKS` are coroutine functions that take the `Answers` of a started engine; each needs a new
engine. `fulfils_the_contract` runs them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.enums import FinishReason
from paceline.errors import InvalidError
from paceline.plugins import Engine, EngineRequest, RollsBack
from paceline.testing.common import expect
from paceline.testing.engines import Answers, ask

Check = Callable[[Answers], Awaitable[None]]
CLOSE_S = 60.0


async def fulfils_the_contract(
    make: Callable[[], Engine], *, model: Any = None, seeded: bool = True
) -> None:
    """Run every check on a new engine.

    Args:
        make: creates an engine with capacity for 16 concurrent requests, a `max_context` of at
            least 256 and a vocabulary of at least 4, that takes some milliseconds per token.
        model: torch model whose weights it loads; None if the engine ignores weights.
        seeded: whether the same request seed yields the same tokens.
    """
    for check in (*CHECKS, *((same_seed_same_answer,) if seeded else ())):
        engine = make()
        await engine.start()
        try:
            await check(Answers(engine, model))
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
        finally:
            await engine.close()


async def generates_after_the_first_version(out: Answers) -> None:
    """Requests wait for weights; each token has its version and its log-prob."""
    vocab_size = out.engine.status().vocab_size
    out.engine.submit([ask(str(i), seed=i) for i in range(40)])
    await asyncio.sleep(0.05)
    expect(not out.parts, "tokens arrive before any weights are loaded")
    await out.swap(3)
    for name in map(str, range(40)):
        reason = (await out.end(name)).finish_reason
        tokens = out.tokens(name)
        expect(
            (reason, len(tokens)) == (FinishReason.LENGTH, 8),
            f"{len(tokens)} tokens of 8, then {reason}",
        )
        expect(all(0 <= t < vocab_size for t in tokens), f"{tokens} are not in the vocabulary")
        expect(out.versions(name) == [3] * 8, f"versions {out.versions(name)} for eight tokens")
        logprobs = out.logprobs(name)
        expect(len(logprobs) == 8 and max(logprobs) <= 0, f"log-probs {logprobs}")
    now = out.engine.status()
    counts = (now.version, now.running, now.waiting, now.tokens_generated)
    expect(counts == (3, 0, 0, 320), f"version, running, waiting, tokens are reported as {counts}")


async def same_seed_same_answer(out: Answers) -> None:
    """A token is a function of weights, context, seed and position."""
    await out.swap(0)
    out.engine.submit([ask("a", seed=1), ask("b", seed=1), ask("c", seed=2)])
    for name in "abc":
        await out.end(name)
    expect(out.tokens("a") == out.tokens("b"), "the same seed yields two different answers")
    expect(out.tokens("b") != out.tokens("c"), "two seeds yield the same answer")


async def streams_before_the_end(out: Answers) -> None:
    """A long answer arrives in parts."""
    await out.swap(0)
    out.engine.submit([ask("a", max_tokens=200)])
    await out.until("a", 1)
    await out.end("a")
    expect(len(out.parts["a"]) > 1, "200 tokens arrive all at once")
    expect(len(out.tokens("a")) == 200, f"{len(out.tokens('a'))} tokens of 200")


async def abort_keeps_what_there_is(out: Answers) -> None:
    """Tokens sampled before an abort are emitted; other requests continue."""
    await out.swap(0)
    most = {request.request_id: request.sampling.max_tokens for request in crowd()}
    out.engine.submit([*crowd(), ask("later", pinned=7), ask("b")])
    await out.until("c0", 3)
    seen = {name: len(out.tokens(name)) for name in most}
    out.engine.abort([*most, "later", "unknown"])
    aborted = [name for name in most if (await out.end(name)).finish_reason is FinishReason.ABORT]
    kept = {name: len(out.tokens(name)) for name in aborted}
    expect(any(kept.values()), "the tokens of partial answers are lost")
    # Complete if the abort arrived after its last token.
    within = all(seen[name] <= kept[name] <= most[name] for name in aborted)
    expect(within, f"{seen} tokens before the abort, {kept} after it")
    expect(
        (await out.end("later")).finish_reason is FinishReason.ABORT,
        "a queued request must be aborted too",
    )
    expect(
        (await out.end("b")).finish_reason is FinishReason.LENGTH,
        "a request that was not aborted must finish normally",
    )


async def swaps_in_flight(out: Answers) -> None:
    """Running requests continue with the new weights and keep their KV cache."""
    await _swap_while_running(out, "in_flight")


async def swaps_with_interruption(out: Answers) -> None:
    """Running requests continue with the new weights."""
    await _swap_while_running(out, "interrupt")


async def _swap_while_running(out: Answers, activation: str) -> None:
    await out.swap(0)
    most = {request.request_id: request.sampling.max_tokens for request in crowd()}
    out.engine.submit(crowd())
    await out.until("c0", 3)
    await out.swap(1, activation)
    out.engine.abort([name for name in most if not out.tokens(name)])
    whole = [name for name in most if (await out.end(name)).finish_reason is FinishReason.LENGTH]
    for name in whole:
        versions = out.versions(name)
        expect(len(versions) == most[name], f"{len(versions)} versions for {most[name]} tokens")
        expect(versions == sorted(versions), f"versions go back: {versions}")
    both = any(set(out.versions(name)) == {0, 1} for name in whole)
    expect(both, "no running request has tokens of both versions")


async def goes_back_if_it_can(out: Answers) -> None:
    """Older weights are loaded only by `roll_back`, which engines may lack."""
    await out.swap(5)
    if not isinstance(out.engine, RollsBack):
        return
    await out.engine.roll_back(out.weights(4))
    version = out.engine.status().version
    expect(version == 4, f"version 4 was rolled back to, and version {version} is active")
    out.engine.submit([ask("a")])
    await out.end("a")
    expect(out.versions("a") == [4] * 8, f"versions {out.versions('a')} for eight tokens")
    await out.swap(6)
    version = out.engine.status().version
    expect(version == 6, f"version 6 was loaded, and version {version} is active")


async def swaps_at_a_boundary(out: Answers) -> None:
    """Each request has one version, and the swap happens although a request is always running."""
    await out.swap(0)
    out.engine.submit([ask("a", max_tokens=100)])
    await out.until("a", 3)
    swap = asyncio.create_task(out.swap(1, "at_boundary"))
    names = ["a"]
    # Each starts while the previous one runs, so the swap must hold back new requests.
    while not swap.done():
        names.append(f"b{len(names)}")
        out.engine.submit([ask(names[-1], max_tokens=100)])
        await out.until(names[-1], 3)
    await swap
    out.engine.submit([ask("last")])
    for name in [*names, "last"]:
        await out.end(name)
    versions = [set(out.versions(name)) for name in [*names, "last"]]
    expect(all(len(found) == 1 for found in versions), f"two versions in one answer: {versions}")
    expect(versions == sorted(versions, key=max), f"versions go back: {versions}")
    expect((versions[0], versions[-1]) == ({0}, {1}), f"first and last requests have {versions}")


async def pinned_requests_have_their_version(out: Answers) -> None:
    """A pinned request finishes before a swap, waits for its version, or ends with an error."""
    await out.swap(1)
    out.engine.submit([ask("now", pinned=1, max_tokens=100), ask("next", pinned=2)])
    out.engine.submit([ask("gone", pinned=0)])
    code = (await out.end("gone")).error_code
    expect(
        code == "FAILED_PRECONDITION",
        f"a request pinned to a version that is gone ends with {code!r}",
    )
    await out.until("now", 3)
    await out.swap(2)
    expect(set(out.versions("now")) == {1}, f"pinned to 1, answered by {out.versions('now')}")
    await out.end("next")
    expect(set(out.versions("next")) == {2}, f"pinned to 2, answered by {out.versions('next')}")
    out.engine.submit([ask("skipped", pinned=3)])
    await out.swap(4)
    error = (await out.end("skipped")).error
    expect(
        "pinned_version: 3 is gone" in error,
        f"a request pinned to a skipped version ends with {error!r}",
    )


def bad_requests(vocab_size: int, max_context: int) -> list[tuple[EngineRequest, str]]:
    """Requests that an engine of this size must reject, each with part of the error text."""
    return [
        (ask("x", ()), "tokens: is empty"),
        (ask("x", (1, vocab_size)), f"tokens: id {vocab_size} is not in the vocabulary"),
        (ask("x", (-1,)), "tokens: id -1"),
        (ask("x", [1] * max_context), f"tokens: {max_context} of them; allowed: fewer than"),
        (ask("x", sampled=3), "sampled: 3; allowed: 0 to 2"),
        (ask("x", sampled=-1), "sampled: -1"),
        (ask("x", max_tokens=0), "sampling.max_tokens: 0"),
        (ask("x", temperature=float("nan")), "sampling.temperature: nan"),
        (ask("x", temperature=-1.0), "sampling.temperature: -1.0"),
        (ask("x", temperature=1e9), "sampling.temperature: 1000000000.0; allowed: 0 or"),
        (ask("x", top_p=0.0), "sampling.top_p: 0.0; allowed: above 0"),
        (ask("x", top_k=-1), "sampling.top_k: -1"),
        (ask("x", min_p=1.5), "sampling.min_p: 1.5"),
        (ask("x", stop_tokens=(vocab_size,)), f"sampling.stop_tokens: id {vocab_size}"),
        (ask("x", stop_strings=("",)), "sampling.stop_strings"),
        (ask("x", seed=1 << 64), "sampling.seed"),
    ]


async def bad_requests_end_with_an_error(out: Answers) -> None:
    """They fail with the text of `paceline.plugins.request_problem`; others are served."""
    await out.swap(0)
    now = out.engine.status()
    for number, (bad, message) in enumerate(bad_requests(now.vocab_size, now.max_context)):
        bad.request_id, good = f"bad{number}", ask(f"good{number}")
        out.engine.submit([bad, good])
        end = await out.end(bad.request_id)
        outcome = (end.finish_reason, end.error_code)
        expect(
            outcome == (FinishReason.ERROR, "INVALID_ARGUMENT"),
            f"{message}: it ends with {outcome}",
        )
        expect(message in end.error, f"the error is {end.error!r}, without {message!r}")
        reason = (await out.end(good.request_id)).finish_reason
        expect(
            reason is FinishReason.LENGTH, f"next to a bad request a good one ends with {reason!r}"
        )


async def unknown_activations_are_refused(out: Answers) -> None:
    """With an `InvalidError` that lists the known ones."""
    try:
        await out.swap(0, "someday")
    except InvalidError as error:
        known = "in_flight, interrupt, at_boundary" in error.message
        expect(known, f"the error does not list what is allowed: {error}")
        return
    raise AssertionError("an activation 'someday' is accepted")


async def close_ends_everything(out: Answers) -> None:
    """Every request ends, and so does the stream of emissions."""
    await out.swap(0)
    out.engine.submit([ask("a", max_tokens=250), ask("b", pinned=9)])
    await out.until("a", 1)
    await out.engine.close()
    async with asyncio.timeout(CLOSE_S):
        await out.task
    expect(out.ended("a"), "a running request did not end")
    expect(out.ended("b"), "a queued request did not end")


def crowd() -> list[EngineRequest]:
    """Requests that keep any engine busy for seconds, at different stages of completion."""
    return [ask(f"c{n}", max_tokens=100 + 37 * n % 150) for n in range(200)]


CHECKS: tuple[Check, ...] = (
    generates_after_the_first_version,
    streams_before_the_end,
    abort_keeps_what_there_is,
    swaps_in_flight,
    swaps_with_interruption,
    swaps_at_a_boundary,
    goes_back_if_it_can,
    pinned_requests_have_their_version,
    bad_requests_end_with_an_error,
    unknown_activations_are_refused,
    close_ends_everything,
)
