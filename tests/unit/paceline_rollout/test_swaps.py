from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.errors import StateError
from paceline.plugins import EngineRequest

Ask = Callable[..., EngineRequest]
LONG = {"max_tokens": 90}
OPTIONS: dict[str, Any] = {"max_context": 100, "flush_s": 0.0}


def logprobs(model: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    return logp.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("activation", ["in_flight", "interrupt"])
async def test_running_requests_continue_with_the_new_version(
    activation: str, model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask, hold: Any
):
    old, new = model_of(seed=0), model_of(seed=1)
    async with open_torch(old, **OPTIONS) as out:
        staging = snapshot_of(new, version=1)
        midway = await hold.midway(out.engine, request_of("a", [1, 2], **LONG))
        load = asyncio.ensure_future(out.engine.load(staging, activation))
        await midway.ordered(2)  # to expect the swap, and that it is ready
        midway.release()
        await load
        await out.finish(["a"])
        versions, tokens = out.versions("a"), out.tokens("a")
        cut = versions.index(1)
        assert versions == [0] * cut + [1] * (90 - cut)
        assert 5 <= cut < 90
        got, theirs = out.logprobs("a"), logprobs(new, [1, 2, *tokens])[1:]
        assert got[:cut] == pytest.approx(logprobs(old, [1, 2, *tokens])[1:][:cut], abs=1e-5)
        # Only a recomputed prefix makes the new version's log-probs those of a full forward.
        recomputed = got[cut:] == pytest.approx(theirs[cut:], abs=1e-5)
        assert recomputed is (activation == "interrupt")


async def test_an_engine_that_goes_back_computes_running_requests_anew(
    model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask, hold: Any
):
    right, wrong = model_of(seed=0), model_of(seed=1)
    async with open_torch(wrong, load=False, **OPTIONS) as out:
        await out.engine.load(snapshot_of(wrong, version=2), "in_flight")
        with pytest.raises(StateError, match="version 1 is too old to load: version 2 is active"):
            await out.engine.load(snapshot_of(right, version=1), "in_flight")
        midway = await hold.midway(out.engine, request_of("b", [1, 2], **LONG))
        back = asyncio.ensure_future(out.engine.roll_back(snapshot_of(right, version=1)))
        await midway.ordered(2)
        midway.release()
        await back
        assert out.engine.status().version == 1
        await out.finish(["b"])
        cut = out.versions("b").index(1)
        wanted = logprobs(right, [1, 2, *out.tokens("b")])[1:]
        assert out.logprobs("b")[cut:] == pytest.approx(wanted[cut:], abs=1e-5)


async def test_new_requests_use_no_prefix_of_the_old_version(
    model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask
):
    new = model_of(seed=1)
    async with open_torch(model_of(seed=0)) as out:
        await out.run(request_of("a", [1, 2, 3], seed=1))
        await out.engine.load(snapshot_of(new, version=1), "in_flight")
        await out.run(request_of("b", [1, 2, 3], seed=1))
        wanted = logprobs(new, [1, 2, 3, *out.tokens("b")])[2:]
        assert out.logprobs("b") == pytest.approx(wanted, abs=1e-5)


async def test_a_newer_swap_displaces_one_that_waits(
    model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask, hold: Any
):
    model = model_of()
    snapshots = [snapshot_of(model, version=version) for version in (1, 2)]
    async with open_torch(model, max_concurrent=1, **OPTIONS) as out:
        names = [f"held-{n}" for n in range(6)]
        held = [request_of(name, [1], pinned=0, **LONG) for name in names]
        begun = await hold.midway(out.engine, *held)
        loads = [asyncio.ensure_future(out.engine.load(snapshots[0], "in_flight"))]
        await begun.ordered(2)
        waits = hold(out.engine)
        waiting = asyncio.ensure_future(waits.after(8))
        await begun.ordered(3)
        begun.release()
        await waiting
        assert not loads[0].done()
        loads.append(asyncio.ensure_future(out.engine.load(snapshots[1], "in_flight")))
        await waits.ordered(2)
        waits.release()
        first, second = await asyncio.gather(*loads, return_exceptions=True)
        assert isinstance(first, StateError)
        assert second is None
        assert out.engine.status().version == 2
        with pytest.raises(StateError, match="version 2 is active"):
            await out.engine.load(snapshot_of(model, version=1), "in_flight")
