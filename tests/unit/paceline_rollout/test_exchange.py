"""New weights are made while the old ones serve, and take their place all at once or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import InvalidError, PacelineError, StateError
from paceline.plugins import EngineRequest
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.activation import Activation, Gate, Swap
from paceline_rollout.engines.torch.model import TorchModel
from paceline_rollout.engines.torch.scheduler import Scheduler

Ask = Callable[..., EngineRequest]
PROMPT = [3, 1, 4, 1, 5]
LIMIT_S = PATIENCE_S
LONG = {"max_tokens": 90}
OPTIONS: dict[str, Any] = {"max_context": 100, "flush_s": 0.0}


class Held:
    """A snapshot whose tensors come only when they may, and then perhaps fail."""

    def __init__(self, snapshot: Any, error: Exception | None = None) -> None:
        self.header = snapshot.header
        self.asked, self.may = threading.Event(), threading.Event()
        self._snapshot = snapshot
        self._error = error

    def tensors(self) -> Iterator[Any]:
        found = list(self._snapshot.tensors())
        yield from found[:1]
        self.asked.set()
        assert self.may.wait(LIMIT_S)
        if self._error is not None:
            raise self._error
        yield from found[1:]


@pytest.fixture
def policy_of(tmp_path: Path) -> Callable[..., TorchModel]:
    def made(model: Any, **options: Any) -> TorchModel:
        model.config.save_pretrained(tmp_path)
        return TorchModel(
            model_dir=tmp_path, max_context=64, device="cpu", dtype="float32", **options
        )

    return made


def scheduler_of(policy: TorchModel) -> Scheduler:
    return Scheduler(
        policy=policy,
        max_context=64,
        max_concurrent=8,
        decode=None,
        prefill_tokens=512,
        cache_bytes=1 << 24,
        least_shared=16,
    )


def reference(model: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    return logp.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).tolist()


def test_an_exchange_is_undone_by_another(model_of: Any, policy_of: Any, snapshot_of: Any):
    old, new = model_of(seed=0), model_of(seed=1)
    policy = policy_of(old)
    policy.exchange(policy.prepare(snapshot_of(old)))
    assert policy.score(PROMPT) == pytest.approx(reference(old, PROMPT), abs=1e-5)
    weights = policy.prepare(snapshot_of(new, version=1))
    assert policy.score(PROMPT) == pytest.approx(reference(old, PROMPT), abs=1e-5)
    policy.exchange(weights)
    assert policy.score(PROMPT) == pytest.approx(reference(new, PROMPT), abs=1e-5)
    policy.exchange(weights)
    assert policy.score(PROMPT) == pytest.approx(reference(old, PROMPT), abs=1e-5)


def wide(seed: int) -> Any:
    """A model whose layers are large enough to be packed."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 400, "vocab_size": 99}
    config = LlamaConfig(**shape, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("pack", [True, False])
def test_packed_layers_are_made_before_an_exchange_or_by_it(
    pack: bool, policy_of: Any, snapshot_of: Any
) -> None:
    """The second has one packed copy of the weights at a time; both say the same to the bit."""
    old, new = wide(0), wide(1)
    policy = policy_of(old)
    first = policy.prepare(snapshot_of(old), pack=pack)
    assert bool(first.forwards) is pack
    policy.exchange(first)
    before = policy.score(PROMPT)
    assert before == pytest.approx(reference(old, PROMPT), abs=1e-5)
    weights = policy.prepare(snapshot_of(new, version=1), pack=pack)
    policy.exchange(weights)
    assert policy.score(PROMPT) == pytest.approx(reference(new, PROMPT), abs=1e-5)
    policy.exchange(weights)
    assert policy.score(PROMPT) == before
    broken = policy.prepare(snapshot_of(new, version=2), pack=pack)
    nothing: Any = None
    broken.values[-1] = broken.values[-1][0], nothing
    with pytest.raises(PacelineError, match="version 2 cannot be activated"):
        policy.exchange(broken)
    assert policy.score(PROMPT) == before
    other = policy_of(old)
    other.exchange(other.prepare(snapshot_of(old), pack=not pack))
    assert other.score(PROMPT) == before


def test_weights_of_the_engines_precision_are_used_where_they_are(
    model_of: Any, policy_of: Any, snapshot_of: Any
) -> None:
    """A copy would take as much memory again, twice during a swap."""
    model = model_of()
    staging = snapshot_of(model)
    start = torch.frombuffer(staging.buffer(), dtype=torch.uint8).data_ptr()
    end = start + staging.header.num_bytes
    weights = policy_of(model).prepare(staging)
    assert all(start <= value.data_ptr() < end for _, value in weights.values)


@pytest.mark.parametrize("at", [0, 3, -1])
def test_an_exchange_that_fails_midway_leaves_the_old_version(
    at: int, model_of: Any, policy_of: Any, snapshot_of: Any, request_of: Ask
):
    old, new = model_of(seed=0), model_of(seed=1)
    scheduler = scheduler_of(policy_of(old))
    scheduler.propose(Swap(scheduler.prepare(snapshot_of(old)), Activation.IN_FLIGHT))
    scheduler.add([request_of("a", PROMPT, max_tokens=40)])
    for _ in range(5):
        scheduler.tick()
    weights = scheduler.prepare(snapshot_of(new, version=1))
    whole = list(weights.values)
    nothing: Any = None
    weights.values[at] = whole[at][0], nothing
    swap = Swap(weights, Activation.INTERRUPT)
    scheduler.propose(swap)
    scheduler.tick()
    with pytest.raises(PacelineError, match="version 1 cannot be activated"):
        swap.done.result(0)
    assert scheduler.gate.version == 0
    assert scheduler.score(PROMPT) == pytest.approx(reference(old, PROMPT), abs=1e-5)
    while scheduler.busy:
        scheduler.tick()
    scheduler.flush()
    tokens = [t for one in scheduler.out for t in one.tokens]
    got = [x for one in scheduler.out for x in one.logprobs]
    assert len(tokens) == 40
    assert got == pytest.approx(reference(old, [*PROMPT, *tokens])[4:], abs=1e-5)
    weights.values[:] = whole
    scheduler.propose(Swap(weights, Activation.IN_FLIGHT))
    scheduler.tick()
    assert scheduler.gate.version == 1
    assert scheduler.score(PROMPT) == pytest.approx(reference(new, PROMPT), abs=1e-5)


def test_a_tied_tensor_is_that_of_the_other(model_of: Any, policy_of: Any, snapshot_of: Any):
    model = model_of(seed=1)
    policy = policy_of(model)
    whole = snapshot_of(model)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"

    class Tied:
        header = dataclasses.replace(whole.header, tied=((head, embedding),))

        def __init__(self, *left_out: str) -> None:
            self._left_out = left_out

        def tensors(self) -> Iterator[Any]:
            return (pair for pair in whole.tensors() if pair[0].name not in self._left_out)

    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    policy.exchange(policy.prepare(Tied(head)))
    assert policy.score(PROMPT) == pytest.approx(reference(model, PROMPT), abs=1e-5)
    with pytest.raises(InvalidError, match="is missing"):
        policy.prepare(Tied(head, embedding))


async def test_requests_continue_while_weights_are_prepared(
    model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask
):
    async with open_torch(model_of(seed=0), **OPTIONS) as out:
        await out.run(request_of("first", [1, 2]))
        before_s = out.engine.status().swap_s
        held = Held(snapshot_of(model_of(seed=1), version=1))
        load = asyncio.ensure_future(out.engine.load(held, "interrupt"))
        await asyncio.to_thread(held.asked.wait, LIMIT_S)
        await out.run(request_of("a", [1, 2], **LONG))
        assert set(out.versions("a")) == {0}
        assert not load.done()
        assert out.engine.status().swap_s == before_s > 0  # to make them takes nobody's time
        held.may.set()
        await load
        await out.run(request_of("b", [1, 2], **LONG))
        assert set(out.versions("b")) == {1}
        assert out.engine.status().swap_s > before_s


@pytest.mark.parametrize("error", [RuntimeError("no memory"), InvalidError("no memory")])
async def test_weights_that_cannot_be_made_leave_the_old_version(
    error: Exception, model_of: Any, open_torch: Any, snapshot_of: Any, request_of: Ask
):
    model = model_of()
    async with open_torch(model, **OPTIONS) as out:
        out.engine.submit([request_of("a", [1, 2], **LONG)])
        held = Held(snapshot_of(model, version=1), error)
        held.may.set()
        with pytest.raises(PacelineError, match=r"no memory|see the log"):
            await out.engine.load(held, "in_flight")
        await out.finish(["a"])
        assert out.versions("a") == [0] * 90
        await out.engine.load(snapshot_of(model, version=2), "in_flight")
        assert out.engine.status().version == 2


async def test_a_swap_in_the_making_stays_and_of_those_behind_it_the_newest(
    model_of: Any, open_torch: Any, snapshot_of: Any
):
    model = model_of()
    async with open_torch(model) as out:
        held = {version: Held(snapshot_of(model, version=version)) for version in range(1, 8)}
        loads = {1: asyncio.ensure_future(out.engine.load(held[1], "in_flight"))}
        # Two newer ones come while one is made, and the first of them is not worth making.
        for version in (1, 3, 5):
            assert await asyncio.to_thread(held[version].asked.wait, LIMIT_S)
            for newer in (version + 1, version + 2):
                loads[newer] = asyncio.ensure_future(out.engine.load(held[newer], "in_flight"))
            with pytest.raises(StateError, match=f"superseded by version {version + 2}"):
                await loads[version + 1]
            held[version].may.set()
            await loads[version]
            assert out.engine.status().version == version
        held[7].may.set()
        await loads[7]
        assert out.engine.status().version == 7
        assert not any(held[version].asked.is_set() for version in (2, 4, 6))


def test_at_boundary_new_requests_wait_only_for_a_swap_that_is_prepared(
    model_of: Any, policy_of: Any, snapshot_of: Any, request_of: Ask
):
    old, new = model_of(seed=0), model_of(seed=1)
    scheduler = scheduler_of(policy_of(old))
    scheduler.propose(Swap(scheduler.prepare(snapshot_of(old)), Activation.IN_FLIGHT))
    swap = Swap(snapshot_of(new, version=1), Activation.AT_BOUNDARY)
    scheduler.expect(swap)
    scheduler.add([request_of("a", PROMPT, max_tokens=10)])
    scheduler.tick()
    assert scheduler.num_running == 1
    scheduler.prepared(swap, scheduler.prepare(swap.snapshot))
    scheduler.add([request_of("b", PROMPT, max_tokens=10)])
    scheduler.tick()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    while scheduler.busy:
        scheduler.tick()
    assert swap.done.result(0) is None
    found = {(one.request_id, run.version) for one in scheduler.out for run in one.versions}
    assert found == {("a", 0), ("b", 1)}


@given(st.lists(st.booleans(), max_size=60))
def test_every_started_swap_completes_however_fast_newer_ones_arrive(published: list[bool]):
    """True: a newer version is published; False: the preparation under way ends."""
    gate, line, active, made = Gate(), deque[Swap](), list[int](), list[int]()
    swaps: list[Swap] = []
    making: Swap | None = None
    for publish in [*published, False, False]:
        if publish:
            swaps.append(swap_of(len(swaps)))
            gate.expect(swaps[-1])
            line.append(swaps[-1])
        elif making is not None:
            gate.propose(making)
            making = None
            if gate.due(running=0, pinned=0):
                gate.finish()
                active.append(gate.version)
        while making is None and line:
            making = line.popleft()
            if making.done.done():
                making = None
            else:
                made.append(making.version)
    assert active == made == sorted(made)
    assert active[-1:] == [one.version for one in swaps[-1:]]
    assert all(one.done.done() for one in swaps)


def test_a_gate_that_closes_fails_all_swaps() -> None:
    gate, swaps = Gate(), [swap_of(version) for version in range(3)]
    gate.propose(swaps[0])
    for swap in swaps[1:]:
        gate.expect(swap)
    gate.give_up(swaps[1], PacelineError("no memory"))
    gate.close(PacelineError("closing"))
    assert [str(swap.done.exception(0)) for swap in swaps] == ["closing", "no memory", "closing"]
    assert gate.pending is None


def swap_of(version: int) -> Swap:
    """One of which only the version matters."""
    return Swap(SimpleNamespace(header=SimpleNamespace(version=version)), Activation.IN_FLIGHT)


async def test_closing_does_not_wait_for_a_swap(model_of: Any, open_torch: Any, snapshot_of: Any):
    model = model_of()
    async with open_torch(model) as out:
        held = Held(snapshot_of(model, version=1))
        load = asyncio.ensure_future(out.engine.load(held, "in_flight"))
        await asyncio.to_thread(held.asked.wait, LIMIT_S)
        closing = asyncio.ensure_future(out.engine.close())
        with pytest.raises(PacelineError, match="closing"):
            await load
        held.may.set()
        await closing
